"""Opens a library, makes a child, and has the child use another: forks.py BEFORE USE HOW. Prints what the child's calls answer.

Started again as `forks.py use USE` it is the child that was made by vfork or posix_spawn.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def library(*names: str) -> ctypes.CDLL:
    """A library of the Python environment or the system, by the beginning of its file's name."""
    roots = [Path(entry) / "nvidia" for entry in sys.path if (Path(entry) / "nvidia").is_dir()]
    for name in names:
        found = sorted(path for root in roots for path in root.glob(f"**/{name}*"))
        try:
            return ctypes.CDLL(str(found[0]) if found else name)
        except OSError:
            continue
    raise SystemExit(f"NOT RUN: no {' or '.join(names)}")


def nvml() -> str:
    """Starts NVML."""
    return f"nvml {library('libnvidia-ml.so.1').nvmlInit_v2()}"


def import_torch() -> str:
    """Imports PyTorch."""
    import torch

    return f"torch {torch.version.cuda is not None}"


def count_devices() -> str:
    """Counts devices as PyTorch does by default, which keeps a later fork allowed."""
    import torch

    return f"devices {torch.cuda.device_count()}"


BEFORE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: "nothing",
    "nvml": nvml,
    "driver": lambda: library("libcuda.so.1") is not None,
    "runtime": lambda: library("libcudart.so.13", "libcudart.so.12", "libcudart.so") is not None,
    "cublas": lambda: library("libcublas.so.13", "libcublas.so.12", "libcublas.so") is not None,
    "nccl": lambda: library("libnccl.so.2") is not None,
    "torch": import_torch,
    "count": count_devices,
}


def use_driver() -> str:
    """Makes a context and memory by the driver's own calls."""
    driver = library("libcuda.so.1")
    device, context, memory = ctypes.c_int(-1), ctypes.c_void_p(), ctypes.c_uint64()
    codes = [driver.cuInit(0), driver.cuCtxGetDevice(ctypes.byref(device))]
    codes += [driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), driver.cuCtxSetCurrent(context)]
    codes += [driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 << 20)), driver.cuMemFree_v2(ctypes.c_uint64(64))]
    return f"driver {codes}"


def use_runtime() -> str:
    """Asks for the device before there is a context, then makes memory by the runtime."""
    runtime = library("libcudart.so.13", "libcudart.so.12", "libcudart.so")
    device, memory = ctypes.c_int(-1), ctypes.c_void_p()
    codes = [runtime.cudaGetDeviceCount(ctypes.byref(device)), runtime.cudaGetDevice(ctypes.byref(device))]
    codes += [runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(4 << 20)), runtime.cudaFree(memory)]
    return f"runtime {codes}"


def use_torch() -> str:
    """Adds up a tensor."""
    import torch

    return f"torch {torch.ones(4 << 20, device='cuda').sum().item()}"


USES: dict[str, Callable[[], str]] = {"driver": use_driver, "runtime": use_runtime, "torch": use_torch}


def child(use: str) -> None:
    """The child's part."""
    print(USES[use](), flush=True)


def main() -> None:
    if sys.argv[1] == "use":
        child(sys.argv[2])
        return
    before, use, how = sys.argv[1:4]
    if how == "forkserver":
        multiprocessing.set_start_method("forkserver")
    print(BEFORE[before](), flush=True)
    again = [sys.executable, __file__, "use", use]
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            child(use)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    elif how == "vfork":
        code = subprocess.run(again, close_fds=False, check=False).returncode
    elif how == "spawn":
        code = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn(again[0], again, os.environ), 0)[1])
    else:
        process = multiprocessing.get_context("forkserver").Process(target=child, args=(use,))
        process.start()
        process.join()
        code = process.exitcode or 0
    print(f"ended {code}", flush=True)


if __name__ == "__main__":
    main()
