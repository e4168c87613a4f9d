"""A node of simulated GPUs, in a folder."""

from __future__ import annotations

import os
from pathlib import Path

from rl_grpo.problem import Problem

DRIVER = "SUBLET_TEST_SIMCUDA_DIR"
_VERSION = 13000


def make(folder: Path, gpus: int, gpu_bytes: int, context_bytes: int) -> dict[str, str]:
    """Makes a node in `folder`, which must not be there yet; the environment that leads processes to it."""
    driver = os.environ.get(DRIVER)
    if driver is None or not (Path(driver) / "libcuda.so.1").is_file():
        raise Problem(f"--simulate needs the simulated driver: run `cargo rl-demo`, or set {DRIVER} to its folder")
    for place in [*(f"dev{number}" for number in range(gpus)), "host"]:
        (folder / place).mkdir(parents=True)
        (folder / place / "ledger").write_bytes(bytes(8))
    sizes = " ".join([str(gpu_bytes)] * gpus)
    # Last, and in one step: a node that can be opened is complete.
    part = folder / "node.conf.new"
    part.write_text(f"id = {os.urandom(16).hex()}\nversion = {_VERSION}\ncapacities_bytes = {sizes}\n")
    part.rename(folder / "node.conf")
    return {"SIMCUDA_NODE": str(folder), "LD_LIBRARY_PATH": driver, "SIMCUDA_CONTEXT_BYTES": str(context_bytes)}
