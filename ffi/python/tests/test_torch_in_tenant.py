"""Regions and pauses of a program that uses torch, with the simulated driver's memory and the model of torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Dict, List

import pytest

import sublet
from fake_torch import FakeTorch, other_thread
from simdriver import MIB, Memory, allocate
from sublet.compat.torch_memory_saver import TorchMemorySaver

tenant = pytest.mark.tenant("train")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    """A torch in this process, which is one of a tenant."""
    fake = FakeTorch(devices=1)
    monkeypatch.setitem(sys.modules, "torch", fake)
    yield fake
    # Questions that come later are answered with nothing.
    fake.cuda.is_initialized = lambda: False


def half_used(torch: FakeTorch, memory: Memory, pool: Any) -> None:
    """Makes `memory` a segment of `pool` whose first half is in use and whose second half is cached."""
    half_bytes = memory.size_bytes // 2
    torch.segments.append(
        {
            "device": memory.device,
            "total_size": memory.size_bytes,
            "segment_pool_id": pool,
            "blocks": [
                {"address": memory.address, "size": half_bytes, "state": "active_allocated"},
                {"address": memory.address + half_bytes, "size": half_bytes, "state": "inactive"},
            ],
        }
    )


def saved_bytes(report: sublet.Report) -> int:
    """How much a pause copied."""
    members: List[Dict[str, Any]] = [
        member
        for phase in report.details["phases"]
        if phase["phase"] == "prepare"
        for member in phase["members"]
    ]
    return sum(member["report"]["bytes"] for member in members)


@tenant
def test_what_torch_has_cached_in_a_region_is_given_back_without_a_copy(torch: FakeTorch) -> None:
    with sublet.region("weights"):
        memory = allocate(8 * MIB, fill=7)
        half_used(torch, memory, torch.serving())
    assert torch.serving() == (0, 0)
    report = sublet.pause("weights")
    assert saved_bytes(report) == 4 * MIB
    assert bytes(sublet.host_copy(Memory(memory.address, 4 * MIB, 0))) == b"\x07" * (4 * MIB)
    sublet.resume("weights")
    assert memory.read()[: 4 * MIB] == b"\x07" * (4 * MIB)


@tenant
def test_a_pause_from_outside_asks_too(torch: FakeTorch) -> None:
    with sublet.region("weights"):
        in_region = allocate(8 * MIB, fill=7)
        half_used(torch, in_region, torch.serving())
    plain = allocate(8 * MIB, fill=8)
    half_used(torch, plain, (0, 0))
    graphs = allocate(8 * MIB, fill=9)
    half_used(torch, graphs, (77, 0))
    for action in ("pause", "resume"):
        command = [sys.executable, "-m", "sublet", action, "train"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert sublet.stats()["last_pause"] is not None
    assert plain.read()[: 4 * MIB] == b"\x08" * (4 * MIB)
    assert in_region.read()[: 4 * MIB] == b"\x07" * (4 * MIB)
    assert graphs.read() == b"\x09" * (8 * MIB), "a graph may read what counts as free in its pool"
    assert b"\x08" not in plain.read()[4 * MIB :], "what was cached came back without its bytes"


@tenant
@pytest.mark.parametrize("changes", ["on", "off"])
def test_a_program_that_never_calls_the_package_is_asked_all_the_same(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    from sublet._autoload import torch_was_imported

    def looks() -> bool:
        raise AssertionError("a child that is forked later could use no device")

    available = torch.cuda.is_available
    torch.cuda.is_initialized, torch.cuda.is_available = lambda: False, looks
    monkeypatch.setenv("SUBLET_CHANGES", changes)
    torch_was_imported()
    torch.cuda.is_initialized, torch.cuda.is_available = lambda: True, available
    plain = allocate(8 * MIB, fill=8)
    half_used(torch, plain, (0, 0))
    for action in ("pause", "resume"):
        command = [sys.executable, "-m", "sublet", action, "train"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert plain.read()[: 4 * MIB] == b"\x08" * (4 * MIB)
    assert (b"\x08" in plain.read()[4 * MIB :]) == (changes == "off")


def test_what_torch_calls_does_nothing_outside_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    from sublet import _library
    from sublet._autoload import torch_was_imported

    monkeypatch.delenv("SUBLET_TENANT", raising=False)
    monkeypatch.setattr(_library, "answer_later_pauses", lambda library: pytest.fail("asked"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_was_imported()


@tenant
def test_a_region_for_all_threads_serves_another_thread_from_its_pool_and_with_its_tag(
    torch: FakeTorch,
) -> None:
    with other_thread() as backward:
        with sublet.region("step", "discard", all_threads=True):
            pool = backward.does(torch.serving)
            memory = backward.does(lambda: allocate(4 * MIB))
        assert backward.does(torch.serving) == (0, 0) != pool
    classes = [entry for device in sublet.stats()["pool"]["devices"] for entry in device["memory"]]
    assert {entry["tag"]: entry["own_bytes"] for entry in classes}["step"] == memory.size_bytes


@tenant
def test_a_torch_without_pools_is_refused_before_anything_is_begun(torch: FakeTorch) -> None:
    torch.backend = "cudaMallocAsync"
    with pytest.raises(sublet.UsageError, match="cudaMallocAsync"), sublet.region("weights"):
        pass
    memory = allocate(2 * MIB)
    classes = [entry for device in sublet.stats()["pool"]["devices"] for entry in device["memory"]]
    assert {entry["tag"] for entry in classes} == {None} and memory.size_bytes


@tenant
def test_replay_of_a_graph_whose_tag_is_away_is_refused_by_the_tags_name(torch: FakeTorch) -> None:
    graph, other, plain = (torch.cuda.CUDAGraph() for _ in range(3))
    with sublet.region("weights"):
        allocate(4 * MIB)
    with sublet.region("decode"):
        graph.capture_begin()
        memory = allocate(4 * MIB)
        half_used(torch, memory, graph.pool_id)
        graph.capture_end()
    # Captured outside any region, into the pool that has memory of the tag.
    other.capture_begin(pool=graph.pool())
    other.capture_end()
    plain.capture_begin()
    plain.capture_end()
    graphs = [graph, other, plain]
    for each in graphs:
        each.replay()
    sublet.pause("weights")
    for each in graphs:
        each.replay()
    sublet.pause("decode")
    for each in graphs[:2]:
        with pytest.raises(sublet.UsageError, match="'decode', which is paused.*resume") as refused:
            each.replay()
        assert refused.value.tags == ("decode",)
    plain.replay()
    command = [sys.executable, "-m", "sublet", "resume", "train", "--tag", "decode"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for each in graphs:
        each.replay()
    assert [each.replays for each in graphs] == [3, 3, 4]


@tenant
def test_regions_inside_a_capture_count_and_a_pool_without_memory_does_not(torch: FakeTorch) -> None:
    graph, empty = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with sublet.region("outer"):
        empty.capture_begin()
        empty.capture_end()
    graph.capture_begin()
    with sublet.region("inner"):
        half_used(torch, allocate(4 * MIB), graph.pool_id)
    with other_thread() as thread:

        def elsewhere() -> None:
            with sublet.region("elsewhere"):
                allocate(4 * MIB)

        thread.does(elsewhere)
    graph.capture_end()
    sublet.pause(["outer", "elsewhere"])
    graph.replay()
    empty.replay()
    sublet.pause("inner")
    with pytest.raises(sublet.UsageError, match="belongs to tag 'inner'"):
        graph.replay()
    sublet.resume()
    graph.replay()


@tenant
def test_capture_that_failed_leaves_a_graph_that_is_not_asked_about(torch: FakeTorch) -> None:
    graph = torch.cuda.CUDAGraph()
    with sublet.region("decode"):
        graph.capture_begin()
        allocate(2 * MIB)
        # The pool is not on the list that torch's end of a capture takes it off.
        torch._C._cuda_endAllocateToPool(0, graph.pool_id)
        with pytest.raises(RuntimeError, match="not currently recording"):
            graph.capture_end()
    sublet.pause("decode")
    graph.replay()


@tenant
def test_graph_of_the_memory_saver_is_not_replayed_while_its_tag_is_away(torch: FakeTorch) -> None:
    @contextlib.contextmanager
    def capture(graph: Any, **given: Any) -> Iterator[None]:
        graph.capture_begin(given["pool"])
        yield
        graph.capture_end()

    setattr(torch.cuda, "graph", capture)
    saver, graph = TorchMemorySaver(), torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        half_used(torch, allocate(4 * MIB), graph.pool_id)
    graph.replay()
    saver.pause("graph")
    with pytest.raises(sublet.UsageError, match="tms/graph/discard"):
        graph.replay()
    saver.resume("graph")
    graph.replay()
    assert graph.replays == 2
