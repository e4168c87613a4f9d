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
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli
import common
import driver
import runner
from common import LEFT_MIB, JobError, Result
from deep_calls import calls
from deep_libraries import LIBRARIES
from deep_memory import Kept, Plain
from deep_rows import library, library_of_driver, other_gpu, under_mps
from race_memory import Checkpoints

SIZES_GIB = "0.5,16,48"
ROWS = ("sizes", "swap", "kept", "event", "shared")
MORE_ROWS = (*LIBRARIES, *(f"driver_{name}" for name in LIBRARIES), "other_gpu", "mps", "calls")
ROUNDS = 3
WAYS = ("plain", "deep", "rewritten")
#: What all processes of a tenant may hold more at the end than at the start.
GROWTH_MAX = {"anonymous_mib": 64, "descriptors": 0, "threads": 0}


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=560)
    parser.add_argument("--gib", default=SIZES_GIB, help="sizes of the processes, by comma")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"what to run; also {','.join(MORE_ROWS)}")
    parser.add_argument("--library-cycles", type=int, default=20, help="deep pauses of each library's process")
    parser.add_argument("--library-gib", type=float, default=4.0, help="what each of them holds")
    parser.add_argument("--cycles", type=int, default=200, help="deep pauses of two processes that share memory")
    parser.add_argument("--kills", type=int, default=40, help="commands to kill, pauses and resumes by turns")
    parser.add_argument("--deaths", type=int, default=6, help="processes to kill that share memory with another")
    parser.add_argument("--seed", type=int, default=1, help="of the instants at which commands are killed")
    parser.add_argument("--tenants", type=int, default=0, help="tenants that take turns, instead of all else")
    parser.add_argument("--tenant-gib", type=float, default=4.0, help="what each of them holds")
    parser.add_argument("--room-gib", type=float, default=6.5, help="what is free for all of them together")
    parser.add_argument("--rounds", type=int, default=6, help="how often each of them has its turn")
    parser.add_argument("--role", choices=["holder", "owner", "plain", "kept", *LIBRARIES], help="used by the job itself")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- the processes


class Holder:
    """Tensors and a graph, and what their sums are."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.graph: Any = None
        self.total: Any = None
        self.wanted: list[float] = []

    def hold(self, gib: float) -> dict[str, Any]:
        """Makes them."""
        import torch

        numbers = torch.Generator(device="cuda")
        numbers.manual_seed(7)
        words = int(gib * common.GIB / 8 / 8)
        self.tensors = [
            torch.empty(words, dtype=torch.float64, device="cuda").uniform_(generator=numbers) for _ in range(8)
        ]
        matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.total = torch.mm(matrix, matrix).sum()
        self.wanted = self._sums()
        return runner.versions()

    def _sums(self) -> list[float]:
        import torch

        self.graph.replay()
        torch.cuda.synchronize()
        return [tensor.sum().item() for tensor in self.tensors] + [self.total.item()]

    def rewrite(self) -> None:
        """Every word changes its sign."""
        import torch

        for tensor in self.tensors:
            tensor.neg_()
        torch.cuda.synchronize()
        self.wanted = [-total for total in self.wanted[:-1]] + self.wanted[-1:]

    def same(self) -> dict[str, Any]:
        """Are the graph's result and all sums as at first, and how long did the first replay take?"""
        import torch

        began = time.perf_counter()
        self.graph.replay()
        torch.cuda.synchronize()
        first_ms = 1000 * (time.perf_counter() - began)
        return {"same": self._sums() == self.wanted, "first_ms": first_ms}


def reader(inbox: Any, outbox: Any) -> None:
    """The process that shares the owner's tensor: says its sum each time, and adds 1."""
    runner.begin(540)
    import torch

    tensor = inbox.get(timeout=60)
    outbox.put(os.getpid())
    while inbox.get(timeout=120):
        total = int(tensor.sum().item())
        tensor.add_(1)
        torch.cuda.synchronize()
        outbox.put(total)


