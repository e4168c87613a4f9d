"""Charts as HTML and SVG: shapes stretch with the page, text never does.

Every chart is a grid of three: labels of the upright axis, the plot, and below it those of the level axis. Shapes are an
SVG that fills the plot whatever its size; labels are HTML, placed by percent, so that they can be read on a phone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Callable, Optional

#: Units of a plot's SVG, each way.
WIDTH, HEIGHT = 1000.0, 1000.0


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear scale from `low` to `high` with a mark each `step`."""

    low: float
    high: float
    step: float

    def share(self, value: float) -> float:
        """Where `value` lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Multiples of `step` on the axis."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [index * self.step for index in range(first, last + 1)]


def axis(low: float, high: float, most: int = 6, binary: bool = False) -> Axis:
    """A scale with at most `most` marks at round numbers: of 1, 2, 5 times a power of ten, or powers of two."""
    if not high > low:
        high = low + 1.0
    least = (high - low) / most
    if binary:
        step = 2.0 ** math.ceil(math.log2(least))
    else:
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least - 1e-12)
    return Axis(low, high, step)


def outward(scale: Axis) -> Axis:
    """The same, grown to the marks around it."""
    low, high = math.floor(scale.low / scale.step + 1e-9) * scale.step, math.ceil(scale.high / scale.step - 1e-9) * scale.step
    return Axis(low, high, scale.step)


def number(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def x_of(scale: Axis, value: float) -> str:
    """Its coordinate in a plot."""
    return number(WIDTH * scale.share(value))


def y_of(scale: Axis, value: float) -> str:
    """Its coordinate in a plot, which counts from above."""
    return number(HEIGHT * (1 - scale.share(value)))


def steps(xs: Sequence[float], ys: Sequence[float], x_axis: Axis, y_axis: Axis, fill: str, title: str) -> str:
    """The area under values that hold until the next."""
    parts = [f"M{x_of(x_axis, xs[0])} {y_of(y_axis, y_axis.low)}V{y_of(y_axis, ys[0])}"]
    last = y_of(y_axis, ys[0])
    for x, y in zip(xs[1:], ys[1:]):
        placed = y_of(y_axis, y)
        if placed != last:
            parts.append(f"H{x_of(x_axis, x)}V{placed}")
            last = placed
    parts.append(f"H{x_of(x_axis, xs[-1])}V{y_of(y_axis, y_axis.low)}Z")
    return f'<path class="{fill}" d="{"".join(parts)}"><title>{escape(title)}</title></path>'


def line(points: Iterable[tuple[float, float]], x_axis: Axis, y_axis: Axis, kind: str) -> str:
    """A line through points."""
    placed = " ".join(f"{x_of(x_axis, x)},{y_of(y_axis, y)}" for x, y in points)
    return f'<polyline class="{kind}" points="{placed}" />'


def level(value: float, y_axis: Axis, kind: str) -> str:
    """A line at one height."""
    y = y_of(y_axis, value)
    return f'<line class="{kind}" x1="0" x2="{number(WIDTH)}" y1="{y}" y2="{y}" />'


def bar(begin: float, end: float, x_axis: Axis, top: float, bottom: float, fill: str, title: str) -> str:
    """A block from `begin` to `end`; `top` and `bottom` are shares of the plot's height, from above."""
    x, width = WIDTH * x_axis.share(begin), WIDTH * (x_axis.share(end) - x_axis.share(begin))
    y, height = HEIGHT * top, HEIGHT * (bottom - top)
    # What is there is seen, however short it was.
    size = f'width="{number(max(width, 1.0))}" height="{number(height)}"'
    return f'<rect class="{fill}" x="{number(x)}" y="{number(y)}" {size}><title>{escape(title)}</title></rect>'


def plot(shapes: Iterable[str], label: str, kind: str, over: str = "") -> str:
    """The plot itself; `over` is HTML that is placed on it."""
    drawn = "".join(shapes)
    return (
        f'<div class="plot {kind}"><svg role="img" aria-label="{escape(label)}" viewBox="0 0 {number(WIDTH)} '
        f'{number(HEIGHT)}" preserveAspectRatio="none" focusable="false">{drawn}</svg>{over}</div>'
    )


def upright(y_axis: Axis, text: Callable[[float], str]) -> str:
    """Labels next to a plot."""
    labels = "".join(
        f'<span style="top:{number(100 * (1 - y_axis.share(mark)))}%">{escape(text(mark))}</span>' for mark in y_axis.marks()
    )
    return f'<div class="upright" aria-hidden="true">{labels}</div>'


def lanes(names: Sequence[str]) -> str:
    """Labels next to rows of equal height."""
    height = 100 / len(names)
    labels = "".join(
        f'<span style="top:{number(height * (index + 0.5))}%">{escape(name)}</span>' for index, name in enumerate(names)
    )
    return f'<div class="upright" aria-hidden="true">{labels}</div>'


def across(x_axis: Axis, text: Callable[[float], str], caption: str) -> str:
    """Labels below a plot. Every second mark has a class of its own, which a narrow page hides."""
    labels = "".join(
        f'<span class="{"odd" if index % 2 else "even"}" style="left:{number(100 * x_axis.share(mark))}%">{escape(text(mark))}</span>'
        for index, mark in enumerate(x_axis.marks())
    )
    return f'<div class="across"><div class="marks" aria-hidden="true">{labels}</div><div class="caption">{escape(caption)}</div></div>'


def grid(x_axis: Optional[Axis], y_axis: Optional[Axis]) -> list[str]:
    """Thin lines at the marks."""
    drawn = [level(mark, y_axis, "grid") for mark in y_axis.marks()] if y_axis is not None else []
    for mark in x_axis.marks() if x_axis is not None else []:
        x = x_of(x_axis, mark) if x_axis is not None else ""
        drawn.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{number(HEIGHT)}" />')
    return drawn


def legend(entries: Iterable[tuple[str, str]], head: str = "") -> str:
    """What the colours mean: class and words."""
    items = "".join(f'<li><i class="key {fill}"></i>{escape(words)}</li>' for fill, words in entries)
    named = f"<b>{escape(head)}</b>" if head else ""
    return f'<div class="legend">{named}<ul>{items}</ul></div>'
