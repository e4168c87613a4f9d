"""The harness of the jobs: options, rows, deadlines, processes, commands, tables. A job has only what it asks.

A job is a file whose head says its question and its bound. It ends with

    parse = options(__doc__, 560, cycles=(200, "deep pauses of two processes"))
    main(parse, "deep", body, {"holder": Holder})

`body(args, result, work)` is the job, which starts its own file again for its processes: with `--role holder` the file is one
whose steps are the methods of `Holder` (`runner.Ranks`), which is made with the options if it takes them. A dict has the
steps themselves. If the role is a function, the file is a process that says rows (`runner.Child`).

A suite of rows is a `Suite`. A row is a name, a program, its settings and its checks: a `Row` says what it runs, what must be there and
how long it may take. `Suite` has the rest: which rows are wanted, which cannot run here and why, the deadline of the job and of each
row, the tenants' processes and their end, commands that must succeed, medians, the table and the record.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result

#: What a row, or a program, says that cannot run here, before it says why.
NOT_RUN = "NOT RUN: "

# ---------------------------------------------------------------- options, and what a file is started as


def options(doc: str | None, deadline_s: float, **own: Any) -> Callable[..., Any]:
    """A function that reads a job's arguments: those of all jobs, and `own`.

    Each of `own` has its usual value, or that and its text. A list has the values there are, the usual one first; a type
    has no usual value; False is a flag.
    """

    def parse(argv: list[str]) -> Any:
        parser = common.job_parser(doc, deadline_s)
        for name, usual in own.items():
            usual, text = usual if isinstance(usual, tuple) else (usual, None)
            how: dict[str, Any] = {"type": type(usual), "default": usual}
            if usual is False:
                how = {"action": "store_true"}
            elif isinstance(usual, list):
                how = {"choices": [value for value in usual if value is not None], "default": usual[0]}
            elif isinstance(usual, type):
                how = {"type": usual}
            parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
        return parser.parse_args(argv)

    return parse


def role_of(*names: str) -> tuple[list[str | None], str]:
    """The option `role` of a job whose file is also that of its processes."""
    return [None, *names], "used by the job itself"


def main(parse: Callable[..., Any], name: str | Callable[[Any], str], body: Callable[..., Any], roles: Mapping[str, Any] | None = None) -> None:
    """Runs the job, or the role that its arguments name. The name of its record may be made of its options."""
    args = parse(sys.argv[1:])
    role = getattr(args, "role", None)
    if role is None:
        sys.exit(common.run_job(args, name(args) if callable(name) else name, body))
    play = (roles or {})[role]
    if isinstance(play, dict):
        runner.serve(runner.connect(), play)
    if isinstance(play, type):
        link = runner.connect()
        runner.serve(link, steps_of(play(args) if inspect.signature(play).parameters else play()))
    runner.begin(args.deadline)
    play(args)
    runner.fact("versions", runner.versions())
    sys.exit(0)


def steps_of(served: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an object that ranks serve as steps, by name."""
    return {name: getattr(served, name) for name in dir(served) if not name.startswith("_") and callable(getattr(served, name))}


# ---------------------------------------------------------------- rows


class NotRun(Exception):
    """Why a row cannot run here."""


@dataclass(frozen=True)
class Row:
    """A part of a suite."""

    name: str
    #: What is called with the suite.
    run: Callable[[Any], Any]
    #: Modules that must be there.
    needs: tuple[str, ...] = ()
    gpus_min: int = 1
    #: With fewer seconds left it is not begun; it is ended after the others.
    least_s: float = 0.0
    limit_s: float = math.inf


def is_there(module: str) -> bool:
    """Does Python find this module?"""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def gpu_count(wanted: int) -> int:
    """GPUs to use: as many as wanted, or all; without any, as many ranks as a rehearsal on the CPU takes."""
    return wanted or len(list(Path("/dev").glob("nvidia[0-9]*"))) or 4


def words_of(text: str) -> list[str]:
    """The words of an option that has some, by comma."""
    return [word.strip() for word in text.split(",") if word.strip()]


