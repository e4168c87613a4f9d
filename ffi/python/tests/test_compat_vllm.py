"""vLLM's allocator on the simulated driver, over a torch of pools; and how vLLM finds it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

import sublet
from fake_torch import FakeTorch
from package_stage import Stage
from simdriver import MIB, Memory, allocate, free_bytes
from sublet.compat import vllm as compat

BYTES = 4 * MIB


class Pool:
    """`torch.cuda.MemPool`: its last reference gives its cached memory back."""

    def __init__(self, torch: PooledTorch) -> None:
        self._torch = torch
        self.id = torch.cuda.graph_pool_handle()
        torch._C.uses[0, self.id] = 1

    def __del__(self) -> None:
        self._torch.empty_pool(self.id)


class PooledTorch(FakeTorch):
    """A torch whose segments are memory of the simulated driver, one for each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Memory] = {}
        self.cuda.MemPool = lambda: Pool(self)
        self.cuda.use_mem_pool = self._use
        self.cuda.current_device = lambda: 0
        self.cuda.empty_cache = lambda: None
        sys.modules["torch"] = self  # type: ignore[assignment]

    @contextlib.contextmanager
    def _use(self, pool: Pool) -> Iterator[None]:
        self._C._cuda_beginAllocateCurrentThreadToPool(0, pool.id)
        yield
        self._C._cuda_endAllocateToPool(0, pool.id)
        self._C._cuda_releasePool(0, pool.id)

    def tensor(self, fill: int) -> Memory:
        """A tensor of BYTES from the pool that serves this thread."""
        memory = allocate(BYTES, fill=fill)
        self.memory[memory.address] = memory
        block = {"address": memory.address, "size": BYTES, "state": "active_allocated"}
        self.segments.append(
            {
                "device": 0,
                "address": memory.address,
                "total_size": BYTES,
                "segment_pool_id": self.serving(),
                "blocks": [block],
            }
        )
        return memory

    def release(self, memory: Memory) -> None:
        """The tensor is gone; its memory stays cached."""
        for segment in self.segments:
            if segment["address"] == memory.address:
                segment["blocks"][0]["state"] = "inactive"

    def empty_pool(self, pool: tuple[int, int]) -> None:
        """Gives what is cached in one pool back to the driver."""
        for segment in list(self.segments):
            if segment["segment_pool_id"] == pool and segment["blocks"][0]["state"] == "inactive":
                self.memory.pop(segment["address"]).free()
                self.segments.remove(segment)


def saved_bytes() -> int:
    """What the last pause saved, as its report says."""
    phases = sublet.stats()["last_pause"]["phases"]
    return sum(phase[1]["bytes"] for phase in phases)


@pytest.mark.tenant("vllm")
def test_level_one_saves_the_weights_alone_and_wakes_up_by_tag() -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    assert allocator is compat.CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        assert allocator.current_tag == "weights"
        weights = torch.tensor(1)
        with allocator.use_memory_pool(tag="kv_cache"):
            cache = torch.tensor(2)
        more = torch.tensor(3)
    outside = torch.tensor(4)
    assert (allocator.current_tag, allocator.allocator_and_pools) == ("default", {})
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert tags == {weights.address: "weights", cache.address: "kv_cache", more.address: "weights"}
    assert allocator.get_current_usage() == 3 * BYTES
    assert allocator.pointer_to_data[cache.address].handle == (0, BYTES, cache.address, 0)

    before = free_bytes()
    for _ in range(2):
        allocator.sleep(offload_tags=("weights",))
        assert free_bytes() == before + 3 * BYTES
    assert outside.read()[:1] == b"\4"
    assert bytes(sublet.host_copy(weights)[:1]) == b"\1"
    with pytest.raises(sublet.UsageError):
        sublet.host_copy(cache)
    allocator.wake_up(tags=["weights"])
    assert (weights.read(), more.read()) == (b"\1" * BYTES, b"\3" * BYTES)
    assert free_bytes() == before + BYTES
    for _ in range(2):
        allocator.wake_up()
        assert free_bytes() == before
    cache.write(b"new")


