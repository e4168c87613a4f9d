"""One rank of a job that finds NCCL by ctypes, as vLLM's PyNccl does: libnccl.so.2, or what SPMD_NCCL names. Arguments and
answers as of spmd.c."""

import argparse
import ctypes
import os
import sys
import time

WORDS = 512
UINT32, SUM = 3, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def check(code, what):
    if code != 0:
        print(f"fail {what}: {code}", flush=True)
        os._exit(1)


def shared_id(nccl, path, rank):
    """The id that rank 0 makes for all: a file that appears whole."""
    unique_id = UniqueId()
    if rank == 0:
        check(nccl.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
        with open(path + ".new", "wb") as file:
            file.write(bytes(unique_id))
        os.rename(path + ".new", path)
        return unique_id
    deadline = time.monotonic() + 120
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            print("fail no id came from rank 0", flush=True)
            os._exit(1)
        time.sleep(0.001)
    with open(path, "rb") as file:
        return UniqueId.from_buffer_copy(file.read())


def main():
    parser = argparse.ArgumentParser()
    for name in ("rank", "ranks", "device", "steps", "stick-at"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--id")
    parser.add_argument("--mode")
    options = parser.parse_args()

    cuda = ctypes.CDLL("libcuda.so.1")
    nccl = ctypes.CDLL(os.environ.get("SPMD_NCCL", "libnccl.so.2"))
    u64, pointer = ctypes.c_uint64, ctypes.c_void_p
    nccl.ncclCommInitRank.argtypes = [pointer, ctypes.c_int, UniqueId, ctypes.c_int]
    nccl.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
    nccl.ncclCommDestroy.argtypes = [pointer]

    context, first, data, stream = pointer(), u64(), u64(), pointer()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), options.device), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    check(cuda.cuMemAlloc_v2(ctypes.byref(first), ctypes.c_size_t(2 << 20)), "cuMemAlloc")
    print("ok ready", flush=True)

    words = (ctypes.c_uint32 * WORDS)(*[(i * 2654435761 + options.rank) % 2**32 for i in range(WORDS)])
    check(cuda.cuMemAlloc_v2(ctypes.byref(data), ctypes.c_size_t(WORDS * 4)), "cuMemAlloc")
    check(cuda.cuMemcpyHtoD_v2(data, words, ctypes.c_size_t(WORDS * 4)), "cuMemcpyHtoD")
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1), "cuStreamCreate")

    comm = pointer()
    unique_id = shared_id(nccl, options.id, options.rank)
    check(nccl.ncclCommInitRank(ctypes.byref(comm), options.ranks, unique_id, options.rank), "ncclCommInitRank")
    for step in range(options.steps):
        code = nccl.ncclAllReduce(data.value, data.value, WORDS, UINT32, SUM, comm, stream)
        check(code, "ncclAllReduce")
        if step % 5 == options.rank:
            check(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize")
    check(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize")
    check(cuda.cuMemcpyDtoH_v2(words, data, ctypes.c_size_t(WORDS * 4)), "cuMemcpyDtoH")
    if "SPMD_NCCL" in os.environ:
        # What is loaded instead of NCCL has the calls of AMem and NCCL's; all ranks make them.
        check(nccl.ncclPause(None), "ncclPause")
        check(nccl.ncclResume(None), "ncclResume")
    check(nccl.ncclCommDestroy(comm), "ncclCommDestroy")
    print("ok", options.steps, sum((i + 1) * word for i, word in enumerate(words)) % 2**64, flush=True)
    sys.stdin.read()


main()
