"""Frames for paged memory: their number, their contents, and the time of a step with other frames."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Optional, Union

from sublet._errors import UsageError
from sublet._library import own_library
from sublet._paging import _CHUNK_BYTES, _bytes_of, _is_module, _live
from sublet._paging_refusals import PAGED_BY
from sublet._paging_regions import windows_of
from sublet._paging_weights import owners
from sublet._regions import Region

#: Copies that the link's speed is measured with, of a chunk each.
_COPIES = 32


@dataclass(frozen=True)
class Plan:
    """Estimated step times for other sizes of frames. ``str`` of it is a table.

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


def set_frames(target: Any, frames: Union[int, str]) -> None:
    """Changes how much device memory the state of a paged optimizer, or the parameters of a paged module, may take.

    With fewer frames, the memory that is needed last leaves after its uses. The call returns when that memory has left. More frames are
    taken as they are needed. Work may be under way on the GPU; results do not change.

    Args:
        target: what :func:`paged` was given, or the tag of a :func:`region` whose home is ``"paged"``.
        frames: as for :func:`paged`.

    Raises:
        UsageError: ``target`` is not paged, or ``frames`` is too small, by the figures in the message.
        RetryError: uses did not end in 10 minutes. It shrinks when they do.

    >>> sublet.set_frames(model, "4GiB")  # doctest: +SKIP
    """
    owner_of(target, "set_frames").set_frames(_bytes_of(frames))


def owner_of(target: Any, call: str) -> Any:
    """Returns the object that makes it paged."""
    if isinstance(target, (str, Region)):
        tag, device = (target, None) if isinstance(target, str) else (target.tag, target.device)
        windows = windows_of(tag, device)
        if len(windows) == 1:
            return windows[0]
        if windows:
            raise UsageError(f"{call}: memory of region '{tag}' is paged on several devices: give sublet.region('{tag}', device=...)")
        raise UsageError(f"{call}: no memory of region '{tag}' is paged: enter sublet.region('{tag}', home='paged')")
    owner = owners.get(target) if _is_module(target) else getattr(target, PAGED_BY, None)
    if owner is None:
        raise UsageError(f"{call}: this {type(target).__name__} is not paged: sublet.paged(it) does that")
    return owner


def report() -> list[dict[str, Any]]:
    """Figures of the paged optimizers, modules and regions of this process, and of ``sublet.saved`` on each device.

    Returns:
        For each a dict with ``device``; of an optimizer ``step`` and ``blocks`` (of parameters), of a module ``module`` (its
        type) and ``parameters`` (how many), of a region ``region`` (its tag); ``paged_bytes`` (all of it),
        ``frames_bytes`` (the most on the device), ``resident_bytes`` (on the device now), ``stays_bytes`` (what
        may not leave), ``chunk_bytes``, ``chunks`` (a letter for each: ``a`` away, ``i`` on its way in, ``h`` on
        the device and the same in host memory, ``w`` on the device and written since it was copied to the host,
        ``o`` on its way out, ``-`` unused); and so far ``out_bytes``, ``in_bytes``, ``exchanges``, ``remaps`` (chunks that were given device
        memory), ``remap_us`` (the time that the driver took to map and unmap them, in microseconds), ``hits`` and
        ``misses`` (uses that found their memory on the device, and that did not), ``calls`` (launches and copies that named memory of
        a module) and ``waited_us`` (the time that they waited, in microseconds). With ``SUBLET_PAGING_CHECK=1``, ``unseen`` is a list of
        writes that no launch has named, each with ``address``, ``size_bytes``, ``span`` and ``span_bytes`` (its allocation), ``chunk``,
        ``after_use`` and ``before_use``.

        Of saved tensors a dict with ``device``, ``saved`` (true), ``tensors`` (that were copied out), ``out_bytes``, ``in_bytes``, ``late`` (those
        that were not ahead of their use), ``waited_us`` (the time that forward waited for copies) and ``host_bytes`` (pinned).

    >>> sublet.report()
    []
    """
    return [owner.report() for owner in list(_live)]


def plan(target: Any, *, step_s: Optional[float] = None) -> Plan:
    """Bytes that a step would copy to the GPU with other frames, and the time of the link for them.

    The order of the last step counts, which must equal that of the step before: call it after the third step, when the GPU is idle. The
    link is measured, with 2 GiB of copies. Copies to the host go on at the same time as those to the GPU.

    Args:
        target: what :func:`paged` was given, or the tag of a paged :func:`region`. Other paged memory uses the link: add its ``link_s``.
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
