"""OpenRLHF, NeMo RL, AReaL and slime with their sleeps served by Sublet: stand-ins with their names, on the simulated driver."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simdriver
import sublet
from package_stage import Stage
from simdriver import MIB, free_bytes
from standins import Bodies, Model, Optimizer, Torch, standing_in
from sublet.compat import areal, nemo_rl, openrlhf, slime

tenant = pytest.mark.tenant("train")

# ---------------------------------------------------------------- OpenRLHF

UTILITIES = "openrlhf.utils.deepspeed.deepspeed_utils"


class Engine:
    """As much of a DeepSpeed engine: parameters that stay, states that sleep."""

    def __init__(self) -> None:
        self.parameters, self.states = Model([1, 1]), Model([2, 3, 4])
        self.said: list[str] = []

    def zero_optimization_stage(self) -> int:
        """As DeepSpeed says."""
        return 3

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters."""
        self.said.append("empty_partition_cache")


def openrlhf_bodies(read: Callable[[Any], object]) -> Bodies:
    """What OpenRLHF's functions do, as far as memory goes."""
    return {
        f"{UTILITIES}.offload_deepspeed_states": lambda model, pin_memory, non_blocking: (
            model.states.to("cpu") and None
        ),
        f"{UTILITIES}.reload_deepspeed_states": lambda model, non_blocking: model.states.to("cuda") and None,
        "openrlhf.utils.deepspeed.deepspeed.DeepspeedStrategy.save_ckpt": lambda self, model, save_dir, **_: read(model),
        "openrlhf.utils.deepspeed.deepspeed.DeepspeedStrategy.load_ckpt": lambda self, model, load_dir, **_: read(model),
    }


@tenant
def test_deepspeed_states_sleep_by_tag_and_checkpoints_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    read: list[list[int]] = []
    bodies = openrlhf_bodies(lambda model: read.append(model.states.bytes()))
    with standing_in("openrlhf", tmp_path, bodies):
        # Imported before and after: the actor takes the functions from another module.
        importlib.import_module(UTILITIES)
        installed = openrlhf.install()
        assert installed.version == "1.2.3" and len(installed.replaced) == 2
        actor = importlib.import_module("openrlhf.trainer.ray.ppo_actor").PolicyModelActor()
        strategy = importlib.import_module("openrlhf.utils.deepspeed.deepspeed").DeepspeedStrategy()
        functions = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
        offload, reload = functions.offload_deepspeed_states, functions.reload_deepspeed_states
        engine = Engine()
        offload(engine)
        reload(engine)
        moves, before = engine.states.moves, free_bytes()
        assert actor is not None
        for _ in range(2):
            torch.said.clear()
            assert offload(engine, pin_memory=False) is None
            assert free_bytes() == before + 6 * MIB and engine.parameters.bytes() == [1, 1]
            assert engine.said.pop() == "empty_partition_cache"
            # Others count on all ranks meeting here.
            assert torch.said == ["empty_cache", "barrier"]
            strategy.save_ckpt(engine, "folder", tag="step")
            assert read.pop() == [2, 3, 4] and free_bytes() == before + 6 * MIB
            assert reload(engine, non_blocking=False) is None
            assert free_bytes() == before and engine.states.bytes() == [2, 3, 4]
        assert engine.states.moves == moves
        # What is loaded is new: DeepSpeed moves it itself once more.
        offload(engine)
        strategy.load_ckpt(engine, "folder")
        offload(engine)
        assert engine.states.moves == moves + 1 and free_bytes() == before + 6 * MIB
        openrlhf.uninstall()
        reload(engine)
        assert engine.states.bytes() == [2, 3, 4]


# ---------------------------------------------------------------- NeMo RL

WORKERS = "nemo_rl.models.policy.workers"


def nemo_bodies(module: str, worker: str) -> Bodies:
    """What a DTensor worker's functions do, as far as memory goes."""
    of = f"{WORKERS}.{module}.{worker}."

    def prepare(self: Any) -> None:
        self.move_to_cuda(self.model)
        self.move_optimizer_to_device("cuda")

    def offload(self: Any) -> None:
        self.model = self.move_to_cpu(self.model)
        self.offload_before_refit()

    return {
        of + "move_to_cpu": lambda self, model: model.to("cpu"),
        of + "move_to_cuda": lambda self, model: model.to("cuda"),
        of + "move_optimizer_to_device": lambda self, device: self.optimizer.move(device),
        of + "prepare_for_training": prepare,
        of + "offload_before_refit": lambda self: self.move_optimizer_to_device("cpu"),
        of + "offload_after_refit": offload,
        of + "save_checkpoint": lambda self, weights_path, **_: (
            self.model.bytes() + self.optimizer.bytes()
        ),
        of + "_checkpoint_engine_params": lambda self: (fill for fill in self.model.bytes()),
        of + "stream_weights_via_http": lambda self, **_: self.model.bytes(),
    }


