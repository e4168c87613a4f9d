"""Calls of PyTorch: pools for regions, memory that nobody uses, CPU tensors over saved bytes.

Imported only where torch is imported already. Made for torch 2.8 to 2.15; `check_supported` says
what follows for others.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Callable, ContextManager, Dict, List, Optional, Set, Tuple

from sublet._errors import NotAttachedError, UsageError
from sublet._library import own_library
from sublet._memory import host_bytes
from sublet._native import Library
from sublet._torch_graphs import Graphs
from sublet._torch_pools import Pools, version

OLDEST, NEWEST = (2, 8), (2, 15)
#: What regions need of torch's native part.
_NEEDED = (
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
)
#: What moves a graph's pool to the end of torch's list in the middle of a capture (2.12 and later).
_CONDITIONAL = (
    "begin_capture_to_if_node",
    "begin_capture_to_while_node",
    "end_capture_to_conditional_node",
)
#: An address and a size in bytes.
Range = Tuple[int, int]

_log = logging.getLogger("sublet")
_setup = threading.Lock()
_pools: Optional[Pools] = None
_graphs: Optional[Graphs] = None
#: What was warned of.
_warned: Set[str] = set()


def is_usable() -> bool:
    """Whether this process has imported a torch that regions work with. Imports nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return False
    return _refusal(torch) is None


def check_supported() -> None:
    """Raises UsageError where regions do not work with the torch of this process, saying what does.

    Warns, once, of a version that was not tried.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    said = support()
    if said is None:
        return
    if _refusal(torch) is not None:
        raise UsageError(f"region: {said}")
    if said not in _warned:
        _warned.add(said)
        warnings.warn(said, stacklevel=3)


def support() -> Optional[str]:
    """Returns what does not work, or was not tried, with the torch of this process; None if all works."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    refusal = _refusal(torch)
    if refusal is not None:
        return refusal
    if OLDEST <= version(torch) <= NEWEST:
        return None
    return (
        f"torch {torch.__version__} was not tried ({_dotted(OLDEST)} to {_dotted(NEWEST)} were): "
        "pausing everything does not depend on torch's version; regions depend on functions that "
        "are there, but may have changed their meaning"
    )


def _refusal(torch: Any) -> Optional[str]:
    """Why regions cannot work, and what does all the same."""
    named = f"torch {torch.__version__}"
    if getattr(torch.version, "cuda", None) is None:
        return f"{named} is not built for CUDA: it has no device memory that Sublet could pause"
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return (
            f"{named} uses the allocator '{backend}', whose memory stays on the device; choose the "
            "native one in PYTORCH_CUDA_ALLOC_CONF"
        )
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing:
        return (
            f"{named} has no {missing[0]}: regions do not work, pausing everything does; regions "
            f"were tried with torch {_dotted(OLDEST)} to {_dotted(NEWEST)}"
        )
    return None


