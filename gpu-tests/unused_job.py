"""What does it save to give back, without copying, memory that torch has cached and nobody uses?

A process has `--live-gb` GB in use and `--cached-gb` GB cached by torch's allocator: most of it as whole segments, some
as the gaps between blocks in use. It is paused by the command, by turns as a program without the package, all of whose memory is
saved, and as one with it, where the pause asks torch. Values in use must be exact after each, and memory that was not
saved must be usable. Also: what asking costs with 10,000 blocks.

Bound: 10 GB at 55 GB/s are 0.18 s each way; asking takes some 20 ms. The run is one start of torch and some 15 s.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result
from phases import copied_bytes
from suite import main, options, role_of

GB = 10**9
PART = 32 * common.MIB
ROUNDS = 3

parse = options(__doc__, 90, live_gb=2.0, cached_gb=10.0, role=role_of("tenant"))


def make(args: Any) -> tuple[list[Any], list[int]]:
    """Tensors in use with memory cached around them, and what each holds."""
    import torch

    cached = [torch.empty(PART, dtype=torch.uint8, device="cuda:0") for _ in range(round(args.cached_gb * GB / PART))]
    live = [torch.empty(PART, dtype=torch.uint8, device="cuda:0") for _ in range(round(args.live_gb * GB / PART))]
    # Blocks of one segment, every other of which is freed: 6 MiB are served from segments of 20 MiB.
    mixed = [torch.empty(6 * common.MIB, dtype=torch.uint8, device="cuda:0") for _ in range(60)]
    live += mixed[::2]
    for number, tensor in enumerate(live):
        tensor.fill_(number % 251)
    for tensor in cached:
        tensor.fill_(255)
    torch.cuda.synchronize()
    return live, [number % 251 for number in range(len(live))]


def checks(torch: Any, live: list[Any], values: list[int]) -> tuple[int, bool]:
    """How many tensors in use are wrong, and whether cached memory can be used."""
    wrong = sum(not bool((tensor == value).all()) for tensor, value in zip(live, values, strict=True))
    again = torch.ones(PART, dtype=torch.uint8, device="cuda:0")
    return wrong, int(again.sum().item()) == again.numel()


def tenant(args: Any) -> None:
    """The process under `sublet run`."""
    import sublet
    import torch
    from sublet import _adapter, _library, _torch

    live, values = make(args)
    # What the checks below take for themselves is taken once, and stays with torch.
    checks(torch, live, values)
    reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.fact("cached_bytes", reserved - used)
    for number in range(2 * ROUNDS):
        asks = number % 2 == 1
        # What the package does by itself, and what a program without the package has.
        _library.own_library().set_unused_source(_adapter._unused_blocks if asks else None)
        told = cli.sublet("pause", os.environ["SUBLET_TENANT"], "--json", timeout_s=30)
        if told["exit"] != 0:
            raise JobError(cli.say(told))
        report, pause_s = told.get("json"), told["wall_s"]
        began = time.perf_counter()
        sublet.resume()
        name = "asked" if asks else "plain"
        runner.sample(f"{name}_pause_s", pause_s)
        runner.sample(f"{name}_resume_s", time.perf_counter() - began)
        runner.sample(f"{name}_saved_gb", copied_bytes(report) / GB)
        wrong, usable = checks(torch, live, values)
        runner.row(
            f"{name} {number // 2}: values in use exact, cached memory usable", wrong == 0 and usable, f"{wrong} wrong"
        )
    now = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    detail = f"reserved {reserved} then {now[0]}, allocated {used} then {now[1]} bytes"
    runner.row("torch's statistics are as before", (reserved, used) == now, detail)
    del live
    many = [torch.empty(65536, dtype=torch.uint8, device="cuda:0") for _ in range(20_000)]
    del many[::2]
    for _ in range(5):
        began = time.perf_counter()
        ranges = _torch.unused_blocks(None)
        runner.sample("ask_ms", 1000 * (time.perf_counter() - began))
    runner.row("10,000 gaps are found", len(ranges) >= 9_000, f"{len(ranges)} ranges")


def body(args: Any, result: Result, work: Path) -> None:
    """The process, then the table."""
    common.touch_host_memory(1.3 * (args.live_gb + args.cached_gb))
    command = [__file__, "--role", "tenant", "--live-gb", str(args.live_gb), "--cached-gb", str(args.cached_gb)]
    site = runner.package(work, "sublet")
    child = runner.Child(work, "unused", command, tenant=f"unused-{os.getpid()}", sites=[site])
    facts = child.finish(result, args.deadline - 10, prefix="unused")
    samples = result.data["samples"]

    def middle(name: str) -> float:
        return common.summarise(samples.get(f"unused_{name}", []))["median"] or 0.0

    spared = middle("plain_saved_gb") - middle("asked_saved_gb")
    wanted = 0.9 * facts.get("cached_bytes", 0) / GB
    result.check("what is cached is not copied", spared >= wanted > 0, f"{spared:.2f} GB spared, {wanted:.2f} wanted")
    runner.verdicts(result)
    print()
    rows: list[tuple[str, ...]] = [("median", "pause s", "resume s", "copied GB")]
    for label, name in (("all saved", "plain"), ("cached given back", "asked")):
        rows.append((label, *(f"{middle(f'{name}_{kind}'):.3f}" for kind in ("pause_s", "resume_s", "saved_gb"))))
    runner.table(rows)
    print(f"asking torch with 10,000 gaps: {middle('ask_ms'):.1f} ms", flush=True)


if __name__ == "__main__":
    main(parse, "unused", body, {"tenant": tenant})
