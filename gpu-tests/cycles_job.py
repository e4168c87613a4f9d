"""Does a job survive a thousand pauses, and is everything as it was at the start?

The NCCL-only job (one process per GPU, two communicators, all-reduce and all-to-all) is paused and resumed by the real
command `--cycles` times. After each, every collective must be bit-identical to the first. Resident memory and file
descriptors of every rank, the host arena, and the memory in use on each GPU are read every `--every` cycles, active
and paused, and must be flat. When time runs out, it says how many cycles were done.

Bound: a cycle is a pause and a resume of some 2 GiB a rank, 0.13 + 0.25 s, and a check of a few ms: 400 s for 1,000.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import MIB, JobError, Result
from observer import observed
from phases import Phases
from rank import NcclRanks
from suite import main, options

#: Cycles after which the host arena and whatever is made on first use are there.
SETTLED = 20
#: What may be more at the end than after SETTLED cycles.
RSS_GROWTH_MAX = 24 * MIB
GPU_GROWTH_MAX = 4 * MIB

parse = options(
    __doc__, 560, cycles=1000, every=(25, "cycles between two readings of what is held"),
    all_to_all=(1, "communicators that also do all-to-all (0 to 2)"), pause_timeout=(20.0, "seconds for one pause or resume"),
)


def held(pids: list[int], tenant: str) -> dict[str, int]:
    """What the ranks hold of the host, and the host arena."""
    sums = common.held_by(pids)
    told = cli.sublet("stats", tenant, "--json", timeout_s=20)
    members = [member for entry in cli.tenants(told) for member in entry.get("members", [])]
    sums["arena_bytes"] = sum(member.get("pool", {}).get("host_arena_bytes", 0) for member in members)
    sums["members"] = len(members)
    return sums


class Job:
    """The tenant and its cycles."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.data, self.began = args, result, result.data, time.monotonic()
        self.observer, self.world = observed(args, result, work)
        self.empty = self.observer.settled_free()
        self.tenant = f"cycles-{os.getpid()}"
        self.ranks = NcclRanks(result, work, "cycles", self.world, self.tenant, life_s=args.deadline)
        self.ranks.call("connect", 90)
        self.ranks.call("messages", 60, words=[1024, 1 << 18], all_to_all_groups=args.all_to_all)
        self.ranks.step(90)
        self.phases = Phases()

    def used(self) -> list[int]:
        """Bytes in use per GPU beyond the idle machine."""
        return [then - now for then, now in zip(self.empty, self.observer.free(), strict=True)][: self.world]

    def change(self, action: str) -> None:
        """One pause or resume by the command, and the times it tells."""
        told = cli.sublet(action, self.tenant, "--json", timeout_s=self.args.pause_timeout)
        if told["exit"] != 0:
            self.data["failure"] = told
            for words in (["ps"], ["stats", self.tenant, "--json"]):
                print(f"---- sublet {words[0]}: {cli.sublet(*words, timeout_s=10)}"[:6000], flush=True)
            self.ranks.print_stacks()
            raise JobError(f"{cli.say(told)} {(told.get('json') or {}).get('error', '')}")
        self.result.sample(f"{action}_ms", round(told["wall_s"] * 1000, 2))
        self.phases.add(action, told["json"]["report"])
        self.data.setdefault(f"first_{action}", told)

    def cycle(self, number: int, read: bool) -> None:
        """Pause, resume, check; the readings where `read`."""
        self.change("pause")
        if read:
            self.result.sample("left_paused_bytes", max(self.used()))
        self.change("resume")
        step = self.ranks.step(30)
        self.result.sample("step_ms", round(step["seconds"] * 1000, 2))
        if step["wrong"]:
            raise JobError(f"cycle {number}: collectives differ from the first: {step['wrong'][:6]}")
        if read:
            self.result.sample("used_active_bytes", max(self.used()))
            self.result.sample("read_after", number + 1)
            for name, value in held(list(self.ranks.pids.values()), self.tenant).items():
                self.result.sample(name, value)

    def run(self) -> None:
        """All cycles that fit."""
        done = 0
        settled = min(SETTLED, self.args.cycles // 2)
        longest = 0.0
        try:
            while done < self.args.cycles:
                left = self.args.deadline - 20 - (time.monotonic() - self.began)
                if left < longest:
                    self.result.note(f"time ran out after {done} cycles")
                    break
                at = time.monotonic()
                self.cycle(done, done == settled or (done + 1) % self.args.every == 0 or done + 1 == self.args.cycles)
                longest = max(longest, time.monotonic() - at)
                done += 1
                if done % 100 == 0:
                    common.log(f"{done} cycles, longest {longest:.2f} s")
                    self.result.save()
        finally:
            self.report(done)
        self.verdicts(done)

    def report(self, done: int) -> None:
        """Puts the times into the record and prints them."""
        self.data["summary"]["cycles"] = done
        # Every sample of each phase for the first and last hundred cycles; of those between, every fifth.
        thin = [i for i in range(done) if i < 100 or i >= done - 100 or i % 5 == 0]
        self.data["samples"]["phase_cycle"] = thin
        walls = self.phases.flat_walls()
        self.data["samples"]["phase_wall_us"] = {
            name: [values[i] for i in thin if i < len(values)] for name, values in walls.items()
        }
        self.data["phases"] = self.phases.summaries()
        self.data["summary"]["phase_wall_us"] = {name: common.summarise(values) for name, values in walls.items()}
        self.phases.print()

    def verdicts(self, done: int) -> None:
        """What was promised."""
        samples = self.data["samples"]
        what = f"{self.args.cycles} cycles, every collective bit-identical after each"
        self.result.check(what, done >= self.args.cycles, f"{done} done")
        limits = {
            "anonymous_bytes": RSS_GROWTH_MAX * self.world,
            "descriptors": 0,
            "threads": 0,
            "arena_bytes": 0,
            "used_active_bytes": GPU_GROWTH_MAX,
            "left_paused_bytes": GPU_GROWTH_MAX,
        }
        for name, limit in limits.items():
            values = samples.get(name, [])
            if len(values) < 2:
                self.result.check(f"{name} is flat", False, "fewer than two readings")
                continue
            # Some readings come while a resume's spare descriptors are still being closed: the least of each end
            # counts.
            grown, detail = common.growth(values, max(1, len(values) // 4))
            self.result.check(f"{name} is flat", grown <= limit, detail)
        self.ranks.close()
        left = [then - now for then, now in zip(self.empty, self.observer.settled_free(), strict=True)]
        self.result.check("nothing is left on the GPUs after the job", max(left[: self.world]) <= GPU_GROWTH_MAX, str(left))


if __name__ == "__main__":
    main(parse, "cycles_nccl", lambda *given: Job(*given).run())
