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
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import larger_models
import larger_picture
import larger_weights
import runner
from common import Result

PAGED = ("backward", "after", "pauses", "tenth")
#: What forward saves waits in host memory: by PyTorch's own copies, by `sublet.saved`, and so with a paged optimizer too.
SAVED = ("save_on_cpu", "saved", "saved_backward")
OTHERS = ("fsdp2", "torchao")
#: Rows that are no training of the 2B model.
OF_7B = {"7b_bound": larger_models.bound, "7b": larger_models.train_paged}
ROWS = ("resident", *PAGED, *SAVED, *larger_weights.ROWS, *OF_7B, *OTHERS)
#: Each row with the one that its losses must equal, bit for bit.
REFERENCES = {**dict.fromkeys((*PAGED, *SAVED), "resident"), **larger_weights.REFERENCES}
PAUSE_EVERY = 5


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=560)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, help="layers of the model; without it as many as the row's shape has")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 2,048 tokens a step")
    parser.add_argument("--frames", default="2GiB")
    parser.add_argument("--rows", default=",".join(("resident", *PAGED, *OTHERS)), help="rows to run, by comma")
    parser.add_argument("--role", choices=ROWS, help="used by the job itself")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- one training


def role(args: Any) -> int:
    """A process that trains."""
    runner.begin(args.deadline)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    runner.fact("versions", runner.versions())
    # Flash attention alone has a deterministic backward pass.
    for other in (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_cudnn_sdp):
        other(False)
    torch.backends.cuda.enable_math_sdp(False)
    # The others' own kernels have no say in what is compared.
    torch.use_deterministic_algorithms(True, warn_only=args.role in OTHERS)
    torch.utils.deterministic.fill_uninitialized_memory = False
    generator = torch.Generator("cuda").manual_seed(2)
    size = (args.batch, larger_models.TOKENS)
    data = [torch.randint(0, larger_models.VOCABULARY, size, device="cuda", generator=generator) for _ in range(4)]
    if args.role in OF_7B:
        OF_7B[args.role](args, torch, data)
        return 0
    if args.role == "graphs":
        larger_weights.graphs(torch)
        return 0
    if args.role == "resident":
        runner.fact("link", larger_models.link(torch))
        torch.cuda.empty_cache()
    model = larger_models.make(torch, larger_models.shape_of(args.role), args.layers)
    runner.fact("parameters", larger_models.count(model))
    if args.role.startswith(("infer", "lora")):
        larger_weights.steps(args, torch, model, data)
        return 0
    if args.role == "look":
        larger_weights.look(args, torch, model, data)
        return 0
    if larger_weights.is_paged(args.role):
        model = larger_weights.page(args.role, model)
    autocast = contextlib.nullcontext if args.role == "fsdp2" else lambda: torch.autocast(
        "cuda", torch.bfloat16, cache_enabled=False
    )
    optimizer = optimizer_of(args, model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    peak_bytes, losses, used_mib = 0, [], [0]
    for step in range(args.steps):
        batch, before = data[step % len(data)], larger_models.moved() if is_paged(args.role) else {}
        is_recorded = args.role == "backward" and step == args.steps - 1
        recorder = larger_picture.Recorder() if is_recorded else None
        began = time.perf_counter()
        with autocast(), saving(args.role):
            loss = model(input_ids=batch, labels=batch).loss
        if recorder is not None:
            recorder.mark("forward")
        if args.role == "resized":
            larger_weights.resize(step, args.steps, model, optimizer)
        is_paused = args.role in ("pauses", "saved_backward") and step % PAUSE_EVERY == PAUSE_EVERY - 1
        pauser = pause_soon() if is_paused else None
        loss.backward()
        if recorder is not None:
            recorder.mark("backward, with the optimizer")
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if pauser is not None:
            runner.row(f"step {step}: paused and resumed", pauser.wait(60) == 0)
        elif recorder is not None:
            runner.fact("timeline", recorder.ended())
        elif step > 0:  # the first makes the state
            runner.sample("step_s", took)
            if before:
                larger_models.sample_moved(before)
        losses.append(float(loss))
        if args.role == "left":
            used_mib.append(common.used_mib()[0])
        free, total = torch.cuda.mem_get_info()
        peak_bytes = max(peak_bytes, total - free)
    runner.fact("losses", losses)
    if args.role.startswith("wo_"):
        larger_weights.plan({"weights": model, "state": optimizer})
    if args.role not in OTHERS:
        runner.fact("weights", bits_of(torch, model))
    runner.fact("torch_peak_bytes", torch.cuda.max_memory_allocated())
    runner.fact("device_bytes", peak_bytes)
    if is_paged(args.role):
        larger_weights.report()
    if args.role == "left":
        most_mib = (larger_weights.BUDGET_GIB + larger_weights.CONTEXT_GIB) << 10
        runner.row("the budget held", max(used_mib) <= most_mib, f"{max(used_mib)} MiB of the GPU were used, its context too")
    return 0


def is_paged(row: str) -> bool:
    """Is it under Sublet?"""
    return row in (*PAGED, "saved", "saved_backward", "7b") or larger_weights.is_paged(row)


def saving(row: str) -> Any:
    """What forward runs in."""
    if row == "save_on_cpu":
        from torch.autograd.graph import save_on_cpu

        return save_on_cpu(pin_memory=True)
    if row.startswith("saved"):
        import sublet

        return sublet.saved()
    return contextlib.nullcontext()


def optimizer_of(args: Any, model: Any) -> Any:
    """The optimizer of this row."""
    import torch

    how = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    if args.role == "fsdp2":
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
    if args.role == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    if args.role in (*PAGED, "saved_backward", "resized", "left") or args.role.startswith("wo_"):
        import sublet

        step = "after" if args.role.endswith("after") else "backward"
        frames = larger_weights.state_frames(args.role, model, args.frames)
        runner.fact("state_frames_bytes", frames)
        optimizer = sublet.paged(optimizer, frames=frames, step=step)
    if args.role == "tenth":
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


# ---------------------------------------------------------------- the job


def body(args: Any, result: Result, work: Path) -> None:
    """One row after the other, each with the device to itself."""
    wanted = [row for row in ROWS if row in args.rows.split(",")]
    site = runner.package(work, "sublet")
    began = time.monotonic()
    for row in wanted:
        left = args.deadline - (time.monotonic() - began) - 15
        if left < 45 or (row == "torchao" and importlib.util.find_spec("torchao") is None):
            result.note(f"{row}: NOT RUN: {'no time is left' if left < 45 else 'it is not installed'}")
            continue
        limit = min(left, 150)
        command = [__file__, "--role", row, "--deadline", str(limit), "--steps", str(args.steps)]
        command += ["--batch", str(args.batch), "--frames", args.frames]
        command += ["--layers", str(args.layers)] if args.layers else []
        how: dict[str, Any] = {"env": {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}}
        if row == "left":
            how["env"]["SUBLET_BUDGET"] = f"{larger_weights.BUDGET_GIB}GiB"
        if is_paged(row):
            how |= {"tenant": f"larger-{row}-{os.getpid()}", "sites": [site]}
        child = runner.Child(work, row, command, **how)
        child.finish(result, limit + 10)
    facts = result.data["facts"]
    reference = facts.get("resident", {})
    for row in (row for row in wanted if row in REFERENCES and row in facts):
        if REFERENCES[row] not in facts:
            result.note(f"{row}: NOT COMPARED: {REFERENCES[row]} was not run")
            continue
        same = facts[REFERENCES[row]]
        for what in ("losses", "weights"):
            if what in same or what == "losses":
                is_same = facts[row].get(what) == same.get(what) is not None
                result.check(f"{row}: {what}, bit for bit", is_same)
    for row in (row for row in wanted if row in SAVED[1:] and row in facts):
        reports = [each for each in facts[row].get("report", []) if each.get("saved")]
        result.check(f"{row}: tensors have left the GPU", any(each["tensors"] > 0 for each in reports), str(reports)[:200])
    result.data["baseline"] = {name: reference.get(name) for name in ("parameters", "device_bytes", "torch_peak_bytes")}
    larger_models.compare(result)
    runner.verdicts(result)
    print()
    show(result, [row for row in wanted if row in facts])


def show(result: Result, rows: list[str]) -> None:
    """The figures, one line a row."""
    lines: list[tuple[str, ...]] = [("row", "step s", "p99 s", "over its reference", "device GB", "torch peak GB")]
    for row in rows:
        facts, found = result.data["facts"][row], summary(result, row)
        if found["median"] is None:
            continue
        base = summary(result, {**REFERENCES, "7b": "7b_bound"}.get(row, "resident"))["median"]
        over = "-" if not base else f"{found['median'] / base:.3f}"
        sizes = [f"{facts.get(name, 0) / 1e9:.1f}" for name in ("device_bytes", "torch_peak_bytes")]
        lines.append((row, f"{found['median']:.3f}", f"{found['p99']:.3f}", over, *sizes))
    runner.table(lines)


def summary(result: Result, row: str) -> dict[str, Any]:
    """Of the steps of a row."""
    return common.summarise(result.data["samples"].get(f"{row}_step_s", []))


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.role:
        sys.exit(role(options))
    sys.exit(common.run_job(options, "larger", body))
