"""Steps of rank.py that measure: all-reduce bandwidth, launches, allocations.

Bounds: 18 NVLinks carry about 450 GB/s each way, less protocol;
a launch costs the host 2 to 5 us; cudaMalloc of 2 MiB costs the driver some 50 to 100 us.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from typing import Any

import common

#: All-reduces in the graph that `calls` launches.
GRAPH_CALLS = 4


def all_reduce(rank: Any, mib: int, iterations: int, repeats: int) -> dict[str, Any]:
    """Bus bandwidth of all-reduce, GB/s, one figure a repeat."""
    torch, dist, group = rank.torch, rank.dist, rank.groups[0]
    data = torch.zeros(mib * common.MIB // 4, dtype=torch.float32, device=rank.device)
    for _ in range(5):
        dist.all_reduce(data, group=group)
    rank.sync()
    figures = []
    for _ in range(repeats):
        dist.all_reduce(data[:256], group=group)  # the ranks start together
        rank.sync()
        began = time.perf_counter()
        for _ in range(iterations):
            dist.all_reduce(data, group=group)
        rank.sync()
        seconds = (time.perf_counter() - began) / iterations
        figures.append(data.numel() * 4 / seconds * 2 * (rank.world - 1) / rank.world / 1e9)
    return {"bus_gb_s": figures}


def launches(rank: Any, count: int, repeats: int) -> dict[str, Any]:
    """Launches a second: one torch operation on one element, a graph of one kernel; and questions whether an event is over."""
    torch = rank.torch
    x = torch.zeros(1, device=rank.device)

    def rate(once: Callable[[], Any]) -> float:
        rank.sync()
        began = time.perf_counter()
        for _ in range(count):
            once()
        rank.sync()
        return count / (time.perf_counter() - began)

    def add() -> None:
        x.add_(1)

    answer: dict[str, Any] = {"op_per_s": [], "graph_per_s": [], "query_per_s": []}
    graph, event = None, None
    if rank.device.type == "cuda":
        x.add_(1)
        rank.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        event = torch.cuda.Event()
        event.record()
    rate(add)
    for _ in range(repeats):
        answer["op_per_s"].append(rate(add))
        if graph is not None:
            answer["graph_per_s"].append(rate(graph.replay))
        if event is not None:
            answer["query_per_s"].append(rate(event.query))
    return answer


def calls(rank: Any, sizes_bytes: list[int], count: int) -> dict[str, float]:
    """All-reduce calls a second from this rank's host thread, by message size; then in a graph of `GRAPH_CALLS`."""
    torch, dist, group = rank.torch, rank.dist, rank.groups[0]
    answer: dict[str, float] = {}
    data = rank.bench.setdefault("calls", torch.zeros(1 << 18, dtype=torch.float32, device=rank.device))

    def rate(once: Callable[[], Any], times: int) -> float:
        dist.all_reduce(data[:2], group=group)  # the ranks start together
        rank.sync()
        began = time.perf_counter()
        for _ in range(times):
            once()
        rank.sync()
        return times / (time.perf_counter() - began)

    for size in sizes_bytes:
        part = data[: size // 4]
        answer[f"all_reduce_{size}_bytes_calls_per_s"] = rate(lambda part=part: dist.all_reduce(part, group=group), count)
    if rank.device.type == "cuda":
        graph = rank.bench.get("calls_graph")
        if graph is None:
            graph = rank.bench["calls_graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(GRAPH_CALLS):
                    dist.all_reduce(data[:256], group=group)
            graph.replay()
        answer["graph_with_all_reduce_launches_per_s"] = rate(graph.replay, count)
    return answer


def loaded(name: str) -> ctypes.CDLL:
    """A library that torch has loaded, such as `libcudart`."""
    with open("/proc/self/maps") as maps:
        found = re.search(rf"\S+/{name}\.so\.[\w.]+", maps.read())
    if not found:
        raise common.JobError(f"no {name} is loaded in this process")
    return ctypes.CDLL(found.group(0))


def nccl_version() -> str:
    """Of the NCCL that is loaded. `torch.cuda.nccl.version` names the one that torch was built with."""
    code = ctypes.c_int(0)
    if loaded("libnccl").ncclGetVersion(ctypes.byref(code)) != 0:
        raise common.JobError("NCCL does not say its version")
    return f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}"


def mallocs(rank: Any, sizes_mib: list[int], pairs: int, repeats: int) -> dict[str, Any]:
    """cudaMalloc and cudaFree pairs a second, by size."""
    if rank.device.type != "cuda":
        return {}
    lib = loaded("libcudart")
    lib.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    lib.cudaFree.argtypes = [ctypes.c_void_p]
    pointer, answer = ctypes.c_void_p(), {}

    def rate(size: int, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            if lib.cudaMalloc(ctypes.byref(pointer), size) != 0 or lib.cudaFree(pointer) != 0:
                raise common.JobError(f"cudaMalloc or cudaFree of {size} bytes failed")
        return count / (time.perf_counter() - began)

    for mib in sizes_mib:
        rank.sync()
        rate(mib * common.MIB, max(1, pairs // 10))
        answer[f"{mib}_mib_per_s"] = [rate(mib * common.MIB, pairs) for _ in range(repeats)]
    return answer


OPS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "launches": launches,
    "calls": calls,
    "mallocs": mallocs,
}
