"""Tensors that forward saves for backward: copy engines move them to host memory, and back before their use.

The newest stay where they are, up to ``_AHEAD_BYTES``: backward uses them first. An older one is copied out on a stream of its own. Its
memory is free when the copy is over. Forward waits for the oldest copy if too many are under way. PyTorch is far ahead of the GPU: it
would otherwise allocate everything before the first copy begins. Each use in backward fetches the tensors of the uses to come.

The host memory is PyTorch's pinned memory. Sublet's own belongs to its pager, which copies from frames alone. A saved tensor would first be
copied on the device, and its chunk mapped again. That takes longer than the copy. Pinned memory stays where it is during a pause.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from sublet._errors import OutOfHostMemory, UsageError
from sublet._paging import _live

#: Smaller tensors stay: a copy of less takes longer to begin than to make.
_LEAST_BYTES = 1 << 20
#: What stays on the device of the newest in forward, what may be on its way out, and what is brought ahead in backward. One tensor may always be.
_AHEAD_BYTES = 256 << 20
#: Places lie in pinned memory of this size: PyTorch rounds sizes up to powers of two.
_SLAB_BYTES = 1 << 30


#: ``CU_STREAM_CAPTURE_MODE_RELAXED``.
_RELAXED = 2


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _exchange_capture_mode(mode: int) -> int:
    """Sets which calls this thread may make during captures; what it was before."""
    place = ctypes.c_int(mode)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(place))
    return place.value


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """In it, questions about events, waits for them and pinned allocations end no capture of another thread."""
    before = _exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        _exchange_capture_mode(before)


class _Place:
    """Host memory for one tensor."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        #: The end of the last copy from here, if nobody has waited for it.
        self.read: Any = None


class _Device:
    """The state that all passes on one device share: streams, places in host memory, and counts."""

    def __init__(self, torch: Any, index: int) -> None:
        self.torch, self.index = torch, index
        self.out, self.back = torch.cuda.Stream(index), torch.cuda.Stream(index)
        #: By size. A place is given back by a destructor, at any time: an append is all that it does.
        self.free: defaultdict[int, list[_Place]] = defaultdict(list)
        #: What is on its way out: the item, its memory, the end of the copy, the size. No memory goes before its copy is over.
        self._leaving: deque[tuple[Any, Any, Any, int]] = deque()
        self._slab: Any = None
        self._slab_used = 0
        self.counts = dict.fromkeys(("tensors", "out_bytes", "in_bytes", "late", "waited_us", "host_bytes"), 0)

    def take(self, size_bytes: int) -> _Place:
        """A place of that many bytes. Raises OutOfHostMemory."""
        # Four sizes to each power of two: what was free for one length of a sequence serves others.
        step = max(1 << (size_bytes.bit_length() - 3), 512)
        rounded = -(-size_bytes // step) * step
        with contextlib.suppress(IndexError):
            return self.free[rounded].pop()
        if self._slab is None or self._slab_used + rounded > self._slab.numel():
            slab_bytes = max(rounded, min(_SLAB_BYTES, 1 << (8 * rounded - 1).bit_length()))
            try:
                # Named: inside a custom operator the default device may be a GPU.
                with _beside_captures():
                    self._slab = self.torch.empty(slab_bytes, dtype=self.torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                if "out of memory" not in str(error).lower():
                    raise
                raise OutOfHostMemory(
                    f"saved: a saved tensor of {size_bytes} bytes on device {self.index} needs {slab_bytes} more bytes of pinned host "
                    f"memory: free some (sublet ps shows who holds how much), or save fewer tensors: {error}"
                ) from error
            self._slab_used = 0
            self.counts["host_bytes"] += slab_bytes
        self._slab_used += rounded
        return _Place(self._slab[self._slab_used - rounded : self._slab_used])

    def copy_out(self, item: _Item) -> None:
        """Begins to copy an item to host memory. Raises OutOfHostMemory."""
        place = self.take(item.size_bytes)
        self.out.wait_event(item.written)
        if place.read is not None:
            self.out.wait_event(place.read)
        raw = self.torch.empty(0, dtype=self.torch.uint8, device=item.tensor.device).set_(item.tensor.untyped_storage())
        with self.torch.cuda.stream(self.out):
            place.memory[: item.size_bytes].copy_(raw, non_blocking=True)
        item.place = place
        self._leaving.append((weakref.ref(item), item.tensor, self.out.record_event(), item.size_bytes))
        self.counts["tensors"] += 1
        self.counts["out_bytes"] += item.size_bytes

    def _is_first_over(self) -> bool:
        with _beside_captures():
            return bool(self._leaving[0][2].query())

    def drop_what_has_left(self) -> None:
        """Gives memory back whose copies are over."""
        while self._leaving and self._is_first_over():
            ref, tensor, _, _ = self._leaving.popleft()
            item = ref()
            if item is not None and item.tensor is tensor:
                item.look()
                if item.is_where_it_was():
                    item.tensor = None
                else:
                    item.give_place_back()

    def wait_for_room(self) -> None:
        """Waits until no more is on its way out than may be. The lock is not held."""
        while True:
            with _Pass.lock:
                self.drop_what_has_left()
                if len(self._leaving) < 2 or sum(leaving[3] for leaving in self._leaving) <= _AHEAD_BYTES:
                    return
                copied = self._leaving[0][2]
            began = time.perf_counter()
            with _beside_captures():
                copied.synchronize()
            self.counts["waited_us"] += int(1e6 * (time.perf_counter() - began))

    def bring(self, item: _Item) -> None:
        """Begins to copy an item back, into memory of the current stream."""
        torch = self.torch
        with torch.cuda.device(self.index):
            memory = torch.empty(item.size_bytes, dtype=torch.uint8, device=torch.device("cuda", self.index))
            item.owner = torch.cuda.current_stream(self.index)
            # What had this memory before is over there.
            self.back.wait_event(item.owner.record_event())
            with torch.cuda.stream(self.back):
                memory.copy_(item.place.memory[: item.size_bytes], non_blocking=True)
            item.arrival = item.place.read = self.back.record_event()
            dtype, shape, stride = item.form
            item.tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), 0, shape, stride)
            item.version = item.tensor._version
        self.counts["in_bytes"] += item.size_bytes

    def report(self) -> dict[str, Any]:
        """See ``sublet.report``."""
        return {"device": self.index, "saved": True, **self.counts}


