"""What `sublet.saved` does with what autograd hands it: over a torch of a few lines, whose streams run late and in any order.

Device memory is cells. A cell is used again as soon as its tensor is gone, in the order of the stream that allocates. So a copy that
does not wait for what it needs, or memory that goes before its copy is over, shows as a wrong value.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Callable, Optional

import pytest

import sublet
from sublet import _saved

MIB = 1 << 20


class Event:
    """Over when its stream has come to it."""

    is_over = False

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def query(self) -> bool:
        self.machine.leave_captures_alone()
        return self.is_over

    def synchronize(self) -> None:
        self.machine.leave_captures_alone()
        self.machine.run_until(lambda: self.is_over)


class Stream:
    """Work in order."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.work = machine, deque[tuple[Optional[Event], Optional[Callable[[], None]]]]()
        machine.streams.append(self)

    def record_event(self) -> Event:
        event = Event(self.machine)
        self.work.append((None, lambda: setattr(event, "is_over", True)))
        return event

    def wait_event(self, event: Event) -> None:
        # A destructor's errors are lost.
        self.machine.is_spoilt |= self is self.machine.captured
        self.work.append((event, None))

    def step(self) -> bool:
        if not self.work or (self.work[0][0] is not None and not self.work[0][0].is_over):
            return False
        action = self.work.popleft()[1]
        if action is not None:
            action()
        return True


class Storage:
    """A cell, as long as somebody has it, and until the streams that were named have come so far."""

    def __init__(self, machine: Machine, size_bytes: int, is_host: bool) -> None:
        machine.free_what_is_over()
        self.machine, self.used_by = machine, set[Stream]()
        self.free = [] if is_host else machine.free.setdefault((machine.compute, size_bytes), [])
        machine.made += not is_host and not self.free and size_bytes >= MIB
        self.cell = self.free.pop() if self.free else [0]
        self.size_bytes = size_bytes

    def nbytes(self) -> int:
        return self.size_bytes

    def data_ptr(self) -> int:
        return id(self.cell)

    def __del__(self) -> None:
        events = [stream.record_event() for stream in self.used_by if stream is not self.machine.compute]
        if events:
            self.machine.late.append((self.free, self.cell, events))
        else:
            self.free.append(self.cell)


