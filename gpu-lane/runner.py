"""The processes of a job: children that say rows, and ranks that do what they are asked, step by step.

A process is started under Sublet or plainly, and what it prints goes into a log. A `Child` is a script of its own: it
says rows, samples and facts, one line each, and `finish` adds them to the record. `Ranks` are one process, or one per
GPU, that `serve` steps, each over a Unix socket with one JSON line per request and reply. That is free of
torch.distributed and of device memory, so it works while the tenant is paused. Every wait has a deadline: when one
passes, the processes write their stacks and the job ends with what it has.

Bound: a round trip of a step takes some 50 us, against pauses of 100 ms and more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import bench_ops
import cli
import common
import launch
from common import JobError, Result

_MARK = "@said "
_SAID = re.compile(rf"^{_MARK}(.*)$", re.MULTILINE)
WHEELS = common.ROOT / "python"
#: Seconds in which all ranks must have come.
START_S = 120.0

# ---------------------------------------------------------------- in a child


def _say(kind: str, **fields: Any) -> None:
    print(_MARK + json.dumps({"kind": kind, **fields}), flush=True)


def row(what: str, passed: bool, detail: str = "") -> None:
    _say("row", what=what, passed=bool(passed), detail=str(detail))


def sample(series: str, value: float) -> None:
    _say("sample", series=series, value=value)


def fact(name: str, value: Any) -> None:
    """Something to be kept in the record, as JSON."""
    _say("fact", name=name, value=value)


def begin(life_s: float) -> None:
    """Called first: stacks of all threads, then the end, when the child lives longer than `life_s`."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(life_s, exit=True)


def versions() -> dict[str, Any]:
    """Of torch and what it brings."""
    import torch

    nccl = bench_ops.nccl_version() if torch.cuda.is_available() else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


# ---------------------------------------------------------------- in a rank


class Link:
    """A socket that carries JSON lines: requests one way, replies the other."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""
        #: The request that is being answered.
        self.request_id: int | None = None

    def send(self, message: Any) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def pop(self) -> Any:
        """A message that has arrived whole, or None."""
        head, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        return json.loads(head)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Waits for one message; EOFError when the other side has gone."""
        self.sock.settimeout(timeout_s)
        while (message := self.pop()) is None:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError
            self.buffer += data
        return message

    def reply(self, **answer: Any) -> None:
        """Answers the request: `value`, or `error`. A step that waits in its middle answers twice."""
        self.send({"id": self.request_id, **answer})


def connect() -> Link:
    """Called first in a rank: it ends with its parent, writes its stacks when told to, and meets the job."""
    launch.die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    faulthandler.dump_traceback_later(float(os.environ["JOB_LIFE_S"]), exit=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["JOB_SOCKET"])
    link = Link(sock)
    link.send({"rank": int(os.environ.get("RANK", "0")), "pid": os.getpid()})
    return link


def serve(link: Link, steps: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """Does one step after the other, until told to end (`exit` is called then, if there is one) or the job is gone."""
    code = 0
    try:
        while (request := link.receive())["op"] != "exit":
            link.request_id = request["id"]
            try:
                answer = {"value": steps[request["op"]](**request["args"])}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:1500]}
            link.reply(**answer)
        if "exit" in steps:
            steps["exit"]()
    except (EOFError, OSError):
        code = 3  # the job is gone
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of half-destroyed communicators are not what is measured here, and may hang.
    os._exit(code)


# ---------------------------------------------------------------- in the job


def package(work: Path, name: str) -> Path:
    """Installs the wheel of `name` that the bundle carries into a folder of its own, for PYTHONPATH."""
    folder = work / f"site-{name}"
    if folder.exists():
        return folder
    wheels = sorted(WHEELS.glob(f"{name}-*.whl"))
    if not wheels:
        given = importlib.util.find_spec(name)
        if given is not None and given.submodule_search_locations:
            return Path(next(iter(given.submodule_search_locations))).parent
        raise JobError(f"no wheel of {name} in {WHEELS.name}/ of the bundle, and it is not installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += ["--target", str(folder), str(wheels[-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode != 0:
        raise JobError(f"pip cannot install {wheels[-1].name}: {done.stderr[-600:]}")
    return folder


def cuda_libraries() -> str:
    """The folders of the CUDA libraries that torch brings, for LD_LIBRARY_PATH."""
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []:
        found += sorted(str(path) for path in Path(root).glob("*/lib") if path.is_dir())
    return os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def start_command(script: Sequence[str], ranks: int = 1, launcher: str = "alone") -> list[str]:
    """How a script is started: `alone`, one process per GPU by `launch`, or by stock `torchrun`."""
    if launcher == "alone":
        return [sys.executable, *script]
    if launcher == "launch":
        return [sys.executable, str(Path(launch.__file__).resolve()), str(ranks), *script]
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).parent / "torchrun")
    return [torchrun, "--standalone", "--nproc-per-node", str(ranks), *script]