@pytest.mark.tenant("vllm")
def test_level_two_saves_nothing() -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    with allocator.use_memory_pool():
        first = torch.tensor(5)
    before = free_bytes()
    allocator.sleep(offload_tags=())
    assert free_bytes() == before + BYTES
    with pytest.raises(sublet.UsageError):
        sublet.host_copy(first)
    allocator.wake_up()
    first.write(b"again")
    # The default tag is what is saved when nothing is said.
    allocator.sleep()
    allocator.wake_up()
    assert first.read()[:5] == b"again"
    allocator.discard(["default", "unknown"])
    assert free_bytes() == before + BYTES
    allocator.wake_up(["unknown"])
    assert free_bytes() == before + BYTES
    allocator.wake_up()


@pytest.mark.tenant("vllm")
def test_wake_up_that_fails_keeps_every_backup() -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = [torch.tensor(fill) for fill in range(8)]
    allocator.sleep("weights")
    intruder = allocate(free_bytes() - 3 * BYTES)
    for _ in range(2):
        # What callers of vLLM's own catch.
        with pytest.raises(RuntimeError) as refused:
            allocator.wake_up()
        assert isinstance(refused.value, sublet.OutOfDeviceMemory)
        assert refused.value.missing_bytes == 5 * BYTES
    assert [bytes(sublet.host_copy(weight)[:1]) for weight in weights] == [
        bytes([n]) for n in range(8)
    ]
    intruder.free()
    allocator.wake_up()
    assert [weight.read() for weight in weights] == [bytes([fill]) * BYTES for fill in range(8)]


@pytest.mark.tenant("vllm")
def test_what_was_freed_in_a_pool_goes_back_at_its_end() -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    allocate(BYTES)
    before = free_bytes()
    with allocator.use_memory_pool("weights"):
        full_precision, quantized = torch.tensor(1), torch.tensor(2)
        torch.release(full_precision)
        assert free_bytes() == before - 2 * BYTES
    assert free_bytes() == before - BYTES
    allocator.sleep("weights")
    allocator.wake_up()
    assert quantized.read()[:1] == b"\2"


@pytest.mark.tenant("vllm")
def test_wake_up_by_tag_takes_along_what_may_not_stay_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    with allocator.use_memory_pool("empty"):
        pass
    made = {}
    for fill, tag in enumerate(("weights", "kv_cache", "runtime"), 1):
        with allocator.use_memory_pool(tag):
            made[tag] = torch.tensor(fill)
    # Versions that have no such list wake up what is named, and no more.
    for deferrable, awake in ((None, {"weights"}), (("weights", "kv_cache"), {"weights", "runtime"})):
        module = types.ModuleType("vllm.device_allocator")
        if deferrable is not None:
            setattr(module, "DEFERRABLE_TAGS", deferrable)
        monkeypatch.setitem(sys.modules, "vllm.device_allocator", module)
        allocator.sleep(("weights", "runtime"))
        assert all(data.is_asleep for data in allocator.pointer_to_data.values())
        allocator.wake_up(["weights"])
        found = {data.tag for data in allocator.pointer_to_data.values() if not data.is_asleep}
        assert found == awake
        allocator.wake_up()
    allocator.discard("runtime")
    assert [data.tag for data in allocator.pointer_to_data.values() if data.is_asleep] == ["runtime"]
    allocator.wake_up()
    assert made["weights"].read()[:1] == b"\1"


@pytest.mark.tenant("vllm")
def test_what_graphs_are_captured_into_sleeps_with_its_contents() -> None:
    torch = PooledTorch()
    allocator = compat.CuMemAllocator.get_instance()
    outside = torch.tensor(4)
    pools = []
    for fill in (1, 2):
        with allocator.cudagraph_pool() as pool:
            assert allocator.current_tag == "cudagraph"
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            made = torch.tensor(fill)
            graph.capture_end()
            pools.append((pool, made))
    assert pools[0][0] == pools[1][0] and allocator.current_tag == "default"
    assert {data.tag for data in allocator.pointer_to_data.values()} == {"cudagraph"}
    before = free_bytes()
    allocator.sleep(("weights", "runtime", "cudagraph"))
    assert free_bytes() == before + 2 * BYTES
    assert outside.read()[:1] == b"\4"
    allocator.wake_up()
    assert [made.read()[:1] for _, made in pools] == [b"\1", b"\2"]
    # As a worker does when it ends, and more than once.
    for _ in range(2):
        allocator.release_pools()