class Tensor:
    """One value in a cell."""

    _base: Any = None
    layout = "strided"
    is_nested = False
    dtype: Any = "uint8"

    def __init__(self, storage: Storage, version: list[int], shape: tuple[int, ...], is_cuda: bool = True) -> None:
        self.storage, self.version, self.shape, self.is_cuda = storage, version, shape, is_cuda
        self.device = types.SimpleNamespace(type="cuda" if is_cuda else "cpu", index=0)
        self.steps = (1,)

    @property
    def _version(self) -> int:
        return self.version[0]

    def detach(self) -> Tensor:
        return Tensor(self.storage, self.version, self.shape, self.is_cuda)

    def untyped_storage(self) -> Storage:
        return self.storage

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def __getitem__(self, part: slice) -> Tensor:
        if part.start is None:
            return self
        # Each part of a slab of host memory is a cell of its own.
        size_bytes = part.stop - part.start
        return Tensor(Storage(Machine.now, size_bytes, True), [0], (size_bytes,), False)

    def record_stream(self, stream: Stream) -> None:
        self.storage.used_by.add(stream)

    def set_(self, storage: Storage, *_: Any) -> Tensor:
        return Tensor(storage, [0], (storage.size_bytes,))

    def copy_(self, other: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        target, source = self.storage.cell, other.storage.cell
        Machine.now.current.work.append((None, lambda: target.__setitem__(0, source[0])))


class Parameter(Tensor):
    """A tensor of a module."""


class Machine:
    """A device, whose streams run when the host waits: in an order that `choose` decides."""

    now: Machine

    def __init__(self, choose: Callable[[list[Stream]], None]) -> None:
        Machine.now = self
        self.streams: list[Stream] = []
        self.free: dict[Any, list[list[int]]] = {}
        #: Cells whose tensors have gone, and that streams may still use.
        self.late: list[tuple[list[list[int]], list[int], list[Event]]] = []
        self.made, self.choose, self.is_captured = 0, choose, False
        self.captured: Optional[Stream] = None
        #: A capture has ended: by an event from before it, or by a question or wait of another thread.
        self.is_spoilt = False
        self.capture_mode = 0
        self.current = self.compute = Stream(self)

    def exchange_capture_mode(self, mode: int) -> int:
        before, self.capture_mode = self.capture_mode, mode
        return before

    def leave_captures_alone(self) -> None:
        self.is_spoilt |= self.capture_mode != _saved._RELAXED

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            order = list(self.streams)
            self.choose(order)
            assert any(stream.step() for stream in order), "all streams wait"

    def free_what_is_over(self) -> None:
        late, self.late = self.late, []
        for free, cell, events in late:
            if all(event.is_over for event in events):
                free.append(cell)
            else:
                self.late.append((free, cell, events))

    def tensor(self, value: int, size: int = MIB, kind: type = Tensor) -> Any:
        """A new tensor, which the stream that computes writes later."""
        made = kind(Storage(self, size, False), [0], (size,))
        cell = made.storage.cell
        self.compute.work.append((None, lambda: cell.__setitem__(0, value)))
        return made

    def use(self, tensor: Any, seen: list[int]) -> None:
        cell = tensor.storage.cell
        self.compute.work.append((None, lambda: seen.append(cell[0])))


def computes_first(order: list[Stream]) -> None:
    """Work that does not wait for copies overtakes them."""


def copies_first(order: list[Stream]) -> None:
    order.reverse()


def brings_last(order: list[Stream]) -> None:
    order.append(order.pop(min(2, len(order) - 1)))


ORDERS = [computes_first, copies_first, brings_last, *(random.Random(seed).shuffle for seed in range(12))]


@pytest.fixture(params=range(len(ORDERS)))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A torch over a device of a few cells; three tensors may be ahead."""
    machine = Machine(ORDERS[request.param])

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, machine.current = machine.current, stream
        yield
        machine.current = before

    @contextlib.contextmanager
    def hooks(*both: Any) -> Iterator[None]:
        machine.hooks = both  # type: ignore[attr-defined]
        yield

    def empty(size: int, pin_memory: bool = False, device: Any = None, **_: Any) -> Tensor:
        if pin_memory:
            machine.leave_captures_alone()
        if pin_memory and size > 1 << 40:
            raise RuntimeError("out of memory")
        return Tensor(Storage(machine, size, pin_memory or size == 0), [0], (size,))

    torch: Any = types.ModuleType("torch")
    torch.Tensor, torch.nn = Tensor, types.SimpleNamespace(Parameter=Parameter)
    torch.uint8, torch.strided, torch.empty, torch.no_grad = "uint8", "strided", empty, contextlib.nullcontext
    torch.device, torch.OutOfMemoryError = lambda *_: None, MemoryError
    torch.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(saved_tensors_hooks=hooks))
    torch.cuda = types.SimpleNamespace(
        Stream=lambda _: Stream(machine),
        stream=on,
        device=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: machine.current,
        is_current_stream_capturing=lambda: machine.is_captured or machine.current is machine.captured,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(_saved, "_AHEAD_BYTES", 3 * MIB)
    monkeypatch.setattr(_saved, "_exchange_capture_mode", machine.exchange_capture_mode)
    _saved._Pass.devices.clear()
    yield machine
    assert not machine.is_spoilt
    _saved._Pass.devices.clear()


def forward(machine: Machine, count: int, first: int = 1) -> list[Any]:
    """A pass that saves so many tensors, with others that come and go between."""
    with sublet.saved():
        pack, _ = machine.hooks  # type: ignore[attr-defined]
        kept = []
        for value in range(first, first + count):
            kept.append(pack(machine.tensor(value)))
            machine.tensor(-value)
    return kept


def backward(machine: Machine, kept: list[Any], keep: bool = False) -> list[int]:
    """Uses what was saved, the last first, and what was seen of it."""
    _, unpack = machine.hooks  # type: ignore[attr-defined]
    seen: list[int] = []
    for index in reversed(range(len(kept))):
        machine.use(unpack(kept[index]), seen)
        if not keep:
            kept.pop()
        machine.tensor(-index)
    machine.run_until(lambda: not machine.compute.work)
    return seen


def test_every_tensor_is_back_as_it_was_and_few_are_on_the_device(machine: Machine) -> None:
    for _ in range(3):
        kept = forward(machine, 20)
        assert backward(machine, kept) == list(range(20, 0, -1))
    assert machine.made <= 9, "three stay, four are on their way, one comes and goes, and one is made"
    report = next(each for each in sublet.report() if each.get("saved"))
    assert report["tensors"] == 3 * 17 and report["out_bytes"] == 3 * 17 * MIB
    assert report["in_bytes"] == 3 * 14 * MIB, "three stay, and three are still on their way when backward begins"
    assert report["late"] == 0, "each was brought ahead of its use"
    assert report["host_bytes"] == 8 * MIB * 3, "the places of the first pass serve the others"


def test_graph_that_is_kept_is_used_once_more(machine: Machine) -> None:
    kept = forward(machine, 12)
    for _ in range(2):
        assert backward(machine, kept, keep=True) == list(range(12, 0, -1))
    del kept[:]
    gc.collect()
    assert backward(machine, forward(machine, 12)) == list(range(12, 0, -1))


def test_next_pass_waits_for_what_is_still_read(machine: Machine) -> None:
    found: list[list[int]] = []
    for first in (1, 101, 201):
        kept = forward(machine, 12, first)
        found.append([])
        while kept:
            machine.use(machine.hooks[1](kept.pop()), found[-1])  # type: ignore[attr-defined]
        # The next pass is on another stream.
        machine.current = machine.compute = Stream(machine)
    machine.run_until(lambda: not any(stream.work for stream in machine.streams))
    assert found == [list(range(first + 11, first - 1, -1)) for first in (1, 101, 201)]


def test_tensor_of_more_than_may_be_ahead_is_used_twice(machine: Machine) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        kept = [pack(machine.tensor(value, 4 * MIB)) for value in range(1, 5)]
    seen: list[int] = []
    for each in reversed(kept):
        for _ in range(2):
            machine.use(unpack(each), seen)
    machine.run_until(lambda: not machine.compute.work)
    assert seen == [4, 4, 3, 3, 2, 2, 1, 1]


def test_graph_that_is_given_up_half_way_harms_nobody(machine: Machine) -> None:
    for used in (0, 1, 4):
        kept = forward(machine, 12)
        _, unpack = machine.hooks  # type: ignore[attr-defined]
        for _ in range(used):
            unpack(kept.pop())
        del kept[:]
        seen: list[int] = []
        others = [machine.tensor(100 + number) for number in range(12)]
        # Copies first, as far as they can.
        while any(stream.step() for stream in machine.streams[1:]):
            pass
        for other in others:
            machine.use(other, seen)
        machine.run_until(lambda: not machine.compute.work)
        assert seen == list(range(100, 112))


def test_tensor_that_is_saved_twice_is_copied_once_and_a_lasting_one_by_the_first_pass(machine: Machine) -> None:
    buffer = machine.tensor(7)
    for moved in (1, 0):
        with sublet.saved():
            pack, unpack = machine.hooks  # type: ignore[attr-defined]
            first = pack(buffer)
            assert pack(buffer.detach()) is first or not moved
            kept = [first, *(pack(machine.tensor(value)) for value in range(1, 6))]
            again = pack(buffer)
        seen: list[int] = []
        for each in (again, *kept):
            machine.use(unpack(each), seen)
        machine.run_until(lambda: not machine.compute.work)
        assert seen == [7, 7, 1, 2, 3, 4, 5]
        assert (first.place is not None) == bool(moved)
        del first, again, kept, each


def stays(machine: Machine) -> list[Any]:
    view, weight_t, cpu, gap = (machine.tensor(1) for _ in range(4))
    view.shape = (MIB - 512,)
    weight_t._base = machine.tensor(1, kind=Parameter)
    cpu.is_cuda = False
    gap.steps = (2,)
    return [machine.tensor(1, 4096), machine.tensor(1, kind=Parameter), view, weight_t, cpu, gap]


@pytest.mark.parametrize("index", range(6), ids=["small", "parameter", "view", "view of a parameter", "cpu", "with gaps"])
def test_what_need_not_leave_stays(machine: Machine, index: int) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        tensor = stays(machine)[index]
        item = pack(tensor)
        others = [pack(machine.tensor(value)) for value in range(8)]
    assert item.place is None and others[0].place is not None
    assert unpack(item).storage is tensor.storage and unpack(item) is not tensor, "itself would keep its own graph alive"


@pytest.mark.parametrize("after", [0, 2, 4])
@pytest.mark.parametrize("size", [4096, MIB])
def test_tensor_that_is_changed_in_place_is_refused_or_was_copied_before(machine: Machine, after: int, size: int) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        tensor = machine.tensor(5, size)
        item = pack(tensor)
        kept = [pack(machine.tensor(value)) for value in range(after)]
        tensor.version[0] += 1
        kept += [pack(machine.tensor(value)) for value in range(8)]
    with pytest.raises(sublet.UsageError, match="was changed in place since forward saved it"):
        unpack(item)


def test_graph_under_capture_and_a_host_without_memory_are_errors(machine: Machine) -> None:
    with sublet.saved():
        pack, _ = machine.hooks  # type: ignore[attr-defined]
        machine.is_captured = True
        with pytest.raises(sublet.UsageError, match="a graph is under capture"):
            pack(machine.tensor(1))
        machine.is_captured = False
        large = pack(machine.tensor(1, 1 << 41))
        with pytest.raises(sublet.OutOfHostMemory, match="pinned host memory: free some"):
            pack(machine.tensor(2))
    del large


def test_what_was_brought_goes_while_its_stream_is_captured(machine: Machine) -> None:
    kept, seen = forward(machine, 12), list[int]()
    _, unpack = machine.hooks  # type: ignore[attr-defined]
    machine.use(unpack(kept[2]), seen)
    machine.captured = machine.compute
    kept.clear()
    machine.captured = None
    machine.run_until(lambda: not machine.compute.work)
    assert seen == [3] and machine.capture_mode == 0


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(sublet.UsageError, match="import torch first"), sublet.saved():
        pass


def test_two_streams_that_use_one_tensor_both_wait_for_its_copy(machine: Machine) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        tensor = machine.tensor(7)
        item = pack(tensor)
        assert pack(tensor.detach()) is item
        del tensor
        kept = [pack(machine.tensor(value)) for value in range(1, 9)]
    machine.run_until(lambda: not machine.compute.work)
    while any(stream.step() for stream in machine.streams):
        pass
    other, seen = Stream(machine), list[int]()

    def read(cell: list[int]) -> Callable[[], None]:
        return lambda: seen.append(cell[0])

    for stream in (machine.compute, other):
        machine.current = stream
        stream.work.append((None, read(unpack(item).storage.cell)))
    machine.run_until(lambda: not machine.compute.work and not other.work)
    assert seen == [7, 7] and len(kept) == 8


def test_memory_stays_until_the_stream_that_saves_it_has_read_it(machine: Machine) -> None:
    other, seen = Stream(machine), list[int]()
    with sublet.saved():
        pack, _ = machine.hooks  # type: ignore[attr-defined]
        tensor = machine.tensor(7)
        other.wait_event(machine.compute.record_event())
        machine.current = other
        item = pack(tensor)
        cell = tensor.storage.cell
        other.work.extend([(None, None)] * 60)
        other.work.append((None, lambda: seen.append(cell[0])))
        machine.current = machine.compute
        del tensor
        kept = [pack(machine.tensor(value)) for value in range(1, 20)]
        for _ in range(40):
            machine.tensor(-1)
    machine.run_until(lambda: not other.work)
    assert seen == [7] and item is not None and len(kept) == 19


def test_a_change_of_what_was_brought_back_is_seen_by_the_next_use(machine: Machine) -> None:
    kept = forward(machine, 12)
    _, unpack = machine.hooks  # type: ignore[attr-defined]
    backward(machine, kept[4:], keep=True)
    unpack(kept[0]).version[0] += 1
    with pytest.raises(sublet.UsageError, match="changed in place"):
        unpack(kept[0])


def test_memory_that_is_given_up_under_its_copy_stays_where_it_is(machine: Machine) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        tensor = machine.tensor(7)
        item = pack(tensor)
        kept = [pack(machine.tensor(value)) for value in range(1, 5)]
        assert item.place is not None and item.tensor is not None, "its copy is under way"
        # As a library that shards: its memory went, and came again elsewhere.
        tensor.storage.cell = [9]
        kept += [pack(machine.tensor(value)) for value in range(5, 20)]
    machine.run_until(lambda: not machine.compute.work)
    assert item.place is None and unpack(item).storage is tensor.storage and len(kept) == 19


def test_a_tensor_that_was_changed_before_it_was_saved_is_no_change(machine: Machine) -> None:
    with sublet.saved():
        pack, unpack = machine.hooks  # type: ignore[attr-defined]
        tensors = [machine.tensor(value) for value in range(1, 13)]
        for tensor in tensors:
            tensor.version[0] = 3
        kept = [pack(tensors.pop(0)) for _ in range(12)]
    del tensor
    assert backward(machine, kept) == list(range(12, 0, -1))