@tenant
@pytest.mark.parametrize(
    ("module", "worker"),
    [
        ("dtensor_policy_worker_v2", "DTensorPolicyWorkerV2Impl"),
        ("dtensor_policy_worker", "DTensorPolicyWorkerImpl"),
    ],
)
def test_dtensor_workers_offload_by_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, worker: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    with standing_in("nemo_rl", tmp_path, nemo_bodies(module, worker)):
        nemo_rl.install()
        policy = getattr(importlib.import_module(f"{WORKERS}.{module}"), worker)()
        policy.model, policy.optimizer, policy.cpu_offload = Model([1, 2]), Optimizer(), False
        policy.offload_before_refit()
        policy.prepare_for_training()
        policy.optimizer.step(5)
        policy.offload_after_refit()
        policy.prepare_for_training()
        moves, before = (policy.model.moves, policy.optimizer.moves), free_bytes()
        for _ in range(2):
            policy.offload_before_refit()
            assert free_bytes() == before + 4 * MIB and policy.model.bytes() == [1, 2]
            policy.offload_after_refit()
            assert free_bytes() == before + 8 * MIB
            policy.prepare_for_training()
            assert policy.model.bytes() + policy.optimizer.bytes() == [1, 2, 5, 5]
        policy.offload_after_refit()
        assert policy.save_checkpoint("folder") == [1, 2, 5, 5]
        assert free_bytes() == before
        for read in ("_checkpoint_engine_params", "stream_weights_via_http"):
            if not hasattr(policy, read):
                assert (read, worker) == ("stream_weights_via_http", "DTensorPolicyWorkerImpl")
                continue
            policy.offload_after_refit()
            assert free_bytes() == before + 8 * MIB
            arguments = {"rollout_engine_urls": [], "buffer_size_bytes": 0}
            told = getattr(policy, read)(**(arguments if "stream" in read else {}))
            assert free_bytes() == before, "the model is read while it is away"
            assert list(told) == [1, 2]
        assert (policy.model.moves, policy.optimizer.moves) == moves
        # Parameters that a worker keeps on the host by design are its own affair.
        policy.cpu_offload = True
        policy.offload_after_refit()
        assert policy.model.moves == moves[0] + 1
        nemo_rl.uninstall()


@tenant
def test_megatron_workers_offload_their_optimizer_by_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    of = f"{WORKERS}.megatron_policy_worker.MegatronPolicyWorkerImpl."
    bodies: Bodies = {
        of + "move_optimizer": lambda self, device: self.optimizer.move(device),
        of + "save_checkpoint": lambda self, weights_path, **_: self.optimizer.bytes(),
    }
    with standing_in("nemo_rl", tmp_path, bodies):
        nemo_rl.install()
        policy = importlib.import_module(f"{WORKERS}.megatron_policy_worker").MegatronPolicyWorkerImpl()
        policy.optimizer = Optimizer()
        policy.move_optimizer("cpu")
        policy.optimizer.step(6)
        state = policy.optimizer.state
        policy.optimizer._get_state = lambda: state
        for _ in range(3):
            policy.move_optimizer("cpu")
            policy.move_optimizer("cuda")
        before, moves = free_bytes(), policy.optimizer.moves
        assert moves == 2
        policy.move_optimizer("cpu")
        assert free_bytes() == before + 4 * MIB
        assert policy.save_checkpoint("folder") == [6, 6]
        nemo_rl.uninstall()


# ---------------------------------------------------------------- NCCL: AReaL and slime

#: Asks for memory as NCCL does: a handle, mapped where it has reserved.
NCCL_LIKE = """
#include <dlfcn.h>
#include <string.h>
typedef unsigned long long u64;
int allocate(u64 *address, u64 bytes)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*reserve)(u64 *, u64, u64, u64, u64) = dlsym(driver, "cuMemAddressReserve");
    int (*create)(u64 *, u64, const void *, u64) = dlsym(driver, "cuMemCreate");
    int (*map)(u64, u64, u64, u64, u64) = dlsym(driver, "cuMemMap");
    int (*set_access)(u64, u64, const void *, u64) = dlsym(driver, "cuMemSetAccess");
    struct { int type, handles, location, device; void *attributes; char flags[8]; } properties;
    struct { int location, device, rights; } access = {1, 0, 3};
    u64 handle;
    memset(&properties, 0, sizeof properties);
    properties.type = properties.location = 1;
    volatile int code = reserve(address, bytes, 0, 0, 0);
    code |= create(&handle, bytes, &properties, 0);
    code |= map(*address, bytes, 0, handle, 0);
    return code | set_access(*address, bytes, &access, 1);
}
"""


