"""Does the driver hand memory of one process to another with its contents?

One process fills nearly all of a GPU with a pattern (cuMemCreate, cuMemMap, cuMemsetD32) and gives it up: it releases
and stays, releases and exits, exits without releasing, or is killed. Another then creates memory in blocks of one
size, writes nothing, and counts bytes that are not zero. The owner's own reading of its pattern is the baseline: it
shows that the counting sees what is there. Plain libcuda through ctypes; no torch, nothing preloaded.
Bound: 140 GB written at 4 TB/s take 35 ms; read over the link at 50 GB/s and compared at 10 GB/s, 17 s. The limit of
`--look-gib` a case keeps the whole run at some three minutes.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import common
import driver
from common import GIB, MIB, Result
from driver import Block, Driver, DriverError
from runner import Ranks
from suite import main, options, role_of

PATTERN = 0xA5C3A5C3  # no byte of it is zero
FILL_BLOCK = 512 * MIB
PIECE = 256 * MIB
POSIX_FD = 1
LEAVES = ("releases and stays", "releases and exits", "exits", "is killed")


class Blocks:
    """Memory of one GPU in blocks of one size, mapped side by side."""

    def __init__(self, gpu: int, size: int, total: int) -> None:
        self.gpu, self.size = gpu, size
        self.reserved = max(total // size, 1) * size
        self.start = driver.reserve(self.reserved)
        self.blocks: list[Block] = []

    def add(self) -> int | None:
        """The address of one block more; None when there is no memory, or no address, for it."""
        address = self.start + len(self.blocks) * self.size
        if address + self.size > self.start + self.reserved:
            return None
        try:
            self.blocks.append(Block(self.gpu, self.size, handle_types=POSIX_FD, address=address))
        except DriverError as error:
            if error.name != "cuMemCreate":
                raise
            return None
        return address

    def release(self) -> int:
        """Gives all of it up; the bytes that were held."""
        held = len(self.blocks) * self.size
        for block in self.blocks:
            block.unmap_and_release()
        self.blocks.clear()
        return held


class Looker:
    """Counts bytes that are not zero, through a pinned buffer."""

    def __init__(self, gpus: Driver, size: int) -> None:
        self.gpus, self.size = gpus, min(size, PIECE)
        self.buffer = ctypes.c_void_p()
        driver.call("cuMemHostAlloc", ctypes.byref(self.buffer), ctypes.c_size_t(self.size), ctypes.c_uint(0))
        self.libc = ctypes.CDLL(None)
        self.libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def nonzero(self, address: int, size: int) -> int:
        """How many of `size` bytes at `address` are not zero."""
        found = 0
        for at in range(0, size, self.size):
            length = min(self.size, size - at)
            self.gpus.read(self.buffer, address + at, length)
            host = self.buffer.value or 0
            first = ctypes.c_ubyte.from_address(host).value
            if first != 0 or self.libc.memcmp(host, host + 1, length - 1) != 0:
                found += length - ctypes.string_at(host, length).count(0)
        return found


class Holder:
    """One of the two processes; its methods are steps."""

    def __init__(self, args: Any) -> None:
        self.gpu, self.gpus = args.gpu, Driver()
        self.gpus.use(self.gpu)

    def fill(self) -> dict[str, Any]:
        """What the process that had the memory first does."""
        free = self.gpus.free()[self.gpu]
        self.gpus.use(self.gpu)
        self.blocks = Blocks(self.gpu, FILL_BLOCK, free)
        while (address := self.blocks.add()) is not None:
            self.gpus.fill(address, PATTERN, FILL_BLOCK // 4)
        self.gpus.synchronize()
        looker = Looker(self.gpus, FILL_BLOCK)
        last, count = self.blocks.blocks[-1].address, len(self.blocks.blocks)
        nonzero = looker.nonzero(last, FILL_BLOCK)
        return {"filled": count * FILL_BLOCK, "free_before": free, "looked": FILL_BLOCK, "nonzero": nonzero}

    def release(self) -> dict[str, Any]:
        """Gives it up."""
        return {"released": self.blocks.release()}

    def look(self, block_mib: int, look_gib: float, expect_bytes: int) -> dict[str, Any]:
        """What the process that has it next does."""
        # The memory of a process that has just ended comes back within moments.
        common.wait_until(
            "the memory of the other process", lambda: self.gpus.free()[self.gpu] >= expect_bytes, 30
        )
        size = block_mib * MIB
        limit = int(look_gib * GIB) if look_gib else self.gpus.free()[self.gpu]
        self.gpus.use(self.gpu)
        self.blocks, looker = Blocks(self.gpu, size, max(limit, size)), Looker(self.gpus, size)
        nonzero, creating_s = 0, 0.0
        while True:
            began = time.perf_counter()
            address = self.blocks.add()
            creating_s += time.perf_counter() - began
            if address is None:
                break
            nonzero += looker.nonzero(address, size)
        count = len(self.blocks.blocks)
        return {"looked": count * size, "blocks": count, "nonzero": nonzero, "creating_s": creating_s}


parse = options(
    __doc__, 240, blocks_mib=("2,512,8192", "sizes of the blocks that are looked at"),
    look_gib=(32.0, "bytes looked at in one case (0: all there are)"), rounds=(2, "times that every case is run"),
    gpu=(0, "the GPU to use"), role=role_of("holder"),
)


def one_case(result: Result, work: Path, args: Any, leaves: str, block_mib: int, round_number: int) -> None:
    """Fills, gives up in one way, looks in blocks of one size."""
    script, how = [__file__, "--role", "holder", "--gpu", str(args.gpu)], {"launcher": "alone", "life_s": args.deadline}
    first = Ranks(work, "first", 1, script, **how)
    told = first.call("fill", args.deadline)[0]
    result.sample("baseline_nonzero_share", told["nonzero"] / told["looked"])
    stays = leaves == "releases and stays"
    if leaves.startswith("releases"):
        first.call("release", args.deadline)
    if leaves == "is killed":
        first.kill()
    elif not stays:
        first.close()
    # What the looking process and one that stays need for themselves is not there to be looked at.
    expect = max(0, told["filled"] - 2 * GIB)
    second = Ranks(work, "second", 1, script, **how)
    seen = second.call("look", args.deadline, block_mib=block_mib, look_gib=args.look_gib, expect_bytes=expect)[0]
    second.close()
    if stays:
        first.close()
    gib = seen["looked"] / GIB
    name = f"{leaves}, blocks of {block_mib} MiB, round {round_number}"
    result.sample("cases", {"leaves": leaves, "block_mib": block_mib, "round": round_number, "filled_bytes": told["filled"], **seen})
    if seen["creating_s"] > 0:
        result.sample(f"create_{block_mib}_mib_gib_s", gib / seen["creating_s"])
    detail = f"{seen['nonzero']} of {seen['looked']} bytes are not zero; {told['filled']} had been filled"
    result.check(name, seen["looked"] > 0 and seen["nonzero"] == 0, detail)


def body(args: Any, result: Result, work: Path) -> None:
    """The job."""
    for block_mib in (int(size) for size in args.blocks_mib.split(",")):
        for leaves in LEAVES:
            for round_number in range(args.rounds):
                one_case(result, work, args, leaves, block_mib, round_number)
    shares = result.data["samples"].pop("baseline_nonzero_share", [])
    result.data["baseline"] = {"nonzero_share_seen_by_the_owner": common.summarise(shares)}
    result.check("the owner sees its own pattern", bool(shares) and min(shares) == 1.0, f"least share {min(shares, default=0)}")


if __name__ == "__main__":
    main(parse, "zeroed", body, {"holder": Holder})
