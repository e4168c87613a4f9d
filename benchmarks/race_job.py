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
- saver: `race_saver.py`'s ways by tag, 20 GB kept and rewritten before each pause, 40 GB discarded;
- checkpoint: the driver's checkpoint API on a process that holds as much as `kept`'s.

After each resume all contents are added up on the device. The record has every sample, and of every figure its limit, its
baseline and what bounds it.

Bound: 60 GiB at 55 GB/s are 1.2 s each way, so kept takes some 50 s when everything is copied each time; the checkpoint
of as much takes 40 s at its 2.3 and 6 GB/s; communicators take some 0.3 s each to make. On one GPU some 240 s.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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

HOLDER = str(Path(__file__).resolve().parent / "race_memory.py")
#: What a run needs at its end: the figures, the processes' ends.
END_S = 6.0
#: Rounds of each kind of change.
KINDS = (("all", 4), ("nothing", 3), ("tenth", 3), ("scattered", 3), ("zero", 3))
#: Seconds for one pause or resume.
CHANGE_S = 60.0
#: Of what the kernel calls available, what the contents of all tenants of a case may take.
HOST_SHARE = 0.8
PINNED_REPEATS = 4
CGROUP = Path("/sys/fs/cgroup")


class Skipped(Exception):
    """A case that cannot be run here, and why."""


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


