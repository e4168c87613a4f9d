"""Does a job come through pauses whatever library it is made of?

One row a library, each a script in programs/ that knows nothing of Sublet: JAX (one process with all GPUs, and a
process for each), CuPy's two pools, TRL's GRPO, torch's symmetric memory, fully_shard, torch.compile (kernels, and
CUDA graphs), nn.DataParallel, a model split over GPUs, Triton, and two NCCLs in one process. A row runs once plain and
once or more under `sublet run`, where the real command pauses and resumes it `--pauses` times at instants of a seed of
its own; every value and the final weights must be the same bits. A library that is not installed, and is not among the
wheels that the bundle carries, is said to be so: its row is NOT RUN, which is no failure. Neither is a row that wants
more GPUs than there are.

Bound: a pause and a resume take some 0.3 s; two starts of a torch program 25 s. A row has `--row-s` seconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anytime_job
import common
import runner
from common import JobError, Result
from suite import NOT_RUN, NotRun, RecordedSuite, main, options
from training_run import TrainingRun

#: Failed pauses of a row that its record keeps.
FAILURES_KEPT = 3
#: Reports of pauses, without their phases, that it keeps.
PLACES_KEPT = 2


@dataclass(frozen=True)
class Row:
    """A library, and how its script is started."""

    name: str
    program: str
    #: `alone` is one process; otherwise a process for each GPU, by `torchrun` or `launch`.
    launcher: str
    #: Modules that must be there.
    needs: tuple[str, ...]
    gpus_min: int = 1
    least_s: float = 45.0
    #: GPUs that it uses at most; 0 is as many as there are.
    gpus_max: int = 0
    #: Processes that `launch` starts; 0 is one for each GPU.
    ranks: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    #: Steps before the first pause.
    warm_steps: int = anytime_job.WARM_STEPS
    #: The time that the program is expected to run a pause, in ms.
    active_ms: float = 110
    #: Seconds that it may take until it works at its usual rate.
    patience_s: float = anytime_job.PATIENCE_S


ROWS = (
    Row("jax, one process", "one_jax", "alone", ("jax",)),
    Row("jax, a process a GPU", "jax_ranks", "launch", ("jax",)),
    Row("cupy, its pool", "cupy_pools", "alone", ("cupy",)),
    Row("cupy, async pool", "cupy_pools", "alone", ("cupy",), env={"POOL": "async"}),
    Row(
        "trl, GRPO",
        "grpo",
        "alone",
        ("torch", "transformers", "datasets", "dill", "multiprocess", "trl"),
        gpus_max=1,
        warm_steps=8,
        active_ms=600,
        patience_s=80,
    ),
    Row("torch symmetric memory", "symmetric", "torchrun", ("torch",), gpus_min=2),
    Row("torch fully_shard", "fsdp2", "torchrun", ("torch",)),
    Row("torch.compile, default", "compiled", "alone", ("torch", "triton"), gpus_max=1, patience_s=90),
    Row(
        "torch.compile, reduce-overhead",
        "compiled",
        "alone",
        ("torch", "triton"),
        gpus_max=1,
        env={"MODE": "reduce-overhead"},
        patience_s=90,
    ),
    Row("nn.DataParallel", "one_parallel", "alone", ("torch",)),
    Row("a model split over GPUs", "one_split", "alone", ("torch",)),
    Row("triton", "tritonic", "alone", ("torch", "triton")),
    Row("two NCCLs in a process", "two_nccls", "torchrun", ("torch",)),
)


class Stranger(anytime_job.Job):
    def __init__(self, row: Row, args: Any, result: Result, work: Path, sites: list[Path]) -> None:
        super().__init__(args, result, work)
        self.row, self.sites = row, sites
        self.gpus = min(self.gpus, row.gpus_max or self.gpus)
        self.launcher = row.launcher
        self.ranks = 1 if row.launcher == "alone" else row.ranks or self.gpus
        self.devices = ["--devices", str(self.gpus)] if row.launcher == "alone" else []
        self.warm_steps, self.patience_s = row.warm_steps, row.patience_s
        cache = work / "compiled"
        self.env = {
            "LD_LIBRARY_PATH": runner.cuda_libraries(),
            # What one run has compiled, the next finds: the same kernels.
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "CUPY_CACHE_DIR": str(cache / "cupy"),
            **row.env,
        }

    def start(self, label: str, tenant: str | None, *arguments: str) -> TrainingRun:
        """One run of the program."""
        if self.launcher == "launch":
            self.env["MASTER_PORT"] = str(runner.free_port())
        given = ["--width", str(self.args.width), *self.devices, *arguments]
        how: dict[str, Any] = {"tenant": tenant, "env": self.env, "launcher": self.launcher, "sites": self.sites}
        return self.start_program(label, self.row.program, self.ranks, given, **how)

    def baseline(self) -> None:
        """As of the ordinary programs; a program that says that it cannot run here ends the row."""
        try:
            super().baseline()
        except JobError:
            why = self.not_run()
            if why:
                raise NotRun(why) from None
            raise

    def not_run(self) -> str:
        """What the program said of this machine; empty when it said nothing."""
        run = self.current
        text = run.log.read_text(errors="replace") if run is not None and run.ended else ""
        # Ranks that say it simultaneously may do so in one line.
        return text.split(NOT_RUN)[1].partition("\n")[0].strip() if NOT_RUN in text else ""


def median_and_p99(samples: list[float]) -> str:
    """Both as text."""
    return f"{statistics.median(samples):.0f} / {common.percentile(samples, 0.99):.0f}" if samples else "-"


#: Series of a row that its record keeps.
KEPT = ("pause_ms", "resume_ms", "step", "cut_retries", "drain_rounds", "drain_calls")


class Strangers(RecordedSuite):
    """All rows, one after the other."""

    HEAD = ("row", "pauses", "failed", "retries", "ok", "pause ms, median / p99", "resume ms, median / p99", "what")

    def __init__(self, rows: Sequence[Row], args: Any, result: Result, work: Path) -> None:
        super().__init__(rows, args, result, work)
        result.data["parameters"]["gpus_used"] = self.gpus
        self.sites: list[Path] = []
        self.current: Stranger | None = None
        common.at_deadline(lambda _reason: self.current.end(shown=True) if self.current else None)

    def is_there(self, module: str) -> bool:
        """Is a module here, or among the wheels of the bundle?"""
        if super().is_there(module):
            return True
        try:
            self.sites.append(runner.package(self.work, module))
        except JobError:
            return False
        return True

    def cannot(self, row: Row) -> str:
        self.sites = []
        return super().cannot(row)

    def watch(self, row: Row) -> None:
        """Runs the program, and puts what counts into the record of all rows."""
        work = self.work / row.name.replace(" ", "-").replace(",", "").replace("/", "-")
        work.mkdir()
        record = Result(work / "row.json", row.name, {})
        job = self.current = Stranger(row, self.row_args(row), record, work, self.sites)
        try:
            wrong = self.play(record, work, job.run_to_end)
        except NotRun as why:
            self.not_run(row, str(why))
            return
        finally:
            self.current = None
        entries = record.data["checks"]
        for entry in entries:
            self.result.check(f"{row.name}: {entry['what']}", entry["passed"], entry["detail"])
        samples = record.data["samples"]
        kept = {name: samples.get(name, []) for name in KEPT}
        self.data["rows"][row.name] = {
            "status": "failed" if wrong else "passed",
            "program": row.program,
            "gpus": job.gpus,
            "steps": job.steps,
            "counts": dict(job.counts),
            "baseline": record.data["baseline"],
            "failures": record.data.get("failures", [])[:FAILURES_KEPT],
            "places": record.data.get("places", [])[:PLACES_KEPT],
            **kept,
        }
        for name in ("pause_ms", "resume_ms"):
            for value in kept[name]:
                self.result.sample(f"{row.name}_{name}", value)
        what = f"{wrong[0]['what']}: {wrong[0]['detail']}"[:90] if wrong else f"{job.steps} steps, the same bits"
        retries = sum(kept["cut_retries"] + kept["drain_rounds"])
        counts = f"{job.counts['succeeded']}/{self.args.pauses}", str(job.failed()), str(retries)
        times = median_and_p99(kept["pause_ms"]), median_and_p99(kept["resume_ms"])
        self.line(row, "FAIL" if wrong or not entries else "ok", what, counts, times)

    def line(self, row: Row, ok: str, what: str, counts: Sequence[str] = ("-",) * 3, times: Sequence[str] = ("-",) * 2) -> None:
        self.table.append((row.name, *counts, ok, *times, what))

    def row_args(self, row: Row) -> argparse.Namespace:
        """The options that a run of one program has."""
        given = anytime_job.parse(["--pauses", str(self.args.pauses), "--gap-ms", self.args.gap_ms])
        given.program, given.width, given.gpus = row.program, self.args.width, self.args.gpus
        given.pause_timeout, given.active_ms = self.args.pause_timeout, row.active_ms
        # Instants of each row's own, and the same in another run.
        given.seed = self.args.seed * 1000 + self.rows.index(row)
        given.deadline = min(self.args.row_s, self.left_s())
        given.failures_max = 5
        return given


def usual(doc: str | None, pauses: int, row_s: float) -> Any:
    """The options of a suite of such rows, with these pauses and seconds for each."""
    return options(
        doc, 560, rows=("", "only rows with one of these words in their names, by comma"),
        pauses=(pauses, "pauses of each row that must succeed"), seed=(1, "of the instants"), row_s=(row_s, "seconds that a row may take"),
        gap_ms=("5,60", "shortest and longest time from a resume to the next pause"), pause_timeout=(5.0, "seconds for each phase of a pause"),
        width=512,
    )  # fmt: skip


parse = usual(__doc__, 20, 150.0)

if __name__ == "__main__":
    main(parse, "strangers", lambda *given: Strangers(ROWS, *given).run())
