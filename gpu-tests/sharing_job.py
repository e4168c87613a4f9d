"""Do tensors that two processes share follow their owner's pauses?

A process shares tensors with another by torch.multiprocessing; both are one tenant. Among them are views that begin in
the middle of a block, small ones that lie in one segment, and an event. The owner pauses and resumes, writes, records
the event; the reader waits for the event on the device and must read the new values at the addresses it has had all
along. It writes too, and the owner must see that. The pauses are of the whole tenant, by the command, and by tag, from
inside. Once with torch's ordinary segments and once with expandable ones.

Bound: 260 MiB over the link, 5 ms each way; the run is four starts of Python with torch, some 40 s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result
from suite import main, options, role_of

ALLOCATORS = ("native", "expandable")
BIG_WORDS, SMALL_WORDS = 64 << 20, 3 << 10
TAG = "shared"

parse = options(__doc__, 110, cycles=(3, "of each kind of pause"), role=role_of("owner"))


# ---------------------------------------------------------------- the two processes


def reader(inbox: Any, outbox: Any) -> None:
    """The other process. For each question: wait for the event, then sums, addresses; then add 1 to one tensor."""
    runner.begin(100)
    import torch

    tensors, event_handle = inbox.get(timeout=60)
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), event_handle)
    outbox.put("ready")
    while inbox.get(timeout=60):
        event.wait()
        sums = {name: int(tensor.long().sum().item()) for name, tensor in tensors.items()}
        places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        tensors["written back"].add_(1)
        torch.cuda.synchronize()
        outbox.put((sums, places))
    del tensors, event


class Owner:
    """The process that made the memory."""

    def __init__(self) -> None:
        import sublet
        import torch
        import torch.multiprocessing as mp

        self.sublet, self.torch = sublet, torch
        context = mp.get_context("spawn")
        self.outbox, self.inbox = context.Queue(), context.Queue()
        self.child = context.Process(target=reader, args=(self.outbox, self.inbox), daemon=True)
        self.child.start()
        with sublet.region(TAG):
            big = torch.ones(BIG_WORDS, dtype=torch.int32, device="cuda:0")
            small = [torch.full((SMALL_WORDS,), number, dtype=torch.int32, device="cuda:0") for number in range(4)]
            back = torch.zeros(SMALL_WORDS, dtype=torch.int32, device="cuda:0")
        self.tensors = {
            "whole": big,
            "view into it": big[BIG_WORDS // 3 : BIG_WORDS // 2],
            "strided view": big[1 :: 1 << 12],
            **{f"small {number}": tensor for number, tensor in enumerate(small)},
            "written back": back,
        }
        self.event = torch.cuda.Event(interprocess=True)
        self.event.record()
        self.outbox.put((self.tensors, self.event.ipc_handle()))
        self.asked = 0
        self.places: dict[str, int] | None = None
        if self.inbox.get(timeout=80) != "ready":
            raise JobError("the reader did not start")

    def check(self, label: str) -> None:
        """Asks the reader, and compares with what is here."""
        expected = {name: int(tensor.long().sum().item()) for name, tensor in self.tensors.items()}
        self.outbox.put(True)
        sums, places = self.inbox.get(timeout=40)
        self.places = self.places or places
        wrong = [name for name, value in sums.items() if value != expected[name]]
        moved = [name for name, place in places.items() if place != self.places[name]]
        self.asked += 1
        back = int(self.tensors["written back"].sum().item()) == self.asked * SMALL_WORDS
        detail = "; ".join(f"{what}: {names}" for what, names in (("wrong", wrong), ("moved", moved)) if names)
        runner.row(
            f"{label}: reader sees the values, owner what it wrote",
            not detail and back,
            detail or f"written back {back}",
        )

    def write(self, number: int) -> None:
        """New values, behind the event."""
        self.tensors["whole"].add_(number)
        for name, tensor in self.tensors.items():
            if name.startswith("small"):
                tensor.mul_(3)
        self.event.record()

    def whole(self, action: str) -> str:
        """By the command, from outside of this process."""
        told = cli.sublet(action, os.environ["SUBLET_TENANT"], timeout_s=30)
        return "" if told["exit"] == 0 else cli.say(told)

    def by_tag(self, action: str) -> str:
        """From inside, this process's memory alone."""
        function = self.sublet.pause if action == "pause" else self.sublet.resume
        try:
            function(tags=TAG, timeout=20)
        except self.sublet.Error as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def run(self, cycles: int) -> None:
        self.check("before")
        for kind, act in (("whole tenant", self.whole), ("by tag", self.by_tag)):
            for cycle in range(cycles):
                before = self.torch.cuda.mem_get_info()[0]
                failed = act("pause")
                if act == self.by_tag and not failed:  # while all of it is paused, this call would wait
                    freed = (self.torch.cuda.mem_get_info()[0] - before) / common.MIB
                    runner.row(f"{kind} {cycle}: memory is free", freed >= 256, f"{freed:.0f} MiB")
                failed = failed or act("resume")
                runner.row(f"{kind} {cycle}: pause and resume", not failed, failed)
                if failed:
                    return
                self.write(cycle + 2)
                self.check(f"{kind} {cycle}")
        self.outbox.put(False)
        self.child.join(timeout=20)
        runner.row("reader ended", self.child.exitcode == 0, f"exit {self.child.exitcode}")


# ---------------------------------------------------------------- the job


def body(args: Any, result: Result, work: Path) -> None:
    """One allocator after the other: what a pause frees is read from the device."""
    site = runner.package(work, "sublet")
    for allocator in ALLOCATORS:
        conf = f"expandable_segments:{allocator == 'expandable'}"
        env = {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}
        command = [__file__, "--role", "owner", "--cycles", str(args.cycles)]
        tenant = f"sharing-{allocator}-{os.getpid()}"
        child = runner.Child(work, allocator, command, tenant=tenant, sites=[site], env=env)
        child.finish(result, args.deadline / 2 - 5)
    runner.verdicts(result)


if __name__ == "__main__":
    main(parse, "sharing", body, {"owner": lambda args: Owner().run(args.cycles)})
