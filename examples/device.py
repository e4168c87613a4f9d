"""Device memory by calls of the driver, as a library that knows nothing of Sublet makes them."""

from __future__ import annotations

import ctypes

U64 = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_SUCCESS = 0
_LAZY_PEER_ACCESS = 1


class DriverError(Exception):
    """A call of the driver failed."""


class _Handle(ctypes.Structure):
    """What `cuIpcGetMemHandle` gives."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class Memory:
    """Bytes on a device, own or opened."""

    def __init__(self, device: Device, address: int, size_bytes: int, opened: bool = False) -> None:
        self._device, self.address, self.size_bytes, self._opened = device, address, size_bytes, opened

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def write(self, data: bytes, offset: int = 0) -> None:
        """Copies `data` to the device."""
        self._device.call("cuMemcpyHtoD_v2", U64(self.address + offset), data, _SIZE(len(data)))

    def read(self, size_bytes: int = -1, offset: int = 0) -> bytes:
        """Bytes of the device; all by default."""
        size_bytes = self.size_bytes - offset if size_bytes < 0 else size_bytes
        buffer = ctypes.create_string_buffer(size_bytes)
        self._device.call("cuMemcpyDtoH_v2", buffer, U64(self.address + offset), _SIZE(size_bytes))
        return buffer.raw

    def copy(self, source: Memory, size_bytes: int, *, to: int = 0, at: int = 0) -> None:
        """Copies on the device, from `at` of `source` to `to` here."""
        self._device.call("cuMemcpyDtoD_v2", U64(self.address + to), U64(source.address + at), _SIZE(size_bytes))

    def handle(self) -> str:
        """What another process opens it by."""
        handle = _Handle()
        self._device.call("cuIpcGetMemHandle", ctypes.byref(handle), U64(self.address))
        return bytes(handle).hex()

    def free(self) -> None:
        """Gives it back, or closes what was opened."""
        self._device.call("cuIpcCloseMemHandle" if self._opened else "cuMemFree_v2", U64(self.address))


class Device:
    """One device, with its primary context current on the calling thread."""

    def __init__(self, ordinal: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(ordinal))
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Calls the driver."""
        code = getattr(self._driver, name)(*arguments)
        if code != _SUCCESS:
            word = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(word))
            raise DriverError(f"{name} failed with {code} ({(word.value or b'an unknown code').decode()})")

    def allocate(self, size_bytes: int) -> Memory:
        """Memory of this process's own."""
        address = U64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size_bytes))
        return Memory(self, address.value, size_bytes)

    def open(self, handle: str, size_bytes: int) -> Memory:
        """Memory of another process."""
        address = U64()
        given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return Memory(self, address.value, size_bytes, opened=True)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """What is free on the device, and all of it."""
        free, total = _SIZE(), _SIZE()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def total_bytes(self) -> int:
        """All memory of the device."""
        return self.free_and_total_bytes()[1]
