"""Sockets that carry JSON, one message a line, with a deadline for every wait.

A worker connects to the conductor and says who it is. From then on the conductor asks and the worker answers, but for
the trainer's `rollout` and `done`, which it says by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from typing import Any, Callable

SOCKET = "RL_GRPO_SOCKET"
DEADLINE = "RL_GRPO_DEADLINE_S"
_PR_SET_PDEATHSIG = 1
_RETRY_S = 0.05


class Late(Exception):
    """Nothing came in time."""


class Link:
    """One end. Not for two threads simultaneously."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, b""

    def send(self, message: Mapping[str, Any], timeout_s: float) -> None:
        """Sends one message; OSError when the other side is gone."""
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except socket.timeout as error:
            raise Late(f"a message was not taken within {timeout_s:.0f} s") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Waits for one message; Late after `timeout_s`, EOFError when the other side is gone."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._sock.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self._sock.recv(1 << 20)
            except socket.timeout as error:
                raise Late(f"nothing came within {timeout_s:.0f} s") from error
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def has_message(self) -> bool:
        """Whether one came with the one before: it no longer shows at the socket."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self._sock.close()


class Worker:
    """The worker's end: what a trainer or generator does for the conductor. To be made once everything is imported, and
    before any memory of a device is taken: it waits until it is this tenant's turn to do that."""

    def __init__(self, role: str, rank: int) -> None:
        # The process that started this one ends it with itself: a process that waits for a device cannot look.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._role, self._rank = role, rank
        self._timeout_s = float(os.environ[DEADLINE])
        self._link = Link(_connected(os.environ[SOCKET], self._timeout_s))

    def hello(self, **facts: Any) -> None:
        """Says that this process is ready, and what is to be known of it."""
        self.say(op="hello", role=self._role, rank=self._rank, pid=os.getpid(), facts=facts)

    def say(self, **message: Any) -> None:
        """Tells the conductor something."""
        self._link.send(message, self._timeout_s)

    def serve(self, operations: Mapping[str, Callable[..., Any]], until: str) -> dict[str, Any]:
        """Does what it is asked until the message `until` comes, which it returns. A failed operation is answered with
        its error, and the process goes on."""
        while True:
            message = self._link.receive(self._timeout_s)
            if message["op"] == until:
                return message
            try:
                answer: dict[str, Any] = {"value": operations[message["op"]](**message["args"])}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
            self.say(op="answer", **answer)


def _connected(path: str, timeout_s: float) -> socket.socket:
    """Waits until the conductor listens."""
    end = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            return sock
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            if time.monotonic() > end:
                raise Late(f"nobody listened at {path} within {timeout_s:.0f} s") from error
            time.sleep(_RETRY_S)


def listen(path: str) -> socket.socket:
    """A socket that workers connect to."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen(64)
    return sock
