"""Does a hand-made all-reduce over `cudaIpc` buffers survive pauses of the memory it runs on?

Two processes, one GPU each, exchange handles of their buffers and flags as inference engines do, and reduce with a
kernel of their own (programs/one_shot.cu, built here by nvcc) that writes into each other's flags and reads each
other's data. One buffer comes from cudaMalloc, the other is a tensor of torch's in the middle of a block. Between
reductions the tenant is paused and resumed, `--cycles` times, as a whole by the command and by tag from inside. Every
result must be exact: inputs are integers.

Bound: a reduction of 4 MiB takes some 30 us; a pause moves 80 MiB a GPU. The run is nvcc (10 s) and two starts of
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cli
import common
import driver
import runner
from common import JobError, Result

SOURCE = common.JOBS / "programs" / "one_shot.cu"
FLOATS = 1 << 20
REDUCTIONS = 20
TAG = "reduce"
HANDLE_BYTES = 64
RANGE_START = 11  # CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
LAZY_PEER_ACCESS = 1


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=115)
    parser.add_argument("--cycles", type=int, default=10, help="pauses and resumes, by turns whole and by tag")
    parser.add_argument("--rank", type=int, help="used by the job itself")
    parser.add_argument("--meeting", type=Path, help="used by the job itself: a folder")
    parser.add_argument("--kernel", type=Path, help="used by the job itself")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- one rank


class Runtime:
    """The CUDA runtime that torch has loaded, and the driver, by ctypes."""

    def __init__(self) -> None:
        import torch

        major = int((torch.version.cuda or "13").split(".")[0])
        self.lib = ctypes.CDLL(f"libcudart.so.{major}")
        self.driver = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """A call that must succeed."""
        code = getattr(self.lib, name)(*arguments)
        if code != 0:
            raise JobError(f"{name} returned {code}")

    def malloc(self, size_bytes: int) -> int:
        """Zeroed device memory by cudaMalloc."""
        pointer = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        self.call("cudaMemset", pointer, 0, ctypes.c_size_t(size_bytes))
        return pointer.value or 0

    def share(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation that `address` is in, and the offset there."""
        base, handle = ctypes.c_uint64(), ctypes.create_string_buffer(HANDLE_BYTES)
        code = self.driver.cuPointerGetAttribute(ctypes.byref(base), RANGE_START, ctypes.c_uint64(address))
        if code != 0:
            raise JobError(f"cuPointerGetAttribute returned {code}")
        self.call("cudaIpcGetMemHandle", handle, ctypes.c_void_p(base.value))
        return handle.raw, address - base.value

    def open(self, shared: tuple[bytes, int]) -> int:
        """The address of a peer's memory here."""

        class Handle(ctypes.Structure):
            _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)

        pointer = ctypes.c_void_p()
        handle = Handle.from_buffer_copy(shared[0])
        self.call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        return (pointer.value or 0) + shared[1]


#: Stretches without work and without a pause, before the first pause, and how long each is.
RESTS, REST_S = 4, 0.05


class Meeting:
    """Where two processes exchange bytes and wait for each other: files in a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.count = folder, rank, 0

    def exchange(self, data: bytes) -> bytes:
        """The other's data, when both have come."""
        self.count += 1
        part = self.folder / f".{self.rank}"
        part.write_bytes(data)
        part.replace(self.folder / f"{self.count}.{self.rank}")
        other = self.folder / f"{self.count}.{1 - self.rank}"
        runner.wait_for_file(other, 40)
        return other.read_bytes()

    def barrier(self) -> None:
        """Both are here."""
        self.exchange(b"")


class Buffer:
    """Memory that the ranks reduce over, each rank's own and the other's as it is mapped here."""

    def __init__(self, runtime: Runtime, meeting: Meeting, own: int) -> None:
        handle, offset = runtime.share(own)
        theirs = meeting.exchange(offset.to_bytes(8, "little") + handle)
        self.own = own
        self.peer = runtime.open((theirs[8:], int.from_bytes(theirs[:8], "little")))