@pytest.fixture(scope="session")
def nccl_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that allocates, whose name is NCCL's."""
    folder = tmp_path_factory.mktemp("nccl")
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(NCCL_LIKE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def nccl_memory(library: Path, fill: int) -> simdriver.Memory:
    """Device memory that NCCL has allocated."""
    simdriver.free_bytes()
    address, size_bytes = ctypes.c_uint64(), 4 * MIB
    code = ctypes.CDLL(str(library)).allocate(ctypes.byref(address), ctypes.c_uint64(size_bytes))
    assert code == 0
    memory = simdriver.Memory(address.value, size_bytes, 0)
    memory.write(bytes([fill]) * size_bytes)
    return memory


def nccl_resident() -> int:
    """Bytes of NCCL's that are on the device."""
    classes = (entry for device in sublet.stats()["pool"]["devices"] for entry in device["memory"])
    return sum(entry["resident_bytes"] for entry in classes if entry["tag"] == "nccl")


@tenant
def test_nccl_leaves_in_the_place_of_slimes_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl_like: Path
) -> None:
    buffers, mine = nccl_memory(nccl_like, 5), simdriver.allocate(2 * MIB, fill=6)
    resident = nccl_resident()
    assert resident == 4 * MIB
    met: list[int] = []
    torch = Torch(lambda: met.append(nccl_resident()))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("SLIME_DESTROY_WORLD_PROCESS_GROUP", raising=False)
    for framework in ("slime", "miles"):
        actor_module = f"{framework}.backends.megatron_utils.actor"
        called: list[str] = []
        bodies: Bodies = {
            f"{framework}.utils.distributed_utils.get_gloo_group": lambda: "gloo",
            f"{framework}.utils.reloadable_process_group.destroy_process_groups": lambda: called.append("destroy"),
            f"{framework}.utils.reloadable_process_group.reload_process_groups": lambda: called.append("reload"),
        }
        folder = tmp_path / framework
        with standing_in(framework, folder, bodies):
            importlib.import_module(f"{framework}.utils.distributed_utils")
            module: Any = importlib.import_module(actor_module)
            module.clear_memory = lambda: called.append("clear")
            module.torch_memory_saver = types.SimpleNamespace(
                pause=lambda: called.append("pause"), resume=lambda: called.append("resume")
            )
            actor = module.MegatronTrainRayActor()
            assert len(slime.install().replaced) == 2
            for _ in range(2):
                called.clear()
                actor.sleep()
                assert called[0] == "clear" and set(called[1:]) == {"pause"}
                assert nccl_resident() == 0
                # All ranks met before it left.
                assert met.pop() == resident and mine.read()[:1] == b"\6"
                actor.sleep()
                assert not met
                called.clear()
                # Weights are handed over while the trainer sleeps: groups are needed, and sleep again.
                actor.update_weights(*([] if framework == "slime" else [None]))
                assert met == [resident] and nccl_resident() == 0
                met.clear()
                actor.wake_up()
                assert called[:2] == ["resume", "clear"] and nccl_resident() == resident
                assert buffers.read() == b"\5" * 4 * MIB
            actor.sleep()
            met.clear()
            slime.uninstall()
            assert nccl_resident() == resident
            called.clear()
            actor.sleep()
            assert "destroy" in called
    assert os.environ["SLIME_DESTROY_WORLD_PROCESS_GROUP"] == "0"


@tenant
def test_nccl_leaves_with_areals_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl_like: Path
) -> None:
    buffers = nccl_memory(nccl_like, 5)
    resident = nccl_resident()
    met: list[int] = []
    torch = Torch(lambda: met.append(nccl_resident()))
    monkeypatch.setitem(sys.modules, "torch", torch)
    failing: list[Exception] = []

    def offload(self: Any) -> None:
        if failing:
            raise failing[0]
        torch.distributed.barrier(group=self.cpu_group)

    def onload(self: Any) -> None:
        torch.distributed.barrier(group=self.cpu_group)

    for module, name in areal.ENGINES.items():
        bodies: Bodies = {f"{module}.{name}.offload": offload, f"{module}.{name}.onload": onload}
        with standing_in("areal", tmp_path, bodies):
            areal.install()
            engine = getattr(importlib.import_module(module), name)()
            engine.cpu_group = "gloo"
            for _ in range(2):
                engine.offload()
                assert met == [resident, 0] and nccl_resident() == 0
                met.clear()
                engine.onload()
                assert met == [resident] and buffers.read() == b"\5" * 4 * MIB
                met.clear()
            failing.append(RuntimeError("not enabled"))
            with pytest.raises(RuntimeError, match="not enabled"):
                engine.offload()
            assert nccl_resident() == resident
            failing.clear()
            met.clear()
            engine._awex_adapter = object()
            engine.offload()
            engine.onload()
            assert met == [resident, resident]
            met.clear()
            areal.uninstall()


