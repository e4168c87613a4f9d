"""The pool of torch's caching allocator that serves an allocation while regions are open.

A tag belongs to whole physical allocations, and torch cuts its segments into blocks. So each tag
has pools of its own: blocks of two tags, or of a tag and of none, never lie in one segment. The
segments come from torch's own allocator by `cudaMalloc` (or from expandable segments, by
`cuMemCreate`) inside the region, which is how libsublet.so knows their tag.

What torch does with pools is settled in c10/cuda/CUDACachingAllocator.cpp:

- `beginAllocateToPool` appends the pool, with a condition on thread or stream, to a list of its
  device. Of those whose condition holds, an allocation is served by the **first** in torch 2.8 and 2.9,
  and by the **last** from 2.10 on (pytorch/pytorch#168382). This module takes an outer region's pool off
  the list while an inner one is open. What must yield to all others is moved to the end where the first
  serves; where the last serves, it is put on the list before all others.
- A pool may be on a device's list once. So a pool is entered by one thread at a time; a second
  thread in the same region gets another pool of that tag.
- A pool whose use count falls to nothing loses its cached blocks at the next `empty_cache()` and
  cannot be entered again. Our pools keep their use count above zero until the process ends. `empty_cache()` therefore
  leaves them alone, and inside any region also everything else: torch takes an open pool for a
  capture under way.

Nothing here calls the driver. A thread that a pause stopped inside torch's own `cudaMalloc` holds the
lock of torch's allocator, though; calls here then wait for it, as all of torch's do.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Dict, List, Optional, Set, Tuple

from sublet._errors import UsageError
from sublet._torch_graphs import Graphs

PoolId = Tuple[int, int]
#: The pool that serves whatever no pool on the list takes.
DEFAULT_POOL: PoolId = (0, 0)


class Entered:
    """One open region of one thread: its pool on each device."""

    def __init__(self, tag: Optional[str], thread: int, stack: List[Entered]) -> None:
        self.tag, self.thread, self.stack = tag, thread, stack
        self.pools: Dict[int, PoolId] = {}
        #: Whether the pools are on their devices' lists.
        self.listed = False


class Pools:
    """Every pool made for a tag, and who allocates from which. One in a process.

    Methods may be called from any thread. `device` is an ordinal as torch counts them.
    """

    def __init__(self, torch: Any, graphs: Optional[Graphs] = None) -> None:
        self._torch, self._graphs = torch, graphs
        self._lock = threading.RLock()
        self._local = threading.local()
        self._made: Dict[Tuple[Optional[str], int], List[PoolId]] = defaultdict(list)
        self._uses: Dict[Tuple[int, PoolId], int] = defaultdict(int)
        self._everyone: Optional[Entered] = None
        self._listed: List[Entered] = []
        self._last_serves = version(torch) >= (2, 10)
        self._expandable = ExpandableSegments(torch)

    # ------------------------------------------------------------ regions

    @contextlib.contextmanager
    def region(self, tag: Optional[str], devices: Iterable[int], plain: bool = False) -> Iterator[None]:
        """Inside, this thread allocates on `devices` from pools of `tag`, elsewhere from no tag's.

        None is memory without a tag. Regions nest, and the innermost counts; one that ends
        before one that began later in the same thread, as generators can, takes only itself away. `plain`: without
        expandable segments.

        Raises:
            UsageError: it ends in another thread than it began in, under a region of that thread.
        """
        entered = self._enter(tag, list(devices), plain)
        try:
            yield
        finally:
            self._leave(entered)

    @contextlib.contextmanager
    def everyone(self, tag: str, devices: Iterable[int], plain: bool = False) -> Iterator[None]:
        """Inside, threads without a region of their own allocate from pools of `tag`.

        Raises:
            UsageError: another such region is open in this process. With torch 2.10 and later also: another
                thread has a region open, or a graph is under capture.
        """
        with self._lock:
            self._refuse_everyone(tag)
            entered = Entered(tag, threading.get_ident(), [])
            entered.pools = {device: self._take(tag, device) for device in devices}
            self._expandable.suspend(entered.pools, plain)
            self._put_on(entered, for_all=True)
            self._everyone = entered
            if self._last_serves:
                self._again(self._stack())
        try:
            yield
        finally:
            with self._lock:
                self._everyone = None
                self._take_off(entered)
                self._give(entered)
                self._expandable.restore()

    def capture_begun(self) -> None:
        """The graph that this thread captures now takes precedence over open regions.

        Its private pool is then the last of the list. Where the first serves, a region's pool would: memory
        that the graph replays on would be handed to others once the capture is over.
        """
        with self._lock:
            if not self._last_serves:
                self._again(self._stack())
            self._everyone_last()

    def capture_ended(self) -> None:
        """Lets regions that this thread has begun in its capture serve it."""
        with self._lock:
            stack = self._stack()
            if stack and not stack[-1].listed:
                self._put_on(stack[-1])

    def tag(self) -> Optional[str]:
        """The tag of memory that this thread allocates; None is no tag."""
        with self._lock:
            stack = self._stack()
            if stack:
                return stack[-1].tag
            return None if self._everyone is None else self._everyone.tag

    def _enter(self, tag: Optional[str], devices: List[int], plain: bool) -> Entered:
        with self._lock:
            stack = self._stack()
            entered = Entered(tag, threading.get_ident(), stack)
            # Memory of no tag comes from the default pool, unless a region for all threads would be
            # asked first.
            if tag is not None or self._everyone is not None:
                entered.pools = {device: self._take(tag, device, stack) for device in devices}
            self._expandable.suspend(entered.pools, plain)
            if stack:
                self._take_off(stack[-1])
            stack.append(entered)
            self._put_on(entered)
            self._everyone_last()
        if self._graphs is not None:
            self._graphs.entered(tag)
        return entered

    def _leave(self, entered: Entered) -> None:
        with self._lock:
            stack = entered.stack
            innermost = stack[-1] is entered
            stack.remove(entered)
            if innermost:
                self._take_off(entered)
            self._give(entered)
            self._expandable.restore()
            if not innermost or not stack:
                return
            if threading.get_ident() != entered.thread:
                raise UsageError(
                    f"region '{entered.tag}' began in thread {entered.thread} inside region "
                    f"'{stack[-1].tag}' and ended in thread {threading.get_ident()}: "
                    "end regions in the thread that began them"
                )
            self._put_on(stack[-1])
            self._everyone_last()

    def of(self, tags: Optional[Iterable[str]]) -> Set[Tuple[int, PoolId]]:
        """The pools of `tags` as (device, pool); None is all but graphs' and strangers'."""
        with self._lock:
            if tags is None:
                keys = set(self._made)
                found = {
                    (device, DEFAULT_POOL) for device in range(self._torch.cuda.device_count())
                }
            else:
                wanted = set(tags)
                keys, found = {key for key in self._made if key[0] in wanted}, set()
            return found | {(key[1], pool) for key in keys for pool in self._made[key]}

    # ------------------------------------------------------------ pools

    def _stack(self) -> List[Entered]:
        stack: Optional[List[Entered]] = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _take(self, tag: Optional[str], device: int, stack: Iterable[Entered] = ()) -> PoolId:
        """Returns a pool of `tag`: that of an outer region of this thread, else one that no thread has entered."""
        made = self._made[tag, device]
        outer = [
            region.pools[device] for region in stack if region.tag == tag and device in region.pools
        ]
        idle = [pool for pool in made if not self._uses[device, pool]]
        if outer or idle:
            pool = (outer or idle)[0]
        else:
            pool = self._torch.cuda.graph_pool_handle()
            # Made by its first entry. That use is never given back.
            self._torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
            self._torch._C._cuda_endAllocateToPool(device, pool)
            made.append(pool)
        self._uses[device, pool] += 1
        return pool

    def _give(self, entered: Entered) -> None:
        for device, pool in entered.pools.items():
            self._uses[device, pool] -= 1

    def _refuse_everyone(self, tag: str) -> None:
        """Raises UsageError where a region for all threads would take memory from others."""
        said = f"region '{tag}' for all threads: "
        if self._everyone is not None:
            raise UsageError(f"{said}that of '{self._everyone.tag}' is open; end it first")
        if not self._last_serves:
            return
        others = [region.tag for region in self._listed if region.pools and region.thread != threading.get_ident()]
        if others:
            raise UsageError(f"{said}another thread has region '{others[0]}' open; begin the one for all threads before it")
        if self._is_capturing() or (self._graphs is not None and self._graphs.under_capture()):
            raise UsageError(f"{said}a graph is under capture; begin the region before the capture")

    def _is_capturing(self) -> bool:
        """Whether this thread captures a graph."""
        thread = threading.get_ident()
        known = self._graphs is not None and thread in self._graphs.under_capture()
        return known or bool(self._torch.cuda.is_current_stream_capturing())

    def _again(self, stack: List[Entered]) -> None:
        """Moves the innermost region's pools to the end of their lists."""
        if stack:
            self._take_off(stack[-1])
            self._put_on(stack[-1])

    def _put_on(self, entered: Entered, for_all: bool = False) -> None:
        # The pool of the graph must stay the last; nobody can put it on the list again.
        if self._last_serves and self._is_capturing():
            return
        c = self._torch._C
        begin = c._cuda_beginAllocateToPool if for_all else c._cuda_beginAllocateCurrentThreadToPool
        for device, pool in entered.pools.items():
            begin(device, pool)
        entered.listed = True
        self._listed.append(entered)

    def _take_off(self, entered: Entered) -> None:
        if not entered.listed:
            return
        entered.listed = False
        self._listed.remove(entered)
        for device, pool in entered.pools.items():
            self._torch._C._cuda_endAllocateToPool(device, pool)
            self._torch._C._cuda_releasePool(device, pool)

    def _everyone_last(self) -> None:
        """Moves the region for all threads behind those of single threads.

        By another pool of its tag, opened before the first is closed: there is no instant at which
        another thread's allocation would get into the default pool with the region's tag on it.
        """
        everyone = self._everyone
        if everyone is None or self._last_serves:
            return
        for device, before in list(everyone.pools.items()):
            after = self._take(everyone.tag, device)
            self._torch._C._cuda_beginAllocateToPool(device, after)
            self._torch._C._cuda_endAllocateToPool(device, before)
            self._torch._C._cuda_releasePool(device, before)
            self._uses[device, before] -= 1
            everyone.pools[device] = after


