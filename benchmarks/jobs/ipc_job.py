"""Does memory shared by `cudaIpc` follow its owner's pauses?

One process allocates a tensor and shares it with another by torch.multiprocessing; both are one tenant. The tenant is
paused and resumed, the owner writes new values, and the reader must see them, at the address it has had all along.
Bound: 256 MiB over the link, 5 ms each way; the run is the start of two Python processes with torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import Result

WORDS = 64 << 20
CYCLES = 3


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=90)
    parser.add_argument("--role", choices=["owner"], help="used by the job itself")
    return parser.parse_args(argv)


def reader(tensors: Any, asks: Any, answers: Any) -> None:
    """The other process: opens the tensor once, then reports sum and address whenever asked."""
    tensor = tensors.get(timeout=60)
    while asks.get(timeout=60):
        answers.put((int(tensor.sum().item()), tensor.data_ptr()))
    del tensor


def owner() -> int:
    """The process under `sublet run`: shares, pauses the tenant with the command, writes, asks the reader."""
    runner.begin(100)
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    tensors, asks, answers = context.Queue(), context.Queue(), context.Queue()
    child = context.Process(target=reader, args=(tensors, asks, answers), daemon=True)
    child.start()
    tensor = torch.ones(WORDS, dtype=torch.int32, device="cuda")
    tensors.put(tensor)
    asks.put(True)
    total, address = answers.get(timeout=60)
    runner.row("shared", total == WORDS, str(total))
    for cycle in range(CYCLES):
        for action in ("pause", "resume"):
            told = cli.sublet(action, os.environ["SUBLET_TENANT"], timeout_s=30)
            runner.row(f"{action}-{cycle}", told["exit"] == 0, cli.say(told) if told["exit"] else "")
        tensor.add_(1)
        torch.cuda.synchronize()
        asks.put(True)
        total, now = answers.get(timeout=60)
        right = total == WORDS * (cycle + 2) and now == address
        runner.row(f"reader-sees-cycle-{cycle}", right, f"sum {total} address same {now == address}")
    asks.put(False)
    child.join(timeout=20)
    runner.row("reader-ended", child.exitcode == 0, f"exit {child.exitcode}")
    return 0


def body(args: Any, result: Result, work: Path) -> None:
    """The job."""
    child = runner.Child(work, "owner", [__file__, "--role", "owner"], tenant=f"ipc-{os.getpid()}")
    child.finish(result, args.deadline - 10)
    rows = [said for said in child.said() if said["kind"] == "row"]
    result.check("all rows came", len(rows) == 2 + 3 * CYCLES, f"{len(rows)} rows")


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    if arguments.role == "owner":
        sys.exit(owner())
    sys.exit(common.run_job(arguments, "ipc_shared_tensor", body))