def _dotted(pair: Tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def reserved_bytes() -> Dict[int, int]:
    """Bytes that torch's allocator has from the driver, by device; none before CUDA is used.

    Read before an attach, this is what came too early to be pausable.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return {}
    reserved = {
        device: int(torch.cuda.memory_reserved(device))
        for device in range(torch.cuda.device_count())
    }
    return {device: size_bytes for device, size_bytes in reserved.items() if size_bytes}


# ---------------------------------------------------------------- regions


def region_pool(
    tag: Optional[str], device: Optional[int], all_threads: bool, plain: bool = False
) -> ContextManager[None]:
    """A context manager in which torch allocates from pools that belong to `tag` alone.

    Args:
        tag: the region's tag; None is memory of no tag.
        device: an ordinal as torch counts them, or None for every device. On other devices memory
            belongs to no tag.
        all_threads: False is the calling thread; True every thread that is in no region of its own.
        plain: expandable segments are off inside.

    What is caught: everything this thread allocates through torch on any stream, also by extensions
    that use torch's allocator, and memory of graphs captured inside (it comes from the graph's own
    pool, and belongs to the tag). With `all_threads`, also what autograd's backward threads, data
    loader threads and C++ threads allocate. What is not: blocks that were cached before (they
    belong to no tag, and are not used inside); without `all_threads`, memory that `backward()`
    allocates, since autograd has a thread for each device; what `torch.compile` runs with CUDA
    graph trees, which must stay outside of regions, because they choose a pool for the calling
    thread themselves.

    A pool keeps what is freed for the next region of its tag: `torch.cuda.empty_cache()` does not
    give it back, a pause does, without copying. While any region is open torch frees no cached
    memory of others when memory is short, and reuses no block that was used on a second stream:
    keep regions around allocations, not around a whole run.

    Raises:
        UsageError: this torch has no such pools, or a region for all threads is open already.
    """
    torch: Any = sys.modules["torch"]
    refusal = _refusal(torch)
    if refusal is not None:
        raise UsageError(f"region '{tag}': {refusal}")
    pools = _all_pools(torch)
    devices = range(torch.cuda.device_count()) if device is None else [device]
    if all_threads:
        if tag is None:
            raise UsageError("a region for all threads needs a tag")
        return pools.everyone(tag, devices, plain)
    return pools.region(tag, devices, plain)


def _all_pools(torch: Any) -> Pools:
    """The pools of this process, made at first use."""
    global _graphs, _pools
    with _setup:
        if _pools is None:
            torch.cuda.init()
            _graphs = Graphs(torch, _library())
            _pools = Pools(torch, _graphs)
            _follow_graphs(torch, _pools, _graphs)
        return _pools


def _library() -> Optional[Library]:
    """The library of this process, where it is under Sublet."""
    try:
        return own_library()
    except NotAttachedError:
        return None


def _follow_graphs(torch: Any, pools: Pools, graphs: Graphs) -> None:
    """Has both told of every capture, and replays refused whose memory is away, by wrappers: torch tells nobody."""
    kind = torch.cuda.CUDAGraph
    # From 2.14 on the end has two parts, which may be called one by one. The first ends the capture.
    ending = "capture_end_pre" if hasattr(kind, "capture_end_pre") else "capture_end"
    capture_begin: Callable[..., None] = kind.capture_begin
    capture_end: Callable[..., None] = getattr(kind, ending)
    replay: Callable[..., None] = kind.replay

    @functools.wraps(capture_begin)
    def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(graph, *args, **kwargs)
        pools.capture_begun()
        graphs.begun(graph, pools.tag())

    @functools.wraps(capture_end)
    def end(graph: Any, *args: Any, **kwargs: Any) -> None:
        try:
            capture_end(graph, *args, **kwargs)
        finally:
            graphs.ended(graph)
            pools.capture_ended()

    @functools.wraps(replay)
    def replayed(graph: Any, *args: Any, **kwargs: Any) -> None:
        graphs.refuse_away(graph)
        replay(graph, *args, **kwargs)

    kind.capture_begin, kind.replay = begin, replayed
    setattr(kind, ending, end)
    for name in _CONDITIONAL:
        if hasattr(kind, name):
            setattr(kind, name, _then(getattr(kind, name), pools.capture_begun))


def _then(method: Callable[..., None], after: Callable[[], None]) -> Callable[..., None]:
    """`method`, and then `after`."""

    @functools.wraps(method)
    def both(graph: Any, *args: Any, **kwargs: Any) -> None:
        method(graph, *args, **kwargs)
        after()

    return both


def follow_graphs() -> None:
    """Captures that begin from now on are followed, also without a region."""
    _all_pools(sys.modules["torch"])


def capture_belongs(tag: str) -> None:
    """Gives later allocations of this thread's capture to `tag`, by other means than a region."""
    if _graphs is not None:
        _graphs.entered(tag)


# ---------------------------------------------------------------- memory nobody uses


