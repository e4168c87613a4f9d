"""Draws the record of a race as one picture: bars next to the limit of the same run, and what each GPU did when.

`python3 race_picture.py RECORD.json PICTURE.svg`. Only the standard library; the same record gives the same bytes. It
draws what the record has (`figures` and `timelines`, which race_figures.py writes) and leaves out what it has not. Colours
follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 900
#: Where bars begin and end; names stand before them and figures behind.
BARS_AT, BARS_TO = 292, 760
MARGIN = 24
BAR, BAR_GAP, ROW_GAP = 10, 2, 10
#: Mean width of a character of 12 px, to see what fits.
CHARACTER = 6.3
LIGHT = {
    "back": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#d8dee4",
    "sublet-out": "#0b5bd3", "sublet-in": "#7db2f8", "other-out": "#6e7781", "other-in": "#b8c0c8",
    "contents": "#0b5bd3", "memory": "#b35900", "sharing": "#1a7f37", "agreeing": "#8c959f",
}  # fmt: skip
DARK = {
    "back": "#0d1117", "text": "#e6edf3", "muted": "#9198a1", "grid": "#30363d",
    "sublet-out": "#4a90ff", "sublet-in": "#a9cdff", "other-out": "#8b949e", "other-in": "#565e67",
    "contents": "#4a90ff", "memory": "#e0823d", "sharing": "#3fb950", "agreeing": "#6e7681",
}  # fmt: skip
LIMIT = ("#cf222e", "#ff7b72")
#: What each phase spends its time on.
KINDS = {
    "prepare, saving": "contents",
    "restore": "contents",
    "release_stage": "contents",
    "release, saving": "contents",
    "restore_stage": "contents",
    "release": "memory",
    "create_own": "memory",
    "import": "sharing",
    "import_from_living": "sharing",
}
KIND_NAMES = {
    "contents": "copying contents, unmapping and mapping",
    "memory": "releasing, creating",
    "sharing": "importing from peers",
    "agreeing": "agreeing, waiting for the GPU",
}


def snake(phase: str) -> str:
    """The name of a phase as today's reports have it; older records say `ReleaseStage`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", phase).lower()


def style() -> str:
    """The classes of everything, in both modes."""

    def rules(colours: dict[str, str], limit: str) -> str:
        fills = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items() if name != "grid")
        return f"{fills}.grid{{stroke:{colours['grid']}}}.limit{{stroke:{limit}}}.limit-text{{fill:{limit}}}"

    fonts = "text{font-family:-apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;font-size:12px}"
    fonts += ".title{font-size:15px;font-weight:600}.small{font-size:11px}"
    lines = ".limit{stroke-width:2;stroke-dasharray:4 2}.grid{stroke-width:1}"
    return f"{fonts}{lines}{rules(LIGHT, LIMIT[0])}@media (prefers-color-scheme:dark){{{rules(DARK, LIMIT[1])}}}"


def short(value: float) -> str:
    """A figure with as many digits as a reader needs."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 20 else f"{value:.2g}"


def ticks(largest: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to at least `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= rough * 0.999)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def cut(text: str, width: float, character: float = CHARACTER) -> str:
    """`text`, or as much of it as `width` has room for."""
    room = max(1, int(width / character))
    return text if len(text) <= room else text[: room - 1].rstrip() + "…"


class Canvas:
    """What was drawn so far, and how far down the page it has come."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = float(MARGIN)

    def text(self, x: float, y: float, text: str, kind: str = "text", anchor: str = "start") -> None:
        """One line of text on the base line `y`."""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A filled rectangle, with a text for the mouse."""
        inside = f"<title>{escape(title)}</title>" if title else ""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect class="{kind}" {size}>{inside}</rect>' if inside else f'<rect class="{kind}" {size}/>')

    def line(self, x: float, top: float, bottom: float, kind: str) -> None:
        """A vertical line."""
        self.parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')

    def notch(self, y: float, height: float) -> None:
        """The mark of a bar that goes on beyond the axis."""
        x = BARS_TO - 14
        points = f"{x},{y + height + 1} {x + 5},{y - 1} {x + 9},{y - 1} {x + 4},{y + height + 1}"
        self.parts.append(f'<polygon class="back" points="{points}"/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Squares with names, in one line."""
        for kind, name in entries:
            if kind == "limit":
                self.line(x + 5, y - 10, y + 2, "limit")
            else:
                self.box(x, y - 9, 10, 10, kind)
            self.text(x + 15, y, name, "muted small")
            x += 15 + len(name) * CHARACTER + 18