class Rank:
    """One process: its buffers and the kernel."""

    def __init__(self, args: Any) -> None:
        import sublet
        import torch

        self.torch, self.sublet, self.rank = torch, sublet, args.rank
        torch.cuda.set_device(args.rank)
        self.runtime, self.meeting = Runtime(), Meeting(args.meeting, args.rank)
        self.kernel = ctypes.CDLL(str(args.kernel))
        with sublet.region(TAG):
            # A tensor in the middle of a block, and so of what its handle opens.
            self.block = torch.zeros(16 << 20, dtype=torch.float32, device="cuda")
            self.tensor = self.block[3 << 20 : (3 << 20) + FLOATS]
            self.output = torch.zeros(FLOATS, dtype=torch.float32, device="cuda")
            self.failed = torch.zeros(1, dtype=torch.int32, device="cuda")
            plain, flags = self.runtime.malloc(4 * FLOATS), self.runtime.malloc(2 << 20)
            self.plain = torch.as_tensor(Array(plain, FLOATS), device="cuda")
        torch.cuda.synchronize()
        self.flags = Buffer(self.runtime, self.meeting, flags)
        self.buffers = {
            "cudaMalloc": (self.plain, Buffer(self.runtime, self.meeting, plain)),
            "tensor": (self.tensor, Buffer(self.runtime, self.meeting, self.tensor.data_ptr())),
        }
        self.epoch = 0

    def reduce(self, label: str) -> None:
        """Reductions over both buffers, each with other inputs."""
        torch = self.torch
        ramp = torch.arange(FLOATS, device="cuda", dtype=torch.float32) % 1024
        for name, (tensor, buffer) in self.buffers.items():
            wrong, times, on_device = 0, [], []
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(REDUCTIONS):
                self.epoch += 1
                tensor.copy_(ramp + (self.rank + 1) * self.epoch)
                torch.cuda.synchronize()
                began = time.perf_counter()
                begin.record()
                inputs = (buffer.own, buffer.peer) if self.rank == 0 else (buffer.peer, buffer.own)
                code = self.kernel.one_shot_all_reduce(
                    *map(ctypes.c_void_p, inputs),
                    ctypes.c_void_p(self.output.data_ptr()),
                    ctypes.c_void_p(self.flags.own),
                    ctypes.c_void_p(self.flags.peer),
                    ctypes.c_uint(self.epoch),
                    ctypes.c_int(FLOATS),
                    ctypes.c_void_p(self.failed.data_ptr()),
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                )
                end.record()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e6)
                on_device.append(begin.elapsed_time(end) * 1e3)
                expected = 2 * ramp + 3 * self.epoch
                wrong += int(code != 0) + int(not torch.equal(self.output, expected)) + int(self.failed.item())
            runner.row(f"{label}, {name}: exact", wrong == 0, f"{wrong} of {REDUCTIONS} wrong")
            runner.sample(f"{name}_us", statistics.median(times))
            runner.sample(f"{name}_on_device_us", statistics.median(on_device))
        self.meeting.barrier()

    def run(self, cycles: int) -> None:
        """Reductions and pauses by turns; rank 0 pauses."""
        self.reduce("before")
        for rest in range(RESTS):
            # What a pause does not do, but the time without work.
            if self.rank == 0:
                time.sleep(REST_S)
            self.meeting.barrier()
            self.reduce(f"rest {rest}")
        for cycle in range(cycles):
            whole = cycle % 2 == 0
            label = f"cycle {cycle} ({'whole' if whole else 'by tag'})"
            if self.rank == 0:
                for action in ("pause", "resume"):
                    began, failed = time.perf_counter(), ""
                    if whole:
                        told = cli.sublet(action, os.environ["SUBLET_TENANT"], timeout_s=30)
                        failed = "" if told["exit"] == 0 else cli.say(told)
                    else:
                        function = self.sublet.pause if action == "pause" else self.sublet.resume
                        try:
                            function(tags=TAG, whose="tenant", timeout=20)
                        except self.sublet.Error as error:
                            failed = f"{type(error).__name__}: {error}"
                    runner.sample(f"{action}_s", time.perf_counter() - began)
                    runner.row(f"{label}: {action}", not failed, failed)
            self.meeting.barrier()
            self.reduce(label)


class Array:
    """Device memory by its address, for torch.as_tensor."""

    def __init__(self, address: int, floats: int) -> None:
        self.__cuda_array_interface__ = driver.array_interface(address, floats, "<f4")


def rank_main(args: Any) -> int:
    """A process under `sublet run`."""
    runner.begin(args.deadline)
    runner.fact("versions", runner.versions())
    Rank(args).run(args.cycles)
    return 0


# ---------------------------------------------------------------- the job


def build(work: Path) -> Path:
    """The kernel as a library."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = work / "one_shot.so"
    command = [nvcc, "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "--cudart", "shared"]
    done = subprocess.run(
        [*command, "-o", str(library), str(SOURCE)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise JobError(f"nvcc: {(done.stderr or done.stdout)[-800:]}")
    return library


def body(args: Any, result: Result, work: Path) -> None:
    """Builds, starts both ranks in one tenant, gathers."""
    count = common.gpus()["count"] or 0
    if count < 2:
        raise JobError(f"2 GPUs wanted, {count} found")
    result.data["parameters"]["gpus"] = 2
    kernel, site = build(work), runner.package(work, "sublet")
    meeting = work / "meeting"
    meeting.mkdir()
    ranks = []
    for rank in range(2):
        command = [__file__, "--rank", str(rank), "--meeting", str(meeting), "--kernel", str(kernel)]
        command += ["--cycles", str(args.cycles), "--deadline", str(args.deadline - 20)]
        env = {"LD_LIBRARY_PATH": runner.cuda_libraries()}
        tenant = f"custom-{os.getpid()}"
        ranks.append(runner.Child(work, f"rank{rank}", command, tenant=tenant, sites=[site], env=env))
    end = time.monotonic() + args.deadline - 15
    for child in ranks:
        with contextlib.suppress(JobError):
            child.finish(result, max(1.0, end - time.monotonic()))
    runner.verdicts(result)
    print()
    rows: list[tuple[str, ...]] = [("median of both ranks' lesser time on the device, us", "before", "after rests", "after pauses")]
    samples = result.data["samples"]
    for name in ("cudaMalloc", "tensor"):
        both = [samples.get(f"rank{rank}_{name}_on_device_us", []) for rank in range(2)]
        # Whoever comes first waits for the other; the later one shows what the reduction takes.
        series = [min(pair) for pair in zip(*both, strict=False)]
        if len(series) > 1 + RESTS:
            parts = series[:1], series[1 : 1 + RESTS], series[1 + RESTS :]
            rows.append((f"4 MiB, {name}", *(f"{statistics.median(part):.1f}" for part in parts)))
    runner.table(rows)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.rank is not None:
        sys.exit(rank_main(options))
    sys.exit(common.run_job(options, "custom_allreduce", body))