def test_all_ranks_may_pause_and_resume_nccl_at_once(stage: Stage, nccl_like: Path) -> None:
    ranks = [stage.worker("train") for _ in range(3)]
    for rank in ranks:
        rank.do("import test_compat_frameworks as t; from pathlib import Path")
        rank.do(f"memory = t.nccl_memory(Path({str(nccl_like)!r}), 5)")
    for _ in range(4):
        for call in ("pause", "resume"):
            for rank in ranks:
                rank.tell(f"sublet.{call}('nccl').outcome")
            outcomes = [rank.answer() for rank in ranks]
            assert set(outcomes) <= {"completed", "already"} and "completed" in outcomes
            wanted = 0 if call == "pause" else 4 * MIB
            assert [rank.do("t.nccl_resident()") for rank in ranks] == [wanted] * 3


# ---------------------------------------------------------------- what all have


@tenant
@pytest.mark.parametrize("is_imported", [True, False])
def test_framework_that_lacks_a_name_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_imported: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    lacking = f"{UTILITIES}.reload_deepspeed_states"
    recording = "openrlhf.trainer.ray.ppo_actor"
    with standing_in("openrlhf", tmp_path, {}, without=lacking):
        (tmp_path / Path(*recording.split(".")).with_suffix(".py")).write_text("")
        if is_imported:
            module = importlib.import_module(UTILITIES)
            with pytest.raises(sublet.UsageError, match=f"OpenRLHF 1.2.3 has no {lacking}.*frameworks.md"):
                openrlhf.install()
            assert openrlhf._framework.standing().awaited == ()
        else:
            assert openrlhf.install().refused == ()
            with pytest.warns(RuntimeWarning, match=lacking):
                module = importlib.import_module(UTILITIES)
            assert lacking in openrlhf.install().refused[0]
        # None of the module's is replaced.
        assert not hasattr(module.offload_deepspeed_states, "__wrapped__")
        openrlhf.uninstall()


@tenant
def test_function_without_a_parameter_is_another_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    with standing_in("openrlhf", tmp_path, {}):
        module: Any = importlib.import_module(UTILITIES)
        module.reload_deepspeed_states = lambda engine: None
        with pytest.raises(sublet.UsageError, match="without the parameter 'model'"):
            openrlhf.install()


def test_outside_of_a_tenant_nothing_is_replaced_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch())
    with standing_in("openrlhf", tmp_path, {}):
        module = importlib.import_module(UTILITIES)
        with pytest.warns(RuntimeWarning, match="sublet run --tenant"):
            assert openrlhf.install().replaced == ()
        assert not hasattr(module.offload_deepspeed_states, "__wrapped__")
        openrlhf.uninstall()


@tenant
def test_environment_names_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sublet.compat

    monkeypatch.setitem(sys.modules, "torch", Torch())
    monkeypatch.setenv(sublet.compat.VARIABLE, "openrlhf, nobody")
    with standing_in("openrlhf", tmp_path, {}):
        module = importlib.import_module(UTILITIES)
        with pytest.warns(RuntimeWarning, match="nobody"):
            sublet.compat.install_if_asked()
        assert hasattr(module.offload_deepspeed_states, "__wrapped__")
        openrlhf.uninstall()
    monkeypatch.delenv(sublet.compat.VARIABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sublet.compat.install_if_asked()
    with pytest.raises(sublet.UsageError, match="'areal'"):
        sublet.compat.install("nobody")


@pytest.mark.parametrize(
    ("group", "called"), [("torch.backends", "torch_was_imported"), ("vllm.general_plugins", "load_plugin")]
)
def test_torch_and_vllm_find_what_they_are_to_call(group: str, called: str) -> None:
    from importlib.metadata import distribution

    found = [entry for entry in distribution("sublet").entry_points if entry.group == group]
    assert [entry.load().__name__ for entry in found] == [called]
