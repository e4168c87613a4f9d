"""A node of the simulated driver that several processes share, for rehearsals and for counting driver calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

#: The version that its driver claims.
VERSION = 13000


def make(folder: Path, capacities_bytes: Sequence[int]) -> dict[str, str]:
    """Makes a node in `folder`, which must not be there yet, with one device per capacity; the environment that leads
    processes to it."""
    for place in [*(f"dev{number}" for number in range(len(capacities_bytes))), "host"]:
        (folder / place).mkdir(parents=True)
        (folder / place / "ledger").write_bytes(bytes(8))
    sizes = " ".join(str(size) for size in capacities_bytes)
    lines = [f"id = {os.urandom(16).hex()}", f"version = {VERSION}", f"capacities_bytes = {sizes}"]
    # Last, and in one step: a node that can be opened is complete.
    (folder / "node.conf.new").write_text("\n".join(lines) + "\n")
    (folder / "node.conf.new").rename(folder / "node.conf")
    return {"SIMCUDA_NODE": str(folder)}
