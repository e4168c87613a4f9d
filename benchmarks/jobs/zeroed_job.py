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
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
from common import GIB, MIB, JobError, Result
from observer import Driver

PATTERN = 0xA5C3A5C3  # no byte of it is zero
FILL_BLOCK = 512 * MIB
PIECE = 256 * MIB
POSIX_FD = 1
LEAVES = ("releases and stays", "releases and exits", "exits", "is killed")


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Prop(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Blocks:
    """Memory of one GPU in blocks of one size, mapped side by side."""

    def __init__(self, driver: Driver, gpu: int, size: int, total: int) -> None:
        self.driver, self.lib, self.size = driver, driver.lib, size
        driver.use(gpu)
        self.prop = Prop(type=1, handle_types=POSIX_FD, location=Location(1, gpu))
        self.access = Access(Location(1, gpu), 3)
        self.start = ctypes.c_uint64()
        self.reserved = max(total // size, 1) * size
        self.handles: list[int] = []
        code = self.lib.cuMemAddressReserve(
            ctypes.byref(self.start), ctypes.c_size_t(self.reserved), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        )
        driver.check(code, "cuMemAddressReserve")

    def add(self) -> int | None:
        """The address of one block more; None when there is no memory, or no address, for it."""
        address = self.start.value + len(self.handles) * self.size
        if address + self.size > self.start.value + self.reserved:
            return None
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.size)
        if self.lib.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(self.prop), ctypes.c_uint64(0)) != 0:
            return None
        place = ctypes.c_uint64(address)
        self.driver.check(self.lib.cuMemMap(place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)), "cuMemMap")
        one = ctypes.c_size_t(1)
        self.driver.check(self.lib.cuMemSetAccess(place, size, ctypes.byref(self.access), one), "cuMemSetAccess")
        self.handles.append(handle.value)
        return address

    def release(self) -> int:
        """Gives all of it up; the bytes that were held."""
        held = len(self.handles) * self.size
        for index, handle in enumerate(self.handles):
            place = ctypes.c_uint64(self.start.value + index * self.size)
            self.driver.check(self.lib.cuMemUnmap(place, ctypes.c_size_t(self.size)), "cuMemUnmap")
            self.driver.check(self.lib.cuMemRelease(ctypes.c_uint64(handle)), "cuMemRelease")
        self.handles.clear()
        return held


