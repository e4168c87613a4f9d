"""Runs suites with two builds alternately (A, B, B, A), and compares them by pairs of runs next to each other.

    python3 gpu-lane/pairs.py --before BUNDLE --after BUNDLE --suites anytime_ddp,race:kept+swap --gpus 1 --limit 560

A suite is one of `run.sh`. `race:kept+swap` has these rows alone, and `kept`, `swap`, `every` or `saver` is that case of the race.
`larger`, `larger_ranks`, `engines` and `strangers` take rows likewise. What the suites read from the environment passes through.

A machine differs from hour to hour by more than a small change does. So each figure is the ratio of two neighbouring runs, after to
before: their median, and how far the pairs are apart. Next to them stands how far two runs of the same build are apart. A change
that is smaller than that is none.

`--out` has one file with the records of all runs of both builds and the comparison, made small by `compact.py`. A run for which
too little time is left is NOT RUN, by name.
Bound: four runs of each suite.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import compact
import summary
from suite import NOT_RUN, words_of

#: The order of a round, and the names of both builds.
ROUND = ("before", "after", "after", "before")
#: What has the rows of a suite.
ROWS_OF = {
    "race": "RACE_CASES",
    "larger": "LARGER_ROWS",
    "larger_ranks": "LARGER_RANKS_ROWS",
    "engines": "ENGINES_ROWS",
    "strangers": "STRANGERS_ROWS",
}
#: Cases of the race that may be named alone; `nccl` is a suite, and its case is `race:nccl`.
CASES = ("kept", "prepared", "swap", "every", "saver", "checkpoint", "legacy")
#: These would lead both builds to the same files.
OWN = ("SUBLET_BIN", "SUBLET_CONFORMANCE", "OUT")
#: Where a record is too large: what goes first. The figures of a run are in `samples` and `summary`.
BULKY = ("places", "first_pause", "first_resume", "failures", "timelines", "facts", "phases", "figures", "told")
#: Seconds that the end of a run and the comparison take.
END_S = 15.0


@dataclass
class Run:
    """One run of a suite with one build."""

    build: str
    code: int
    seconds: float
    records: list[dict[str, Any]]
    #: The medians of its figures.
    figures: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- figures


def medians(table: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The figures of a summary, however deep: each median, ratio or plain number with its path."""
    if isinstance(table, dict):
        known = [name for name in ("ratio", "median") if name in table]
        for name in known[:1] or table:
            yield from medians(table[name], path if known else f"{path}.{name}" if path else str(name))
    elif isinstance(table, (int, float)) and not isinstance(table, bool):
        yield path, float(table)


