"""Memory, kernels, streams and a graph through ctypes. Prints what happened, without addresses."""

import ctypes
import os
import socket

U32, U64, SIZE, PTR, INT = (
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_int,
)
WORDS = 1024


class Location(ctypes.Structure):
    _fields_ = [("type", INT), ("id", INT)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", INT),
        ("handle_types", INT),
        ("location", Location),
        ("win32", PTR),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", INT)]


cuda = ctypes.CDLL("libcuda.so.1")


def name_of(code):
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(INT(code), ctypes.byref(text))
    return text.value.decode()


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name}: {name_of(code)}")


def free_bytes():
    free, total = SIZE(), SIZE()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def launch(kernel, stream, *arguments):
    function = PTR()
    call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
    places = (PTR * len(arguments))(
        *[ctypes.cast(ctypes.pointer(a), PTR) for a in arguments]
    )
    one = ctypes.c_uint(1)
    call("cuLaunchKernel", function, one, one, one, one, one, one, ctypes.c_uint(0), stream, places, None)


def read(address, count):
    words = (U32 * count)()
    call("cuMemcpyDtoH_v2", words, address, SIZE(4 * count))
    return list(words)


def map_handle(handle, size):
    address = U64()
    call("cuMemAddressReserve", ctypes.byref(address), SIZE(size), SIZE(0), U64(0), U64(0))
    call("cuMemMap", address, SIZE(size), SIZE(0), handle, U64(0))
    access = Access(Location(1, 0), 3)
    call("cuMemSetAccess", address, SIZE(size), ctypes.byref(access), SIZE(1))
    return address


def unmap(address, size):
    call("cuMemUnmap", address, SIZE(size))
    call("cuMemAddressFree", address, SIZE(size))


call("cuInit", 0)
context, module, stream = PTR(), PTR(), PTR()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", ctypes.byref(module), b"image")
call("cuStreamCreate", ctypes.byref(stream), 1)
before = free_bytes()

prop = Prop(type=1, handle_types=1, location=Location(1, 0))
granule = SIZE()
call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(prop), 0)
handle = U64()
call("cuMemCreate", ctypes.byref(handle), granule, ctypes.byref(prop), U64(0))
data = map_handle(handle, granule.value)
launch("fill_u32", stream, data, U32(4), U64(WORDS))
launch("affine_u32", stream, data, U32(10), U32(2), U64(WORDS))
call("cuStreamSynchronize", stream)
words = read(data, WORDS)
print("kernels:", words[0], words[-1], sum(words))

# The descriptor travels as libraries send it, through a socket, and comes back under another number.
fd = INT(-1)
call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, U64(0))
left, right = socket.socketpair()
socket.send_fds(left, [b"x"], [fd.value])
os.close(fd.value)
_, fds, _, _ = socket.recv_fds(right, 1, 1)
imported = U64()
call("cuMemImportFromShareableHandle", ctypes.byref(imported), PTR(fds[0]), 1)
os.close(fds[0])
alias = map_handle(imported, granule.value)
print("import:", read(alias, 2))
call("cuMemsetD32_v2", alias, ctypes.c_uint(8), SIZE(2))
print("import writes:", read(data, 3))

call("cuStreamBeginCapture_v2", stream, 0)
launch("add_u32", stream, data, data, data, U64(WORDS))
graph, ready = PTR(), PTR()
call("cuStreamEndCapture", stream, ctypes.byref(graph))
call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, U64(0))
for _ in range(3):
    call("cuGraphLaunch", ready, stream)
call("cuStreamSynchronize", stream)
print("graph:", read(data, 3))
call("cuGraphExecDestroy", ready)
call("cuGraphDestroy", graph)

null = os.open("/dev/null", os.O_RDWR)
bad = U64()
print("refused import fails:", cuda.cuMemImportFromShareableHandle(ctypes.byref(bad), PTR(null), 1) != 0)
os.close(null)
print("refused kernel:", name_of(cuda.cuModuleGetFunction(ctypes.byref(PTR()), module, b"nothing")))

unmap(alias, granule.value)
call("cuMemRelease", imported)
unmap(data, granule.value)
call("cuMemRelease", handle)
call("cuStreamDestroy_v2", stream)
print("missing at the end:", before - free_bytes())
