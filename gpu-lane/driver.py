"""The CUDA driver by ctypes, for jobs and programs alike: contexts, plain memory, and virtual memory with one physical handle
a block.

Loads libcuda at first use; no torch, nothing preloaded.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

import common

CHUNK = 8 * common.GIB
#: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3


class DriverError(common.JobError):
    """A call of the driver failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.name, self.code = name, code


@functools.cache
def library() -> ctypes.CDLL:
    """The driver; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """A driver call that must succeed."""
    code = getattr(library(), name)(*arguments)
    if code != 0:
        raise DriverError(name, code)


def kernel(module: ctypes.c_void_p, name: bytes) -> ctypes.c_void_p:
    function = ctypes.c_void_p()
    call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
    return function


def load(ptx: bytes) -> ctypes.c_void_p:
    """A module of the current context."""
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx))
    return module


def launch(function: ctypes.c_void_p, grid: int, block: int, stream: ctypes.c_void_p | None, *values: Any) -> None:
    """Launches a kernel with these parameters; without a stream on the context's own."""
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    sizes = [ctypes.c_uint(size) for size in (grid, 1, 1, block, 1, 1, 0)]
    call("cuLaunchKernel", function, *sizes, stream, pointers, None)


def array_interface(address: int, count: int, typestr: str) -> dict[str, Any]:
    """What `torch.as_tensor` wants to know of device memory, as `__cuda_array_interface__`."""
    return {"shape": (count,), "typestr": typestr, "data": (address, False), "version": 3, "strides": None}


# ---------------------------------------------------------------- virtual memory


class _Location(ctypes.Structure):
    """CUmemLocation."""

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


def granularity_bytes(gpu: int) -> int:
    """What sizes of physical handles are multiples of."""
    size = ctypes.c_size_t()
    properties = _Properties(type=PINNED, location=_Location(ON_DEVICE, gpu))
    call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), ctypes.c_int(0))
    return size.value


def reserve(size_bytes: int) -> int:
    """The address of a new reservation."""
    address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
    call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size_bytes), ctypes.c_size_t(0), none, none)
    return address.value


def copy(target: int, source: int, size_bytes: int) -> None:
    """cuMemcpy, which waits for its end."""
    call("cuMemcpy", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes))


class Block:
    """An address, and its physical memory while it has some. The context of its GPU is current for every call."""

    def __init__(
        self, gpu: int, size_bytes: int, *, unit: int = 1, handle_types: int = 0, address: int | None = None
    ) -> None:
        """Mapped memory of `size_bytes`, rounded up to a multiple of `unit`, in a reservation of its own, or at
        `address` in another's."""
        self.size_bytes = size_bytes
        self.whole = ctypes.c_size_t(-(-size_bytes // unit) * unit)
        self.properties = _Properties(
            type=PINNED, requested_handle_types=handle_types, location=_Location(ON_DEVICE, gpu)
        )
        self.access = _Access(_Location(ON_DEVICE, gpu), READ_WRITE)
        self.address = reserve(self.whole.value) if address is None else address
        self.create_and_map()

    def create_and_map(self) -> None:
        """Gives the block physical memory."""
        at, none = ctypes.c_uint64(self.address), ctypes.c_uint64(0)
        self.handle = ctypes.c_uint64()
        call("cuMemCreate", ctypes.byref(self.handle), self.whole, ctypes.byref(self.properties), none)
        call("cuMemMap", at, self.whole, ctypes.c_size_t(0), self.handle, none)
        call("cuMemSetAccess", at, self.whole, ctypes.byref(self.access), ctypes.c_size_t(1))

    def unmap_and_release(self) -> None:
        """Takes it away."""
        call("cuMemUnmap", ctypes.c_uint64(self.address), self.whole)
        call("cuMemRelease", self.handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return array_interface(self.address, self.size_bytes, "|u1")


# ---------------------------------------------------------------- GPUs of a process


class Contexts:
    """The primary contexts of the GPUs that this process has used."""

    def __init__(self) -> None:
        call("cuInit", ctypes.c_uint(0))
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def device_count(self) -> int:
        """How many GPUs there are."""
        count = ctypes.c_int()
        call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def use(self, gpu: int) -> None:
        """Makes the context of `gpu` current."""
        if gpu not in self.contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(gpu))
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts[gpu] = context
        call("cuCtxSetCurrent", self.contexts[gpu])


class Driver(Contexts):
    """A context on every GPU, or on `only` one, and memory that a process takes to see how much there is."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        count = self.device_count()
        for gpu in range(count) if only is None else [only]:
            self.use(gpu)
        version, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        call("cuDriverGetVersion", ctypes.byref(version))
        if self.contexts:
            call("cuDeviceGetName", name, ctypes.c_int(128), ctypes.c_int(0))
        self.info = {"count": count, "name": name.value.decode(), "driver_api": version.value}
        self.held: list[tuple[int, ctypes.c_uint64]] = []
        for gpu in self.contexts:  # loads the driver's own fill kernel, so that later readings are flat
            self.take(gpu, 0, 2 * common.MIB)

    def free(self) -> list[int]:
        """Free bytes per GPU that there is a context on, in order."""
        answer = []
        for gpu in self.contexts:
            self.use(gpu)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            answer.append(free.value)
        return answer

    def alloc(self, size: int) -> ctypes.c_uint64 | None:
        """Device memory, or None when there is not enough."""
        pointer = ctypes.c_uint64()
        try:
            call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        except DriverError:
            return None
        return pointer

    def fill(self, address: int, word: int, words: int) -> None:
        """Makes `words` words at `address` all `word`; `synchronize` waits for it."""
        call("cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(words))

    def synchronize(self) -> None:
        """Waits for the current context."""
        call("cuCtxSynchronize")

    def read(self, target: Any, address: int, size_bytes: int) -> None:
        """Copies device memory to `target`, a pointer to host memory."""
        call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def take(self, gpu: int, ballast: int, size: int) -> dict[str, Any]:
        """Allocates `ballast` bytes, then `size` bytes; writes and reads back the latter; frees all."""
        self.use(gpu)
        began, held, held_ballast = time.perf_counter(), [], 0
        try:
            while held_ballast < ballast:
                part = min(CHUNK, ballast - held_ballast)
                block = self.alloc(part)
                if block is None:
                    break
                held.append(block)
                held_ballast += part
            main = self.alloc(size)
            if main is None:
                return {"gpu": gpu, "allocated": False, "bytes": size, "ballast": held_ballast}
            held.append(main)
            words = size // 4
            self.fill(main.value, 0x5EB1E7, words)
            self.synchronize()
            good = True
            for at in (0, words // 2, words - 1):
                word = ctypes.c_uint32()
                self.read(ctypes.byref(word), main.value + 4 * at, 4)
                good = good and word.value == 0x5EB1E7
            took = time.perf_counter() - began
            return {"gpu": gpu, "allocated": good, "bytes": size, "ballast": held_ballast, "seconds": took}
        finally:
            for block in reversed(held):
                library().cuMemFree_v2(block)

    def hold(self, gpu: int, size: int) -> int:
        """Allocates up to `size` bytes and keeps them; how many it got."""
        self.use(gpu)
        got = 0
        while got < size:
            part = min(CHUNK, size - got) // 4096 * 4096
            block = self.alloc(part) if part else None
            if block is None:
                break
            self.held.append((gpu, block))
            got += part
        return got

    def drop(self) -> int:
        """Frees what is held; how many blocks."""
        count = len(self.held)
        for gpu, block in self.held:
            self.use(gpu)
            call("cuMemFree_v2", block)
        self.held.clear()
        return count
