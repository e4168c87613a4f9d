"""verl's FSDP engine with its offloading served by tag: a stand-in with verl's names, on the simulated driver."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from simdriver import MIB, allocate, free_bytes
from standins import Bodies, Model, Optimizer, Torch, standing_in
from sublet.compat import verl

tenant = pytest.mark.tenant("train")
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
UTILITIES = "verl.utils.fsdp_utils"
#: What the model and the optimizer have.
MODEL, OPTIMIZER = 6 * MIB, 4 * MIB


class Verl:
    """One engine of the stand-in, which is FSDP of the second version where ``stages`` is false."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torch = Torch()
        self.rounds: list[int] = []
        self.stages = False

    def bodies(self) -> Bodies:
        """What verl's functions do, as far as memory goes."""

        def parameters(self: Any, **_: Any) -> Any:
            names = vars(sys.modules[ENGINE])
            if self.verl.stages:
                names["load_fsdp_model_to_gpu"](self.module)
            found = [(f"p{index}", tensor) for index, tensor in enumerate(self.module.tensors)]
            if self.verl.stages:
                names["offload_fsdp_model_to_cpu"](self.module)
            return ((name, tensor.read()[0]) for name, tensor in found), {"peft": None}

        def to(self: Any, device: str, model: bool, optimizer: bool, grad: bool) -> None:
            names = vars(sys.modules[ENGINE])
            if device == "cpu":
                if model:
                    names["offload_fsdp_model_to_cpu"](self.module)
                if optimizer:
                    names["offload_fsdp_optimizer"](self.optimizer)
            else:
                if model:
                    names["load_fsdp_model_to_gpu"](self.module)
                if optimizer:
                    names["load_fsdp_optimizer"](self.optimizer, 0)

        return {
            f"{UTILITIES}.offload_fsdp_model_to_cpu": lambda model, empty_cache: model.to("cpu") and None,
            f"{UTILITIES}.load_fsdp_model_to_gpu": lambda model: model.to("cuda") and None,
            f"{UTILITIES}.offload_fsdp_optimizer": lambda optimizer: optimizer.move("cpu"),
            f"{UTILITIES}.load_fsdp_optimizer": lambda optimizer, device_id: optimizer.move("cuda"),
            f"{ENGINE}.FSDPEngine.to": to,
            f"{ENGINE}.FSDPEngine.get_per_tensor_param": parameters,
            f"{ENGINE}.FSDPEngine.get_per_tensor_param_shard": parameters,
            "verl.utils.memory_utils.aggressive_empty_cache": lambda force_sync, max_retries: (
                self.rounds.append(max_retries)
            ),
        }

    def engine(self) -> Any:
        """An engine after verl's own first steps: both have been to the host and back once."""
        engine = importlib.import_module(ENGINE).FSDPEngine()
        engine.verl, engine.module, engine.optimizer = self, Model([1, 2, 3]), Optimizer()
        engine.to("cpu")
        engine.to("cuda")
        engine.optimizer.step(7)
        engine.to("cpu")
        engine.to("cuda")
        return engine


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verl]:
    """verl, that is not imported yet."""
    made = Verl(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    with standing_in("verl", tmp_path, made.bodies()):
        yield made
        verl.uninstall()


@tenant
def test_both_leave_and_come_back_by_tag_to_the_same_addresses(theirs: Verl) -> None:
    installed = verl.install()
    assert installed.replaced == () and ENGINE in installed.awaited
    engine = theirs.engine()
    assert f"{ENGINE}.FSDPEngine.get_per_tensor_param" in verl.install().replaced
    moves = engine.module.moves, engine.optimizer.moves
    addresses = [tensor.data_ptr() for tensor in engine.module.tensors]
    before = free_bytes()
    for turn in range(3):
        assert engine.to("cpu") is None
        assert free_bytes() == before + MODEL + OPTIMIZER
        # A second time is nothing.
        engine.to("cpu")
        engine.to("cuda")
        assert free_bytes() == before
        engine.to("cuda")
        assert (engine.module.bytes(), engine.optimizer.bytes()) == ([1, 2, 3], [7 + turn] * 2)
        engine.optimizer.step(8 + turn)
    assert (engine.module.moves, engine.optimizer.moves) == moves
    assert [tensor.data_ptr() for tensor in engine.module.tensors] == addresses
    assert theirs.torch.said.count("empty_cache") >= 3


@tenant
def test_a_version_without_reads_of_shards_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Verl(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", older.torch)
    missing = f"{ENGINE}.FSDPEngine.get_per_tensor_param_shard"
    with standing_in("verl", tmp_path, older.bodies(), without=missing):
        verl.install()
        engine = older.engine()
        installed = verl.install()
        assert not installed.refused and missing not in installed.replaced
        before = free_bytes()
        engine.to("cpu")
        assert free_bytes() == before + MODEL + OPTIMIZER
        engine.to("cuda")
        assert engine.module.bytes() == [1, 2, 3]
        verl.uninstall()


@tenant
def test_each_leaves_by_itself(theirs: Verl) -> None:
    verl.install()
    engine = theirs.engine()
    before = free_bytes()
    engine.to("cpu", model=True, optimizer=False)
    assert free_bytes() == before + MODEL and engine.optimizer.bytes() == [7, 7]
    engine.to("cpu", model=False, optimizer=True)
    assert free_bytes() == before + MODEL + OPTIMIZER
    engine.to("cuda", model=True, optimizer=False)
    assert free_bytes() == before + OPTIMIZER and engine.module.bytes() == [1, 2, 3]


@tenant
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("read", ["get_per_tensor_param", "get_per_tensor_param_shard"])
def test_weights_are_read_while_they_would_be_away(theirs: Verl, stages: bool, read: str) -> None:
    verl.install()
    engine = theirs.engine()
    theirs.stages = stages
    before = free_bytes()
    engine.to("cpu")
    away = free_bytes()
    for _ in range(2):
        parameters, config = getattr(engine, read)()
        assert config == {"peft": None} and free_bytes() == before + OPTIMIZER
        assert list(parameters) == [("p0", 1), ("p1", 2), ("p2", 3)]
        assert free_bytes() == away
    # Somebody who reads nothing of it, and two simultaneously.
    one, other = getattr(engine, read)()[0], getattr(engine, read)()[0]
    del one
    assert free_bytes() == before + OPTIMIZER
    assert dict(other)["p1"] == 2 and free_bytes() == away
    engine.to("cuda")
    assert engine.module.bytes() == [1, 2, 3]


@tenant
def test_other_tensors_are_moved_by_verl_once_more(theirs: Verl) -> None:
    verl.install()
    engine = theirs.engine()
    moves = engine.optimizer.moves
    # As loading a checkpoint does.
    fresh = Optimizer()
    fresh.step(9)
    old, engine.optimizer.state = engine.optimizer.state, fresh.state
    for state in old.values():
        state["exp_avg"].move("cpu")
    before = free_bytes()
    engine.to("cpu", model=False)
    assert engine.optimizer.moves == moves + 1 and free_bytes() == before + OPTIMIZER
    engine.to("cuda")
    engine.to("cpu")
    engine.to("cuda")
    assert engine.optimizer.moves == moves + 2 and engine.optimizer.bytes() == [9, 9]
    assert free_bytes() == before


@tenant
def test_load_that_does_not_fit_leaves_it_away_and_works_later(theirs: Verl) -> None:
    verl.install()
    engine = theirs.engine()
    engine.to("cpu")
    intruder = allocate(free_bytes() - OPTIMIZER)
    for _ in range(2):
        with pytest.raises(sublet.OutOfDeviceMemory):
            engine.to("cuda", optimizer=False)
    engine.to("cpu")
    intruder.free()
    engine.to("cuda")
    assert (engine.module.bytes(), engine.optimizer.bytes()) == ([1, 2, 3], [7, 7])


@tenant
def test_caches_are_emptied_in_one_round(theirs: Verl) -> None:
    memory = importlib.import_module("verl.utils.memory_utils")
    taken: Any = type(sys)("verl.taken")
    taken.aggressive_empty_cache = memory.aggressive_empty_cache
    sys.modules["verl.taken"] = taken
    verl.install()
    memory.aggressive_empty_cache()
    taken.aggressive_empty_cache(force_sync=False, max_retries=5)
    assert theirs.rounds == [1, 1]
    verl.uninstall()
    taken.aggressive_empty_cache()
    assert theirs.rounds == [1, 1, 3]


@tenant
def test_uninstall_brings_back_and_verl_moves_again(theirs: Verl) -> None:
    verl.install()
    engine = theirs.engine()
    engine.to("cpu")
    moves = engine.module.moves
    verl.uninstall()
    assert engine.module.bytes() == [1, 2, 3] and engine.optimizer.bytes() == [7, 7]
    engine.to("cpu")
    engine.to("cuda")
    assert engine.module.moves == moves + 2
    assert list(engine.get_per_tensor_param()[0])[0] == ("p0", 1)
    assert verl._framework.standing().replaced == ()
