"""The processes of one tenant: started, asked, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from rl.links import DEADLINE, SOCKET, Late, Link, listen
from rl.problem import Problem, WorkerGone

END_S = 30.0
_POLL_S = 0.1


class Team:
    """The processes of a tenant, one a GPU. `commands` start them: one command each, or one launcher for all."""

    def __init__(
        self, role: str, size: int, commands: Sequence[Sequence[str]], environment: Mapping[str, str], work: Path, deadline_s: float
    ) -> None:
        self.role, self.size, self.deadline_s = role, size, deadline_s
        self._commands, self._environment, self._work = commands, environment, work
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Link] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._log, self._socket = work / f"{role}.log", work / f"{role}.sock"
        self.pids: dict[int, int] = {}
        self.facts: dict[int, dict[str, Any]] = {}

    def launch(self) -> None:
        """Starts them. They import what they need, and take no memory of a device before `start`."""
        environment = {**self._environment, SOCKET: str(self._socket), DEADLINE: str(self.deadline_s)}
        with self._log.open("ab") as log:
            for rank, command in enumerate(self._commands):
                self._processes.append(
                    subprocess.Popen(
                        command, env={**environment, "RL_GRPO_RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=log, start_new_session=True,
                    )
                )  # fmt: skip

    def start(self) -> None:
        """Starts them, unless they were launched, and waits until all have said that they are ready."""
        if not self._processes:
            self.launch()
        listening = listen(str(self._socket))
        try:
            self._accept(listening)
        finally:
            listening.close()
            self._socket.unlink()

    def _accept(self, listening: socket.socket) -> None:
        end = time.monotonic() + self.deadline_s
        listening.settimeout(_POLL_S)
        while len(self._links) < self.size:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise WorkerGone(self.role, rank, process.returncode, self.log())
            if time.monotonic() > end:
                raise Problem(
                    f"{len(self._links)} of {self.size} processes of tenant '{self.role}' came within "
                    f"{self.deadline_s:.0f} s; its log says: {self.log()[-600:]}"
                )
            try:
                sock = listening.accept()[0]
                link = Link(sock)
                hello = link.receive(max(_POLL_S, end - time.monotonic()))
            except (socket.timeout, EOFError, Late):
                # A process that has died is found above.
                continue
            rank = hello["rank"]
            self._links[rank], self._sockets[rank] = link, sock
            self.pids[rank], self.facts[rank] = hello["pid"], hello["facts"]

    def tell(
        self, op: str, each: Optional[Sequence[Mapping[str, Any]]] = None, ranks: Optional[Sequence[int]] = None, **args: Any
    ) -> None:
        """Sends `op` to `ranks` (all); with `each`, arguments of their own in addition to `args`."""
        for place, rank in enumerate(self._chosen(ranks)):
            own = each[place] if each is not None else {}
            try:
                self._links[rank].send({"op": op, "args": {**args, **own}}, self.deadline_s)
            except (OSError, Late) as error:
                raise self._gone(rank) from error

    def said(self, what: str, ranks: Optional[Sequence[int]] = None) -> list[dict[str, Any]]:
        """The next message of each of `ranks` (all), in their order."""
        end = time.monotonic() + self.deadline_s
        chosen = self._chosen(ranks)
        messages: dict[int, dict[str, Any]] = {}
        while len(messages) < len(chosen):
            waiting = {self._sockets[rank]: rank for rank in chosen if rank not in messages}
            ready = [sock for sock, rank in waiting.items() if self._links[rank].has_message()]
            ready = ready or select.select(list(waiting), [], [], _POLL_S)[0]
            for sock in ready:
                rank = waiting[sock]
                try:
                    messages[rank] = self._links[rank].receive(self.deadline_s)
                except (EOFError, OSError) as error:
                    raise self._gone(rank) from error
            if not ready and time.monotonic() > end:
                late = sorted(waiting.values())
                raise Problem(f"tenant '{self.role}': {what} took more than {self.deadline_s:.0f} s in processes {late}")
        return [messages[rank] for rank in chosen]

    def answers(self, op: str, ranks: Optional[Sequence[int]] = None) -> list[Any]:
        """What `ranks` (all) answer to `op`."""
        messages = self.said(op, ranks)
        for rank, message in zip(self._chosen(ranks), messages):
            if "error" in message:
                raise Problem(f"tenant '{self.role}', process {rank}, {op}: {message['error']}")
        return [message.get("value") for message in messages]

    def ask(
        self, op: str, each: Optional[Sequence[Mapping[str, Any]]] = None, ranks: Optional[Sequence[int]] = None, **args: Any
    ) -> list[Any]:
        """Sends `op` to `ranks` (all) and waits for their answers."""
        self.tell(op, each, ranks, **args)
        return self.answers(op, ranks)

    def _chosen(self, ranks: Optional[Sequence[int]]) -> Sequence[int]:
        return range(self.size) if ranks is None else ranks

    def dead(self) -> Optional[WorkerGone]:
        """The first process that has ended though nobody told it to, if there is one."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                return self._gone(rank)
        return None

    def _gone(self, rank: int) -> WorkerGone:
        process = self._processes[min(rank, len(self._processes) - 1)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return WorkerGone(self.role, rank, process.returncode, self.log())

    def finish(self) -> None:
        """Waits until they have ended by themselves; Problem when one failed."""
        end = time.monotonic() + self.deadline_s
        for rank, process in enumerate(self._processes):
            try:
                status = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise Problem(f"tenant '{self.role}': process {rank} has not ended in {self.deadline_s:.0f} s") from error
            if status != 0:
                raise WorkerGone(self.role, rank, status, self.log())
        self._forget()

    def kill(self) -> None:
        """Ends all of them, and what they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(END_S)
        self._forget()

    def _forget(self) -> None:
        for link in self._links.values():
            link.close()
        self._links, self._sockets, self._processes = {}, {}, []

    def log(self) -> str:
        """The end of what they have printed."""
        try:
            return self._log.read_bytes()[-4000:].decode(errors="replace")
        except OSError:
            return ""
