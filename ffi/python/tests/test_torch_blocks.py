"""Memory that torch has cached, tensors over saved bytes, and what is said of torch's version."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
import types
from typing import Any, Dict, List

import pytest
from fake_torch import FakeTorch
from sublet import _torch
from sublet._errors import UsageError

MIB = 1 << 20


@pytest.fixture(params=["2.9.1", "2.11.0+cu130"])
def torch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeTorch:
    """A torch in this process, with no pools yet: one that asks the first pool of a list, and one that asks the last."""
    fake = FakeTorch(request.param)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(_torch, "_pools", None)
    monkeypatch.setattr(_torch, "_warned", set())
    return fake


def segment(address: int, *blocks: Any, pool: Any = (0, 0), device: int = 0) -> Dict[str, Any]:
    """A segment of a snapshot; each block is (MiB, state)."""
    described, at = [], address
    for size_mib, state in blocks:
        described.append(
            {
                "address": at,
                "size": size_mib * MIB,
                "requested_size": size_mib * MIB,
                "state": state,
            }
        )
        at += size_mib * MIB
    return {
        "device": device,
        "address": address,
        "total_size": at - address,
        "segment_pool_id": pool,
        "stream": 0,
        "blocks": described,
    }


def test_only_inactive_blocks_are_unused() -> None:
    segments = [
        segment(
            0x1000_0000,
            (2, "active_allocated"),
            (4, "inactive"),
            (2, "active_pending_free"),
            (1, "inactive"),
        ),
        segment(0x2000_0000, (20, "inactive")),
    ]
    assert _torch.inactive_ranges(segments, [(0, (0, 0))]) == [
        (0x1000_0000 + 2 * MIB, 4 * MIB),
        (0x1000_0000 + 8 * MIB, 1 * MIB),
        (0x2000_0000, 20 * MIB),
    ]


def test_neighbours_are_one_range_in_whatever_order_they_come() -> None:
    segments = [
        segment(0x1000_0000 + 2 * MIB, (2, "inactive")),
        segment(0x1000_0000, (2, "inactive")),
    ]
    assert _torch.inactive_ranges(segments, [(0, (0, 0))]) == [(0x1000_0000, 4 * MIB)]


def test_pools_of_graphs_and_strangers_are_left_out(torch: FakeTorch) -> None:
    with _torch.region_pool("weights", 0, False):
        weights = torch.serving()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()
    torch.segments = [
        segment(0x1000_0000, (2, "inactive")),
        segment(0x2000_0000, (2, "inactive"), pool=weights),
        segment(0x3000_0000, (2, "inactive"), pool=graph.pool_id),
        segment(0x4000_0000, (2, "inactive"), pool=(0, 77)),
        segment(0x5000_0000, (2, "inactive"), pool=weights, device=1),
    ]
    assert _torch.unused_blocks(None) == [(0x1000_0000, 2 * MIB), (0x2000_0000, 2 * MIB)]
    assert _torch.unused_blocks(["weights"]) == [(0x2000_0000, 2 * MIB)]


def test_reading_blocks_takes_time_linear_in_them() -> None:
    states = ["inactive", "active_allocated"] * 50

    def least_s(segments_count: int) -> float:
        segments = [segment(index << 32, *[(2, state) for state in states]) for index in range(segments_count)]
        took_s = []
        for _ in range(5):
            # This thread's own: others may have the processor meanwhile.
            began = time.thread_time()
            ranges = _torch.inactive_ranges(segments, [(0, (0, 0))])
            took_s.append(time.thread_time() - began)
            assert len(ranges) == 50 * segments_count
        return min(took_s)

    few, many = least_s(20), least_s(200)
    print(f"2,000 blocks in {few * 1000:.1f} ms, 20,000 in {many * 1000:.1f} ms")
    assert many < 40 * few, "ten times as many, which a quadratic way would take 100 times as long for"


def test_nothing_is_unused_before_torch_has_begun(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.is_initialized = lambda: False
    assert _torch.unused_blocks(None) == []
    assert _torch.reserved_bytes() == {}
    monkeypatch.delitem(sys.modules, "torch")
    assert _torch.unused_blocks(None) == []
    assert not _torch.is_usable()


def test_reserved_bytes_by_device(torch: FakeTorch) -> None:
    torch.segments = [
        segment(0x1000_0000, (2, "inactive")),
        segment(0x2000_0000, (20, "active_allocated")),
    ]
    assert _torch.reserved_bytes() == {0: 22 * MIB}


def test_a_capture_inside_a_region_uses_the_graphs_pool(torch: FakeTorch) -> None:
    with _torch.region_pool("weights", None, False):
        weights = torch.serving()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        assert torch.serving() == graph.pool_id
        graph.capture_end()
        assert torch.serving() == weights
        assert torch.serving(1) not in ((0, 0), weights), "no device named is every device"


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """A torch whose captures end in two parts, with no pools yet."""
    fake = FakeTorch("2.15.0+cu132")
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(_torch, "_pools", None)
    return fake


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_part_of_a_graph_that_depends_on_a_value_uses_the_graphs_pool_too(
    split: FakeTorch, all_threads: bool
) -> None:
    with _torch.region_pool("weights", 0, all_threads):
        graph = split.cuda.CUDAGraph()
        graph.capture_begin()
        with _torch.region_pool("kv", 0, False):
            graph.begin_capture_to_if_node(None)
            assert split.serving() == graph.pool_id
            graph.end_capture_to_conditional_node()
            assert split.serving() == graph.pool_id
        graph.capture_end()
        assert split.serving() not in (graph.pool_id, (0, 0))
    assert not any(split._C.lists.values())


def test_a_capture_that_is_ended_by_parts_has_ended(split: FakeTorch) -> None:
    _torch.follow_graphs()
    assert _torch._graphs is not None
    for by_parts in (True, False):
        graph = split.cuda.CUDAGraph()
        graph.capture_begin()
        assert [capture.graph for capture in _torch._graphs._captures] == [graph]
        if by_parts:
            graph.capture_end_pre()
            assert not _torch._graphs._captures, "what is allocated now is not of the graph"
            graph.capture_end_post()
        else:
            graph.capture_end()
        assert not _torch._graphs._captures
        graph.replay()


@pytest.mark.parametrize(
    "version, said",
    [
        ("2.8.0", None),
        ("2.15.0+cu132", None),
        ("2.7.1", "torch 2.7.1 was not tried"),
        ("2.16.0", "not tried"),
    ],
)
def test_versions_that_were_not_tried_are_named(torch: FakeTorch, version: str, said: Any) -> None:
    torch.__version__ = version
    found = _torch.support()
    assert found is None if said is None else said in (found or "")
    with pytest.warns(UserWarning, match="was not tried") if said else contextlib.nullcontext():
        _torch.check_supported()


def test_what_regions_need_and_torch_lacks_is_named(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.__version__ = "2.4.0"
    torch._C = types.SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="regions do not work, pausing everything does"):
        _torch.check_supported()
    with (
        pytest.raises(UsageError, match="torch 2.4.0 has no _cuda_begin"),
        _torch.region_pool("weights", None, False),
    ):
        pass


def test_other_allocators_are_named(torch: FakeTorch) -> None:
    torch.backend = "cudaMallocAsync"
    assert not _torch.is_usable()
    assert "cudaMallocAsync" in (_torch.support() or "")
    with pytest.raises(UsageError, match="cudaMallocAsync"):
        _torch.region_pool("weights", None, False)


def test_saved_bytes_are_taken_as_they_lie() -> None:
    saved = (ctypes.c_ubyte * 4)(1, 2, 3, 4)
    assert _torch._writable(memoryview(saved).cast("B").toreadonly()) is saved
    copied = _torch._writable(memoryview(b"abcd"))
    assert copied == bytearray(b"abcd"), "what came as a copy is not written to"


class Tensor:
    """A float tensor as far as its place and shape."""

    layout = "strided"

    def __init__(self, size: List[int], stride: List[int], is_cuda: bool = True) -> None:
        self._size, self._stride, self.is_cuda = size, stride, is_cuda
        self.device = "cuda:0" if is_cuda else "cpu"

    def size(self) -> List[int]:
        return self._size

    def stride(self) -> List[int]:
        return self._stride

    def numel(self) -> int:
        return math.prod(self._size)

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return 0x7000_0000


@pytest.fixture
def strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that knows tensors and nothing else."""
    monkeypatch.setitem(
        sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, strided="strided")
    )


@pytest.mark.usefixtures("strided")
@pytest.mark.parametrize(
    "size, stride, size_bytes",
    [
        ([6, 10], [10, 1], 240),
        ([10, 6], [1, 10], 240),
        ([4, 3], [10, 3], 4 * (3 * 10 + 2 * 3 + 1)),
        ([5, 8], [0, 1], 32),
        ([], [], 4),
        ([0, 10], [10, 1], 0),
    ],
)
def test_a_tensors_bytes_go_from_its_first_element_to_its_last(
    size: List[int], stride: List[int], size_bytes: int
) -> None:
    assert _torch.byte_range(Tensor(size, stride)) == (0x7000_0000, size_bytes)


@pytest.mark.usefixtures("strided")
def test_only_tensors_on_devices_have_saved_bytes() -> None:
    with pytest.raises(UsageError, match="not strided on cpu"):
        _torch.byte_range(Tensor([1], [1], is_cuda=False))
    with pytest.raises(UsageError, match="not str"):
        _torch.byte_range("weights")
