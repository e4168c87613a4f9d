"""Which driver calls does a capture of a stream forbid, and which of them spoil it?

A stream is captured in global mode. Then a call is made: by the thread that captures, by another thread, and by the first one in relaxed
mode, as Sublet makes calls of its own there. Each is named with what it returned and what the end of the capture returned. All calls are about other streams, other
events and other memory than the captured ones.

    python captured_calls.py        # the table of the driver that is there, as JSON
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import deep_calls
import driver
from deep_calls import NON_BLOCKING, ZERO, Caller

GLOBAL, RELAXED = 0, 2
HOST_PORTABLE = 1
UNIT = 2 << 20
WAYS = ("own", "other", "relaxed")


class Held(Caller):
    """What the calls are about."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self.captured), ctypes.c_uint(NON_BLOCKING))
        self.block = driver.Block(0, UNIT)
        self.plain = (ctypes.c_ubyte * (4 << 12))()
        self.page = ctypes.c_void_p((ctypes.addressof(self.plain) + 4095) & ~4095)
        self.made: list[Callable[[], Any]] = []

    def later(self, name: str, *arguments: Any) -> None:
        """A call that takes back what the tried call has made; after the capture."""
        self.made.append(lambda: getattr(self.cuda, name)(*arguments))

    def maker(self, create: str, *arguments: Any, end: str) -> int:
        """A call that makes something."""
        code = int(getattr(self.cuda, create)(self.at(0), *arguments))
        if code == 0:
            self.later(end, ctypes.c_void_p(self.out[0]))
        return code

    def remap(self) -> int:
        """Unmaps a block, and maps it again."""
        try:
            self.block.unmap_and_release()
            self.block.create_and_map()
        except driver.DriverError as error:
            return error.code
        return 0

    def register(self) -> int:
        code = int(self.cuda.cuMemHostRegister_v2(self.page, ctypes.c_size_t(4096), ctypes.c_uint(HOST_PORTABLE)))
        if code == 0:
            self.later("cuMemHostUnregister", self.page)
        return code


#: These are called as in `deep_calls`.
SAME = (
    "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime", "cuStreamWaitEvent", "cuStreamQuery", "cuStreamSynchronize",
    "cuStreamIsCapturing", "cuCtxSynchronize", "cuCtxSetCurrent", "cuMemGetInfo",
)  # fmt: skip
CALLS: dict[str, Callable[[Any, Any], int]] = {
    **{name: deep_calls.CALLS[name] for name in SAME},
    "cuEventCreate": lambda own, _: own.maker("cuEventCreate", ZERO, end="cuEventDestroy_v2"),
    "cuStreamCreate": lambda own, _: own.maker("cuStreamCreate", ctypes.c_uint(NON_BLOCKING), end="cuStreamDestroy_v2"),
    "cuMemAlloc": lambda own, _: own.maker("cuMemAlloc_v2", ctypes.c_size_t(UNIT), end="cuMemFree_v2"),
    "cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap, cuMemRelease": lambda own, _: own.remap(),
    "cuMemHostRegister": lambda own, _: own.register(),
    "cuMemHostAlloc": lambda own, _: own.maker("cuMemHostAlloc", ctypes.c_size_t(4096), ZERO, end="cuMemFreeHost"),
    "cuMemcpyHtoDAsync": lambda own, cuda: cuda.cuMemcpyHtoDAsync_v2(own.memory, own.pinned, ctypes.c_size_t(4096), own.stream),
    "cuMemsetD8Async": lambda own, cuda: cuda.cuMemsetD8Async(own.memory, ctypes.c_ubyte(1), ctypes.c_size_t(4096), own.stream),
}  # fmt: skip

#: By `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`, and the end of the capture then by `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
FORBIDDEN, ALLOWED = [900, 901], [0, 0]
#: Seen on driver 580: these spoil a capture unless they are made in relaxed mode, and waiting for a context always does.
SPOIL = (
    "cuEventQuery", "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize", "cuCtxSynchronize", "cuMemAlloc",
    "cuMemHostRegister", "cuMemHostAlloc",
)  # fmt: skip


def expected(name: str) -> dict[str, list[int]]:
    """What a driver is known to say to a call."""
    forbidden = FORBIDDEN if name in SPOIL else ALLOWED
    return {"own": forbidden, "other": forbidden, "relaxed": FORBIDDEN if name == "cuCtxSynchronize" else ALLOWED}


def differences(found: dict[str, dict[str, list[int]]]) -> list[str]:
    """Where the driver whose table this is says something else."""
    known = {name: expected(name) for name in CALLS}
    return [f"{name}, {way}: {codes}, not {known[name][way]}" for name, ways in found.items() for way, codes in ways.items() if codes != known[name][way]]


def tried(held: Held, name: str, way: str) -> list[int]:
    """What a call returned during a capture, and what the end of the capture returned."""
    cuda, mode, codes, graph = held.cuda, ctypes.c_int(RELAXED), [0, 0], ctypes.c_void_p()
    driver.call("cuStreamBeginCapture_v2", held.captured, ctypes.c_int(GLOBAL))

    def make() -> None:
        held.gpus.use(0)
        codes[0] = CALLS[name](held, cuda)

    if way == "other":
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        if way == "relaxed":
            driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        make()
        if way == "relaxed":
            driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    codes[1] = cuda.cuStreamEndCapture(held.captured, ctypes.byref(graph))
    if graph.value:
        cuda.cuGraphDestroy(graph)
    while held.made:
        held.made.pop()()
    cuda.cuCtxSynchronize()
    return codes


def table() -> dict[str, dict[str, list[int]]]:
    """Of all calls, in each way."""
    held = Held()
    return {name: {way: tried(held, name, way) for way in WAYS} for name in CALLS}


if __name__ == "__main__":
    seen = table()
    json.dump({"table": seen, "differences": differences(seen)}, sys.stdout)
