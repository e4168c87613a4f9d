"""Runs of the ordinary scripts in programs/, plain or as a tenant, watched from outside.

Most are started by stock torchrun; those without torch by launch.py, a process per GPU too, or as one process.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import JobError, Result
from runner import Process, start_command
from suite import gpu_count

PROGRAMS = Path(__file__).resolve().parent / "programs"
STEP = re.compile(rb"step (\d+) loss [^\n]+\n")


def library_versions() -> dict[str, str | None]:
    """The installed versions that a record names."""
    found: dict[str, str | None] = {}
    for name, packages in {"torch": ("torch",), "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "jax": ("jax",)}.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
    return found


class TrainingRun(Process):
    """One run of a script that prints its steps."""

    HIDDEN = re.compile(r"step \d+ loss ")

    def __init__(
        self,
        work: Path,
        label: str,
        script: Path,
        ranks: int,
        arguments: list[str],
        *,
        launcher: str = "torchrun",
        **how: Any,
    ) -> None:
        """`how` is as for `Process`."""
        self.ranks, self.out = ranks, work / label
        self._rest = b""
        self.steps, self.advanced = 0, time.monotonic()
        super().__init__(work, label, start_command([str(script), *arguments], ranks, launcher), **how)
        self._reader = open(self.log, "rb")  # noqa: SIM115 (lives as long as the run)

    def poll(self) -> int:
        """Steps printed so far."""
        if self._reader.closed:
            return self.steps
        data = self._rest + self._reader.read()
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        found = STEP.findall(data[:end])
        if found:
            self.steps, self.advanced = int(found[-1]) + 1, time.monotonic()
        return self.steps

    def wait_steps(self, count: int, timeout_s: float) -> None:
        """Waits until `count` steps are printed."""

        def ready() -> bool:
            if self.poll() >= count:
                return True
            if self.ended:
                raise JobError(f"{self.label} ended with {self.process.returncode} after {self.steps} steps: {self.tail()}")
            return False

        self._wait(f"step {count} of {self.label}", ready, timeout_s)

    def wait_end(self, timeout_s: float) -> int:
        """Waits until it ends; its exit code."""
        self._wait(f"the end of {self.label}", lambda: self.ended, timeout_s)
        self.poll()
        self._reader.close()
        common.release(self.process)
        return self.process.returncode

    def _wait(self, what: str, ready: Any, timeout_s: float) -> None:
        try:
            common.wait_until(what, ready, timeout_s, poll_s=0.005)
        except JobError:
            self.print_state()
            raise

    def rate(self) -> float | None:
        """Steps a second, as the program says at its end."""
        found = re.search(rb"\nrate (\S+) steps/s", self.log.read_bytes())
        return float(found.group(1)) if found else None

    def losses(self) -> list[list[str]]:
        """What each rank wrote: its value of each step in hexadecimal, and the digest of its weights."""
        files = [self.out / f"rank{rank}.txt" for rank in range(self.ranks)]
        return [path.read_text().splitlines() if path.exists() else [] for path in files]

    def processes(self) -> list[int]:
        """The ranks' process ids: what was started, and what that started. Without a launcher, the one process."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        family, grown = {self.process.pid}, True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in family} - family
            family |= more
            grown = bool(more)
        return sorted(family - {self.process.pid}) or [self.process.pid]

    def stop(self) -> None:
        """Ends the ranks and their launcher, if they still run: torchrun gives each rank a session of its own."""
        for pid in [] if self.ended else self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        common.stop_child(self.process)

    def print_state(self) -> None:
        """Says what Sublet knows, then has every rank end with its Python stacks in the log, and shows that."""
        for words in (["ps"], *([["stats", self.tenant, "--json"]] if self.tenant else [])):
            told = cli.sublet(*words, timeout_s=10)
            print(f"---- sublet {' '.join(words)}\n{str(told.get('json') or told.get('stdout'))[:4000]}", flush=True)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["ps", "-L", "-o", "pid,lwp,stat,wchan:24,comm", "-p", ",".join(map(str, self.processes()))]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
            print("\n".join(line for line in shown.splitlines() if "cuda" not in line)[:6000], flush=True)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
        time.sleep(1.5)
        self.show("stacks and last output")


def first_difference(expected: list[list[str]], got: list[list[str]]) -> tuple[bool, str]:
    """Whether every rank's values are the same, and where they first differ."""
    for rank, (before, after) in enumerate(zip(expected, got, strict=True)):
        if before == after and before:
            continue
        step = next((i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1]), None)
        return False, f"rank {rank}: {len(after)} of {len(before)} lines, first other {step}"
    return True, f"{len(expected)} ranks, {len(expected[0]) - 1} steps, and the digests of the final weights"



class TrainingJob(abc.ABC):
    """What the jobs that watch such runs have in common."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work, self.data = args, result, work, result.data
        self.random = random.Random(args.seed)
        self.gpus = gpu_count(args.gpus)
        self.data["parameters"]["gpus"] = self.gpus
        self.data["versions"].update(library_versions())
        self.current: TrainingRun | None = None
        common.at_deadline(lambda _reason: self.end(shown=True))

    def start_program(self, label: str, program: str, ranks: int, arguments: list[str], **how: Any) -> TrainingRun:
        """One run of a script in programs/, which writes its values to a folder."""
        out = self.work / label
        out.mkdir()
        arguments = [*arguments, "--out", str(out)]
        self.current = TrainingRun(self.work, label, PROGRAMS / f"{program}.py", ranks, arguments, **how)
        return self.current

    @abc.abstractmethod
    def run(self) -> None:
        """The job."""

    def run_to_end(self) -> None:
        """The job; whatever happens, no rank outlives it."""
        try:
            self.run()
        finally:
            self.end()

    def end(self, shown: bool = False) -> None:
        """Ends the run under way, after a look at it."""
        if self.current is not None and not self.current.ended:
            if shown:
                self.current.print_state()
            self.current.stop()
