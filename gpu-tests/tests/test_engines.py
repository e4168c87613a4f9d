"""The job of engines: its pure parts, rows that cannot run here, and rows that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

JOBS = Path(__file__).resolve().parent.parent

import common  # noqa: E402
import engines_job  # noqa: E402
import engines_verl  # noqa: E402
from common import JobError, Result  # noqa: E402
from engines_figures import first_difference, lost_share, read_steps, spread  # noqa: E402
from engines_job import ROWS, Engines  # noqa: E402
from engines_tools import Context, added_delay, answers_differ, cache_tokens, longest_gap, metric, texts_differ  # noqa: E402
from suite import Row  # noqa: E402


def job(work: Path, rows: list[Row], *arguments: str) -> dict[str, Any]:
    """The record of all rows, after their end."""
    out = work / "engines.json"
    result = Result(out, "engines", {})
    given = ["--gpus", "2", "--deadline", "120", "--out", str(out), *arguments]
    Engines(rows, engines_job.parse(given), result, work).run()
    result.finish()
    return result.data


def test_without_engines_each_row_is_not_run_by_name(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suite.is_there", lambda module: module in ("torch", "transformers"))
    data = job(work, list(ROWS), "--gpus", "4")
    said = capfd.readouterr().out
    for row in ROWS:
        missing = [name for name in row.needs if name not in ("torch", "transformers")]
        assert f"{row.name}: NOT RUN: no {' and no '.join(missing)} here" in said
        assert data["rows"][row.name]["status"] == "not run"
    assert data["status"] == "passed" and len(json.loads((work / "engines.json").read_text())) == 1


def test_row_that_wants_more_gpus_is_not_run(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = job(work, [Row("wide", lambda _ctx: None, gpus_min=3)])
    assert data["rows"]["wide"] == {"status": "not run", "why": "it wants 3 GPUs, and there is 2"}
    assert "wide: NOT RUN: it wants 3 GPUs" in capfd.readouterr().out


def test_rows_of_four_gpus_are_not_run_on_two(work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.is_there", lambda _module: True)
    rows = [row for row in ROWS if row.gpus_min == 4]
    data = job(work, rows)
    assert list(data["rows"]) == ["tensor4", "experts4", "servers4", "fsdp4"] and data["status"] == "passed"
    said = capfd.readouterr().out
    assert all(f"{row.name}: NOT RUN: it wants 4 GPUs, and there is 2" in said for row in rows)


def test_trainer_and_engines_lie_on_gpus_as_the_row_says() -> None:
    def told(layout: engines_verl.Layout) -> list[Any]:
        given = engines_verl.settings(Path("m"), Path("d"), Path("r"), layout)
        names = ("actor.strategy", "actor.fsdp_config.strategy", "rollout.tensor_model_parallel_size")
        return [*(given[f"actor_rollout_ref.{name}"] for name in names), given["trainer.n_gpus_per_node"]]

    assert told(engines_verl.Layout(2)) == ["fsdp", "fsdp", 1, 2]
    assert told(engines_verl.Layout(4, 2, "fsdp2")) == ["fsdp2", "fsdp2", 2, 4]


def test_lost_share_is_of_a_step_and_without_the_first() -> None:
    one = {"step_s": [90.0, 10.0, 12.0, 11.0]}
    assert lost_share(one, {"step_s": [1.0, 12.1, 12.1]}) == pytest.approx(0.1)
    assert lost_share(one, {"step_s": [1.0]}) is None


def test_each_row_has_its_record_and_a_failure_ends_no_other(work: Path) -> None:
    def works(ctx: Context) -> None:
        ctx.record.sample("pause_s", 0.25)
        ctx.record.check("it works", True)

    def fails(ctx: Context) -> None:
        raise JobError("too hot")

    def breaks(ctx: Context) -> None:
        raise KeyError("hat")

    rows = [Row("hot", fails), Row("hatless", breaks), Row("good", works)]
    data = job(work, rows)
    assert {name: row["status"] for name, row in data["rows"].items()} == {"hot": "failed", "hatless": "failed", "good": "passed"}
    records = {record["name"]: record for record in json.loads((work / "engines.json").read_text())}
    assert records["engines_good"]["summary"]["pause_s"]["count"] == 1
    assert "too hot" in records["engines_hot"]["checks"][0]["detail"]
    assert "KeyError" in records["engines_hatless"]["checks"][0]["detail"]
    assert records["engines"]["status"] == "failed"


def test_row_whose_time_is_over_says_so(work: Path) -> None:
    data = job(work, [Row("slow", lambda ctx: ctx.left_s() and None, limit_s=-1)])
    assert data["checks"][0]["detail"] == "the row's time is over"
    late = job(work, [Row("late", lambda _ctx: None)], "--deadline", "30")
    assert late["checks"][0]["what"] == "late: had its turn"


def test_words_choose_rows_and_nonsense_is_refused(work: Path) -> None:
    rows = [Row("one", lambda _ctx: None), Row("other", lambda _ctx: None)]
    assert list(job(work, rows, "--rows", "oth")["rows"]) == ["other"]
    with pytest.raises(JobError, match="no row has nonsense in its name"):
        job(work, rows, "--rows", "nonsense")


def test_delay_is_what_a_gap_is_longer_than_the_pause() -> None:
    times = [0.0, 0.1, 0.2, 3.0, 3.1]
    assert longest_gap(times) == (pytest.approx(2.8), 0.2, 3.0)
    assert longest_gap([1.0]) == (0.0, 0.0, 0.0)
    assert added_delay(times, 0.5, 2.5) == pytest.approx(0.8)
    # Chunks that had been on their way may come while the pause is on.
    assert added_delay([0.0, 0.6, 3.0], 0.5, 2.5) == pytest.approx(0.4)
    assert added_delay(times, 4.0, 5.0) is None
    assert added_delay([], 0.0, 1.0) is None


def test_comparisons_name_the_first_difference() -> None:
    one = {"tokens": [1, 2, 3], "logprobs": ["0x1p-1", "0x1p-2", "0x1p-3"]}
    assert answers_differ(one, json.loads(json.dumps(one))) == ""
    assert answers_differ(one, {**one, "tokens": [1, 4, 3]}) == "tokens 1: 4 for 2"
    assert answers_differ(one, {**one, "logprobs": ["0x1p-1", "0x1p-2", "0x1.1p-3"]}) == "logprobs 2: 0x1.1p-3 for 0x1p-3"
    assert answers_differ(one, {**one, "tokens": [1]}) == "1 tokens for 3"
    assert texts_differ(["a", "b"], ["a", "c"]) == [1]
    assert texts_differ(["a", "b"], ["a"]) == [0, 1]


def test_metrics_of_a_server_are_read() -> None:
    page = (
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25\n'
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0\n'
    )
    assert metric(page, "vllm:kv_cache_usage_perc") == 0.25
    assert cache_tokens(page) == 16_000
    assert metric("", "x") is None and cache_tokens("") is None


def test_every_row_has_a_name_of_its_own_and_its_programs_are_there() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for name in ("model", "offline", "grpo", "verl", "zero3", "megatron"):
        assert (JOBS / "programs" / f"engine_{name}.py").is_file()


def test_figures_of_steps_are_read_and_compared(work: Path) -> None:
    assert read_steps(work / "absent.jsonl") == []
    lines = [
        {"step": 0, "data": {"val/score": 1.0}},
        {"step": 2, "data": {"critic/score/mean": 0.25, "timing_s/step": 4.0, "actor/grad_norm": 2.0, "other": 1}},
        {"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 9.0}},
    ]
    path = work / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "da')
    steps = read_steps(path)
    assert steps == [{"reward": 0.5, "step_s": 9.0}, {"reward": 0.25, "step_s": 4.0, "grad_norm": 2.0}]
    one = {"reward": [0.5, 0.25], "loss": [1.0, 2.0], "grad_norm": [3.0, 4.0], "entropy": [5.0, 6.0]}
    one |= {"apart": [0.1, 0.2], "step_s": [9.0, 4.0]}
    assert first_difference(one, {**one, "step_s": [1.0, 1.0]}) == "" and spread(one, one) == 0.0
    assert first_difference(one, {**one, "loss": [1.0, 2.5]}) == "loss of step 2: 2.5 for 2.0"
    shorter = {name: values[:1] for name, values in one.items()}
    assert first_difference(one, shorter) == "reward of step 2: None for 0.25"
    assert spread(one, {**one, "reward": [0.25, 0.25]}) == 0.25


def test_all_processes_of_a_session_are_ended_also_those_of_other_groups() -> None:
    """As Ray's workers: the child of the session's leader is a group of its own, and outlives it."""
    child = "import os, time; os.setpgid(0, 0); print(os.getpid(), flush=True); time.sleep(60)"
    leader = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", leader], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.wait(30)
        assert common.members(process.pid) == [orphan] and os.getpgid(orphan) == orphan
        assert common.end_session(process.pid) == 1
        assert common.members(process.pid) == [] and common.session_of(orphan) == 0
