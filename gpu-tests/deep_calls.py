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
#: `CU_LIMIT_MALLOC_HEAP_SIZE`, `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`, of an event that is to be shared: `CU_EVENT_INTERPROCESS`, without times.
MALLOC_HEAP, USED_CURRENT, INTERPROCESS = 2, 7, 6
NULL, ZERO = ctypes.c_void_p(), ctypes.c_uint(0)
#: Streams and events that are there to be destroyed: more than a process destroys before it is locked and while it is off the GPU.
OLD = 3000


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
        driver.call("cuMemHostAlloc", ctypes.byref(self.pinned), ctypes.c_size_t(4096), ZERO)
        self.out = (ctypes.c_uint64 * 32)()
        self.pool, self.shared = ctypes.c_void_p(), ctypes.c_void_p()
        self.nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
        self.old: tuple[list[ctypes.c_void_p], list[ctypes.c_void_p]] = [], []
        driver.call("cuDeviceGetDefaultMemPool", ctypes.byref(self.pool), ctypes.c_int(0))
        driver.call("cuEventCreate", ctypes.byref(self.shared), ctypes.c_uint(INTERPROCESS))
        self.gpus.synchronize()

    def at(self, place: int) -> Any:
        """Where a call writes."""
        return ctypes.byref(self.out, 8 * place)

    def one(self) -> Any:
        """What a call has just written there first."""
        return ctypes.c_void_p(self.out[0])

    def events_of_old(self) -> Any:
        """Another of the events that are there to be destroyed; the last one again when all are."""
        return self.old[1].pop() if len(self.old[1]) > 1 else self.old[1][0]

    def streams_of_old(self) -> Any:
        return self.old[0].pop() if len(self.old[0]) > 1 else self.old[0][0]


