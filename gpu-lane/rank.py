"""The ranks of a NCCL job: one process per GPU that makes communicators, computes, and pauses when asked to.

With JOB_REHEARSE=1 they run on the CPU with gloo, to try the scripts' control flow; such figures mean nothing. Where a
simulated driver is found, each rank holds some of its memory then, so that it is a process of the tenant.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_ops
import common
import runner
from checksum import Checksum
from common import JobError, Result
from driver import Driver
from runner import Link, Ranks

REHEARSE = os.environ.get("JOB_REHEARSE") == "1"
NCCL_SUSPEND_MEM = 1

# ---------------------------------------------------------------- in the job


class NcclRanks(Ranks):
    """The ranks as the job has them, each with torch and a context."""

    def __init__(
        self,
        result: Result,
        work: Path,
        label: str,
        world: int,
        tenant: str | None,
        *,
        start_s: float = 120.0,
        **how: Any,
    ) -> None:
        """`start_s` is for the import of torch and the context; `how` is as for `Ranks`."""
        sites = [runner.package(work, "sublet")]
        super().__init__(work, label, world, [__file__], tenant=tenant, sites=sites, **how)
        self.started = self.call("start", start_s)
        result.data["versions"].update(self.started[0]["versions"])
        if any(reply["sublet"] != (tenant is not None) for reply in self.started):
            raise JobError(f"{label}: libsublet.so is {'not ' if tenant else ''}in the ranks")

    def step(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """One step of all ranks: the longest times, and what is not as at first."""
        replies = self.call("step", timeout_s)
        longest = {name: max(reply[name] for reply in replies) for name in ("seconds", "collective_s")}
        return {**longest, "wrong": [name for reply in replies for name in reply["wrong"]]}


# ---------------------------------------------------------------- in a rank


class Tenancy:
    """What a process under Sublet asks of it.

    Below the package's own functions: those have pauses ask torch which memory is unused, and regions take theirs from
    pools. What is measured here is a job that does neither.
    """

    def __init__(self) -> None:
        import sublet
        from sublet import _library

        self.present = sublet.attached()
        self.library: Any = _library.own_library() if self.present else None
        self.command = _library.command

    def timed(self, act: Callable[..., Any], *arguments: Any) -> dict[str, float]:
        """Calls `act`; the seconds it took."""
        began = time.perf_counter()
        act(*arguments)
        return {"seconds": time.perf_counter() - began}

    def together(self, action: str) -> dict[str, float]:
        """ncclPause or ncclResume of this process."""
        return self.timed(self.command, self.library, f"{action}_together")

    def tenant(self, action: str, timeout_ms: int = 60_000) -> dict[str, float]:
        """Pauses or resumes the whole tenant."""
        return self.timed(lambda: self.command(self.library, action, timeout_ms=timeout_ms))

    def stats(self, print_too: bool = False) -> Any:
        """Sublet's own numbers of this process; in its log too, by ncclMemStats."""
        if print_too and (code := ctypes.CDLL(None).ncclMemStats()) != 0:
            raise JobError(f"ncclMemStats returned {code}")
        return json.loads(self.library.stats())

    @contextlib.contextmanager
    def discarded(self, tag: str) -> Iterator[None]:
        """Device memory that this thread allocates inside belongs to `tag`, and its contents may be lost."""
        from sublet._native import CONTENTS_DISCARD

        self.library.region_begin(tag, CONTENTS_DISCARD, None)
        try:
            yield
        finally:
            self.library.region_end()


def rehearsal_memory(gpu: int) -> Driver | None:
    """A driver that holds 64 MiB of a simulated GPU; None where there is none."""
    try:
        driver = Driver()
    except OSError:
        return None
    driver.hold(gpu, 64 * common.MIB)
    return driver


