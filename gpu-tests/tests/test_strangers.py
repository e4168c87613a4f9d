"""The job of strange libraries, on the simulated driver: rows that pass, fail, and cannot run here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

JOBS = Path(__file__).resolve().parent.parent

import replay_job  # noqa: E402
import sim_node  # noqa: E402
import stepping_job  # noqa: E402
import strangers_job  # noqa: E402
import common  # noqa: E402
from common import JobError, Result  # noqa: E402
from strangers_job import ROWS, Row, Strangers  # noqa: E402


def job(work: Path, rows: list[Row], *arguments: str) -> dict[str, Any]:
    """The record of a job with these rows, after its end."""
    given = ["--gpus", "2", "--width", "16", "--pauses", "3", "--deadline", "120", *arguments]
    result = Result(work / "result.json", "strangers", {})
    Strangers(rows, strangers_job.parse(given), result, work).run()
    result.finish()
    return result.data


def test_row_that_comes_through_its_pauses_has_their_times(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [Row("contents", "one_contents", "alone", (), active_ms=300), Row("other", "none", "alone", ())]
    data = job(work, rows, "--rows", "contents")
    assert list(data["rows"]) == ["contents"] and data["status"] == "passed", data["checks"]
    row = data["rows"]["contents"]
    assert row["counts"]["succeeded"] == 3 and len(row["pause_ms"]) == len(row["resume_ms"]) == 3
    assert data["summary"]["contents_pause_ms"]["count"] == 3
    table = capfd.readouterr().out
    # A busy machine may let a pause come late, which is tried again.
    assert re.search(r"contents +3/3 +0 +\d+ +ok +\d+ / \d+ ", table)
    assert (work / "contents-plain.log").is_file() and (work / "contents-hooked0.log").is_file()


def test_processes_that_share_one_gpu_come_through_their_pauses(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim_node.make(work / "node", [1024 * common.MIB])
    monkeypatch.setenv("SIMCUDA_NODE", str(work / "node"))
    monkeypatch.setenv("COMMUNICATORS", "2")
    data = job(work, list(replay_job.ROWS), "--gpus", "1", "--rows", "2 processes")
    assert data["status"] == "passed", data["checks"]
    assert data["rows"]["2 processes"]["counts"]["succeeded"] == 3
    assert len(list((work / "2-processes" / "hooked0").glob("rank*.txt"))) == 2


def test_library_that_is_not_here_is_named_and_fails_nothing(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("strange", "one_contents", "alone", ("no_such_module", "os", "nor_this")),
        Row("wide", "one_contents", "alone", (), gpus_min=3),
    ]
    data = job(work, rows)
    assert data["rows"]["strange"] == {"status": "not run", "why": "no no_such_module and no nor_this here"}
    assert data["rows"]["wide"] == {"status": "not run", "why": "it wants 3 GPUs, and there is 2"}
    assert data["status"] == "passed"
    assert capfd.readouterr().out.count("NOT RUN: ") == 4


def test_row_that_fails_is_a_failure_and_the_next_has_its_turn(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = work / "programs"
    programs.mkdir()
    (programs / "fails.py").write_text("import sys\nprint('too hot')\nsys.exit(9)\n")
    (programs / "cannot.py").write_text("import sys\nprint('NOT RUN: no hat here')\nsys.exit(77)\n")
    monkeypatch.setattr("training_run.PROGRAMS", programs)
    rows = [Row("hot", "fails", "alone", ()), Row("hatless", "cannot", "alone", ())]
    data = job(work, rows)
    assert data["rows"]["hot"]["status"] == "failed" and data["status"] == "failed"
    assert "too hot" in data["checks"][0]["detail"]
    assert data["rows"]["hatless"] == {"status": "not run", "why": "no hat here"}


def test_row_without_time_left_is_said_to_have_had_no_turn(work: Path) -> None:
    data = job(work, [Row("late", "one_contents", "alone", ())], "--deadline", "30")
    assert [(entry["what"], entry["passed"]) for entry in data["checks"]] == [("late: had its turn", False)]
    with pytest.raises(JobError, match="no row has nonsense in its name"):
        job(work, list(ROWS), "--rows", "nonsense")


@pytest.mark.parametrize("rows", [ROWS, stepping_job.ROWS, replay_job.ROWS], ids=["strangers", "stepping", "replay"])
def test_every_row_has_its_program_and_a_name_of_its_own(rows: tuple[Row, ...]) -> None:
    assert len({row.name for row in rows}) == len(rows)
    assert [row.name for row in rows if not (JOBS / "programs" / f"{row.program}.py").is_file()] == []
