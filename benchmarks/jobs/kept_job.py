"""How close to the link does kept memory travel, in steady state and at the very first pause?

Every GPU holds `--kept-gib` GiB of random words, is paused and resumed from outside `--cycles` times, and every word is
checked after each. The baseline of the same run is a plain pinned copy by unhooked processes, on the same GPUs at once.

Bound: 16 GiB at 55 GB/s is 0.31 s each way; 4 GPUs together share 152 GB/s out and 198 GB/s in, so 64 GiB take
0.45 s and 0.35 s. The first pause also touches and registers its host memory (some 57 and 36 GiB/s): about half the speed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cli
import common
from common import MIB, JobError, Result
from observer import observed
from phases import Phases
from rank import NcclRanks


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=240)
    parser.add_argument("--kept-gib", type=float, default=16.0, help="GiB a GPU")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--copies", type=int, default=5, help="repeats of the pinned copy, each way")
    parser.add_argument("--cold-host", action="store_true", help="do not touch host memory first")
    parser.add_argument("--pause-timeout", type=float, default=90)
    return parser.parse_args(argv)


def pinned(result: Result, work: Path, world: int, repeats: int) -> dict[str, Any]:
    """GB/s of plain pinned copies, all GPUs at once."""
    ranks = NcclRanks(result, work, "pinned", world, None)
    ranks.call("pinned_setup", 90)
    samples: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(repeats):
        for direction, series in samples.items():
            replies = ranks.call("pinned_copy", 60, direction=direction)
            series.append(sum(reply["gb_s"] for reply in replies))
    ranks.close()
    summary = {f"{direction}_gb_s": common.summarise(series) for direction, series in samples.items()}
    common.log(f"pinned copy: out {summary['out_gb_s']['median']:.1f} GB/s, in {summary['in_gb_s']['median']:.1f} GB/s")
    return {"samples": samples, **summary}


def body(args: Any, result: Result, work: Path) -> None:
    """Baseline, then cycles."""
    data = result.data
    observer, world = observed(args, result, work)
    data["probe"] = observer.info
    if not args.cold_host:
        data["host_warmed"] = common.touch_host_memory(args.kept_gib * world * 1.1 + 2 * world)
        result.save()
    data["baseline"] = pinned(result, work, world, args.copies)
    result.save()

    tenant = f"kept-{os.getpid()}"
    ranks = NcclRanks(result, work, "kept", world, tenant, life_s=args.deadline)
    made = ranks.call("tensors", 90, kept_gib=args.kept_gib, scratch_gib=0.0)
    kept = sum(reply["kept_bytes"] for reply in made)
    data["kept_bytes"] = kept
    first: dict[str, float] = {}
    for cycle in range(args.cycles):
        before = observer.free()
        freed: list[int] = []
        for action, direction in (("pause", "out"), ("resume", "in")):
            told = cli.sublet(action, tenant, "--json", timeout_s=args.pause_timeout)
            data.setdefault("told", []).append(told)
            if told["exit"] != 0:
                ranks.print_stacks()
                raise JobError(cli.say(told))
            rate = kept / told["wall_s"] / 1e9
            if cycle == 0:
                first[direction] = rate
            else:
                result.sample(f"{direction}_gb_s", rate)
            if action == "pause":
                freed = [now - then for then, now in zip(before, observer.free(), strict=True)][:world]
        wrong = ranks.step()["wrong"]
        result.sample("wrong", len(wrong))
        result.sample("freed_mib_min", min(freed) / MIB)
        walls = [told["wall_s"] for told in data["told"][-2:]]
        common.log(f"cycle {cycle}: pause {walls[0]:.3f} s, resume {walls[1]:.3f} s, wrong {len(wrong)}")
        result.save()
    data["stats_after"] = cli.sublet("stats", tenant, "--json", timeout_s=30)
    ranks.close()

    data["first"] = {f"{direction}_gb_s": rate for direction, rate in first.items()}
    data["phases"] = steady_phases(data["told"])
    result.check("every kept word identical in every cycle", sum(data["samples"]["wrong"]) == 0)
    for direction in ("out", "in"):
        link = data["baseline"][f"{direction}_gb_s"]["median"]
        steady = common.summarise(data["samples"].get(f"{direction}_gb_s", []))["median"] or 0.0
        data["summary"][f"{direction}_of_pinned"] = steady / link
        result.check(f"steady {direction} at least 80% of pinned", steady >= 0.8 * link, f"{steady:.1f} of {link:.1f} GB/s")
    link = data["baseline"]["out_gb_s"]["median"]
    data["summary"]["first_pause_of_pinned"] = first["out"] / link
    result.check("first pause at least 30% of pinned", first["out"] >= 0.3 * link, f"{first['out']:.1f} of {link:.1f} GB/s")


def steady_phases(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians per phase over the steady cycles."""
    phases = Phases()
    for record in told[2:]:
        phases.add_members(record["args"][0], record.get("json"))
    return {f"{action}.{name}": row for action, table in phases.summaries().items() for name, row in table.items()}


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    label = f"kept_{options.kept_gib:g}gib_{options.gpus or 'all'}gpu"
    sys.exit(common.run_job(options, label, body))