class Axis:
    """From figures to places."""

    def __init__(self, largest: float) -> None:
        self.ticks = ticks(largest)
        self.largest = self.ticks[-1]

    def x(self, value: float) -> float:
        """The place of a value; the end of the axis for larger ones."""
        return BARS_AT + min(value / self.largest, 1.0) * (BARS_TO - BARS_AT)

    def draw(self, canvas: Canvas, top: float, bottom: float, unit: str) -> None:
        """Lines and figures."""
        for tick in self.ticks:
            canvas.line(self.x(tick), top, bottom, "grid")
            label = f"{tick:,.10g}" + (f" {unit}" if tick == self.ticks[-1] else "")
            canvas.text(self.x(tick), bottom + 14, label, "muted small", "middle")


def medians(figure: dict[str, Any]) -> dict[str, float]:
    """Of each way that the figure has."""
    return {way: figure[way]["median"] for way in ("out", "in") if (figure.get(way) or {}).get("median") is not None}


def heading(canvas: Canvas, title: str, note: str) -> None:
    """A panel's title and what it shows."""
    canvas.text(MARGIN, canvas.y, title, "text title")
    canvas.text(MARGIN, canvas.y + 17, note, "muted small")
    canvas.y += 36


def name_of(canvas: Canvas, figure: dict[str, Any], middle: float) -> None:
    """Whose figure it is, and of what."""
    label = f"{figure['who']}: {figure['label']}"
    canvas.text(BARS_AT - 10, middle + 4, cut(label, BARS_AT - 10 - MARGIN / 2), "text", "end")


def rates(canvas: Canvas, figures: Sequence[dict[str, Any]]) -> None:
    """Bars in GB/s, out above in, each with its limit."""
    heading(
        canvas,
        "Contents to host memory and back: GB/s of what is given back, on each GPU; longer is better",
        "Bars with a notch go on beyond the axis. The line is a plain pinned copy of the same run, that way and on as many GPUs.",
    )
    entries = [("sublet-out", "Sublet, out"), ("sublet-in", "in"), ("other-out", "others, out"), ("other-in", "in")]
    canvas.legend(MARGIN, canvas.y, [*entries, ("limit", "limit")])
    canvas.y += 14
    limits = [limit for figure in figures for limit in (figure.get("limit") or {}).values() if limit]
    largest = 1.25 * max(limits) if limits else max(max(medians(figure).values()) for figure in figures)
    axis = Axis(largest)
    top = canvas.y
    heights = [len(medians(figure)) * (BAR + BAR_GAP) + ROW_GAP for figure in figures]
    axis.draw(canvas, top, top + sum(heights), "GB/s")
    for figure, height in zip(figures, heights, strict=True):
        ours = "sublet" if figure["who"] == "Sublet" else "other"
        values = medians(figure)
        y = canvas.y + ROW_GAP / 2
        name_of(canvas, figure, canvas.y + height / 2)
        for way, value in values.items():
            summary = figure[way]
            title = f"{figure['who']}, {figure['label']}, {way}: median {value:.1f}, p99 {summary['p99']:.1f} GB/s"
            canvas.box(BARS_AT, y, axis.x(value) - BARS_AT, BAR, f"{ours}-{way}", title)
            if value > axis.largest:
                canvas.notch(y, BAR)
            limit = (figure.get("limit") or {}).get(way)
            if limit:
                canvas.line(axis.x(limit), y - 2, y + BAR + 2, "limit")
            canvas.text(BARS_TO + 10, y + BAR - 1, f"{'each way' if figure.get('each_way') else way} {short(value)}", "text small")
            y += BAR + BAR_GAP
        canvas.y += height
    canvas.y += 44


def times(canvas: Canvas, figures: Sequence[dict[str, Any]]) -> None:
    """Bars in ms, the way out and the way back one behind the other."""
    heading(
        canvas,
        "Memory of NCCL communicators given back and brought back: milliseconds; shorter is better",
        "The line is what copying all of that memory out and in takes at the speed of a plain pinned copy of the same run.",
    )
    entries = [("sublet-out", "Sublet, pause"), ("sublet-in", "resume"), ("other-out", "others, out"), ("other-in", "back")]
    canvas.legend(MARGIN, canvas.y, [*entries, ("limit", "limit")])
    canvas.y += 14
    for size in dict.fromkeys(figure["bytes"] for figure in figures):
        stacked(canvas, [figure for figure in figures if figure["bytes"] == size])
    canvas.y += 14


