"""Does a deep pause leave nothing on the GPU, and bring all of it back?

A process of `--gib` GiB each (three sizes), with a captured graph, is paused by turns plainly and deep, and deep after each byte
was written again (`rewritten`), and resumed. What is left
on the GPU is what `nvidia-smi` says, less what it says of an idle GPU. After each resume a graph is replayed and all contents are added up.
The same program without Sublet is taken off the GPU and back by the driver's own checkpoint calls. Then two
processes that share a tensor by CUDA IPC go through `--cycles` deep pauses, and two tenants change places. `--kills` commands
are killed at random instants, half of them pauses and half resumes; the same command, given once more, must succeed.
A process with all that a plain pause leaves in place (small plain memory, memory of a stream, a graph that allocates, an array, another
context, a green one, registered host memory, an event that another process has open) is paused deep and looks at all of it.

`--rows` are the parts to run, by comma. One call makes some 600 cycles, or 200 kills; each says how many it made before its deadline.
Rows that run only if they are named: a process of JAX, one of CuPy, and one of torch with twenty graphs go through `--library-cycles`
deep pauses each, and are compared bit for bit. A process under MPS must be refused by name (`mps`). If there are two GPUs, the driver is told once to restore a process on the other
one, and what it says is written down.

With `--tenants N` it is another run: N processes of `--tenant-gib` each, in tenants that take turns with `auto,deep`, on a GPU
of which others hold all but `--room-gib`. Their contexts together do not fit. Each must get its memory, and after `--rounds`
switches from one to the next by turns all must hold what they held.

Bound: what a plain pause and resume take (contents over the link at 55 GB/s), and some 0.4 s and 0.25 s for a context by the driver; the driver alone
copies at some 2.3 and 6 GB/s. The run is nine starts of torch, some 70 s, and 200 cycles of some 1 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cli
import common
import driver
import runner
from common import LEFT_MIB, JobError, Result
from deep_calls import calls
from deep_libraries import LIBRARIES
from deep_memory import Holder, Kept, Owner, Plain, restore_on
from race_memory import Checkpoints
from suite import NotRun, Row, Suite, is_there, main, options, role_of, words_of

ROUNDS = 3
WAYS = ("plain", "deep", "rewritten")
#: What all processes of a tenant may hold more at the end than at the start.
GROWTH_MAX = {"anonymous_mib": 64, "descriptors": 0, "threads": 0}
#: Seconds that the driver alone keeps a process off the GPU: threads of its libraries make calls meanwhile.
OFF_S = 1.0
ROLES = {"holder": Holder, "owner": Owner, "plain": Plain, "kept": Kept, **LIBRARIES}


def held(group: int) -> dict[str, int]:
    """What the processes of a process group hold of the host."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(int(path.name)) == group:
                pids.append(int(path.name))
    found = common.held_by(pids)
    return {"anonymous_mib": found["anonymous_bytes"] // common.MIB, "threads": found["threads"], "descriptors": found["descriptors"]}


class Deep(Suite):
    HEAD = ("process", "way", "out s", "left MiB", "back s", "first replay ms")
    END_S = 15.0
    FAILED = "{}"

    def __init__(self, rows: Sequence[Row], args: Any, result: Result, work: Path) -> None:
        super().__init__(rows, args, result, work)
        driver.call("cuInit", ctypes.c_uint(0))
        self.idle_mib = common.used_mib()
        self.gpus = len(self.idle_mib)
        result.data["baseline"]["idle_mib"] = self.idle_mib[0]

    def left_mib(self) -> int:
        """What is left of all processes, on the GPU that has most of it."""
        return max(used - idle for used, idle in zip(common.used_mib(), self.idle_mib, strict=True))

    def begin(self, label: str, role: str, tenant: str | None, **env: str) -> runner.Ranks:
        """A process of this script, with more of its environment."""
        env |= {} if tenant is None else {"SUBLET_REQUIRED": "1"}
        if role in LIBRARIES:
            env["LD_LIBRARY_PATH"] = runner.cuda_libraries()
        return self.start(label, [__file__, "--role", role], tenant, env=env)

    def act(self, *words: str) -> float:
        """A command that must succeed; its time."""
        return float(self.command(*words)["wall_s"])

    def cycle(self, label: str, tenant: str, way: str) -> int:
        """One pause and resume; what was left between."""
        out_s = self.act("pause", tenant, *([] if way == "plain" else ["--deep"]))
        left = self.left_mib()
        back_s = self.act("resume", tenant)
        for name, value in (("out_s", out_s), ("left_mib", left), ("back_s", back_s)):
            self.result.sample(f"{label}_{way}_{name}", value)
        return left

    def cycles(self, label: str, tenant: str, wanted: int, wrong: Callable[[], list[str]], keep_s: float) -> tuple[int, int, list[str]]:
        """As many deep pauses as are wanted, or fit: how many, the most that was left, and what was wrong behind them."""
        done, most, found = 0, 0, list[str]()
        while done < wanted and self.left_s() > keep_s:
            most = max(most, self.cycle(label, tenant, "deep"))
            found += wrong()
            done += 1
        return done, most, sorted(set(found))

    def by_driver(self, pid: int, *steps: str, off_s: float = 0.0) -> dict[str, float]:
        """The driver's own steps, on a process without Sublet; the seconds of each."""
        took: dict[str, float] = {}
        for step in steps:
            if step == "restore":
                time.sleep(off_s)
            told = Checkpoints.step(step, pid, 30_000)
            if told["code"] != 0:
                raise JobError(f"the driver's {step} of a process without Sublet returned {told['code']}")
            took[step] = told["seconds"]
        return took

    def line(self, label: str, way: str) -> None:
        """Adds the medians of `way` to the table."""
        cells = (("out_s", 2), ("left_mib", 0), ("back_s", 2), ("first_ms", 1))
        self.table.append((label, way, *(self.middle(f"{label}_{way}_{name}", digits) for name, digits in cells)))

    def show(self) -> None:
        """The last check, then the tables."""
        after = self.left_mib()
        self.result.check("nothing is left at the end", after <= LEFT_MIB, f"{after} MiB")
        super().show()

    # ------------------------------------------------------------ sizes

    def size(self, gib: float) -> None:
        """One size: the driver alone, then a tenant."""
        label = f"{gib:g}GiB"
        self.driver_alone(label, gib)
        tenant = f"deep-{label}-{os.getpid()}"
        child = self.begin(label, "holder", tenant)
        self.data["versions"].update(child.call("hold", 90, gib=gib)[0] or {})
        wrong = 0
        # The first pause of each way brings host memory in.
        self.act("pause", tenant)
        self.act("resume", tenant)
        for _ in range(ROUNDS):
            for way in WAYS:
                if way == "rewritten":
                    child.call("rewrite", 60)
                left = self.cycle(label, tenant, way)
                told = child.call("same", 60)[0]
                self.result.sample(f"{label}_{way}_first_ms", told["first_ms"])
                wrong += not told["same"]
                if way != "plain":
                    self.result.check(f"{label}: {LEFT_MIB} MiB or less are left", left <= LEFT_MIB, f"{left} MiB")
        self.result.check(f"{label}: contents and graph are the same after {len(WAYS) * ROUNDS} pauses", wrong == 0, f"{wrong} wrong")
        child.close()
        for way in ("driver", *WAYS):
            self.line(label, way)

    def driver_alone(self, label: str, gib: float) -> None:
        """The driver's own calls, on the same program without Sublet."""
        child = self.begin(f"driver-{label}", "holder", None)
        child.call("hold", 90, gib=gib)
        took = self.by_driver(child.pids[0], "lock", "checkpoint")
        self.result.sample(f"{label}_driver_left_mib", self.left_mib())
        took |= self.by_driver(child.pids[0], "restore", "unlock")
        self.result.sample(f"{label}_driver_out_s", took["lock"] + took["checkpoint"])
        self.result.sample(f"{label}_driver_back_s", took["restore"] + took["unlock"])
        told = child.call("same", 60)[0]
        self.result.sample(f"{label}_driver_first_ms", told["first_ms"])
        self.result.check(f"{label}: the driver alone brings the same back", told["same"])
        child.close()

    # ------------------------------------------------------------ shared memory, kills, deaths

    def shared(self) -> None:
        """Two processes that share a tensor."""
        label, tenant = "shared", f"deep-shared-{os.getpid()}"
        child = self.begin(label, "owner", tenant)
        child.call("share", 90)

        def wrong_now() -> list[str]:
            for what, amount in held(child.process.pid).items():
                self.result.sample(f"shared_{what}", amount)
            return [] if child.call("same", 60)[0] else ["contents"]

        first = child.call("same", 60)[0]
        keep_s = 60 if self.args.kills or self.args.deaths else 25
        done, most, wrong = self.cycles(label, tenant, self.args.cycles, wrong_now, keep_s)
        self.flat(label)
        self.result.check(f"two processes that share memory: {self.args.cycles} cycles", done == self.args.cycles, f"{done} done")
        self.result.check("each sees what the other has written after each", first and not wrong, ", ".join(wrong) or "0 wrong")
        self.result.check(f"{LEFT_MIB} MiB or less are left after each", most <= LEFT_MIB, f"at most {most} MiB")
        self.line(label, "deep")
        self.kills(child, tenant)
        child.close()
        self.deaths()

    def flat(self, label: str) -> None:
        """Do the last tenth of the cycles hold what the first tenth held? What both took is printed."""
        share = max(1, self.args.cycles // 10)
        for what, limit in GROWTH_MAX.items():
            if len(self.samples(f"{label}_{what}")) >= 2 * share:
                grown, detail = common.growth(self.samples(f"{label}_{what}"), share)
                self.result.check(f"{what} of the processes are flat", grown <= limit, detail)
        for what in ("out_s", "back_s"):
            values = self.samples(f"{label}_deep_{what}")
            if len(values) >= 2 * share:
                first, last = (common.summarise(part)["median"] for part in (values[:share], values[-share:]))
                self.result.note(f"{label} {what}: the first {share} took {first:.3f} s each, the last {share} {last:.3f} s (medians)")

    def kills(self, child: runner.Ranks, tenant: str) -> None:
        """Commands are killed; the same command once more finds a way on."""
        instants = random.Random(self.args.seed)
        usual_s = {name: float(self.median(f"shared_deep_{name}") or 1) for name in ("out_s", "back_s")}
        wrong, in_time, done = 0, 0, 0
        for number in range(self.args.kills):
            if self.left_s() < 30:
                break
            name, words = (("out_s", ("pause", tenant, "--deep")), ("back_s", ("resume", tenant)))[number % 2]
            told = cli.killed(*words, after_s=instants.uniform(0, usual_s[name]))
            in_time += not told["ended_before"]
            self.result.sample(f"shared_killed_{name}", self.act(*words))
            wrong += not child.call("same", 60)[0] if name == "back_s" else self.left_mib() > LEFT_MIB
            done += 1
        what = f"{self.args.kills} commands killed, the same command then succeeds, contents right, {LEFT_MIB} MiB or less left"
        self.result.check(what, wrong == 0 and done == self.args.kills, f"{done} done, {in_time} before they had ended, {wrong} wrong")

    def deaths(self) -> None:
        """Of the two that share, the reader is killed: in a deep pause, while it is frozen, in a resume."""
        tenant = f"deep-deaths-{os.getpid()}"
        child = self.begin("deaths", "owner", tenant)
        instants = random.Random(self.args.seed)
        wrong, done = 0, 0
        for number in range(self.args.deaths):
            if self.left_s() < 40:
                break
            victim = child.call("share", 90)[0][1]
            wrong += not child.call("same", 60)[0]
            before = child.call("first_last", 60)[0]
            moment = ("pause", "frozen", "resume")[number % 3]
            if moment == "pause":
                cli.killed("pause", tenant, "--deep", after_s=instants.uniform(0, 0.5), victim=victim)
            else:
                self.act("pause", tenant, "--deep")
            if moment == "frozen":
                os.kill(victim, signal.SIGKILL)
            elif moment == "resume":
                cli.killed("resume", tenant, after_s=instants.uniform(0, 0.3), victim=victim)
            # The first may end by naming the dead one.
            if cli.sublet("resume", tenant, "--json", timeout_s=60)["exit"] != 0:
                self.act("resume", tenant)
            wrong += child.call("first_last", 60)[0] != before
            done += 1
        what = f"{self.args.deaths} readers killed, the owner comes back with its contents"
        self.result.check(what, wrong == 0 and done == self.args.deaths, f"{done} done, {wrong} wrong")
        child.close()

    # ------------------------------------------------------------ what a plain pause leaves in place

    def kept(self) -> None:
        """What a plain pause leaves in place comes back with the contexts."""
        tenant = f"deep-kept-{os.getpid()}"
        child = self.begin("kept", "kept", tenant)
        child.call("make", 60)
        self.act("pause", tenant)
        mib = self.left_mib()
        tenants = cli.tenants(cli.sublet("ps", "--json", timeout_s=30))
        told = [each["left"] for each in tenants if each["tenant"] == tenant]
        self.act("resume", tenant)
        told_mib = sum(gpu["bytes"] for left in told for process in left for gpu in process["gpus"]) // common.MIB
        what = "what ps says that a plain pause leaves is what nvidia-smi shows, or it knows the process by another id"
        self.result.check(what, told_mib == 0 or abs(told_mib - mib) <= mib // 10, f"{told_mib} of {mib} MiB")
        _, most, wrong = self.cycles("kept", tenant, ROUNDS, lambda: list(child.call("wrong", 60)[0]), 0.0)
        what = "small plain memory, memory of a stream, of a graph, of another context, an array, a green context, and host memory come back"
        self.result.check(what, not wrong, ", ".join(wrong))
        self.result.check(f"{LEFT_MIB} MiB or less are left of it", most <= LEFT_MIB, f"at most {most} MiB")
        child.close()

    def event(self) -> None:
        """An event of one process that another has open."""
        tenant = f"deep-event-{os.getpid()}"
        child, other = (self.begin(label, "kept", tenant) for label in ("event", "event-other"))
        for each in (child, other):
            each.call("make", 60)
        other.call("open_event", 30, handle=child.call("share_event", 30)[0])
        self.cycle("event", tenant, "deep")
        child.call("record", 30)
        other.call("wait", 30)
        self.result.check("an event that another process has open is heard after a deep pause", True)
        for each in (other, child):
            each.close()

    # ------------------------------------------------------------ several tenants

    def many(self) -> None:
        """Tenants whose contexts do not fit together take turns."""
        args, names = self.args, [f"deep-{number}-{os.getpid()}" for number in range(self.args.tenants)]
        outside = self.begin("outside", "plain", None)
        free_gib = outside.call("leave", 60, gib=args.room_gib)[0]
        self.data["baseline"]["room_gib"] = free_gib
        children: list[runner.Ranks] = []
        for name in names:
            began = time.monotonic()
            children.append(self.begin(name, "plain", name, SUBLET_TURNS="auto,deep"))
            children[-1].call("hold", 90, gib=args.tenant_gib)
            self.result.sample("start_s", time.monotonic() - began)
        what = f"{len(names)} tenants of {args.tenant_gib:g} GiB are all there, with room for {free_gib:.1f} GiB"
        self.result.check(what, len(children) == len(names))
        wrong = 0
        for number in range(args.rounds * len(names)):
            if self.left_s() < 30:
                break
            self.result.sample("switch_s", self.act("switch", names[number % len(names)], "--wait", "30s"))
            wrong += not children[number % len(names)].call("same", 60)[0]
        for child in children:
            wrong += not child.call("same", 60)[0]
        took = common.summarise(self.samples("switch_s"))
        every = args.rounds * len(names)
        self.result.check(f"{every} switches from one to the next, all hold what they held", wrong == 0 and took["count"] == every, f"{took}")
        states = cli.sublet("ps", "--json", timeout_s=30)
        deep = sum(member["member"]["state"] == "deep" for tenant in cli.tenants(states) for member in tenant["members"])
        self.result.check("contexts of some are away", deep > 0, f"{deep} of {len(names)}")
        self.table = [("tenants", "switch median s", "p99 s", "deep at the end")]
        self.table.append((str(len(names)), f"{took['median'] or 0:.2f}", f"{took['p99'] or 0:.2f}", str(deep)))
        # One that is frozen does not hear that it is to end.
        for name, child in zip(names, children, strict=True):
            self.act("switch", name, "--wait", "30s")
            child.close()
        outside.close()

    def swap(self) -> None:
        """Two tenants that change places, deep."""
        names = [f"deep-{name}-{os.getpid()}" for name in ("one", "two")]
        children = [self.begin("one", "holder", names[0])]
        children[0].call("hold", 90, gib=4.0)
        self.act("pause", names[0], "--deep")
        children.append(self.begin("two", "holder", names[1]))
        children[1].call("hold", 90, gib=4.0)
        wrong, leaves = 0, names[0]
        for number in range(4):
            leaves, comes = names[(number + 1) % 2], names[number % 2]
            self.result.sample("swap_deep_s", self.act("swap", leaves, comes, "--deep"))
            wrong += not children[number % 2].call("same", 60)[0]["same"]
        self.result.check("two tenants change places 4 times, deep: the same", wrong == 0, f"{wrong} wrong")
        # The last to leave: a process in a deep pause would not hear that it is to end.
        self.act("resume", leaves)
        for child in children:
            child.close()

    # ------------------------------------------------------------ libraries, another GPU, MPS

    def library(self, name: str) -> None:
        """A process of a library."""
        self.needs(name)
        tenant, wanted = f"deep-{name}-{os.getpid()}", self.args.library_cycles
        child = self.begin(name, name, tenant)
        versions = child.call("hold", 120, gib=self.args.library_gib)[0]
        self.data["versions"].update(versions)
        try:
            done, most, wrong = self.cycles(name, tenant, wanted, lambda: list(child.call("same", 90)[0]), 30.0)
        except JobError as error:
            raise JobError(f"cycle {len(self.samples(f'{name}_deep_out_s')) + 1}: {error}; the process: {child.tail()}") from error
        said = " ".join(f"{library} {version}" for library, version in versions.items())
        what = f"{said}, {self.args.library_gib:g} GiB: contents and results have the same bits after each of {wanted} deep pauses"
        self.result.check(what, not wrong and done == wanted, f"{done} done; wrong: {', '.join(wrong) or 'none'}")
        self.result.check(f"{said}: {LEFT_MIB} MiB or less are left after each", most <= LEFT_MIB, f"at most {most} MiB")
        self.line(name, "deep")
        child.close()

    def needs(self, name: str) -> None:
        """Ends a row whose library is not there, or that has no time."""
        missing = not is_there(LIBRARIES[name].NEEDS)
        if missing or self.left_s() < 60:
            raise NotRun("it is not installed" if missing else "no time is left")

    def library_of_driver(self, name: str) -> None:
        """The same without Sublet, by the driver's own calls."""
        child = self.begin(f"driver-{name}", name, None)
        child.call("hold", 120, gib=1.0)
        wrong, done = set[str](), 0
        while done < self.args.library_cycles and self.left_s() > 30:
            try:
                self.by_driver(child.pids[0], "lock", "checkpoint", "restore", "unlock", off_s=OFF_S)
            except JobError as error:
                raise JobError(f"number {done + 1}: {error}: {child.why()}") from error
            wrong |= set(child.call("same", 90)[0])
            done += 1
        what = f"{name} without Sublet: {self.args.library_cycles} checkpoints by the driver"
        self.result.check(what, not wrong and done == self.args.library_cycles, f"{done} done; wrong: {', '.join(sorted(wrong)) or 'none'}")
        child.close()

    def other_gpu(self) -> None:
        """Once: does the driver bring a process back on another GPU? What it says is no verdict on a product that does not ask it."""
        count = self.gpus
        if count < 2:
            raise NotRun("there is one GPU")
        tenant = f"deep-other-{os.getpid()}"
        child = self.begin("other", "plain", tenant)
        child.call("hold", 60, gib=1.0)
        self.act("pause", tenant, "--deep")
        changed = {0: 1, 1: 0, **{gpu: gpu for gpu in range(2, count)}}
        same = {gpu: gpu for gpu in range(count)}
        ways = {"the pair 0 to 1": {0: 1}, "0 and 1 change places": changed, "each GPU to itself": same, "the pair 0 to 0": {0: 0}}
        for what, places in ways.items():
            said = restore_on(child.pids[0], places)
            self.result.note(f"cuCheckpointProcessRestore, {what}: {said}")
            self.data["baseline"][f"restore: {what}"] = said
            if said.startswith("0 "):
                break
        self.act("resume", tenant)
        now = [used - idle for used, idle in zip(common.used_mib(), self.idle_mib, strict=True)]
        contents = "the same" if child.call("same", 60)[0] else "WRONG"
        self.result.note(f"other_gpu: after the resume {now} MiB are used on the GPUs, contents are {contents}")
        child.close()

    def under_mps(self) -> None:
        """A process under MPS is refused by name before anything moves, and is paused plainly. What the driver alone says to it is written down."""
        control = shutil.which("nvidia-cuda-mps-control")
        if control is None or self.left_s() < 60:
            raise NotRun("there is no nvidia-cuda-mps-control" if control is None else "no time is left")
        folder = self.work / "mps"
        folder.mkdir()
        place = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
        subprocess.run([control, "-d"], env={**os.environ, **place}, timeout=20, check=True)
        try:
            tenant = f"deep-mps-{os.getpid()}"
            child = self.begin("mps", "holder", tenant, **place)
            child.call("hold", 90, gib=1.0)
            told = cli.sublet("pause", tenant, "--deep", timeout_s=30)
            said = cli.say(told)
            self.result.check("under MPS a deep pause is refused by name", told["exit"] != 0 and "MPS" in said, said)
            self.act("pause", tenant)
            self.act("resume", tenant)
            self.result.check("a process under MPS holds the same after a plain pause", child.call("same", 60)[0]["same"])
            child.close()
            alone = self.begin("driver-mps", "holder", None, **place)
            alone.call("hold", 90, gib=1.0)
            codes = {step: Checkpoints.step(step, alone.pids[0], 10_000)["code"] for step in ("lock", "checkpoint")}
            self.result.note(f"mps: without Sublet the driver returned {codes}")
            for step in ("restore", "unlock"):
                Checkpoints.step(step, alone.pids[0], 10_000)
            alone.close()
        finally:
            self.stop()
            subprocess.run([control], input="quit -t 5\n", text=True, env={**os.environ, **place}, timeout=20, check=False)


#: The rows that run unless others are named, and those that run only if they are. `sizes` is one for each size.
ROWS = (Row("sizes", Deep.size), Row("swap", Deep.swap), Row("kept", Deep.kept), Row("event", Deep.event), Row("shared", Deep.shared))
MORE_ROWS = (
    *(Row(name, lambda deep, name=name: deep.library(name)) for name in LIBRARIES),
    *(Row(f"driver_{name}", lambda deep, name=name: deep.library_of_driver(name)) for name in LIBRARIES),
    Row("other_gpu", Deep.other_gpu),
    Row("mps", Deep.under_mps),
    Row("calls", calls),
)
NAMES = tuple(row.name for row in (*ROWS, *MORE_ROWS))

parse = options(
    __doc__, 560, gib=("0.5,16,48", "sizes of the processes, by comma"),
    rows=(",".join(row.name for row in ROWS), f"what to run, by comma: {','.join(NAMES)}"),
    library_cycles=(20, "deep pauses of each library's process"), library_gib=(4.0, "what each of them holds"),
    cycles=(200, "deep pauses of two processes that share memory"), kills=(40, "commands to kill, pauses and resumes by turns"),
    deaths=(6, "processes to kill that share memory with another"), seed=(1, "of the instants at which commands are killed"),
    tenants=(0, "tenants that take turns, instead of all else"), tenant_gib=(4.0, "what each of them holds"),
    room_gib=(6.5, "what is free for all of them together"), rounds=(6, "how often each of them has its turn"), role=role_of(*ROLES),
)


def body(args: Any, result: Result, work: Path) -> None:
    """All of it, then the table."""
    if not Checkpoints.present():
        raise JobError("this driver has no cuCheckpointProcess functions: it must be 570 or newer")
    named = {row.name: [row] for row in (*ROWS, *MORE_ROWS)}
    sizes = [float(size) for size in words_of(args.gib)]
    named["sizes"] = [Row(f"{gib:g} GiB", lambda deep, gib=gib: deep.size(gib)) for gib in sizes]
    unknown = set(words_of(args.rows)) - set(named)
    if unknown:
        raise JobError(f"no row is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    rows = [row for name in words_of(args.rows) for row in named[name]]
    largest_gib = max([4.0, *(sizes if "sizes" in words_of(args.rows) else [])])
    if args.tenants:
        rows, largest_gib = [Row("many", Deep.many)], args.tenants * args.tenant_gib
    deep = Deep(rows, args, result, work)
    common.touch_host_memory(1.3 * largest_gib)
    deep.run(rows)


if __name__ == "__main__":
    main(parse, "deep", body, ROLES)
