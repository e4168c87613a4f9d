"""A program that holds GPU memory and works on it, to try Sublet with. It needs no framework and knows nothing of Sublet.

::

    sublet run --tenant train -- python3 -m sublet.demo 300MiB

It takes memory on the first GPU. In each step it reads a part of it, which must hold what an earlier step wrote there, and
writes it again. Each step prints a line, and it goes on until it is ended. While its tenant is paused, no line comes.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from typing import NoReturn

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
_U64 = ctypes.c_uint64
_OUT_OF_MEMORY = 2
#: A step works on one part, and the next step on the next.
_PART_BYTES = 64 << 10
_STEP_S = 0.25


class Memory:
    """Memory of the first GPU, empty at first; other libraries of arrays can read it by its address.

    Calls of it wait while the memory is paused. Raises :class:`OSError` if the driver refuses.

    >>> Memory("300MiB")  # doctest: +SKIP
    """

    def __init__(self, size: str) -> None:
        found = re.fullmatch(r"([0-9]+) ?(MiB|GiB)", size)
        if found is None or int(found[1]) == 0:
            raise ValueError(f"{size!r} is no size: say for example 300MiB or 2GiB")
        self.size_bytes = int(found[1]) * _UNITS[found[2]]
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise OSError(f"{error}; without a GPU, start this under `sublet simulate -- bash`") from error
        self._call("cuInit", ctypes.c_uint(0))
        context, address = ctypes.c_void_p(), _U64()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.size_bytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(self.size_bytes))
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def read(self, offset: int = 0) -> int:
        """The number at this place, in bytes from the start."""
        number = _U64()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(number), _U64(self.address + offset), ctypes.c_size_t(8))
        return number.value

    def write(self, number: int, offset: int = 0) -> None:
        """Puts a number at this place, in bytes from the start."""
        self._call("cuMemcpyHtoD_v2", _U64(self.address + offset), ctypes.byref(_U64(number)), ctypes.c_size_t(8))

    def _free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY and name.startswith("cuMemAlloc"):
            free = self._free_bytes() >> 20
            raise OSError(f"GPU 0 has {free} MiB free, not {self.size_bytes >> 20}: `sublet ps` shows who has the rest")
        if code != 0:
            raise OSError(f"the driver refused {name} with {code}: `sublet doctor` says more")


def main() -> NoReturn:
    """Works until it is ended."""
    usage = "usage: python3 -m sublet.demo SIZE, such as 300MiB"
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"{usage}\n\n{__doc__}")
        sys.exit(0)
    if len(sys.argv) != 2:
        sys.exit(usage)
    try:
        memory = Memory(sys.argv[1])
    except (OSError, ValueError) as error:
        sys.exit(f"sublet.demo: {error}")
    print(f"sublet.demo: {memory.size_bytes >> 20} MiB of GPU 0 are taken", file=sys.stderr, flush=True)
    parts, step = memory.size_bytes // _PART_BYTES, 0
    while True:
        step += 1
        offset = step % parts * _PART_BYTES
        found, wanted = memory.read(offset), max(step - parts, 0)
        if found != wanted:
            sys.exit(f"sublet.demo: step {step} found {found} in memory, not {wanted}")
        memory.write(step, offset)
        print(f"step {step}: the memory is right", flush=True)
        time.sleep(_STEP_S)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
