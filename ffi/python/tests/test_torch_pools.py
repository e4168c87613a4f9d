"""Which pool serves which thread while regions are open, by the rules of torch's allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import List, Set

import pytest
from fake_torch import FakeTorch, PoolId, other_thread
from sublet._errors import UsageError
from sublet._torch_pools import DEFAULT_POOL, ExpandableSegments, Pools, with_expandable


@pytest.fixture(params=["2.9.1", "2.11.0", "2.15.0"])
def torch(request: pytest.FixtureRequest) -> FakeTorch:
    """Of several pools the first serves in the first version, the last in the others."""
    return FakeTorch(request.param)


def last_serves(torch: FakeTorch) -> bool:
    return torch.__version__ != "2.9.1"


@pytest.fixture
def pools(torch: FakeTorch) -> Pools:
    return Pools(torch)


def served(pools: Pools, torch: FakeTorch, tag: str) -> PoolId:
    """The pool that a region of `tag` has on device 0."""
    with pools.region(tag, [0]):
        return torch.serving()


def all_lists_empty(torch: FakeTorch) -> bool:
    return not any(torch._C.lists.values())


def test_a_region_has_one_pool_for_the_life_of_the_process(torch: FakeTorch, pools: Pools) -> None:
    first = served(pools, torch, "weights")
    assert first != DEFAULT_POOL
    assert torch.serving() == DEFAULT_POOL
    assert served(pools, torch, "weights") == first
    assert served(pools, torch, "kv") != first
    assert torch._C.uses[0, first] == 1, "a use of it stays, or empty_cache() would end it"


def test_the_innermost_region_serves_whichever_torch_asks_first(
    torch: FakeTorch, pools: Pools
) -> None:
    with pools.region("weights", [0]):
        weights = torch.serving()
        with pools.region("kv", [0]):
            kv = torch.serving()
            with pools.region("weights", [0]):
                assert torch.serving() == weights, (
                    "the same tag in the same thread is the same pool"
                )
            assert torch.serving() == kv
        assert torch.serving() == weights
    assert len({weights, kv, DEFAULT_POOL}) == 3
    assert all_lists_empty(torch)


def test_a_region_of_one_device_hides_the_outer_one_on_all(torch: FakeTorch, pools: Pools) -> None:
    with pools.region("weights", [0, 1]):
        assert torch.serving(1) != DEFAULT_POOL
        with pools.region("kv", [0]):
            assert torch.serving(0) != DEFAULT_POOL
            assert torch.serving(1) == DEFAULT_POOL
        assert torch.serving(1) != DEFAULT_POOL


def test_memory_of_no_tag_comes_from_the_default_pool(torch: FakeTorch, pools: Pools) -> None:
    with pools.region("weights", [0]):
        with pools.region(None, [0]):
            assert torch.serving() == DEFAULT_POOL
        assert torch.serving() != DEFAULT_POOL


def test_an_exception_ends_the_region(torch: FakeTorch, pools: Pools) -> None:
    with pools.region("weights", [0]):
        with pytest.raises(ValueError), pools.region("kv", [0]):
            raise ValueError
        assert torch.serving() == served(pools, torch, "weights")
    assert all_lists_empty(torch)


def test_two_threads_in_one_region_do_not_share_a_pool(torch: FakeTorch, pools: Pools) -> None:
    with other_thread() as other, pools.region("weights", [0]):
        here = torch.serving()
        assert other.does(torch.serving) == DEFAULT_POOL, "a region is a thread's own"
        there = other.does(lambda: served(pools, torch, "weights"))
        assert there not in (here, DEFAULT_POOL)
        assert other.does(lambda: served(pools, torch, "weights")) == there


def test_a_generator_may_end_its_region_after_one_that_began_later(
    torch: FakeTorch, pools: Pools
) -> None:
    def generator() -> Iterator[PoolId]:
        with pools.region("weights", [0]):
            yield torch.serving()

    weights = generator()
    first = next(weights)
    with pools.region("kv", [0]):
        kv = torch.serving()
        assert list(weights) == []
        assert torch.serving() == kv
    assert torch.serving() == DEFAULT_POOL
    assert served(pools, torch, "weights") == first
    assert all_lists_empty(torch)


def test_a_region_that_ends_in_another_thread_says_so(torch: FakeTorch, pools: Pools) -> None:
    with other_thread() as other, contextlib.ExitStack() as outer:
        outer.enter_context(pools.region("weights", [0]))
        inner = contextlib.ExitStack()
        inner.enter_context(pools.region("kv", [0]))
        with pytest.raises(UsageError, match="end regions in the thread that began them"):
            other.does(inner.close)


def test_a_region_for_all_threads_serves_those_without_one(torch: FakeTorch, pools: Pools) -> None:
    with other_thread() as backward, other_thread() as loader:
        loader_region, data = contextlib.ExitStack(), DEFAULT_POOL

        def load() -> PoolId:
            loader_region.enter_context(pools.region("data", [0]))
            return torch.serving()

        if not last_serves(torch):
            data = loader.does(load)
        with pools.everyone("step", [0]):
            step = backward.does(torch.serving)
            assert step != DEFAULT_POOL and torch.serving() == step
            if last_serves(torch):
                data = loader.does(load)
            assert loader.does(torch.serving) == data != step, "a region of one thread comes before"
            with pools.region("weights", [0]):
                assert torch.serving() not in (step, data, DEFAULT_POOL), (
                    "one that begins later counts too"
                )
                assert backward.does(torch.serving) in set(pools._made["step", 0])
            with pools.region(None, [0]):
                assert torch.serving() not in set(pools._made["step", 0])
        loader.does(loader_region.close)
    assert torch.serving() == DEFAULT_POOL
    assert all_lists_empty(torch)


def test_a_region_for_all_threads_takes_nothing_from_others(torch: FakeTorch, pools: Pools) -> None:
    if not last_serves(torch):
        return  # It is the last that is asked.
    with other_thread() as loader:
        region = contextlib.ExitStack()
        loader.does(lambda: region.enter_context(pools.region("data", [0])))
        with pytest.raises(UsageError, match="another thread has region 'data' open; begin the one for all threads before it"):
            with pools.everyone("step", [0]):
                pass
        loader.does(region.close)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with pytest.raises(UsageError, match="a graph is under capture"), pools.everyone("step", [0]):
        pass
    graph.capture_end()
    with pools.region("weights", [0]):
        weights = torch.serving()
        with pools.everyone("step", [0]):
            assert torch.serving() == weights, "a region of this thread comes before"
    assert all_lists_empty(torch)


def test_no_instant_leaves_all_threads_without_their_region(torch: FakeTorch, pools: Pools) -> None:
    seen: Set[PoolId] = set()
    with other_thread() as backward, pools.everyone("step", [0]):
        torch._C.meanwhile = lambda: seen.add(backward.does(torch.serving))
        with pools.region("weights", [0]), pools.region("kv", [0]):
            pass
        torch._C.meanwhile = lambda: None
    assert seen and seen <= set(pools._made["step", 0])


def test_a_second_region_for_all_threads_is_refused(torch: FakeTorch, pools: Pools) -> None:
    with (
        pools.everyone("step", [0]),
        pytest.raises(UsageError, match="that of 'step' is open"),
    ):
        with pools.everyone("other", [0]):
            pass
    with pools.everyone("other", [0]):
        pass


@pytest.mark.parametrize("for_all", [False, True])
def test_a_graph_captured_in_a_region_has_its_own_pool(
    torch: FakeTorch, pools: Pools, for_all: bool
) -> None:
    with pools.everyone("step", [0]) if for_all else pools.region("step", [0]):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        pools.capture_begun()
        assert torch.serving() == graph.pool_id
        with pools.region("kv", [0]):
            assert torch.serving() == graph.pool_id
        assert torch.serving() == graph.pool_id
        graph.capture_end()
        pools.capture_ended()
        assert torch.serving() in set(pools._made["step", 0])
    assert all_lists_empty(torch)


def test_a_region_that_begins_in_a_capture_and_outlives_it_serves_then(torch: FakeTorch, pools: Pools) -> None:
    graph, region = torch.cuda.CUDAGraph(), contextlib.ExitStack()
    graph.capture_begin()
    pools.capture_begun()
    region.enter_context(pools.region("kv", [0]))
    assert torch.serving() == graph.pool_id
    graph.capture_end()
    pools.capture_ended()
    assert torch.serving() in set(pools._made["kv", 0])
    region.close()
    assert all_lists_empty(torch)


def test_pools_are_found_by_tag(torch: FakeTorch, pools: Pools) -> None:
    weights, kv = served(pools, torch, "weights"), served(pools, torch, "kv")
    assert pools.of(["kv", "unknown"]) == {(0, kv)}
    assert pools.of(None) == {(0, DEFAULT_POOL), (1, DEFAULT_POOL), (0, weights), (0, kv)}


@pytest.mark.parametrize(
    "version, switched", [("2.8.0", True), ("2.10.0", True), ("2.11.0", False), ("2.12.0", False)]
)
def test_expandable_segments_are_off_inside_where_the_version_needs_it(
    version: str, switched: bool
) -> None:
    torch = FakeTorch(version)
    torch._C.settings = before = "max_split_size_mb:64,expandable_segments:True"
    pools = Pools(torch)
    inside: List[str] = []
    with pools.region("weights", [0]):
        with pools.region("kv", [0]):
            inside.append(torch._C.settings)
        inside.append(torch._C.settings)
    expected = "max_split_size_mb:64,expandable_segments:False" if switched else before
    assert inside == [expected, expected]
    assert torch._C.settings == before


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0"])
def test_expandable_segments_are_off_in_a_plain_region_of_any_version(version: str) -> None:
    torch = FakeTorch(version)
    torch._C.settings = before = "expandable_segments:True"
    pools = Pools(torch)
    with pools.region("weights", [0]):
        with pools.region("base", [0], plain=True), pools.region("base", [0], plain=True):
            assert torch._C.settings == "expandable_segments:False"
    assert torch._C.settings == before


def test_settings_that_are_off_are_not_touched() -> None:
    torch = FakeTorch("2.8.0")
    torch._C.settings = "max_split_size_mb:64"
    with Pools(torch).region("weights", [0]):
        assert torch._C.settings == "max_split_size_mb:64"
    assert ExpandableSegments(torch)._needed


def test_the_other_settings_survive() -> None:
    text = "roundup_power2_divisions:[256:1,>:8],expandable_segments:True,max_split_size_mb:64"
    off = "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:64,expandable_segments:False"
    assert with_expandable(text, False) == off
    assert with_expandable("", True) == "expandable_segments:True"
