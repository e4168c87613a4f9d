"""Where a test's processes meet: a run directory, and the programs in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from worker import Worker

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 120.0


class Stage:
    """A run directory, and the programs that meet there."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self._workers: list[Worker] = []

    def environment(self) -> dict[str, str]:
        """What a program needs to find the simulated driver and the run directory."""
        simcuda = os.environ.get("SUBLET_TEST_SIMCUDA_DIR")
        if simcuda is None:
            pytest.fail("SUBLET_TEST_SIMCUDA_DIR is not set: run `cargo xtask test`")
        changed = {"LD_LIBRARY_PATH": simcuda, "SUBLET_RUN_DIR": self.run_dir}
        kept = {name: value for name, value in os.environ.items() if name not in _OURS}
        return {**kept, **changed}

    def run(self, *arguments: str, tenant: Optional[str] = None) -> subprocess.CompletedProcess[str]:
        """Runs Python with these arguments to its end, as a process of `tenant`."""
        command = [*python(tenant), *arguments]
        return subprocess.run(
            command, env=self.environment(), cwd=FOLDER, text=True, capture_output=True, timeout=TIMEOUT_S
        )

    def worker(self, tenant: Optional[str], **variables: str) -> Worker:
        """A process that does what it is told; under Sublet when it has a tenant."""
        environment = {**self.environment(), **variables}
        worker = Worker([*python(tenant), str(FOLDER / "worker.py")], environment, TIMEOUT_S)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.close()


_OURS = {
    "LD_PRELOAD",
    "SUBLET_TENANT",
    "SUBLET_FAMILY",
    "SUBLET_LAUNCH",
    "SUBLET_CHANGES",
    "SUBLET_TURNS",
    "SUBLET_LOG",
    "SUBLET_HOST_BYTES_MAX",
    "SUBLET_PREPARE",
    "CUDA_VISIBLE_DEVICES",
}


def simulated_node(folder: Path, *gpu_bytes: int) -> dict[str, str]:
    """A node of its own with GPUs of these sizes, and the variable that leads processes to it."""
    for place in [*(f"dev{number}" for number in range(len(gpu_bytes))), "host"]:
        (folder / place).mkdir(parents=True)
        (folder / place / "ledger").write_bytes(bytes(8))
    sizes = " ".join(map(str, gpu_bytes))
    (folder / "node.conf").write_text(f"id = {os.urandom(16).hex()}\nversion = 13000\ncapacities_bytes = {sizes}\n")
    return {"SIMCUDA_NODE": str(folder)}


def python(tenant: Optional[str]) -> list[str]:
    """The command line of this Python, as a process of `tenant`."""
    if tenant is None:
        return [sys.executable]
    return [sys.executable, "-m", "sublet", "run", "--join", "--tenant", tenant, "--", sys.executable]