def stacked(canvas: Canvas, figures: Sequence[dict[str, Any]]) -> None:
    """Those of one size, on an axis of their own."""
    axis = Axis(max(sum(medians(figure).values()) for figure in figures))
    height = BAR + 6 + ROW_GAP
    axis.draw(canvas, canvas.y, canvas.y + height * len(figures), "ms")
    for figure in figures:
        ours = "sublet" if figure["who"] == "Sublet" else "other"
        name_of(canvas, figure, canvas.y + height / 2)
        x, y, total = float(BARS_AT), canvas.y + ROW_GAP / 2, 0.0
        values = medians(figure)
        for way, value in values.items():
            total += value
            end = axis.x(total)
            canvas.box(x, y, end - x, BAR + 6, f"{ours}-{way}", f"{figure['label']}, {way}: median {value:.0f} ms")
            x = end
        limit = sum(each for each in (figure.get("limit") or {}).values() if each)
        if limit:
            canvas.line(axis.x(limit), y - 2, y + BAR + 8, "limit")
        canvas.text(BARS_TO + 10, y + BAR + 2, " + ".join(short(value) for value in values.values()), "text small")
        canvas.y += height
    canvas.y += 30


def timeline(canvas: Canvas, line: dict[str, Any]) -> None:
    """What every GPU did when."""
    heading(canvas, line["title"], line["note"])
    spans = line["spans"]
    canvas.legend(MARGIN, canvas.y, [(kind, name) for kind, name in KIND_NAMES.items()])
    canvas.y += 14
    rows = list(dict.fromkeys(span["row"] for span in spans))
    axis = Axis(max(span["begin_ms"] + span["ms"] for span in spans))
    height = BAR + 6 + ROW_GAP
    axis.draw(canvas, canvas.y, canvas.y + height * len(rows), "ms")
    for row in rows:
        canvas.text(BARS_AT - 10, canvas.y + height / 2 + 4, cut(row, BARS_AT - 10 - MARGIN / 2), "text", "end")
        for span in (span for span in spans if span["row"] == row):
            begin, end = axis.x(span["begin_ms"]), axis.x(span["begin_ms"] + span["ms"])
            kind = KINDS.get(snake(span["phase"]), "agreeing")
            title = f"{row}, {span['phase']}: {span['ms']:.1f} ms from {span['begin_ms']:.1f} ms"
            canvas.box(begin, canvas.y + ROW_GAP / 2, end - begin - 0.5, BAR + 6, kind, title)
        total = max(span["begin_ms"] + span["ms"] for span in spans if span["row"] == row)
        canvas.text(BARS_TO + 10, canvas.y + height / 2 + 4, f"{short(total)} ms", "text small")
        canvas.y += height
    canvas.y += 44


def foot(record: dict[str, Any]) -> str:
    """Where and when."""
    gpu = record.get("gpu") or {}
    name, count = (gpu.get("name"), gpu.get("count")) if isinstance(gpu, dict) else (gpu, None)
    versions = record.get("versions") or {}
    parts = [f"{count} x {name}" if count else str(name), f"driver {record.get('driver')}"]
    parts += [f"{library} {versions[key]}" for key, library in (("torch", "PyTorch"), ("nccl", "NCCL")) if versions.get(key)]
    parts += [f"commit {record.get('commit')}", str(record.get("date"))[:10]]
    missed = [entry["what"] for entry in record.get("checks") or [] if not entry["passed"]]
    if missed or record.get("status") in ("error", "deadline"):
        parts.append(f"this run missed {len(missed)} checks" if missed else "this run did not end")
    return " · ".join(parts)


def picture(record: dict[str, Any]) -> str:
    """The picture, as the text of an SVG file."""
    canvas = Canvas()
    canvas.y += 12
    figures = [figure for figure in record.get("figures") or [] if medians(figure)]
    for panel, draw in (("rates", rates), ("times", times)):
        chosen = [figure for figure in figures if figure["panel"] == panel]
        if chosen:
            draw(canvas, chosen)
    for line in record.get("timelines") or []:
        if line["spans"]:
            timeline(canvas, line)
    canvas.text(MARGIN, canvas.y, cut(foot(record), WIDTH - 2 * MARGIN, 5.8), "muted small")
    height = canvas.y + MARGIN / 2
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>Sublet, its limits and others, in one run</title>"
    back = f'<rect class="back" width="{WIDTH}" height="{height:.0f}"/>'
    return "\n".join([head, title, f"<style>{style()}</style>", back, *canvas.parts, "</svg>", ""])


def record_of(path: Path) -> dict[str, Any]:
    """The race in a file of records; ValueError when there is none."""
    read = json.loads(path.read_text())
    for record in read if isinstance(read, list) else [read]:
        if record.get("figures"):
            return dict(record)
    raise ValueError(f"{path.name} holds no record with figures to draw")


def main() -> int:
    """Draws one file."""
    if "--dry-run" in sys.argv or len(sys.argv) != 3:
        print("dry run of race_picture: RECORD.json PICTURE.svg")
        return 0
    try:
        text = picture(record_of(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        print(f"race_picture: {error}", file=sys.stderr)
        return 1
    Path(sys.argv[2]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
