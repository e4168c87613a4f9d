"""Regions whose memory lives in host memory and comes to the GPU in parts.

The library gives such memory to ``cudaMalloc``, so PyTorch's own allocator cuts tensors out of it. A launch reveals which
memory is used, as for a paged module.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, Optional, Union

from sublet._errors import UsageError
from sublet._library import own_library
from sublet._native import Library
from sublet._paging import _CHUNK_BYTES, _WAIT_MS, _WHAT_IS_LEFT, _WINDOW_BYTES, _bytes_of, _live

#: By tag and device. A window lives as long as the process.
_windows: dict[tuple[str, int], PagedRegion] = {}
#: Held by a thread that makes one.
_making = threading.Lock()


class PagedRegion:
    """The window of one tag on one device."""

    def __init__(self, tag: str, device: int, library: Library, frames: int) -> None:
        self.device, self._tag, self._library = device, tag, library
        self.pager = library.page_open(device, _WINDOW_BYTES, _CHUNK_BYTES, frames)
        try:
            library.page_region(self.pager, tag)
        except BaseException:
            library.page_close(self.pager)
            raise

    def set_frames(self, frames: int) -> None:
        """Sets the size from now on."""
        self._library.page_set_frames(self.pager, frames, _WAIT_MS)

    def report(self) -> dict[str, Any]:
        """The place of each part, and the bytes that were copied."""
        found: dict[str, Any] = json.loads(self._library.page_report(self.pager))
        return {"device": self.device, "region": self._tag, **found}


def page(tag: str, device: int, frames: Union[int, str, None]) -> None:
    """Memory of regions of ``tag`` is paged from now on. A window that there is stays as it is."""
    size = _WHAT_IS_LEFT if frames is None else _bytes_of(frames)
    with _making:
        if (tag, device) not in _windows:
            made = _windows[tag, device] = PagedRegion(tag, device, own_library(), size)
            _live.add(made)


def current_device(tag: str) -> int:
    """The device that PyTorch uses now."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_available():
        raise UsageError(f"region '{tag}': home='paged' is for one device, and PyTorch is not there to say which: give device=")
    return int(torch.cuda.current_device())


def windows_of(tag: str, device: Optional[int] = None) -> list[PagedRegion]:
    """The windows of a tag, of one device or of all."""
    return [window for (known, at), window in list(_windows.items()) if known == tag and device in (None, at)]


def refuse_paged(tags: list[str]) -> None:
    """Raises UsageError if memory of one of these is paged: the pager moves that memory."""
    paged = [tag for tag in tags if windows_of(tag)]
    if paged:
        raise UsageError(
            f"pause: memory of region '{paged[0]}' is paged, and comes and goes by itself: sublet.set_frames('{paged[0]}', ...) "
            "says how much of it is on the device; a pause of everything takes it too",
            tags=paged,
        )
