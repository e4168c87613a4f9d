"""The rows of engines on four GPUs, rehearsed on four simulated ones: the engine is one that stands in for vLLM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

import common  # noqa: E402
import engines_job  # noqa: E402
import sim_node  # noqa: E402
from common import GIB, Result  # noqa: E402
from engines_job import ROWS, Engines  # noqa: E402

FAKES = Path(__file__).resolve().parent / "fakes"


@pytest.fixture
def four(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node of four GPUs on which the stand-in is installed."""
    for name, value in sim_node.make(work / "node", [4 * GIB] * 4).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")]))
    # Of a machine without nvidia-smi; the programs ask it too.
    script = work / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nfor gpu in 0 1 2 3; do echo 4; done\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    # The simulated driver is found before any other.
    monkeypatch.setattr("runner.cuda_libraries", lambda: os.environ["SUBLET_TEST_SIMCUDA_DIR"])
    monkeypatch.setattr("suite.is_there", lambda _module: True)
    for name in ("model", "site"):
        monkeypatch.setattr(Engines, name, lambda self, seed=0, size="": self.work / f"model{seed}{size}")
    return work


def rehearsed(work: Path, name: str) -> dict[str, Any]:
    """The record of one row."""
    out = work / "engines.json"
    result = Result(out, "engines", {})
    args = engines_job.parse(["--gpus", "4", "--deadline", "170", "--out", str(out), "--rows", name])
    folder = work / "job"
    folder.mkdir()
    Engines(ROWS, args, result, folder).run()
    result.finish()
    records = {record["name"]: record for record in json.loads(out.read_text())}
    record: dict[str, Any] = records[f"engines_{name}"]
    assert record["status"] == "passed" and result.data["status"] == "passed", [record["checks"], record["notes"]]
    assert record["parameters"]["gpus"] == 4
    return record


@pytest.mark.parametrize(("name", "said"), [("tensor4", "model1 on 4 GPUs, expert parallel: False"), ("experts4", "model1moe on 4 GPUs, expert parallel: True")])
def test_engine_on_four_gpus_is_paused_plainly_and_deep(four: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    for setting, value in {"PAUSES": 3, "TP_DEEP": 1, "TOKENS": 20}.items():
        monkeypatch.setenv(f"ENGINES_{setting}", str(value))
    record = rehearsed(four, name)
    samples = record["samples"]
    assert [len(samples[series]) for series in ("pause_s", "resume_s", "deep_pause_s", "deep_resume_s")] == [2, 2, 1, 1]
    assert all(len(samples[f"left_mib_gpu{gpu}"]) == 2 for gpu in range(4))
    assert [path.read_text().count(said) for path in sorted((four / "job").glob(f"{name}-*.log"))] == [1, 1]


def test_servers_of_four_gpus_change_places(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_SWAPS", "4")
    record = rehearsed(four, "servers4")
    assert len(record["samples"]["swap_s"]) == len(record["samples"]["swap_first_token_s"]) == 4
    assert [check["what"] for check in record["checks"]] == ["swap: the right text after each"]


def test_model_with_experts_has_their_settings() -> None:
    sys.path.insert(0, str(common.ROOT / "gpu-tests" / "programs"))
    import engine_model

    assert engine_model.settings("moe")["num_experts"] % 4 == 0 and "num_experts" not in engine_model.settings("1.7b")
    assert all(shape[4] % 4 == 0 for size, shape in engine_model.SHAPES.items() if size in engine_model.EXPERTS)
