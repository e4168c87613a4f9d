"""Asks NVML as pynvml does, by ctypes, as it is told. It obeys lines on standard input and answers each with one line: `ok ...`,
or `no CODE` where NVML refuses. It never uses CUDA.

    memory INDEX                total, free and used (nvmlDeviceGetMemoryInfo)
    memory2 INDEX VERSION       total, reserved, free and used (nvmlDeviceGetMemoryInfo_v2); VERSION 2 is right
    processes FORM INDEX ROOM   how many, and pid and bytes of each; in form 1, 2 or 3, with room for ROOM of them
    none INDEX                  how many, with no place for any, in form 3
    nowhere                     the processes of a handle that is none

SUBLET_ATTACH: a libsublet.so to come under before NVML is opened, in the tenant that SUBLET_TENANT names.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

if "SUBLET_ATTACH" in os.environ:
    assert ctypes.CDLL(os.environ["SUBLET_ATTACH"]).sublet_attach(None) == 0
nvml = ctypes.CDLL("libnvidia-ml.so.1")


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class ProcessV1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


LISTS = {
    "1": (nvml.nvmlDeviceGetComputeRunningProcesses, ProcessV1),
    "2": (nvml.nvmlDeviceGetComputeRunningProcesses_v2, Process),
    "3": (nvml.nvmlDeviceGetComputeRunningProcesses_v3, Process),
}


def handle(index: str) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(int(index), ctypes.byref(device)) == 0
    return device


def listed(form: str, index: str, room: str) -> tuple[int, list[int]]:
    function, row = LISTS[form]
    # One row more, which must stay as it is.
    rows = (row * (int(room) + 1))()
    rows[int(room)].pid = 4711
    count = ctypes.c_uint(int(room))
    code = function(handle(index), ctypes.byref(count), rows)
    assert rows[int(room)].pid == 4711, "a row beyond the caller's buffer was written"
    found = rows[: count.value] if code == 0 else []
    return code, [count.value, *(figure for process in found for figure in (process.pid, process.used))]


def answer(word: str, *words: str) -> tuple[int, list[int]]:
    memory: Any
    if word == "memory":
        memory = Memory()
        code = nvml.nvmlDeviceGetMemoryInfo(handle(*words), ctypes.byref(memory))
        return code, [memory.total, memory.free, memory.used]
    if word == "memory2":
        index, version = words
        memory = MemoryV2(version=ctypes.sizeof(MemoryV2) | int(version) << 24)
        code = nvml.nvmlDeviceGetMemoryInfo_v2(handle(index), ctypes.byref(memory))
        return code, [memory.total, memory.reserved, memory.free, memory.used]
    if word == "processes":
        return listed(*words)
    count = ctypes.c_uint(0)
    device = handle(*words) if word == "none" else ctypes.c_void_p(1)
    code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), None)
    return code, [count.value]


def main() -> None:
    early = Memory()
    assert nvml.nvmlDeviceGetMemoryInfo(None, ctypes.byref(early)) == 1, "NVML answers before nvmlInit"
    assert nvml.nvmlInit_v2() == 0
    print("ok", flush=True)
    for line in sys.stdin:
        code, figures = answer(*line.split())
        text = " ".join(map(str, figures))
        print(f"ok {text}" if code == 0 else f"no {code} {text}", flush=True)


if __name__ == "__main__":
    main()
