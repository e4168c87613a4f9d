"""Starts the tenants with PyTorch."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from rl.arguments import SHAPES, Options
from rl.teams import Team

_FAMILY = "rl"
#: Of a number, by device.
_BYTES = {"cuda": 2, "cpu": 4}


def weights_bytes(shape: str, device: str) -> int:
    """About, and at most: what a file of the weights takes."""
    hidden, layers, heads, kv_heads, inner = SHAPES[shape]
    each = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * kv_heads + 3 * hidden * inner
    return _BYTES[device] * (layers * each + 512 * hidden) * 5 // 4 + (512 << 20)


class RealJobs:
    """Both tenants on the first `--gpus` GPUs."""

    def __init__(self, options: Options) -> None:
        self._options = options
        folders = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder), "PYTHONUNBUFFERED": "1"}
        # Set by the process that starts us, where that is one of a job itself.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SUBLET_TENANT", "SUBLET_FAMILY"):
            self._environment.pop(name, None)

    def train(self, mode: str, work: Path) -> Team:
        options = self._options
        port = random.randrange(20_000, 30_000)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.gpus), "--master-port", str(port),
            "-m", "rl.real.trainer", "--shape", options.shape, "--device", options.device, "--out", str(work / "trainer"),
            "--steps", str(options.steps), "--tokens", str(options.tokens), "--generations", str(options.generations),
            "--seed", str(options.seed), "--micro-batch", str(options.micro_batch),
        ]  # fmt: skip
        return Team("train", options.gpus, [self._under("train", command)], self._environment, work, options.deadline_s)

    def infer(self, mode: str, work: Path) -> Team:
        options = self._options
        command = [
            sys.executable, "-m", "rl.real.generator", "--shape", options.shape, "--device", options.device,
            "--tokens", str(options.tokens), "--generations", str(options.generations), "--kv-gib", str(options.kv_gib),
        ]  # fmt: skip
        if mode == "sublet":
            command.append("--tags")
        commands = [self._under("infer", command)] * options.gpus
        return Team("infer", options.gpus, commands, self._environment, work, options.deadline_s)

    def _under(self, tenant: str, command: list[str]) -> list[str]:
        # Every mode runs under Sublet on GPUs, so that all are looked at in the same way.
        if self._options.device == "cpu":
            return command
        return [sys.executable, "-m", "sublet", "run", "--join", "--tenant", tenant, "--family", _FAMILY, "--", *command]
