"""As much of torch as sublet._torch_pools talks to: its allocator's rules for pools, and no memory.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: of the pools on a device's list whose condition
holds, the first one serves an allocation in torch 2.8 and 2.9, the last one from 2.10 on; no pool is twice
on a list; a pool lives while its use count is above nothing.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any, Callable, Dict, List, Optional, Tuple

PoolId = Tuple[int, int]


class FakeC:
    """`torch._C`."""

    def __init__(self) -> None:
        self.lists: Dict[int, List[Tuple[PoolId, Callable[[], bool]]]] = {}
        self.uses: Dict[Tuple[int, PoolId], int] = {}
        self.allocated: List[PoolId] = []
        #: Called between any two changes of a list, as another thread might.
        self.meanwhile: Callable[[], None] = lambda: None
        self.settings = "expandable_segments:False"

    def _begin(self, device: int, pool: PoolId, condition: Callable[[], bool]) -> None:
        key = (device, pool)
        if key in self.uses:
            assert self.uses[key] > 0, "the pool was given up"
        self.uses[key] = self.uses.get(key, 0) + 1
        entries = self.lists.setdefault(device, [])
        if any(pool == listed for listed, _ in entries):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        entries.append((pool, condition))
        self.meanwhile()

    def _cuda_beginAllocateCurrentThreadToPool(self, device: int, pool: PoolId) -> None:
        thread = threading.get_ident()
        self._begin(device, pool, lambda: threading.get_ident() == thread)

    def _cuda_beginAllocateToPool(self, device: int, pool: PoolId) -> None:
        self._begin(device, pool, lambda: True)

    def _cuda_endAllocateToPool(self, device: int, pool: PoolId) -> None:
        entries = self.lists.get(device, [])
        for index, (listed, _) in enumerate(entries):
            if listed == pool:
                del entries[index]
                self.meanwhile()
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def _cuda_releasePool(self, device: int, pool: PoolId) -> None:
        self.uses[device, pool] -= 1

    def _cuda_memorySnapshot(self, pool: Optional[PoolId]) -> Dict[str, Any]:
        on = "expandable_segments:True" in self.settings
        return {
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": self.settings,
                "expandable_segments": on,
            }
        }


class FakeTorch:
    """`torch`; `serving` says which pool the calling thread would allocate from."""

    def __init__(self, version: str = "2.11.0+cu130", devices: int = 2) -> None:
        self.__version__ = version
        self.version = types.SimpleNamespace(cuda="13.0")
        self._C = FakeC()
        # Nothing is one: memory of the simulated driver is shown by its own objects.
        self.Tensor = type("Tensor", (), {})
        self._handles = 0
        self.segments: List[Dict[str, Any]] = []
        self.backend = "native"
        #: The thread whose stream is captured.
        self.capturing: Optional[int] = None
        memory = types.SimpleNamespace(_set_allocator_settings=self._set)
        self.cuda = types.SimpleNamespace(
            CUDAGraph=type("CUDAGraph", (self._graph(),), {"torch": self}),
            device_count=lambda: devices,
            get_allocator_backend=lambda: self.backend,
            graph_pool_handle=self._handle,
            init=lambda: None,
            is_current_stream_capturing=lambda: self.capturing == threading.get_ident(),
            is_available=lambda: True,
            is_initialized=lambda: True,
            memory=memory,
            memory_reserved=lambda device: sum(
                s["total_size"] for s in self.segments if s["device"] == device
            ),
            memory_snapshot=lambda mempool_id=None, include_traces=True: self.segments,
        )

    def _graph(self) -> type:
        return SplitGraph if self._version() >= (2, 14) else FakeGraph

    def _version(self) -> Tuple[int, int]:
        major, minor = self.__version__.split(".")[:2]
        return int(major), int(minor)

    def _handle(self) -> PoolId:
        self._handles += 1
        return (0, self._handles)

    def _set(self, settings: str) -> None:
        self._C.settings = settings

    def serving(self, device: int = 0) -> PoolId:
        """The pool that serves the calling thread on `device`."""
        listed = self._C.lists.get(device, [])
        for pool, condition in listed if self._version() < (2, 10) else listed[::-1]:
            if condition():
                return pool
        return (0, 0)


class FakeGraph:
    """`torch.cuda.CUDAGraph`: its own pool, or one that is given, serves the stream that is captured."""

    torch: FakeTorch
    capturing = False
    captured = False
    replays = 0

    def capture_begin(self, pool: Optional[PoolId] = None) -> None:
        self.capturing = True
        thread = self.torch.capturing = threading.get_ident()
        self.pool_id = pool or self.torch._handle()
        # What other threads ask for is not of the stream that is captured.
        self.serves = lambda: self.capturing and threading.get_ident() == thread
        self.torch._C._begin(0, self.pool_id, self.serves)

    def capture_end(self) -> None:
        self.torch._C._cuda_endAllocateToPool(0, self.pool_id)
        self.torch.capturing = None
        self.capturing, self.captured = False, True

    def pool(self) -> PoolId:
        if not self.captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.pool_id

    def replay(self) -> None:
        self.replays += 1


class SplitGraph(FakeGraph):
    """The same of 2.14 and later: the end of a capture has two parts, and a part of a graph can depend on a value."""

    def capture_end_pre(self) -> None:
        super().capture_end()

    def capture_end_post(self) -> None:
        pass

    def capture_end(self) -> None:
        self.capture_end_pre()
        self.capture_end_post()

    def begin_capture_to_if_node(self, value: object) -> None:
        self._again()

    def end_capture_to_conditional_node(self) -> None:
        self._again()

    def _again(self) -> None:
        self.torch._C._cuda_endAllocateToPool(0, self.pool_id)
        self.torch._C._begin(0, self.pool_id, self.serves)


class Other:
    """Another thread, which does one thing at a time as it is told."""

    def __init__(self) -> None:
        self._work: List[Callable[[], Any]] = []
        self._turn = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._turn.acquire() and self._work:
            try:
                self._answer = self._work.pop()()
            except Exception as error:
                self._answer = error
            self._done.release()

    def does(self, work: Callable[[], Any]) -> Any:
        """What `work` returns in that thread; an exception is raised here."""
        self._work.append(work)
        self._turn.release()
        assert self._done.acquire(timeout=30), "the other thread did not come back"
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def end(self) -> None:
        """Ends the thread."""
        self._turn.release()
        self._thread.join(30)


@contextlib.contextmanager
def other_thread() -> Iterator[Other]:
    """Another thread for the length of the block."""
    other = Other()
    try:
        yield other
    finally:
        other.end()
