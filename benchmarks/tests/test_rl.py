"""The suite `rl`, rehearsed on simulated GPUs: what it keeps of a run, and what it says of one that failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common

JOB = Path(__file__).resolve().parent.parent / "rl_job.py"


def job(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and record of the job."""
    command = [sys.executable, str(JOB), "--simulate", "--out", str(out / "rl.json"), "--logs", str(out / "logs.txt"), *words]
    done = subprocess.run(command, env=common.child_env(), capture_output=True, text=True, timeout=600)
    (record,) = json.loads((out / "rl.json").read_text())
    return done.returncode, record


def test_a_run_leaves_verdicts_figures_and_the_page(work: Path, tmp_path: Path) -> None:
    code, record = job(tmp_path, "--modes", "sublet,keep-both", "--steps", "1")
    assert code == 0, record
    assert [entry["passed"] for entry in record["checks"]] == [True] * 4, record["checks"]
    assert record["summary"]["sublet"]["left_bytes"]["train"] < record["summary"]["keep-both"]["left_bytes"]["train"]
    shown = subprocess.run([sys.executable, str(common.ROOT / "gpu-lane" / "summary.py"), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "cannot be shown" not in shown.stdout and "sublet: lost_share" in shown.stdout, shown.stdout
    assert (tmp_path / "rl_grpo.html").is_file() and (tmp_path / "rl_grpo.json").is_file()


def test_a_run_that_cannot_start_says_why(work: Path, tmp_path: Path) -> None:
    code, record = job(tmp_path, "--modes", "none")
    assert code != 0 and record["status"] == "error"
    assert any("no record" in note for note in record["notes"]), record["notes"]


def test_a_mode_that_cannot_hold_both_must_run_out_of_memory(work: Path, tmp_path: Path) -> None:
    words = ("--modes", "sublet,keep-both", "--steps", "1", "--too-large", "keep-both")
    code, record = job(tmp_path, *words, "--gpu-mib", "100")
    assert code == 0, record
    short = record["checks"][1]
    assert "does not fit" in short["what"] and "OUT_OF_MEMORY" in short["detail"], record["checks"]
    (tmp_path / "fits").mkdir()
    code, record = job(tmp_path / "fits", *words)
    assert code != 0 and not record["checks"][1]["passed"], "a mode that holds both is no such mode"


@pytest.mark.parametrize("gpu_mib", ["128", "106"])
def test_both_rest_off_the_gpu_and_go_on_as_they_were(work: Path, tmp_path: Path, gpu_mib: str) -> None:
    words = ("--modes", "sublet,cpu", "--steps", "4", "--rest-every", "2", "--gpu-mib", gpu_mib)
    code, kept = job(tmp_path, *words)
    assert code == 0, kept
    assert [entry["passed"] for entry in kept["checks"]] == [True] * 5, kept["checks"]
    run, other = json.loads((tmp_path / "rl_grpo.json").read_text())["runs"]
    for step in (1, 3):
        asked = [(each["tenant"], each["action"]) for each in run["commands"] if each["step"] == step]
        first = asked.index(("train", "pause"), asked.index(("train", "resume")))
        assert asked[first : first + 3] == [("train", "pause"), ("infer", "pause"), ("infer", "resume")], asked
        assert ("train", "resume") in asked[first:], asked
    assert run["metrics"]["rests"] == 2 and run["metrics"]["rest_s"] > 0 and run["metrics"]["end_rest_s"] > 0
    assert other["metrics"]["rests"] == 0 and other["metrics"]["rest_s"] is None
    resting = [held for sample in run["samples"] if sample["point"] == "rest" for held in sample["held"].values()]
    assert not any(size for held in resting for kinds in held.values() for kind, size in kinds.items() if kind != "context")