class Suite:
    """A run of rows, and what they share."""

    #: The first line of the table.
    HEAD: tuple[str, ...] = ()
    #: Seconds that the end of the job takes, and a command at most.
    END_S, COMMAND_S = 10.0, 90.0
    #: Seconds that must be left, or a row is not begun, whatever it says.
    LEAST_S = 0.0
    #: The check that a row which failed, or one which did not, leaves.
    FAILED, DONE = "{}: ended by itself", ""

    def __init__(self, rows: Sequence[Any], args: Any, result: Result, work: Path) -> None:
        self.rows, self.args, self.result, self.work, self.data = rows, args, result, work, result.data
        self.ends = self.row_ends = time.monotonic() + args.deadline - self.END_S
        self.gpus: int = args.gpus
        self.row: Any = None
        self.started: list[runner.Process] = []
        self.table: list[tuple[str, ...]] = [self.HEAD]

    # ------------------------------------------------------------ time

    def left_s(self) -> float:
        """Seconds until the row under way, or the job, must have ended."""
        return self.row_ends - time.monotonic()

    def within(self, most_s: float = 600.0) -> float:
        """Seconds that a step may take; JobError when the row has none left."""
        left_s = self.left_s()
        if left_s <= 0.5:
            raise JobError("the row's time was over")
        return min(left_s, most_s)

    # ------------------------------------------------------------ rows

    def chosen(self, words: Sequence[str]) -> list[Any]:
        """The rows that have one of these words in their names; all without words."""
        lost = [word for word in words if not any(word in row.name for row in self.rows)]
        if lost:
            raise JobError(f"no row has {' or '.join(lost)} in its name; there are {', '.join(row.name for row in self.rows)}")
        return [row for row in self.rows if not words or any(word in row.name for word in words)]

    def run(self, rows: Sequence[Any] | None = None) -> None:
        """The rows that are wanted, then the table."""
        rows = self.chosen(words_of(self.args.rows)) if rows is None else rows
        try:
            for row in rows:
                self.one(row)
                self.result.save()
        finally:
            self.show()

    def show(self) -> None:
        """The table and the verdicts."""
        print()
        runner.table(self.table)
        runner.verdicts(self.result)

    def is_there(self, module: str) -> bool:
        """Can rows use this module?"""
        return is_there(module)

    def cannot(self, row: Any) -> str:
        """Why a row cannot run here; empty when it can."""
        if self.gpus < row.gpus_min:
            return f"it wants {row.gpus_min} GPUs, and there is {self.gpus}"
        absent = [name for name in row.needs if not self.is_there(name)]
        if absent:
            return f"no {' and no '.join(absent)} here"
        return "" if self.left_s() >= max(row.least_s, self.LEAST_S) else f"{max(0.0, self.left_s()):.0f} s were left"

    def not_run(self, row: Any, why: str) -> None:
        """Says that a row cannot run here."""
        self.result.note(f"{row.name}: {NOT_RUN}{why}")

    def one(self, row: Any) -> None:
        """A row; whatever becomes of it, the next has its turn."""
        why = self.cannot(row)
        if why:
            self.not_run(row, why)
            return
        common.log(f"== {row.name}: {row.run.__doc__ or ''}".strip())
        began = time.monotonic()
        self.row, self.row_ends = row, min(self.ends, began + row.limit_s)
        try:
            row.run(self)
            if self.DONE:
                self.result.check(self.DONE.format(row.name), True, f"{time.monotonic() - began:.0f} s")
        except NotRun as missing:
            self.not_run(row, str(missing))
        except Exception as error:
            # A mistake in one row must not cost the others' minutes.
            if not isinstance(error, JobError):
                traceback.print_exc()
            self.result.check(self.FAILED.format(row.name), False, f"{type(error).__name__}: {error}")
        finally:
            self.stop()
            self.row_ends = self.ends

    # ------------------------------------------------------------ processes, commands, numbers

    def start(self, label: str, script: Sequence[str], tenant: str | None, ranks: int = 1, **how: Any) -> runner.Ranks:
        """Processes that serve steps; those that the row leaves are ended behind it."""
        launcher = "launch" if ranks > 1 else "alone"
        started = runner.Ranks(self.work, label, ranks, script, tenant=tenant, launcher=launcher, life_s=self.args.deadline, **how)
        self.started.append(started)
        return started

    def stop(self) -> None:
        """Ends what the row has left."""
        while self.started:
            process = self.started.pop()
            if not process.ended:
                process.kill()

    def command(self, *words: str, most_s: float | None = None) -> dict[str, Any]:
        """The `sublet` command with `--json`. JobError when it is refused, whose record is kept, and the row's processes show their stacks."""
        told = cli.sublet(*words, "--json", timeout_s=self.within(most_s or self.COMMAND_S))
        if told["exit"] != 0:
            self.data.setdefault("failures", []).append(told)
            for process in self.started:
                if not process.ended and isinstance(process, runner.Ranks):
                    process.print_stacks()
            raise JobError(cli.say(told))
        return told

    def samples(self, series: str) -> list[Any]:
        """All samples of a series so far."""
        found: list[Any] = self.data["samples"].get(series, [])
        return found

    def median(self, series: str) -> float | None:
        return common.summarise(self.samples(series))["median"]

    def middle(self, series: str, digits: int = 3) -> str:
        """The same as text."""
        value = self.median(series)
        return "-" if value is None else f"{value:.{digits}f}"


class RecordedSuite(Suite):
    """A suite each of whose rows has a record and a folder of its own. A row that has no time left has failed."""

    def __init__(self, rows: Sequence[Any], args: Any, result: Result, work: Path) -> None:
        super().__init__(rows, args, result, work)
        self.gpus = gpu_count(args.gpus)
        self.data["rows"] = {}

    def line(self, row: Any, ok: str, what: str) -> None:
        """Adds a line to the table."""
        raise NotImplementedError

    def not_run(self, row: Any, why: str) -> None:
        """A row that this machine cannot run."""
        self.data["rows"][row.name] = {"status": "not run", "why": why}
        super().not_run(row, why)
        self.line(row, "-", f"{NOT_RUN}{why}")

    def one(self, row: Any) -> None:
        """A row; whatever becomes of it, the next has its turn."""
        why = self.cannot(row)
        if why.endswith("left"):
            self.result.check(f"{row.name}: had its turn", False, why)
            self.line(row, "FAIL", "no time was left")
        elif why:
            self.not_run(row, why)
        else:
            common.log(f"---- {row.name}")
            self.watch(row)

    def watch(self, row: Any) -> None:
        """Runs a row."""
        raise NotImplementedError

    def play(self, record: Result, work: Path, body: Callable[[], None]) -> list[dict[str, Any]]:
        """Does `body`, which fills `record` from `work`; the checks that failed. Logs go among those of the job."""
        try:
            body()
        except NotRun:
            raise
        except Exception as error:
            why = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
            record.check("the row came to its end", False, why)
        finally:
            for path in work.glob("*.log"):
                path.replace(self.work / f"{work.name}-{path.name}")
        return [entry for entry in record.data["checks"] if not entry["passed"]]