class Looker:
    """Counts bytes that are not zero, through a pinned buffer."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver, self.size = driver, min(size, PIECE)
        self.buffer = ctypes.c_void_p()
        code = driver.lib.cuMemHostAlloc(ctypes.byref(self.buffer), ctypes.c_size_t(self.size), ctypes.c_uint(0))
        driver.check(code, "cuMemHostAlloc")
        self.libc = ctypes.CDLL(None)
        self.libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def nonzero(self, address: int, size: int) -> int:
        """How many of `size` bytes at `address` are not zero."""
        found = 0
        for at in range(0, size, self.size):
            length = min(self.size, size - at)
            source = ctypes.c_uint64(address + at)
            self.driver.check(self.driver.lib.cuMemcpyDtoH_v2(self.buffer, source, ctypes.c_size_t(length)), "cuMemcpyDtoH")
            host = self.buffer.value or 0
            first = ctypes.c_ubyte.from_address(host).value
            if first != 0 or self.libc.memcmp(host, host + 1, length - 1) != 0:
                found += length - ctypes.string_at(host, length).count(0)
        return found


def say(**what: Any) -> None:
    """One line for the parent."""
    print(json.dumps(what), flush=True)


def fill(args: Any) -> int:
    """The process that had the memory first."""
    driver = Driver()
    free = driver.free()[args.gpu]
    blocks = Blocks(driver, args.gpu, FILL_BLOCK, free)
    while (address := blocks.add()) is not None:
        words = ctypes.c_size_t(FILL_BLOCK // 4)
        driver.check(driver.lib.cuMemsetD32_v2(ctypes.c_uint64(address), ctypes.c_uint(PATTERN), words), "cuMemsetD32")
    driver.check(driver.lib.cuCtxSynchronize(), "cuCtxSynchronize")
    looker = Looker(driver, FILL_BLOCK)
    last = blocks.start.value + (len(blocks.handles) - 1) * FILL_BLOCK
    say(filled=len(blocks.handles) * FILL_BLOCK, free_before=free, looked=FILL_BLOCK, nonzero=looker.nonzero(last, FILL_BLOCK))
    sys.stdin.readline()
    if args.leaves.startswith("releases"):
        say(released=blocks.release())
        if args.leaves == "releases and stays":
            sys.stdin.read()
    os._exit(0)


def look(args: Any) -> int:
    """The process that has it next."""
    driver = Driver()
    # The memory of a process that has just ended comes back within moments.
    wanted = args.expect_bytes
    common.wait_until("the memory of the other process", lambda: driver.free()[args.gpu] >= wanted, 30)
    size = args.block_mib * MIB
    limit = int(args.look_gib * GIB) if args.look_gib else driver.free()[args.gpu]
    blocks, looker = Blocks(driver, args.gpu, size, max(limit, size)), Looker(driver, size)
    nonzero, creating_s = 0, 0.0
    while True:
        began = time.perf_counter()
        address = blocks.add()
        creating_s += time.perf_counter() - began
        if address is None:
            break
        nonzero += looker.nonzero(address, size)
    say(looked=len(blocks.handles) * size, blocks=len(blocks.handles), nonzero=nonzero, creating_s=creating_s)
    os._exit(0)


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=240)
    parser.add_argument("--blocks-mib", default="2,512,8192", help="sizes of the blocks that are looked at")
    parser.add_argument("--look-gib", type=float, default=32, help="bytes looked at in one case (0: all there are)")
    parser.add_argument("--rounds", type=int, default=2, help="times that every case is run")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU to use")
    parser.add_argument("--role", choices=["fill", "look"], help="used by the job itself")
    parser.add_argument("--leaves", choices=LEAVES, help="used by the job itself")
    parser.add_argument("--block-mib", type=int, help="used by the job itself")
    parser.add_argument("--expect-bytes", type=int, default=0, help="used by the job itself")
    return parser.parse_args(argv)


class Child:
    """One of the two processes."""

    def __init__(self, work: Path, gpu: int, *options: str) -> None:
        with open(work / "zeroed.log", "ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--gpu", str(gpu), *options],
                env=common.child_env(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                text=True,
            )
        common.adopt(self.process)

    def hear(self) -> dict[str, Any]:
        """Its next line."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise JobError(f"a process ended early, with {self.process.wait(10)}")
        return json.loads(line)

    def go(self) -> None:
        """Lets it go on."""
        if self.process.stdin:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Ends its input and waits."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(60)
        common.release(self.process)


def one_case(result: Result, work: Path, args: Any, leaves: str, block_mib: int, round_number: int) -> None:
    """Fills, gives up in one way, looks in blocks of one size."""
    first = Child(work, args.gpu, "--role", "fill", "--leaves", leaves)
    told = first.hear()
    result.sample("baseline_nonzero_share", told["nonzero"] / told["looked"])
    stays = leaves == "releases and stays"
    if leaves == "is killed":
        os.killpg(first.process.pid, signal.SIGKILL)
    else:
        first.go()
        if leaves.startswith("releases"):
            told["released"] = first.hear()["released"]
    if not stays:
        first.end()
    # What the looking process and one that stays need for themselves is not there to be looked at.
    expect = str(max(0, told["filled"] - 2 * GIB))
    options = ("--role", "look", "--block-mib", str(block_mib), "--look-gib", str(args.look_gib), "--expect-bytes", expect)
    second = Child(work, args.gpu, *options)
    seen = second.hear()
    second.end()
    if stays:
        first.end()
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
    arguments = parse(sys.argv[1:])
    if arguments.role:
        sys.exit({"fill": fill, "look": look}[arguments.role](arguments))
    sys.exit(common.run_job(arguments, "zeroed", lambda result, work: body(arguments, result, work)))
