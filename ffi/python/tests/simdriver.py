"""Device memory of the simulated driver, as a program that knows nothing of Sublet asks for it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional

MIB = 1 << 20
SUCCESS = 0
OUT_OF_MEMORY = 2


class DriverError(Exception):
    """A call of the driver failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed with {code}")
        self.code = code


@functools.lru_cache(maxsize=None)
def _driver() -> ctypes.CDLL:
    """The driver, with a current context on device 0 for the thread that asks first."""
    driver = ctypes.CDLL("libcuda.so.1")
    _checked(driver, "cuInit", ctypes.c_uint(0))
    return driver


@functools.lru_cache(maxsize=None)
def _context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _checked(_driver(), "cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    return context


def _checked(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = getattr(driver, name)(*arguments)
    if code != SUCCESS:
        raise DriverError(name, code)


def call(name: str, *arguments: Any, device: int = 0) -> None:
    """Calls the driver with the context of `device` current; raises DriverError."""
    driver = _driver()
    _checked(driver, "cuCtxSetCurrent", _context(device))
    _checked(driver, name, *arguments)


class Memory:
    """Bytes on a device, as libraries of arrays show theirs."""

    def __init__(self, address: int, size_bytes: int, device: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def write(self, data: bytes) -> None:
        """Puts `data` at the beginning."""
        call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)),
            device=self.device,
        )

    def read(self) -> bytes:
        """All bytes."""
        buffer = ctypes.create_string_buffer(self.size_bytes)
        call(
            "cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(self.address),
            ctypes.c_size_t(self.size_bytes), device=self.device,
        )
        return buffer.raw

    def free(self) -> None:
        """Gives it back to the driver."""
        call("cuMemFree_v2", ctypes.c_uint64(self.address), device=self.device)


class Tensorlike:
    """The same bytes, as an object with `data_ptr()`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.nbytes = memory.size_bytes
        self.is_cuda = True

    def data_ptr(self) -> int:
        """Where it begins."""
        return self._memory.address


def allocate(size_bytes: int, fill: Optional[int] = None, device: int = 0) -> Memory:
    """Memory on `device`, with every byte `fill`."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes), device=device)
    memory = Memory(address.value, size_bytes, device)
    if fill is not None:
        memory.write(bytes([fill]) * size_bytes)
    return memory


def free_bytes(device: int = 0) -> int:
    """What the driver says is free."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total), device=device)
    return free.value


class Capture:
    """A stream that is being captured into a graph, inside the `with` block."""

    def __init__(self) -> None:
        self._stream = ctypes.c_void_p()

    def __enter__(self) -> Capture:
        non_blocking, thread_local = 1, 1
        call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(non_blocking))
        call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(thread_local))
        return self

    def __exit__(self, *_: object) -> None:
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
