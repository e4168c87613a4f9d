"""Do torch's watchdogs stay quiet during a pause, and what happens when one is longer than their limit?

The data-parallel script trains with a process-group timeout of 30 s and a heartbeat limit of 10 s, is paused for 20 s
at a random instant with collectives in flight, and a few times shortly. Nothing may fire, and losses and weights
must be those of the run without pauses. `--beyond` does it once more with a pause longer than the process group's
timeout and notes what fires; docs/watchdogs.md says what should.

Bound: the pauses themselves, and 12 s for each start of torchrun.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import JobError, Result
from suite import main, options
from training_run import TrainingJob, TrainingRun, first_difference

#: What a watchdog or monitor of torch, or its launcher, writes when it fires.
SIGNS = "Watchdog caught|watchdog got stuck|watchdog thread terminated|heartbeat|timed out|SIGABRT|exitcode"
FIRED = re.compile(rf"[^\n]*(?:{SIGNS})[^\n]*", re.IGNORECASE)

parse = options(
    __doc__, 210, program="ddp", group_timeout_s=30.0, heartbeat_s=10, long_s=(20.0, "the long pause"),
    short=(5, "short pauses before and after it"), beyond=(False, "then a pause longer than a timeout of 8 s"),
    seconds=(8.0, "training time of the run without pauses"), seed=1,
)


class Job(TrainingJob):
    """Baseline, a paused run, and one that is paused for too long."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        super().__init__(args, result, work)
        self.steps = 0

    def start(self, label: str, tenant: str | None, timeout_s: float, *arguments: str) -> TrainingRun:
        """One run."""
        environment = {
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(self.args.heartbeat_s),
            "TORCH_NCCL_ENABLE_MONITORING": "1",
            # A watchdog that fires waits four times this long before it ends its process.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
        }
        given = ["--group-timeout-s", str(timeout_s), *arguments]
        return self.start_program(label, self.args.program, self.gpus, given, tenant=tenant, env=environment)

    def paused(self, run: TrainingRun, tenant: str, hold_s: float) -> None:
        """One pause of `hold_s` at a random instant."""
        time.sleep(self.random.uniform(0.02, 0.2))
        told = cli.sublet("pause", tenant, "--timeout", "10s", "--json", timeout_s=60)
        if told["exit"] != 0:
            run.print_state()
            raise JobError(f"{cli.say(told)} {told.get('json')}"[:1500])
        began, step = time.monotonic(), run.poll()
        time.sleep(hold_s)
        held, made = time.monotonic() - began, run.poll() - step
        told = cli.sublet("resume", tenant, "--json", timeout_s=60)
        self.result.sample("held_s", held)
        if told["exit"] != 0:
            raise JobError(f"{cli.say(told)} {told.get('json')} {run.tail(800)}"[:2500])
        if made > 1:
            raise JobError(f"{made} steps were made during a pause of {hold_s} s")

    def fired(self, run: TrainingRun) -> list[str]:
        """Lines that say that a limit was passed."""
        return [line.strip()[:300] for line in FIRED.findall(run.log.read_text(errors="replace"))]

    def within(self, expected: list[list[str]]) -> None:
        """Pauses shorter than every limit but the heartbeat's."""
        tenant = f"watchdog-{os.getpid()}"
        run = self.start("within", tenant, self.args.group_timeout_s, "--steps", str(self.steps))
        run.wait_steps(25, 90)
        for hold_s in [0.2] * self.args.short + [self.args.long_s] + [0.2] * self.args.short:
            self.paused(run, tenant, hold_s)
            run.wait_steps(min(run.poll() + 3, self.steps), 20)
        code = run.wait_end(60)
        lines = self.fired(run)
        self.result.check("no watchdog fired", code == 0 and not lines, f"exit {code} {lines[:4]}")
        same, detail = first_difference(expected, run.losses())
        self.result.check("losses of all ranks identical to the run without pauses", same, detail)

    def beyond(self) -> None:
        """A pause longer than the process group's timeout: what fires, and when."""
        limit_s = 8.0
        tenant = f"watchdog-beyond-{os.getpid()}"
        run = self.start("beyond", tenant, limit_s, "--steps", str(self.steps))
        run.wait_steps(25, 90)
        began = time.monotonic()
        try:
            self.paused(run, tenant, limit_s * 1.5)
        except JobError as error:
            self.result.note(f"pause beyond the timeout: {error}")
        common.wait_until("the end of the run that was paused for too long", lambda: run.ended, 60)
        entry = {"timeout_s": limit_s, "paused_s": limit_s * 1.5, "ended_after_s": time.monotonic() - began}
        self.data["beyond"] = {**entry, "exit": run.process.returncode, "steps": run.poll(), "of": self.steps, "fired": self.fired(run)[:12]}
        self.result.note(f"paused for {limit_s * 1.5:.0f} s with a timeout of {limit_s:.0f} s: {self.data['beyond']}")

    def run(self) -> None:
        plain = self.start("plain", None, self.args.group_timeout_s, "--seconds", f"{self.args.seconds}")
        code, expected = plain.wait_end(90), plain.losses()
        self.steps = plain.steps
        if code != 0 or not all(expected):
            raise JobError(f"the run without Sublet ended with {code}: {plain.tail()}")
        self.data["baseline"] = {"steps": self.steps, "steps_per_s": plain.rate(), "fired": self.fired(plain)}
        self.within(expected)
        self.result.save()
        if self.args.beyond:
            self.beyond()


if __name__ == "__main__":
    main(parse, "watchdog", lambda *given: Job(*given).run_to_end())