class Owner:
    """The process that made it."""

    def __init__(self) -> None:
        self.queues: Any = None
        self.tensor: Any = None
        self.child: Any = None

    def share(self) -> list[int]:
        """Starts the other one; both process ids."""
        import torch
        import torch.multiprocessing as processes

        context = processes.get_context("spawn")
        self.queues = context.SimpleQueue(), context.SimpleQueue()
        if self.tensor is None:
            self.tensor = torch.zeros(1 << 27, dtype=torch.int64, device="cuda")
        self.child = context.Process(target=reader, args=(_Queue(self.queues[0]), self.queues[1]), daemon=True)
        self.child.start()
        self.queues[0].put(self.tensor)
        return [os.getpid(), self.queues[1].get()]

    def first_last(self) -> list[int]:
        """What its tensor begins and ends with; nobody writes it then."""
        return [int(self.tensor[at].item()) for at in (0, -1)]

    def same(self) -> bool:
        """Does each see what the other has written?"""
        import torch

        self.tensor.add_(1)
        torch.cuda.synchronize()
        before = int(self.tensor.sum().item())
        self.queues[0].put(True)
        seen = self.queues[1].get()
        return bool(seen == before and int(self.tensor.sum().item()) == before + self.tensor.numel())


class _Queue:
    """A queue without `timeout`, as one with it."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def get(self, timeout: float) -> Any:
        """What comes next."""
        del timeout
        return self.queue.get()


def serve(role: str) -> None:
    """One of them."""
    link = runner.connect()
    if role == "holder":
        holder = Holder()
        runner.serve(link, {"hold": holder.hold, "same": holder.same, "rewrite": holder.rewrite})
    if role == "plain":
        plain = Plain()
        runner.serve(link, {"hold": plain.hold, "leave": plain.leave, "same": plain.same})
    if role == "kept":
        kept = Kept()
        steps = (kept.make, kept.wrong, kept.share_event, kept.open_event, kept.record, kept.wait)
        runner.serve(link, {step.__name__: step for step in steps})
    if role in LIBRARIES:
        held = LIBRARIES[role]()
        runner.serve(link, {"hold": held.hold, "same": held.same})
    owner = Owner()
    runner.serve(link, {"share": owner.share, "same": owner.same, "first_last": owner.first_last})


# ---------------------------------------------------------------- the job


def held(group: int) -> dict[str, int]:
    """What the processes of a process group hold of the host."""
    found = dict.fromkeys(GROWTH_MAX, 0)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(int(path.name)) != group:
                continue
            status = (path / "status").read_text()
            found["anonymous_mib"] += int(status.partition("RssAnon:")[2].split()[0]) // 1024
            found["threads"] += int(status.partition("Threads:")[2].split()[0])
            found["descriptors"] += len(list((path / "fd").iterdir()))
    return found


class Deep:
    """The run."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.end = time.monotonic() + args.deadline - 15
        driver.call("cuInit", ctypes.c_uint(0))
        self.idle_mib = common.used_mib()
        result.data["baseline"]["idle_mib"] = self.idle_mib[0]
        self.rows: list[tuple[str, ...]] = [("process", "way", "out s", "left MiB", "back s", "first replay ms")]

    def left_s(self) -> float:
        """Until the job should have ended."""
        return self.end - time.monotonic()

    def left_mib(self) -> int:
        """What is left of all processes, on the GPU that has most of it."""
        return max(used - idle for used, idle in zip(common.used_mib(), self.idle_mib, strict=True))

    def start(self, label: str, role: str, tenant: str | None, turns: str = "", more: dict[str, str] | None = None) -> runner.Ranks:
        """A process of this script; `more` is of its environment."""
        script = [__file__, "--role", role]
        env = {} if tenant is None else {"SUBLET_REQUIRED": "1"}
        env |= more or {}
        if role in LIBRARIES:
            env["LD_LIBRARY_PATH"] = runner.cuda_libraries()
        if turns:
            env["SUBLET_TURNS"] = turns
        return runner.Ranks(self.work, label, 1, script, launcher="alone", life_s=self.args.deadline, tenant=tenant, env=env)

    def part(self, name: str, do: Callable[[], None]) -> None:
        """Does a part of the run; if it fails, the next ones are done all the same."""
        try:
            do()
        except JobError as error:
            self.result.check(name, False, str(error))
            common.stop_children()
        self.result.save()

    def act(self, *words: str) -> float:
        """A command that must succeed; its time."""
        told = cli.sublet(*words, "--json", timeout_s=min(90, max(5, self.left_s())))
        if told["exit"] != 0:
            raise JobError(cli.say(told))
        return float(told["wall_s"])

    def cycle(self, label: str, tenant: str, way: str) -> tuple[float, int, float]:
        """One pause and resume; how long each took, and what was left between."""
        words = ["pause", tenant] if way == "plain" else ["pause", tenant, "--deep"]
        out_s = self.act(*words)
        left = self.left_mib()
        back_s = self.act("resume", tenant)
        for name, value in (("out_s", out_s), ("left_mib", left), ("back_s", back_s)):
            self.result.sample(f"{label}_{way}_{name}", value)
        return out_s, left, back_s

    def row(self, label: str, way: str) -> None:
        """Adds the medians of `way`."""
        samples = self.result.data["samples"]

        def middle(name: str, digits: int) -> str:
            value = common.summarise(samples.get(f"{label}_{way}_{name}", []))["median"]
            return "-" if value is None else f"{value:.{digits}f}"

        self.rows.append((label, way, middle("out_s", 2), middle("left_mib", 0), middle("back_s", 2), middle("first_ms", 1)))

    def size(self, gib: float) -> None:
        """One size: the driver alone, then a tenant."""
        label = f"{gib:g}GiB"
        self.driver_alone(label, gib)
        tenant = f"deep-{label}-{os.getpid()}"
        child = self.start(label, "holder", tenant)
        self.result.data["versions"].update(child.call("hold", 90, gib=gib)[0] or {})
        wrong = 0
        # The first pause of each way brings host memory in.
        self.act("pause", tenant)
        self.act("resume", tenant)
        for _ in range(ROUNDS):
            for way in WAYS:
                if way == "rewritten":
                    child.call("rewrite", 60)
                _, left, _ = self.cycle(label, tenant, way)
                told = child.call("same", 60)[0]
                self.result.sample(f"{label}_{way}_first_ms", told["first_ms"])
                wrong += not told["same"]
                if way != "plain":
                    what = f"{label}: {LEFT_MIB} MiB or less are left"
                    self.result.check(what, left <= LEFT_MIB, f"{left} MiB")
        self.result.check(f"{label}: contents and graph are the same after {len(WAYS) * ROUNDS} pauses", wrong == 0, f"{wrong} wrong")
        child.close()
        for way in ("driver", *WAYS):
            self.row(label, way)

    def driver_alone(self, label: str, gib: float) -> None:
        """The driver's own calls, on the same program without Sublet."""
        child = self.start(f"driver-{label}", "holder", None)
        child.call("hold", 90, gib=gib)
        took: dict[str, float] = {}
        for step in ("lock", "checkpoint", "restore", "unlock"):
            told = Checkpoints.step(step, child.pids[0], 30_000)
            if told["code"] != 0:
                raise JobError(f"the driver's {step} of a process without Sublet returned {told['code']}")
            took[step] = told["seconds"]
            if step == "checkpoint":
                self.result.sample(f"{label}_driver_left_mib", self.left_mib())
        self.result.sample(f"{label}_driver_out_s", took["lock"] + took["checkpoint"])
        self.result.sample(f"{label}_driver_back_s", took["restore"] + took["unlock"])
        told = child.call("same", 60)[0]
        self.result.sample(f"{label}_driver_first_ms", told["first_ms"])
        self.result.check(f"{label}: the driver alone brings the same back", told["same"])
        child.close()

    def shared(self) -> None:
        """Two processes that share a tensor."""
        label, tenant = "shared", f"deep-shared-{os.getpid()}"
        child = self.start(label, "owner", tenant)
        child.call("share", 90)
        wrong, most, done = int(not child.call("same", 60)[0]), 0, 0
        keep_s = 60 if self.args.kills or self.args.deaths else 25
        while done < self.args.cycles and self.left_s() > keep_s:
            _, left, _ = self.cycle(label, tenant, "deep")
            wrong += not child.call("same", 60)[0]
            most, done = max(most, left), done + 1
            for what, amount in held(child.process.pid).items():
                self.result.sample(f"shared_{what}", amount)
        self.flat(label)
        self.result.check(f"two processes that share memory: {self.args.cycles} cycles", done == self.args.cycles, f"{done} done")
        self.result.check("each sees what the other has written after each", wrong == 0, f"{wrong} wrong")
        self.result.check(f"{LEFT_MIB} MiB or less are left after each", most <= LEFT_MIB, f"at most {most} MiB")
        self.row(label, "deep")
        self.kills(child, tenant)
        child.close()
        self.deaths()

    def flat(self, label: str) -> None:
        """Do the last tenth of the cycles hold what the first tenth held? What both took is printed."""
        samples = self.result.data["samples"]
        share = max(1, self.args.cycles // 10)
        for what, limit in GROWTH_MAX.items():
            values = samples.get(f"{label}_{what}", [])
            if len(values) >= 2 * share:
                first, last = min(values[:share]), min(values[-share:])
                self.result.check(f"{what} of the processes are flat", last - first <= limit, f"{first} then {last}, most {max(values)}")
        for what in ("out_s", "back_s"):
            values = samples.get(f"{label}_deep_{what}", [])
            if len(values) >= 2 * share:
                first, last = (common.summarise(part)["median"] for part in (values[:share], values[-share:]))
                self.result.note(f"{label} {what}: the first {share} took {first:.3f} s each, the last {share} {last:.3f} s (medians)")

    def kills(self, child: runner.Ranks, tenant: str) -> None:
        """Commands are killed; the same command once more finds a way on."""
        instants = random.Random(self.args.seed)
        samples = self.result.data["samples"]
        summary = {name: common.summarise(samples.get(f"shared_deep_{name}", [])) for name in ("out_s", "back_s")}
        wrong, in_time, done = 0, 0, 0
        for number in range(self.args.kills):
            if self.left_s() < 30:
                break
            name, words = (("out_s", ("pause", tenant, "--deep")), ("back_s", ("resume", tenant)))[number % 2]
            told = cli.killed(*words, after_s=instants.uniform(0, float(summary[name]["median"] or 1)))
            in_time += not told["ended_before"]
            self.result.sample(f"shared_killed_{name}", self.act(*words))
            if name == "back_s":
                wrong += not child.call("same", 60)[0]
            else:
                left = self.left_mib()
                wrong += left > LEFT_MIB
            done += 1
        what = f"{self.args.kills} commands killed, the same command then succeeds, contents right, {LEFT_MIB} MiB or less left"
        self.result.check(what, wrong == 0 and done == self.args.kills, f"{done} done, {in_time} before they had ended, {wrong} wrong")

    def deaths(self) -> None:
        """Of the two that share, the reader is killed: in a deep pause, while it is frozen, in a resume."""
        tenant = f"deep-deaths-{os.getpid()}"
        child = self.start("deaths", "owner", tenant)
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

    def kept(self) -> None:
        """What a plain pause leaves in place comes back with the contexts."""
        tenant = f"deep-kept-{os.getpid()}"
        child = self.start("kept", "kept", tenant)
        child.call("make", 60)
        self.act("pause", tenant)
        mib = self.left_mib()
        tenants = cli.tenants(cli.sublet("ps", "--json", timeout_s=30))
        told = [each["left"] for each in tenants if each["tenant"] == tenant]
        self.act("resume", tenant)
        told_mib = sum(gpu["bytes"] for left in told for process in left for gpu in process["gpus"]) // common.MIB
        what = "what ps says that a plain pause leaves is what nvidia-smi shows, or it knows the process by another id"
        self.result.check(what, told_mib == 0 or abs(told_mib - mib) <= mib // 10, f"{told_mib} of {mib} MiB")
        wrong, most = [], 0
        for _ in range(ROUNDS):
            _, left, _ = self.cycle("kept", tenant, "deep")
            wrong += child.call("wrong", 60)[0]
            most = max(most, left)
        what = "small plain memory, memory of a stream, of a graph, of another context, an array, a green context, and host memory come back"
        self.result.check(what, not wrong, ", ".join(sorted(set(wrong))))
        self.result.check(f"{LEFT_MIB} MiB or less are left of it", most <= LEFT_MIB, f"at most {most} MiB")
        child.close()

    def event(self) -> None:
        """An event of one process that another has open."""
        tenant = f"deep-event-{os.getpid()}"
        child, other = (self.start(label, "kept", tenant) for label in ("event", "event-other"))
        for each in (child, other):
            each.call("make", 60)
        other.call("open_event", 30, handle=child.call("share_event", 30)[0])
        self.cycle("event", tenant, "deep")
        child.call("record", 30)
        other.call("wait", 30)
        self.result.check("an event that another process has open is heard after a deep pause", True)
        for each in (other, child):
            each.close()

    def many(self) -> None:
        """Tenants whose contexts do not fit together take turns."""
        args, names = self.args, [f"deep-{number}-{os.getpid()}" for number in range(self.args.tenants)]
        outside = self.start("outside", "plain", None)
        free_gib = outside.call("leave", 60, gib=args.room_gib)[0]
        self.result.data["baseline"]["room_gib"] = free_gib
        children: list[runner.Ranks] = []
        for name in names:
            began = time.monotonic()
            children.append(self.start(name, "plain", name, turns="auto,deep"))
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
        took = common.summarise(self.result.data["samples"].get("switch_s", []))
        every = args.rounds * len(names)
        self.result.check(f"{every} switches from one to the next, all hold what they held", wrong == 0 and took["count"] == every, f"{took}")
        states = cli.sublet("ps", "--json", timeout_s=30)
        deep = sum(
            member["member"]["state"] == "deep" for tenant in cli.tenants(states) for member in tenant["members"]
        )
        self.result.check("contexts of some are away", deep > 0, f"{deep} of {len(names)}")
        self.rows = [("tenants", "switch median s", "p99 s", "deep at the end")]
        self.rows.append((str(len(names)), f"{took['median'] or 0:.2f}", f"{took['p99'] or 0:.2f}", str(deep)))
        # One that is frozen does not hear that it is to end.
        for name, child in zip(names, children, strict=True):
            self.act("switch", name, "--wait", "30s")
            child.close()
        outside.close()

    def swap(self) -> None:
        """Two tenants that change places, deep."""
        names = [f"deep-{name}-{os.getpid()}" for name in ("one", "two")]
        children = [self.start("one", "holder", names[0])]
        children[0].call("hold", 90, gib=4.0)
        self.act("pause", names[0], "--deep")
        children.append(self.start("two", "holder", names[1]))
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


def body(args: Any, result: Result, work: Path) -> None:
    """All of it, then the table."""
    if not Checkpoints.present():
        raise JobError("this driver has no cuCheckpointProcess functions: it must be 570 or newer")
    sizes = [float(size) for size in args.gib.split(",") if size]
    rows = args.rows.split(",")
    unknown = set(rows) - {*ROWS, *MORE_ROWS}
    if unknown:
        raise JobError(f"no row is named {', '.join(sorted(unknown))}; there are {', '.join((*ROWS, *MORE_ROWS))}")
    deep = Deep(args, result, work)
    more: dict[str, Callable[[], None]] = {"other_gpu": functools.partial(other_gpu, deep), "mps": functools.partial(under_mps, deep), "calls": functools.partial(calls, deep)}
    for name in LIBRARIES:
        more |= {name: functools.partial(library, deep, name), f"driver_{name}": functools.partial(library_of_driver, deep, name)}
    parts: dict[str, Callable[[], None]] = {}
    if args.tenants:
        common.touch_host_memory(1.3 * args.tenants * args.tenant_gib)
        parts["many"] = deep.many
    else:
        common.touch_host_memory(1.3 * max([4.0, *(sizes if "sizes" in rows else [])]))
        for gib in sizes if "sizes" in rows else []:
            parts[f"{gib:g} GiB"] = functools.partial(deep.size, gib)
        for row in rows:
            if row != "sizes":
                parts[row] = more[row] if row in more else getattr(deep, row)
    for name, part in parts.items():
        deep.part(name, part)
    after = deep.left_mib()
    result.check("nothing is left at the end", after <= LEFT_MIB, f"{after} MiB")
    runner.verdicts(result)
    print()
    runner.table(deep.rows)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.role:
        serve(options.role)
    sys.exit(common.run_job(options, "deep", body))
