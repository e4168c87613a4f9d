"""Pairs of builds: the order of the runs, the comparison, and the file, on bundles whose suites write made-up results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common  # noqa: E402
import compact  # noqa: E402
import pairs  # noqa: E402

#: A suite that writes what the next line of the file `values` says, and what it was started with into `seen`.
RUN = """
set -eu
value=$(head -n 1 values); sed -i 1d values
echo "$PWD $1 ${GPUS} ${RACE_CASES:-} ${PASSES:-} ${SUBLET_BIN:-none}" >>../seen
[ "$value" != hang ] || sleep 600
cat >"$OUT/$1.json" <<END
[{"name": "$1", "commit": "abc$(basename "$PWD")", "status": "passed", "date": "2026-01-02T03:04:05+00:00",
  "gpu": {"name": "Some GPU", "count": 1}, "driver": "1", "versions": {}, "parameters": {}, "baseline": {}, "checks": [], "notes": [],
  "samples": {"pause_s": [$value, $value]},
  "summary": {"pause_s": {"median": $value, "p99": 9.0}, "mixed": {"launch": {"ratio": $value, "hooked": {"median": 3}}}}}]
END
[ "$value" != 0.5 ] || exit 1
"""


#: Command, seconds expected and GPUs of each call that the pages describe.
CALLS = [
    (found[1], int(found[2]), int(found[3]))
    for page in ("gpu-tests", "benchmarks")
    for found in re.finditer(r"^\|[^|]+\| `([^`]+)` \| (\d+) s \| (\d) \|$", (common.ROOT / page / "README.md").read_text(), re.MULTILINE)
]


def bundles(work: Path, before: list[Any], after: list[Any]) -> dict[str, Path]:
    """Two folders as bundles are, with the values that their runs measure, in order."""
    made = {}
    for name, values in (("before", before), ("after", after)):
        made[name] = work / name
        made[name].mkdir()
        (made[name] / "run.sh").write_text("OUT=$OUT; mkdir -p \"$OUT\"\n" + RUN)
        (made[name] / "values").write_text("".join(f"{value}\n" for value in values))
    return made


def compare(work: Path, suites: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the records of a comparison."""
    out = work / "pairs.json"
    given = ["--before", str(work / "before"), "--after", str(work / "after"), "--suites", suites, "--gpus", "3", "--out", str(out)]
    code = pairs.main([*given, "--limit", "300", *more])
    return code, json.loads(out.read_text())