def needs_torch() -> None:
    """Skips a case that wants torch where there is none."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("no torch here")


def has_rival() -> bool:
    """Whether torch_memory_saver is at hand."""
    wheels = any(runner.WHEELS.glob("torch_memory_saver-*.whl"))
    return wheels or importlib.util.find_spec("torch_memory_saver") is not None


class Race:
    """The run: what cases share."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.data = result.data
        self.data["sizes"], self.data["skipped"] = {}, {}
        self.ends: float = time.monotonic() + args.deadline - END_S
        self.case_ends = self.ends
        self.seed, self.case = 1, ""
        self.started: list[Ranks] = []
        self.phases = Phases()
        self.plain = self.start("plain", None)
        self.info = self.plain.call("info", 60)[0]
        self.gpus = args.gpus or self.info["count"]
        if not 1 <= self.gpus <= self.info["count"]:
            raise JobError(f"{self.gpus} GPUs wanted, {self.info['count']} found")
        self.data["parameters"]["gpus"] = self.gpus
        result.machine({**self.info, "count": self.gpus})
        # The processes next to it are their own cases'.
        self.started.clear()

    # ------------------------------------------------------------ time

    def left(self, most_s: float = 600.0) -> float:
        """Seconds that a step may take; JobError when the case has none left."""
        left_s = self.case_ends - time.monotonic()
        if left_s <= 0.5:
            raise JobError("the case's time was over")
        return min(left_s, most_s)

    # ------------------------------------------------------------ processes and commands

    def start(self, label: str, tenant: str | None, ranks: int = 1) -> Ranks:
        """Processes that hold memory, the first on GPU 0."""
        launcher = "launch" if ranks > 1 else "alone"
        started = Ranks(self.work, label, ranks, [HOLDER], tenant=tenant, launcher=launcher, life_s=self.args.deadline)
        self.started.append(started)
        return started

    def stop(self, *started: Ranks) -> None:
        """Ends processes, and waits until their memory is back."""
        for ranks in started:
            ranks.close()
            self.started.remove(ranks)

    def command(self, ranks: Ranks, *words: str) -> dict[str, Any]:
        """The `sublet` command with `--json`; a refusal shows the stacks of `ranks` and is an error."""
        told = cli.sublet(*words, "--json", timeout_s=self.left(CHANGE_S))
        if told["exit"] != 0:
            self.data.setdefault("failures", []).append(told)
            ranks.print_stacks()
            raise JobError(cli.say(told))
        for report in race_figures.reports(told.get("json")):
            self.phases.add(f"{self.case}.{words[0]}.{report.get('action', '?')}", report)
        return told

    def pause_and_resume(self, ranks: Ranks, series: str, *words: str) -> None:
        """One pause, with `words`, one resume right behind it, and the contents after it."""
        tenant = str(ranks.tenant)
        told = [self.command(ranks, *each) for each in (("pause", tenant, *words), ("resume", tenant))]
        for action, each in zip(("pause", "resume"), told, strict=True):
            self.result.sample(f"{series}_{action}_s", each["wall_s"])
        wrong = sum(ranks.call("wrong", self.left(30)))
        self.result.sample("wrong_blocks", wrong)
        walls = [each["wall_s"] for each in told]
        common.log(f"{series}: pause {walls[0]:.3f} resume {walls[1]:.3f} s, wrong {wrong}")

    def write(self, ranks: Ranks, what: str) -> None:
        """Has all of them change their memory, another way than before."""
        self.seed += 1
        ranks.call("write", self.left(60), what=what, seed=self.seed)

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
        started = self.start(label, f"race-{label}-{os.getpid()}", ranks)
        block = self.args.block_mib * MIB
        made = started.call("hold", self.left(60), size_bytes=size_bytes, block_bytes=block)
        if any(each["bytes"] < size_bytes * 0.95 for each in made):
            raise JobError(f"{label} holds {made}")
        return started

    def pinned(self, ranks: Ranks, prefix: str) -> None:
        """Plain copies of all of `ranks` together."""
        ranks.call("pinned_setup", self.left(60), size_bytes=self.args.copy_mib * MIB)
        for _ in range(PINNED_REPEATS):
            for way in ("out", "in", "both"):
                rates = ranks.call("pinned_copy", self.left(30), way=way, times=4)
                self.result.sample(f"{prefix}_{way}_gb_s", sum(rates))
        ranks.call("pinned_free", self.left(30))
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
        told = self.command(ranks, "pause", tenant)
        self.result.sample("kept_first_pause_s", told["wall_s"])
        freed = self.plain.call("free_bytes")[0] - full
        detail = f"{freed / GIB:.2f} of {size / GIB:.2f} GiB"
        self.result.check("kept: a pause gives all of it back", freed >= 0.99 * size, detail)
        self.result.sample("kept_first_resume_s", self.command(ranks, "resume", tenant)["wall_s"])
        self.result.sample("wrong_blocks", sum(ranks.call("wrong", self.left(30))))
        for what, rounds in KINDS:
            for _ in range(rounds):
                self.write(ranks, what)
                self.pause_and_resume(ranks, f"kept_{what}")
        self.data["kept_stats"] = host_bytes(cli.sublet("stats", tenant, "--json", timeout_s=20))
        self.stop(ranks)

    def case_prepared(self) -> None:
        """A process whose host memory was brought in before its first pause."""
        size = self.size(self.args.kept_gib, 1)
        ranks = self.hold("prepared", size)
        self.data["sizes"]["prepared_first"] = size
        tenant = str(ranks.tenant)
        told = cli.sublet("prepare", tenant, timeout_s=self.left(CHANGE_S))
        if told["exit"] != 0:
            raise JobError(cli.say(told))
        self.result.sample("prepare_s", told["wall_s"])
        self.pause_and_resume(ranks, "prepared_first")
        self.stop(ranks)

    def case_swap(self) -> None:
        """Two tenants on GPU 0."""
        size = self.size(self.args.swap_gib, 2)
        self.data["sizes"]["swap"] = size
        first = self.hold("first", size)
        self.command(first, "pause", str(first.tenant))
        second = self.hold("second", size)
        turn = [second, first]
        # Each has its first pause behind it, and host memory, when both have been away once.
        self.swap(turn, "swap_first")
        self.swap(turn, "swap_first")
        for _ in range(self.args.swap_rounds):
            self.swap(turn, "swap")
        self.stop(first, second)

    def swap(self, turn: list[Ranks], series: str) -> None:
        """The one whose turn it is rewrites everything and leaves; the other comes, and is right."""
        here, away = turn
        self.write(here, "all")
        told = self.command(here, "swap", str(here.tenant), str(away.tenant))
        self.result.sample(f"{series}_s", told["wall_s"])
        wrong = sum(away.call("wrong", self.left(30)))
        self.result.sample("wrong_blocks", wrong)
        common.log(f"{series}: {told['wall_s']:.3f} s, wrong {wrong}")
        turn.reverse()

    def case_every(self) -> None:
        """All GPUs together."""
        size = self.size(self.args.every_gib, self.gpus)
        plain = self.start("pinned-every", None, self.gpus)
        self.pinned(plain, "pinned_every")
        self.stop(plain)
        ranks = self.hold("every", size, self.gpus)
        self.data["sizes"]["every"] = size
        self.pause_and_resume(ranks, "every_first")
        for _ in range(4):
            self.write(ranks, "all")
            self.pause_and_resume(ranks, "every")
        self.stop(ranks)

    def case_nccl(self) -> None:
        """Communicators alone."""
        needs_torch()
        race_nccl.run(self)

    def case_saver(self) -> None:
        """By tag, compared with torch_memory_saver."""
        needs_torch()
        for way in ("sublet", "retained", "saver"):
            label = f"saver_{way}"
            if way != "sublet" and not has_rival():
                self.skip(label, "no wheel of torch_memory_saver is in the bundle, and it is not installed")
                continue
            facts = race_saver.start(self.work, way, self.args.tag_gb).finish(self.result, self.left(), prefix=label)
            self.data["sizes"][label] = facts.get("kept_bytes", 0)
            samples = self.data["samples"]
            if way != "saver" and len(samples.get(f"{label}_pause_s", [])) > 1:
                samples[f"{label}_first_pause_s"] = [samples[f"{label}_pause_s"].pop(0)]

    def case_checkpoint(self) -> None:
        """The driver's own way, on a process without Sublet."""
        if not self.info["checkpoints"]:
            raise Skipped("this driver has no cuCheckpointProcess functions")
        size = self.size(self.args.checkpoint_gib or self.args.kept_gib, 1)
        self.data["sizes"]["checkpoint"] = size
        child = self.start("child", None)
        child.call("hold", self.left(60), size_bytes=size, block_bytes=self.args.block_mib * MIB)
        took: dict[str, float] = {}
        for step in ("lock", "checkpoint", "restore", "unlock"):
            answer = self.plain.call("checkpoint", self.left(150), step=step, pid=child.pids[0])[0]
            if answer["code"] != 0:
                raise Skipped(f"cuCheckpointProcess{step.capitalize()} returned {answer['code']}")
            took[step] = answer["seconds"]
        self.result.sample("checkpoint_pause_s", took["lock"] + took["checkpoint"])
        self.result.sample("checkpoint_resume_s", took["restore"] + took["unlock"])
        self.result.sample("wrong_blocks", sum(child.call("wrong", self.left(30))))
        self.stop(child)

    # ------------------------------------------------------------ running them

    def skip(self, name: str, why: str) -> None:
        """Says that something was not run."""
        self.data["skipped"][name] = why
        print(f"SKIPPED {name}: {why}", flush=True)

    def run(self, case: Case) -> None:
        """One case, whose failure is its own."""
        now = time.monotonic()
        if self.gpus < case.gpus_min:
            self.skip(case.name, f"it wants {case.gpus_min} GPUs, and there is {self.gpus}")
            return
        if self.ends - now < case.least_s * self.args.scale:
            self.skip(case.name, f"{max(0.0, self.ends - now):.0f} s were left; RACE_CASES={case.name} runs it alone")
            return
        self.case, self.case_ends = case.name, min(self.ends, now + case.limit_s)
        common.log(f"== {case.name}: {case.body.__doc__ or ''}".strip())
        try:
            case.body(self)
            self.result.check(f"{case.name}: ended by itself", True, f"{time.monotonic() - now:.0f} s")
        except Skipped as skipped:
            self.skip(case.name, str(skipped))
        except Exception as error:
            # A mistake in one case must not cost the others' minutes.
            if not isinstance(error, JobError):
                traceback.print_exc()
            self.result.check(f"{case.name}: ended by itself", False, f"{type(error).__name__}: {error}")
        finally:
            while self.started:
                self.started.pop().kill()
            self.case_ends = self.ends
        self.data.setdefault("case_s", {})[case.name] = round(time.monotonic() - now, 1)
        self.result.save()


