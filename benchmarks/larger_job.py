"""Is a training with its optimizer's state off the device as fast, and the same bit for bit?

A transformers model of Llama's architecture with some 2 billion parameters in fp32 trains with bf16 autocast,
checkpointing and 16k tokens a step, by stock fused AdamW. Its 16.6 GB of moments are on the device (`resident`), or go
through frames by `sublet.paged` (`backward`, `after`, `pauses`, which is `backward` with the whole tenant paused
and resumed in every fifth step, and `tenth`, which is `backward` with each tenth announcement left out). Next to them what others do: FSDP2 with `CPUOffloadPolicy`, and torchao's
`CPUOffloadOptimizer` if it is installed. In `saved` and `saved_backward` what forward saves waits in host memory, by `sublet.saved`; the second is paused as
`pauses` is. `save_on_cpu` is PyTorch's own way, whose copies the GPU waits for. Rows whose weights are paged, by `sublet.paged(model)`, are those of `larger_weights.py`, and models of 7 and
14 billion parameters those of `larger_models.py`. Losses of all steps and the sum of all weights' bits are compared with those of
`resident`.

Attention is flash attention with a deterministic backward pass: otherwise stock differs from stock.

Bound: moments are read and written once a step, 16.6 GB each way at 50 GB/s: 0.33 s, hidden behind some 0.5 s of backward.
The last step of `backward` is recorded: which chunk is where, what goes over the link, and what is computed
(`larger_picture.py`).

So `backward` should be within a few percent of `resident`, and `after` some 0.33 s behind it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import common
import larger_models
import larger_picture
import larger_weights
import runner
from common import Result
from larger_models import Frames, Row
from suite import Suite, is_there, main, options, role_of, words_of

PAUSE_EVERY = 5


# ---------------------------------------------------------------- one training


def role(args: Any) -> None:
    """A process that trains."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    row = BY_NAME[args.role]
    # Flash attention alone has a deterministic backward pass.
    for other in (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.enable_math_sdp):
        other(False)
    # The others' own kernels have no say in what is compared.
    torch.use_deterministic_algorithms(True, warn_only=row.is_of_others)
    torch.utils.deterministic.fill_uninitialized_memory = False
    generator = torch.Generator("cuda").manual_seed(2)
    size = (args.batch, larger_models.TOKENS)
    data = [torch.randint(0, larger_models.VOCABULARY, size, device="cuda", generator=generator) for _ in range(4)]
    row.run(row, args, torch, data)


def train(row: Row, args: Any, torch: Any, data: list[Any]) -> None:
    """The training of 2 billion parameters, as this row has it."""
    if row.name == "resident":
        runner.fact("link", larger_models.link(torch))
        torch.cuda.empty_cache()
    model = larger_models.make(torch, row.shape, args.layers)
    runner.fact("parameters", larger_models.count(model))
    if row.weights:
        model = larger_weights.page(row, model)
    autocast = contextlib.nullcontext if row.name == "fsdp2" else lambda: torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
    optimizer = optimizer_of(row, args, model)
    used_mib = [0]

    def step(number: int, batch: Any) -> tuple[Any, Any]:
        is_recorded = row.name == "backward" and number == args.steps - 1
        recorder = larger_picture.Recorder() if is_recorded else None
        with autocast(), saving(row):
            loss = model(input_ids=batch, labels=batch).loss
        if recorder is not None:
            recorder.mark("forward")
        if row.name == "resized":
            larger_weights.resize(number, args.steps, model, optimizer)
        pauser = pause_soon() if row.is_paused and number % PAUSE_EVERY == PAUSE_EVERY - 1 else None
        loss.backward()
        if recorder is not None:
            recorder.mark("backward, with the optimizer")
        optimizer.step()
        optimizer.zero_grad()
        if pauser is not None:
            return loss, lambda: runner.row(f"step {number}: paused and resumed", pauser.wait(60) == 0)
        return loss, None if recorder is None else lambda: runner.fact("timeline", recorder.ended())

    # The first makes the state.
    look = (lambda: used_mib.append(common.used_mib()[0])) if row.name == "left" else None
    larger_models.loop(torch, data, args.steps, 1, step, is_paged=row.is_paged, behind=look)
    if row.name.startswith("wo_"):
        larger_weights.plan({"weights": model, "state": optimizer})
    if not row.is_of_others:
        runner.fact("weights", bits_of(torch, model))
    if row.is_paged:
        larger_models.report()
    if row.name == "left":
        most_mib = (larger_weights.BUDGET_GIB + larger_weights.CONTEXT_GIB) << 10
        runner.row("the budget held", max(used_mib) <= most_mib, f"{max(used_mib)} MiB of the GPU were used, its context too")


