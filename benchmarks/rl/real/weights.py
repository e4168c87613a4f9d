"""Weights on their way: which parameter lies where in which bucket, and in a file. Both sides compute the same."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any, Callable, Optional

import torch

#: A bucket is an eighth of the weights, and at least this: each costs a message and an opening of memory on both sides.
_BUCKET_BYTES, _BUCKETS = 512 << 20, 8
_GRANULE = 2 << 20
_ALIGNMENT = 512


class Layout:
    """Parameters in buckets, in the order of `named_parameters`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        sizes = [parameter.numel() * parameter.element_size() for parameter in self.parameters]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        eighth = -(-sum(padded) // (_BUCKETS * _GRANULE)) * _GRANULE
        self.bucket_bytes = min(max(_BUCKET_BYTES, eighth, max(padded)), sum(padded))
        #: Of each bucket: parameter's number, place, size.
        self.buckets: list[list[tuple[int, int, int]]] = [[]]
        place = 0
        for number, (size, room) in enumerate(zip(sizes, padded)):
            if place + room > self.bucket_bytes:
                self.buckets.append([])
                place = 0
            self.buckets[-1].append((number, place, size))
            place += room
        self.file_bytes = self.bucket_bytes * len(self.buckets)

    def each(self, bucket: int) -> list[tuple[torch.nn.Parameter, slice]]:
        """Parameters of a bucket, and where their bytes are in it."""
        return [(self.parameters[number], slice(place, place + size)) for number, place, size in self.buckets[bucket]]


class SharedFile:
    """A file in memory that both sides keep mapped: made, and its pages found, in the first step alone."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}

    def made(self, path: str, size_bytes: int) -> torch.Tensor:
        """Its bytes, to be written."""
        if path not in self._mapped:
            with open(path, "wb") as file:
                # Reserved before it is written: a full /dev/shm says so here, and not by a signal at the first touch.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        return self.found(path, size_bytes)

    def found(self, path: str, size_bytes: int) -> torch.Tensor:
        """Its bytes, as the other side writes them."""
        if path not in self._mapped:
            self._mapped[path] = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
        return self._mapped[path]


class Lender:
    """The trainer's side."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._file = layout, SharedFile()
        self._bucket: Optional[torch.Tensor] = None

    def lend(self, index: int) -> Optional[dict[str, Any]]:
        """Fills the bucket with the part `index`; None behind the last."""
        from torch.multiprocessing.reductions import reduce_tensor

        if index >= len(self._layout.buckets):
            return None
        if self._bucket is None:
            device = self._layout.parameters[0].device
            self._bucket = torch.empty(self._layout.bucket_bytes, dtype=torch.uint8, device=device)
        for parameter, place in self._layout.each(index):
            self._bucket[place].copy_(_bytes_of(parameter))
        torch.cuda.synchronize()
        handle = base64.b64encode(pickle.dumps(reduce_tensor(self._bucket))).decode()
        return {"handle": handle, "index": index}

    def lent(self) -> None:
        """Gives the bucket back to PyTorch's cache. That is not emptied: it takes longer than a bucket's way, and a pause by Sublet
        gives up what is cached without a copy."""
        self._bucket = None
        torch.cuda.ipc_collect()

    def write(self, path: str, copy: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Writes the weights to a file in memory; `copy` gives a parameter's bytes on the CPU. Makes no call of CUDA
        itself: the process may be paused."""
        shared = self._file.made(path, self._layout.file_bytes)
        for index in range(len(self._layout.buckets)):
            begin = index * self._layout.bucket_bytes
            for parameter, place in self._layout.each(index):
                shared[begin + place.start : begin + place.stop].copy_(_bytes_of(copy(parameter)))
        return int(self._layout.file_bytes)


class Borrower:
    """The generator's side."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._file = layout, SharedFile()

    def borrow(self, handle: str, index: int) -> None:
        """Opens a bucket, copies what is in it, and closes it."""
        rebuild, arguments = pickle.loads(base64.b64decode(handle))
        bucket = rebuild(*arguments)
        for parameter, place in self._layout.each(index):
            _bytes_of(parameter).copy_(bucket[place])
        torch.cuda.synchronize()
        # The last tensor of the handle: closes it.
        del bucket
        torch.cuda.ipc_collect()

    def load(self, path: str) -> None:
        """Reads a file that `Lender.write` has written."""
        shared = self._file.found(path, self._layout.file_bytes)
        for index in range(len(self._layout.buckets)):
            begin = index * self._layout.bucket_bytes
            for parameter, place in self._layout.each(index):
                _bytes_of(parameter).copy_(shared[begin + place.start : begin + place.stop])
        if self._layout.parameters[0].is_cuda:
            torch.cuda.synchronize()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
