"""How fast is a switch, compared with its limit and with others, in one run?

Each case has a time limit of its own, one that has no time left, no GPUs or no such driver or library is skipped by
name, and one that fails leaves the others their turn:

- pinned: plain pinned copies out, in, and both together: the limit of everything else;
- kept: one process that holds `--kept-gib` GiB: its very first pause; then pauses after everything was rewritten, a tenth
  in a row, a tenth in scattered pieces of 2 MiB, nothing, and everything with zeros. Each resume follows immediately;
- prepared: the first pause of another such process after `sublet prepare`;
- swap: two tenants that take turns by `sublet swap`, everything rewritten between;
- every: `--every-gib` GiB on each GPU together, against as many pinned copies together;
- nccl: ranks with 2 communicators and then with 20, and nothing else; destroyed and rebuilt, by `ncclCommSuspend` where the
  NCCL at hand has it, and paused from outside;
- legacy: the same communicators under `NCCL_CUMEM_ENABLE=0`, paused from outside;
- saver: `race_saver.py`'s ways by tag, 20 GB kept and rewritten before each pause, 40 GB discarded;
- checkpoint: the driver's checkpoint API on a process that holds as much as `kept`'s.

After each resume all contents are added up on the device. The record has every sample, and of every figure its limit, its
baseline and what bounds it.

Bound: 60 GiB at 55 GB/s are 1.2 s each way, so kept takes some 50 s when everything is copied each time; the checkpoint
of as much takes 40 s at its 2.3 and 6 GB/s; communicators take some 0.3 s each to make. On one GPU some 240 s.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cli
import common
import race_figures
import race_nccl
import race_saver
import runner
from common import GIB, MIB, JobError, Result
from phases import Phases
from runner import Ranks
from suite import NotRun, Row, Suite, is_there, main, options, words_of

HOLDER = str(Path(__file__).resolve().parent / "race_memory.py")
#: Rounds of each kind of change.
KINDS = (("all", 4), ("nothing", 3), ("tenth", 3), ("scattered", 3), ("zero", 3))
#: Of what the kernel calls available, what the contents of all tenants of a case may take.
HOST_SHARE = 0.8
PINNED_REPEATS = 4
CGROUP = Path("/sys/fs/cgroup")


def host_available_bytes(meminfo: str) -> int:
    """What the kernel calls available, out of the text of /proc/meminfo; 0 where it does not say."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def cgroup_left_bytes(folder: Path) -> int | None:
    """What this process's control group leaves; None where it sets no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        current = (folder / "memory.current").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int(current))
    except (OSError, ValueError):
        return None


def has_rival() -> bool:
    """Whether torch_memory_saver is at hand."""
    return any(runner.WHEELS.glob("torch_memory_saver-*.whl")) or is_there("torch_memory_saver")


class Race(Suite):
    """The run: what cases share."""

    END_S = 6.0
    COMMAND_S = 60.0
    DONE = Suite.FAILED

    def __init__(self, rows: Sequence[Row], args: Any, result: Result, work: Path) -> None:
        super().__init__([dataclasses.replace(row, least_s=row.least_s * args.scale) for row in rows], args, result, work)
        self.data["sizes"], self.data["skipped"] = {}, {}
        self.seed = 1
        self.phases = Phases()
        self.plain = self.hold_nothing("plain")
        self.info = self.plain.call("info", 60)[0]
        self.gpus = args.gpus or self.info["count"]
        if not 1 <= self.gpus <= self.info["count"]:
            raise JobError(f"{self.gpus} GPUs wanted, {self.info['count']} found")
        self.data["parameters"]["gpus"] = self.gpus
        result.machine({**self.info, "count": self.gpus})
        # The processes next to it are their own cases'.
        self.started.clear()

    def hold_nothing(self, label: str, tenant: str | None = None, ranks: int = 1) -> Ranks:
        """Processes that can hold memory, the first on GPU 0."""
        return self.start(label, [HOLDER], tenant, ranks)

    def command(self, *words: str, most_s: float | None = None) -> dict[str, Any]:
        """As of a suite; the phases of what was done are kept."""
        told = super().command(*words, most_s=most_s)
        for report in race_figures.reports(told.get("json")):
            self.phases.add(f"{self.row.name}.{words[0]}.{report.get('action', '?')}", report)
        return told

    def pause_and_resume(self, ranks: Ranks, series: str, *words: str) -> None:
        """One pause, with `words`, one resume right behind it, and the contents after it."""
        tenant = str(ranks.tenant)
        told = [self.command(*each) for each in (("pause", tenant, *words), ("resume", tenant))]
        for action, each in zip(("pause", "resume"), told, strict=True):
            self.result.sample(f"{series}_{action}_s", each["wall_s"])
        wrong = sum(ranks.call("wrong", self.within(30)))
        self.result.sample("wrong_blocks", wrong)
        walls = [each["wall_s"] for each in told]
        common.log(f"{series}: pause {walls[0]:.3f} resume {walls[1]:.3f} s, wrong {wrong}")

    def write(self, ranks: Ranks, what: str) -> None:
        """Has all of them change their memory, another way than before."""
        self.seed += 1
        ranks.call("write", self.within(60), what=what, seed=self.seed)

    def size(self, wanted_gib: float, processes: int) -> int:
        """Bytes that each of `processes` can hold: what is wanted, or what the host has memory to save."""
        available = host_available_bytes(Path("/proc/meminfo").read_text())
        limited = cgroup_left_bytes(CGROUP)
        available = available if limited is None else min(available, limited)
        room = int(available * HOST_SHARE / processes) // MIB * MIB if available else 0
        wanted = int(wanted_gib * GIB)
        if room and room < wanted:
            self.result.note(f"{room / GIB:.0f} instead of {wanted_gib:g} GiB a process: the host has {available / GIB:.0f} GiB")
        return min(wanted, room or wanted)

    def hold(self, label: str, size_bytes: int, ranks: int = 1) -> Ranks:
        """A tenant that holds `size_bytes` in each process, all of it written."""
        started = self.hold_nothing(label, f"race-{label}-{os.getpid()}", ranks)
        block = self.args.block_mib * MIB
        made = started.call("hold", self.within(60), size_bytes=size_bytes, block_bytes=block)
        if any(each["bytes"] < size_bytes * 0.95 for each in made):
            raise JobError(f"{label} holds {made}")
        return started

    def pinned(self, ranks: Ranks, prefix: str) -> None:
        """Plain copies of all of `ranks` together."""
        ranks.call("pinned_setup", self.within(60), size_bytes=self.args.copy_mib * MIB)
        for _ in range(PINNED_REPEATS):
            for way in ("out", "in", "both"):
                rates = ranks.call("pinned_copy", self.within(30), way=way, times=4)
                self.result.sample(f"{prefix}_{way}_gb_s", sum(rates))
        ranks.call("pinned_free", self.within(30))
        for way in ("out", "in", "both"):
            name = f"{prefix}_{way}_gb_s"
            self.data["baseline"][name] = common.summarise(self.data["samples"][name])
            common.log(f"{name}: {self.data['baseline'][name]['median']:.1f}")

    # ------------------------------------------------------------ the cases

    def case_pinned(self) -> None:
        """The limit. Host memory is touched first, for machines that grow it as it is used."""
        biggest = max(self.size(self.args.kept_gib, 1), 2 * self.size(self.args.swap_gib, 2))
        if not self.args.cold_host:
            self.data["host_warmed"] = common.touch_host_memory(biggest / GIB)
        self.pinned(self.plain, "pinned")

    def case_kept(self) -> None:
        """One process."""
        size = self.size(self.args.kept_gib, 1)
        ranks = self.hold("kept", size)
        for key in ("kept_first", *(f"kept_{what}" for what, _ in KINDS)):
            self.data["sizes"][key] = size
        full = self.plain.call("free_bytes")[0]
        tenant = str(ranks.tenant)
        told = self.command("pause", tenant)
        self.result.sample("kept_first_pause_s", told["wall_s"])
        freed = self.plain.call("free_bytes")[0] - full
        detail = f"{freed / GIB:.2f} of {size / GIB:.2f} GiB"
        self.result.check("kept: a pause gives all of it back", freed >= 0.99 * size, detail)
        self.result.sample("kept_first_resume_s", self.command("resume", tenant)["wall_s"])
        self.result.sample("wrong_blocks", sum(ranks.call("wrong", self.within(30))))
        for what, rounds in KINDS:
            for _ in range(rounds):
                self.write(ranks, what)
                self.pause_and_resume(ranks, f"kept_{what}")
        self.data["kept_stats"] = host_bytes(cli.sublet("stats", tenant, "--json", timeout_s=20))
        ranks.close()

    def case_prepared(self) -> None:
        """A process whose host memory was brought in before its first pause."""
        size = self.size(self.args.kept_gib, 1)
        ranks = self.hold("prepared", size)
        self.data["sizes"]["prepared_first"] = size
        tenant = str(ranks.tenant)
        told = cli.sublet("prepare", tenant, timeout_s=self.within(self.COMMAND_S))
        if told["exit"] != 0:
            raise JobError(cli.say(told))
        self.result.sample("prepare_s", told["wall_s"])
        self.pause_and_resume(ranks, "prepared_first")
        ranks.close()

    def case_swap(self) -> None:
        """Two tenants on GPU 0."""
        size = self.size(self.args.swap_gib, 2)
        self.data["sizes"]["swap"] = size
        first = self.hold("first", size)
        self.command("pause", str(first.tenant))
        second = self.hold("second", size)
        turn = [second, first]
        # Each has its first pause behind it, and host memory, when both have been away once.
        self.swap(turn, "swap_first")
        self.swap(turn, "swap_first")
        for _ in range(self.args.swap_rounds):
            self.swap(turn, "swap")
        first.close()
        second.close()

    def swap(self, turn: list[Ranks], series: str) -> None:
        """The one whose turn it is rewrites everything and leaves; the other comes, and is right."""
        here, away = turn
        self.write(here, "all")
        told = self.command("swap", str(here.tenant), str(away.tenant))
        self.result.sample(f"{series}_s", told["wall_s"])
        wrong = sum(away.call("wrong", self.within(30)))
        self.result.sample("wrong_blocks", wrong)
        common.log(f"{series}: {told['wall_s']:.3f} s, wrong {wrong}")
        turn.reverse()

    def case_every(self) -> None:
        """All GPUs together."""
        size = self.size(self.args.every_gib, self.gpus)
        plain = self.hold_nothing("pinned-every", ranks=self.gpus)
        self.pinned(plain, "pinned_every")
        plain.close()
        ranks = self.hold("every", size, self.gpus)
        self.data["sizes"]["every"] = size
        self.pause_and_resume(ranks, "every_first")
        for _ in range(4):
            self.write(ranks, "all")
            self.pause_and_resume(ranks, "every")
        ranks.close()

    def case_saver(self) -> None:
        """By tag, compared with torch_memory_saver."""
        for way in ("sublet", "retained", "saver"):
            label = f"saver_{way}"
            if way != "sublet" and not has_rival():
                self.not_run(label, "no wheel of torch_memory_saver is in the bundle, and it is not installed")
                continue
            facts = race_saver.start(self.work, way, self.args.tag_gb).finish(self.result, self.within(), prefix=label)
            self.data["sizes"][label] = facts.get("kept_bytes", 0)
            samples = self.data["samples"]
            if way != "saver" and len(samples.get(f"{label}_pause_s", [])) > 1:
                samples[f"{label}_first_pause_s"] = [samples[f"{label}_pause_s"].pop(0)]

    def case_checkpoint(self) -> None:
        """The driver's own way, on a process without Sublet."""
        if not self.info["checkpoints"]:
            raise NotRun("this driver has no cuCheckpointProcess functions")
        size = self.size(self.args.checkpoint_gib or self.args.kept_gib, 1)
        self.data["sizes"]["checkpoint"] = size
        child = self.hold_nothing("child")
        child.call("hold", self.within(60), size_bytes=size, block_bytes=self.args.block_mib * MIB)
        took: dict[str, float] = {}
        for step in ("lock", "checkpoint", "restore", "unlock"):
            answer = self.plain.call("checkpoint", self.within(150), step=step, pid=child.pids[0])[0]
            if answer["code"] != 0:
                raise NotRun(f"cuCheckpointProcess{step.capitalize()} returned {answer['code']}")
            took[step] = answer["seconds"]
        self.result.sample("checkpoint_pause_s", took["lock"] + took["checkpoint"])
        self.result.sample("checkpoint_resume_s", took["restore"] + took["unlock"])
        self.result.sample("wrong_blocks", sum(child.call("wrong", self.within(30))))
        child.close()

    # ------------------------------------------------------------ running them

    def chosen(self, words: Sequence[str]) -> list[Row]:
        """As of a suite; what others are measured against comes along."""
        found = super().chosen(words)
        return [row for row in self.rows if row.name == "pinned" or row in found]

    def cannot(self, row: Row) -> str:
        why = super().cannot(row)
        return f"{why}; RACE_CASES={row.name} runs it alone" if why.endswith("left") else why

    def not_run(self, what: str | Row, why: str) -> None:
        """Says that something was not run."""
        name = what if isinstance(what, str) else what.name
        self.data["skipped"][name] = why
        print(f"SKIPPED {name}: {why}", flush=True)

    def one(self, row: Row) -> None:
        """As of a suite; the time that it took is kept."""
        began = time.monotonic()
        super().one(row)
        if self.row is row:
            self.data.setdefault("case_s", {})[row.name] = round(time.monotonic() - began, 1)

    def conclude(self) -> None:
        """The figures of what was measured."""
        self.data["phases"] = self.phases.summaries()
        wrong = self.samples("wrong_blocks")
        if wrong:
            detail = f"{sum(wrong)} wrong blocks in {len(wrong)} looks"
            self.result.check("contents right after every resume", sum(wrong) == 0, detail)
        race_figures.finish(self.result)
        self.result.save()

    def show(self) -> None:
        """The figures, and the tables."""
        self.conclude()
        runner.verdicts(self.result)
        print()
        runner.table(race_figures.rows(self.data))
        print()
        for name in ("nccl2", "nccl20", "legacy2", "legacy20"):
            held = [self.samples(f"{name}_{what}") for what in ("host_mib", "own_count", "imported_count")]
            if all(held):
                parts = [f"{max(each):,.0f} {what}" for each, what in zip(held, ("MiB of host memory", "own blocks", "imported"), strict=True)]
                print(f"{name}, at most a rank: {', '.join(parts)}", flush=True)
        for goal in self.data["goals"]:
            print(f"{'reached' if goal['reached'] else 'MISSED '} {goal['what']}: {goal['detail']}", flush=True)
        for name, why in self.data["skipped"].items():
            print(f"SKIPPED {name}: {why}", flush=True)


