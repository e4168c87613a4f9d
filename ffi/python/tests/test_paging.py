"""Memory that is on a device by turns, and what `sublet.paged` refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet import _paging, _paging_regions
from sublet._library import own_library
from package_stage import Stage, simulated_node
from simdriver import MIB, Memory, allocate, call, free_bytes

CHUNK = 2 * MIB
WAIT_MS = 30_000


@pytest.mark.tenant("paging")
def test_four_spans_go_through_the_frames_of_two_and_keep_their_bytes() -> None:
    allocate(CHUNK).free()
    library = own_library()
    pager = library.page_open(0, 64 * MIB, CHUNK, 2 * CHUNK)
    spans = [library.page_alloc(pager, CHUNK) for _ in range(4)]
    before = free_bytes()
    for fill, span in enumerate(spans, 1):
        library.page_acquire(pager, [span], WAIT_MS)
        memory = Memory(span, CHUNK, 0)
        assert memory.read() == bytes(CHUNK)
        memory.write(bytes([fill]) * CHUNK)
        library.page_release(pager, [span])
    assert before - free_bytes() <= 2 * CHUNK
    library.page_announce(pager, spans[:1])
    sublet.pause()
    sublet.resume()
    for fill, span in enumerate(spans, 1):
        library.page_acquire(pager, [span], WAIT_MS)
        assert Memory(span, CHUNK, 0).read() == bytes([fill]) * CHUNK
        library.page_release(pager, [span])
    told = json.loads(library.page_report(pager))
    assert (told["paged_bytes"], told["frames_bytes"], told["chunk_bytes"]) == (4 * CHUNK, 2 * CHUNK, CHUNK)
    assert told["resident_bytes"] <= 2 * CHUNK and told["exchanges"] > 0
    library.page_set_frames(pager, CHUNK, WAIT_MS)
    assert json.loads(library.page_report(pager))["resident_bytes"] <= CHUNK
    library.page_set_frames(pager, 2 * CHUNK, WAIT_MS)
    with pytest.raises(sublet.UsageError, match=f"give at least {3 * CHUNK} bytes"):
        library.page_acquire(pager, spans[:3], WAIT_MS)
    with pytest.raises(sublet.UsageError, match="nothing that is paged"):
        library.page_free(pager, spans[0] + 1)
    call("cuCtxSynchronize")
    library.page_close(pager)
    assert free_bytes() >= before
    with pytest.raises(sublet.UsageError, match="is no pager"):
        library.page_alloc(pager, CHUNK)


def test_memory_for_frames_waits_for_a_turn(stage: Stage, tmp_path: Path) -> None:
    variables = {**simulated_node(tmp_path / "node", 64 * MIB), "SUBLET_TURNS": "auto,wait=2m"}
    idle, pages = (stage.worker(name, **variables) for name in ("idle", "pages"))
    idle.do("memory = simdriver.allocate(44 * MIB, fill=7)")
    pages.do("from sublet._library import own_library; simdriver.allocate(2 * MIB).free(); library = own_library()")
    pages.do("pager = library.page_open(0, 64 * MIB, 4 * MIB, 32 * MIB)")
    pages.do("spans = [library.page_alloc(pager, 4 * MIB) for _ in range(8)]")
    pages.do(f"library.page_acquire(pager, spans, {WAIT_MS})")
    pages.do("library.page_release(pager, spans)")
    assert idle.do("memory.read() == b'\\x07' * 44 * MIB") is True


@pytest.mark.parametrize(
    ("size", "count"),
    [(5, 5), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("64KiB", 64 << 10), ("7B", 7)],
)
def test_sizes_are_bytes_or_text(size: Any, count: int) -> None:
    assert _paging._bytes_of(size) == count


@pytest.mark.parametrize("wrong", [0, -1, True, "2GB", "many", "GiB", None, 1.5])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(sublet.UsageError, match="2GiB"):
        _paging._bytes_of(wrong)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(sublet.UsageError, match="a torch.optim.Optimizer or a torch.nn.Module is needed, not object"):
        sublet.paged(object(), frames="1GiB")
    assert sublet.report() == []


@pytest.mark.tenant("giving")
def test_frames_make_room_for_memory_that_finds_none() -> None:
    allocate(CHUNK).free()
    library = own_library()
    count = free_bytes() // CHUNK
    pager = library.page_open(0, count * CHUNK, CHUNK, count * CHUNK)
    spans = [library.page_alloc(pager, CHUNK) for _ in range(count)]
    for fill, span in enumerate(spans, 1):
        library.page_acquire(pager, [span], WAIT_MS)
        if fill <= 3:
            Memory(span, CHUNK, 0).write(bytes([fill]) * CHUNK)
        library.page_release(pager, [span])
    assert free_bytes() < 2 * CHUNK
    other = allocate(5 * CHUNK)
    assert json.loads(library.page_report(pager))["resident_bytes"] <= (count - 5) * CHUNK
    for fill, span in enumerate(spans[:3], 1):
        library.page_acquire(pager, [span], WAIT_MS)
        assert Memory(span, CHUNK, 0).read() == bytes([fill]) * CHUNK
        library.page_release(pager, [span])
    other.free()
    call("cuCtxSynchronize")
    library.page_close(pager)


@pytest.mark.tenant("giving-within-a-budget")
def test_frames_make_room_within_the_budget() -> None:
    first = allocate(CHUNK)
    library = own_library()
    held = sublet.budget("1GiB")["gpus"][0]["held_bytes"]
    sublet.budget(f"{(held + 8 * CHUNK) >> 20}MiB")
    pager = library.page_open(0, 64 * CHUNK, CHUNK, 64 * CHUNK)
    spans = [library.page_alloc(pager, CHUNK) for _ in range(16)]
    for span in spans:
        library.page_acquire(pager, [span], WAIT_MS)
        library.page_release(pager, [span])
    assert json.loads(library.page_report(pager))["resident_bytes"] == 8 * CHUNK
    other = allocate(5 * CHUNK)
    assert json.loads(library.page_report(pager))["resident_bytes"] <= 3 * CHUNK
    assert sublet.budget()["gpus"][0]["held_bytes"] <= held + 8 * CHUNK
    other.free()
    first.free()
    library.page_close(pager)
    sublet.budget("none")


@pytest.mark.tenant("giving-to-a-budget")
def test_frames_give_way_to_a_budget_that_is_lowered() -> None:
    allocate(CHUNK).free()
    library = own_library()
    held = sublet.budget("1GiB")["gpus"][0]["held_bytes"]
    pager = library.page_open(0, 16 * CHUNK, CHUNK, 8 * CHUNK)
    spans = [library.page_alloc(pager, CHUNK) for _ in range(8)]
    for fill, span in enumerate(spans, 1):
        library.page_acquire(pager, [span], WAIT_MS)
        Memory(span, CHUNK, 0).write(bytes([fill]) * CHUNK)
        library.page_release(pager, [span])
    assert json.loads(library.page_report(pager))["resident_bytes"] == 8 * CHUNK
    sublet.budget(f"{(held + 4 * CHUNK) >> 20}MiB")
    end = time.monotonic() + 60
    while sublet.budget()["gpus"][0]["held_bytes"] > held + 4 * CHUNK:
        assert time.monotonic() < end, json.loads(library.page_report(pager))
        time.sleep(0.05)
    assert json.loads(library.page_report(pager))["resident_bytes"] == 4 * CHUNK
    for fill, span in enumerate(spans, 1):
        library.page_acquire(pager, [span], WAIT_MS)
        assert Memory(span, CHUNK, 0).read() == bytes([fill]) * CHUNK
        library.page_release(pager, [span])
    assert sublet.budget()["gpus"][0]["held_bytes"] <= held + 4 * CHUNK
    call("cuCtxSynchronize")
    library.page_close(pager)
    sublet.budget("none")


@pytest.mark.tenant("paged-region")
def test_memory_of_a_region_is_on_the_device_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_paging_regions, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(_paging_regions, "_WINDOW_BYTES", 64 * MIB)
    allocate(CHUNK).free()
    before = free_bytes()
    base = sublet.region("base", device=0, home="paged", frames=2 * CHUNK)
    with base:
        blocks = [allocate(CHUNK, fill=fill) for fill in range(1, 6)]
    assert before - free_bytes() <= 2 * CHUNK
    sublet.pause()
    sublet.resume()
    assert [block.read() for block in blocks] == [bytes([fill]) * CHUNK for fill in range(1, 6)]
    with base:
        blocks.append(allocate(CHUNK, fill=6))
    (told,) = (entry for entry in sublet.report() if entry.get("region") == "base")
    assert (told["device"], told["paged_bytes"], told["frames_bytes"]) == (0, 6 * CHUNK, 2 * CHUNK)
    assert told["calls"] > 6 and told["resident_bytes"] <= 2 * CHUNK
    for target in ("base", base):
        sublet.set_frames(target, CHUNK)
    with sublet.region("base", device=0, home="paged", frames="1GiB"):
        pass
    (told,) = (entry for entry in sublet.report() if entry.get("region") == "base")
    assert told["frames_bytes"] == CHUNK and blocks[5].read() == bytes([6]) * CHUNK
    # A tag has one home, which knows when its memory is wanted.
    with pytest.raises(sublet.UsageError, match="the home of tag 'base' is 'paged' in this process and cannot be 'device' too"):
        sublet.region("base").__enter__()
    with pytest.raises(sublet.UsageError, match="memory of region 'base' is paged, and comes and goes by itself"):
        sublet.pause("base")
    with sublet.region("other"), pytest.raises(sublet.UsageError, match="the home of tag 'other' is 'device'"):
        sublet.region("other", device=0, home="paged").__enter__()
    with pytest.raises(sublet.UsageError, match="has no memory with the tag 'base'"):
        sublet.Tenant().pause("base")
    with pytest.raises(sublet.UsageError, match="no memory of region 'other' is paged"):
        sublet.set_frames("other", "1GiB")
    with pytest.raises(sublet.UsageError, match="PyTorch is not there to say which: give device="):
        sublet.region("base", home="paged").__enter__()
    with pytest.raises(sublet.UsageError, match="the frames for paging have 1048576: give at least 2097152 bytes"):
        sublet.region("small", device=0, home="paged", frames="1MiB").__enter__()
    for block in blocks:
        block.free()
    assert not [entry for entry in sublet.report() if entry.get("region") == "small"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"home": "host"}, "home is 'device' or 'paged'"),
        ({"home": "paged", "contents": "discard"}, "paged memory keeps its contents"),
        ({"frames": "1GiB"}, "frames are for home='paged'"),
    ],
)
def test_a_region_with_a_home_that_cannot_be_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(sublet.UsageError, match=why):
        sublet.region("base", **arguments)