def saving(row: Row) -> Any:
    """What forward runs in."""
    if row.name == "save_on_cpu":
        from torch.autograd.graph import save_on_cpu

        return save_on_cpu(pin_memory=True)
    if row.is_saved:
        import sublet

        return sublet.saved()
    return contextlib.nullcontext()


def optimizer_of(row: Row, args: Any, model: Any) -> Any:
    import torch

    how = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    if row.name == "fsdp2":
        from torch.distributed import init_process_group
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        place = f"file:///tmp/larger.{os.getpid()}"
        init_process_group("cpu:gloo,cuda:nccl", init_method=place, rank=0, world_size=1)
        policy = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
        }
        for layer in model.model.layers:
            fully_shard(layer, **policy)
        fully_shard(model, **policy)
        # Its step is the CPU's.
        with contextlib.suppress(RuntimeError):
            return torch.optim.AdamW(model.parameters(), **how)
        return torch.optim.AdamW(model.parameters(), **{**how, "fused": False})
    if row.name == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    if row.step:
        import sublet

        frames = larger_weights.state_frames(row, model, args.frames)
        runner.fact("state_frames_bytes", frames)
        optimizer = sublet.paged(optimizer, frames=frames, step=row.step)
    if row.name == "tenth":
        leave_out_announcements(optimizer)
    return optimizer


def leave_out_announcements(optimizer: Any) -> None:
    """Has each tenth announcement of a paged optimizer be forgotten: a block is brought when it is used then."""
    from sublet._paging_refusals import PAGED_BY

    owner, number = getattr(optimizer, PAGED_BY), itertools.count(1)
    stock = owner._announce
    owner._announce = lambda blocks: None if next(number) % 10 == 0 else stock(blocks)


def pause_soon() -> subprocess.Popen[bytes]:
    """Pauses and resumes this tenant from outside, while it goes on."""
    sublet, tenant = os.environ["SUBLET_BIN"], os.environ["SUBLET_TENANT"]
    script = f'"{sublet}" pause "{tenant}" && "{sublet}" resume "{tenant}"'
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.Popen(["sh", "-c", script], env=env)


def bits_of(torch: Any, model: Any) -> str:
    """A number that changes with any bit of any weight."""
    total = 0
    for number, parameter in enumerate(model.parameters()):
        words = parameter.detach().contiguous().view(torch.int32).flatten()
        places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
        total = (total * 31 + int((words * places).sum()) + number) % (1 << 64)
        del words, places
    return f"{total:016x}"


# ---------------------------------------------------------------- the rows

third, sixth, twelfth = 1 / 3, 1 / 6, 1 / 12
#: In the order in which they run: what others are compared with comes first.
ROWS = (
    Row("resident", train, reference=""),
    Row("backward", train, step="backward"),
    Row("after", train, step="after"),
    Row("pauses", train, step="backward", is_paused=True),
    Row("tenth", train, step="backward"),
    Row("save_on_cpu", train),
    Row("saved", train, is_saved=True),
    Row("saved_backward", train, is_saved=True, step="backward", is_paused=True),
    Row("infer", larger_weights.steps, shape="2b16", reference=""),
    Row("lora", larger_weights.steps, shape="2b16", reference=""),
    Row("lora14", larger_weights.steps, shape="14b", reference=""),
    Row("w_all", train, weights=1.0),
    Row("w_half", train, weights=0.5),
    Row("w_third", train, weights=third),
    Row("region_third", train, weights=third),
    Row("wo_third", train, weights=third, step="backward"),
    Row("wo_third_after", train, weights=third, step="after"),
    Row("wo_sixth", train, weights=sixth, step="backward", frames=Frames.LIKE_WEIGHTS),
    Row("wo_twelfth", train, weights=twelfth, step="backward", frames=Frames.LEAST),
    Row("left", train, weights=third, step="backward", frames=Frames.WHAT_IS_LEFT),
    Row("resized", train, weights=third, step="backward", frames=Frames.CHANGING),
    Row("infer_half", larger_weights.steps, shape="2b16", weights=0.5, reference="infer"),
    Row("infer_third", larger_weights.steps, shape="2b16", weights=third, reference="infer"),
    Row("lora_half", larger_weights.steps, shape="2b16", weights=0.5, reference="lora"),
    Row("lora_third", larger_weights.steps, shape="2b16", weights=third, reference="lora"),
    Row("lora14_third", larger_weights.steps, shape="14b", weights=third, reference="lora14"),
    Row("graphs", larger_weights.graphs, weights=third, reference=""),
    Row("look", larger_weights.look, weights=third, reference=""),
    Row("7b_bound", larger_models.bound, shape="7b", reference=""),
    Row("7b", larger_models.train_paged, shape="7b", weights=third, reference="", compared="7b_bound"),
    Row("fsdp2", train, is_of_others=True, reference=""),
    Row("torchao", train, is_of_others=True, needs=("torchao",), reference=""),
)
BY_NAME = {row.name: row for row in ROWS}