@dataclass(frozen=True)
class Case:
    """A part of the race."""

    name: str
    body: Callable[[Race], None]
    #: Without as many seconds left it is not begun, and it is ended after the others.
    least_s: float
    limit_s: float
    gpus_min: int = 1


CASES = (
    Case("pinned", Race.case_pinned, 10, 90),
    Case("kept", Race.case_kept, 25, 120),
    Case("prepared", Race.case_prepared, 10, 60),
    Case("swap", Race.case_swap, 20, 80),
    Case("every", Race.case_every, 15, 60, 2),
    Case("nccl", Race.case_nccl, 60, 180, 2),
    Case("saver", Race.case_saver, 75, 150),
    Case("checkpoint", Race.case_checkpoint, 35, 120),
)


def chosen(words: str, cases: tuple[Case, ...] = CASES) -> list[Case]:
    """The cases that one of the words, with commas between, is a part of the name of; all without words. What others
    are measured against comes along."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    lost = [word for word in wanted if not any(word in case.name for case in cases)]
    if lost:
        raise JobError(f"no case has {' or '.join(lost)} in its name; there are {', '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or case.name == "pinned" or any(word in case.name for word in wanted)]


def host_bytes(told: dict[str, Any]) -> dict[str, int]:
    """Host memory that each process of a tenant holds, by its id, out of what `stats --json` said."""
    found: dict[str, int] = {}
    for tenant in cli.tenants(told):
        for entry in tenant.get("members", []):
            found[str(entry["member"]["pid"])] = entry["pool"]["host_arena_bytes"]
    return found


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=260)
    parser.add_argument("--cases", default="", help="words, with commas: cases with one of them in their name (default: all)")
    parser.add_argument("--kept-gib", type=float, default=60.0, help="GiB of the process that is paused alone")
    parser.add_argument("--swap-gib", type=float, default=60.0, help="GiB of each of the two tenants that swap")
    parser.add_argument("--every-gib", type=float, default=16.0, help="GiB a GPU, on all GPUs together")
    parser.add_argument("--tag-gb", type=float, default=20.0, help="GB kept by tag; twice as much is discarded")
    parser.add_argument("--checkpoint-gib", type=float, default=0.0, help="GiB of the process that is checkpointed (0: as --kept-gib)")
    parser.add_argument("--block-mib", type=int, default=512, help="size of one allocation")
    parser.add_argument("--copy-mib", type=int, default=1024, help="size of one pinned copy")
    parser.add_argument("--swap-rounds", type=int, default=4)
    parser.add_argument("--many", type=int, default=20, help="communicators of the larger NCCL case")
    parser.add_argument("--nccl-cycles", type=int, default=8, help="cycles with 2 communicators; half as many with more")
    parser.add_argument("--cold-host", action="store_true", help="do not touch host memory first")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that a case must have left to be begun")
    return parser.parse_args(argv)


def body(args: Any, result: Result, work: Path) -> None:
    """The cases, then the figures and the tables."""
    cases = chosen(args.cases)
    race = Race(args, result, work)
    common.at_deadline(lambda _reason: conclude(race))
    for case in cases:
        race.run(case)
    conclude(race)
    show(result)


def conclude(race: Race) -> None:
    """The figures of what was measured."""
    result, data = race.result, race.data
    data["phases"] = race.phases.summaries()
    wrong = data["samples"].get("wrong_blocks", [])
    if wrong:
        result.check("contents right after every resume", sum(wrong) == 0, f"{sum(wrong)} wrong blocks in {len(wrong)} looks")
    race_figures.finish(result)
    result.save()


def show(result: Result) -> None:
    """The tables."""
    data = result.data
    runner.verdicts(result)
    print()
    runner.table(race_figures.rows(data))
    print()
    for name in ("nccl2", "nccl20"):
        held = [data["samples"].get(f"{name}_{what}") for what in ("host_mib", "own_count", "imported_count")]
        if all(held):
            parts = [f"{max(each):,.0f} {what}" for each, what in zip(held, ("MiB of host memory", "own blocks", "imported"), strict=True)]
            print(f"{name}, at most a rank: {', '.join(parts)}", flush=True)
    for goal in data["goals"]:
        print(f"{'reached' if goal['reached'] else 'MISSED '} {goal['what']}: {goal['detail']}", flush=True)
    for name, why in data["skipped"].items():
        print(f"SKIPPED {name}: {why}", flush=True)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(common.run_job(options, "race", body))
