"""The three policies for contents side by side: what does each cost, and is everything right after it?

A process has `--gb` GB in each of three regions, kept in host memory, saved to a file and discarded, and pauses and resumes
each by its tag, `--cycles` times, then all of them together. Every word of what is not discarded is checked on the
device after each resume, and some saved bytes while the memory is away. To compare: the same bytes written to a file of
the same folder and read again, by plain calls with the page cache dropped.

Bound: 4 GB at 55 GB/s are 0.07 s each way; at the 3 GB/s of a local disk 1.3 s. The run is one start of torch and some
30 s.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import runner
from common import Result
from suite import main, options, role_of

GB = 10**9
PART = 64 * common.MIB
POLICIES = ("keep", "file", "discard")

parse = options(
    __doc__, 90, gb=4.0, cycles=3, dir=(Path(tempfile.gettempdir()), "where contents in files go"), role=role_of("tenant"),
)


class Memory:
    """Tensors of the three regions, and what they hold."""

    def __init__(self, args: Any) -> None:
        import sublet
        import torch
        from checksum import Checksum

        self.torch, self.sublet = torch, sublet
        count = max(1, round(args.gb * GB / PART))
        self.parts: dict[str, list[Any]] = {}
        for policy in POLICIES:
            with sublet.region(policy, policy):
                self.parts[policy] = [torch.empty(PART, dtype=torch.uint8, device="cuda:0") for _ in range(count)]
        for seed, part in enumerate(part for parts in self.parts.values() for part in parts):
            generator = torch.Generator(device="cuda:0").manual_seed(seed)
            part.view(torch.int64).random_(generator=generator)
        self.checksum = Checksum(torch, torch.device("cuda:0"))
        self.sums = {policy: [self.checksum.of(part) for part in self.parts[policy]] for policy in ("keep", "file")}
        self.size_bytes = count * PART
        self.head = {policy: bytes(self.parts[policy][0][:64].tolist()) for policy in ("keep", "file")}

    def wrong(self) -> int:
        """Tensors that do not hold what they did."""
        now = {policy: [self.checksum.of(part) for part in self.parts[policy]] for policy in self.sums}
        return sum(before != after for policy, sums in self.sums.items() for before, after in zip(sums, now[policy], strict=True))

    def saved_is_wrong(self, tags: list[str]) -> int:
        """Of the saved bytes that are looked at."""
        paused = [policy for policy in self.head if policy in tags]
        saved = {policy: self.sublet.host_copy(self.parts[policy][0])[:64] for policy in paused}
        return sum(bytes(saved[policy].tolist()) != self.head[policy] for policy in paused)


def tenant(args: Any) -> None:
    """The process under `sublet run`."""
    import sublet

    sublet.set_file_dir(args.dir)
    memory = Memory(args)
    runner.fact("bytes_of_each", memory.size_bytes)
    wrong = 0
    for tags in ([policy] for policy in POLICIES), (list(POLICIES),):
        for names in tags:
            label = names[0] if len(names) == 1 else "all"
            for _ in range(args.cycles):
                for action in (sublet.pause, sublet.resume):
                    began = time.perf_counter()
                    action(tags=names)
                    runner.sample(f"{label}_{action.__name__}_s", time.perf_counter() - began)
                    if action is sublet.pause:
                        wrong += memory.saved_is_wrong(names)
                wrong += memory.wrong()
    runner.row("contents exact after each resume, and as saved", wrong == 0, f"{wrong} wrong")
    left = sublet.stats()["pool"]["file_bytes"]
    runner.row("no disk space is held after the last resume", left == 0, f"{left} bytes")
    plain(args.dir, memory.size_bytes)


def plain(folder: Path, size_bytes: int) -> None:
    """Plain writes and reads of one file."""
    piece = os.urandom(PART)
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        began = time.perf_counter()
        for _ in range(size_bytes // PART):
            os.write(descriptor, piece)
        os.fdatasync(descriptor)
        runner.sample("plain_write_s", time.perf_counter() - began)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(descriptor, PART):
            pass
        runner.sample("plain_read_s", time.perf_counter() - began)


def body(args: Any, result: Result, work: Path) -> None:
    """One process, then the table."""
    common.touch_host_memory(1.5 * args.gb)
    command = [__file__, "--role", "tenant", "--gb", str(args.gb), "--cycles", str(args.cycles), "--dir", str(args.dir)]
    site = runner.package(work, "sublet")
    child = runner.Child(work, "contents", command, tenant=f"contents-{os.getpid()}", sites=[site])
    size_bytes = child.finish(result, args.deadline - 10, prefix="contents").get("bytes_of_each", 0)
    runner.verdicts(result)

    def rate(name: str, times: int = 1) -> str:
        values = result.data["samples"].get(f"contents_{name}", [])
        middle = common.summarise(values)["median"]
        return f"{times * size_bytes / middle / GB:.2f}" if middle else "-"

    print()
    rows: list[tuple[str, ...]] = [("GB/s of what leaves", "out", "in")]
    rows += [(policy, rate(f"{policy}_pause_s"), rate(f"{policy}_resume_s")) for policy in POLICIES]
    rows.append(("all three together", rate("all_pause_s", 3), rate("all_resume_s", 3)))
    rows.append(("plain file", rate("plain_write_s"), rate("plain_read_s")))
    runner.table(rows)


if __name__ == "__main__":
    main(parse, "contents", body, {"tenant": tenant})