class _Item:
    """The object that autograd keeps instead of a tensor."""

    #: Where it may leave; None if it stays.
    device: Any = None
    size_bytes = index = 0
    place: Any = None
    #: The end of what has written it, before it was saved.
    written: Any = None
    #: Data type, shape and strides, and where its memory began, if it may leave.
    form: Any = None
    address = 0
    #: If it was brought back: the stream that its memory belongs to, and the end of the copy. Each stream that uses it waits for that.
    owner: Any = None
    arrival: Any = None
    is_changed = False

    def __init__(self, tensor: Any) -> None:
        # Detached: an output of the operator that saves it would keep that operator alive, and the reverse.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def look(self) -> None:
        """Notes whether the tensor was changed in place since it was saved."""
        self.is_changed = self.is_changed or self.tensor._version != self.version

    def is_where_it_was(self) -> bool:
        """False if its memory was given up under the copy, as sharding libraries do with theirs: the copy is worth nothing then."""
        storage = self.tensor.untyped_storage()
        return bool(storage.nbytes() == self.size_bytes and storage.data_ptr() == self.address)

    def give_place_back(self) -> None:
        """It stays where it is."""
        self.device.free[self.place.memory.numel()].append(self.place)
        self.place = None

    def let_go(self) -> None:
        """Gives up the device memory that the item was copied to. The copy ends before others use it."""
        if self.arrival is not None:
            with self.device.torch.cuda.stream(self.owner):
                is_captured = self.device.torch.cuda.is_current_stream_capturing()
            if is_captured:
                # It may wait for nothing from before.
                with _beside_captures():
                    self.arrival.synchronize()
            else:
                self.owner.wait_event(self.arrival)
        self.arrival = self.tensor = None

    def __del__(self) -> None:
        if self.place is not None and not sys.is_finalizing():
            self.let_go()
            self.give_place_back()