def unused_blocks(tags: Optional[Iterable[str]]) -> List[Range]:
    """Ranges of device memory that torch has cached and nobody uses: a pause need not save them.

    Call it when no launch can reach a device any more and all launches have ended. What
    is unused then stays so until the pause is over.

    Args:
        tags: whose memory; None is all of it.

    Returns:
        Address and size in bytes, sorted, without overlap. Neighbours are one range, which may
        therefore span several allocations, or be a part of one.

    Why the contents are dead: torch hands a block out in the order of its stream, so kernels that
    still read a free block may be queued on it; but what is queued has ended by then, and no later
    launch may read a block before it was handed out again and written. A block whose last use was
    on another stream (`record_stream`) is not free until torch has seen that use end, and is not
    among these. A thread that is handed one of them meanwhile cannot have written it: its launches
    wait.

    Left out: memory of CUDA graphs, whose replays use blocks that count as free, and pools that
    others made. Some 2 us for each block of the allocator. Waits for the allocator's lock.
    """
    torch: Any = sys.modules.get("torch")
    if not is_usable() or not torch.cuda.is_initialized():
        return []
    return inactive_ranges(_segments(torch), _all_pools(torch).of(tags))


def _segments(torch: Any) -> Any:
    """The allocator's segments, without its history where the version can leave that out."""
    snapshot = torch.cuda.memory_snapshot
    if "include_traces" in inspect.signature(snapshot).parameters:
        return snapshot(include_traces=False)
    return snapshot()


def inactive_ranges(
    segments: Iterable[Dict[str, Any]], pools: Iterable[Tuple[int, Tuple[int, int]]]
) -> List[Range]:
    """The inactive blocks of `segments` that lie in `pools` (device, pool), sorted and merged."""
    wanted = set(pools)
    found = [
        (block["address"], block["size"])
        for segment in segments
        if (segment["device"], tuple(segment["segment_pool_id"])) in wanted
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    found.sort()
    merged: List[Range] = []
    for address, size_bytes in found:
        if merged and sum(merged[-1]) == address:
            merged[-1] = (merged[-1][0], merged[-1][1] + size_bytes)
        else:
            merged.append((address, size_bytes))
    return merged


# ---------------------------------------------------------------- saved bytes


def byte_range(tensor: Any) -> Range:
    """Address and size in bytes of what `tensor` covers, from its first to its last element.

    Raises:
        UsageError: it is no strided tensor on a CUDA device.
    """
    torch: Any = sys.modules["torch"]
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"a torch.Tensor is wanted, not {type(tensor).__name__}")
    if not tensor.is_cuda or tensor.layout != torch.strided:
        raise UsageError(
            f"a strided tensor on a CUDA device is wanted, not {tensor.layout} on {tensor.device}"
        )
    if not tensor.numel():
        return int(tensor.data_ptr()), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return int(tensor.data_ptr()), (last + 1) * int(tensor.element_size())


def host_tensor(tensor: Any) -> Any:
    """A CPU tensor like `tensor`, with its strides, over the bytes that a pause saved of it.

    Args:
        tensor: a tensor whose memory is away; only its place and shape are looked at.

    Nothing is copied where the saved bytes lie in one piece. Where they do not, as with more than
    256 MiB, the tensor is over a copy, and the logger `sublet` says so (debug). The storage begins
    at the first element. Valid until the resume of this memory begins. Writing to it changes what
    the resume brings back.

    Raises:
        UsageError: it is no strided tensor on a CUDA device, or its bytes are not on the host.
    """
    torch: Any = sys.modules["torch"]
    address, size_bytes = byte_range(tensor)
    if not size_bytes:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = torch.frombuffer(_writable(host_bytes(address, size_bytes)), dtype=torch.uint8)
    result = torch.empty(0, dtype=tensor.dtype)
    # Any type of elements, also those that a buffer has no name for.
    result.set_(raw.untyped_storage(), 0, tensor.size(), tensor.stride())
    if tensor.is_conj():
        result = result.conj()
    return torch._neg_view(result) if tensor.is_neg() else result


def _writable(view: memoryview) -> Any:
    """The bytes of `view` in a form that torch.frombuffer takes without a warning."""
    owner = view.obj
    if not memoryview(owner).readonly:
        return owner
    _log.debug(
        "host_copy: %d saved bytes lie in several pieces; the tensor is over a copy", view.nbytes
    )
    return bytearray(view)
