"""Records one step of a training whose optimizer is paged, and draws it: which chunk is where, both links, compute.

`python3 larger_picture.py RECORD.json PICTURE.svg` draws `docs/larger-than-memory.svg` from a record of `larger_job.py`. Drawing takes
only the standard library; the same record gives the same bytes. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

#: How often the recorder looks, in seconds, as far as the interpreter lets it.
LOOK_S = 0.001
#: What the letters of `sublet.report()` are called, in the order of the legend.
NAMES = {
    "i": "on its way in",
    "w": "on the GPU, written",
    "o": "on its way out",
    "h": "on the GPU, the same in host memory",
}
WIDTH, LEFT, RIGHT, MARGIN = 900, 96, 12, 12
#: Height of the lanes of compute and of each direction of the link; of all chunks at most.
LANE, LINK, CHUNKS = 20, 46, 420
#: Width of a bar of the link, in pixels.
BAR = 6
STYLE = """
text{font:400 12px -apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-weight:600;font-size:14px}.note{fill:#57606a}.back{fill:#fff}.lane{fill:#f0f2f4}.on{fill:#fff}
.i{fill:#2da44e}.w{fill:#0b5bd3}.o{fill:#bf5700}.h{fill:#9ec5fe}.p0{fill:#57606a}.p1{fill:#24292f}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.back{fill:#0d1117}.lane{fill:#1a2029}.on{fill:#0d1117}
.i{fill:#3fb950}.w{fill:#4a90ff}.o{fill:#f0883e}.h{fill:#1f3f73}.p0{fill:#7d8590}.p1{fill:#c9d1d9}}
"""


class Recorder(threading.Thread):
    """Looks at the paged optimizer of this process until the step has ended. Made while the GPU is idle."""

    def __init__(self) -> None:
        import torch

        super().__init__(name="recorder", daemon=True)
        self._event = lambda: torch.cuda.Event(enable_timing=True)
        self._marks: list[tuple[str, Any]] = [("", self._event())]
        self._looks: list[tuple[float, dict[str, Any]]] = []
        self._is_over = threading.Event()
        self._began = time.perf_counter()
        self._marks[0][1].record()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        import sublet

        self._looks.append((1000 * (time.perf_counter() - self._began), sublet.report()[0]))

    def mark(self, name: str) -> None:
        """What the GPU was given since the last mark is called `name`."""
        self._marks.append((name, self._event()))
        self._marks[-1][1].record()

    def ended(self) -> dict[str, Any]:
        """The record. The GPU is idle."""
        took = 1000 * (time.perf_counter() - self._began)
        self._is_over.set()
        self.join()
        self._look()
        first = self._marks[0][1]
        phases = [
            [name, round(first.elapsed_time(start), 2), round(first.elapsed_time(end), 2)]
            for (_, start), (name, end) in zip(self._marks, self._marks[1:])
        ]
        changes, before = [], ""
        for at, look in self._looks:
            for chunk, letter in enumerate(look["chunks"]):
                if before[chunk : chunk + 1] != letter:
                    changes.append([round(at, 2), chunk, letter])
            before = look["chunks"]
        copied = [[round(at, 2), look["in_bytes"], look["out_bytes"]] for at, look in self._looks]
        return {
            "ms": round(took, 2),
            "chunk_bytes": self._looks[0][1]["chunk_bytes"],
            "frames_bytes": self._looks[0][1]["frames_bytes"],
            "phases": phases,
            "changes": changes,
            "copied": copied,
        }


def intervals(timeline: dict[str, Any]) -> dict[int, list[tuple[float, float, str]]]:
    """Of each chunk, from when to when it was where."""
    found: dict[int, list[tuple[float, float, str]]] = {}
    state: dict[int, tuple[float, str]] = {}
    for at, chunk, letter in timeline["changes"]:
        if chunk in state:
            since, before = state[chunk]
            found.setdefault(chunk, []).append((since, at, before))
        state[chunk] = (at if chunk in state else 0.0, letter)
    for chunk, (since, letter) in state.items():
        found.setdefault(chunk, []).append((since, timeline["ms"], letter))
    return found


def rates(timeline: dict[str, Any], column: int, bins: int) -> list[float]:
    """GB/s of copies begun in each of so many parts of the step."""
    width = timeline["ms"] / bins
    total = [0.0] * bins
    looks = timeline["copied"]
    for before, now in zip(looks, looks[1:]):
        part = min(bins - 1, int(now[0] / width))
        total[part] += (now[column] - before[column]) / (width / 1000) / 1e9
    return total


class Drawing:
    """What was drawn so far."""

    def __init__(self, ms: float) -> None:
        self.parts: list[str] = []
        self._scale = (WIDTH - LEFT - RIGHT) / ms

    def x(self, at: float) -> float:
        return LEFT + at * self._scale

    def box(self, start: float, end: float, top: float, height: float, kind: str) -> None:
        """From one instant to another, in ms."""
        x, width = self.x(start), (end - start) * self._scale
        size = f'x="{x:.1f}" y="{top:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect class="{kind}" {size}/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """One line on the base line `y`."""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')


def picture(timeline: dict[str, Any]) -> str:
    """The picture of one step."""
    ms, chunk_bytes = timeline["ms"], timeline["chunk_bytes"]
    chunks = 1 + max((chunk for _, chunk, _ in timeline["changes"]), default=0)
    draw, y = Drawing(ms), 34.0
    state, frames = chunks * chunk_bytes / 1e9, timeline["frames_bytes"] / 1e9
    draw.text(LEFT, 20, f"One step of {ms:.0f} ms: {state:.1f} GB of optimizer state through {frames:.1f} GB of the GPU", "title")
    draw.text(LEFT - 8, y + 14, "compute", "note", "end")
    draw.box(0, ms, y, LANE, "lane")
    for number, (name, start, end) in enumerate(timeline["phases"]):
        draw.box(start, end, y, LANE, f"p{number % 2}")
        draw.text(draw.x(start) + 6, y + 14, name, "on")
    y += LANE + 8
    bins = int((WIDTH - LEFT - RIGHT) / BAR)
    both = [("to the GPU", "i", rates(timeline, 1, bins)), ("to the host", "o", rates(timeline, 2, bins))]
    most = max([1.0, *both[0][2], *both[1][2]])
    for name, kind, each in both:
        draw.text(LEFT - 8, y + 14, name, "note", "end")
        draw.text(LEFT - 8, y + 29, f"of {most:.0f} GB/s", "note", "end")
        draw.box(0, ms, y, LINK, "lane")
        for part, rate in enumerate(each):
            if rate > 0:
                height = LINK * rate / most
                draw.box(part * ms / bins, (part + 1) * ms / bins, y + LINK - height, height, kind)
        y += LINK + 6
    row = min(6.0, CHUNKS / chunks)
    draw.text(LEFT - 8, y + 14, f"{chunks} chunks", "note", "end")
    draw.text(LEFT - 8, y + 29, f"of {chunk_bytes >> 20} MiB", "note", "end")
    draw.box(0, ms, y, row * chunks, "lane")
    for chunk, spent in sorted(intervals(timeline).items()):
        for start, end, letter in spent:
            if letter in NAMES:
                draw.box(start, end, y + row * chunk, row, letter)
    y += row * chunks + 16
    tick = next(step for step in (20, 50, 100, 200, 500, 1000, 2000, 5000) if ms / step <= 12)
    for at in range(0, int(ms) + 1, tick):
        draw.text(draw.x(at), y, f"{at} ms" if at else "0", "note", "middle")
    y += 20
    x = float(LEFT)
    for letter, name in [*NAMES.items(), ("lane", "in host memory")]:
        draw.parts.append(f'<rect class="{letter}" x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10"/>')
        draw.text(x + 15, y, name, "note")
        x += 15 + 6.4 * len(name) + 20
    height = y + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    title = "<title>Where the chunks of an optimizer's state are during one step, what both directions of the link copy, and compute</title>"
    back = f'<rect class="back" width="{WIDTH}" height="{height:.0f}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", back, *draw.parts, "</svg>", ""])


def main(argv: list[str]) -> int:
    """Reads the record, writes the picture."""
    record, target = argv
    read = json.loads(Path(record).read_text())
    facts = (read[0] if isinstance(read, list) else read)["facts"]
    Path(target).write_text(picture(facts["backward"]["timeline"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
