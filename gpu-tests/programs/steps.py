"""The loop of the programs that need no torchrun. Nothing here knows Sublet, and nothing needs torch.

A program prints one line a step and writes a file of all values at its end, as training.py has it. `--seconds`
chooses the number of steps on the machine, `--steps` gives it. A program that hangs ends with its stacks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Steps that `--seconds` times first, and how many of them are not counted. Both hold whole rounds of rebuild.py.
TIMED_STEPS, UNTIMED_STEPS = 80, 40
#: Seconds that a program may live; longer than any job.
LIFE_S = 600
#: Seconds that one process of a program waits for what another one says.
PEER_S = 60


#: How a program ends that cannot run on this machine.
NOT_RUN = 77


def not_run(why: str) -> None:
    """Says why this program cannot run here, and ends the process."""
    print(f"NOT RUN: {why}", flush=True)
    os._exit(NOT_RUN)


def program_failed(what: str) -> None:
    """Says what is wrong and ends the process immediately: an orderly end would wait for peers and devices."""
    print(f"failed: {what}", file=sys.stderr, flush=True)
    os._exit(3)


def _end_by_exception(kind: type[BaseException], error: BaseException, where: Any) -> None:
    traceback.print_exception(kind, error, where)
    program_failed(str(error))


class Steps:
    """Arguments, and the loop around a program's own step."""

    def __init__(self, doc: str | None, timed: tuple[int, int] = (TIMED_STEPS, UNTIMED_STEPS)) -> None:
        """`timed` is how many steps `--seconds` times first, and how many of them are not counted."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--seconds", type=float, help="work for about so long instead of --steps")
        parser.add_argument("--width", type=int, default=512)
        parser.add_argument("--devices", type=int, default=0, help="GPUs that one process uses (0: all)")
        parser.add_argument("--stay", action="store_true", help="begin the last step when there is a file go-on in --out")
        parser.add_argument("--out", type=Path, default=Path("."), help="folder for every rank's values")
        self.args = parser.parse_args()
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.timed, self.untimed = timed
        self.values: list[str] = []
        self.number, self.began = 0, time.monotonic()
        self.timing = self.args.seconds is not None
        self.total = self.timed if self.timing else self.args.steps
        faulthandler.enable()
        sys.excepthook = _end_by_exception
        faulthandler.dump_traceback_later(LIFE_S, exit=True)

    def run(self, step: Callable[[int], str], finish: Callable[[], str]) -> None:
        """Calls `step(number)` for every step, which gives the value of an earlier step or "". `finish` gives what
        is left, one value a line."""
        while self.note(step(self.number)):
            pass
        self.write(finish())

    def note(self, value: str) -> bool:
        """A step is done, which gives the value of an earlier one or "". Whether there is to be another."""
        if value:
            self.values.append(value)
        if self.rank == 0:
            print(f"step {self.number} loss {value or '-'}", flush=True)
        self.number += 1
        if self.number == self.untimed:
            self.began = time.monotonic()
        if self.timing and self.number == self.timed:
            self.total, self.timing = self.agreed_steps(self.began), False
        if self.args.stay and self.number == self.total - 1:
            self.hear("go-on", LIFE_S)
        return self.number < self.total

    def write(self, rest: str) -> None:
        """Writes the values of all steps, and `rest`, one value a line, after the last of them."""
        self.values += rest.splitlines()
        took = time.monotonic() - self.began
        if self.rank == 0:
            counted = max(1, self.number - self.untimed)
            print(f"rate {counted / took:.3f} steps/s over {counted} steps", flush=True)
        (self.args.out / f"rank{self.rank}.txt").write_text("\n".join(self.values) + "\n")

    def agreed_steps(self, began: float) -> int:
        """How many steps fill `--seconds`, as rank 0 measured it."""
        if self.rank == 0:
            step_s = (time.monotonic() - began) / (self.timed - self.untimed)
            self.tell("steps", str(max(self.timed, int(self.args.seconds / step_s))).encode())
        return int(self.hear("steps"))

    def tell(self, name: str, data: bytes) -> None:
        """Tells all ranks: a file that appears whole."""
        part = self.args.out / f".{name}"
        part.write_bytes(data)
        part.replace(self.args.out / name)

    def hear(self, name: str, limit_s: float = PEER_S) -> bytes:
        """What a rank has told, as soon as it has."""
        path, end = self.args.out / name, time.monotonic() + limit_s
        while not path.exists():
            if time.monotonic() > end:
                program_failed(f"rank {self.rank}: nobody told {name} within {limit_s} s")
            time.sleep(0.0005)
        return path.read_bytes()