#: `least_s` and `limit_s` are of a machine with host memory for all of it.
CASES = (
    Row("pinned", Race.case_pinned, least_s=10, limit_s=90),
    Row("kept", Race.case_kept, least_s=25, limit_s=120),
    Row("prepared", Race.case_prepared, least_s=10, limit_s=60),
    Row("swap", Race.case_swap, least_s=20, limit_s=80),
    Row("every", Race.case_every, gpus_min=2, least_s=15, limit_s=60),
    Row("nccl", race_nccl.run, needs=("torch",), gpus_min=2, least_s=60, limit_s=180),
    Row("saver", Race.case_saver, needs=("torch",), least_s=75, limit_s=150),
    Row("checkpoint", Race.case_checkpoint, least_s=35, limit_s=120),
    Row("legacy", race_nccl.run_legacy, needs=("torch",), gpus_min=2, least_s=45, limit_s=180),
)


def host_bytes(told: dict[str, Any]) -> dict[str, int]:
    """Host memory that each process of a tenant holds, by its id, out of what `stats --json` said."""
    found: dict[str, int] = {}
    for tenant in cli.tenants(told):
        for entry in tenant.get("members", []):
            found[str(entry["member"]["pid"])] = entry["pool"]["host_arena_bytes"]
    return found

parse = options(
    __doc__, 260, cases=("", "words, with commas: cases with one of them in their name (default: all)"),
    kept_gib=(60.0, "GiB of the process that is paused alone"), swap_gib=(60.0, "GiB of each of the two tenants that swap"),
    every_gib=(16.0, "GiB a GPU, on all GPUs together"), tag_gb=(20.0, "GB kept by tag; twice as much is discarded"),
    checkpoint_gib=(0.0, "GiB of the process that is checkpointed (0: as --kept-gib)"), block_mib=(512, "size of one allocation"),
    copy_mib=(1024, "size of one pinned copy"), swap_rounds=4, many=(20, "communicators of the larger NCCL case"),
    nccl_cycles=(8, "cycles with 2 communicators; half as many with more"), cold_host=(False, "do not touch host memory first"),
    scale=(1.0, "of the time that a case must have left to be begun"),
)


def body(args: Any, result: Result, work: Path) -> None:
    """The cases, then the figures and the tables."""
    race = Race(CASES, args, result, work)
    common.at_deadline(lambda _reason: race.conclude())
    race.run(race.chosen(words_of(args.cases)))


if __name__ == "__main__":
    main(parse, "race", body)