def figures(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """All figures of a run, by record and series; of `phases`, inside a pause and a resume, the times."""
    found: dict[str, float] = {}
    for record in records:
        for part in ("summary", "phases"):
            prefix = f"{record['name']}." + ("phases." if part == "phases" else "")
            for path, value in medians(record.get(part) or {}):
                if part == "summary" or path.endswith("elapsed_us"):
                    found[prefix + path] = value
    return found


def apart(values: Sequence[float]) -> float | None:
    """How far the values are apart, as a share of their median; None of less than two."""
    middle = statistics.median(values) if values else 0.0
    return (max(values) - min(values)) / abs(middle) if len(values) > 1 and middle else None


def compared(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Each figure that a pair has: both builds' medians, the pairs' ratios, and how far runs of the same build are apart."""
    pairs = [sorted(pair, key=lambda run: run.build != "before") for pair in zip(runs[::2], runs[1::2])]
    answer = {}
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        of = {build: [run.figures[name] for run in runs if run.build == build and name in run.figures] for build in ("before", "after")}
        ratios = [after.figures[name] / before.figures[name] for before, after in pairs if name in after.figures and before.figures.get(name)]
        if not ratios:
            continue
        same = {build: apart(values) for build, values in of.items()}
        widest = max((value for value in same.values() if value is not None), default=None)
        ratio = statistics.median(ratios)
        answer[name] = {
            "before": statistics.median(of["before"]),
            "after": statistics.median(of["after"]),
            "ratios": ratios,
            "ratio": ratio,
            "pairs_apart": max(ratios) - min(ratios) if len(ratios) > 1 else None,
            "same_build_apart": same,
            # Nobody knows where no build ran twice.
            "differs": None if widest is None else abs(ratio - 1) > max(widest, max(ratios) - min(ratios)),
        }
    return answer


def lines(suite: str, table: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The comparison as rows of text; times inside pauses are in the file alone."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    rows: list[tuple[str, ...]] = []
    for name, told in table.items():
        if ".phases." in name:
            continue
        same = "; ".join(share(told["same_build_apart"][build]) for build in ("before", "after"))
        verdict = {None: "?", False: "no", True: "YES"}[told["differs"]]
        ends = (summary.number(told["before"]), summary.number(told["after"]))
        rows.append((f"{suite}: {name}", *ends, f"{told['ratio']:.4f}", share(told["pairs_apart"]), same, verdict))
    return rows


HEAD = ("figure", "before", "after", "median of pairs", "pairs apart", "same build apart", "differs")


# ---------------------------------------------------------------- runs


def environment(word: str) -> tuple[str, dict[str, str]]:
    """The suite that a word names, and what its rows are in the environment."""
    suite, _, rows = word.partition(":")
    if suite in CASES:
        suite, rows = "race", suite
    if rows and suite not in ROWS_OF:
        raise common.JobError(f"{suite} takes no rows here; {', '.join(ROWS_OF)} do")
    return suite, {ROWS_OF[suite]: rows.replace("+", ",")} if rows else {}


def run(build: str, bundle: Path, word: str, gpus: int, out: Path, limit_s: float) -> Run:
    """Runs a suite from a bundle, and ends it with all that it started when its time is over."""
    suite, more = environment(word)
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    env |= {"OUT": str(out), "GPUS": str(gpus), **more}
    began = time.monotonic()
    command = ["bash", str(bundle / "run.sh"), suite]
    child = subprocess.Popen(command, env=env, cwd=bundle, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = common.EXIT_DEADLINE
    finally:
        common.end_session(child.pid, patience_s=END_S / 2)
    child.wait(END_S)
    records = [record for path in sorted(out.glob("*.json")) for record in json.loads(path.read_text())]
    return Run(build, code, time.monotonic() - began, records, figures(records))


class Pairs:
    """All suites, one after the other."""

    def __init__(self, bundles: dict[str, Path], gpus: int, rounds: int, ends: float, work: Path) -> None:
        """`ends` is when all must be over, of the monotonic clock."""
        self.bundles, self.gpus, self.order, self.ends, self.work = bundles, gpus, ROUND * rounds, ends, work
        self.records: list[dict[str, Any]] = []
        self.not_run: dict[str, str] = {}
        self.table: list[tuple[str, ...]] = [HEAD]

    def suite(self, word: str) -> list[Run]:
        """All runs of a suite for which there is time."""
        runs: list[Run] = []
        for number, build in enumerate(self.order, 1):
            left_s = self.ends - time.monotonic() - END_S
            needs_s = max((each.seconds for each in runs), default=1.0)
            label = f"{word} {number} ({build})"
            if left_s < needs_s:
                self.not_run[label] = f"{max(0.0, left_s):.0f} s were left, and it takes {needs_s:.0f} s"
                print(f"{label}: {NOT_RUN}{self.not_run[label]}", flush=True)
                break
            print(f"\n######## {label}", flush=True)
            out = self.work / f"{len(self.records)}-{number}"
            done = run(build, self.bundles[build], word, self.gpus, out, left_s)
            runs.append(done)
            if done.code != 0:
                print(f"{label}: ended with {done.code}", flush=True)
            for record in done.records:
                self.records.append({**record, "name": f"{word}.{number}.{build}.{record['name']}", "exit": done.code})
        return runs

    def compare(self, word: str) -> None:
        """Runs a suite, and adds its comparison."""
        runs = self.suite(word)
        table = compared(runs)
        self.table += lines(word, table)
        if not runs or not table:
            return
        first = next(each.records[0] for each in runs if each.records)
        commits = {each.build: each.records[0].get("commit") for each in runs if each.records}
        self.records.append(
            {
                "name": f"pairs.{word}",
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "status": "passed" if all(each.code == 0 for each in runs) else "failed",
                **{key: first.get(key) for key in ("gpu", "driver", "versions")},
                "commit": commits.get("after", "unknown"),
                "parameters": {"gpus": self.gpus, "order": [each.build for each in runs], "commits": commits, "not_run": self.not_run},
                "samples": {name: told["ratios"] for name, told in table.items()},
                "summary": {name: {key: value for key, value in told.items() if key != "ratios"} for name, told in table.items()},
                "baseline": {},
            }
        )


# ---------------------------------------------------------------- the file


def rounded(value: Any) -> Any:
    """The same with numbers of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def size_of(records: Any) -> int:
    """Bytes of the smallest form that `compact.py` writes."""
    return len(json.dumps(records, separators=(",", ":"))) + 1


def fitted(records: list[dict[str, Any]], most: int = compact.WHOLE_BYTES_MAX) -> list[dict[str, Any]]:
    """The records in `most` bytes: numbers of six digits, then without bulky parts, at last the longest series by their medians.

    Without any long series they stay too large: it is better to have them.
    """
    records = [compact.shrink(record) for record in records] if size_of(records) > most else records
    records = rounded(records) if size_of(records) > most else records
    for key in BULKY:
        if size_of(records) <= most:
            return records
        records = [{name: value for name, value in record.items() if name != key} for record in records]
    while size_of(records) > most:
        longest = max(
            ((size_of(values), record, name) for record in records for name, values in record["samples"].items() if values),
            key=lambda found: found[0],
            default=None,
        )
        if longest is None or longest[0] < 64:
            print(f"{size_of(records)} bytes are left of the records, more than {most}", flush=True)
            return records
        _, record, name = longest
        numbers = [value for value in record["samples"][name] if isinstance(value, (int, float))]
        record["samples"] = {**record["samples"], name: [common.summarise(numbers)["median"]] if numbers else []}
        record["notes"] = [*record.get("notes", []), f"of {name} the median alone was kept"]
    return records


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Writes all records into one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean = json.loads(compact.without_paths(json.dumps(records)))
    path.write_text(json.dumps(fitted(clean), separators=(",", ":")) + "\n")
    compact.main([str(path)])


def main(argv: list[str]) -> int:
    """Runs all, writes the file after each suite, prints the table. 1 where a run failed, or one was not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="bundle of the build to compare with")
    parser.add_argument("--after", type=Path, required=True, help="bundle of the build with the change")
    parser.add_argument("--suites", required=True, help="names, by comma")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use (0: all)")
    parser.add_argument("--limit", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of four runs")
    parser.add_argument("--out", type=Path, help="file of the records (default: $OUT/pairs.json, or results/pairs.json)")
    args = parser.parse_args(argv)
    words = words_of(args.suites)
    # What it runs is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for word in words:
        environment(word)
    bundles = {"before": args.before.resolve(), "after": args.after.resolve()}
    for place in bundles.values():
        if not (place / "run.sh").is_file():
            raise common.JobError(f"{place} is no bundle: it has no run.sh")
    out = args.out or Path(os.environ.get("OUT", "results")) / "pairs.json"
    with tempfile.TemporaryDirectory(prefix="sublet-pairs-") as work:
        pairs = Pairs(bundles, args.gpus, args.rounds, time.monotonic() + args.limit, Path(work))
        for word in words:
            pairs.compare(word)
            write(out, pairs.records)
    print()
    widths = [max(len(row[place]) for row in pairs.table) for place in range(len(HEAD))]
    for row in pairs.table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for label, why in pairs.not_run.items():
        print(f"{label}: {NOT_RUN}{why}")
    failed = any(record.get("exit") for record in pairs.records)
    return 1 if failed or pairs.not_run else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except common.JobError as error:
        sys.exit(f"pairs.py: {error}")