class Process:
    """A program of a job, and the processes that it starts."""

    #: Lines of its log that are not shown.
    HIDDEN = re.compile("(?!)")

    def __init__(
        self,
        work: Path,
        label: str,
        command: Sequence[str],
        *,
        tenant: str | None = None,
        sites: Sequence[Path] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """Starts `command`, as `tenant` where there is one. `sites` are folders to import from first."""
        self.label, self.tenant, self.log = label, tenant, work / f"{label}.log"
        self.log.touch()
        environment = common.child_env({"PYTHONFAULTHANDLER": "1", **(env or {})})
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, sites), environment["PYTHONPATH"]])
        self.process = common.spawn(cli.tenant_command(tenant, command), environment, self.log)

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.process.poll() is not None

    def tail(self, size: int = 1500) -> str:
        """The end of its output, but for the lines that are not shown."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not self.HIDDEN.match(line))[-size:].strip()

    def why(self) -> str:
        """Its last line, which names the error where there was one, and then what came before."""
        text = self.tail()
        return f"{text.splitlines()[-1] if text else 'it wrote nothing'}\n{text}"

    def show(self, what: str) -> None:
        """Prints the end of its output."""
        print(f"---- {self.label}: {what}\n{self.tail(8000)}\n----", flush=True)

    def kill(self) -> None:
        """Ends it and the processes of its group."""
        common.stop_child(self.process)


class Child(Process):
    """A script that says rows, samples and facts."""

    HIDDEN = re.compile(re.escape(_MARK))

    def __init__(self, work: Path, label: str, script: Sequence[str], **how: Any) -> None:
        """`script` is a file and its arguments; `how` is as for `Process`."""
        super().__init__(work, label, start_command(script), **how)

    def said(self) -> list[dict[str, Any]]:
        answers = []
        for text in _SAID.findall(self.log.read_text(errors="replace")):
            with contextlib.suppress(ValueError):  # half a line
                answers.append(json.loads(text))
        return answers

    def fact(self, name: str) -> Any:
        """The last value of a fact, or None."""
        values = [said["value"] for said in self.said() if said["kind"] == "fact" and said["name"] == name]
        return values[-1] if values else None

    def wait_fact(self, name: str, timeout_s: float) -> Any:
        """Waits until the child has said a fact."""

        def ready() -> bool:
            if self.fact(name) is not None:
                return True
            if self.ended:
                raise JobError(f"{self.label} ended with {self.process.returncode} before '{name}': {self.why()}")
            return False

        try:
            common.wait_until(f"'{name}' of {self.label}", ready, timeout_s)
        except JobError:
            if not self.ended:
                self.abort()
            raise
        return self.fact(name)

    def abort(self) -> None:
        """Has it and the processes it started write their stacks, and ends them."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGABRT)
        time.sleep(1.0)
        self.show("stacks and last output")
        common.stop_child(self.process)

    def finish(self, result: Result, timeout_s: float, prefix: str | None = None) -> dict[str, Any]:
        """Waits for its end, and adds rows and samples to `result` under `prefix`; its facts."""
        prefix = self.label if prefix is None else prefix
        late = False
        try:
            self.process.wait(timeout_s)
            common.release(self.process)
        except subprocess.TimeoutExpired:
            late = True
            self.abort()
        facts: dict[str, Any] = {}
        for said in self.said():
            if said["kind"] == "row":
                result.check(f"{prefix}: {said['what']}", said["passed"], said["detail"])
            elif said["kind"] == "sample":
                result.sample(f"{prefix}_{said['series']}", said["value"])
            else:
                facts[said["name"]] = said["value"]
        result.data["versions"].update(facts.pop("versions", {}))
        result.data.setdefault("facts", {})[prefix] = facts
        code = self.process.returncode
        how = f"not within {timeout_s:.0f} s" if late else f"exit {code}"
        why = f"{how}: {self.why()}" if late or code else ""
        result.check(f"{prefix}: ended by itself", not late and code == 0, why)
        result.save()
        return facts


#: In the order in which `free_port` tries them, each once, even if threads ask simultaneously.
PORTS = iter(random.sample(range(20_000, 30_000), 10_000))


