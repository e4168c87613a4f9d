"""One self-contained HTML page of a record: no network, no scripts, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Callable, Optional

from rl import charts, memory_chart
from rl.metrics import LOST
from rl.space import mib

BYTES_MAX = 300 * 1024
#: Samples drawn of a GPU and run; fewer where the page would be too large.
_SAMPLES = (300, 150, 80, 40)
_ORDER = ("train", "generate", *LOST)
_FILLS = {"train": "turn-train", "generate": "turn-infer", "to_generator": "turn-switch", "to_trainer": "turn-switch", "handover": "turn-hand"}
#: Of one run, by GPU.
_Stacks = dict[str, memory_chart.Stack]
_MODES = {
    "sublet": "both tenants are paused and resumed from outside by Sublet",
    "cpu": "tensors are moved to the CPU and back by hand, and caches emptied",
    "keep-both": "both stay on the GPU",
    "restart": "the trainer stays; a generator is started for each of its turns",
    "destroy-groups": "by hand, and process groups are destroyed and rebuilt",
}


def html(record: dict[str, Any]) -> str:
    """The page, under `BYTES_MAX`."""
    stacks = [{gpu: memory_chart.stack(run, gpu) for gpu in run["gpus"]} for run in record["runs"]]
    for most in _SAMPLES:
        made = _page(record, stacks, most)
        if len(made.encode()) < BYTES_MAX:
            return made
    return _page(record, stacks, _SAMPLES[-1], first_only=True)


def _page(record: dict[str, Any], stacks: list[_Stacks], most: int, first_only: bool = False) -> str:
    runs = record["runs"]
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    sections = [_head(record), _verdict(record), _tiles(record), _time(record), _memory(runs, stacks, most, first_only), _curves(record)]
    body = "\n".join([*sections, _table(runs), _about(record)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" />'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />'
        f"<title>GRPO by turns</title><style>{style}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _head(record: dict[str, Any]) -> str:
    options = record["options"]
    gpus = f"{options['gpus']} GPU{'s' if options['gpus'] > 1 else ''}"
    what = "simulated GPUs, memory stands for weights" if options["simulate"] else f"a model of shape {options['shape']}"
    way = "CUDA IPC" if options["handover"] == "ipc" else "the bytes that the paused trainer has saved"
    note = (
        '<p class="simulated">Simulated: every switch, hand-over and byte is real, the GPU is not. Times show the order of things and '
        "the machine it ran on, not a device.</p>"
        if options["simulate"]
        else ""
    )
    return (
        f"<header><h1>Trainer and generator by turns on the same {'GPUs' if options['gpus'] > 1 else 'GPU'}</h1>"
        f'<p class="lead">GRPO, {options["steps"]} steps on {gpus}, {what}. Each step the generator gets the new weights by {way}, '
        f"writes {options['generations']} completions of {options['tokens']} tokens a GPU, and gives the GPU back.</p>{note}</header>"
    )


def _failure(run: dict[str, Any]) -> str:
    mode = f"Mode <b>{escape(run['mode'])}</b>"
    if run.get("shortage"):
        return f'<p class="bad">{mode} does not fit on this GPU: {escape(run["shortage"])}</p>'
    return f'<p class="bad">{mode} did not come to its end: {escape(run["failure"])}</p>'


def _verdict(record: dict[str, Any]) -> str:
    failures = "".join(_failure(run) for run in record["runs"] if run["failure"] is not None)
    if record["identical"] is None:
        return failures
    if record["identical"]:
        reach = ", as far as each of them came" if failures else ""
        words = f"Rewards, losses and weights are identical, bit for bit, in {record['compared']} modes{reach}."
        return f'<p class="good" id="verdict">{words}</p>{failures}'
    return f'<p class="bad" id="verdict">NOT identical: {escape(record["difference"])}</p>{failures}'


def _tiles(record: dict[str, Any]) -> str:
    run = record["runs"][0]
    found, left = run["metrics"], run["metrics"]["left_bytes"]
    bytes_tiles = [
        (_bytes(left["train"]), "of the trainer left on the GPU while it is away"),
        (_bytes(found["handover_peak_bytes"]), "on the GPU at the hand-over"),
    ]
    if record["options"]["simulate"]:
        # Times of a simulated device say little.
        tiles = [
            *bytes_tiles,
            (_bytes(found["kv_bytes_free"]), "of room for a KV cache while the generator works"),
            (_bytes(_fullest(run)), "is what the GPU has"),
        ]
    else:
        tiles = [
            (_share(found["lost_share"]), "of a step lost to switching and hand-over"),
            (_time_text(found["switch_s"]["median"]), "a switch, median"),
            *bytes_tiles,
        ]
    items = "".join(f"<li><b>{value}</b><span>{escape(words)}</span></li>" for value, words in tiles)
    return f'<section><h2>Mode {escape(run["mode"])} at a glance</h2><ul class="tiles">{items}</ul></section>'


def _fullest(run: dict[str, Any]) -> Optional[int]:
    return max((gpu["total_bytes"] for gpu in run["gpus"].values()), default=None)


def _time(record: dict[str, Any]) -> str:
    runs = record["runs"]
    longest = max((_step_s(run) for run in runs), default=1.0)
    x_axis = charts.axis(0.0, longest * 1.02, most=8)
    rows = []
    for run in runs:
        at, shapes = 0.0, charts.grid(x_axis, None)
        for phase in _ORDER:
            length = run["metrics"]["step_s"][phase] or 0.0
            if length:
                title = f"{run['mode']}, {memory_chart.WORDS[phase]}: {length:.3f} s"
                shapes.append(charts.bar(at, at + length, x_axis, 0.14, 0.86, _FILLS[phase], title))
            at += length
        lost = f"{_share(run['metrics']['lost_share'])} lost"
        rows.append(
            f'<div class="mode"><b>{escape(run["mode"])}</b><span>{lost}</span></div>'
            + charts.plot(shapes, f"a step of mode {run['mode']}: {_step_s(run):.2f} s, {lost}", "bar")
        )
    keys = [("turn-train", "trainer works"), ("turn-infer", "generator works"), ("turn-switch", "switch"), ("turn-hand", "hand-over of weights")]
    note = (
        '<p class="fine">Of a simulated GPU: copies cost its processor’s time, and a switch by Sublet more than on a device, where it '
        "is a copy at the link’s rate.</p>"
        if record["options"]["simulate"]
        else ""
    )
    foot = f"<div></div>{charts.across(x_axis, lambda mark: f'{mark:g}', 'seconds, medians of all steps but the first')}"
    return (
        '<section id="time"><h2>Where a step’s time goes</h2>'
        f'{charts.legend(keys)}<div class="bars">{"".join(rows)}{foot}</div>{note}</section>'
    )


def _step_s(run: dict[str, Any]) -> float:
    return sum(run["metrics"]["step_s"][phase] or 0.0 for phase in _ORDER)


def _memory(runs: Sequence[dict[str, Any]], stacks: list[_Stacks], most: int, first_only: bool) -> str:
    parts = []
    for index, run in enumerate(runs):
        gpus = sorted(run["gpus"], key=lambda gpu: run["gpus"][gpu]["device"])
        shown = gpus[:1] if first_only else gpus
        charted = "".join(
            f'<figure><figcaption>GPU {run["gpus"][gpu]["device"]} <span>{escape(run["gpus"][gpu]["name"])}</span></figcaption>'
            f"{memory_chart.memory(run, gpu, stacks[index][gpu], most)}{memory_chart.timeline(run)}</figure>"
            for gpu in shown
            if run["samples"]
        )
        words = f"<b>{escape(run['mode'])}</b>: {_MODES[run['mode']]}"
        opened = ' open="open"' if index == 0 else ""
        parts.append(f'<details class="run" id="memory-{escape(run["mode"])}"{opened}><summary>{words}</summary>{charted}</details>')
    return f'<section id="memory"><h2>Who holds the memory, and whose turn it is</h2>{"".join(parts)}</section>'


def _curves(record: dict[str, Any]) -> str:
    runs = [run for run in record["runs"] if run["failure"] is None] or record["runs"]
    shown = runs[:1] if record["identical"] in (True, None) else runs
    same = f"in all {record['compared']} modes alike" if record["identical"] else ""
    charted = "".join(_curve(shown, name, words, same) for name, words in (("reward", "Reward"), ("loss", "Loss")))
    return f'<section id="curves"><h2>What is learned</h2><div class="pair">{charted}</div></section>'


def _curve(runs: Sequence[dict[str, Any]], name: str, words: str, same: str) -> str:
    lines = [[(step["step"] + 1.0, float(step[name])) for step in run["steps"] if step[name] is not None] for run in runs]
    values = [value for points in lines for _, value in points]
    if not values:
        return ""
    low, high = min([0.0, *values]), max(values)
    if high == low:
        low, high = low - 1.0, high + 1.0
    y_axis = charts.outward(charts.axis(low, high, most=5))
    count = max(len(points) for points in lines)
    x_axis = charts.Axis(1.0, max(2.0, float(count)), max(1.0, float(round(count / 8))))
    shapes = charts.grid(None, y_axis)
    shapes += [charts.line(points, x_axis, y_axis, f"curve curve-{index}") for index, points in enumerate(lines)]
    keys = [(f"curve-key-{index}", run["mode"]) for index, run in enumerate(runs)] if len(runs) > 1 else []
    legend = charts.legend(keys) if keys else ""
    return (
        f'<figure><figcaption>{words} <span>{same}</span></figcaption>{legend}<div class="chart">'
        f"{charts.upright(y_axis, lambda mark: f'{mark:g}')}{charts.plot(shapes, f'{words} by step', 'short')}"
        f"{charts.across(x_axis, lambda mark: f'{mark:g}', 'step')}</div></figure>"
    )


def _share(value: Optional[float]) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _bytes(value: Optional[int]) -> str:
    return "–" if value is None else mib(value)


def _time_text(value: Optional[float]) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms" if value >= 0.001 else "0 ms"


def _count(value: Optional[float]) -> str:
    return "–" if value is None else f"{value:,.0f}"


#: What the table says of each run, how it is shown, and where it lies in the metrics.
ROWS: list[tuple[str, Callable[[Any], str], tuple[str, ...]]] = [
    ("Lost to switching and hand-over", _share, ("lost_share",)),
    ("Step, median", _time_text, ("step_s", "all")),
    ("Switch, median", _time_text, ("switch_s", "median")),
    ("Switch, 99th percentile", _time_text, ("switch_s", "p99")),
    ("Switch, the first", _time_text, ("switch_s", "first")),
    ("Trainer leaves during the generator's work, median", _time_text, ("leaves_s",)),
    ("Trainer comes back during the generator's work, median", _time_text, ("arrives_s",)),
    ("Generator leaves during the trainer's work, median", _time_text, ("generator_leaves_s",)),
    ("Generator comes back during the trainer's work, median", _time_text, ("generator_arrives_s",)),
    ("Hand-over, median", _time_text, ("step_s", "handover")),
    ("Trainer left on the GPU while away", _bytes, ("left_bytes", "train")),
    ("Generator left on the GPU while away", _bytes, ("left_bytes", "infer")),
    ("Both on the GPU at the hand-over", _bytes, ("handover_peak_bytes",)),
    ("Most on the GPU at any time", _bytes, ("peak_bytes",)),
    ("Room for a KV cache", _bytes, ("kv_bytes_free",)),
    ("Room for a KV cache, in tokens", _count, ("kv_tokens_free",)),
    ("Tokens a second", _count, ("tokens_per_s",)),
    ("Host memory with contents that are away", _bytes, ("host_bytes",)),
]


def cell(run: dict[str, Any], show: Callable[[Any], str], path: Sequence[str]) -> str:
    """One figure of a run, as it is shown."""
    value: Any = run["metrics"]
    for name in path:
        value = value[name]
    return show(value)


def _table(runs: Sequence[dict[str, Any]]) -> str:
    heads = "".join(f'<th scope="col">{escape(run["mode"])}</th>' for run in runs)
    rows = "".join(
        f'<tr><th scope="row">{escape(words)}</th>' + "".join(f"<td>{cell(run, show, path)}</td>" for run in runs) + "</tr>"
        for words, show, path in ROWS
    )
    return (
        '<section id="metrics"><h2>Figures</h2><div class="scroll"><table><thead><tr><th></th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="fine">Sums and medians are of all steps but the first. Bytes are of the fullest GPU, as sampled. Room for a KV cache is what '
        "the generator’s cache holds and what else is free while it works.</p></section>"
    )


def _about(record: dict[str, Any]) -> str:
    modes = "".join(f"<dt>{escape(run['mode'])}</dt><dd>{_MODES[run['mode']]}</dd>" for run in record["runs"])
    versions = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in record["versions"].items())
    options = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(', '.join(value) if isinstance(value, list) else str(value))}</dd>"
        for name, value in record["options"].items()
    )
    return (
        '<section id="about"><h2>About this run</h2><div class="three">'
        f"<div><h3>Modes</h3><dl>{modes}</dl></div><div><h3>Versions</h3><dl>{versions}</dl></div>"
        f"<div><h3>Options</h3><dl>{options}</dl></div></div></section>"
    )