parse = options(
    __doc__, 560, steps=20, layers=(int, "layers of the model; without it as many as the row's shape has"),
    batch=(8, "sequences of 2,048 tokens a step"), frames="2GiB",
    rows=("resident,backward,after,pauses,tenth,fsdp2,torchao", "rows to run, by comma"), role=role_of(*BY_NAME),
)  # fmt: skip


# ---------------------------------------------------------------- the job


class Larger(Suite):
    """One row after the other, each with the device to itself."""

    HEAD = ("row", "step s", "p99 s", "over its reference", "device GB", "torch peak GB")
    END_S = 15.0

    def one(self, row: Row) -> None:
        """Runs the row's process."""
        if self.left_s() < 45 or not all(is_there(name) for name in row.needs):
            self.not_run(row, "no time is left" if self.left_s() < 45 else "it is not installed")
            return
        args, limit = self.args, min(self.left_s(), 150)
        command = [__file__, "--role", row.name, "--deadline", str(limit), "--steps", str(args.steps)]
        command += ["--batch", str(args.batch), "--frames", args.frames, *(["--layers", str(args.layers)] if args.layers else [])]
        how: dict[str, Any] = {"env": {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}}
        if row.frames is Frames.WHAT_IS_LEFT:
            how["env"]["SUBLET_BUDGET"] = f"{larger_weights.BUDGET_GIB}GiB"
        if row.is_paged:
            how |= {"tenant": f"larger-{row.name}-{os.getpid()}", "sites": [runner.package(self.work, "sublet")]}
        runner.Child(self.work, row.name, command, **how).finish(self.result, limit + 10)

    def compare(self, rows: list[Row]) -> None:
        """Is each as its reference, bit for bit, and has memory moved?"""
        facts = self.data["facts"]
        for row in (row for row in rows if row.reference):
            if row.reference not in facts:
                self.result.note(f"{row.name}: NOT COMPARED: {row.reference} was not run")
                continue
            same = facts[row.reference]
            for what in ("losses", "weights"):
                if what in same or what == "losses":
                    is_same = facts[row.name].get(what) == same.get(what) is not None
                    self.result.check(f"{row.name}: {what}, bit for bit", is_same)
        for row in (row for row in rows if row.is_saved):
            reports = [each for each in facts[row.name].get("report", []) if each.get("saved")]
            self.result.check(f"{row.name}: tensors have left the GPU", any(each["tensors"] > 0 for each in reports), str(reports)[:200])
        reference = facts.get("resident", {})
        self.data["baseline"] = {name: reference.get(name) for name in ("parameters", "device_bytes", "torch_peak_bytes")}
        larger_models.compare(self.result)

    def show(self) -> None:
        """The comparisons, then the figures, one line a row."""
        facts = self.data.setdefault("facts", {})
        rows = [row for row in self.rows if row.name in facts]
        self.compare(rows)
        for row in rows:
            found = common.summarise(self.samples(f"{row.name}_step_s"))
            if found["median"] is not None:
                base = self.median((row.compared or row.reference or "resident") + "_step_s")
                over = "-" if not base else f"{found['median'] / base:.3f}"
                sizes = [f"{facts[row.name].get(name, 0) / 1e9:.1f}" for name in ("device_bytes", "torch_peak_bytes")]
                self.table.append((row.name, f"{found['median']:.3f}", f"{found['p99']:.3f}", over, *sizes))
        super().show()


def body(args: Any, result: Result, work: Path) -> None:
    """The rows that are named."""
    Larger(ROWS, args, result, work).run([row for row in ROWS if row.name in words_of(args.rows)])


if __name__ == "__main__":
    main(parse, "larger", body, dict.fromkeys(BY_NAME, role))
