"""Draws `docs/head-to-head.svg`: seconds of Sublet next to the seconds of what one would use instead.

`python3 head_to_head.py PICTURE.svg`. Each bar is read from a record in `results/`, and the bars of a group are of one
record, but for the last: two runs on one machine, whose step with all on the GPU took the same time. Only the standard library; the same records give the same bytes. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"
WIDTH, MARGIN, BAR = 480, 8, 16
#: Bars begin here; names stand before them.
BARS_AT = 172
#: Room for the seconds behind the longest bar.
SECONDS = 62
STYLE = """
text{font:400 13px -apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-weight:600;font-size:14px}.note{fill:#57606a}.back{fill:#fff}.ours{fill:#0b5bd3}.other{fill:#8c959f}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.back{fill:#0d1117}.ours{fill:#4a90ff}.other{fill:#6e7681}}
"""


class Group(NamedTuple):
    """Bars of one record: names and seconds, ours first."""

    title: str
    bars: list[tuple[str, float]]


def record(name: str) -> dict[str, Any]:
    """The record in `results/NAME.json`."""
    read = json.loads((RESULTS / f"{name}.json").read_text())
    return dict(read[0] if isinstance(read, list) else read)


def seconds(of: dict[str, Any], *series: str) -> float:
    """The sum of the medians of `series`."""
    return float(sum(statistics.median(of["samples"][name]) for name in series))


def step(of: dict[str, Any], mode: str) -> float:
    """The median step, with its switches, in a `mode` of the GRPO example."""
    return float(of["summary"][mode]["step_s"]["all"])


def groups() -> list[Group]:
    """What is drawn, in the order of the picture."""
    nccl = record("race-nccl-2xh200-7dfcc7f")
    deep = record("deep-1xh100-2c91086")
    saver = record("race-saver-1xh200-570df7d")
    grpo, by_hand = record("rl-7b-1xh100-2c91086"), record("rl-7b-cpu-1xh100-2c91086")
    larger, offload = record("larger-1xh100-9165031"), record("larger-1xh100-2c91086")
    return [
        Group(
            "NCCL's buffers, away and back",
            [
                ("Sublet", seconds(nccl, "nccl2_pause_s", "nccl2_resume_s")),
                ("groups rebuilt", seconds(nccl, "nccl2_rebuild_destroy_s", "nccl2_rebuild_rebuild_s")),
            ],
        ),
        Group(
            "16 GiB and its CUDA context, away and back",
            [
                ("Sublet", seconds(deep, "16GiB_deep_out_s", "16GiB_deep_back_s")),
                ("driver's checkpoint", seconds(deep, "16GiB_driver_out_s", "16GiB_driver_back_s")),
            ],
        ),
        Group(
            "60 GB by tag, away and back",
            [
                ("Sublet", seconds(saver, "saver_sublet_pause_s", "saver_sublet_resume_s")),
                ("torch_memory_saver", seconds(saver, "saver_saver_pause_s", "saver_saver_resume_s")),
                ("  retaining backups", seconds(saver, "saver_retained_pause_s", "saver_retained_resume_s")),
            ],
        ),
        Group(
            "One GRPO step, 7B, on one GPU of 80 GB",
            [("Sublet", step(grpo, "sublet")), ("tensors to the CPU", step(by_hand, "cpu"))],
        ),
        Group(
            "Training step, weights and optimizer in host memory",
            [
                ("Sublet", seconds(larger, "wo_third_step_s")),
                ("FSDP2 offload", seconds(offload, "fsdp2_step_s")),
                ("all on the GPU", seconds(larger, "resident_step_s")),
            ],
        ),
    ]


def short(value: float) -> str:
    """Seconds with as many digits as a reader needs."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value:.3f} s"


def picture() -> str:
    """The picture, as the text of an SVG file."""
    parts: list[str] = []
    y = 20

    def text(x: float, words: str, kind: str = "", anchor: str = "start") -> None:
        name = f' class="{kind}"' if kind else ""
        parts.append(f'<text{name} x="{x:.0f}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    text(MARGIN, "Seconds, shorter is better", "title")
    y += 26
    for group in groups():
        text(MARGIN, group.title, "title")
        y += 20
        longest = max(value for _, value in group.bars)
        for number, (name, value) in enumerate(group.bars):
            width = max(value / longest * (WIDTH - BARS_AT - SECONDS), 1.0)
            text(BARS_AT - 8, name.strip(), anchor="end")
            kind = "other" if number else "ours"
            parts.append(f'<rect class="{kind}" x="{BARS_AT}" y="{y - 13}" width="{width:.1f}" height="{BAR}"/>')
            text(BARS_AT + width + 6, short(value))
            y += BAR + 6
        y += 12
    text(MARGIN, "Medians of one run each, on NVIDIA H200 and H100.", "note")
    height = y + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="640" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>Seconds of Sublet next to what one would use instead</title>"
    back = f'<rect class="back" width="{WIDTH}" height="{height}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", back, *parts, "</svg>", ""])


def main() -> int:
    """Draws the file."""
    if "--dry-run" in sys.argv or len(sys.argv) != 2:
        print("dry run of head_to_head: PICTURE.svg")
        return 0
    Path(sys.argv[1]).write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
