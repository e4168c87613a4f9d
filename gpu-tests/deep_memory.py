"""Processes of the deep suites that hold memory: by torch, shared with another process, and by the driver alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

import common
import driver
import runner
from common import JobError


class Holder:
    """Tensors and a graph, and what their sums are."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.graph: Any = None
        self.total: Any = None
        self.wanted: list[float] = []

    def hold(self, gib: float) -> dict[str, Any]:
        """Makes them."""
        import torch

        numbers = torch.Generator(device="cuda")
        numbers.manual_seed(7)
        words = int(gib * common.GIB / 8 / 8)
        self.tensors = [
            torch.empty(words, dtype=torch.float64, device="cuda").uniform_(generator=numbers) for _ in range(8)
        ]
        matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.total = torch.mm(matrix, matrix).sum()
        self.wanted = self._sums()
        return runner.versions()

    def _sums(self) -> list[float]:
        import torch

        self.graph.replay()
        torch.cuda.synchronize()
        return [tensor.sum().item() for tensor in self.tensors] + [self.total.item()]

    def rewrite(self) -> None:
        """Every word changes its sign."""
        import torch

        for tensor in self.tensors:
            tensor.neg_()
        torch.cuda.synchronize()
        self.wanted = [-total for total in self.wanted[:-1]] + self.wanted[-1:]

    def same(self) -> dict[str, Any]:
        """Are the graph's result and all sums as at first, and how long did the first replay take?"""
        import torch

        began = time.perf_counter()
        self.graph.replay()
        torch.cuda.synchronize()
        first_ms = 1000 * (time.perf_counter() - began)
        return {"same": self._sums() == self.wanted, "first_ms": first_ms}


def reader(inbox: Any, outbox: Any) -> None:
    """The process that shares the owner's tensor: says its sum each time, and adds 1."""
    runner.begin(540)
    import torch

    tensor = inbox.get()
    outbox.put(os.getpid())
    while inbox.get():
        total = int(tensor.sum().item())
        tensor.add_(1)
        torch.cuda.synchronize()
        outbox.put(total)


class Owner:
    """The process that made it."""

    def __init__(self) -> None:
        self.queues: Any = None
        self.tensor: Any = None
        self.child: Any = None

    def share(self) -> list[int]:
        """Starts the other one; both process ids."""
        import torch
        import torch.multiprocessing as processes

        context = processes.get_context("spawn")
        self.queues = context.SimpleQueue(), context.SimpleQueue()
        if self.tensor is None:
            self.tensor = torch.zeros(1 << 27, dtype=torch.int64, device="cuda")
        self.child = context.Process(target=reader, args=self.queues, daemon=True)
        self.child.start()
        self.queues[0].put(self.tensor)
        return [os.getpid(), self.queues[1].get()]

    def first_last(self) -> list[int]:
        """What its tensor begins and ends with; nobody writes it then."""
        return [int(self.tensor[at].item()) for at in (0, -1)]

    def same(self) -> bool:
        """Does each see what the other has written?"""
        import torch

        self.tensor.add_(1)
        torch.cuda.synchronize()
        before = int(self.tensor.sum().item())
        self.queues[0].put(True)
        seen = self.queues[1].get()
        return bool(seen == before and int(self.tensor.sum().item()) == before + self.tensor.numel())


class Plain:
    """Memory of the driver's, without torch."""

    def __init__(self) -> None:
        self.driver: Any = None
        self.blocks: list[tuple[int, int]] = []
        self.word = os.getpid()

    def hold(self, gib: float) -> None:
        """Takes so much, in blocks of 256 MiB at most, and fills it."""
        self.driver = self.driver or driver.Driver(only=0)
        left = int(gib * common.GIB)
        while left > 0:
            size = min(left, 256 * common.MIB)
            block = self.driver.alloc(size)
            if block is None:
                raise JobError(f"{size} bytes were refused, with {left} to go")
            self.driver.fill(block.value, self.word, size // 4)
            self.blocks.append((block.value, size))
            left -= size
        self.driver.synchronize()

    def leave(self, gib: float) -> float:
        """Takes all but so much; what is free then, in GiB."""
        self.driver = self.driver or driver.Driver(only=0)
        self.hold(max(0.0, self.driver.free()[0] / common.GIB - gib))
        return float(self.driver.free()[0] / common.GIB)

    def same(self) -> bool:
        """Do the ends of all blocks hold their word?"""
        word = ctypes.c_uint32()
        for address, size in self.blocks:
            for at in (address, address + size - 4):
                self.driver.read(ctypes.byref(word), at, 4)
                if word.value != self.word:
                    return False
        return True


class _ArrayDescriptor(ctypes.Structure):
    """CUDA_ARRAY_DESCRIPTOR."""

    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int), ("channels", ctypes.c_uint))


