"""Reading what a pause has saved, without bringing it back."""

from __future__ import annotations

from typing import Any

import pytest

import sublet
from simdriver import MIB, Memory, Tensorlike, allocate

tenant = pytest.mark.tenant("train")


@tenant
def test_saved_bytes_are_read_while_the_memory_is_away() -> None:
    with sublet.region("weights"):
        weights = allocate(4 * MIB, fill=7)
    weights.write(b"head")
    sublet.pause("weights")
    for view in (sublet.host_copy(weights), sublet.host_copy(Tensorlike(weights))):
        assert view.readonly and view.format == "B" and len(view) == 4 * MIB
        assert view[:6] == b"head\x07\x07"
        assert view[-1] == 7
    # Part of an allocation.
    inside = Memory(weights.address + 2, 4, 0)
    assert sublet.host_copy(inside) == b"ad\x07\x07"
    sublet.resume("weights")


@tenant
def test_whole_pause_can_be_read_too() -> None:
    memory = allocate(2 * MIB, fill=5)
    sublet.pause()
    assert sublet.host_copy(memory)[:3] == b"\x05\x05\x05"
    sublet.resume()


@tenant
def test_memory_that_is_here_or_not_kept_has_no_saved_bytes() -> None:
    with sublet.region("kv", "discard"):
        cache = allocate(2 * MIB)
    weights = allocate(2 * MIB)
    with pytest.raises(sublet.UsageError):
        sublet.host_copy(weights)
    sublet.pause()
    with pytest.raises(sublet.UsageError):
        sublet.host_copy(cache)
    sublet.resume()


class Array:
    """An object that shows device memory by the interface alone."""

    def __init__(self, memory: Memory, **changed: Any) -> None:
        self.__cuda_array_interface__ = {**memory.__cuda_array_interface__, **changed}


@tenant
def test_shape_type_and_strides_are_heeded() -> None:
    memory = allocate(2 * MIB, fill=1)
    memory.write(bytes(range(64)))
    sublet.pause()
    matrix = Array(memory, shape=(2, 4), typestr="<f4")
    assert sublet.host_copy(matrix) == bytes(range(32))
    rows = Array(memory, shape=(2, 4), typestr="<f4", strides=(16, 4))
    assert sublet.host_copy(rows) == bytes(range(32))
    columns = Array(memory, shape=(2, 4), typestr="<f4", strides=(4, 8))
    with pytest.raises(sublet.UsageError, match="contiguous"):
        sublet.host_copy(columns)
    assert sublet.host_copy(Array(memory, shape=(0, 4))) == b""
    sublet.resume()


class HostTensor:
    """A tensor on the host."""

    is_cuda = False
    nbytes = 4

    def data_ptr(self) -> int:
        """Where it is."""
        return 4096


@tenant
@pytest.mark.parametrize("thing", [b"bytes", None, HostTensor()])
def test_what_is_on_no_device_is_refused(thing: object) -> None:
    with pytest.raises(sublet.UsageError, match="no CUDA tensor"):
        sublet.host_copy(thing)
