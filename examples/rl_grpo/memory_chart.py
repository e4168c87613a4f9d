"""Memory of one GPU over time, stacked by tenant and kind, and whose turn it was, on one axis of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_grpo import charts
from rl_grpo.sampling import KINDS
from rl_grpo.space import mib

#: What is stacked, from below: tenant and kind.
LAYERS = [
    ("train", "context"), ("infer", "context"),
    ("train", "nccl"), ("train", "weights"), ("train", "optimizer"), ("train", "caches"), ("train", "graphs"), ("train", "bucket"),
    ("infer", "nccl"), ("infer", "weights"), ("infer", "graphs"), ("infer", "caches"), ("infer", "kv"),
]  # fmt: skip
_LANES = {"train": ("train", 0), "generate": ("infer", 1), "to_generator": ("switch", 2), "to_trainer": ("switch", 2), "handover": ("hand", 2)}
_LANE_NAMES = ("train", "infer", "switch")
WORDS = {
    "train": "trainer works", "generate": "generator works", "to_generator": "switch to the generator",
    "to_trainer": "switch to the trainer", "handover": "hand-over of weights", "start": "start",
}  # fmt: skip
#: Two samples that differ by less than this share of the GPU look the same.
_ALIKE = 1 / 400


def thinned(samples: Sequence[dict[str, Any]], gpu: str, total_bytes: int, most: int) -> list[dict[str, Any]]:
    """Samples of `gpu`, at most about `most`: those where something changes, else of each stretch the fullest one."""
    kept: list[dict[str, Any]] = []
    for sample in samples:
        alike = kept and all(
            abs(_bytes(sample, gpu, layer) - _bytes(kept[-1], gpu, layer)) < _ALIKE * total_bytes for layer in LAYERS
        )
        if not alike:
            kept.append(sample)
    if samples and kept[-1] is not samples[-1]:
        kept.append(samples[-1])
    if len(kept) <= most:
        return kept
    begin_s, end_s = kept[0]["at_s"], kept[-1]["at_s"]
    fullest: dict[int, dict[str, Any]] = {}
    for sample in kept:
        place = int((most - 1) * (sample["at_s"] - begin_s) / max(1e-9, end_s - begin_s))
        if place not in fullest or _all_bytes(sample, gpu) > _all_bytes(fullest[place], gpu):
            fullest[place] = sample
    return [fullest[place] for place in sorted(fullest)]


def _bytes(sample: dict[str, Any], gpu: str, layer: tuple[str, str]) -> int:
    tenant, kind = layer
    return int(sample["held"].get(gpu, {}).get(tenant, {}).get(kind, 0))


def _all_bytes(sample: dict[str, Any], gpu: str) -> int:
    return sum(_bytes(sample, gpu, layer) for layer in LAYERS)


def seconds_axis(run: dict[str, Any]) -> charts.Axis:
    """From the first sample to the last phase's end."""
    ends = [phase["end_s"] for phase in run["phases"]] + [sample["at_s"] for sample in run["samples"]]
    return charts.axis(0.0, max(ends, default=1.0), most=10)


def present(run: dict[str, Any], gpu: str) -> list[tuple[str, str]]:
    """The layers that hold something at some time."""
    return [layer for layer in LAYERS if any(_bytes(sample, gpu, layer) for sample in run["samples"])]


def memory(run: dict[str, Any], gpu: str, most: int) -> str:
    """The stack of one GPU with its legend."""
    about = run["gpus"][gpu]
    total = about["total_bytes"]
    x_axis, y_axis = seconds_axis(run), charts.axis(0.0, total * 1.06, most=5, binary=True)
    samples, layers = thinned(run["samples"], gpu, total, most), present(run, gpu)
    times = [sample["at_s"] for sample in samples] + [x_axis.high]
    areas = []
    for count in range(len(layers), 0, -1):
        heights = [float(sum(_bytes(sample, gpu, layer) for layer in layers[:count])) for sample in samples]
        tenant, kind = layers[count - 1]
        areas.append(charts.steps(times, [*heights, heights[-1]], x_axis, y_axis, _fill(tenant, kind), f"{tenant}: {KINDS[kind]}"))
    shapes = [*charts.grid(None, y_axis), *areas, charts.level(total, y_axis, "limit")]
    top = charts.number(100 * (1 - y_axis.share(total)))
    over = f'<span class="note" style="top:{top}%">device size {mib(total)}</span>'
    label = f"memory of GPU {about['device']} over time in mode {run['mode']}"
    legends = "".join(
        charts.legend([(_fill(name, kind), KINDS[kind]) for name, kind in reversed(layers) if name == tenant], tenant)
        for tenant in ("infer", "train")
    )
    return (
        f'<div class="legends">{legends}</div><div class="chart">{charts.upright(y_axis, mib)}'
        f"{charts.plot(shapes, label, 'tall', over)}</div>"
    )


def timeline(run: dict[str, Any]) -> str:
    """Whose turn it was: a row for each tenant, and one for what lies between."""
    x_axis = seconds_axis(run)
    shapes = charts.grid(x_axis, None)
    height = 1 / len(_LANE_NAMES)
    for phase in run["phases"]:
        if phase["phase"] in _LANES:
            fill, lane = _LANES[phase["phase"]]
            title = f"{WORDS[phase['phase']]}, step {phase['step']}: {phase['end_s'] - phase['begin_s']:.3f} s"
            top, bottom = height * (lane + 0.15), height * (lane + 0.85)
            shapes.append(charts.bar(phase["begin_s"], phase["end_s"], x_axis, top, bottom, f"turn-{fill}", title))
    label = f"whose turn it was over time in mode {run['mode']}"
    keys = [("turn-train", "trainer works"), ("turn-infer", "generator works"), ("turn-switch", "switch"), ("turn-hand", "hand-over of weights")]
    return (
        f'<div class="chart">{charts.lanes(_LANE_NAMES)}{charts.plot(shapes, label, "rows")}'
        f'{charts.across(x_axis, lambda mark: f"{mark:g}", "seconds since the start of the run")}</div>{charts.legend(keys)}'
    )


def _fill(tenant: str, kind: str) -> str:
    return f"{tenant}-{kind}"
