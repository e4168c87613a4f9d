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
import importlib.util
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anytime_job
import common
import runner
from common import JobError, Result
from training_run import TrainingRun, gpu_count

#: What a program that cannot run here says before it says why.
NOT_RUN = "NOT RUN: "
#: Seconds that a row must have, or it is not begun.
ROW_S_MIN = 45.0
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


def parse(argv: list[str], doc: str | None = __doc__, pauses: int = 20, row_s: float = 150.0) -> Any:
    """The options."""
    parser = common.job_parser(doc, deadline_s=560)
    parser.add_argument("--rows", default="", help="only rows with one of these words in their names, by comma")
    parser.add_argument("--pauses", type=int, default=pauses, help="pauses of each row that must succeed")
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--row-s", type=float, default=row_s, help="seconds that a row may take")
    parser.add_argument("--gap-ms", default="5,60", help="shortest and longest time from a resume to the next pause")
    parser.add_argument("--pause-timeout", type=float, default=5.0, help="seconds for each phase of a pause")
    parser.add_argument("--width", type=int, default=512)
    return parser.parse_args(argv)


class NotRunError(Exception):
    """Why a row cannot run on this machine."""


class Stranger(anytime_job.Job):
    """One row."""

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
                raise NotRunError(why) from None
            raise

    def not_run(self) -> str:
        """What the program said of this machine; empty when it said nothing."""
        run = self.current
        text = run.log.read_text(errors="replace") if run is not None and run.ended else ""
        # Ranks that say it simultaneously may do so in one line.
        return text.split(NOT_RUN)[1].partition("\n")[0].strip() if NOT_RUN in text else ""


def missing(row: Row, work: Path) -> tuple[list[str], list[Path]]:
    """Modules of `row` that are not here, and folders of those that the bundle carries."""
    absent, sites = [], []
    for name in row.needs:
        if importlib.util.find_spec(name) is not None:
            continue
        try:
            sites.append(runner.package(work, name))
        except JobError:
            absent.append(name)
    return absent, sites


def median_and_p99(samples: list[float]) -> str:
    """Both as text."""
    return f"{statistics.median(samples):.0f} / {common.percentile(samples, 0.99):.0f}" if samples else "-"


#: Series of a row that its record keeps.
KEPT = ("pause_ms", "resume_ms", "step", "cut_retries", "drain_rounds", "drain_calls")
HEAD = ("row", "pauses", "failed", "retries", "ok", "pause ms, median / p99", "resume ms, median / p99", "what")


class Strangers(runner.Rows):
    """All rows, one after the other."""

    def __init__(self, rows: Sequence[Row], args: Any, result: Result, work: Path) -> None:
        self.rows, self.args, self.result, self.work = rows, args, result, work
        self.gpus = gpu_count(args.gpus)
        self.began = time.monotonic()
        self.table: list[tuple[str, ...]] = [HEAD]
        result.data["rows"] = {}
        result.data["parameters"]["gpus_used"] = self.gpus
        self.current: Stranger | None = None
        common.at_deadline(lambda _reason: self.current.end(shown=True) if self.current else None)

    def one(self, row: Row) -> None:
        """A row; whatever becomes of it, the next has its turn."""
        common.log(f"---- {row.name}")
        work = self.work / row.name.replace(" ", "-").replace(",", "").replace("/", "-")
        work.mkdir()
        absent, sites = missing(row, self.work)
        if absent:
            self.not_run(row, f"no {' and no '.join(absent)} here")
            return
        if self.gpus < row.gpus_min:
            self.not_run(row, f"it wants {row.gpus_min} GPUs, and {self.gpus} is here")
            return
        if self.left_s() < ROW_S_MIN:
            self.result.check(f"{row.name}: had its turn", False, f"{self.left_s():.0f} s were left")
            self.line(row, "FAIL", "no time was left")
            return
        record = Result(work / "row.json", row.name, {})
        self.watch(row, record, work, sites)

    def watch(self, row: Row, record: Result, work: Path, sites: list[Path]) -> None:
        """Runs the program, and puts what counts into the record of all rows."""
        args = self.row_args(row)
        job = Stranger(row, args, record, work, sites)
        self.current = job
        try:
            job.run_to_end()
        except NotRunError as why:
            self.not_run(row, str(why))
            return
        except JobError as error:
            record.check("the row came to its end", False, str(error))
        finally:
            self.current = None
            self.gather_logs(row, work)
        entries = record.data["checks"]
        for entry in entries:
            self.result.check(f"{row.name}: {entry['what']}", entry["passed"], entry["detail"])
        samples = record.data["samples"]
        kept = {name: samples.get(name, []) for name in KEPT}
        failures = record.data.get("failures", [])[:FAILURES_KEPT]
        self.result.data["rows"][row.name] = {
            "status": "passed" if all(entry["passed"] for entry in entries) else "failed",
            "program": row.program,
            "gpus": job.gpus,
            "steps": job.steps,
            "counts": dict(job.counts),
            "baseline": record.data["baseline"],
            "failures": failures,
            "places": record.data.get("places", [])[:PLACES_KEPT],
            **kept,
        }
        for name in ("pause_ms", "resume_ms"):
            for value in kept[name]:
                self.result.sample(f"{row.name}_{name}", value)
        wrong = [entry for entry in entries if not entry["passed"]]
        what = f"{wrong[0]['what']}: {wrong[0]['detail']}"[:90] if wrong else f"{job.steps} steps, the same bits"
        counts = f"{job.counts['succeeded']}/{args.pauses}", str(job.failed()), str(sum(kept["cut_retries"] + kept["drain_rounds"]))
        times = median_and_p99(kept["pause_ms"]), median_and_p99(kept["resume_ms"])
        self.line(row, "FAIL" if wrong or not entries else "ok", what, counts, times)

    def not_run(self, row: Row, why: str) -> None:
        """A row that this machine cannot run."""
        self.result.data["rows"][row.name] = {"status": "not run", "why": why}
        self.result.note(f"{row.name}: {NOT_RUN}{why}")
        self.line(row, "-", f"{NOT_RUN}{why}")

    def line(self, row: Row, ok: str, what: str, counts: Sequence[str] = ("-",) * 3, times: Sequence[str] = ("-",) * 2) -> None:
        """A line of the table."""
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

    def gather_logs(self, row: Row, work: Path) -> None:
        """Has the logs of a row among those of the job."""
        for path in work.glob("*.log"):
            path.replace(self.work / f"{work.name}-{path.name}")


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(common.run_job(options, "strangers", lambda *given: Strangers(ROWS, *given).run()))
