"""Rows with vLLM's `LLM` in a script: paused at random instants, asleep, and on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import JobError
from engines_tools import PROGRAMS, Context, answers_differ, setting, short

#: Seconds of a start that is cold: weights, torch.compile and graphs. On H200 they took 44 to 50.
START_S = 200.0
#: The size of the model that has experts, as engine_model.py names it.
EXPERTS = "moe"
#: So long a request is in flight for most of a pause's gap: 1.3 s alone on H200.
TOKENS = 600


def script(ctx: Context, answers: Path, *more: str, size: str = "") -> list[str]:
    """The program and its options, with a model of the job's size or another."""
    given = ["--model", str(ctx.job.model(1, size)), "--tokens", str(int(setting("TOKENS", TOKENS))), "--answers", str(answers)]
    return [str(PROGRAMS / "engine_offline.py"), *given, "--life-s", f"{ctx.left_s():.0f}", *more]


def read(path: Path) -> list[dict[str, Any]]:
    """The first two answers of a run."""
    return json.loads(path.read_text())


def variant_script(ctx: Context, answers: Path, variant: str, gpus: list[int], *more: str) -> list[str]:
    """The program with a variant of the engine on these GPUs."""
    given = ["--variant", variant, "--tp", str(len(gpus)), *(["--adapter", str(ctx.job.adapter())] if variant == "lora" else [])]
    return script(ctx, answers, *given, *more, size=EXPERTS if variant == "experts" else "")


def reference(ctx: Context, variant: str, gpus: list[int]) -> list[dict[str, Any]]:
    """The answers without Sublet, made once for each variant; none where the engine alone does not answer the same twice."""
    key = (variant, len(gpus))
    if key not in ctx.job.references:
        answers = ctx.job.work / f"alone-{variant}-{len(gpus)}.json"
        child = ctx.start("alone", variant_script(ctx, answers, variant, gpus), None, ctx.env(gpus))
        facts = child.finish(ctx.record, ctx.left_s(START_S + 60))
        if not answers.exists():
            raise JobError(f"vLLM without Sublet gave no answer: {child.why()}")
        ctx.job.references[key] = read(answers) if facts.get("steady") else []
    return ctx.job.references[key]


def paused(ctx: Context, variant: str, gpus: list[int], method: str, pauses: int, deep: int) -> None:
    """Generates under Sublet while pauses come, and compares every answer with the run without Sublet."""
    expected = reference(ctx, variant, gpus)
    answers, stop, tenant = ctx.work / "answers.json", ctx.work / "stop", ctx.tenant()
    given = variant_script(ctx, answers, variant, gpus, "--stop", str(stop))
    env = ctx.env(gpus, {"VLLM_WORKER_MULTIPROC_METHOD": method} if method else {})
    child = ctx.start("sublet", given, tenant, env)
    child.wait_fact("ready", ctx.left_s(START_S))
    got = read(answers) if expected else []
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        differ = answers_differ(one, other)
        what = f"answer {number} under Sublet has the bits of the run without it"
        ctx.record.check(what, not differ, differ or f"{len(one['tokens'])} tokens with their log-probabilities")
    ctx.pause_often(tenant, gpus, pauses, deep, lambda: child.ended)
    stop.touch()
    facts = child.finish(ctx.record, ctx.left_s(60))
    told = facts.get("answers", {"count": 0, "differ": 0, "seconds": []})
    ctx.record.data["samples"]["answer_s"] = told["seconds"]
    if expected:
        what = "every answer in which pauses came has the same bits"
        ctx.record.check(what, told["count"] > 0 and told["differ"] == 0, f"{told['differ']} of {told['count']} differ")
    else:
        ctx.job.say(ctx, "not compared: the engine without Sublet does not answer the same twice")
        ctx.record.check("answers came under pauses", told["count"] > 0, f"{told['count']}")
    samples = ctx.record.data["samples"]
    ctx.job.say(ctx, f"{told['count']} answers, pause {short(samples.get('pause_s', []))}, deep {short(samples.get('deep_pause_s', []))}")


def offline_fork(ctx: Context) -> None:
    """vLLM's own choice of how to start its engine, which is fork."""
    paused(ctx, "plain", [0], "", int(setting("PAUSES", 50)), int(setting("DEEP", 10)))


def offline_spawn(ctx: Context) -> None:
    """The engine is started by spawn."""
    paused(ctx, "plain", [0], "spawn", int(setting("PAUSES", 50)), int(setting("DEEP", 10)))


def variant_row(variant: str) -> Any:
    """A row with a variant of the engine, and fewer pauses."""

    def run(ctx: Context) -> None:
        paused(ctx, variant, [0], "", int(setting("VARIANT_PAUSES", 10)), int(setting("VARIANT_DEEP", 2)))

    return run


def parallel(ctx: Context, variant: str, gpus: int) -> None:
    """One engine on so many GPUs."""
    paused(ctx, variant, list(range(gpus)), "", int(setting("PAUSES", 50)), int(setting("TP_DEEP", 5)))


def tp2(ctx: Context) -> None:
    """Tensor parallel on two GPUs, with custom all-reduce and NCCL."""
    parallel(ctx, "plain", 2)


def tensor4(ctx: Context) -> None:
    """Tensor parallel on four GPUs, with custom all-reduce, NCCL and graphs."""
    parallel(ctx, "plain", 4)


def experts4(ctx: Context) -> None:
    """A mixture of experts on four GPUs, each with a part of the experts."""
    parallel(ctx, "experts", 4)


def sleep(ctx: Context) -> None:
    """vLLM's own sleep without Sublet, its own under Sublet, and the drop-in: seconds, and MiB that are left."""
    cycles = int(setting("SLEEPS", 5))
    starts = {"own": (None, {}), "under": (ctx.tenant("own"), {}), "dropin": (ctx.tenant("dropin"), {"SUBLET_COMPAT": "vllm"})}
    answers, lines = {}, []
    for name, (tenant, more) in starts.items():
        path = ctx.work / f"{name}.json"
        child = ctx.start(name, script(ctx, path, "--cycles", str(cycles)), tenant, ctx.env([0], more))
        child.finish(ctx.record, ctx.left_s(START_S + 60))
        if not path.exists():
            raise JobError(f"{name} gave no answer: {child.why()}")
        answers[name] = read(path)
        samples = ctx.record.data["samples"]
        for level in (1, 2):
            seconds = samples.get(f"{name}_sleep{level}_s", [])
            left = samples.get(f"{name}_sleep{level}_left_mib", [])
            wake = samples.get(f"{name}_wake{level}_s", [])
            lines.append(f"{name} {level}: sleep {short(seconds)}, wake {short(wake)}, left {max(left, default=0):.0f} MiB")
    for name in ("under", "dropin"):
        differ = [text for pair in zip(answers["own"], answers[name], strict=True) if (text := answers_differ(*pair))]
        ctx.record.check(f"{name}: answers have the bits of the run without Sublet", not differ, str(differ[:1]))
    for line in lines:
        ctx.job.say(ctx, line)
