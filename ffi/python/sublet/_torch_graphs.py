"""The tags of a captured graph's memory, so that no replay touches memory that is away.

A graph's kernels work on addresses that were fixed when it was captured. While a tag is paused, the addresses of its
memory hold nothing: a replay would end the context by an illegal access. What torch allocates
during a capture comes from the graph's private pool, and belongs to the region that is open then; so the
tags of a pool are those under which graphs were captured into it. Graphs that share a pool share its tags.

Memory that a graph uses and that is of no such pool (weights, a cache) is not known here.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional, Set, Tuple

from sublet._errors import UsageError
from sublet._native import Library

PoolId = Tuple[int, int]
#: Where a graph keeps its pool.
_POOL = "_sublet_pool"


class Capture:
    """A capture under way, and the tags under which it allocates."""

    def __init__(self, graph: Any, thread: int) -> None:
        self.graph, self.thread = graph, thread
        self.tags: Set[str] = set()


class Graphs:
    """The graphs of this process. Methods may be called from any thread.

    Args:
        torch: the module.
        library: whose tags are wanted.
    """

    def __init__(self, torch: Any, library: Optional[Library]) -> None:
        self._torch, self._library = torch, library
        self._lock = threading.Lock()
        self._captures: List[Capture] = []
        self._tags: Dict[PoolId, Set[str]] = {}
        #: Of each pool whose memory was there: the library's count of changes then.
        self._there: Dict[PoolId, int] = {}

    def begun(self, graph: Any, tag: Optional[str]) -> None:
        """This thread captures `graph`; what it allocates belongs to `tag`."""
        capture = Capture(graph, threading.get_ident())
        with self._lock:
            self._captures.append(capture)
        self.entered(tag)

    def entered(self, tag: Optional[str]) -> None:
        """From now on what this thread allocates belongs to `tag`."""
        thread = threading.get_ident()
        with self._lock:
            for capture in self._captures:
                if tag is not None and capture.thread == thread:
                    capture.tags.add(tag)

    def ended(self, graph: Any) -> None:
        """The capture of `graph` has ended, well or not."""
        with self._lock:
            mine = [capture for capture in self._captures if capture.graph is graph]
            self._captures = [capture for capture in self._captures if capture.graph is not graph]
        tags = {tag for capture in mine for tag in capture.tags}
        try:
            pool: PoolId = tuple(graph.pool())
        except RuntimeError:
            # It did not end well, and there is nothing to replay.
            return
        with self._lock:
            if tags:
                self._tags.setdefault(pool, set()).update(tags)
                self._there.pop(pool, None)
        setattr(graph, _POOL, pool)

    def under_capture(self) -> Set[int]:
        """The threads that capture."""
        with self._lock:
            return {capture.thread for capture in self._captures}

    def refuse_away(self, graph: Any) -> None:
        """Raises UsageError if memory of `graph`'s own pool is paused. Otherwise costs a fraction of a microsecond."""
        pool: Optional[PoolId] = getattr(graph, _POOL, None)
        if pool is None or pool not in self._tags or self._library is None:
            return
        tags = self._tags[pool]
        changes = self._library.changes()
        if self._there.get(pool) == changes:
            return
        away = sorted(tag for tag in list(tags) if self._library.tag_is_paused(tag))
        if not away:
            self._there[pool] = changes
            return
        # A pool that has no memory of its own has none that is away.
        if self._has_memory(pool):
            named = ", ".join(f"'{tag}'" for tag in away)
            raise UsageError(
                f"replay: memory of this graph belongs to tag {named}, which is paused, and its kernels "
                f"would touch memory that is away: call sublet.resume(tags={away}) first",
                tags=away,
            )

    def _has_memory(self, pool: PoolId) -> bool:
        segments = self._torch.cuda.memory_snapshot()
        return any(tuple(segment["segment_pool_id"]) == pool for segment in segments)
