"""How much device memory is free, as a plain process outside any tenant sees it?

A small program over libcuda alone (no torch, nothing preloaded). It keeps a context on every GPU, so its own cost
is constant (some 500 MiB a GPU), answers `{"op": "free"}` lines on standard input with free bytes per GPU, and on
`{"op": "take", ...}` plays the next tenant: it first fills what was free anyhow (the ballast), then allocates,
writes and reads back the given bytes, which only fit if the paused tenant's memory really came back. `hold` allocates until `drop`.

Bound: writing at about 4 TB/s takes 2.5 ms for 10 GB; cuMemGetInfo takes some 10 us.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import common
import subletapi

CHUNK = 8 * common.GIB


class Driver:
    """The few driver calls needed, loaded at run time."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.check(self.lib.cuInit(0), "cuInit")
        count = ctypes.c_int()
        self.check(self.lib.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        self.contexts = []
        for ordinal in range(count.value):
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.check(self.lib.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
            self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
            self.contexts.append(context)
        version, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        self.lib.cuDriverGetVersion(ctypes.byref(version))
        if self.contexts:
            self.lib.cuDeviceGetName(name, 128, 0)
        self.info = {"count": count.value, "name": name.value.decode(), "driver_api": version.value}
        self.held: list[tuple[int, ctypes.c_uint64]] = []
        for gpu in range(count.value):  # loads the driver's own fill kernel, so that later readings are flat
            self.take(gpu, 0, 2 * common.MIB)

    @staticmethod
    def check(code: int, what: str) -> None:
        if code != 0:
            raise common.JobError(f"{what} returned {code}")

    def use(self, gpu: int) -> None:
        self.check(self.lib.cuCtxSetCurrent(self.contexts[gpu]), "cuCtxSetCurrent")

    def free(self) -> list[int]:
        """Free bytes per GPU."""
        answer = []
        for gpu in range(len(self.contexts)):
            self.use(gpu)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self.check(self.lib.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
            answer.append(free.value)
        return answer

    def alloc(self, size: int) -> ctypes.c_uint64 | None:
        """Device memory, or None when there is not enough."""
        pointer = ctypes.c_uint64()
        code = self.lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer if code == 0 else None

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
            self.check(self.lib.cuMemsetD32_v2(main, ctypes.c_uint(0x5EB1E7), ctypes.c_size_t(words)), "cuMemsetD32")
            self.check(self.lib.cuCtxSynchronize(), "cuCtxSynchronize")
            good = True
            for at in (0, words // 2, words - 1):
                word = ctypes.c_uint32()
                source = ctypes.c_uint64(main.value + 4 * at)
                self.check(self.lib.cuMemcpyDtoH_v2(ctypes.byref(word), source, ctypes.c_size_t(4)), "cuMemcpyDtoH")
                good = good and word.value == 0x5EB1E7
            took = time.perf_counter() - began
            return {"gpu": gpu, "allocated": good, "bytes": size, "ballast": held_ballast, "seconds": took}
        finally:
            for block in reversed(held):
                self.lib.cuMemFree_v2(block)

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
            self.check(self.lib.cuMemFree_v2(block), "cuMemFree")
        self.held.clear()
        return count


def serve() -> int:
    """Answers lines until standard input ends."""
    faulthandler.enable()
    driver = Driver()
    print(json.dumps(driver.info), flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(120, exit=True)
        asked = json.loads(line)
        try:
            if asked["op"] == "free":
                answer: Any = driver.free()
            elif asked["op"] == "hold":
                answer = [driver.hold(*entry) for entry in asked["entries"]]
            elif asked["op"] == "drop":
                answer = driver.drop()
            else:
                answer = [driver.take(*entry) for entry in asked["entries"]]
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
        faulthandler.cancel_dump_traceback_later()
    return 0


class Observer:
    """The parent's side: starts the program, outside any tenant or as one, and asks it."""

    def __init__(self, work: Path, tenant: str | None = None) -> None:
        with open(work / "observer.log", "ab") as sink:
            self.child = subprocess.Popen(
                subletapi.tenant_command(tenant, [sys.executable, str(Path(__file__).resolve())]),
                env=common.child_env(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                text=True,
            )
        common.adopt(self.child)
        self.info: dict[str, Any] = self._answer(90)

    def _answer(self, timeout_s: float) -> Any:
        box: list[str] = []
        reader = threading.Thread(target=lambda: box.append(self.child.stdout.readline()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if not box or not box[0]:
            raise common.JobError(f"the observer gave no answer within {timeout_s:.0f} s (exit {self.child.poll()})")
        answer = json.loads(box[0])
        if isinstance(answer, dict) and "error" in answer:
            raise common.JobError(f"observer: {answer['error']}")
        return answer

    def ask(self, timeout_s: float = 60, **request: Any) -> Any:
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        return self._answer(timeout_s)

    def free(self) -> list[int]:
        """Free bytes per GPU, now."""
        return self.ask(op="free")

    def settled_free(self, timeout_s: float = 3.0) -> list[int]:
        """Free bytes per GPU once three readings in a row agree (processes that end free their memory late)."""
        end, last, same = time.monotonic() + timeout_s, self.free(), 0
        while same < 3 and time.monotonic() < end:
            time.sleep(0.1)
            now = self.free()
            same = same + 1 if now == last else 0
            last = now
        return last

    def take(self, entries: list[list[int]]) -> list[dict[str, Any]]:
        """Per entry `[gpu, ballast bytes, bytes]`: see Driver.take."""
        return self.ask(timeout_s=110, op="take", entries=entries)

    def hold(self, entries: list[list[int]]) -> list[int]:
        """Per entry `[gpu, bytes]`: see Driver.hold."""
        return self.ask(timeout_s=60, op="hold", entries=entries)

    def drop(self) -> int:
        """Frees what `hold` took."""
        return self.ask(timeout_s=60, op="drop")

    def close(self) -> None:
        """Ends the program."""
        self.child.stdin.close()
        common.stop_child(self.child)


if __name__ == "__main__":
    if "--dry-run" in sys.argv:
        print("dry run of observer")
        sys.exit(0)
    sys.exit(serve())
