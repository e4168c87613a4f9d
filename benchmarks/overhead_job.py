"""What does Sublet cost a job that is not paused?

Hooked and unhooked processes take turns in one run (the order flips each round): communicator creation with first
collectives, all-reduce bus bandwidth, launches a second (a torch operation, a graph of one kernel), and cudaMalloc and
cudaFree pairs a second. The verdict is the ratio of medians, hooked to unhooked.

Bound: a hooked launch adds a gate of a few ns to 2 to 5 us, so under 1%; collectives are one launch each, so nothing to
see at 256 MiB; a hooked cudaMalloc is reserve, create, map and set access (about 40 us for 2 MiB) instead of one call.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import common
from common import Result
from observer import observed
from rank import NcclRanks


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=280)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each has one hooked and one unhooked job")
    parser.add_argument("--repeats", type=int, default=7, help="samples of each figure in one job")
    parser.add_argument("--mib", type=int, default=256, help="all-reduce message")
    parser.add_argument("--iterations", type=int, default=40, help="all-reduces a sample")
    parser.add_argument("--launches", type=int, default=20_000, help="launches a sample")
    parser.add_argument("--pairs", type=int, default=100, help="cudaMalloc and cudaFree pairs a sample")
    return parser.parse_args(argv)


def measure(args: Any, result: Result, work: Path, world: int, label: str, tenant: str | None) -> dict[str, Any]:
    """The figures of one job, each a list of samples."""
    ranks = NcclRanks(result, work, label, world, tenant, life_s=args.deadline)
    figures: dict[str, Any] = {"start_s": [max(reply["start_s"] for reply in ranks.started)]}
    if world > 1:
        ranks.call("messages", 60, words=[1024, 1 << 18])
        connect = ranks.call("connect", 90)
        first = ranks.step(90)
        figures["communicators_s"] = [max(reply["seconds"] for reply in connect) + first["collective_s"]]
        bandwidth = ranks.call("all_reduce", 60, mib=args.mib, iterations=args.iterations, repeats=args.repeats)
        figures["all_reduce_bus_gb_s"] = [min(column) for column in zip(*(b["bus_gb_s"] for b in bandwidth), strict=True)]
    rates = ranks.call("launches", 60, ranks=[0], count=args.launches, repeats=args.repeats)[0]
    figures["torch_launches_per_s"], figures["graph_launches_per_s"] = rates["op_per_s"], rates["graph_per_s"]
    pairs = ranks.call("mallocs", 60, ranks=[0], sizes_mib=[2, 64], pairs=args.pairs, repeats=args.repeats)[0]
    figures |= {f"malloc_free_{name}": values for name, values in pairs.items()}
    ranks.close()
    return figures


def body(args: Any, result: Result, work: Path) -> None:
    """Rounds, then ratios."""
    data = result.data
    # The observer's context would sit next to the timed work: it only says what the machine is.
    observer, world = observed(args, result, work)
    data["probe"] = observer.info
    observer.close()
    samples: dict[str, dict[str, list[float]]] = {"hooked": {}, "unhooked": {}}
    data["samples"] = samples
    for turn in range(args.rounds):
        order = ("unhooked", "hooked") if turn % 2 == 0 else ("hooked", "unhooked")
        for kind in order:
            tenant = f"overhead-{os.getpid()}-{turn}" if kind == "hooked" else None
            figures = measure(args, result, work, world, f"{kind}{turn}", tenant)
            for name, values in figures.items():
                samples[kind].setdefault(name, []).extend(values)
            middle = {name: common.summarise(values)["median"] for name, values in figures.items()}
            common.log(f"{kind}: " + ", ".join(f"{n} {v:.4g}" for n, v in middle.items() if v is not None))
            result.save()
    for name in samples["hooked"]:
        hooked, plain = (common.summarise(samples[kind].get(name, [])) for kind in ("hooked", "unhooked"))
        entry: dict[str, Any] = {"hooked": hooked, "unhooked": plain}
        if hooked["median"] and plain["median"]:
            entry["ratio"] = hooked["median"] / plain["median"]
        data["summary"][name] = entry
        data["baseline"][name] = plain
    floors = {"all_reduce_bus_gb_s": 0.99, "torch_launches_per_s": 0.98, "graph_launches_per_s": 0.98}
    for name, floor in floors.items():
        ratio = data["summary"].get(name, {}).get("ratio")
        if ratio is not None:
            result.check(f"{name} within {1 - floor:.0%} of unhooked", ratio >= floor, f"ratio {ratio:.4f}")
    for name, entry in data["summary"].items():
        if "malloc" in name or "communicators" in name:
            result.note(f"{name}: ratio {entry.get('ratio', 0):.3f}")


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    label = f"overhead_{options.gpus or 'all'}gpu"
    sys.exit(common.run_job(options, label, body))
