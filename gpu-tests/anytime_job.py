"""Is training paused at random instants the same training, bit for bit?

The scripts in programs/ know nothing of Sublet and of pauses: `--program` ddp (gradient all-reduce in buckets), tpdp
(three kinds of communicators, three streams), pipeline (sends and receives), graphs (collectives in CUDA graphs). Only
one rank reads its loss, so the ranks stand at different places when a pause comes. The same torchrun job runs once plain
and once under `sublet run`, where the real command pauses and resumes it `--pauses` times, a random `--gap-ms` apart.
A job that ends before is started again. Every rank's losses of all steps and its final weights must be the same bits.

one_parallel and one_split (torch), one_jax, one_nccl and one_contents (the driver alone) are one process that uses all
GPUs.
rebuild is a process per GPU whose communicators end and are made again all the time, with ranks that are not in step.
graph_threads is many threads that make, clone, update and destroy graphs, some with memory nodes, by driver calls.

Bound: a pause costs its bytes over the link and NCCL's blocks, some 0.15 s, and a resume 0.15 to 0.25 s; the cut should
take no longer than the steps that the slowest rank is behind, a few ms; two starts of torchrun take 25 s.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import JobError, Result
from phases import Phases
from runner import cuda_libraries
from suite import main, options
from training_run import TrainingJob, TrainingRun, first_difference

#: Steps before the first pause: what is made on first use is there.
WARM_STEPS = 25
#: Seconds that a program may take until it works at its usual rate.
PATIENCE_S = 60.0
#: How the programs are started; all others by torchrun.
LAUNCHERS = {
    "rebuild": "launch",
    "one_parallel": "alone",
    "one_split": "alone",
    "one_nccl": "alone",
    "one_contents": "alone",
    "one_jax": "alone",
    "graph_threads": "alone",
}
#: Programs that find the CUDA libraries by their names, as torch's processes need not.
BY_NAME = ("rebuild", "one_nccl", "one_contents")
#: What may be in use on a GPU behind a deep pause; an idle one has 4.
LEFT_MIB = 20
#: Texts of failed pauses to keep.
FAILURES_MAX = 40


parse = options(
    __doc__, 240, program=["ddp", "tpdp", "pipeline", "graphs", *LAUNCHERS], pauses=(200, "pauses that must succeed"),
    seed=(1, "of the instants"), gap_ms=("5,60", "shortest and longest time from a resume to the next pause"),
    active_ms=(110.0, "time that the job is expected to run a pause"), pause_timeout=(5.0, "seconds for each phase of a pause"),
    library=("", "whose own memory alone is paused, such as nccl; all, without"),
    deep=(False, "the contexts leave the GPUs too; says what is left there"), stuck_s=(20.0, "without a step for so long, the job is stuck"),
    backend=("", "torch's name of the process group's backend, for programs that torchrun starts"), width=512,
    failures_max=(25, "failed pauses after which the job gives up"),
)  # fmt: skip


def kind_of_failure(told: dict[str, Any]) -> str:
    """Whether a pause that failed ran out of time or was refused."""
    text = f"{told.get('json') or ''} {told.get('stderr', '')}".lower()
    late = told["exit"] == common.EXIT_DEADLINE or any(word in text for word in ("deadline", "timeout", "timed out", "within"))
    return "timed_out" if late else "refused"


class Job(TrainingJob):
    """Baseline, then as many runs as the pauses take."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        super().__init__(args, result, work)
        self.began = time.monotonic()
        self.gaps_s = [float(text) / 1000 for text in args.gap_ms.split(",")]
        self.launcher = LAUNCHERS.get(args.program, "torchrun")
        self.ranks = 1 if self.launcher == "alone" else self.gpus
        self.devices = ["--devices", str(self.gpus)] if self.launcher == "alone" else []
        self.backend = ["--backend", args.backend] if args.backend and self.launcher == "torchrun" else []
        self.env = {"LD_LIBRARY_PATH": cuda_libraries()} if args.program in BY_NAME else {}
        self.warm_steps, self.patience_s = WARM_STEPS, PATIENCE_S
        self.counts = {"succeeded": 0, "refused": 0, "timed_out": 0, "resumes_failed": 0}
        self.phases = Phases()
        self.data["failures"] = []
        self.expected: list[list[str]] = []
        self.steps, self.rate = 0, 0.0

    def left_s(self) -> float:
        """Seconds until the job must have ended, some for the report taken off."""
        return self.args.deadline - 10 - (time.monotonic() - self.began)

    def start(self, label: str, tenant: str | None, *arguments: str) -> TrainingRun:
        """One run of the program."""
        given = ["--width", str(self.args.width), *self.backend, *self.devices, *arguments]
        how = {"tenant": tenant, "env": self.env, "launcher": self.launcher}
        return self.start_program(label, self.args.program, self.ranks, given, **how)

    def baseline(self) -> None:
        """The run without pauses and without Sublet."""
        seconds = self.args.pauses * self.args.active_ms / 1000 + 1.0
        plain = self.start("plain", None, "--seconds", f"{seconds:.1f}")
        code = plain.wait_end(min(self.left_s(), seconds * 3 + self.patience_s))
        self.expected, self.steps, self.rate = plain.losses(), plain.steps, plain.rate() or 0.0
        if code != 0 or not all(self.expected):
            raise JobError(f"the run without Sublet ended with {code}: {plain.tail()}")
        self.data["baseline"] = {"steps": self.steps, "steps_per_s": self.rate, "final_loss": self.expected[0][-2]}
        common.log(f"without Sublet: {self.steps} steps, {self.rate:.1f} a second")

    # ------------------------------------------------------------ one cycle

    def change(self, action: str, tenant: str) -> dict[str, Any]:
        """Runs the command."""
        limit = ["--timeout", f"{max(1, round(self.args.pause_timeout))}s"]
        whose = ["--library", self.args.library] if self.args.library else []
        if self.args.deep and action == "pause":
            whose = [*whose, "--deep"]
        return cli.sublet(action, tenant, *limit, *whose, "--json", timeout_s=8 * self.args.pause_timeout)

    def note_report(self, action: str, told: dict[str, Any]) -> None:
        """Adds the times of each phase, and what else the report says."""
        report = (told.get("json") or {}).get("report") or {}
        self.phases.add(action, report)
        if action == "pause" and report:
            names = [phase["phase"] for phase in report["phases"]]
            upto = names.index("drain") + 1 if "drain" in names else 0
            cut = report.get("cut") or {}
            for name in ("rounds", "launches", "stalls", "retries"):
                self.result.sample(f"cut_{name}", cut.get(name, 0))
            # What kernels that nobody counts waited for was let in by steps.
            drain = report.get("drain") or {}
            for name in ("rounds", "calls"):
                self.result.sample(f"drain_{name}", drain.get(name, 0))
            self.result.sample("cut_ms", cut.get("wall_us", 0) / 1000)
            standstill_us = cut.get("wall_us", 0) + sum(p["wall_us"] for p in report["phases"][:upto])
            self.result.sample("standstill_ms", standstill_us / 1000)
            # Whatever says where the ranks were, for a few pauses.
            about = {k: v for k, v in report.items() if k not in ("phases", "devices", "tenant", "action")}
            if len(str(about)) < 3000 and len(self.data.setdefault("places", [])) < 12:
                self.data["places"].append(about)
        self.data.setdefault(f"first_{action}", told)

    def cycle(self, run: TrainingRun, tenant: str) -> None:
        """A gap, a pause at whatever the ranks are doing then, a resume."""
        gap = self.random.uniform(*self.gaps_s)
        time.sleep(gap)
        step = run.poll()
        told = self.change("pause", tenant)
        if not cli.did(told):
            if run.ended:
                return
            kind = kind_of_failure(told)
            self.counts[kind] += 1
            error = (told.get("json") or {}).get("error") or told.get("stderr") or told.get("stdout") or ""
            if len(self.data["failures"]) < FAILURES_MAX:
                entry = {"pause": self.counts["succeeded"], "step": step, "kind": kind, "wall_s": told["wall_s"]}
                self.data["failures"].append({**entry, "exit": told["exit"], "error": str(error)[:1200]})
            common.log(f"pause {kind} at step {step}: {str(error)[:400]}")
            if told["exit"] == 1:
                return
        at_rest = run.poll()
        if self.args.deep and cli.did(told):
            self.result.sample("left_mib", max(common.used_mib()[: self.gpus]))
        if self.counts["succeeded"] % 10 == 0:
            time.sleep(0.05)
            # A rank that had its loss already may still print it before it comes to its next launch.
            if run.poll() > at_rest + 1:
                raise JobError(f"{run.steps - at_rest} steps were made while the tenant was paused")
        again = self.change("resume", tenant)
        if not cli.did(again):
            self.counts["resumes_failed"] += 1
            self.data["resume_failure"] = cli.say(again) + str(again.get("json"))[:2000]
            run.print_state()
            raise JobError(f"resume failed: {self.data['resume_failure'][:600]}")
        if cli.did(told):
            self.counts["succeeded"] += 1
            self.result.sample("gap_ms", round(gap * 1000, 2))
            self.result.sample("step", step)
            self.result.sample("pause_ms", round(told["wall_s"] * 1000, 2))
            self.result.sample("resume_ms", round(again["wall_s"] * 1000, 2))
            self.note_report("pause", told)
            self.note_report("resume", again)

    # ------------------------------------------------------------ the runs

    def failed(self) -> int:
        """Pauses that did not succeed."""
        return self.counts["refused"] + self.counts["timed_out"]

    def paused_run(self, number: int) -> None:
        """One run of the job under Sublet, paused until it nears its end or there were enough pauses."""
        tenant, before = f"anytime-{self.args.program}-{os.getpid()}-{number}", self.counts["succeeded"]
        run = self.start(f"hooked{number}", tenant, "--steps", str(self.steps))
        run.wait_steps(self.warm_steps, min(self.left_s(), self.patience_s + 30))
        # The last quarter second is left alone: then the job is about to end.
        last = self.steps - max(5, round(self.rate / 4))
        rest_s = self.steps / max(self.rate, 1e-3)
        while self.counts["succeeded"] < self.args.pauses and run.poll() < last and not run.ended:
            rest_s = (self.steps - run.steps) / max(self.rate, 1e-3)
            if self.left_s() < rest_s * 1.5 + 10 or self.failed() > self.args.failures_max:
                self.result.note(f"no more pauses: {self.left_s():.0f} s left, {self.failed()} failed")
                break
            if time.monotonic() - run.advanced > self.args.stuck_s:
                run.print_state()
                raise JobError(f"no step for {self.args.stuck_s:.0f} s after pause {self.counts['succeeded']}")
            self.cycle(run, tenant)
            if self.counts["succeeded"] % 50 == 1:
                common.log(f"{self.counts}, step {run.steps} of {self.steps}")
                self.result.save()
        self.result.sample("pauses_of_one_run", self.counts["succeeded"] - before)
        code = run.wait_end(max(5.0, min(self.left_s(), rest_s * 3 + 30)))
        self.result.check(f"run {number}: the job ended well", code == 0, f"exit {code} {run.tail(600) if code else ''}")
        same, detail = first_difference(self.expected, run.losses())
        self.result.check(f"run {number}: losses of all ranks identical to the run without pauses", same, detail)

    def run(self) -> None:
        """Everything, then the table."""
        self.baseline()
        number = 0
        while self.counts["succeeded"] < self.args.pauses and self.failed() <= self.args.failures_max:
            before = self.counts["succeeded"]
            if number and self.left_s() < 25 + 1.5 * self.steps / max(self.rate, 1e-3):
                self.result.note(f"no time for another run: {self.left_s():.0f} s left")
                break
            try:
                self.paused_run(number)
            finally:
                self.report()
            number += 1
            if self.counts["succeeded"] == before:
                break
        wanted = self.args.pauses
        self.result.check(f"{wanted} pauses at random instants succeeded", self.counts["succeeded"] >= wanted, str(self.counts))
        if self.args.deep:
            left = self.result.data["samples"].get("left_mib", [])
            self.result.check(f"{LEFT_MIB} MiB or less are in use on each GPU", bool(left) and max(left) <= LEFT_MIB, str(left[:3]))
        self.result.check("no pause timed out or was refused", self.failed() == 0, str(self.data["failures"][:1]))

    def report(self) -> None:
        """Puts what was measured into the record and prints the phases."""
        self.data["summary"]["pauses"] = dict(self.counts)
        self.data["samples"]["phase_wall_us"] = self.phases.flat_walls()
        self.data["phases"] = self.phases.summaries()
        self.phases.print()


if __name__ == "__main__":
    main(parse, lambda args: f"anytime_{args.program}", lambda *given: Job(*given).run_to_end())
