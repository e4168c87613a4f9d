"""Rows that train: TRL's GRPO with vLLM in the trainer's process, DeepSpeed's ZeRO-3, and Megatron's core."""

from __future__ import annotations

import json
from typing import Any

import anytime_job
from common import JobError
from engines_tools import PROGRAMS, Context, setting, short
from strangers_job import Row as LibraryRow
from strangers_job import Stranger
from suite import NotRun

#: 1.7B random weights: the class of model that one GPU trains with Adam (27 GB with its state in bf16 and fp32) next to an
#: engine that takes 0.3 of it. Groups of 8, prompts and answers of 512 tokens: 8,192 tokens a step, the usual start of a
#: GRPO recipe, in which generating and training take seconds each, so a pause can meet both.
MODEL, GROUP, PROMPT, ANSWER, STEPS, SHARE = "1.7b", 8, 512, 512, 6, 0.3
#: Name, drop-ins, whether under Sublet, and whether paused as a whole.
MODES = (
    ("alone", "", False, False),
    ("alone_again", "", False, False),
    ("own", "", True, False),
    ("dropin", "vllm", True, False),
    ("own_paused", "", True, True),
    ("dropin_paused", "vllm", True, True),
)


def grpo_trl(ctx: Context) -> None:
    """The same seeds in each mode: are weights, losses and rewards the same bits, and what does a step take?"""
    grpo(ctx, [0])


def grpo_two(ctx: Context) -> None:
    """The same on two GPUs: on each a trainer of one job, with its own engine in its process."""
    grpo(ctx, [0, 1])


def grpo(ctx: Context, gpus: list[int]) -> None:
    """Trains in each mode, one process a GPU."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(gpus))] if len(gpus) > 1 else []
    wanted = [name for name in str(ctx.args.grpo_modes).split(",") if name]
    steps, results, lines = int(setting("GRPO_STEPS", STEPS)), {}, []
    for name, dropins, under, is_paused in MODES:
        if wanted and name not in wanted:
            continue
        out = ctx.work / f"{name}.json"
        given = ["--model", str(ctx.job.model(1)), "--steps", str(steps), "--group", str(GROUP), "--prompt", str(PROMPT)]
        given += ["--answer", str(ANSWER), "--share", str(SHARE), "--result", str(out), "--life-s", f"{ctx.left_s():.0f}"]
        more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if dropins:
            more["SUBLET_COMPAT"] = dropins
        tenant = ctx.tenant(name.replace("_", "-")) if under else None
        child = ctx.start(name, [*launch, str(PROGRAMS / "engine_grpo.py"), *given], tenant, ctx.env(gpus, more))
        child.wait_fact("ready", ctx.left_s(240))
        if is_paused:
            count, deep = int(setting("GRPO_PAUSES", 10)), int(setting("GRPO_DEEP", 2))
            ctx.pause_often(tenant, gpus, count, deep, lambda child=child, steps=steps: (child.fact("step") or 0) >= steps - 1)
        child.finish(ctx.record, ctx.left_s(300), prefix=name)
        if not out.exists():
            raise JobError(f"{name} came to no result: {child.why()}")
        results[name] = json.loads(out.read_text())
        ctx.record.data["samples"][f"{name}_step_s"] = results[name]["step_s"]
        lines.append(f"{name}: step {short(results[name]['step_s'][1:])}, weights {results[name]['weights'][:12]}")
    compare(ctx, results)
    ctx.record.data["results"] = results
    for line in lines:
        ctx.job.say(ctx, line)


def compare(ctx: Context, results: dict[str, Any]) -> None:
    """Checks for the same bits, where two runs without Sublet have them; else for rewards as near as those two are."""
    names = list(results)
    first, twin = results[names[0]], results.get("alone_again")
    if twin is None:
        ctx.record.note("one run without Sublet says nothing about the spread: the results are not compared")
        return
    spread = max(abs(one - other) for one, other in zip(first["rewards"], twin["rewards"], strict=True))
    ctx.record.data["reward_spread_alone"] = spread
    for name in names[1:]:
        told = results[name]
        if twin["weights"] == first["weights"]:
            same = all(told[what] == first[what] for what in ("weights", "losses", "rewards"))
            ctx.record.check(f"{name}: weights, losses and rewards are those of '{names[0]}'", same, told["weights"][:12])
        else:
            apart = max(abs(one - other) for one, other in zip(first["rewards"], told["rewards"], strict=True))
            ctx.record.check(f"{name}: rewards within twice the spread of two runs", apart <= 2 * spread, f"{apart} of {spread}")


def library(ctx: Context, row: LibraryRow) -> None:
    """A training program of another library, paused at random instants by the job for ordinary training."""
    given = anytime_job.parse(["--pauses", str(int(setting("TRAIN_PAUSES", 20))), "--gap-ms", "5,60"])
    given.program, given.width, given.gpus = row.program, 512, 2
    given.seed, given.deadline, given.failures_max = ctx.args.seed, ctx.left_s(), 5
    given.pause_timeout, given.active_ms = 10.0, row.active_ms
    job = Stranger(row, given, ctx.record, ctx.work, [])
    try:
        job.run_to_end()
    except NotRun as why:
        raise JobError(f"{row.name}: {why}") from None
    times: Any = ctx.record.data["samples"].get("pause_ms", [])
    ctx.job.say(ctx, f"{job.steps} steps, {job.counts['succeeded']} pauses, {short(times, 'ms')}")


def zero3(ctx: Context) -> None:
    """DeepSpeed's ZeRO-3 on two ranks."""
    library(ctx, LibraryRow("zero3", "engine_zero3", "torchrun", ("deepspeed",), gpus_min=2, gpus_max=2, patience_s=120))


def megatron(ctx: Context) -> None:
    """Megatron's core, tensor parallel on two ranks."""
    library(ctx, LibraryRow("megatron", "engine_megatron", "torchrun", ("megatron.core",), gpus_min=2, gpus_max=2, patience_s=120))
