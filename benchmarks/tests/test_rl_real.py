"""The programs of the suite `rl` with PyTorch, on the CPU: models, the way of the weights, and steps of TRL's trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("torch", "transformers", "trl", "accelerate", "datasets"):
    pytest.importorskip(module, reason="needs PyTorch, transformers and TRL")

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))

from rl import arguments
from rl.real import jobs, model, weights

import torch  # isort: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_made_in_its_type_with_the_same_weights_each_time(dtype: torch.dtype) -> None:
    made, again = (model.policy("tiny", dtype, torch.device("cpu")) for _ in range(2))
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    assert {buffer.dtype for buffer in made.buffers()} == {torch.float32}, "angles lose their meaning in bfloat16"
    assert torch.get_default_dtype() == torch.float32
    assert model.sha256(made) == model.sha256(again) and model.fingerprint(made) == model.fingerprint(again)
    assert float(made.lm_head.weight.detach().float().std()) == pytest.approx(0.02, rel=0.1)


def test_a_prompt_takes_what_the_options_count_for_it() -> None:
    assert {len(model.tokenizer()(prompt)["input_ids"]) for prompt in model.prompts()} == {arguments.PROMPT}


@pytest.mark.parametrize("shape", arguments.SHAPES)
def test_buckets_grow_with_the_model(shape: str) -> None:
    layout = weights.Layout(model.policy(shape, torch.bfloat16, torch.device("meta")))
    total = model.nbytes(layout.parameters)
    assert len(layout.buckets) <= 9 and layout.bucket_bytes <= max(512 << 20, total // 8 + (2 << 20))
    assert layout.bucket_bytes % (2 << 20) == 0 or len(layout.buckets) == 1
    placed = [entry for bucket in layout.buckets for entry in bucket]
    assert [number for number, _, _ in placed] == list(range(len(layout.parameters)))
    assert all(place + size <= layout.bucket_bytes for _, place, size in placed)
    assert total <= layout.file_bytes <= jobs.weights_bytes(shape, "cuda")


def test_weights_are_the_same_behind_a_file_of_several_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(weights, "_GRANULE", 1 << 10)
    given, taken = (model.policy("tiny", torch.float32, torch.device("cpu")) for _ in range(2))
    with torch.no_grad():
        for parameter in taken.parameters():
            parameter.zero_()
    layout = weights.Layout(given)
    assert len(layout.buckets) > 3
    path = str(tmp_path / "weights")
    assert weights.Lender(layout).write(path, lambda parameter: parameter.detach()) == Path(path).stat().st_size
    weights.Borrower(weights.Layout(taken)).load(path)
    assert model.sha256(given) == model.sha256(taken)


def test_the_bucket_goes_back_to_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    lender = weights.Lender(weights.Layout(model.policy("tiny", torch.float32, torch.device("cpu"))))
    lender._bucket = torch.empty(8, dtype=torch.uint8)
    lender.lent()
    # What was sent is freed once the borrower has closed it; the trainer's cache stays as it is.
    assert lender._bucket is None and called == ["ipc_collect"]


def test_micro_batches_make_one_step_of_all_completions(tmp_path: Path) -> None:
    losses = []
    for words in ([], ["--micro-batch", "2"]):
        out = tmp_path / "-".join(["out", *words])
        command = [sys.executable, str(BENCHMARKS / "rl" / "run.py"), "--device", "cpu", "--handover", "host", "--modes", "cpu,keep-both"]
        command += ["--steps", "3", "--tokens", "16", "--generations", "4", "--kv-gib", "0.01", "--out", str(out), *words]
        done = subprocess.run(command, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        record = json.loads((out / "rl_grpo.json").read_text())
        assert record["identical"] is True and [len(run["steps"]) for run in record["runs"]] == [3, 3]
        losses.append([(step["reward"], step["loss"]) for step in record["runs"][0]["steps"]])
    whole, parts = losses
    # The same completions and sums, in another order.
    assert parts[0] == pytest.approx(whole[0], abs=1e-6) and parts[1][0] == pytest.approx(whole[1][0], abs=1e-6)
