"""The callback for transformers' trainers: a stand-in with its events, on the simulated driver."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import Stage
from simdriver import MIB, free_bytes
from standins import Optimizer, standing_in
from sublet.trl import EVENTS, TakeTurns

STATE = 4 * MIB


class Hooked(Optimizer):
    """An optimizer that tells who reads or writes its state, as torch's do."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[Callable[..., None]] = []
        self.register_state_dict_pre_hook = self._hooks.append
        self.register_load_state_dict_pre_hook = self._hooks.append

    def state_dict(self) -> list[int]:
        """The first byte of each tensor of the state."""
        for hook in self._hooks:
            hook(self)
        return self.bytes()


class Wrapper:
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@pytest.fixture
def transformers(tmp_path: Path) -> Iterator[Path]:
    """The recorded events of transformers, to be imported."""
    with standing_in("transformers", tmp_path, {}):
        (tmp_path / "transformers" / "__init__.py").write_text(
            "__version__ = '1.2.3'\nfrom .trainer_callback import TrainerCallback\n"
        )
        # The stand-ins import it.
        (tmp_path / "torch.py").write_text("distributed = None\n")
        yield tmp_path
        sys.modules.pop("torch", None)
        importlib.import_module("sublet.trl")._classes.clear()


@pytest.mark.tenant("train")
def test_optimizer_state_is_away_but_in_its_steps(transformers: Path) -> None:
    turns = TakeTurns()
    callback: Any = importlib.import_module("transformers").TrainerCallback
    assert isinstance(turns, TakeTurns) and isinstance(turns, callback)
    optimizer = Hooked()
    wrapped = Wrapper(optimizer)

    def event(name: str) -> None:
        assert name in EVENTS
        given = {"model": None, "optimizer": wrapped, "lr_scheduler": None}
        assert getattr(turns, name)(None, None, None, **given) is None

    empty = free_bytes()
    event("on_train_begin")
    addresses = []
    for step in range(4):
        event("on_pre_optimizer_step")
        optimizer.step(step + 1)
        assert optimizer.bytes() == [step + 1] * 2
        addresses.append([state["exp_avg"].data_ptr() for state in optimizer.state.values()])
        event("on_optimizer_step")
        # The first time the framework's way says which memory it is.
        assert free_bytes() == empty
        if step:
            # A checkpoint.
            assert optimizer.state_dict() == [step + 1] * 2
            event("on_save")
            assert free_bytes() == empty
    assert addresses[1] == addresses[2] == addresses[3]
    event("on_train_end")
    assert free_bytes() == empty - STATE and optimizer.bytes() == [4, 4]
    # What a checkpoint brings is new memory, and leaves too.
    fresh = Optimizer()
    fresh.step(9)
    optimizer.state = fresh.state
    event("on_optimizer_step")
    event("on_pre_optimizer_step")
    assert optimizer.bytes() == [9, 9]
    event("on_optimizer_step")
    event("on_train_end")
    assert optimizer.bytes() == [9, 9]


@pytest.mark.tenant("train")
def test_what_cannot_be_is_refused_by_name(transformers: Path) -> None:
    wrapper = type("DeepSpeedOptimizerWrapper", (Wrapper,), {})
    turns = TakeTurns()
    with pytest.raises(sublet.UsageError, match="DeepSpeed's own.*optimizer=False"):
        turns.on_train_begin(None, None, None, optimizer=wrapper(Hooked()))
    with pytest.raises(sublet.UsageError, match="has no optimizer"):
        turns.on_train_begin(None, None, None, optimizer=None)
    TakeTurns(optimizer=False).on_train_begin(None, None, None, optimizer=wrapper(Hooked()))
    with pytest.raises(sublet.UsageError, match="no generator is named"), turns.away():
        pass
    with pytest.raises(sublet.UsageError, match="nobody"), TakeTurns("nobody").away():
        pass
    assert sublet.is_paused() is False
    callback: Any = importlib.import_module("transformers").TrainerCallback
    del callback.on_optimizer_step
    importlib.import_module("sublet.trl")._classes.clear()
    with pytest.raises(sublet.UsageError, match="transformers 1.2.3 has no TrainerCallback.on_opt"):
        TakeTurns()


def test_outside_of_a_tenant_nothing_leaves_and_a_warning_says_so(transformers: Path) -> None:
    turns, optimizer = TakeTurns(), Hooked()
    with pytest.warns(RuntimeWarning, match="sublet run --tenant"):
        turns.on_train_begin(None, None, None, optimizer=optimizer)
    for name in EVENTS[1:]:
        getattr(turns, name)(None, None, None, optimizer=optimizer)
    assert not optimizer.moves


def test_module_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, sublet.trl; assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "try: sublet.trl.TakeTurns()\n"
        "except sublet.UsageError as error: assert 'cannot be imported' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_trainer_is_away_while_the_generator_runs(stage: Stage, transformers: Path) -> None:
    train, infer = stage.worker("train"), stage.worker("infer")
    for worker in (train, infer):
        worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    infer.do("sublet.pause()")
    train.do(f"import sys; sys.path.insert(0, {str(transformers)!r})")
    train.do("import sublet.trl; turns = sublet.trl.TakeTurns('infer', optimizer=False)")
    train.do("asked = threading.Event(); told = threading.Event()")
    train.do(
        "def generate(prompts, trainer):\n"
        "    asked.set(); assert told.wait(60)\n"
        "    if prompts == 'bad': raise ValueError(prompts)\n"
        "    return prompts * 2\n"
    )
    train.do("said = []")
    train.do("rollout = turns.rollout(generate)")
    train.do(
        "def step(prompts):\n"
        "    try: said.append(rollout(prompts, trainer=None))\n"
        "    except ValueError as error: said.append(str(error))\n"
    )
    for prompts, answer in (("ab", "abab"), ("bad", "bad")):
        train.do("asked.clear(); told.clear()")
        train.do(f"thread = threading.Thread(target=step, args=({prompts!r},)); thread.start()")
        train.do("asked.wait(60)")
        assert train.do("sublet.is_paused()") is True and infer.do("sublet.is_paused()") is False
        assert infer.do("memory.read() == b'\\x07' * 4 * MIB") is True
        train.do("told.set(); thread.join(60)")
        assert train.do("said.pop()") == answer
        assert train.do("sublet.is_paused()") is False and infer.do("sublet.is_paused()") is True
        assert train.do("memory.read() == b'\\x07' * 4 * MIB") is True