class Kept:
    """What a plain pause leaves in place."""

    SMALL, LARGE = 64 << 10, 4 << 20
    EVENT_FLAGS = 2 | 4  # without times, for other processes
    #: CU_AD_FORMAT_UNSIGNED_INT32; CU_DEV_RESOURCE_TYPE_SM, with the size of a CUdevResource, or more.
    UINT32, MULTIPROCESSORS, RESOURCE_BYTES = 3, 1, 256

    def __init__(self) -> None:
        self.seed = 1000
        self.event = ctypes.c_void_p()

    def make(self) -> None:
        self.driver = driver.Driver(only=0)
        self.primary = self.driver.contexts[0]
        self.stream, self.graph = ctypes.c_void_p(), ctypes.c_void_p()
        self.ordered, self.host, self.context = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(1))
        self.small, self.copied = (self.driver.alloc(size).value for size in (self.SMALL, self.LARGE))
        driver.call("cuMemAllocAsync", ctypes.byref(self.ordered), ctypes.c_size_t(self.LARGE), self.stream)
        driver.call("cuMemAllocHost_v2", ctypes.byref(self.host), ctypes.c_size_t(self.SMALL))
        self.memory = mmap.mmap(-1, self.LARGE)
        self.registered = ctypes.addressof((ctypes.c_char * 1).from_buffer(self.memory))
        driver.call("cuMemHostRegister_v2", ctypes.c_void_p(self.registered), ctypes.c_size_t(self.LARGE), ctypes.c_uint(0))
        self._capture()
        self.array, words = ctypes.c_void_p(), self.SMALL // 4
        about = _ArrayDescriptor(width=words, height=0, format=self.UINT32, channels=1)
        driver.call("cuArrayCreate_v2", ctypes.byref(self.array), ctypes.byref(about))
        self._make_green()
        driver.call("cuCtxCreate_v2", ctypes.byref(self.context), ctypes.c_uint(0), ctypes.c_int(0))
        self.own = self.driver.alloc(self.LARGE).value
        driver.call("cuCtxSetCurrent", self.primary)
        self._write()

    def _make_green(self) -> None:
        """A green context of some of the multiprocessors, and a stream of it."""
        self.green, self.green_stream, description, green = (ctypes.c_void_p() for _ in range(4))
        whole, some, device = *(ctypes.create_string_buffer(self.RESOURCE_BYTES) for _ in range(2)), ctypes.c_int(0)
        driver.call("cuDeviceGetDevResource", device, whole, ctypes.c_int(self.MULTIPROCESSORS))
        groups = ctypes.c_uint(1)
        driver.call("cuDevSmResourceSplitByCount", some, ctypes.byref(groups), whole, None, ctypes.c_uint(0), ctypes.c_uint(8))
        driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), some, ctypes.c_uint(1))
        driver.call("cuGreenCtxCreate", ctypes.byref(green), description, device, ctypes.c_uint(1))
        driver.call("cuCtxFromGreenCtx", ctypes.byref(self.green), green)
        driver.call("cuGreenCtxStreamCreate", ctypes.byref(self.green_stream), green, ctypes.c_uint(1), ctypes.c_int(0))

    def _capture(self) -> None:
        """A graph that fills memory of its own and copies it to `copied`."""
        inside, graph, words = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t(self.LARGE // 4)
        driver.call("cuStreamBeginCapture_v2", self.stream, ctypes.c_int(0))
        driver.call("cuMemAllocAsync", ctypes.byref(inside), ctypes.c_size_t(self.LARGE), self.stream)
        driver.call("cuMemsetD32Async", inside, ctypes.c_uint(77), words, self.stream)
        size = ctypes.c_size_t(self.LARGE)
        driver.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(self.copied), inside, size, self.stream)
        driver.call("cuMemFreeAsync", inside, self.stream)
        driver.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        driver.call("cuGraphInstantiateWithFlags", ctypes.byref(self.graph), graph, ctypes.c_uint64(0))

    def _write(self) -> None:
        self.seed += 10
        self.driver.fill(self.small, self.seed, self.SMALL // 4)
        self.driver.fill(self.ordered.value, self.seed + 1, self.LARGE // 4)
        self.driver.synchronize()
        driver.call("cuCtxSetCurrent", self.context)
        self.driver.fill(self.own, self.seed + 2, self.LARGE // 4)
        self.driver.synchronize()
        driver.call("cuCtxSetCurrent", self.primary)
        for address, size, word in ((self.registered, self.LARGE, 3), (self.host.value, self.SMALL, 4)):
            words = (ctypes.c_uint32 * (size // 4)).from_address(address or 0)
            words[:] = [self.seed + word] * (size // 4)
        words = (ctypes.c_uint32 * (self.SMALL // 4))(*[self.seed + 5] * (self.SMALL // 4))
        driver.call("cuMemcpyHtoA_v2", self.array, ctypes.c_size_t(0), words, ctypes.c_size_t(self.SMALL))

    def _holds(self, address: int, size: int, word: int) -> bool:
        words = (ctypes.c_uint32 * (size // 4))()
        self.driver.read(words, address, size)
        return set(words) == {word}

    def wrong(self) -> list[str]:
        """What is not as it was; writes all once more."""
        found = {
            "plain memory under 1 MiB": self._holds(self.small, self.SMALL, self.seed),
            "memory of a stream": self._holds(self.ordered.value, self.LARGE, self.seed + 1),
        }
        driver.call("cuCtxSetCurrent", self.context)
        found["memory of another context"] = self._holds(self.own, self.LARGE, self.seed + 2)
        driver.call("cuCtxSetCurrent", self.primary)
        for what, source, word in (("registered", self.registered, 3), ("of the driver", self.host.value, 4)):
            size = ctypes.c_size_t(self.SMALL)
            driver.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.small), ctypes.c_void_p(source), size, self.stream)
            driver.call("cuStreamSynchronize", self.stream)
            found[f"host memory, {what}"] = self._holds(self.small, self.SMALL, self.seed + word)
        self.driver.fill(self.copied, 0, self.LARGE // 4)
        driver.call("cuGraphLaunch", self.graph, self.stream)
        driver.call("cuStreamSynchronize", self.stream)
        found["a graph that allocates"] = self._holds(self.copied, self.LARGE, 77)
        words = (ctypes.c_uint32 * (self.SMALL // 4))()
        driver.call("cuMemcpyAtoH_v2", words, self.array, ctypes.c_size_t(0), ctypes.c_size_t(self.SMALL))
        found["an array"] = set(words) == {self.seed + 5}
        driver.call("cuCtxSetCurrent", self.green)
        driver.call("cuMemsetD32Async", ctypes.c_uint64(self.copied), ctypes.c_uint(78), ctypes.c_size_t(self.LARGE // 4), self.green_stream)
        driver.call("cuStreamSynchronize", self.green_stream)
        driver.call("cuCtxSetCurrent", self.primary)
        found["work in a green context"] = self._holds(self.copied, self.LARGE, 78)
        self._write()
        return [what for what, holds in found.items() if not holds]

    def share_event(self) -> str:
        """A handle by which another process opens an event of this one."""
        handle = (ctypes.c_char * 64)()
        driver.call("cuEventCreate", ctypes.byref(self.event), ctypes.c_uint(self.EVENT_FLAGS))
        driver.call("cuEventRecord", self.event, self.stream)
        driver.call("cuIpcGetEventHandle", handle, self.event)
        return bytes(handle).hex()

    def open_event(self, handle: str) -> None:
        class Handle(ctypes.Structure):
            _fields_ = (("reserved", ctypes.c_char * 64),)

        driver.call("cuIpcOpenEventHandle", ctypes.byref(self.event), Handle.from_buffer_copy(bytes.fromhex(handle)))

    def record(self) -> None:
        """Records it behind some work."""
        self.driver.fill(self.copied, 1, self.LARGE // 4)
        driver.call("cuEventRecord", self.event, self.stream)

    def wait(self) -> None:
        """Waits for it, on the host and on a stream."""
        driver.call("cuEventSynchronize", self.event)
        driver.call("cuStreamWaitEvent", self.stream, self.event, ctypes.c_uint(0))
        driver.call("cuStreamSynchronize", self.stream)


class _Pair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class _RestoreArguments(ctypes.Structure):
    """CUcheckpointRestoreArgs, CUDA 13.0."""

    _fields_ = (("pairs", ctypes.POINTER(_Pair)), ("count", ctypes.c_uint), ("reserved", ctypes.c_char * 52))


def restore_on(pid: int, places: dict[int, int]) -> str:
    """Has the driver restore a checkpointed process, with the memory and contexts of each GPU on the one that `places` names.

    What the driver says. `cuCheckpointProcessRestore` of CUDA 13.0 wants every GPU that the process was checkpointed on."""
    pairs = (_Pair * len(places))()
    for pair, (old, new) in zip(pairs, places.items(), strict=True):
        driver.call("cuDeviceGetUuid_v2", pair.old, ctypes.c_int(old))
        driver.call("cuDeviceGetUuid_v2", pair.new, ctypes.c_int(new))
    arguments, name = _RestoreArguments(pairs=pairs, count=len(places)), ctypes.c_char_p()
    code = driver.library().cuCheckpointProcessRestore(ctypes.c_int(pid), ctypes.byref(arguments))
    driver.call("cuGetErrorName", ctypes.c_int(code), ctypes.byref(name))
    return f"{code} {(name.value or b'').decode()}"
