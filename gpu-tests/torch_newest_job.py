"""Do regions, pools, graphs and pauses work with the torch that is imported, whichever it is?

Processes on one GPU, one after the other:

- plain: regions with contents kept and discarded, in pools of their own, next to a program's pool and one of the pluggable
  allocator; a backward pass in a region for all threads; graphs captured in a region, one of them ended in parts where torch
  has such, replayed after pauses by tag and of everything, and refused while their tag is away;
- expandable: the same with expandable segments on;
- conditional: a graph with a part that depends on a value of the device, captured in a region. Without torch's calls for it
  the row says so.

Training, its pauses at random instants and torch's NCCL backends are `anytime_job.py`'s, and the suite `torch_newest` runs both.
Values are checked on the device after each resume. Bound: some 2 GiB travel each way in each process, 0.1 s; the run is
three starts of torch, some 10 s each.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import common
import runner
from common import GIB, MIB, Result
from compat_job import SLACK_BYTES, about, free_bytes, pattern
from suite import main, options, role_of

ROLES = ("plain", "expandable", "conditional")
KEPT_BYTES, LOST_BYTES = GIB, GIB
CYCLES = 3

parse = options(__doc__, 85, role=role_of(*ROLES))


# ---------------------------------------------------------------- in the children


def pool_of(tensor: Any) -> tuple[int, int] | None:
    """The pool of torch's allocator that a tensor's memory is of."""
    import torch

    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    return None


class Memory:
    """Memory of every kind, and what it should hold."""

    def __init__(self) -> None:
        import sublet
        import torch

        self.torch, self.sublet = torch, sublet
        with sublet.region("weights"):
            self.weights = pattern(KEPT_BYTES, 1)
        with sublet.region("cache", contents="discard"):
            self.cache = torch.full((LOST_BYTES // 4,), 3.0, device="cuda:0")
        self.own_pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self.own_pool):
            self.own = pattern(64 * MIB, 2)
        preloaded = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libsublet" in path)
        pluggable = torch.cuda.memory.CUDAPluggableAllocator(preloaded, "sublet_torch_malloc", "sublet_torch_free")
        self.plugged_pool = torch.cuda.MemPool(pluggable.allocator())
        with torch.cuda.use_mem_pool(self.plugged_pool):
            self.plugged = pattern(64 * MIB, 3)
        self.outside = pattern(64 * MIB, 4)
        with sublet.region("gradients", all_threads=True):
            self.trained = torch.ones(16 * MIB, device="cuda:0", requires_grad=True)
            (self.trained * 5.0).sum().backward()

    def pools(self) -> None:
        """Says whether each lies where it should."""
        pools = {name: pool_of(getattr(self, name)) for name in ("weights", "cache", "own", "outside")}
        gradient = pool_of(self.trained.grad)
        apart = len({*pools.values(), gradient}) == 5 and pools["outside"] == (0, 0)
        runner.row("each tag has a pool of its own", apart, f"{pools} {gradient}")
        runner.row("a program's pool stays its own", pools["own"] == tuple(self.own_pool.id), str(pools["own"]))

    def exact(self) -> list[str]:
        """Those that do not hold what they should, but for what a pause may lose."""
        torch = self.torch
        wanted = {"weights": (KEPT_BYTES, 1), "own": (64 * MIB, 2), "plugged": (64 * MIB, 3), "outside": (64 * MIB, 4)}
        wrong = [name for name, what in wanted.items() if not torch.equal(getattr(self, name), pattern(*what))]
        return wrong + ([] if bool((self.trained.grad == 5.0).all()) else ["gradient"])


class Graphs:
    """Two graphs of a region, the second ended in parts where torch has such; they read weights and a cache."""

    def __init__(self, memory: Memory) -> None:
        import sublet
        import torch

        self.memory, self.graphs, self.totals = memory, [], []
        # What is made on first use.
        (memory.weights[:MIB].float() + memory.cache[:MIB]).sum()
        for number in range(2):
            graph = torch.cuda.CUDAGraph()
            total = torch.zeros(1, device="cuda:0")
            with sublet.region("decode"):
                self._capture(graph, total, number)
            self.graphs.append(graph)
            self.totals.append(total)
        self.expected = [self.replay(number) for number in range(2)]

    def _capture(self, graph: Any, total: Any, number: int) -> None:
        import torch

        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            # A temporary of 256 MiB, which belongs to the graph's tag.
            large = self.memory.weights[: 64 * MIB].float() + self.memory.cache[: 64 * MIB]
            total.copy_(large.view(-1)[: MIB * (number + 1)].sum())
            del large
            if number and hasattr(graph, "capture_end_pre"):
                graph.capture_end_pre()
                graph.instantiate()
                graph.capture_end_post()
            else:
                graph.capture_end()
        torch.cuda.synchronize()

    def replay(self, number: int) -> float:
        self.totals[number].zero_()
        self.graphs[number].replay()
        return float(self.totals[number].item())

    def refused(self) -> list[str]:
        """What each replay is refused with; of one that was not, nothing."""
        import sublet

        said = []
        for graph in self.graphs:
            try:
                graph.replay()
                said.append("")
            except sublet.UsageError as error:
                said.append(str(error))
        return said


def memory_role(_args: Any) -> None:
    """Regions, pools and graphs."""
    import sublet
    import torch

    memory = Memory()
    memory.pools()
    graphs = Graphs(memory)
    before = free_bytes()
    for cycle in range(CYCLES):
        sublet.pause("cache")
        runner.row(f"{cycle}: the cache is given back", about(free_bytes() - before, LOST_BYTES))
        sublet.pause(["weights", "decode"])
        given = free_bytes() - before
        runner.row(f"{cycle}: weights and the graphs' memory too", given >= KEPT_BYTES + LOST_BYTES + 256 * MIB - SLACK_BYTES, str(given))
        said = graphs.refused()
        runner.row(f"{cycle}: replays are refused meanwhile", all("'decode'" in text for text in said), str(said))
        kept = sublet.host_copy(memory.weights[:MIB]).clone()
        sublet.resume(["weights", "decode", "cache"])
        runner.row(f"{cycle}: the host copy is exact", torch.equal(kept, pattern(KEPT_BYTES, 1)[:MIB].cpu()))
        memory.cache.fill_(3.0)
        wrong = memory.exact()
        runner.row(f"{cycle}: all is exact", not wrong, str(wrong))
        again = [graphs.replay(number) for number in range(2)]
        runner.row(f"{cycle}: the graphs replay", again == graphs.expected, f"{again} for {graphs.expected}")
        torch.cuda.synchronize()
        sublet.pause()
        sublet.resume()
        memory.cache.fill_(3.0)
        wrong, again = memory.exact(), [graphs.replay(number) for number in range(2)]
        runner.row(f"{cycle}: a pause of everything", not wrong and again == graphs.expected, f"{wrong} {again}")


def conditional_role(_args: Any) -> None:
    """A part of a graph that depends on a value of the device."""
    import sublet
    import torch

    graph = torch.cuda.CUDAGraph()
    if not hasattr(graph, "begin_capture_to_if_node"):
        runner.row("a graph with a condition: this torch has none", True)
        return
    decides, total = torch.ones((), dtype=torch.bool, device="cuda:0"), torch.zeros(1, device="cuda:0")
    source, stream = torch.full((16 * MIB,), 2.0, device="cuda:0"), torch.cuda.Stream()
    (source * 2.0).sum()
    torch.cuda.synchronize()
    with sublet.region("decode"), torch.cuda.stream(stream):
        graph.capture_begin()
        graph.begin_capture_to_if_node(decides)
        part = source * 2.0
        total.copy_(part[:MIB].sum())
        graph.end_capture_to_conditional_node()
        graph.capture_end()
        torch.cuda.synchronize()
        in_region = torch.ones(16 * MIB, device="cuda:0")
    runner.row("its memory is of the graph's pool", pool_of(part) == tuple(graph.pool()) != pool_of(in_region), str(pool_of(part)))
    del part
    for cycle in range(CYCLES):
        sublet.pause("decode")
        sublet.resume("decode")
        found = []
        for value in (True, False):
            decides.fill_(value)
            total.zero_()
            graph.replay()
            found.append(float(total.item()))
        runner.row(f"{cycle}: it replays, with and without", found == [4.0 * MIB, 0.0], str(found))


# ---------------------------------------------------------------- in the parent


def body(args: Any, result: Result, work: Path) -> None:
    """The processes, one after the other."""
    common.touch_host_memory(3 * KEPT_BYTES / 1e9)
    site = runner.package(work, "sublet")
    limit_s = (args.deadline - 10) / len(ROLES)
    for role in ROLES:
        command = [__file__, "--role", role, "--deadline", str(limit_s + 5)]
        env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if role == "expandable" else {}
        how = {"tenant": f"newest-{role}-{os.getpid()}", "env": env, "sites": [site]}
        runner.Child(work, role, command, **how).finish(result, limit_s, prefix=role)
    runner.verdicts(result)


if __name__ == "__main__":
    # A version that was not tried is what this is for.
    warnings.filterwarnings("ignore", message=".*was not tried")
    main(parse, "torch_newest", body, {"plain": memory_role, "expandable": memory_role, "conditional": conditional_role})
