"""Programs that ask how much memory a GPU has, and size themselves by the answer, while others take turns on it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import Stage, simulated_node
from simdriver import MIB
from worker import Worker

GPU_BYTES = 128 * MIB
#: As engines want it: four fifths of the GPU.
SHARE_BYTES = 102 * MIB
AUTO = {"SUBLET_TURNS": "auto,wait=2m"}
#: What NVIDIA's management library says of GPU 0: total, free and used.
NVML = """
import ctypes
def nvml():
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    assert library.nvmlInit_v2() == 0
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert library.nvmlDeviceGetMemoryInfo(device, memory) == 0
    return list(memory)
"""


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """One GPU, which NVIDIA's management library knows too."""
    libraries = Path(sublet.__file__).parent / "lib/simulated"
    return {**simulated_node(tmp_path / "node", GPU_BYTES), "LD_LIBRARY_PATH": str(libraries)}


def figures(worker: Worker) -> tuple[int, Any]:
    worker.do(NVML)
    return worker.do("simdriver.free_bytes()"), worker.do("nvml()")


def test_two_engines_that_ask_start_on_one_gpu_and_answer_by_turns(stage: Stage, node: dict[str, str]) -> None:
    first, second = (stage.worker(name, **node, **AUTO) for name in ("first", "second"))
    for worker, byte in ((first, 7), (second, 9)):
        free, (total_by_nvml, free_by_nvml, used_by_nvml) = figures(worker)
        assert free >= SHARE_BYTES and free_by_nvml >= SHARE_BYTES
        assert free <= GPU_BYTES and free_by_nvml + used_by_nvml == total_by_nvml
        worker.do(f"memory = simdriver.allocate({SHARE_BYTES}, fill={byte})")
    for _ in range(5):
        for worker, byte in ((first, 7), (second, 9)):
            assert worker.do(f"memory.read() == bytes([{byte}]) * {SHARE_BYTES}") is True


def test_answer_stays_the_same_while_neighbours_move(stage: Stage, node: dict[str, str]) -> None:
    first, second, asks = (stage.worker(name, **node, **AUTO) for name in ("first", "second", "asks"))
    for worker in (asks, first, second):
        worker.do("memory = simdriver.allocate(2 * MIB)")
    before = asks.do("simdriver.free_bytes()")
    first.do("more = simdriver.allocate(96 * MIB, fill=7)")
    assert asks.do("simdriver.free_bytes()") == before

    def move() -> None:
        second.do("more = simdriver.allocate(96 * MIB, fill=9)")
        for worker in (first, second) * 3:
            worker.do("more.read()[0]")

    mover = threading.Thread(target=move)
    mover.start()
    asked = set()
    while mover.is_alive():
        asked.update(asks.do("[simdriver.free_bytes() for _ in range(5)]"))
    mover.join()
    # Where somebody moves for longer than a second, the answer is what is free without doubt.
    assert max(asked) == before


def test_what_does_not_take_turns_is_not_counted(stage: Stage, node: dict[str, str]) -> None:
    rigid = stage.worker("rigid", **node)
    rigid.do("memory = simdriver.allocate(64 * MIB)")
    asks = stage.worker("asks", **node, **AUTO)
    assert figures(asks)[0] <= 64 * MIB
    other = stage.worker("other", **node)
    assert figures(other)[0] <= 64 * MIB
    bound = stage.worker("bound", **node, **AUTO, SUBLET_BUDGET="32MiB")
    free, (total_by_nvml, free_by_nvml, _) = figures(bound)
    assert (free, free_by_nvml, total_by_nvml) == (32 * MIB, 32 * MIB, 32 * MIB)
