"""Device memory by the driver's virtual memory calls, one physical handle a block, as allocators with a sleep mode make
it.

Loads libcuda by ctypes. A block keeps its address while its physical memory goes and comes.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import common


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Device:
    """One device; its context must be current, which torch sees to."""

    def __init__(self, ordinal: int = 0) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        # Pinned, on the device; the context comes with the first use of torch.
        import torch

        torch.zeros(1, device=f"cuda:{ordinal}")
        self.properties = _Properties(type=1, location=_Location(1, ordinal))
        self.access = _Access(_Location(1, ordinal), 3)  # readable and writable
        size = ctypes.c_size_t()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self.properties), 0)
        self.granularity_bytes = size.value

    def call(self, name: str, *arguments: Any) -> None:
        """A driver call that must succeed."""
        code = getattr(self.lib, name)(*arguments)
        if code != 0:
            raise common.JobError(f"{name} returned {code}")

    def block(self, size_bytes: int) -> Block:
        """A new block, mapped."""
        return Block(self, size_bytes)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """cuMemcpy, which waits for its end."""
        self.call("cuMemcpy", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes))


class Block:
    """A reservation, and its physical memory while it has some."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        unit = device.granularity_bytes
        self.device, self.size_bytes = device, size_bytes
        self.whole_bytes = -(-size_bytes // unit) * unit
        reserved = ctypes.c_uint64()
        whole, none = ctypes.c_size_t(self.whole_bytes), ctypes.c_uint64(0)
        device.call("cuMemAddressReserve", ctypes.byref(reserved), whole, ctypes.c_size_t(0), none, none)
        self.address = reserved.value
        self.create_and_map()

    def create_and_map(self) -> None:
        """Gives the block physical memory."""
        device, whole, at = self.device, ctypes.c_size_t(self.whole_bytes), ctypes.c_uint64(self.address)
        self.handle = ctypes.c_uint64()
        device.call(
            "cuMemCreate", ctypes.byref(self.handle), whole, ctypes.byref(device.properties), ctypes.c_uint64(0)
        )
        device.call("cuMemMap", at, whole, ctypes.c_size_t(0), self.handle, ctypes.c_uint64(0))
        device.call("cuMemSetAccess", at, whole, ctypes.byref(device.access), ctypes.c_size_t(1))

    def unmap_and_release(self) -> None:
        """Takes it away."""
        self.device.call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.whole_bytes))
        self.device.call("cuMemRelease", self.handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }


if __name__ == "__main__":
    if "--dry-run" not in sys.argv:
        print("vmm is a module; the jobs import it")
