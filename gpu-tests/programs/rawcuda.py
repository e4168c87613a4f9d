"""What programs ask of the CUDA driver, and NCCL by ctypes, as vLLM's PyNccl has it. Nothing here needs torch.

All words of a buffer are one number, so that a host knows what a buffer must hold and a device fills it fast. The
kernel has the name and the arguments that the simulated driver knows: the programs run there too.
"""

from __future__ import annotations

import ctypes
from typing import Any

from driver import Contexts, call, kernel, launch, load
from steps import program_failed

WORD_MASK = 0xFFFFFFFF
UINT32, SUM = 3, 0
NON_BLOCKING = 1
GRID, BLOCK = 256, 256
#: data[i] = data[i] * mul + add.
AFFINE = b"""
.version 7.0
.target sm_50
.address_size 64
.visible .entry affine_u32(.param .u64 p_data, .param .u32 p_mul, .param .u32 p_add, .param .u64 p_count)
{
    .reg .pred %p;
    .reg .b32 %r<7>;
    .reg .b64 %d<6>;
    ld.param.u64 %d0, [p_data];
    ld.param.u32 %r0, [p_mul];
    ld.param.u32 %r1, [p_add];
    ld.param.u64 %d1, [p_count];
    cvta.to.global.u64 %d0, %d0;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mul.wide.u32 %d2, %r2, %r3;
    cvt.u64.u32 %d3, %r4;
    add.u64 %d2, %d2, %d3;
    mov.u32 %r5, %nctaid.x;
    mul.wide.u32 %d4, %r5, %r3;
again:
    setp.ge.u64 %p, %d2, %d1;
    @%p bra done;
    shl.b64 %d5, %d2, 2;
    add.u64 %d5, %d0, %d5;
    ld.global.u32 %r6, [%d5];
    mad.lo.u32 %r6, %r6, %r0, %r1;
    st.global.u32 [%d5], %r6;
    add.u64 %d2, %d2, %d4;
    bra again;
done:
    ret;
}
\0"""


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Driver(Contexts):
    """What programs ask of the driver; each call must succeed."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: dict[int, ctypes.c_void_p] = {}

    def use(self, gpu: int) -> None:
        """Makes the context of `gpu` current; it has the kernel."""
        super().use(gpu)
        if gpu not in self._kernels:
            self._kernels[gpu] = kernel(load(AFFINE), b"affine_u32")

    def kernel(self, device: int) -> ctypes.c_void_p:
        """The affine kernel of a device that was used."""
        return self._kernels[device]

    def allocate(self, size_bytes: int) -> int:
        """Memory of the current device."""
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Gives memory back."""
        call("cuMemFree_v2", ctypes.c_uint64(address))

    def stream(self) -> ctypes.c_void_p:
        """A stream of the current device."""
        stream = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        return stream

    def fill(self, address: int, value: int, words: int, stream: ctypes.c_void_p) -> None:
        """All of `words` words become `value`."""
        value &= WORD_MASK
        call(
            "cuMemsetD32Async", ctypes.c_uint64(address), ctypes.c_uint(value), ctypes.c_size_t(words), stream
        )

    def affine(self, device: int, address: int, factors: tuple[int, int], words: int, stream: ctypes.c_void_p) -> None:
        """Each word becomes word * factors[0] + factors[1], by a kernel of `device`, which owns the stream."""
        values = ctypes.c_uint64(address), *map(ctypes.c_uint32, factors), ctypes.c_uint64(words)
        launch(self._kernels[device], GRID, BLOCK, stream, *values)

    def copy(self, target: int, source: int, words: int, stream: ctypes.c_void_p) -> None:
        """Copies between devices, or within one."""
        size = ctypes.c_size_t(4 * words)
        call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), size, stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        call("cuStreamSynchronize", stream)

    def expect(self, what: str, address: int, value: int, words: int, stream: ctypes.c_void_p) -> None:
        """Ends the program unless each word is `value`, after the work of `stream`."""
        value &= WORD_MASK
        size = 4 * words
        seen = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoHAsync_v2", seen, ctypes.c_uint64(address), ctypes.c_size_t(size), stream)
        self.wait(stream)
        wanted = value.to_bytes(4, "little") * words
        if seen.raw != wanted:
            first = next(i for i in range(0, size, 4) if seen.raw[i : i + 4] != wanted[i : i + 4])
            got = int.from_bytes(seen.raw[first : first + 4], "little")
            program_failed(f"{what}: word {first // 4} of {words} is {got:#x}, not {value:#x}")


class Nccl:
    """Calls of NCCL, each of which must succeed."""

    def __init__(self, file: str = "libnccl.so.2") -> None:
        self._library = ctypes.CDLL(file)
        size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        self._library.ncclCommInitRank.argtypes = [pointer, number, UniqueId, number]
        self._library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        for name in ("ncclCommAbort", "ncclCommFinalize", "ncclCommDestroy"):
            getattr(self._library, name).argtypes = [pointer]

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; a code other than 0 ends the program."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            program_failed(f"{name} returned {code}")

    def unique_id(self) -> bytes:
        """A new communicator's id."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, name: bytes, rank: int, ranks: int) -> ctypes.c_void_p:
        """A communicator of `ranks` processes, on the current device."""
        made = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(made), ranks, UniqueId.from_buffer_copy(name), rank)
        return made

    def all_of(self, devices: int) -> list[ctypes.c_void_p]:
        """Communicators of all devices of this process."""
        made = (ctypes.c_void_p * devices)()
        self.call("ncclCommInitAll", made, ctypes.c_int(devices), (ctypes.c_int * devices)(*range(devices)))
        return [ctypes.c_void_p(value) for value in made]

    def all_reduce(self, source: int, target: int, words: int, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """Sums words over all ranks."""
        self.call("ncclAllReduce", source, target, words, UINT32, SUM, comm, stream)
