"""Modules whose parameters live in host memory and come to the GPU in parts.

The library compares each launch with the window's addresses. It waits for the parameters that the launch uses, and copies
those that came next in the last step. So tied weights, checkpointing and an order that changes are right.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

from sublet._errors import UsageError
from sublet._native import Library
from sublet._paging import _CHUNK_BYTES, _WAIT_MS, _WHAT_IS_LEFT, _Bytes, _live, _span_bytes
from sublet._paging_refusals import refuse_unfit_module


#: By module. A copy of a module is not paged.
owners: weakref.WeakKeyDictionary[Any, PagedModule] = weakref.WeakKeyDictionary()


class _Owner:
    """Lives as long as any memory of the window: tensors know it by their bytes."""


class _OwnedBytes(_Bytes):
    def __init__(self, address: int, size_bytes: int, owner: _Owner) -> None:
        super().__init__(address, size_bytes)
        self._owner = owner


class PagedModule:
    """The data that makes one module paged."""

    def __init__(self, module: Any, torch: Any, library: Library, frames: int) -> None:
        self._torch, self._library = torch, library
        self._name = type(module).__name__
        params = list(module.parameters())
        self.device = refuse_unfit_module(module, params, torch)
        self._count = len(params)
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("paged: a graph is under capture: page the module before it")
        places = _places(params)
        total = -(-_span_bytes(params) // _CHUNK_BYTES)
        # Of the largest tensor, which may begin in the middle of a chunk.
        least = max(_chunks_of(place, _size_of(param)) for place, param in zip(places, params))
        self._least, self._total = least * _CHUNK_BYTES, total * _CHUNK_BYTES
        self.pager = library.page_open(self.device.index, self._total, _CHUNK_BYTES, self._fitting(frames))
        owner = _Owner()
        weakref.finalize(owner, library.page_close, self.pager).atexit = False
        moved: list[tuple[Any, Any]] = []
        try:
            for param in params:
                # One after the other: what is used together is neighbours.
                address = library.page_alloc(self.pager, _size_of(param))
                before = self._move(param, address, owner)
                moved.append((param, before))
        except BaseException:
            for param, before in moved:
                self._set(param, param.detach().to(before, copy=True))
            raise
        for part in (part for _, part in module.named_modules()):
            for name, buffer in part._buffers.items():
                if buffer is not None and moved[0][1].type == "cpu" == buffer.device.type:
                    part._buffers[name] = buffer.to(self.device)
        # Where they were.
        torch.cuda.empty_cache()

    def _fitting(self, frames: int) -> int:
        """As much of ``frames`` as can be used, in bytes."""
        if frames == _WHAT_IS_LEFT:
            return frames
        usable = min(frames // _CHUNK_BYTES * _CHUNK_BYTES, self._total)
        if usable < self._least:
            raise UsageError(
                f"paged: frames of {frames} bytes do not hold the largest parameter, which takes {self._least} bytes in "
                f"chunks: give at least '{self._least >> 20}MiB', better a third of all {self._total >> 20} MiB"
            )
        return usable

    def set_frames(self, frames: int) -> None:
        """Sets the size from now on."""
        self._library.page_set_frames(self.pager, self._fitting(frames), _WAIT_MS)

    def _move(self, param: Any, address: int, owner: _Owner) -> Any:
        """Moves one parameter into the window. Where it was."""
        torch, before = self._torch, param.device
        with torch.cuda.device(self.device), torch.no_grad():
            # PyTorch asks the driver whose an address is: it has memory while it is held.
            self._library.page_acquire(self.pager, [address], _WAIT_MS)
            try:
                raw = torch.as_tensor(_OwnedBytes(address, _size_of(param), owner), device=self.device)
                if raw.data_ptr() != address:
                    raise UsageError("paged: this PyTorch copies memory that it is given: use another version")
                tensor = raw.view(param.dtype).as_strided(param.shape, param.stride())
                tensor.copy_(param.detach())
            finally:
                self._library.page_release(self.pager, [address])
        self._set(param, tensor)
        return before

    def _set(self, param: Any, tensor: Any) -> None:
        if param.device.type == tensor.device.type:
            param.data = tensor
        else:
            # Another kind of tensor, under the same object.
            self._torch.utils.swap_tensors(param, self._torch.nn.Parameter(tensor, param.requires_grad))

    def report(self) -> dict[str, Any]:
        """The place of each part, and the bytes that were copied."""
        found: dict[str, Any] = json.loads(self._library.page_report(self.pager))
        return {"device": self.device.index, "module": self._name, "parameters": self._count, **found}


def _size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _places(tensors: list[Any]) -> list[int]:
    """Returns the place of each in a span."""
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += _span_bytes([tensor])
    return places


def _chunks_of(place: int, size_bytes: int) -> int:
    return (place + size_bytes - 1) // _CHUNK_BYTES - place // _CHUNK_BYTES + 1


def page_module(module: Any, torch: Any, library: Library, frames: int) -> None:
    """Moves the parameters of ``module`` into a window of their own."""
    if module in owners:
        raise UsageError("paged: this module is paged already")
    owners[module] = PagedModule(module, torch, library, frames)
    _live.add(owners[module])
