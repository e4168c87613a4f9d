"""Does the whole road work at all: one GPU, one process, preload, ps, pause, resume, graph replay, refusals?

The first thing to run on a new machine. Every row is a yes or no with a detail; the table comes last.
Bound: 256 MiB each way is 5 ms of copying; the run is the start of two Python processes with torch, 20 to 40 s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli
import runner
from common import MIB, JobError, Result
from observer import observed
from rank import NcclRanks
from suite import main, options

parse = options(__doc__, 150, pause_timeout=40.0)


class Check:
    """The rows, in order; a row that raises is a failed row and the next ones still run."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.tenant = f"selfcheck-{os.getpid()}"
        self.observer, _ = observed(args, result, work)
        self.result.data["free_empty"] = self.observer.free()

    def row(self, what: str, body: Callable[[], tuple[bool, str]]) -> bool:
        try:
            passed, detail = body()
        except (JobError, KeyError, TypeError, ValueError, OSError) as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        self.result.check(what, passed, detail)
        self.result.save()
        return passed

    def command(self, *args: str, expect: int | None = 0) -> tuple[bool, str]:
        """Runs the `sublet` command; `expect` None is any exit code but 0, a panic or a timeout."""
        told = cli.sublet(*args, timeout_s=self.args.pause_timeout)
        self.result.data.setdefault("told", []).append(told)
        right = told["exit"] == expect if expect is not None else told["exit"] in (1, 2)
        return right, cli.say(told) if not right or expect != 0 else f"{told['wall_s']:.3f} s {told.get('stderr', '')}"

    def start(self) -> tuple[bool, str]:
        """Torch under the preload."""
        self.ranks = NcclRanks(self.result, self.work, "selfcheck", 1, self.tenant, life_s=self.args.deadline)
        return True, f"import {self.ranks.started[0]['import_s']:.1f} s"

    def tensors(self) -> tuple[bool, str]:
        """Blocks of 64 MiB: a region's memory must be its own."""
        made = self.ranks.call("tensors", 60, kept_gib=0.25, scratch_gib=0.0625, block_mib=64)[0]
        return made["scratch_in_region"], f"{made['kept_bytes'] >> 20} MiB kept, {made['scratch_bytes'] >> 20} MiB scratch"

    def step(self) -> tuple[bool, str]:
        """Every block and the scratch."""
        wrong = self.ranks.step(40)["wrong"]
        return not wrong, str(wrong or "identical")

    def graph(self, value: float) -> tuple[bool, str]:
        """A replay of the captured graph."""
        return self.ranks.call("graph_check", 40, value=value)[0]["right"], f"y = 2 * {value} + 1"

    def pause(self) -> tuple[bool, str]:
        """Pauses from outside; 320 MiB and more must come free, immediately."""
        before = self.observer.free()[0]
        passed, detail = self.command("pause", self.tenant, "--json")
        freed = (self.observer.free()[0] - before) / MIB
        self.result.sample("freed_mib", freed)
        return passed and freed >= 318, f"{freed:.0f} MiB freed; {detail}"

    def resume(self) -> tuple[bool, str]:
        return self.command("resume", self.tenant, "--json")

    def from_inside(self) -> tuple[bool, str]:
        """ncclPause and ncclResume, then sublet_pause_tenant and its counterpart, by the process itself."""
        times = []
        for op in ("together", "tenant"):
            for action in ("pause", "resume"):
                times.append(self.ranks.call(op, self.args.pause_timeout, action=action)[0]["seconds"])
        return True, ", ".join(f"{seconds:.3f} s" for seconds in times)

    def stats(self) -> tuple[bool, str]:
        """The numbers from inside."""
        answer = self.ranks.call("stats", 20, print_too=True)[0]
        self.result.data["stats"] = answer
        return isinstance(answer, dict) and "error" not in answer, str(answer)[:200]

    def capture(self) -> tuple[bool, str]:
        """A pause during a stream capture is refused with exit code 1, and the capture goes on."""
        ranks = self.ranks.send("capture_hold")
        self.ranks.collect("capture_hold (begin)", ranks, 40)
        refused, detail = self.command("pause", self.tenant, "--json", expect=1)
        self.ranks.links[0].send({"op": "capture_end"})
        right = self.ranks.collect("capture_hold (end)", ranks, 40)[0]["right"]
        return refused and right, f"graph right: {right}; {detail}"

    def alive(self) -> tuple[bool, str]:
        """After the refusal the tenant must be active; if the pause went through, take it back."""
        self.command("resume", self.tenant, "--json")
        return self.step()

    def run(self) -> None:
        """All rows. Without a process under the preload nothing else makes sense."""
        if not self.row("torch starts under the preload", self.start):
            return
        first = [
            ("tensors kept and in a discard region", self.tensors),
            ("a CUDA graph is captured", lambda: (True, str(self.ranks.call("graph_setup", 40)[0]))),
            ("graph replay before", lambda: self.graph(3.0)),
            ("step before", self.step),
            ("sublet ps", lambda: self.command("ps")),
            ("sublet stats", lambda: self.command("stats", self.tenant, "--json")),
            ("sublet doctor", lambda: self.command("doctor")),
        ]
        rows: list[tuple[str, Callable[[], tuple[bool, str]]]] = list(first)
        for number in (1, 2):
            rows += [
                (f"pause {number} from outside frees the memory", self.pause),
                (f"sublet ps while paused {number}", lambda: self.command("ps")),
                (f"pause {number} again succeeds and says so", lambda: self.command("pause", self.tenant)),
                (f"resume {number} from outside", self.resume),
                (f"tensors identical after {number}", self.step),
                (f"graph replay after {number}", lambda number=number: self.graph(4.0 + number)),
            ]
        rows += [
            ("resume of an active tenant succeeds and says so", lambda: self.command("resume", self.tenant)),
            ("pause and resume from inside, both ways", self.from_inside),
            ("tensors identical after that", self.step),
            ("stats from inside", self.stats),
            ("pause during capture is refused with 1, capture goes on", self.capture),
            ("job lives on after the refusal", self.alive),
            ("graph replay at the end", lambda: self.graph(9.0)),
            ("an unknown tenant is an error", lambda: self.command("pause", "no-such-tenant", expect=None)),
        ]
        for what, body in rows:
            self.row(what, body)
            if self.ranks.ended:
                self.result.note(f"the job ended with {self.ranks.process.returncode}: {self.ranks.tail()}")
                break
        self.ranks.close()
        free = self.observer.settled_free()[0]
        lost = (self.result.data["free_empty"][0] - free) / MIB
        self.result.check("all memory is back after the job's end", lost <= 8, f"{lost:.0f} MiB missing")


def body(args: Any, result: Result, work: Path) -> None:
    """The rows, then the table."""
    Check(args, result, work).run()
    runner.verdicts(result)


if __name__ == "__main__":
    main(parse, "selfcheck", body)
