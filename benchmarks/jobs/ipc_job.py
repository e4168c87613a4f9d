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

import common
import subletapi
from common import JobError, Result

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
    print(f"row shared {total == WORDS} {total}", flush=True)
    for cycle in range(CYCLES):
        for action in ("pause", "resume"):
            told = subletapi.sublet(action, os.environ["SUBLET_TENANT"], timeout_s=30)
            print(f"row {action}-{cycle} {told['exit'] == 0} {subletapi.say(told)[:200] if told['exit'] else ''}", flush=True)
        tensor.add_(1)
        torch.cuda.synchronize()
        asks.put(True)
        total, now = answers.get(timeout=60)
        right = total == WORDS * (cycle + 2) and now == address
        print(f"row reader-sees-cycle-{cycle} {right} sum {total} address same {now == address}", flush=True)
    asks.put(False)
    child.join(timeout=20)
    print(f"row reader-ended {child.exitcode == 0} exit {child.exitcode}", flush=True)
    return 0


def body_of(args: Any):
    """The job."""

    def body(result: Result, work: Path) -> None:
        log_path = work / "owner.log"
        command = [sys.executable, __file__, "--role", "owner"]
        child = common.spawn(subletapi.tenant_command(f"ipc-{os.getpid()}", command), common.child_env(), log_path)
        try:
            child.wait(timeout=args.deadline - 10)
        except Exception as error:
            raise JobError(f"the owner did not end: {log_path.read_text(errors='replace')[-1500:]}") from error
        text = log_path.read_text(errors="replace")
        rows = [line.split(" ", 3)[1:] for line in text.splitlines() if line.startswith("row ")]
        for row in rows:
            result.check(row[0], row[1] == "True", row[2] if len(row) > 2 else "")
        result.check("all rows came", len(rows) == 2 + 3 * CYCLES, text[-800:] if len(rows) < 2 + 3 * CYCLES else "")

    return body


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    if arguments.role == "owner":
        sys.exit(owner())
    sys.exit(common.run_job(arguments, "ipc_shared_tensor", body_of(arguments)))