class ExpandableSegments:
    """Switches expandable segments off while regions are open, where torch cannot have both.

    From 2.11 on, a pool without an allocator of its own may have expandable segments
    (pytorch/pytorch#169491), and ours stay as they are set. Before, depending on the version, an
    allocation inside would be refused. The setting is the process's: other threads get ordinary
    segments meanwhile, and find what they had cached again afterwards.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._needed = version(torch) < (2, 11)
        self._open = 0
        self._settings: Optional[str] = None

    def suspend(self, pools: Dict[int, PoolId], plain: bool = False) -> None:
        """A region with `pools` begins; inside of a `plain` one there are no expandable segments, until all regions have ended."""
        self._open += 1
        is_first = self._open == 1 or (plain and self._settings is None)
        if is_first and (self._needed or plain) and pools:
            settings = self._current(next(iter(pools.values())))
            if settings is not None:
                self._settings = settings
                self._torch.cuda.memory._set_allocator_settings(with_expandable(settings, False))

    def restore(self) -> None:
        """A region ends."""
        self._open -= 1
        if self._open == 0 and self._settings is not None:
            self._torch.cuda.memory._set_allocator_settings(with_expandable(self._settings, True))
            self._settings = None

    def _current(self, pool: PoolId) -> Optional[str]:
        """The allocator's settings where expandable segments are on; `pool` makes asking fast."""
        found = self._torch._C._cuda_memorySnapshot(pool)["allocator_settings"]
        if not found["expandable_segments"]:
            return None
        return str(found.get("PYTORCH_CUDA_ALLOC_CONF") or found.get("PYTORCH_ALLOC_CONF") or "")


def with_expandable(settings: str, enabled: bool) -> str:
    """`settings` with expandable segments on or off. Settings that the text does not name are reset."""
    # A comma inside brackets belongs to a list of roundup_power2_divisions.
    entries, depth = [""], 0
    for letter in settings:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            entries.append("")
        else:
            entries[-1] += letter
    kept = [
        entry
        for entry in entries
        if entry and entry.partition(":")[0].strip() != "expandable_segments"
    ]
    return ",".join([*kept, f"expandable_segments:{enabled}"])


def version(torch: Any) -> Tuple[int, int]:
    """Major and minor version of `torch`."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)