def free_port() -> int:
    """A TCP port that nobody has on any address of this machine, as torch listens on all of them, below the range that outgoing
    connections take theirs from. No port is given twice: the one that was given it may not listen yet.
    """
    for port in itertools.islice(PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise JobError("no free port between 20000 and 30000")


class Ranks(Process):
    """Processes that serve steps, all in one tenant or in none."""

    def __init__(
        self,
        work: Path,
        label: str,
        world: int,
        script: Sequence[str],
        *,
        launcher: str = "launch",
        life_s: float = 600.0,
        env: dict[str, str] | None = None,
        **how: Any,
    ) -> None:
        """Starts `world` processes of `script`, which live for `life_s` at most; `how` is as for `Process`."""
        self.world, self.sequence = world, 0
        self.links: dict[int, Link] = {}
        self.pids: dict[int, int] = {}
        path = work / f"{label}.sock"
        extra = {"JOB_SOCKET": str(path), "JOB_LIFE_S": str(life_s)}
        if launcher == "launch":
            extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(world)
            try:
                command = start_command(script, world, launcher)
                super().__init__(work, label, command, env={**extra, **(env or {})}, **how)
                self._accept(server, START_S)
            finally:
                path.unlink()

    def _accept(self, server: socket.socket, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        server.settimeout(0.25)
        while len(self.links) < self.world:
            if self.ended:
                raise JobError(f"{self.label} ended with {self.process.returncode} at start: {self.why()}")
            if time.monotonic() > end:
                raise JobError(f"{self.label}: {len(self.links)} of {self.world} ranks came: {self.why()}")
            with contextlib.suppress(TimeoutError):
                link = Link(server.accept()[0])
                hello = link.receive(10)
                self.links[hello["rank"]] = link
                self.pids[hello["rank"]] = hello["pid"]

    def send(self, op: str, ranks: Sequence[int] | None = None, **arguments: Any) -> list[int]:
        """Has `ranks` (all) do a step; the ranks to collect from."""
        chosen = list(range(self.world)) if ranks is None else list(ranks)
        self.sequence += 1
        for rank in chosen:
            try:
                self.links[rank].send({"id": self.sequence, "op": op, "args": arguments})
            except OSError as error:
                raise self._gone(rank, f"before {op} ({error})") from error
        return chosen

    def collect(self, what: str, ranks: Sequence[int], timeout_s: float) -> list[Any]:
        """The replies of `ranks` to the last request, in their order; late replies to earlier ones are dropped."""
        end = time.monotonic() + timeout_s
        replies: dict[int, Any] = {}
        while True:
            for rank in [rank for rank in ranks if rank not in replies]:
                message = self._reply(rank)
                if message is not None and "error" in message:
                    raise JobError(f"{self.label} rank {rank}, {what}: {message['error']}")
                if message is not None:
                    replies[rank] = message["value"]
            waiting = {self.links[rank].sock: rank for rank in ranks if rank not in replies}
            if not waiting:
                return [replies[rank] for rank in ranks]
            left_s = end - time.monotonic()
            if left_s <= 0:
                self.print_stacks()
                missing = sorted(waiting.values())
                raise JobError(f"{self.label}: ranks {missing} did not finish {what} within {timeout_s:.0f} s")
            for sock in select.select(list(waiting), [], [], min(1.0, left_s))[0]:
                data = b""
                with contextlib.suppress(OSError):
                    data = sock.recv(1 << 20)
                if not data:
                    raise self._gone(waiting[sock], f"during {what}")
                self.links[waiting[sock]].buffer += data

    def _reply(self, rank: int) -> Any:
        """The reply of a rank to the last request, if it has arrived."""
        link = self.links[rank]
        message = link.pop()
        while message is not None and message["id"] != self.sequence:
            message = link.pop()
        return message

    def _gone(self, rank: int, when: str) -> JobError:
        time.sleep(0.3)  # lets its last words reach the log
        return JobError(f"{self.label} rank {rank} (process {self.pids[rank]}) ended {when}: {self.why()}")

    def call(self, op: str, timeout_s: float = 60.0, ranks: Sequence[int] | None = None, **arguments: Any) -> list[Any]:
        """Has `ranks` (all) do a step, and waits for their replies."""
        return self.collect(op, self.send(op, ranks, **arguments), timeout_s)

    def print_stacks(self) -> None:
        """Has every rank write its stacks into the log and go on, and shows the end of it."""
        for pid in self.pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        self.show("stacks and last output")

    def close(self) -> None:
        """Ends the ranks: by request, then by signal."""
        with contextlib.suppress(JobError):
            self.send("exit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._stop()

    def kill(self) -> None:
        """Ends the ranks where they are."""
        for pid in self.pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._stop()

    def _stop(self) -> None:
        super().kill()
        for link in self.links.values():
            link.sock.close()


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns; the first is the head."""
    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    for line in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def verdicts(result: Result) -> None:
    """Prints the checks, as the job's last table."""
    print()
    table([("result", "what", "detail")])
    for entry in result.data["checks"]:
        print(
            f"{'ok  ' if entry['passed'] else 'FAIL'} {entry['what']}  {' '.join(entry['detail'].split())[:110]}",
            flush=True,
        )