class Engine:
    """A worker of vLLM, as far as its memory goes."""

    def load(self, torch: PooledTorch, fill: int) -> None:
        assert compat.CuMemAllocator.get_instance().get_current_usage() == 0
        with compat.CuMemAllocator.get_instance().use_memory_pool(tag="weights"):
            self.weights = torch.tensor(fill)

    def sleep(self) -> None:
        backend(lambda allocator: allocator.sleep(("weights",)))

    def wake_up(self) -> None:
        backend(lambda allocator: allocator.wake_up())


def backend(act: Callable[[Any], None]) -> None:
    """Code that a worker calls, and that knows no worker."""
    act(compat.CuMemAllocator.get_instance())


@pytest.mark.tenant("vllm")
def test_two_engines_in_one_process_sleep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm.v1.worker.gpu_worker")
    setattr(module, "Worker", Engine)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch = PooledTorch()
    engines = [Engine() for _ in range(2)]
    for fill, engine in enumerate(engines, 1):
        engine.load(torch, fill)
    # Code outside of workers has what it had with one engine.
    assert [*compat.CuMemAllocator.get_instance().pointer_to_data] == [engines[0].weights.address]
    before = free_bytes()
    for asleep, awake in (engines, engines[::-1]):
        asleep.sleep()
        assert free_bytes() == before + BYTES
        # What is awake is at work meanwhile.
        awake.weights.write(b"work")
        awake.sleep()
        assert free_bytes() == before + 2 * BYTES
        awake.wake_up()
        assert awake.weights.read()[:4] == b"work"
        assert free_bytes() == before + BYTES
        asleep.wake_up()
    # A third takes the place of one that has ended.
    torch.release(engines[1].weights)
    torch.segments = [kept for kept in torch.segments if kept["address"] != engines[1].weights.address]
    torch.memory.pop(engines[1].weights.address).free()
    del asleep, awake, engine, engines[1]
    gc.collect()
    third = Engine()
    third.load(torch, 3)
    third.sleep()
    assert engines[0].weights.read()[:4] == b"work"
    third.wake_up()
    assert third.weights.read()[:1] == b"\3"


def test_process_without_sublet_is_told_so() -> None:
    with pytest.raises(sublet.NotAttachedError):
        compat.CuMemAllocator.get_instance()


CUMEM = """
import vllm.marker
class CuMemAllocator:
    instance = None
    @staticmethod
    def get_instance(): return CuMemAllocator()
    def use_memory_pool(self, tag=None): ...
    def sleep(self, offload_tags=None): ...
    def wake_up(self, tags=None): ...
    def get_current_usage(self): ...
cumem_available = False
libcudart = object()
def create_and_map(handle): return "theirs"
"""

USES_VLLM = """
import os
if os.environ.get("EARLY"):
    from vllm.device_allocator.cumem import CuMemAllocator as early
from sublet.compat.vllm import CuMemAllocator as ours, load_plugin
load_plugin()
load_plugin()
import vllm.worker
from vllm.device_allocator import cumem
bound = vllm.worker.CuMemAllocator is ours
print(bound, cumem.cumem_available, hasattr(cumem, "libcudart"), cumem.__name__)
if bound:
    try:
        cumem.create_and_map((0, 1, 2, 3))
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A vLLM of three files."""
    package = tmp_path / "vllm" / "device_allocator"
    package.mkdir(parents=True)
    for name in ("vllm/__init__.py", "vllm/marker.py", "vllm/device_allocator/__init__.py"):
        (tmp_path / name).write_text("")
    (package / "cumem.py").write_text(CUMEM)
    worker = "from vllm.device_allocator.cumem import CuMemAllocator\n"
    (tmp_path / "vllm" / "worker.py").write_text(worker)
    return tmp_path


@pytest.mark.parametrize("early", ["", "1"])
@pytest.mark.parametrize("asked", ["", "slime,vllm"])
def test_modules_are_bound_by_name_where_asked_for(tree: Path, asked: str, early: str) -> None:
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", USES_VLLM],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "SUBLET_COMPAT": asked, "EARLY": early},
    )
    name = "vllm.device_allocator.cumem"
    wanted = (
        f"True True True {name}\nUsageError\n" if asked else f"False False True {name}\n"
    )
    assert ran.stdout == wanted, ran.stderr


