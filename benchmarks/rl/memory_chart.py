"""Memory of one GPU over time, stacked by tenant and kind, and whose turn it was, on one axis of seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from rl import charts
from rl.sampling import KINDS
from rl.space import mib

#: What is stacked, from below: tenant and kind.
LAYERS = [
    ("train", "context"), ("infer", "context"),
    ("train", "nccl"), ("train", "weights"), ("train", "optimizer"), ("train", "caches"), ("train", "graphs"), ("train", "bucket"),
    ("infer", "nccl"), ("infer", "weights"), ("infer", "graphs"), ("infer", "caches"), ("infer", "kv"),
]  # fmt: skip
_LANES = {"train": ("train", 0), "generate": ("infer", 1), "to_generator": ("switch", 2), "to_trainer": ("switch", 2), "handover": ("hand", 2), "rest": ("switch", 2), "end_rest": ("switch", 2)}
#: Drawn thin, in the row of whose they are: they take nobody's time.
_ABSENCES = {"leaves": ("switch", 0), "arrives": ("switch", 0), "generator_leaves": ("switch", 1), "generator_arrives": ("switch", 1)}
_LANE_NAMES = ("train", "infer", "switch")
WORDS = {
    "train": "trainer works", "generate": "generator works", "to_generator": "switch to the generator",
    "to_trainer": "switch to the trainer", "handover": "hand-over of weights", "rest": "deep pause of both", "end_rest": "resumes of both", "start": "start",
    "leaves": "trainer leaves while the generator works", "arrives": "trainer comes back while the generator works",
    "generator_leaves": "generator leaves while the trainer works", "generator_arrives": "generator comes back while the trainer works",
}  # fmt: skip
#: Two samples that differ by less than this share of the GPU look the same.
_ALIKE = 1 / 400


@dataclasses.dataclass(frozen=True)
class Stack:
    """What one GPU held in one run: seconds, and at each the bytes of every layer that is there at some time."""

    layers: list[tuple[str, str]]
    rows: list[tuple[float, list[int]]]

    def thinned(self, most: int) -> list[tuple[float, list[int]]]:
        """At most about `most` rows: of each stretch of time the fullest one."""
        if len(self.rows) <= most:
            return self.rows
        begin_s, end_s = self.rows[0][0], self.rows[-1][0]
        fullest: dict[int, tuple[float, list[int]]] = {}
        for at_s, row in self.rows:
            place = int((most - 1) * (at_s - begin_s) / max(1e-9, end_s - begin_s))
            if place not in fullest or sum(row) > sum(fullest[place][1]):
                fullest[place] = (at_s, row)
        return [fullest[place] for place in sorted(fullest)]


def stack(run: dict[str, Any], gpu: str) -> Stack:
    """Of one GPU; looks in which nothing has changed are left out."""
    whole = [(sample["at_s"], [_bytes(sample, gpu, layer) for layer in LAYERS]) for sample in run["samples"]]
    there = [place for place in range(len(LAYERS)) if any(row[place] for _, row in whole)]
    alike = _ALIKE * run["gpus"][gpu]["total_bytes"]
    rows: list[tuple[float, list[int]]] = []
    for at_s, row in whole:
        shown = [row[place] for place in there]
        if not rows or any(abs(new - old) >= alike for new, old in zip(shown, rows[-1][1])):
            rows.append((at_s, shown))
    return Stack([LAYERS[place] for place in there], rows)


def _bytes(sample: dict[str, Any], gpu: str, layer: tuple[str, str]) -> int:
    tenant, kind = layer
    return int(sample["held"].get(gpu, {}).get(tenant, {}).get(kind, 0))


def seconds_axis(run: dict[str, Any]) -> charts.Axis:
    """From the first sample to the last phase's end."""
    ends = [phase["end_s"] for phase in run["phases"]] + [sample["at_s"] for sample in run["samples"]]
    return charts.axis(0.0, max(ends, default=1.0), most=10)


def memory(run: dict[str, Any], gpu: str, held: Stack, most: int) -> str:
    """The stack of one GPU with its legend."""
    about, layers, rows = run["gpus"][gpu], held.layers, held.thinned(most)
    total = about["total_bytes"]
    x_axis, y_axis = seconds_axis(run), charts.axis(0.0, total * 1.06, most=5, binary=True)
    times = [at_s for at_s, _ in rows] + [x_axis.high]
    areas = []
    for count in range(len(layers), 0, -1):
        heights = [float(sum(row[:count])) for _, row in rows]
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
        f'<div class="legends">{legends}</div><div class="chart">{charts.upright(y_axis, _bytes_text)}'
        f"{charts.plot(shapes, label, 'tall', over)}</div>"
    )


def timeline(run: dict[str, Any]) -> str:
    """Whose turn it was: a row for each tenant, and one for what lies between."""
    x_axis = seconds_axis(run)
    shapes = charts.grid(x_axis, None)
    height = 1 / len(_LANE_NAMES)
    for phase in run["phases"]:
        if phase["phase"] in _LANES or phase["phase"] in _ABSENCES:
            is_absence = phase["phase"] in _ABSENCES
            fill, lane = (_ABSENCES if is_absence else _LANES)[phase["phase"]]
            title = f"{WORDS[phase['phase']]}, step {phase['step']}: {phase['end_s'] - phase['begin_s']:.3f} s"
            margin = 0.4 if is_absence else 0.15
            top, bottom = height * (lane + margin), height * (lane + 1 - margin)
            shapes.append(charts.bar(phase["begin_s"], phase["end_s"], x_axis, top, bottom, f"turn-{fill}", title))
    label = f"whose turn it was over time in mode {run['mode']}"
    keys = [("turn-train", "trainer works"), ("turn-infer", "generator works"), ("turn-switch", "switch"), ("turn-hand", "hand-over of weights")]
    return (
        f'<div class="chart">{charts.lanes(_LANE_NAMES)}{charts.plot(shapes, label, "rows")}'
        f'{charts.across(x_axis, lambda mark: f"{mark:g}", "seconds since the start of the run")}</div>{charts.legend(keys)}'
    )


def _bytes_text(mark: float) -> str:
    return mib(int(mark))


def _fill(tenant: str, kind: str) -> str:
    return f"{tenant}-{kind}"