class Rank:
    """The state of a rank; every `op_*` method is a step."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.generation = 0
        self.store: Any = None
        self.groups: list[Any] = []
        self.messages: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.kept_sums: list[int] = []
        self.scratch: list[Any] = []
        self.first: dict[str, int] = {}
        self.communicators, self.all_to_all_groups = 2, 1
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
        started = time.perf_counter() - began
        self.tenancy = Tenancy()
        nccl = None if REHEARSE else bench_ops.nccl_version()
        return {
            "versions": {"torch": torch.__version__, "nccl": nccl, "cuda": torch.version.cuda},
            "import_s": imported,
            "start_s": started,
            "sublet": self.tenancy.present,
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
        """The process group and two communicators, or as many as `op_more` said; NCCL makes each at its first
        collective."""
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
        self.groups = [dist.new_group() for _ in range(self.communicators)]
        return {"seconds": time.perf_counter() - began}

    def op_more(self, communicators: int, all_to_all_groups: int) -> dict[str, float]:
        """Further communicators, until there are so many, and how many of all of them do all-to-all."""
        began = time.perf_counter()
        self.communicators, self.all_to_all_groups, self.first = communicators, all_to_all_groups, {}
        while len(self.groups) < communicators:
            self.groups.append(self.dist.new_group())
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
        region = self.tenancy.discarded("scratch") if self.tenancy.present else contextlib.nullcontext()
        with region:
            for _ in range(round(scratch_gib * 1024 / block_mib)):
                self.scratch.append(torch.empty(words, dtype=torch.int64, device=self.device))
        for block in self.scratch:
            block.fill_(1)
        self.sync()
        return {
            "kept_bytes": len(self.kept) * words * 8,
            "scratch_bytes": len(self.scratch) * words * 8,
            "scratch_in_region": self.tenancy.present,
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
        """Makes the communicators again and runs the same collectives."""
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

    # ------------------------------------------------------------ NCCL's own suspend and resume

    def op_suspend(self, action: str) -> dict[str, Any]:
        """`ncclCommSuspend` or `ncclCommResume` of every communicator; None for `seconds` says why it cannot be."""
        if REHEARSE:
            return {"seconds": None, "why": "gloo has no communicators of NCCL"}
        library = bench_ops.loaded("libnccl")
        function = getattr(library, {"suspend": "ncclCommSuspend", "resume": "ncclCommResume"}[action], None)
        if function is None:
            return {"seconds": None, "why": "the NCCL that is loaded has no ncclCommSuspend"}
        backends = [group._get_backend(self.device) for group in self.groups]
        if not all(hasattr(backend, "_comm_ptr") for backend in backends):
            return {"seconds": None, "why": "this torch does not tell its communicators' addresses"}
        self.sync()
        began = time.perf_counter()
        for backend in backends:
            flags = [ctypes.c_int(NCCL_SUSPEND_MEM)] if action == "suspend" else []
            code = function(ctypes.c_void_p(backend._comm_ptr()), *flags)
            if code != 0:
                raise JobError(f"NCCL's own {action} returned {code}")
        return {"seconds": time.perf_counter() - began, "why": ""}

    # ------------------------------------------------------------ pause and resume from inside

    def op_sync(self) -> None:
        """Waits for the device: a step boundary."""
        self.sync()

    def op_together(self, action: str) -> dict[str, float]:
        return self.tenancy.together(action)

    def op_tenant(self, action: str, timeout_ms: int = 60_000) -> dict[str, float]:
        return self.tenancy.tenant(action, timeout_ms)

    def op_stats(self, print_too: bool = False) -> Any:
        return self.tenancy.stats(print_too)

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
            self.link.reply(value={"capturing": True})
            self.link.receive(90)
        graph.replay()
        self.sync()
        return {"right": bool((y == 15.0).all().item())}

    # ------------------------------------------------------------ the end

    def op_exit(self) -> None:
        """Leaves torch.distributed in order."""
        if self.groups:
            with contextlib.suppress(Exception):
                self.op_disconnect()

    def steps(self) -> dict[str, Callable[..., Any]]:
        own = {name.removeprefix("op_"): getattr(self, name) for name in dir(self) if name.startswith("op_")}
        return {name: functools.partial(step, self) for name, step in bench_ops.OPS.items()} | own


def main() -> None:
    link = runner.connect()
    runner.serve(link, Rank(link).steps())


if __name__ == "__main__":
    main()
