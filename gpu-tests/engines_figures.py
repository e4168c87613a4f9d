"""The figures of verl's steps: read from the lines that its loggers write, and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common

#: Our name, and verl's.
FIGURES = {
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    # How far the engine's probabilities of its tokens are from the trainer's: whether it has the trainer's weights.
    "apart": "training/rollout_probs_diff_mean",
    "step_s": "timing_s/step",
    "generate_s": "timing_s/gen",
    "update_s": "timing_s/update_weights",
}
#: What has to be the same.
SAME = ("reward", "loss", "grad_norm", "entropy", "apart")


def read_steps(path: Path) -> list[dict[str, float]]:
    """The figures of each step from verl's file of JSON lines; a line that is half written is left out."""
    found: dict[int, dict[str, float]] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        given = told["data"]
        if FIGURES["step_s"] in given:
            found[told["step"]] = {ours: given[theirs] for ours, theirs in FIGURES.items() if theirs in given}
    return [found[step] for step in sorted(found)]


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Where the figures of two trainings first differ, in words; empty where all are the same bits."""
    count = max(len(one["step_s"]), len(other["step_s"]))
    for step in range(count):
        for what in SAME:
            pair = [given[what][step] if step < len(given[what]) else None for given in (one, other)]
            if pair[0] != pair[1]:
                return f"{what} of step {step + 1}: {pair[1]} for {pair[0]}"
    return ""


def lost_share(one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """How much longer a step of the other training takes, as a share of one of the first; the first step does not count."""
    first, second = (common.summarise([value for value in given["step_s"][1:] if value])["median"] for given in (one, other))
    return second / first - 1 if first and second else None


def spread(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the rewards of two trainings are apart at most."""
    return max((abs(first - second) for first, second in zip(one["reward"], other["reward"], strict=False)), default=0.0)