def test_an_allocator_with_memory_is_not_replaced(tree: Path) -> None:
    code = (
        "from vllm.device_allocator.cumem import CuMemAllocator as theirs\n"
        "theirs.instance = theirs(); theirs.instance.pointer_to_data = {1: 2}\n"
        "import sublet.compat; sublet.compat.install('vllm')"
    )
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "before the model is loaded" in ran.stderr


BACKENDS = """
class SleepModeBackend:
    state = "RUNNING"
    @classmethod
    def is_supported(cls): return True
    @classmethod
    def preserves_graphs_with_communicators(cls): return False
class CuMemBackend(SleepModeBackend):
    def suspend(self, level=1):
        from vllm.device_allocator import cumem
        print(cumem.CuMemAllocator.__module__)
    def resume(self, tags=None): ...
class SleepModeBackendFactory:
    registry = {}
    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls.registry: raise ValueError(name)
        cls.registry[name] = (module_path, class_name)
"""

WORKER = """
class Worker:
    def __init__(self, vllm_config, local_rank):
        self.vllm_config = vllm_config
"""

USES_BACKEND = """
import importlib, sys, types
import sublet.compat.vllm
# vLLM loads its plugins in each process, some more than once.
for _ in range(2):
    sublet.compat.vllm.load_plugin()
print("vllm" in sys.modules)
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as factory
from vllm.v1.worker.gpu_worker import Worker
model = types.SimpleNamespace(sleep_mode_backend=sys.argv[1], sleep_mode_offload_cudagraph=True)
worker = Worker(types.SimpleNamespace(model_config=model), local_rank=0)
module, name = factory.registry["sublet"]
backend = getattr(importlib.import_module(module), name)
print(backend.is_supported(), backend.preserves_graphs_with_communicators(), isinstance(backend(), backend.__mro__[1]))
backend().suspend()
"""


@pytest.mark.parametrize("chosen", ["sublet", "cumem"])
def test_backend_that_is_chosen_finds_our_allocator(stage: Stage, tree: Path, chosen: str) -> None:
    ran = run_backend(stage, tree, chosen, tenant="infer")
    whose = "sublet.compat.vllm.allocator" if chosen == "sublet" else "vllm.device_allocator.cumem"
    assert ran.stdout == f"False\nTrue True True\n{whose}\n", ran.stderr
    assert ("SUBLET_COMPAT=vllm" in ran.stderr) == (chosen == "sublet")


def test_backend_over_an_allocator_that_has_changed_sleeps_by_theirs(stage: Stage, tree: Path) -> None:
    cumem = tree / "vllm" / "device_allocator" / "cumem.py"
    cumem.write_text(cumem.read_text().replace("offload_tags", "kept"))
    ran = run_backend(stage, tree, "sublet", tenant="infer")
    assert ran.stdout == "False\nTrue True True\nvllm.device_allocator.cumem\n", ran.stderr
    assert "has a vllm.device_allocator.cumem.CuMemAllocator.sleep without the parameter 'offload_tags'" in ran.stderr


def test_backend_without_sublet_is_refused_with_the_way_in(stage: Stage, tree: Path) -> None:
    ran = run_backend(stage, tree, "sublet", tenant=None)
    assert ran.returncode != 0
    assert "NotAttachedError" in ran.stderr and "sublet run" in ran.stderr


def run_backend(
    stage: Stage, tree: Path, chosen: str, tenant: Optional[str]
) -> subprocess.CompletedProcess[str]:
    """A vLLM of a few files, in a process of its own."""
    (tree / "vllm" / "device_allocator" / "sleep_mode_backend.py").write_text(BACKENDS)
    worker = tree / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    for folder in (worker.parent, worker):
        (folder / "__init__.py").touch()
    (worker / "gpu_worker.py").write_text(WORKER)
    program = f"import sys; sys.path.insert(0, {str(tree)!r})\n{USES_BACKEND}"
    return stage.run("-c", program, chosen, tenant=tenant)
