"""How long a step takes with other frames."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Optional

from sublet._errors import UsageError
from sublet._library import own_library
from sublet._paging import _CHUNK_BYTES, owner_of

#: Copies that the link's speed is measured with, of a chunk each.
_COPIES = 32


@dataclass(frozen=True)
class Plan:
    """What a step takes with other frames. ``str`` of it is a table.

    Attributes:
        rows: for each size of frames a dict with ``frames_bytes``, ``in_bytes`` (what comes to the GPU in a step, if what is used last
            leaves first), ``link_s`` (how long the link needs for that) and ``step_s`` (the longer of that and of the step that was
            given; None if none was).
        link_bytes_s: the link's speed to the GPU, in bytes a second.
    """

    rows: tuple[dict[str, Any], ...]
    link_bytes_s: float

    def __str__(self) -> str:
        lines = ["frames       comes in a step   on the link   step at least"]
        for row in self.rows:
            step = f"{row['step_s']:.3f} s" if row["step_s"] is not None else "-"
            lines.append(
                f"{row['frames_bytes'] / (1 << 30):6.2f} GiB   {row['in_bytes'] / 1e9:12.1f} GB   {row['link_s']:9.3f} s   {step:>13}"
            )
        return "\n".join(lines)


def plan(target: Any, *, step_s: Optional[float] = None) -> Plan:
    """How much a step would bring to the GPU with other frames, and what the link needs for that.

    By the order of the last step, which must have been like the one before: call it after the third, when the GPU is idle. The link is
    measured, with 2 GiB of copies. Copies to the host go on at the same time as those to the GPU.

    Args:
        target: what :func:`paged` was given. What else is paged uses the link too: add its ``link_s``.
        step_s: how long a step takes if all is on the GPU, in seconds. If a step takes much longer than ``link_s`` of the frames that it has now,
            its own time is that.

    Raises:
        UsageError: ``target`` is not paged, or the order is not known yet.

    >>> print(sublet.plan(model, step_s=0.78))  # doctest: +SKIP
    frames       comes in a step   on the link   step at least
      1.31 GiB           13.9 GB       0.279 s         0.780 s
    """
    owner = owner_of(target, "plan")
    found: list[dict[str, Any]] = json.loads(own_library().page_plan(owner.pager))
    if not found:
        raise UsageError("plan: no step was like the one before yet: call it after the third")
    speed = _link_bytes_s(owner.device)
    rows = []
    for row in found:
        link_s = row["in_bytes"] / speed
        rows.append({**row, "link_s": link_s, "step_s": None if step_s is None else max(step_s, link_s)})
    return Plan(tuple(rows), speed)


def _link_bytes_s(device: Any) -> float:
    """The speed of copies from pinned host memory to the device, in bytes a second."""
    torch: Any = sys.modules["torch"]
    with torch.cuda.device(device):
        there = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device)
        here = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        there.copy_(here, non_blocking=True)
        start.record()
        for _ in range(_COPIES):
            there.copy_(here, non_blocking=True)
        end.record()
        end.synchronize()
        return float(_COPIES * _CHUNK_BYTES / start.elapsed_time(end) * 1e3)
