"""How do the driver calls and the CPU time of a pause and a resume grow with allocations, and with processes?

On the simulated driver, whose calls cost next to nothing: what is counted is ours. A tenant of `--processes-of-many`
processes holds 10, 100, ... up to `--allocations` allocations of 2 MiB in all, and tenants of 1, 2, 4, ... up to
`--processes` processes hold `--each` allocations each: few, for the simulated driver's own books are files that processes wait
for each other at, and the more so the more there are. Every tenant is paused and resumed `--cycles` times. The contents
are discarded, so that nothing is copied. CPU time is that of the tenant's processes, with the simulated driver that runs in them,
and of the command. Exponents are those of the least squares through the points in a doubly logarithmic picture: over all of
them, and over the upper half, where what is there once for all counts little.

Bound: each allocation is unmapped and released, then created, mapped and given access: two calls, then three. Work on more may
take as much longer, an exponent of 1, and no more. The run takes some 40 s on two cores, in the repository:

    cargo xtask built --release sh -c 'SUBLET_BIN=$SUBLET_TEST_BIN LD_LIBRARY_PATH=$SUBLET_TEST_SIMCUDA_DIR \
        SUBLET_COMMIT=$(git describe --always --dirty) PYTHONPATH=gpu-lane python3 benchmarks/scaling_job.py --profile release --out scaling.json'
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cli
import common
import phases
import runner
import sim_node
from common import MIB, JobError, Result
from driver import Driver
from runner import Ranks
from suite import main, options, role_of

BLOCK = 2 * MIB
#: SUBLET_CONTENTS_DISCARD
DISCARD = 1
#: Allocations of one process from which on one cycle is enough.
LONG = 10_000
#: An exponent that a busy machine may add to one of 1.
CALLS_MOST, CPU_MOST = 1.05, 1.35


# ---------------------------------------------------------------- in a process


class Holder:
    """A process with allocations that are not saved."""

    def __init__(self) -> None:
        self.gpus, self.count = Driver(only=0), 0

    def take(self, count: int) -> int:
        """Allocates until there are `count`."""
        library = ctypes.CDLL(None)
        if library.sublet_region_begin(b"many", ctypes.c_int(DISCARD)) != 0:
            raise JobError("the region was refused")
        try:
            while self.count < count:
                if self.gpus.alloc(BLOCK) is None:
                    raise JobError(f"allocation {self.count} was refused")
                self.count += 1
        finally:
            library.sublet_region_end()
        return self.count


# ---------------------------------------------------------------- in the job


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line of least squares through the logarithms of points; 0 for fewer than two places."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    mean_x = sum(x for x, _ in logs) / max(1, len(logs))
    mean_y = sum(y for _, y in logs) / max(1, len(logs))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread if spread > 0 else 0.0


def upper_half(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those in the upper half of the places, by their logarithm."""
    places = sorted({x for x, _ in points})
    least = places[len(places) // 2 - (len(places) % 2 == 0)] if len(places) > 2 else places[0]
    return [point for point in points if point[0] >= least]


def spread(total: int, processes: int) -> list[int]:
    """`total` in as many equal parts as there are processes."""
    return [total // processes + (number < total % processes) for number in range(processes)]


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU time that all threads of another process have taken."""
    return time.clock_gettime((~pid << 3) | 2)


def command_cpu_s() -> float:
    """Seconds of CPU time that commands which have ended have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Scaling:
    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.number = 0

    def tenant(self, processes: int) -> Ranks:
        """A new one."""
        self.number += 1
        label = f"scaling{self.number}"
        how = {"launcher": "launch", "life_s": self.args.deadline}
        return Ranks(self.work, label, processes, [__file__, "--role", "holder"], tenant=f"{label}-{os.getpid()}", **how)

    def measure(self, ranks: Ranks, sweep: str, place: int, counts: list[int]) -> None:
        """Has each process hold its part, then pauses and resumes."""
        for rank, count in enumerate(counts):
            ranks.send("take", [rank], count=count)
            ranks.collect("take", [rank], 120)
        # Tables grow in the first cycle, which counts only where more would take minutes.
        cycles, skipped = (self.args.cycles, 1) if max(counts) < LONG else (1, 0)
        for cycle in range(cycles + skipped):
            for action in ("pause", "resume"):
                before = [process_cpu_s(pid) for pid in ranks.pids.values()]
                command = command_cpu_s()
                told = cli.sublet(action, str(ranks.tenant), "--json", timeout_s=60)
                if told["exit"] != 0:
                    ranks.print_stacks()
                    raise JobError(cli.say(told))
                took = [process_cpu_s(pid) - then for pid, then in zip(ranks.pids.values(), before, strict=True)]
                if cycle < skipped:
                    continue
                calls = sum(row["driver_calls"] for row in phases.phase_table(told["json"]["report"]).values())
                point = {
                    "place": place,
                    "action": action,
                    "driver_calls": calls,
                    "cpu_s": round(sum(took), 6),
                    "command_cpu_s": round(command_cpu_s() - command, 6),
                    "wall_s": round(told["wall_s"], 6),
                }
                self.result.sample(sweep, point)
        common.log(f"{sweep} {place}: {len(counts)} processes")

    def run(self) -> None:
        """Both sweeps."""
        many = self.tenant(self.args.processes_of_many)
        place = 10
        while place <= self.args.allocations:
            self.measure(many, "allocations", place, spread(place, self.args.processes_of_many))
            place *= 10
        many.close()
        place = 1
        while place <= self.args.processes:
            few = self.tenant(place)
            self.measure(few, "processes", place, [self.args.each] * place)
            few.close()
            place *= 2

    def judge(self) -> None:
        """Exponents, and what they may be."""
        summary = self.result.data["summary"]
        for sweep, points in self.result.data["samples"].items():
            for action in ("pause", "resume"):
                chosen = [point for point in points if point["action"] == action]
                for figure, most in (("driver_calls", CALLS_MOST), ("cpu_s", CPU_MOST), ("command_cpu_s", CPU_MOST)):
                    pairs = [(float(point["place"]), float(point[figure])) for point in least(chosen, figure)]
                    upper = exponent(upper_half(pairs))
                    name = f"{sweep}_{action}_{figure}"
                    summary[f"{name}_exponent"] = round(exponent(pairs), 3)
                    summary[f"{name}_exponent_upper_half"] = round(upper, 3)
                    summary[f"{name}_largest"] = pairs[-1][1]
                    if figure != "command_cpu_s":
                        self.result.check(f"{sweep}, {action}: {figure} by an exponent of at most {most}", upper <= most, f"{upper:.3f}")


def least(points: Sequence[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """Of each place the point with the least of a figure: what else runs on the machine only adds."""
    best: dict[int, dict[str, Any]] = {}
    for point in points:
        if point["place"] not in best or point[figure] < best[point["place"]][figure]:
            best[point["place"]] = point
    return [best[place] for place in sorted(best)]


def table(result: Result) -> list[tuple[str, ...]]:
    """A line for each place and action."""
    rows: list[tuple[str, ...]] = [("by", "number", "action", "driver calls", "CPU ms", "command's CPU ms", "wall ms")]
    for sweep, points in result.data["samples"].items():
        for action in ("pause", "resume"):
            for point in least([point for point in points if point["action"] == action], "cpu_s"):
                times = (f"{1000 * point[name]:.1f}" for name in ("cpu_s", "command_cpu_s", "wall_s"))
                rows.append((sweep, f"{point['place']:,}", action, f"{point['driver_calls']:,.0f}", *times))
    return rows


parse = options(
    __doc__, 170, allocations=(100_000, "most allocations, of all processes together"), processes_of_many=(8, "processes that hold them"),
    processes=(64, "most processes"), each=(1, "allocations of each of them"), cycles=3,
    profile=("unknown", "how the library was built, for the record"), role=role_of("holder"),
)


def body(args: Any, result: Result, work: Path) -> None:
    """A node of its own, the sweeps, the tables."""
    result.data["gpu"] = {"name": "simulated GPU", "count": 1}
    result.data["driver"] = "simulated"
    result.data["baseline"] = {}
    with tempfile.TemporaryDirectory(prefix="sublet-scaling-", dir=Path("/dev/shm")) as folder:
        capacity = (args.allocations + args.processes * args.each + 64) * BLOCK
        os.environ.update(sim_node.make(Path(folder) / "node", [capacity]))
        with tempfile.TemporaryDirectory(prefix="sublet-") as run_dir:
            os.environ["SUBLET_RUN_DIR"] = run_dir
            scaling = Scaling(args, result, work)
            try:
                scaling.run()
            finally:
                common.stop_children()
    scaling.judge()
    runner.verdicts(result)
    print()
    runner.table(table(result))
    for name, value in result.data["summary"].items():
        if "exponent" in name:
            print(f"{name}: {value}", flush=True)


if __name__ == "__main__":
    main(parse, "scaling", body, {"holder": Holder})
