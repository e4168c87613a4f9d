"""What does a driver call do in a process whose contexts are off the GPU: does it wait, does it answer, does it crash?

One process a call, without Sublet. A thread makes the call again and again, and counts in shared memory how often it began and ended. All
processes are locked and checkpointed by the driver; a call that began and did not end waits. What answers or crashes is what Sublet
must hold back itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver
from race_memory import Checkpoints

#: Seconds that all processes stay off the GPU, and between two looks at their counters.
FROZEN_S, LOOK_S = 1.5, 0.5
#: Seconds until all have their contexts.
START_S = 60.0
#: `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, `CU_STREAM_NON_BLOCKING`, `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
MEMORY_TYPE, NON_BLOCKING, MULTIPROCESSORS = 2, 1, 16


class Caller:
    """What a call needs."""

    def __init__(self) -> None:
        self.gpus = driver.Driver(only=0)
        self.cuda = driver.library()
        self.stream, self.events = ctypes.c_void_p(), (ctypes.c_void_p(), ctypes.c_void_p())
        driver.call("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(NON_BLOCKING))
        for event in self.events:
            driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
            driver.call("cuEventRecord", event, self.stream)
        self.memory = self.gpus.alloc(2 << 20) or ctypes.c_uint64()
        self.pinned = ctypes.c_void_p()
        driver.call("cuMemHostAlloc", ctypes.byref(self.pinned), ctypes.c_size_t(4096), ctypes.c_uint(0))
        self.out = (ctypes.c_uint64 * 32)()
        self.gpus.synchronize()

    def calls(self) -> dict[str, Callable[[], int]]:
        """All calls by their names."""
        cuda, stream, (first, second), out = self.cuda, self.stream, self.events, self.out
        null, memory, word = ctypes.c_void_p(), self.memory, ctypes.c_uint(0)
        at = [ctypes.byref(out, 8 * place) for place in range(4)]
        return {
            "cuStreamQuery": lambda: cuda.cuStreamQuery(stream),
            "cuStreamQuery, the default stream": lambda: cuda.cuStreamQuery(null),
            "cuStreamSynchronize": lambda: cuda.cuStreamSynchronize(stream),
            "cuEventQuery": lambda: cuda.cuEventQuery(first),
            "cuEventSynchronize": lambda: cuda.cuEventSynchronize(first),
            "cuEventElapsedTime": lambda: cuda.cuEventElapsedTime(at[0], first, second),
            "cuEventRecord": lambda: cuda.cuEventRecord(first, stream),
            "cuStreamWaitEvent": lambda: cuda.cuStreamWaitEvent(stream, first, word),
            "cuStreamIsCapturing": lambda: cuda.cuStreamIsCapturing(stream, at[0]),
            "cuStreamGetCaptureInfo": lambda: cuda.cuStreamGetCaptureInfo(stream, at[0], at[1]),
            "cuStreamGetFlags": lambda: cuda.cuStreamGetFlags(stream, at[0]),
            "cuCtxSynchronize": lambda: cuda.cuCtxSynchronize(),
            "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(at[0]),
            "cuCtxGetDevice": lambda: cuda.cuCtxGetDevice(at[0]),
            "cuCtxSetCurrent": lambda: cuda.cuCtxSetCurrent(self.gpus.contexts[0]),
            "cuMemGetInfo": lambda: cuda.cuMemGetInfo_v2(at[0], at[1]),
            "cuPointerGetAttribute": lambda: cuda.cuPointerGetAttribute(at[0], ctypes.c_int(MEMORY_TYPE), memory),
            "cuMemHostGetDevicePointer": lambda: cuda.cuMemHostGetDevicePointer_v2(at[0], self.pinned, word),
            "cuMemGetAddressRange": lambda: cuda.cuMemGetAddressRange_v2(at[0], at[1], memory),
            "cuDriverGetVersion": lambda: cuda.cuDriverGetVersion(at[0]),
            "cuDeviceGetAttribute": lambda: cuda.cuDeviceGetAttribute(at[0], ctypes.c_int(MULTIPROCESSORS), ctypes.c_int(0)),
            "cuStreamCreate and cuStreamDestroy": lambda: cuda.cuStreamCreate(at[0], word) or cuda.cuStreamDestroy_v2(ctypes.c_void_p(out[0])),
            "cuEventCreate and cuEventDestroy": lambda: cuda.cuEventCreate(at[0], word) or cuda.cuEventDestroy_v2(ctypes.c_void_p(out[0])),
            "cuMemsetD32Async": lambda: cuda.cuMemsetD32Async(memory, word, ctypes.c_size_t(64), stream),
            "cuMemcpyDtoHAsync": lambda: cuda.cuMemcpyDtoHAsync_v2(self.pinned, memory, ctypes.c_size_t(64), stream),
            "cuMemAddressReserve and cuMemAddressFree": lambda: (
                cuda.cuMemAddressReserve(at[0], ctypes.c_size_t(2 << 20), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
                or cuda.cuMemAddressFree(ctypes.c_uint64(out[0]), ctypes.c_size_t(2 << 20))
            ),
        }


#: Their names, in order; a process is told one by its number.
NAMES = (
    "cuStreamQuery", "cuStreamQuery, the default stream", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize",
    "cuEventElapsedTime", "cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuStreamGetFlags",
    "cuCtxSynchronize", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxSetCurrent", "cuMemGetInfo", "cuPointerGetAttribute",
    "cuMemHostGetDevicePointer", "cuMemGetAddressRange", "cuDriverGetVersion", "cuDeviceGetAttribute", "cuStreamCreate and cuStreamDestroy",
    "cuEventCreate and cuEventDestroy", "cuMemsetD32Async", "cuMemcpyDtoHAsync", "cuMemAddressReserve and cuMemAddressFree",
)  # fmt: skip


def repeat(name: str, path: Path) -> None:
    """The process of one call: begun, ended and the last code, three words of the file, until its input ends."""
    caller = Caller()
    call = caller.calls()[name]
    with path.open("r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")

    def again() -> None:
        caller.gpus.use(0)
        while True:
            words[0] += 1
            words[2] = call()
            words[1] += 1
            time.sleep(0.001)

    threading.Thread(target=again, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


class Calls:
    """The processes of all calls."""

    def __init__(self, folder: Path) -> None:
        self.children: dict[str, tuple[subprocess.Popen[bytes], memoryview]] = {}
        for number, name in enumerate(NAMES):
            path = folder / str(number)
            path.write_bytes(bytes(24))
            with path.open("r+b") as file:
                words = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")
            command = [sys.executable, __file__, name, str(path)]
            self.children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL), words

    def wait(self) -> list[str]:
        """Until all make their calls; those that do not."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and any(words[1] < 3 and child.poll() is None for child, words in self.children.values()):
            time.sleep(0.1)
        return [name for name, (_, words) in self.children.items() if words[1] < 3]

    def step(self, *steps: str) -> dict[str, str]:
        """The driver's steps of each, simultaneously; what failed, by name."""
        failed: dict[str, str] = {}

        def one(name: str, pid: int) -> None:
            for step in steps:
                code = Checkpoints.step(step, pid, 10_000)["code"]
                if code != 0:
                    failed[name] = f"{step} returned {code}"
                    return

        threads = [threading.Thread(target=one, args=(name, child.pid)) for name, (child, _) in self.children.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return failed

    def said(self) -> dict[str, str]:
        """What each call does now."""
        before = {name: words[1] for name, (_, words) in self.children.items()}
        time.sleep(LOOK_S)
        answer = {}
        for name, (child, words) in self.children.items():
            if child.poll() is not None:
                answer[name] = f"ended the process ({child.returncode})"
            elif words[1] > before[name]:
                answer[name] = f"answered {words[2]}"
            else:
                answer[name] = "waits" if words[0] > words[1] else "is not made"
        return answer

    def end(self) -> None:
        """Ends all."""
        for child, _ in self.children.values():
            with contextlib.suppress(OSError):
                child.kill()
            child.wait(10)


def calls(deep: Any) -> None:
    """The row: a record of what is so, and the check that calls which wait go on afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        made = Calls(Path(folder))
        try:
            silent = made.wait()
            deep.result.check("all calls are made", not silent, ", ".join(silent))
            failed = made.step("lock")
            locked = made.said()
            failed |= made.step("checkpoint")
            time.sleep(FROZEN_S)
            frozen = made.said()
            failed |= made.step("restore", "unlock")
            time.sleep(LOOK_S)
            back = made.said()
        finally:
            made.end()
    for name in NAMES:
        what = f"locked: {locked[name]}; off the GPU: {frozen[name]}; back: {back[name]}"
        deep.result.data["baseline"][name] = what + (f"; {failed[name]}" if name in failed else "")
        deep.result.note(f"{name}: {deep.result.data['baseline'][name]}")
    stuck = [name for name in NAMES if frozen[name] == "waits" and not back[name].startswith("answered")]
    deep.result.check("a call that waited goes on afterwards", not stuck, ", ".join(stuck))


if __name__ == "__main__":
    repeat(sys.argv[1], Path(sys.argv[2]))
