"""What does the driver ask for many small objects beside a few large ones of the same bytes?

Two processes, a GPU each (or one for both), do at the same time what a resume and the pause after it do for shared
memory: create, map, set access, export; then import the other's, map, set access; then unmap and release all. The same
bytes in blocks of 2 MiB, as NCCL asks for them, and in larger ones. Plain libcuda by ctypes; nothing preloaded.

Bound: the driver serialises such calls machine-wide at some 20 to 60 us each, whatever their size up to 512 MiB.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import common
import driver
from common import MIB, Result
from driver import Block, call
from training_run import gpu_count

POSIX_FD = 1
FDS_AT_ONCE = 200
PHASES = ("create, map, access", "export", "send", "import", "map, access of imports", "unmap", "release")


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=60)
    parser.add_argument("--mib", type=int, default=1352, help="MiB of each process")
    parser.add_argument("--block-mib", default="2,16,64,128,512", help="sizes of blocks")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(argv)


class Peer:
    """The other process: a place to meet, and descriptors back and forth."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def meet(self) -> None:
        """Both go on from here."""
        self.link.sendall(b"m")
        if self.link.recv(1) != b"m":
            raise common.JobError("the other process has ended")

    def trade(self, fds: list[int]) -> list[int]:
        """Gives descriptors for as many of the other's."""
        theirs: list[int] = []
        for at in range(0, len(fds), FDS_AT_ONCE):
            own = fds[at : at + FDS_AT_ONCE]
            socket.send_fds(self.link, [b"f"], own)
            _, came, _, _ = socket.recv_fds(self.link, 1, len(own))
            theirs += came
        return theirs


def once(gpu: int, peer: Peer, count: int, size: int) -> dict[str, float]:
    """One round; milliseconds by phase, all processes at it at once."""
    took: dict[str, float] = {}
    window, theirs_at = driver.reserve(count * size), driver.reserve(count * size)

    def timed(name: str, act: Any) -> Any:
        peer.meet()
        began = time.perf_counter()
        made = act()
        took[name] = (time.perf_counter() - began) * 1e3
        return made

    def export(block: Block) -> int:
        fd = ctypes.c_int()
        call("cuMemExportToShareableHandle", ctypes.byref(fd), block.handle, ctypes.c_int(POSIX_FD), ctypes.c_uint64(0))
        return fd.value

    def take(fd: int) -> ctypes.c_uint64:
        handle = ctypes.c_uint64()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(POSIX_FD))
        return handle

    def map_one(number: int, handle: ctypes.c_uint64) -> None:
        at, whole = ctypes.c_uint64(theirs_at + number * size), ctypes.c_size_t(size)
        call("cuMemMap", at, whole, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        call("cuMemSetAccess", at, whole, ctypes.byref(blocks[0].access), ctypes.c_size_t(1))

    blocks: list[Block] = timed(
        PHASES[0],
        lambda: [Block(gpu, size, handle_types=POSIX_FD, address=window + number * size) for number in range(count)],
    )
    fds = timed(PHASES[1], lambda: [export(block) for block in blocks])
    theirs = timed(PHASES[2], lambda: peer.trade(fds))
    handles = timed(PHASES[3], lambda: [take(fd) for fd in theirs])
    timed(PHASES[4], lambda: [map_one(number, handle) for number, handle in enumerate(handles)])
    for fd in fds + theirs:
        os.close(fd)

    def unmap() -> None:
        for number in range(count):
            call("cuMemUnmap", ctypes.c_uint64(theirs_at + number * size), ctypes.c_size_t(size))
            call("cuMemUnmap", ctypes.c_uint64(window + number * size), ctypes.c_size_t(size))

    timed(PHASES[5], unmap)
    timed(PHASES[6], lambda: [call("cuMemRelease", handle) for handle in [*handles, *(block.handle for block in blocks)]])
    for address in (window, theirs_at):
        call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(count * size))
    return took


def work(args: Any, gpu: int, link: socket.socket) -> list[dict[str, Any]]:
    """All rounds of one process."""
    driver.Driver().use(gpu)
    peer, found = Peer(link), []
    for _ in range(args.rounds):
        for mib in (int(text) for text in args.block_mib.split(",")):
            count = -(-args.mib // mib)
            found.append({"block_mib": mib, "count": count, **once(gpu, peer, count, mib * MIB)})
    return found


def body(args: Any, result: Result, work_dir: Path) -> None:
    """Two processes, then the table of the slower one."""
    gpus = gpu_count(args.gpus)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    told = work_dir / "second.json"
    second = os.fork()
    if second == 0:
        code = 1
        try:
            told.write_text(json.dumps(work(args, 1 % gpus, ends[1])))
            code = 0
        finally:
            os._exit(code)
    ends[1].close()
    first = work(args, 0, ends[0])
    os.waitpid(second, 0)
    rows = []
    for own, other in zip(first, json.loads(told.read_text()), strict=True):
        slower = {name: max(own[name], other[name]) for name in PHASES}
        key = f"{own['block_mib']} MiB"
        for name, value in slower.items():
            result.sample(f"{key}: {name}_ms", round(value, 3))
        result.sample(f"{key}: all_ms", round(sum(slower.values()), 3))
        rows.append((key, own["count"]))
    print(f"{'block':>8}{'count':>7}" + "".join(f"{name:>24}" for name in (*PHASES, "all, ms")))
    samples = result.data["samples"]
    for key, count in dict.fromkeys(rows):
        middle = [common.summarise(samples[f"{key}: {name}_ms"])["median"] for name in (*PHASES, "all")]
        print(f"{key:>8}{count:>7}" + "".join(f"{value:>24.2f}" for value in middle))
    result.check("all rounds came to their end", len(rows) == args.rounds * len(args.block_mib.split(",")))


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(common.run_job(options, "objects", body))
