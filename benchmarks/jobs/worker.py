"""One rank of a job: does what its job script asks through rpc.py, one request at a time.

Started by launch.py or torchrun, under `sublet run` or plainly; the code is the same. With JOB_REHEARSE=1 it runs
on the CPU with gloo, to try the scripts' control flow; such figures mean nothing. Where a simulated driver is found,
each rank holds some of its memory then, so that it is a process of the tenant.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import bench_ops
import common
import launch
import rpc
import subletapi

REHEARSE = os.environ.get("JOB_REHEARSE") == "1"
CHUNK_WORDS = 2 << 20
MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """`value` modulo 2**64 as a signed 64-bit number."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def rehearsal_memory(gpu: int) -> ctypes.c_uint64 | None:
    """64 MiB of a simulated GPU; None where there is no driver."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    codes = [lib.cuInit(0), lib.cuDeviceGet(ctypes.byref(device), gpu)]
    codes.append(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    codes.append(lib.cuCtxSetCurrent(context))
    codes.append(lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 * common.MIB)))
    if any(codes):
        raise common.JobError(f"the simulated driver returned {codes}")
    return pointer


class Checksum:
    """Position-weighted wrapping sums of tensors: any changed word changes the sum, for every weight is odd."""

    def __init__(self, torch: Any, device: Any) -> None:
        self.torch = torch
        self.weights = torch.arange(CHUNK_WORDS, dtype=torch.int64, device=device) * signed(0x9E3779B97F4A7C16) + 1
        self.product = torch.empty_like(self.weights)
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def of(self, tensor: Any) -> int:
        """The sum over a contiguous tensor of a multiple of 8 bytes."""
        words = tensor.reshape(-1).view(self.torch.int64)
        self.total.zero_()
        for index, at in enumerate(range(0, words.numel(), CHUNK_WORDS)):
            part = words[at : at + CHUNK_WORDS]
            product = self.product[: part.numel()]
            self.torch.mul(part, self.weights[: part.numel()], out=product)
            self.total.add_(product.sum() * signed((index * 0xD1B54A32D192ED02) | 1))
        return int(self.total.item())


class Worker:
    """The state of a rank; every `op_*` method is a request."""

    def __init__(self, line: rpc.Line) -> None:
        self.line = line
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.generation = 0
        self.request_id: int | None = None
        self.store: Any = None
        self.groups: list[Any] = []
        self.messages: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.kept_sums: list[int] = []
        self.scratch: list[Any] = []
        self.first: dict[str, int] = {}
        self.bench: dict[str, Any] = {}

    # ------------------------------------------------------------ start

    def op_start(self) -> dict[str, Any]:
        """Imports torch and makes the context, nothing else."""
        began = time.perf_counter()
        import torch

        self.torch = torch
        imported = time.perf_counter() - began
        self.device = torch.device("cpu" if REHEARSE else f"cuda:{self.local}")
        if not REHEARSE:
            torch.cuda.set_device(self.device)
        else:
            self.rehearsal = rehearsal_memory(self.local)
        torch.zeros(1, device=self.device)
        self.sync()
        self.empty_cache()
        self.lib = subletapi.Library()
        nccl = None
        if not REHEARSE:
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        return {
            "versions": {"torch": torch.__version__, "nccl": nccl, "cuda": torch.version.cuda},
            "import_s": imported,
            "start_s": time.perf_counter() - began,
            "sublet": self.lib.present,
            "missing": self.lib.missing,
        }

    def sync(self) -> None:
        """Waits for the device."""
        if not REHEARSE:
            self.torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Gives torch's cached blocks back."""
        gc.collect()
        if not REHEARSE:
            self.torch.cuda.empty_cache()

    def generator(self, seed: int) -> Any:
        """A generator that gives this rank its own numbers."""
        return self.torch.Generator(device=self.device).manual_seed(seed * 1000 + self.rank)

    # ------------------------------------------------------------ communicators

    def op_connect(self) -> dict[str, float]:
        """The process group and two communicators; NCCL makes each at its first collective."""
        import torch.distributed as dist

        began = time.perf_counter()
        self.dist = dist
        if self.store is None:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self.store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                None,
                is_master=self.rank == 0 and not agent,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
            )
        store = dist.PrefixStore(f"job-{self.generation}", self.store)
        self.generation += 1
        dist.init_process_group(
            "gloo" if REHEARSE else "nccl",
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=120),
        )
        self.groups = [dist.new_group(), dist.new_group()]
        return {"seconds": time.perf_counter() - began}

    def op_messages(self, words: list[int], seed: int = 1, all_to_all_groups: int = 1) -> dict[str, int]:
        """Inputs and work buffers of the collectives: all-reduce in every group, all-to-all in the first ones."""
        torch = self.torch
        self.checksum = Checksum(torch, self.device)
        for count in words:
            source = torch.empty(count, dtype=torch.float32, device=self.device)
            source.normal_(generator=self.generator(seed))
            self.messages.append({"words": count, "source": source, "work": torch.empty_like(source)})
        self.all_to_all_groups = all_to_all_groups
        self.sync()
        return {"bytes": sum(2 * 4 * count for count in words)}

    def collectives(self) -> dict[str, int]:
        """Runs every collective once; a checksum of each result."""
        sums = {}
        for number, group in enumerate(self.groups):
            for entry in self.messages:
                entry["work"].copy_(entry["source"])
                self.dist.all_reduce(entry["work"], group=group)
                sums[f"all_reduce.g{number}.{entry['words']}"] = self.checksum.of(entry["work"])
                if number < self.all_to_all_groups:
                    self.dist.all_to_all_single(entry["work"], entry["source"], group=group)
                    sums[f"all_to_all.g{number}.{entry['words']}"] = self.checksum.of(entry["work"])
        self.sync()
        return sums

    def op_tensors(self, kept_gib: float, scratch_gib: float, block_mib: int = 1024, seed: int = 7) -> dict[str, Any]:
        """Big blocks: `kept` with random words and sums, `scratch` in a region whose contents may be lost.

        Kept blocks come first and nothing of the job comes after the scratch: with expandable segments two
        neighbours can share a driver allocation, and it then has the policy of the one that created it.
        """
        torch = self.torch
        if not hasattr(self, "checksum"):
            self.checksum = Checksum(torch, self.device)
        self.sync()
        self.empty_cache()
        words = block_mib * common.MIB // 8
        random = self.generator(seed)
        for _ in range(round(kept_gib * 1024 / block_mib)):
            block = torch.empty(words, dtype=torch.int64, device=self.device)
            block.random_(generator=random)
            self.kept.append(block)
        self.kept_sums = [self.checksum.of(block) for block in self.kept]
        region = self.lib.region("scratch", discard=True) if self.lib.present else contextlib.nullcontext()
        with region:
            for _ in range(round(scratch_gib * 1024 / block_mib)):
                self.scratch.append(torch.empty(words, dtype=torch.int64, device=self.device))
        for block in self.scratch:
            block.fill_(1)
        self.sync()
        return {
            "kept_bytes": len(self.kept) * words * 8,
            "scratch_bytes": len(self.scratch) * words * 8,
            "scratch_in_region": self.lib.present,
        }

    def op_step(self, collectives: bool = True) -> dict[str, Any]:
        """One step of the job: every collective, every kept block, and the scratch written and read."""
        began = time.perf_counter()
        wrong: list[str] = []
        sums = self.collectives() if collectives and self.groups else {}
        collective_s = time.perf_counter() - began
        if not self.first:
            self.first = sums
        wrong += [label for label, value in sums.items() if self.first.get(label) != value]
        for number, block in enumerate(self.kept):
            if self.checksum.of(block) != self.kept_sums[number]:
                wrong.append(f"kept block {number} of rank {self.rank}")
        for number, block in enumerate(self.scratch):
            block.fill_(self.rank + number + 1)
        for number, block in enumerate(self.scratch):
            if int(block.min().item()) != self.rank + number + 1 or int(block.max().item()) != self.rank + number + 1:
                wrong.append(f"scratch block {number} of rank {self.rank}")
        self.sync()
        return {"seconds": time.perf_counter() - began, "collective_s": collective_s, "wrong": wrong}

    def op_disconnect(self) -> dict[str, float]:
        """Destroys the communicators and gives torch's cache back, as a job without Sublet does."""
        self.sync()
        began = time.perf_counter()
        self.groups.clear()
        self.dist.destroy_process_group()
        self.sync()
        destroyed = time.perf_counter()
        self.empty_cache()
        return {"destroy_s": destroyed - began, "empty_cache_s": time.perf_counter() - destroyed}

    def op_reconnect(self) -> dict[str, Any]:
        """Makes the communicators anew and runs the same collectives."""
        began = time.perf_counter()
        self.op_connect()
        connected = time.perf_counter()
        sums = self.collectives()
        ended = time.perf_counter()
        wrong = [label for label, value in sums.items() if self.first.get(label) != value]
        return {"rebuild_s": ended - began, "connect_s": connected - began, "wrong": wrong}

    def op_drop_tensors(self) -> dict[str, int]:
        """Frees every tensor and empties torch's cache."""
        self.messages.clear()
        self.kept.clear()
        self.scratch.clear()
        self.bench.clear()
        if hasattr(self, "checksum"):
            del self.checksum
        self.sync()
        self.empty_cache()
        if REHEARSE:
            return {"reserved": 0}
        return {"reserved": self.torch.cuda.memory_reserved()}

    # ------------------------------------------------------------ pause and resume from inside

    def op_sync(self) -> None:
        """Waits for the device: a step boundary."""
        self.sync()

    def op_amem(self, action: str) -> dict[str, float]:
        """ncclPause or ncclResume of this rank."""
        return {"seconds": self.lib.call({"pause": "ncclPause", "resume": "ncclResume"}[action], None)}

    def op_tenant(self, action: str, timeout_ms: int = 60_000) -> dict[str, float]:
        """Pauses or resumes the whole tenant from this rank."""
        name = {"pause": "sublet_pause_tenant", "resume": "sublet_resume_tenant"}[action]
        return {"seconds": self.lib.call(name, None, timeout_ms)}

    def op_stats(self, print_too: bool = False) -> Any:
        """Sublet's own numbers of this process."""
        if print_too:
            self.lib.call("ncclMemStats")
        return self.lib.stats()

    def op_memory(self) -> dict[str, int]:
        """What this process itself sees; not to be asked while paused."""
        if REHEARSE:
            return {"free": 0, "total": 0, "reserved": 0, "allocated": 0}
        free, total = self.torch.cuda.mem_get_info(self.device)
        cuda = self.torch.cuda
        return {
            "free": free,
            "total": total,
            "reserved": cuda.memory_reserved(),
            "allocated": cuda.memory_allocated(),
        }

    # ------------------------------------------------------------ CUDA graphs

    def op_graph_setup(self) -> dict[str, int]:
        """Captures y = 2 x + 1."""
        torch = self.torch
        self.graph_in = torch.zeros(1 << 20, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.graph_out = self.graph_in * 2 + 1
        torch.cuda.current_stream().wait_stream(side)
        self.sync()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.graph_out = self.graph_in * 2 + 1
        return {"words": 1 << 20}

    def op_graph_check(self, value: float) -> dict[str, bool]:
        """Replays the captured graph on `value`."""
        self.graph_in.fill_(value)
        self.graph_out.zero_()
        self.graph.replay()
        self.sync()
        return {"right": bool((self.graph_out == 2 * value + 1).all().item())}

    def op_capture_hold(self) -> dict[str, bool]:
        """Begins a capture, says so, waits for the next request, ends the capture and replays."""
        torch = self.torch
        x = torch.full((1 << 16,), 3.0, device=self.device)
        self.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 5
            self.line.send({"id": self.request_id, "value": {"capturing": True}})
            self.line.receive(90)
            self.line.sock.settimeout(None)
        graph.replay()
        self.sync()
        return {"right": bool((y == 15.0).all().item())}

    # ------------------------------------------------------------ the loop

    def serve(self) -> None:
        """Answers requests until told to exit or the job script is gone."""
        while True:
            request = self.line.receive()
            op, arguments = request["op"], request.get("args", {})
            self.request_id = request.get("id")
            if op == "exit":
                self.quit()
                return
            try:
                own = getattr(self, f"op_{op}", None)
                value = own(**arguments) if own else bench_ops.OPS[op](self, **arguments)
                answer = {"value": value}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:1500]}
            self.line.send({"id": request.get("id"), **answer})

    def quit(self) -> None:
        """Leaves torch.distributed in order."""
        if self.groups:
            with contextlib.suppress(Exception):
                self.op_disconnect()


def main() -> None:
    """Connects to the job script and serves it."""
    if "--dry-run" in sys.argv:
        print("dry run of worker")
        return
    launch.die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    faulthandler.dump_traceback_later(float(os.environ.get("JOB_LIFE_S", "600")), exit=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["JOB_SOCKET"])
    line = rpc.Line(sock)
    line.send({"rank": int(os.environ["RANK"]), "pid": os.getpid()})
    code = 0
    try:
        Worker(line).serve()
    except (EOFError, OSError):
        code = 3  # the job script is gone
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of half-destroyed communicators are not what is measured here, and may hang.
    os._exit(code)


if __name__ == "__main__":
    main()
