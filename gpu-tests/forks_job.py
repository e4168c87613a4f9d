"""Do children of a process that has opened libraries work as without Sublet?

A table: what the parent has opened (NVML, the driver, the runtime, cuBLAS, NCCL, PyTorch, a count of devices by PyTorch), what the
child uses (driver, runtime, PyTorch), how the child is made (fork, vfork, posix_spawn, Python's fork server). Each cell runs alone
and under `sublet run`, and must print the same. Then: is the driver's list of refused calls (CUDA_LOG_FILE) the same too?

Bound: a child that imports PyTorch takes some 5 s; the table has 96 cells, run 16 at a time: a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cli
from common import Result
from suite import main, options

PROGRAM = Path(__file__).parent / "programs" / "forks.py"
BEFORE = ("nothing", "nvml", "driver", "runtime", "cublas", "nccl", "torch", "count")
USES = ("driver", "runtime", "torch")
HOWS = ("fork", "vfork", "spawn", "forkserver")
CELL_S = 75
#: Cells at the same time.
WIDTH = 16

parse = options(__doc__, None)


def comparable(text: str) -> str:
    """The output without what differs from run to run: Python's warning of a fork, and the note of a tenant."""
    lines = [line for line in text.splitlines() if re.match(r"(ended|nothing|nvml|True|torch|devices|driver|runtime|NOT RUN)", line)]
    return "\n".join(lines)


def run_cell(words: tuple[str, str, str], with_us: bool, work: Path, log: Path | None = None) -> str:
    """What the program prints, with Sublet or without."""
    name = "-".join(words)
    environment = {**os.environ, "SUBLET_RUN_DIR": str(work / "run")}
    if log is not None:
        environment["CUDA_LOG_FILE"] = str(log)
    command = [sys.executable, str(PROGRAM), *words]
    command = cli.tenant_command(f"fork-{name}" if with_us else None, command)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CELL_S, check=False)
    except subprocess.TimeoutExpired:
        return "deadline"
    return comparable(done.stdout + done.stderr) + ("" if done.returncode == 0 else f"\nreturned {done.returncode}")


def refusals(log: Path) -> list[str]:
    """The refused calls that the driver has written down, without times and process ids."""
    text = log.read_text() if log.is_file() else ""
    return [re.sub(r"^(\[[^]]*\])+", "", line) for line in text.splitlines()]


def body(args: Any, result: Result, work: Path) -> None:
    """The table."""
    (work / "run").mkdir(mode=0o700)
    cells = [(before, use, how) for before in BEFORE for use in USES for how in HOWS]
    with ThreadPoolExecutor(WIDTH) as pool:
        alone = dict(zip(cells, pool.map(lambda cell: run_cell(cell, False, work), cells), strict=True))
        ours = dict(zip(cells, pool.map(lambda cell: run_cell(cell, True, work), cells), strict=True))
    result.data["cells"] = {" ".join(cell): {"alone": alone[cell], "sublet": ours[cell]} for cell in cells}
    different = [cell for cell in cells if alone[cell] != ours[cell]]
    not_run = [cell for cell in cells if "NOT RUN" in alone[cell]]
    ended = [cell for cell in cells if "ended 0" in alone[cell]]
    result.check(
        f"{len(cells)} cells print the same", not different, "; ".join(" ".join(cell) for cell in different[:6])
    )
    # A library that starts the driver in the parent makes a fork useless without Sublet too.
    result.check("most cells end well without Sublet", len(ended) >= len(cells) * 3 // 4, f"{len(ended)} of {len(cells)}")
    result.data["not_run"] = [" ".join(cell) for cell in not_run]
    lists = {}
    for name, with_us in (("alone", False), ("sublet", True)):
        log = work / f"{name}.log"
        run_cell(("nvml", "runtime", "fork"), with_us, work, log)
        lists[name] = refusals(log)
    result.data["refused"] = lists
    result.check("the driver's list of refused calls is the same", lists["alone"] == lists["sublet"], str(lists)[:400])


if __name__ == "__main__":
    main(parse, "forks", body)