#: All calls by their names.
CALLS: dict[str, Callable[[Caller, Any], int]] = {
    "cuStreamQuery": lambda own, cuda: cuda.cuStreamQuery(own.stream),
    "cuStreamQuery, the default stream": lambda own, cuda: cuda.cuStreamQuery(NULL),
    "cuStreamSynchronize": lambda own, cuda: cuda.cuStreamSynchronize(own.stream),
    "cuEventQuery": lambda own, cuda: cuda.cuEventQuery(own.events[0]),
    "cuEventSynchronize": lambda own, cuda: cuda.cuEventSynchronize(own.events[0]),
    "cuEventElapsedTime": lambda own, cuda: cuda.cuEventElapsedTime(own.at(0), *own.events),
    "cuEventRecord": lambda own, cuda: cuda.cuEventRecord(own.events[0], own.stream),
    "cuEventDestroy": lambda own, cuda: cuda.cuEventDestroy_v2(own.events_of_old()),
    "cuStreamDestroy": lambda own, cuda: cuda.cuStreamDestroy_v2(own.streams_of_old()),
    "cuStreamWaitEvent": lambda own, cuda: cuda.cuStreamWaitEvent(own.stream, own.events[0], ZERO),
    "cuStreamIsCapturing": lambda own, cuda: cuda.cuStreamIsCapturing(own.stream, own.at(0)),
    "cuStreamGetCaptureInfo": lambda own, cuda: cuda.cuStreamGetCaptureInfo_v2(own.stream, own.at(0), own.at(1), NULL, NULL, NULL),
    "cuStreamGetPriority": lambda own, cuda: cuda.cuStreamGetPriority(own.stream, own.at(0)),
    "cuLaunchHostFunc": lambda own, cuda: cuda.cuLaunchHostFunc(own.stream, own.nothing, NULL),
    "cuCtxSynchronize": lambda _, cuda: cuda.cuCtxSynchronize(),
    "cuCtxGetCurrent": lambda own, cuda: cuda.cuCtxGetCurrent(own.at(0)),
    "cuCtxGetDevice": lambda own, cuda: cuda.cuCtxGetDevice(own.at(0)),
    "cuCtxGetLimit": lambda own, cuda: cuda.cuCtxGetLimit(own.at(0), ctypes.c_int(MALLOC_HEAP)),
    "cuCtxGetStreamPriorityRange": lambda own, cuda: cuda.cuCtxGetStreamPriorityRange(own.at(0), own.at(1)),
    "cuCtxSetCurrent": lambda own, cuda: cuda.cuCtxSetCurrent(own.gpus.contexts[0]),
    "cuDevicePrimaryCtxGetState": lambda own, cuda: cuda.cuDevicePrimaryCtxGetState(ctypes.c_int(0), own.at(0), own.at(1)),
    "cuDevicePrimaryCtxRetain": lambda own, cuda: cuda.cuDevicePrimaryCtxRetain(own.at(0), ctypes.c_int(0)),
    "cuMemGetInfo": lambda own, cuda: cuda.cuMemGetInfo_v2(own.at(0), own.at(1)),
    "cuPointerGetAttribute": lambda own, cuda: cuda.cuPointerGetAttribute(own.at(0), ctypes.c_int(MEMORY_TYPE), own.memory),
    "cuMemHostGetDevicePointer": lambda own, cuda: cuda.cuMemHostGetDevicePointer_v2(own.at(0), own.pinned, ZERO),
    "cuMemGetAddressRange": lambda own, cuda: cuda.cuMemGetAddressRange_v2(own.at(0), own.at(1), own.memory),
    "cuMemPoolGetAttribute": lambda own, cuda: cuda.cuMemPoolGetAttribute(own.pool, ctypes.c_int(USED_CURRENT), own.at(0)),
    "cuMemPoolTrimTo": lambda own, cuda: cuda.cuMemPoolTrimTo(own.pool, ctypes.c_size_t(0)),
    "cuIpcGetEventHandle": lambda own, cuda: cuda.cuIpcGetEventHandle(own.at(8), own.shared),
    "cuDriverGetVersion": lambda own, cuda: cuda.cuDriverGetVersion(own.at(0)),
    "cuDeviceGetAttribute": lambda own, cuda: cuda.cuDeviceGetAttribute(own.at(0), ctypes.c_int(MULTIPROCESSORS), ctypes.c_int(0)),
    "cuStreamCreate": lambda own, cuda: cuda.cuStreamCreate(own.at(0), ZERO) or cuda.cuStreamDestroy_v2(own.one()),
    "cuEventCreate": lambda own, cuda: cuda.cuEventCreate(own.at(0), ZERO) or cuda.cuEventDestroy_v2(own.one()),
    "cuGraphCreate": lambda own, cuda: cuda.cuGraphCreate(own.at(0), ZERO) or cuda.cuGraphDestroy(own.one()),
    "cuMemsetD32Async": lambda own, cuda: cuda.cuMemsetD32Async(own.memory, ZERO, ctypes.c_size_t(64), own.stream),
    "cuMemcpyDtoHAsync": lambda own, cuda: cuda.cuMemcpyDtoHAsync_v2(own.pinned, own.memory, ctypes.c_size_t(64), own.stream),
    "cuMemAddressReserve": lambda own, cuda: (
        cuda.cuMemAddressReserve(own.at(0), ctypes.c_size_t(2 << 20), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        or cuda.cuMemAddressFree(ctypes.c_uint64(own.out[0]), ctypes.c_size_t(2 << 20))
    ),
}
NAMES = tuple(CALLS)


def repeat(name: str, place: str) -> None:
    """The process of one call: begun, ended and the last code, three words of the file, until its input ends."""
    caller = Caller()
    call, cuda = CALLS[name], caller.cuda
    for made, create in zip(caller.old, ("cuStreamCreate", "cuEventCreate"), strict=True):
        for _ in range(OLD if name == create.replace("Create", "Destroy") else 0):
            made.append(ctypes.c_void_p())
            driver.call(create, ctypes.byref(made[-1]), ZERO)
    with Path(place).open("r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")

    def again() -> None:
        caller.gpus.use(0)
        while True:
            words[0] += 1
            words[2] = call(caller, cuda)
            words[1] += 1
            time.sleep(0.02)

    threading.Thread(target=again, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


class Calls:
    def __init__(self, folder: Path) -> None:
        self.children: dict[str, tuple[subprocess.Popen[bytes], memoryview]] = {}
        for number, name in enumerate(NAMES):
            path = folder / str(number)
            path.write_bytes(bytes(24))
            with path.open("r+b") as file:
                words = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")
            command = [sys.executable, "-c", "import sys, deep_calls; deep_calls.repeat(*sys.argv[1:])", name, str(path)]
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
