"""What does Sublet cost a call, to within a hundredth?

Hooked and unhooked jobs live side by side on the same GPUs, `--pairs` of each, and take turns: every round measures each
once, and the order flips, so that whatever drifts falls on both. Measured are launches a second (a torch operation, a
graph of one kernel), questions whether an event is over, all-reduce calls a second of 8 bytes and 1 KiB, launches of a
graph with all-reduces in it, the bus bandwidth of large all-reduces, and cudaMalloc and cudaFree pairs a second.

A process may be faster than another of its kind, by where its memory lies, and the same process goes at half its speed for
some samples of a few milliseconds: so samples are short and many, a process's rate is that of its best tenth, a pair's figure
is the ratio of the two, hooked to unhooked, and the figure of all is the median of the pairs, with the smallest and the
largest. The median of the rounds' ratios is recorded too.

Bound: an open gate is an exchange and a load on the thread's own cache line, counting a collective a few more: some
20 ns of a call that costs the host 5 us and more, so under 0.5%; nothing to see at 256 MiB. A hooked cudaMalloc is reserve,
create, map and set access (about 40 us for 2 MiB) instead of one call: the job tells its ratio and does not check it.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import runner
from common import Result
from observer import observed
from rank import NcclRanks
from suite import main, options

SIZES_BYTES = [8, 1024]
GOAL = 0.99
#: What the figures of cudaMalloc and cudaFree begin with.
MALLOC = "malloc_free_"
#: A process's rate is what this share of its samples stays below.
BEST = 0.9

parse = options(
    __doc__, 200, pairs=(4, "jobs of each kind"), rounds=(30, "samples of each job"), launches=(4_000, "launches a sample"),
    calls=(1_000, "small all-reduces a sample"), mib=(256, "message of the large all-reduces"),
    iterations=(10, "large all-reduces a sample"), mallocs=(50, "cudaMalloc and cudaFree pairs a sample"),
)


KINDS = ("unhooked", "hooked")


def start(args: Any, result: Result, work: Path, world: int, kind: str, pair: int) -> NcclRanks:
    """One of the jobs, with a communicator."""
    tenant = f"rates-{os.getpid()}-{pair}" if kind == "hooked" else None
    ranks = NcclRanks(result, work, f"{kind}{pair}", world, tenant, life_s=args.deadline)
    ranks.call("messages", 60, words=[1024])
    ranks.call("connect", 90)
    ranks.step(90)
    return ranks


def measure(args: Any, ranks: NcclRanks) -> dict[str, float]:
    """Every figure once; of all ranks the slowest."""
    rates = ranks.call("launches", 60, ranks=[0], count=args.launches, repeats=1)[0]
    figures = {"torch_launches_per_s": rates["op_per_s"][0]}
    if rates["graph_per_s"]:  # a rehearsal without a GPU has no graphs
        figures["graph_launches_per_s"], figures["event_queries_per_s"] = rates["graph_per_s"][0], rates["query_per_s"][0]
    replies = ranks.call("calls", 60, sizes_bytes=SIZES_BYTES, count=args.calls)
    figures |= {name: min(reply[name] for reply in replies) for name in replies[0]}
    if ranks.world > 1:
        replies = ranks.call("all_reduce", 60, mib=args.mib, iterations=args.iterations, repeats=1)
        figures["all_reduce_bus_gb_s"] = min(reply["bus_gb_s"][0] for reply in replies)
    pairs = ranks.call("mallocs", 60, ranks=[0], sizes_mib=[2, 64], pairs=args.mallocs, repeats=1)[0]
    return figures | {f"{MALLOC}{name}": rates[0] for name, rates in pairs.items()}


def body(args: Any, result: Result, work: Path) -> None:
    """Rounds, then ratios."""
    data, began = result.data, time.monotonic()
    # The observer's context would sit next to the timed work: it only says what the machine is.
    observer, world = observed(args, result, work)
    data["probe"] = observer.info
    observer.close()
    runner.package(work, "sublet")
    each = [(kind, pair) for pair in range(args.pairs) for kind in KINDS]
    samples: dict[str, dict[str, list[float]]] = {f"{kind}{pair}": {} for kind, pair in each}
    data["samples"] = samples
    # A process ends with the thread that has started it: the threads stay.
    with ThreadPoolExecutor(len(each)) as starting:
        started = starting.map(lambda one: start(args, result, work, world, *one), each)
        jobs = dict(zip(each, started, strict=True))
        for turn in range(-1, args.rounds):
            at = time.monotonic()
            for kind, pair in each if turn % 2 == 0 else each[::-1]:
                figures = measure(args, jobs[kind, pair])
                if turn < 0:  # the first of each warms up
                    continue
                for name, value in figures.items():
                    samples[f"{kind}{pair}"].setdefault(name, []).append(round(value, 1))
            if args.deadline - 20 - (time.monotonic() - began) < 1.5 * (time.monotonic() - at):
                result.note(f"time ran out after {turn + 1} rounds")
                break
        for ranks in jobs.values():
            ranks.kill()  # an end of all by request, one after the other, takes half a minute
    tell(args.pairs, result, samples)


def tell(pairs: int, result: Result, samples: dict[str, dict[str, list[float]]]) -> None:
    """The table of ratios, and what they say."""
    table = [("figure", "hooked", "unhooked", "ratio", "by pair")]
    for name in samples["hooked0"]:
        of = {kind: [samples[f"{kind}{pair}"][name] for pair in range(pairs)] for kind in KINDS}
        best = {kind: [common.percentile(rates, BEST) or 0.0 for rates in of[kind]] for kind in KINDS}
        by_pair = [hooked / plain for hooked, plain in zip(best["hooked"], best["unhooked"], strict=True)]
        rounds_ratios = [
            statistics.median(hooked / plain for hooked, plain in zip(*both, strict=True)) for both in zip(of["hooked"], of["unhooked"], strict=True)
        ]
        all_of = {kind: {**common.summarise([rate for rates in of[kind] for rate in rates]), "best": statistics.median(best[kind])} for kind in KINDS}
        ratio = statistics.median(by_pair)
        told = " ".join(f"{each:.4f}" for each in sorted(by_pair))
        result.data["summary"][name] = {**all_of, "ratio": ratio, "by_pair": by_pair, "ratio_of_medians": statistics.median(rounds_ratios)}
        result.data["baseline"][name] = all_of["unhooked"]
        table.append((name, f"{all_of['hooked']['best']:.0f}", f"{all_of['unhooked']['best']:.0f}", f"{ratio:.4f}", told))
        rounds = len(samples["hooked0"][name])
        detail = f"ratio {ratio:.4f}, {pairs} pairs of {rounds} rounds: {told}"
        if name.startswith(MALLOC):
            result.note(f"{name}: {detail}")
        else:
            result.check(f"{name} within {1 - GOAL:.0%} of unhooked", ratio >= GOAL, detail)
    runner.table(table)


if __name__ == "__main__":
    main(parse, "rates", body)
