"""A process of the race that holds device memory: fills it, changes parts of it, and says whether it is as it was.

Plain libcuda by ctypes, so that it starts in a second. Every word is written by a kernel that mixes its number with a
seed, and added up by one that gives each word an odd weight, so that one changed word changes the sum. Both are PTX that
the driver compiles. The simulated driver knows the second by its name and the first not: there, pieces are filled
with one word each. The same process makes the plain pinned copies, and drives the driver's checkpoint API.

Bound: writing 60 GB takes some 20 ms at 4 TB/s, reading them 20 ms more.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import driver
import runner
import suite
from common import MIB, JobError
from driver import Driver, DriverError

#: What is filled with one word where there is no kernel for more, and the unit of a scattered change.
PIECE = 2 * MIB
BLOCK = 512 * MIB
MASK = 0xFFFFFFFF
GRID, THREADS = 1024, 256
#: The share of the memory that a change of a tenth begins at, in tenths.
TENTH_AT = 3
NOT_FOUND = 500
NON_BLOCKING = 1
#: Words whose values are checked against those that the host computes, before anything is measured.
TRIED_WORDS = 4096

KERNELS = b"""
.version 7.0
.target sm_50
.address_size 64

// dst[i] = mix(i * 2654435761 + seed)
.visible .entry mix_u32(.param .u64 p_dst, .param .u32 p_seed, .param .u64 p_count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<6>;
    ld.param.u64 %d0, [p_dst];
    ld.param.u32 %r0, [p_seed];
    ld.param.u64 %d1, [p_count];
    cvta.to.global.u64 %d0, %d0;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mul.wide.u32 %d2, %r1, %r2;
    cvt.u64.u32 %d3, %r3;
    add.u64 %d2, %d2, %d3;
    mov.u32 %r1, %nctaid.x;
    mul.wide.u32 %d4, %r1, %r2;
again:
    setp.ge.u64 %p, %d2, %d1;
    @%p bra done;
    cvt.u32.u64 %r4, %d2;
    mad.lo.u32 %r4, %r4, 2654435761, %r0;
    shr.u32 %r5, %r4, 15;
    xor.b32 %r4, %r4, %r5;
    mul.lo.u32 %r4, %r4, 2246822519;
    shr.u32 %r5, %r4, 13;
    xor.b32 %r4, %r4, %r5;
    shl.b64 %d5, %d2, 2;
    add.u64 %d5, %d0, %d5;
    st.global.u32 [%d5], %r4;
    add.u64 %d2, %d2, %d4;
    bra again;
done:
    ret;
}

// *out += the sum of in[i] * (2 i + 1)
.visible .entry sum_u32(.param .u64 p_out, .param .u64 p_in, .param .u64 p_count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<8>;
    ld.param.u64 %d7, [p_out];
    ld.param.u64 %d0, [p_in];
    ld.param.u64 %d1, [p_count];
    cvta.to.global.u64 %d7, %d7;
    cvta.to.global.u64 %d0, %d0;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mul.wide.u32 %d2, %r1, %r2;
    cvt.u64.u32 %d3, %r3;
    add.u64 %d2, %d2, %d3;
    mov.u32 %r1, %nctaid.x;
    mul.wide.u32 %d4, %r1, %r2;
    mov.u64 %d6, 0;
again:
    setp.ge.u64 %p, %d2, %d1;
    @%p bra done;
    shl.b64 %d5, %d2, 2;
    add.u64 %d5, %d0, %d5;
    ld.global.u32 %r4, [%d5];
    cvt.u32.u64 %r5, %d2;
    shl.b32 %r5, %r5, 1;
    or.b32 %r5, %r5, 1;
    mad.wide.u32 %d6, %r4, %r5, %d6;
    add.u64 %d2, %d2, %d4;
    bra again;
done:
    red.global.add.u64 [%d7], %d6;
    ret;
}
\0"""


def mixed(number: int, seed: int) -> int:
    """What `mix_u32` writes as word `number`."""
    value = (number * 2654435761 + seed) & MASK
    value ^= value >> 15
    value = value * 2246822519 & MASK
    return value ^ value >> 13


def seed_of(seed: int, block: int) -> int:
    """The seed of one block's words: another for each block and each round."""
    return (seed * 16777619 + block * 40503 + 1) & MASK


class Kernels:
    """The two kernels on one GPU, whose context is current for every call."""

    def __init__(self) -> None:
        module = driver.load(KERNELS)
        self.sum = driver.kernel(module, b"sum_u32")
        self.mix: ctypes.c_void_p | None = None
        try:
            self.mix = driver.kernel(module, b"mix_u32")
        except DriverError as error:
            if error.code != NOT_FOUND:
                raise

    @staticmethod
    def launch(function: ctypes.c_void_p, *values: Any) -> None:
        """On the context's own stream."""
        driver.launch(function, GRID, THREADS, None, *values)


