"""What does Sublet cost a call, to within a hundredth?

A hooked and an unhooked job live side by side on the same GPUs and take turns: every round measures each once, and the
order flips, so that whatever drifts falls on both. Measured are launches a second (a torch operation, a graph of one
kernel), all-reduce calls a second of 8 bytes and 1 KiB, and launches of a graph with all-reduces in it. A figure is
the median of the rounds' ratios, hooked to unhooked, with the range that holds it in 95 of 100 cases.

Bound: an open gate is an exchange and a load on the thread's own cache line, counting a collective a few more: some
20 ns of a call that costs the host 5 us and more, so under 0.5%.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import common
from common import Result
from observer import observed
from rank import NcclRanks

SIZES_BYTES = [8, 1024]
GOAL = 0.99


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=200)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--launches", type=int, default=20_000, help="launches a sample")
    parser.add_argument("--calls", type=int, default=4_000, help="all-reduces a sample")
    return parser.parse_args(argv)


def start(args: Any, result: Result, work: Path, world: int, tenant: str | None) -> NcclRanks:
    """One of the two jobs, with a communicator."""
    label = "hooked" if tenant else "unhooked"
    ranks = NcclRanks(result, work, label, world, tenant, life_s=args.deadline)
    ranks.call("messages", 60, words=[1024])
    ranks.call("connect", 90)
    ranks.step(90)
    return ranks


def measure(args: Any, ranks: NcclRanks) -> dict[str, float]:
    """Every figure once; of all ranks the slowest."""
    rates = ranks.call("launches", 60, ranks=[0], count=args.launches, repeats=1)[0]
    figures = {"torch_launches_per_s": rates["op_per_s"][0]}
    if rates["graph_per_s"]:  # a rehearsal without a GPU has no graphs
        figures["graph_launches_per_s"] = rates["graph_per_s"][0]
    replies = ranks.call("calls", 60, sizes_bytes=SIZES_BYTES, count=args.calls)
    return figures | {name: min(reply[name] for reply in replies) for name in replies[0]}


def spread(ratios: list[float]) -> tuple[float, float]:
    """The order statistics that hold the median in 95 of 100 cases."""
    ordered = sorted(ratios)
    off = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - off))
    return ordered[low], ordered[len(ordered) - 1 - low]


def body(args: Any, result: Result, work: Path) -> None:
    """Rounds, then ratios."""
    data, began = result.data, time.monotonic()
    # The observer's context would sit beside the timed work: it only says what the machine is.
    observer, world = observed(args, result, work)
    data["probe"] = observer.info
    observer.close()
    tenants = {"unhooked": None, "hooked": f"rates-{os.getpid()}"}
    jobs = {kind: start(args, result, work, world, tenant) for kind, tenant in tenants.items()}
    samples: dict[str, dict[str, list[float]]] = {"hooked": {}, "unhooked": {}}
    data["samples"] = samples
    for turn in range(-1, args.rounds):
        at = time.monotonic()
        order = ("unhooked", "hooked") if turn % 2 == 0 else ("hooked", "unhooked")
        for kind in order:
            figures = measure(args, jobs[kind])
            if turn < 0:  # the first of each warms up
                continue
            for name, value in figures.items():
                samples[kind].setdefault(name, []).append(round(value, 1))
        if args.deadline - 20 - (time.monotonic() - began) < 2 * (time.monotonic() - at):
            result.note(f"time ran out after {turn + 1} rounds")
            break
    for ranks in jobs.values():
        ranks.close()
    print(f"{'figure':<42}{'hooked':>12}{'unhooked':>12}{'ratio':>9}  95%")
    for name in samples["hooked"]:
        hooked, plain = (common.summarise(samples[kind][name]) for kind in ("hooked", "unhooked"))
        ratios = [a / b for a, b in zip(samples["hooked"][name], samples["unhooked"][name], strict=True)]
        ratio, (low, high) = common.summarise(ratios)["median"] or 0.0, spread(ratios)
        data["summary"][name] = {"hooked": hooked, "unhooked": plain, "ratio": ratio, "low": low, "high": high}
        data["baseline"][name] = plain
        print(f"{name:<42}{hooked['median']:>12.0f}{plain['median']:>12.0f}{ratio:>9.4f}  {low:.4f} to {high:.4f}")
        detail = f"ratio {ratio:.4f}, {low:.4f} to {high:.4f}, {len(ratios)} rounds"
        result.check(f"{name} within {1 - GOAL:.0%} of unhooked", ratio >= GOAL, detail)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(common.run_job(options, "rates", body))
