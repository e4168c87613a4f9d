"""How a job script steers its ranks: one Unix socket per rank, one JSON line per request and reply.

The lockstep is free of torch.distributed and of device memory, so it works while the tenant is paused, and every
request has a deadline: when one passes, the ranks print their stacks and the job ends with what it has.
Bound: a round trip takes some 50 us, against pauses of 100 ms and more.
"""

from __future__ import annotations

import contextlib
import json
import random
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import common
import subletapi


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, below the range that outgoing connections take theirs from."""
    for _ in range(100):
        port = random.randrange(20_000, 30_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise JobError("no free port between 20000 and 30000")


class Line:
    """A socket that carries JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buffer = sock, b""

    def send(self, message: Any) -> None:
        """Sends one message."""
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


class Pool:
    """The ranks of one job, all in one tenant or in none."""

    def __init__(
        self,
        work: Path,
        label: str,
        world: int,
        tenant: str | None,
        env: dict[str, str] | None = None,
        launcher: str = "own",
        life_s: float = 600.0,
    ) -> None:
        self.label, self.world, self.tenant = label, world, tenant
        self.sequence = 0
        self.lines: dict[int, Line] = {}
        self.pids: dict[int, int] = {}
        path = work / f"{label}.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen(world)
        port = str(free_port())
        worker = str(common.JOBS / "worker.py")
        if launcher == "torchrun":
            cmd = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"]
            cmd += ["--master-addr=127.0.0.1", f"--master-port={port}", worker]
        else:
            cmd = [sys.executable, str(common.JOBS / "launch.py"), str(world), worker]
        extra = {
            "JOB_SOCKET": str(path),
            "JOB_LIFE_S": str(life_s),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **(env or {}),
        }
        self.log = work / f"{label}.log"
        self.child = common.spawn(subletapi.tenant_command(tenant, cmd), common.child_env(extra), self.log)
        self._accept(server, 120.0)
        server.close()

    def _accept(self, server: socket.socket, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        server.settimeout(0.25)
        while len(self.lines) < self.world:
            if self.child.poll() is not None:
                raise common.JobError(f"{self.label} ended with {self.child.returncode} at start: {self.tail()}")
            if time.monotonic() > end:
                raise common.JobError(f"{self.label}: {len(self.lines)} of {self.world} ranks came: {self.tail()}")
            with contextlib.suppress(TimeoutError):
                line = Line(server.accept()[0])
                hello = line.receive(10)
                self.lines[hello["rank"]] = line
                self.pids[hello["rank"]] = hello["pid"]

    def tail(self, size: int = 1500) -> str:
        """The end of the ranks' output."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-size:].decode(errors="replace").strip()
        return ""

    def send(self, op: str, ranks: list[int] | None = None, **arguments: Any) -> list[int]:
        """Sends a request to `ranks` (all); the ranks to collect from."""
        chosen = list(range(self.world)) if ranks is None else ranks
        self.sequence += 1
        for rank in chosen:
            try:
                self.lines[rank].send({"id": self.sequence, "op": op, "args": arguments})
            except OSError as error:
                raise common.JobError(f"{self.label} rank {rank} is gone ({error}): {self.tail()}") from error
        return chosen

    def collect(self, what: str, ranks: list[int], timeout_s: float) -> list[Any]:
        """The replies of `ranks` to the last request, in their order; late replies to earlier ones are dropped."""
        end = time.monotonic() + timeout_s
        replies: dict[int, Any] = {}
        while len(replies) < len(ranks):
            waiting = {self.lines[r].sock: r for r in ranks if r not in replies}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, min(1.0, end - time.monotonic())))
            for sock in ready:
                rank = waiting[sock]
                line = self.lines[rank]
                try:
                    data = sock.recv(1 << 20)
                except OSError:
                    data = b""
                if not data:
                    time.sleep(0.3)  # lets its last words reach the log
                    raise common.JobError(f"{self.label} rank {rank} ended during {what}: {self.tail()}")
                line.buffer += data
                message = line.pop()
                while message is not None and message.get("id") != self.sequence:
                    message = line.pop()
                if message is None:
                    continue
                if "error" in message:
                    raise common.JobError(f"{self.label} rank {rank}, {what}: {message['error']}")
                replies[rank] = message["value"]
            if len(replies) < len(ranks) and time.monotonic() > end:
                self.print_stacks()
                missing = [r for r in ranks if r not in replies]
                raise common.JobError(f"{self.label}: ranks {missing} did not finish {what} within {timeout_s:.0f} s")
        return [replies[rank] for rank in ranks]

    def call(self, op: str, timeout_s: float = 60.0, ranks: list[int] | None = None, **arguments: Any) -> list[Any]:
        """Request and replies."""
        return self.collect(op, self.send(op, ranks, **arguments), timeout_s)

    def print_stacks(self) -> None:
        """Has every rank write its stacks into the log, and shows the end of it."""
        for pid in self.pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        print(f"---- {self.label}: stacks and last output\n{self.tail(8000)}\n----", flush=True)

    def close(self) -> None:
        """Ends the ranks: by request, then by signal."""
        with contextlib.suppress(common.JobError, OSError):
            self.send("exit")
        end = time.monotonic() + 10
        while self.child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        common.stop_child(self.child)
        for line in self.lines.values():
            line.sock.close()


if __name__ == "__main__":
    print("rpc is a module; the jobs import it")