class _Pass:
    """One ``with sublet.saved()``."""

    #: By storage: the pass that has saved it last, and how. What an earlier one has saved and still lives is a buffer, or as lasting.
    known: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
    devices: dict[int, _Device] = {}
    lock = threading.Lock()

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        #: What may leave, in the order in which it was saved. Autograd alone keeps it alive.
        self._items: list[weakref.ref[_Item]] = []
        #: How many of them were copied out.
        self._out = 0
        #: Those that were brought back and used.
        self._used: list[weakref.ref[_Item]] = []

    def pack(self, tensor: Any) -> _Item:
        """Autograd saves a tensor."""
        with self._torch.no_grad():
            size_bytes = self._may_leave(tensor)
            if size_bytes == 0:
                return _Item(tensor)
            if self._torch.cuda.is_current_stream_capturing():
                raise UsageError("saved: a graph is under capture, whose tensors cannot leave: capture it outside of sublet.saved()")
            with _Pass.lock:
                item = self._item_of(tensor, size_bytes)
                if item.device is not None:
                    self._push_out()
            if item.device is not None:
                item.device.wait_for_room()
            return item

    def _may_leave(self, tensor: Any) -> int:
        """Its size in bytes, or 0 if it stays: it is small, a parameter, of a special kind, not on a GPU, or a part of other memory."""
        torch = self._torch
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter) or not tensor.is_cuda:
            return 0
        size_bytes: int = tensor.numel() * tensor.element_size()
        if size_bytes < _LEAST_BYTES or tensor.layout != torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            return 0
        expected = 1
        for stride, length in sorted(zip(tensor.stride(), tensor.shape)):
            if length != 1 and stride != expected:
                return 0
            expected *= length
        return size_bytes if tensor.untyped_storage().nbytes() == size_bytes else 0

    def _item_of(self, tensor: Any, size_bytes: int) -> _Item:
        item, storage, index = _Item(tensor), tensor.untyped_storage(), tensor.device.index
        item.form, item.address = (tensor.dtype, tensor.shape, tensor.stride()), storage.data_ptr()
        saved_by, saved_as = _Pass.known.get(storage, (lambda: self, lambda: None))
        if saved_by() is not self:
            return item
        # Its memory may go while the operator that saves it reads it, on another stream than its own.
        now = self._torch.cuda.current_stream(index)
        tensor.record_stream(now)
        before = saved_as()
        # What is copied already has the bytes of then: a write through `data` shows in no version.
        if before is not None and before.place is None and (before.version, before.form) == (item.version, item.form):
            return before  # type: ignore[no-any-return]
        if index not in _Pass.devices:
            _Pass.devices[index] = _Device(self._torch, index)
            _live.add(_Pass.devices[index])
        while self._items and self._items[-1]() is None:
            self._items.pop()
        self._out = min(self._out, len(self._items))
        item.device, item.size_bytes, item.index = _Pass.devices[index], size_bytes, len(self._items)
        item.written = now.record_event()
        self._items.append(weakref.ref(item))
        _Pass.known[storage] = (weakref.ref(self), weakref.ref(item))
        return item

    def _push_out(self) -> None:
        """Begins to copy out what is too much of what is here. The newest stays."""
        here = [item for ref in self._items[self._out :] if (item := ref()) is not None]
        surplus = sum(item.size_bytes for item in here) - _AHEAD_BYTES
        for item in here[:-1]:
            if surplus <= 0:
                break
            surplus -= item.size_bytes
            item.device.copy_out(item)
            self._out = item.index + 1

    def unpack(self, item: _Item) -> Any:
        """Autograd uses what it has saved."""
        with self._torch.no_grad(), _Pass.lock:
            if item.device is not None:
                if self._torch.cuda.is_current_stream_capturing():
                    raise UsageError("saved: a graph is under capture, whose backward needs what has left: capture it outside of sublet.saved()")
                self._have_here(item)
            item.look()
            tensor = item.tensor
        if item.is_changed:
            dtype, shape = tensor.dtype, tensor.shape
            raise UsageError(
                f"saved: a tensor of {dtype} and shape {list(shape)} that backward needs was changed in place since forward saved it: "
                "change a copy of it instead"
            )
        return tensor

    def _have_here(self, item: _Item) -> None:
        """Waits for an item on the current stream, and begins the transfers of the next items."""
        device = item.device
        device.drop_what_has_left()
        if item.tensor is None:
            device.counts["late"] += 1
            device.bring(item)
        if item.owner is not None:
            now = self._torch.cuda.current_stream(device.index)
            now.wait_event(item.arrival)
            if now != item.owner:
                item.tensor.record_stream(now)
            self._let_go_of_used(item)
        room = _AHEAD_BYTES
        for at in range(item.index - 1, -1, -1):
            other = self._items[at]()
            if other is None:
                continue
            if other.tensor is None:
                try:
                    other.device.bring(other)
                except self._torch.OutOfMemoryError:
                    # It comes when it is used.
                    return
            room -= other.size_bytes
            if room <= 0:
                return

    def _let_go_of_used(self, item: _Item) -> None:
        """A graph that is kept has its tensors in host memory again, but for the last that were used."""
        used = [other for ref in self._used if (other := ref()) not in (None, item) and other.tensor is not None]
        while used and sum(other.size_bytes for other in used) > _AHEAD_BYTES:
            used.pop(0).let_go()
        self._used = [weakref.ref(other) for other in (*used, item)]


@contextlib.contextmanager
def saved() -> Iterator[None]:
    """Keeps tensors that forward saves for backward in host memory. Put it around forward.

    Copy engines move them while the GPU computes. The newest 256 MiB stay on the GPU. In backward, the others return
    before their use. Losses and gradients are bitwise the same. Use it with gradient checkpointing: what is saved then
    moves in less time than a block takes to compute. Forward waits if it saves faster than the link carries.

    These stay on the GPU: parameters, tensors of less than 1 MiB, parts of larger tensors, and subclasses of tensors. A buffer is copied by
    the first pass alone. A tensor that is saved again in the same shape, before it has left, is copied once. Memory of a
    saved tensor may go during forward: tell PyTorch (``Tensor.record_stream``) if another stream than that of its operators
    reads it.
    Each ``with`` block is a pass of its own. An inner block takes the tensors that are saved inside it. ``backward`` may be called inside
    or outside, several times (``retain_graph``) and to be differentiated (``create_graph``). Pinned host memory is taken from PyTorch,
    used by the next passes again, and kept until the process ends. The process need not be under Sublet; if it is paused, host memory
    stays as it is.

    Raises:
        UsageError: PyTorch is not imported. In forward: a graph is under capture. In backward: a saved tensor was changed in
            place, as PyTorch itself refuses.
        OutOfHostMemory: in forward, the host has no memory to pin.

    >>> with sublet.saved():  # doctest: +SKIP
    ...     loss = model(batch).loss
    >>> loss.backward()  # doctest: +SKIP
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise UsageError("saved: PyTorch is not imported: import torch first")
    this = _Pass(torch)
    with torch.autograd.graph.saved_tensors_hooks(this.pack, this.unpack):
        yield
