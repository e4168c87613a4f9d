"""Pausing and resuming from inside a process, by tag and as a whole."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, Optional

import pytest

import sublet
from package_stage import Stage
from simdriver import MIB, SUCCESS, Capture, Memory, allocate, call, free_bytes
from sublet import _pausing

tenant = pytest.mark.tenant("train")


def in_region(tag: str, contents: Any, size_bytes: int = 4 * MIB, fill: int = 7) -> Memory:
    with sublet.region(tag, contents):
        return allocate(size_bytes, fill)


def bytes_by_tag() -> dict[str, int]:
    """Own bytes of this process, by tag; those without one under the empty tag."""
    found: dict[str, int] = {}
    for device in sublet.stats()["pool"]["devices"]:
        for entry in device["memory"]:
            tag = entry["tag"] or ""
            found[tag] = found.get(tag, 0) + entry["own_bytes"]
    return found


@tenant
def test_kept_tag_comes_back_with_its_bytes_and_discarded_one_without() -> None:
    weights = in_region("weights", "keep", 4 * MIB, fill=7)
    cache = in_region("kv", "discard", 8 * MIB, fill=8)
    other = allocate(2 * MIB, fill=9)
    before_bytes = free_bytes()

    report = sublet.pause(["weights", "kv"])
    assert report.outcome == "completed"
    assert free_bytes() == before_bytes + 12 * MIB
    assert sublet.is_paused("weights") and sublet.is_paused("kv") and not sublet.is_paused()
    # The process runs on with what was not named.
    assert other.read() == b"\x09" * (2 * MIB)
    assert sublet.pause(["weights", "kv"]).outcome == "already"

    assert sublet.resume(["weights", "kv"]).outcome == "completed"
    assert free_bytes() == before_bytes
    assert weights.read() == b"\x07" * (4 * MIB)
    assert len(cache.read()) == 8 * MIB
    assert not sublet.is_paused("weights")
    assert sublet.resume("weights").outcome == "already"


@tenant
def test_one_tag_leaves_and_the_other_stays_usable() -> None:
    weights, cache = in_region("weights", "keep"), in_region("kv", "keep", fill=8)
    sublet.pause("kv")
    assert (sublet.is_paused("kv"), sublet.is_paused("weights")) == (True, False)
    assert weights.read() == b"\x07" * (4 * MIB)
    weights.write(b"\x01")
    sublet.resume()
    assert cache.read() == b"\x08" * (4 * MIB)
    assert weights.read()[:2] == b"\x01\x07"


@tenant
def test_whole_pause_takes_everything_and_leaves_tags_away_that_were() -> None:
    weights, cache = in_region("weights", "keep"), in_region("kv", "keep", fill=8)
    other = allocate(2 * MIB, fill=9)
    sublet.pause("kv")
    sublet.pause()
    assert sublet.is_paused()
    assert sublet.resume().outcome == "completed"
    assert not sublet.is_paused()
    assert sublet.is_paused("kv") and not sublet.is_paused("weights")
    assert weights.read() == b"\x07" * (4 * MIB) and other.read() == b"\x09" * (2 * MIB)
    sublet.resume()
    assert cache.read() == b"\x08" * (4 * MIB)


@tenant
def test_resume_of_a_tag_lets_a_wholly_paused_tenant_run() -> None:
    weights, cache = in_region("weights", "keep"), in_region("kv", "keep", fill=8)
    other = allocate(2 * MIB, fill=9)
    sublet.pause()
    sublet.resume("weights")
    assert not sublet.is_paused() and not sublet.is_paused("weights") and sublet.is_paused("kv")
    assert weights.read() == b"\x07" * (4 * MIB) and other.read() == b"\x09" * (2 * MIB)
    sublet.resume("kv")
    assert cache.read() == b"\x08" * (4 * MIB)


@tenant
def test_resume_of_what_runs_is_a_success() -> None:
    allocate(2 * MIB)
    assert sublet.resume().outcome == "already"
    in_region("kv", "keep")
    for tags in (None, "kv"):
        assert sublet.resume(tags).outcome == "already"


@tenant
def test_unknown_tag_is_named_with_those_there_are() -> None:
    in_region("weights", "keep"), in_region("kv", "discard")
    for call in (sublet.pause, sublet.resume):
        with pytest.raises(sublet.UsageError, match="caches") as caught:
            call("caches")
        assert set(caught.value.tags) == {"weights", "kv"}
    with pytest.raises(sublet.UsageError, match="kv, weights") as caught:
        sublet.is_paused("caches")
    assert set(caught.value.tags) == {"weights", "kv"}


@tenant
def test_nccls_tag_is_no_regions_and_goes_in_a_call_of_its_own() -> None:
    in_region("kv", "keep")
    for call in (sublet.pause, sublet.resume):
        # No communicator is there; one that were made would wait.
        assert [call("nccl").outcome for _ in range(2)] == ["completed", "already"]
        with pytest.raises(sublet.UsageError, match="in a call of its own"):
            call(["kv", "nccl"])
    assert sublet.Tenant().pause(["kv", "nccl"]).outcome == "completed"
    assert sublet.Tenant().resume(["kv", "nccl"]).outcome == "completed"
    with pytest.raises(sublet.UsageError, match="nccl's own memory"), sublet.region("nccl"):
        pass


@tenant
def test_innermost_region_counts_and_memory_outside_has_no_tag() -> None:
    with sublet.region("outer"):
        allocate(2 * MIB)
        with sublet.region("inner", "discard"):
            allocate(4 * MIB)
        allocate(8 * MIB)
    allocate(16 * MIB)
    assert bytes_by_tag() == {"outer": 10 * MIB, "inner": 4 * MIB, "": 16 * MIB}


@tenant
def test_region_is_the_threads_own_unless_it_is_for_all() -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=allocate, args=(2 * MIB,))
        thread.start()
        thread.join()

    with sublet.region("mine"):
        elsewhere()
    assert bytes_by_tag() == {"": 2 * MIB}
    with sublet.region("all", all_threads=True):
        elsewhere()
    elsewhere()
    assert bytes_by_tag() == {"": 4 * MIB, "all": 2 * MIB}


@tenant
def test_region_of_one_device_leaves_other_devices_alone() -> None:
    with sublet.region("kv", device=1):
        allocate(2 * MIB, device=0)
        allocate(4 * MIB, device=1)
    assert bytes_by_tag() == {"": 2 * MIB, "kv": 4 * MIB}


@tenant
def test_decorated_function_runs_in_the_region_each_time() -> None:
    @sublet.region("weights")
    def load(depth: int) -> list[Memory]:
        """Loads."""
        rest = load(depth - 1) if depth else []
        return [allocate(2 * MIB), *rest]

    assert load.__doc__ == "Loads."
    assert len(load(2)) == 3
    allocate(2 * MIB)
    assert bytes_by_tag() == {"weights": 6 * MIB, "": 2 * MIB}


@tenant
def test_exception_leaves_the_region() -> None:
    with pytest.raises(ZeroDivisionError):
        with sublet.region("kv"):
            raise ZeroDivisionError
    allocate(2 * MIB)
    assert bytes_by_tag() == {"": 2 * MIB}


@tenant
def test_region_that_ends_in_another_order_is_refused_and_over_all_the_same() -> None:
    outer, inner = sublet.region("outer"), sublet.region("inner")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(sublet.UsageError, match="'outer' is not the innermost"):
        outer.__exit__(None, None, None)
    allocate(2 * MIB)
    inner.__exit__(None, None, None)
    allocate(4 * MIB)
    assert bytes_by_tag() == {"inner": 2 * MIB, "": 4 * MIB}
    with pytest.raises(sublet.UsageError, match="'outer' is not the innermost"):
        outer.__exit__(None, None, None)


@tenant
def test_region_that_ends_on_another_thread_is_over_when_its_own_looks() -> None:
    def suspended() -> Generator[None, None, None]:
        with sublet.region("kv"):
            allocate(2 * MIB)
            yield

    def elsewhere(call: Callable[[], object]) -> Optional[BaseException]:
        caught: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except sublet.UsageError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return caught[0] if caught else None

    generator = suspended()
    next(generator)
    assert "not the innermost" in str(elsewhere(generator.close))
    # The thread that entered it may be about to allocate.
    assert "was left on another thread" in str(elsewhere(lambda: sublet.pause("kv")))
    assert sublet.pause("kv").freed_bytes == 2 * MIB
    sublet.resume("kv")
    allocate(4 * MIB)
    assert bytes_by_tag() == {"kv": 2 * MIB, "": 4 * MIB}


@tenant
def test_thread_that_ends_in_a_region_ends_it() -> None:
    allocate(2 * MIB)
    for all_threads in (False, True):
        thread = threading.Thread(target=sublet.region("kv", all_threads=all_threads).__enter__)
        thread.start()
        thread.join()
        # Nobody is in it.
        assert sublet.pause("kv").freed_bytes == 0
        sublet.resume("kv")
    with sublet.region("other", all_threads=True):
        pass


@tenant
def test_regions_of_two_tasks_do_not_overlap() -> None:
    allocate(2 * MIB)

    async def in_region(tag: str, entered: asyncio.Event, leaves: asyncio.Event) -> None:
        with sublet.region(tag):
            allocate(4 * MIB)
            entered.set()
            await leaves.wait()

    async def both() -> None:
        entered, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(in_region("x", entered, leaves))
        await entered.wait()
        leaves_later = asyncio.get_running_loop().call_later(20, leaves.set)
        with pytest.raises(sublet.UsageError, match="another asyncio task of this thread is in region 'x'"):
            await asyncio.create_task(in_region("y", asyncio.Event(), leaves))
        leaves_later.cancel()
        leaves.set()
        await first
        # One after the other, and inside each other in one task.
        with sublet.region("y"):
            await in_region("z", asyncio.Event(), leaves)

    with sublet.region("around"):
        asyncio.run(both())
    assert bytes_by_tag() == {"": 2 * MIB, "x": 4 * MIB, "z": 4 * MIB}
    assert sublet.pause("x").freed_bytes == 4 * MIB


@tenant
def test_tag_has_one_policy() -> None:
    in_region("kv", "discard")
    with pytest.raises(sublet.UsageError, match="kv"):
        in_region("kv", "keep")
    with sublet.region("new", "keep"):
        with pytest.raises(sublet.UsageError, match="new"):
            with sublet.region("new", "discard"):
                pass
    # The refused ones left nothing open.
    allocate(2 * MIB)
    assert bytes_by_tag() == {"kv": 4 * MIB, "": 2 * MIB}


@tenant
def test_paused_tag_is_not_entered() -> None:
    in_region("kv", "discard")
    sublet.pause("kv")
    with pytest.raises(sublet.UsageError, match="'kv' is paused.*resume"):
        with sublet.region("kv", "discard"):
            pass
    sublet.resume("kv")
    in_region("kv", "discard")
    assert bytes_by_tag() == {"kv": 8 * MIB}


@tenant
def test_tag_with_an_open_region_is_not_paused() -> None:
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with sublet.region("kv"):
            allocate(2 * MIB)
            opened.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(30)
    with pytest.raises(sublet.UsageError, match="open") as caught:
        sublet.pause("kv")
    assert caught.value.tags == ("kv",) and not sublet.is_paused("kv")
    done.set()
    thread.join()
    assert sublet.pause("kv").outcome == "completed"
    assert sublet.resume("kv").outcome == "completed"


@tenant
def test_pause_in_the_middle_of_a_capture_is_for_later() -> None:
    in_region("kv", "keep")
    with Capture():
        for tags in (None, "kv"):
            with pytest.raises(sublet.RetryError, match="captur"):
                sublet.pause(tags, timeout=1)
    assert sublet.pause("kv").outcome == "completed"


@tenant
def test_shortage_at_resume_names_the_bytes_and_a_retry_works() -> None:
    weights = in_region("weights", "keep", 8 * MIB)
    uuid = sublet.stats()["pool"]["devices"][0]["uuid"]
    sublet.pause("weights")
    left_bytes = 6 * MIB
    hoard = allocate(free_bytes() - left_bytes)
    for _ in range(2):
        with pytest.raises(sublet.OutOfDeviceMemory) as caught:
            sublet.resume("weights")
        assert caught.value.missing_bytes == 2 * MIB
        (device,) = caught.value.devices
        assert device["uuid"] == uuid
        assert (device["free_bytes"], device["needed_bytes"]) == (left_bytes, 8 * MIB)
        assert sublet.is_paused("weights")
    hoard.free()
    assert sublet.resume("weights").outcome == "completed"
    assert weights.read() == b"\x07" * (8 * MIB)


class Clock:
    """Time that passes in sleeps alone, each of which does something."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.now, self.then = 0.0, then

    def monotonic(self) -> float:
        """What it shows."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """What it shows afterwards."""
        self.now += seconds
        self.then()


@tenant
def test_resume_that_waits_tries_again_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = in_region("weights", "keep", 8 * MIB)
    hoards: list[Memory] = []

    def free() -> None:
        if clock.now > 5:
            hoards.pop().free()

    clock = Clock(free)
    monkeypatch.setattr(_pausing, "time", clock)
    calls: list[Callable[..., sublet.Report]] = [sublet.resume, sublet.Tenant().resume]
    for call in calls:
        sublet.pause("weights")
        hoards.append(allocate(free_bytes() - 6 * MIB))
        clock.now = 0.0
        with pytest.raises(sublet.OutOfDeviceMemory):
            call("weights", wait=3)
        assert clock.now == 3 and sublet.is_paused("weights")
        clock.now = 0.0
        assert call("weights", wait=60).returned_bytes == 8 * MIB
        assert 5 < clock.now < 60 and not hoards
    assert weights.read() == b"\x07" * (8 * MIB)


@tenant
def test_block_in_which_memory_is_away_brings_back_what_it_took() -> None:
    cache = in_region("kv", "keep", fill=8)
    with sublet.paused("kv") as report:
        assert (report.outcome, report.freed_bytes) == ("completed", 4 * MIB)
        with sublet.paused("kv") as inner:
            assert inner.outcome == "already"
        # It was away before.
        assert sublet.is_paused("kv")
    assert not sublet.is_paused("kv")
    for blocks in (sublet.paused, sublet.Tenant().paused):
        with pytest.raises(ZeroDivisionError), blocks():
            assert sublet.is_paused()
            _ = 1 // 0
        assert not sublet.is_paused()
    with pytest.raises(sublet.UsageError, match="wait is a number"), sublet.paused("kv", wait=0):
        pass
    assert not sublet.is_paused("kv")
    assert cache.read() == b"\x08" * (4 * MIB)


def test_shortage_of_host_memory_at_pause_changes_nothing(stage: Stage) -> None:
    worker = stage.worker("train", SUBLET_HOST_BYTES_MAX=str(MIB))
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    kind, missing_bytes = worker.do("failure(sublet.pause, 'missing_bytes')")
    assert kind == "OutOfHostMemory"
    assert missing_bytes is None or missing_bytes > 0
    assert worker.do("sublet.is_paused()") is False
    assert worker.do("memory.read() == b'\\x07' * 4 * MIB") is True


def hold_stream_ordered(size_bytes: int) -> None:
    address = ctypes.c_uint64()
    call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(size_bytes), None)


@tenant
def test_a_pause_that_leaves_memory_is_partial_and_raises_nothing() -> None:
    allocate(4 * MIB)
    hold_stream_ordered(16 * MIB)
    for _ in ("a pause", "another"):
        report = sublet.pause()
        assert (report.outcome, report.stayed_bytes) == ("partial", 16 * MIB)
        [stay] = report.details["stays"]
        assert (stay["bytes"], stay["count"]) == (16 * MIB, 1)
        assert stay["reason"].startswith("stream-ordered memory")
    assert sublet.resume().outcome == "completed"


@tenant
def test_reports_and_statistics_are_plain_and_in_their_units() -> None:
    in_region("weights", "keep")
    report = sublet.pause()
    assert json.loads(json.dumps(report.details)) == report.details
    assert (report.freed_bytes, report.returned_bytes, report.stayed_bytes) == (4 * MIB, 0, 0)
    assert report.seconds == report.details["wall_us"] / 1e6 > 0
    assert str(report) == f"completed in {report.seconds:.3f} s: 4.0 MiB given back"
    held = sublet.stats()
    assert json.loads(json.dumps(held)) == held
    assert held["member"]["pid"] == os.getpid()
    assert held["member"]["state"] == "paused"
    assert held["pauses"] == 1 and held["last_pause"]
    assert sublet.resume().returned_bytes == 4 * MIB
    assert sublet.stats()["resumes"] == 1
    assert sublet.resume() == sublet.Report("already")


@tenant
def test_attaching_a_preloaded_process_changes_nothing() -> None:
    for name in (None, "train"):
        report = sublet.attach(name)
        assert report.was_preloaded and report.tenant == "train"
    with pytest.raises(sublet.UsageError, match="'train'.*'other'"):
        sublet.attach("other")


@tenant
def test_forked_child_is_told_that_it_cannot() -> None:
    memory = in_region("weights", "keep")
    calls: list[Callable[[], object]] = [
        sublet.pause,
        sublet.resume,
        sublet.stats,
        lambda: sublet.pause("weights"),
        lambda: sublet.host_copy(memory),
    ]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in calls:
            try:
                call()
                said.append("nothing")
            except sublet.NotAttachedError as error:
                said.append(str(error))
        os.write(write_end, json.dumps(said).encode())
        os._exit(SUCCESS)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = json.loads(pipe.read())
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert len(said) == len(calls)
    assert all("was forked from" in text and "spawn" in text for text in said), said
    # The parent goes on.
    sublet.pause()
    sublet.resume()
    assert memory.read() == b"\x07" * (4 * MIB)