class Held:
    """Memory of one GPU in blocks, and the sums that they must have."""

    def __init__(self, gpus: Driver, gpu: int, size_bytes: int, block_bytes: int) -> None:
        self.gpus, self.gpu = gpus, gpu
        gpus.use(gpu)
        self.kernels = Kernels()
        self.blocks: list[tuple[int, int]] = []
        left = size_bytes // PIECE * PIECE
        while left:
            size = min(block_bytes, left)
            block = gpus.alloc(size)
            if block is None:
                raise JobError(f"GPU {gpu} has no memory for block {len(self.blocks)} of {size} bytes")
            self.blocks.append((block.value, size))
            left -= size
        self.size_bytes = sum(size for _, size in self.blocks)
        # Below a granule of the pool, so it stays where it is.
        outs = gpus.alloc(8 * max(1, len(self.blocks)))
        if outs is None:
            raise JobError(f"GPU {gpu} has no memory for {len(self.blocks)} sums")
        self.outs = outs.value
        self.is_right()
        self.sums: list[int] = []

    def fill(self, address: int, size_bytes: int, seed: int) -> None:
        """Words that follow from `seed` and their place."""
        if self.kernels.mix is not None:
            values = ctypes.c_uint64(address), ctypes.c_uint32(seed), ctypes.c_uint64(size_bytes // 4)
            self.kernels.launch(self.kernels.mix, *values)
            return
        for number in range(size_bytes // PIECE):
            self.gpus.fill(address + number * PIECE, mixed(number, seed), PIECE // 4)

    def added(self) -> list[int]:
        """The sum of each block."""
        self.gpus.use(self.gpu)
        count = max(1, len(self.blocks))
        self.gpus.fill(self.outs, 0, 2 * count)
        for number, (address, size) in enumerate(self.blocks):
            values = ctypes.c_uint64(self.outs + 8 * number), ctypes.c_uint64(address), ctypes.c_uint64(size // 4)
            self.kernels.launch(self.kernels.sum, *values)
        self.gpus.synchronize()
        sums = (ctypes.c_uint64 * count)()
        self.gpus.read(sums, self.outs, 8 * count)
        return list(sums)[: len(self.blocks)]

    def is_right(self) -> None:
        """The kernels do what they are for; JobError when they do not."""
        if self.kernels.mix is None or not self.blocks:
            return
        address, seed = self.blocks[0][0], seed_of(99, 0)
        self.fill(address, 4 * TRIED_WORDS, seed)
        self.gpus.fill(self.outs, 0, 2)
        values = ctypes.c_uint64(self.outs), ctypes.c_uint64(address), ctypes.c_uint64(TRIED_WORDS)
        self.kernels.launch(self.kernels.sum, *values)
        self.gpus.synchronize()
        words, total = (ctypes.c_uint32 * TRIED_WORDS)(), ctypes.c_uint64()
        self.gpus.read(words, address, 4 * TRIED_WORDS)
        self.gpus.read(ctypes.byref(total), self.outs, 8)
        wanted = [mixed(number, seed) for number in range(TRIED_WORDS)]
        if list(words) != wanted:
            raise JobError("the kernel mix_u32 does not write what it should")
        if total.value != sum(word * (2 * number + 1) for number, word in enumerate(wanted)) % (1 << 64):
            raise JobError("the kernel sum_u32 does not add what it should")

    def write(self, what: str, seed: int) -> int:
        """Writes `all`, a `tenth` in a row, a tenth `scattered` in pieces, `zero`s everywhere, or `nothing`; the bytes
        written. What has to be there afterwards is noted."""
        self.gpus.use(self.gpu)
        ways: dict[str, Callable[[int], int]] = {
            "all": self._all,
            "tenth": self._tenth,
            "scattered": self._scattered,
            "zero": self._zero,
            "nothing": lambda _seed: 0,
        }
        written = ways[what](seed)
        if what != "nothing":
            self.sums = self.added()
        return written

    def _all(self, seed: int) -> int:
        for number, (address, size) in enumerate(self.blocks):
            self.fill(address, size, seed_of(seed, number))
        return self.size_bytes

    def _zero(self, _seed: int) -> int:
        for address, size in self.blocks:
            self.gpus.fill(address, 0, size // 4)
        return self.size_bytes

    def _tenth(self, seed: int) -> int:
        pieces = self.size_bytes // PIECE
        first, last = pieces * TENTH_AT // 10, pieces * (TENTH_AT + 1) // 10
        begin, end, at, written = first * PIECE, max(last, first + 1) * PIECE, 0, 0
        for number, (address, size) in enumerate(self.blocks):
            low, high = max(begin, at), min(end, at + size)
            if low < high:
                self.fill(address + low - at, high - low, seed_of(seed, number))
                written += high - low
            at += size
        return written

    def _scattered(self, seed: int) -> int:
        piece = written = 0
        for number, (address, size) in enumerate(self.blocks):
            for offset in range(0, size, PIECE):
                if piece % 10 == seed % 10:
                    self.fill(address + offset, PIECE, seed_of(seed, number))
                    written += PIECE
                piece += 1
        return written

    def wrong(self) -> int:
        """How many blocks do not hold what they should."""
        return sum(now != then for now, then in zip(self.added(), self.sums, strict=True))


class Pinned:
    """Two pinned pieces of host memory and two of the device, for copies both ways together."""

    def __init__(self, gpus: Driver, gpu: int, size_bytes: int) -> None:
        self.gpus, self.gpu, self.size = gpus, gpu, ctypes.c_size_t(size_bytes)
        gpus.use(gpu)
        self.hosts, self.devices, self.streams = [], [], []
        for _ in range(2):
            host, device, stream = ctypes.c_void_p(), gpus.alloc(size_bytes), ctypes.c_void_p()
            if device is None:
                raise JobError(f"GPU {gpu} has no {size_bytes} bytes for a copy")
            driver.call("cuMemHostAlloc", ctypes.byref(host), self.size, ctypes.c_uint(0))
            driver.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
            gpus.fill(device.value, 7, size_bytes // 4)
            self.hosts.append(host)
            self.devices.append(device)
            self.streams.append(stream)
        gpus.synchronize()
        for way in ("out", "in"):
            self.copy(way, 1)

    def copy(self, way: str, times: int) -> float:
        """GB/s of copies `out`, `in`, or `both` together, of each of them then."""
        self.gpus.use(self.gpu)
        began = time.perf_counter()
        for _ in range(times):
            if way != "in":
                driver.call("cuMemcpyDtoHAsync_v2", self.hosts[0], self.devices[0], self.size, self.streams[0])
            if way != "out":
                driver.call("cuMemcpyHtoDAsync_v2", self.devices[1], self.hosts[1], self.size, self.streams[1])
        for stream in self.streams:
            driver.call("cuStreamSynchronize", stream)
        return times * self.size.value / (time.perf_counter() - began) / 1e9

    def free(self) -> None:
        """Gives all of it back."""
        self.gpus.use(self.gpu)
        for host, device, stream in zip(self.hosts, self.devices, self.streams, strict=True):
            driver.call("cuMemFreeHost", host)
            driver.call("cuMemFree_v2", device)
            driver.call("cuStreamDestroy_v2", stream)


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class Checkpoints:
    """The driver's own way, of another process."""

    CALLS = {"lock": "Lock", "checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}

    @staticmethod
    def present() -> bool:
        """Whether this driver has it."""
        return all(hasattr(driver.library(), f"cuCheckpointProcess{name}") for name in Checkpoints.CALLS.values())

    @staticmethod
    def step(step: str, pid: int, timeout_ms: int) -> dict[str, Any]:
        """One of its calls: its code, and how long it took."""
        arguments = _LockArguments(timeout_ms=timeout_ms) if step == "lock" else (ctypes.c_uint64 * 8)()
        function = getattr(driver.library(), f"cuCheckpointProcess{Checkpoints.CALLS[step]}")
        began = time.perf_counter()
        code = function(ctypes.c_int(pid), ctypes.byref(arguments))
        return {"code": code, "seconds": time.perf_counter() - began}


class Process:
    """One of the race's processes; its methods are steps."""

    def __init__(self, gpu: int) -> None:
        self.gpu, self.gpus = gpu, Driver(only=gpu)
        self.held: Held | None = None
        self.pinned: Pinned | None = None

    def info(self) -> dict[str, Any]:
        """The machine as this process sees it."""
        return {**self.gpus.info, "free": self.gpus.free()[0], "checkpoints": Checkpoints.present()}

    def hold(self, size_bytes: int, block_bytes: int = BLOCK, seed: int = 1) -> dict[str, int]:
        """Takes memory and writes all of it."""
        self.held = Held(self.gpus, self.gpu, size_bytes, block_bytes)
        self.held.write("all", seed)
        return {"bytes": self.held.size_bytes, "blocks": len(self.held.blocks)}

    def write(self, what: str, seed: int) -> int:
        return self._held().write(what, seed)

    def wrong(self) -> int:
        return self._held().wrong()

    def _held(self) -> Held:
        if self.held is None:
            raise JobError("nothing is held")
        return self.held

    def pinned_setup(self, size_bytes: int) -> None:
        """Makes the memory that is copied."""
        self.pinned = Pinned(self.gpus, self.gpu, size_bytes)

    def pinned_copy(self, way: str, times: int) -> float:
        if self.pinned is None:
            raise JobError("no memory to copy was made")
        return self.pinned.copy(way, times)

    def pinned_free(self) -> None:
        """Gives it back."""
        if self.pinned is not None:
            self.pinned.free()
            self.pinned = None

    def free_bytes(self) -> int:
        """Of this GPU."""
        return self.gpus.free()[0]

    def checkpoint(self, step: str, pid: int, timeout_ms: int = 10_000) -> dict[str, Any]:
        return Checkpoints.step(step, pid, timeout_ms)


def main() -> None:
    """The program: `--gpu N`, or the GPU of this rank."""
    link = runner.connect()
    gpu = int(sys.argv[sys.argv.index("--gpu") + 1]) if "--gpu" in sys.argv else int(os.environ.get("LOCAL_RANK", "0"))
    runner.serve(link, suite.steps_of(Process(gpu)))


if __name__ == "__main__":
    main()
