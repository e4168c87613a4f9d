"""Starts the simulated tenants."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import sim_node
from rl.arguments import Options
from rl.problem import Problem
from rl.teams import Team

DRIVER = "SUBLET_TEST_SIMCUDA_DIR"

_MIB = 1 << 20
CONTEXT_BYTES = 4 * _MIB
WEIGHTS_BYTES, CACHES_BYTES, GRAPHS_BYTES, KV_BYTES = 8 * _MIB, 14 * _MIB, 4 * _MIB, 64 * _MIB
#: Seconds that a turn lasts at least, so that there is something to see.
_TRAIN_S, _GENERATE_S = 0.2, 0.4
_FAMILY = "rl"


class SimulatedJobs:
    """Both tenants on one node of simulated GPUs, in folders under `place`."""

    def __init__(self, options: Options, place: Path) -> None:
        self._options = options
        driver = os.environ.get(DRIVER)
        if driver is None or not (Path(driver) / "libcuda.so.1").is_file():
            raise Problem(f"--simulate needs the simulated driver: put `cargo xtask built --python` before it, or set {DRIVER} to its folder")
        #: Where the driver and its devices are: commands of Sublet that call the driver themselves need it too.
        self.driver = {**sim_node.make(place / "node", [options.gpu_mib * _MIB] * options.gpus), "LD_LIBRARY_PATH": driver}
        self._environment = {
            **os.environ, **self.driver, "SIMCUDA_CONTEXT_BYTES": str(CONTEXT_BYTES), "SUBLET_FILE_DIR": str(place),
        }  # fmt: skip
        for name in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "SUBLET_TENANT", "SUBLET_FAMILY", "SUBLET_BUDGET"):
            self._environment.pop(name, None)
        # Memory of a device is the examples'.
        here = Path(__file__).resolve().parents[2]
        folders = [str(here), str(here.parent / "examples"), os.environ.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)

    def train(self, mode: str, work: Path) -> Team:
        options = self._options
        numbers: dict[str, float] = {
            "steps": options.steps, "generations": options.generations, "weights-bytes": WEIGHTS_BYTES,
            "caches-bytes": CACHES_BYTES, "context-bytes": CONTEXT_BYTES, "train-s": _TRAIN_S,
        }  # fmt: skip
        return self._team("train", numbers, work)

    def infer(self, mode: str, work: Path) -> Team:
        numbers = {
            "weights-bytes": WEIGHTS_BYTES, "graphs-bytes": GRAPHS_BYTES, "kv-bytes": KV_BYTES,
            "context-bytes": CONTEXT_BYTES, "generate-s": _GENERATE_S,
        }  # fmt: skip
        return self._team("infer", numbers, work)

    def _team(self, role: str, numbers: dict[str, float], work: Path) -> Team:
        module = {"train": "rl.simulated.trainer", "infer": "rl.simulated.generator"}[role]
        words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "sublet", "run", "--join", "--tenant", role, "--family", _FAMILY, "--", sys.executable]
        commands = [[*command, "-m", module, *words]] * self._options.gpus
        return Team(role, self._options.gpus, commands, self._environment, work, self._options.deadline_s)