def test_builds_alternate_and_figures_are_ratios_of_neighbours(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSES", "through")
    bundles(work, [1.0, 1.25], [2.0, 2.5])
    code, records = compare(work, "race:kept+swap")
    seen = [line.split() for line in (work / "seen").read_text().splitlines()]
    assert [Path(line[0]).name for line in seen] == ["before", "after", "after", "before"]
    assert {tuple(line[1:]) for line in seen} == {("race", "3", "kept,swap", "through", "none")}
    assert code == 0 and [record["name"] for record in records] == [
        "race:kept+swap.1.before.race", "race:kept+swap.2.after.race", "race:kept+swap.3.after.race",
        "race:kept+swap.4.before.race", "pairs.race:kept+swap",
    ]  # fmt: skip
    told = records[-1]
    assert told["samples"] == {"race.pause_s": [2.0, 2.0], "race.mixed.launch": [2.0, 2.0]}
    pause = told["summary"]["race.pause_s"]
    assert pause["same_build_apart"] == {"before": pytest.approx(0.25 / 1.125), "after": pytest.approx(0.5 / 2.25)}
    assert pause["differs"] and pause["pairs_apart"] == 0
    assert told["parameters"]["commits"] == {"before": "abcbefore", "after": "abcafter"} and told["status"] == "passed"
    said = capfd.readouterr().out
    assert "race:kept+swap: race.pause_s" in said and "YES" in said


def test_change_within_the_spread_of_one_build_is_none(work: Path) -> None:
    bundles(work, [1.0, 1.2], [1.1, 1.05])
    _, records = compare(work, "swap")
    told = records[-1]["summary"]["race.pause_s"]
    assert not told["differs"] and told["ratio"] == pytest.approx((1.1 + 1.05 / 1.2) / 2, 1e-5)


def test_failed_run_is_told_and_its_records_are_kept(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundles(work, [1.0, 1.0], [0.5, 1.0])
    code, records = compare(work, "nccl")
    assert code == 1 and [record.get("exit") for record in records[:4]] == [0, 1, 0, 0]
    assert records[-1]["status"] == "failed" and "nccl 2 (after): ended with 1" in capfd.readouterr().out


def test_run_for_which_no_time_is_left_is_not_run_by_name(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundles(work, [1.0], [1.0])
    code, records = compare(work, "nccl,rates", "--limit", "0")
    said = capfd.readouterr().out
    assert code == 1 and records == [] and not (work / "seen").exists()
    assert "nccl 1 (before): NOT RUN: 0 s were left" in said and "rates 1 (before): NOT RUN" in said


def test_run_that_hangs_is_ended_and_nothing_of_it_is_left(work: Path) -> None:
    made = bundles(work, ["hang"], [])
    out = work / "out"
    done = pairs.run("before", made["before"], "nccl", 1, out, 1.0)
    assert done.code == common.EXIT_DEADLINE and done.records == []


def test_two_pairs_and_one_run_alone_are_compared() -> None:
    def run(build: str, value: float) -> pairs.Run:
        return pairs.Run(build, 0, 1.0, [], {"a": value})

    told = pairs.compared([run("before", 2.0), run("after", 1.0)])["a"]
    assert told["ratios"] == [0.5] and told["differs"] is None and told["pairs_apart"] is None
    # The third has no neighbour.
    assert pairs.compared([run("before", 2.0), run("after", 1.0), run("after", 9.0)])["a"]["ratios"] == [0.5]
    assert pairs.compared([run("before", 0.0), run("after", 1.0)]) == {}


def test_large_records_fit_and_keep_their_figures(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def record(number: int) -> dict[str, Any]:
        series = {f"s{index}": [index + place / 7 for place in range(4000)] for index in range(3)}
        return {"name": f"r{number}", "phases": {"much": ["x" * 900] * 100}, "samples": {**series, "short": [1.0]}, "summary": {"a": 1}}

    out = work / "out.json"
    pairs.write(out, [record(number) for number in range(4)])
    text = out.read_text()
    assert len(text) <= compact.WHOLE_BYTES_MAX + 1
    for found in json.loads(text):
        assert found["samples"]["short"] == [1.0] and found["summary"] == {"a": 1} and all(found["samples"].values())
    named = [{"name": "x" * 1000, "samples": {}}]
    assert pairs.fitted(named, most=100) == named and "more than 100" in capfd.readouterr().out


def test_small_records_stay_whole(work: Path) -> None:
    whole = [{"name": "r", "phases": {"a": 0.1234567890123}, "samples": {"s": [0.1234567890123]}}]
    assert pairs.fitted(whole) == whole


def test_figures_are_medians_ratios_and_times_of_phases() -> None:
    took = {"elapsed_us": {"median": 5, "p99": 9}, "driver_calls": {"median": 7}}
    told = {"name": "a", "summary": {"x_s": {"median": 1.0, "p99": 2.0}, "flag": True, "most": 3}, "phases": {"pause": {"cut": took}}}
    assert pairs.figures([told]) == {"a.x_s": 1.0, "a.most": 3.0, "a.phases.pause.cut.elapsed_us": 5.0}
    assert pairs.figures([{"name": "b", "summary": None}]) == {}


def test_words_name_suites_cases_and_rows() -> None:
    assert pairs.environment("anytime_ddp") == ("anytime_ddp", {})
    assert pairs.environment("saver") == ("race", {"RACE_CASES": "saver"})
    assert pairs.environment("larger:7b_bound+7b") == ("larger", {"LARGER_ROWS": "7b_bound,7b"})
    with pytest.raises(common.JobError, match="nccl takes no rows here"):
        pairs.environment("nccl:2")
    cases = (Path(pairs.__file__).parent.parent / "benchmarks" / "race_job.py").read_text()
    assert all(f'Row("{name}",' in cases for name in pairs.CASES)
    text = (Path(pairs.__file__).parent / "run.sh").read_text()
    assert all(f"run_{suite}()" in text and f"${{{rows}:-" in text for suite, rows in pairs.ROWS_OF.items())


@pytest.mark.parametrize("line", CALLS)
def test_call_of_the_pages_names_suites_that_are_there_and_ends_within_ten_minutes(work: Path, line: tuple[str, int, int]) -> None:
    command, expected_s, gpus = line
    if "pairs.py" in command:
        words = command.split("--suites ")[1].split()[0].split(",")
        text = (common.ROOT / "gpu-lane" / "run.sh").read_text()
        assert all(f"run_{pairs.environment(word)[0]}()" in text for word in words)
        assert f"--gpus {gpus}" in command and expected_s < 600
        return
    idle = work / "idle"
    idle.write_text("#!/bin/sh\n")
    idle.chmod(0o755)
    given = command.replace("run.sh", str(common.ROOT / "gpu-lane" / "run.sh"))
    env = {**common.child_env(), "PYTHON": str(idle), "OUT": str(work / "out")}
    done = subprocess.run(["bash", "-c", given], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    limits = [int(limit) for limit in re.findall(r"^== .*\(at most (\d+) s\)$", done.stdout, re.MULTILINE)]
    assert limits and expected_s < sum(limits) <= 600 and f"GPUS={gpus}" in command
    # Without cuMem they are results of their own.
    assert ("NCCL_CUMEM_ENABLE=0" in command) == ("_cumem0" in done.stdout)


def test_folder_without_run_sh_is_no_bundle(work: Path) -> None:
    given = ["--before", str(work), "--after", str(work), "--suites", "nccl"]
    with pytest.raises(common.JobError, match="is no bundle"):
        pairs.main(given)
