"""A process that evaluates what it is told, line by line; and the other end of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any, Optional


class Worker:
    """A running process with `sublet` and `simdriver` at hand."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers: Queue[Optional[str]] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, code: str) -> None:
        """Has it run a statement or an expression, and does not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What came of the oldest line that was not answered yet; its exception is an AssertionError."""
        line = self._answers.get(timeout=self._timeout_s)
        assert line is not None, f"process {self.pid} has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def has_answered(self, within_s: float) -> bool:
        """Has it finished, or does it within this time?"""
        try:
            line = self._answers.get(timeout=within_s)
        except Empty:
            return False
        rest: list[Optional[str]] = [line]
        while not self._answers.empty():
            rest.append(self._answers.get())
        for entry in rest:
            self._answers.put(entry)
        return True

    def do(self, code: str) -> Any:
        """Has it run `code`, and returns the value of an expression."""
        self.tell(code)
        return self.answer()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


def failure(call: Callable[[], object], field: str) -> tuple[str, Any]:
    """Name and one field of the exception that `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, getattr(error, field, None)
    raise AssertionError("nothing was raised")


def main() -> None:
    """Answers every line of standard input."""
    import simdriver
    import sublet

    names: dict[str, Any] = {
        "MIB": simdriver.MIB,
        "failure": failure,
        "simdriver": simdriver,
        "sublet": sublet,
        "threading": threading,
    }
    for line in sys.stdin:
        code = json.loads(line)
        try:
            try:
                compiled = compile(code, "<line>", "eval")
            except SyntaxError:
                exec(code, names)
                answer = {"value": None}
            else:
                answer = {"value": eval(compiled, names)}
            text = json.dumps(answer, default=str)
        except Exception as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(text, flush=True)


if __name__ == "__main__":
    main()
