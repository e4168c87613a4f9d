"""vLLM's ``CuMemAllocator``, with Sublet's pauses for its sleeps."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Optional, Union

import sublet
from sublet._adapter import giving_up, torch_adapter
from sublet._errors import UsageError
from sublet._library import own_library
from sublet._native import RUNS_WITHOUT
from sublet._torch_pools import ExpandableSegments

#: What tags of this interface begin with in Sublet's reports.
PREFIX = "vllm/"
#: The tag of what vLLM captures graphs into.
CUDAGRAPH = "cudagraph"
#: Device, size in bytes, address, and 0 in the place of the driver's handle, which changes.
Handle = tuple[int, int, int, int]


@dataclass
class AllocationData:
    """A piece of memory that the allocator has from the driver.

    Attributes:
        handle: device, size in bytes, address, and 0.
        tag: the tag of the pool that it belongs to.
        cpu_backup_tensor: always ``None``: backups lie in Sublet's host memory
            (``sublet.host_copy``).
        is_asleep: whether it is away.
    """

    handle: Handle
    tag: str
    cpu_backup_tensor: Any = None
    is_asleep: bool = False


class _Entered(threading.local):
    """The pools that a thread is in, innermost last, each with its device."""

    def __init__(self) -> None:
        self.pools: list[tuple[int, tuple[int, int]]] = []


class CuMemAllocator:
    """Memory for tensors that can sleep. One object serves a worker of vLLM, or code outside of any: :meth:`get_instance`.

    Attributes:
        default_tag: the tag of pools that are given none.
        current_tag: the tag of the pool that is in use.
        allocator_and_pools: the pools that are in use, by tag; each a ``torch.cuda.MemPool`` and
            ``None``.
    """

    instance: Optional[CuMemAllocator] = None
    default_tag: str = "default"
    #: Those of further workers, which belong to the workers, by the number in their tags.
    _further: weakref.WeakValueDictionary[int, CuMemAllocator] = weakref.WeakValueDictionary()
    #: Of all together: torch knows one order of pools for a thread.
    _entered = _Entered()

    @staticmethod
    def get_instance() -> CuMemAllocator:
        """The object of the worker that calls. The first worker and code outside of workers have one; each further worker has its own, so that
        two engines in one process sleep apart.

        Raises:
            NotAttachedError: this process is not under Sublet.
        """
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        first, worker = CuMemAllocator.instance, _calling_worker()
        if worker is None:
            return first
        if first._worker is None or first._worker() is None:
            first._worker = weakref.ref(worker)
        if first._worker() is worker:
            return first
        if not hasattr(worker, "_sublet_allocator"):
            number = next(number for number in count(2) if number not in CuMemAllocator._further)
            worker._sublet_allocator = CuMemAllocator._further[number] = CuMemAllocator(f"{PREFIX}{number}/")
        own: CuMemAllocator = worker._sublet_allocator
        return own

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        #: The worker that an allocator outside of workers serves too.
        self._worker: Optional[weakref.ref[Any]] = None
        self._library = own_library()
        self._torch: Any = importlib.import_module("torch")
        self._expandable = ExpandableSegments(self._torch)
        self.current_tag: str = CuMemAllocator.default_tag
        self.allocator_and_pools: dict[str, Any] = {}
        #: What graphs are captured into; the driver's memory of it lives as long as this.
        self._graph_pool: Any = None
        #: Tags of all pools that there were, by the identity that torch's snapshots show.
        self._tags: dict[tuple[int, int], str] = {}

    @contextlib.contextmanager
    def use_memory_pool(self, tag: Optional[str] = None) -> Iterator[None]:
        """Tensors made inside by this thread have memory that sleeps and wakes up with ``tag``.

        What was freed by the end is given back to the driver then.

        Raises:
            UsageError: the tag is no text, or too long.
        """
        tag = CuMemAllocator.default_tag if tag is None else tag
        adapter = torch_adapter()
        if adapter is None:
            raise UsageError("use_memory_pool: torch has no CUDA device in this process")
        outer_tag, outer_pool = self.current_tag, self.allocator_and_pools.get(tag)
        pool = self._torch.cuda.MemPool()
        identity = (int(pool.id[0]), int(pool.id[1]))
        self._expandable.suspend({self._torch.cuda.current_device(): identity})
        self.current_tag = tag
        self._tags[identity] = tag
        self.allocator_and_pools[tag] = (pool, None)
        self._library.region_begin(self._prefix + tag, RUNS_WITHOUT, None)
        try:
            with adapter.region_pool(None, None, False), self._in_front(identity):
                with self._torch.cuda.use_mem_pool(pool):
                    yield
        finally:
            self._library.region_end()
            self.current_tag = outer_tag
            self._expandable.restore()
            self.allocator_and_pools.pop(tag, None)
            if outer_pool is not None:
                self.allocator_and_pools[tag] = outer_pool
            # The last reference: torch then gives back what the pool has cached.
            del pool

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Gives the pool to capture graphs into inside, on this thread; its memory sleeps and wakes up with the tag ``cudagraph``.

        The pool is the same each time, so that graphs share memory. Addresses stay, so they replay after a wake-up.
        """
        if self._graph_pool is None:
            self._graph_pool = self._torch.cuda.MemPool()
        pool = self._graph_pool
        identity = (int(pool.id[0]), int(pool.id[1]))
        self._tags[identity] = CUDAGRAPH
        outer_tag, self.current_tag = self.current_tag, CUDAGRAPH
        self._expandable.suspend({self._torch.cuda.current_device(): identity})
        self._library.region_begin(self._prefix + CUDAGRAPH, RUNS_WITHOUT, None)
        try:
            # The capture itself has torch allocate from it.
            yield pool.id
        finally:
            self._library.region_end()
            self._expandable.restore()
            self.current_tag = outer_tag

    def release_pools(self) -> None:
        """Releases the pools, so that torch frees their unused memory. May be called more than once."""
        self.allocator_and_pools.clear()
        self._graph_pool = None
        gc.collect()

    close = release_pools

    @contextlib.contextmanager
    def _in_front(self, pool: tuple[int, int]) -> Iterator[None]:
        """This thread's other pools stand aside: of several, torch asks the one opened first."""
        pools = self._entered.pools
        device = self._torch.cuda.current_device()
        if pools:
            self._torch._C._cuda_endAllocateToPool(*pools[-1])
            self._torch._C._cuda_releasePool(*pools[-1])
        pools.append((device, pool))
        try:
            yield
        finally:
            pools.pop()
            if pools:
                self._torch._C._cuda_beginAllocateCurrentThreadToPool(*pools[-1])

    @property
    def pointer_to_data(self) -> dict[int, AllocationData]:
        """Returns the allocator's present memory from the driver, by address, asleep or awake."""
        found: dict[int, AllocationData] = {}
        asleep = {tag for tag in set(self._tags.values()) if self._library.tag_is_paused(self._prefix + tag)}
        for segment in self._torch.cuda.memory_snapshot():
            tag = self._tags.get(tuple(segment["segment_pool_id"]))
            if tag is not None:
                address, size_bytes = int(segment["address"]), int(segment["total_size"])
                handle = (int(segment["device"]), size_bytes, address, 0)
                found[address] = AllocationData(handle, tag, None, tag in asleep)
        return found

    def get_current_usage(self) -> int:
        """Bytes that the allocator has from the driver, asleep or awake."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    def sleep(self, offload_tags: Union[tuple[str, ...], str, None] = None) -> None:
        """Gives the memory of all tags back to the driver. What is asleep already stays so.

        Args:
            offload_tags: a tag or several whose contents are saved; by default the default tag. The
                contents of all others are lost. Level 1 saves ``("weights",)``, level 2 nothing.

        Raises:
            RetryError, RefusedError, OutOfHostMemory: all is awake, and contents that were not to
                be saved may be lost.
        """
        saved = (CuMemAllocator.default_tag,) if offload_tags is None else offload_tags
        saved = (saved,) if isinstance(saved, str) else tuple(saved)
        # Whole pieces that nobody uses need not sleep: they go.
        self._give_back_unused()
        tags = set(self._tags.values())
        self._fall_asleep(tags, tags.difference(saved))
        self._give_back_unused()

    def discard(self, tags: Union[Sequence[str], str]) -> None:
        """Gives the memory of ``tags`` back to the driver; their contents are lost.

        Raises:
            RetryError, RefusedError: all is awake, and the contents may be lost.
        """
        named = (tags,) if isinstance(tags, str) else tags
        known = set(self._tags.values()).intersection(named)
        self._fall_asleep(known, known)

    def wake_up(self, tags: Optional[Sequence[str]] = None) -> None:
        """Brings memory back to the same addresses, with the contents that were saved.

        Args:
            tags: the tags that are to wake up; by default all. Versions of vLLM that name tags that a wake-up may leave asleep
                (``vllm.device_allocator.DEFERRABLE_TAGS``) have all others wake up with any.

        Raises:
            OutOfDeviceMemory: nothing has woken up, and all that was saved still is: call again
                when memory is free.
            RetryError, RefusedError: as above.
        """
        known = set(self._tags.values())
        wanted = known if tags is None else known.intersection([*tags, *_not_deferrable(known)])
        if wanted:
            sublet.resume([self._prefix + tag for tag in sorted(wanted)])

    def _fall_asleep(self, tags: set[str], unsaved: set[str]) -> None:
        if not tags:
            return
        given_up = [
            (address, data.handle[1])
            for address, data in self.pointer_to_data.items()
            if data.tag in unsaved
        ]
        with giving_up(self._library, given_up):
            sublet.pause([self._prefix + tag for tag in sorted(tags)])

    def _give_back_unused(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()


def _calling_worker() -> Any:
    """The worker of vLLM whose method calls, through whatever lies between; ``None`` outside of any."""
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    frame = None if worker is None else sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, worker):
            return caller
        frame = frame.f_back
    return None


def _not_deferrable(tags: set[str]) -> set[str]:
    """Those of ``tags`` that wake up whatever is named."""
    deferrable = getattr(sys.modules.get("vllm.device_allocator"), "DEFERRABLE_TAGS", None)
    return set() if deferrable is None else tags.difference(deferrable)
