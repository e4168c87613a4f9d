"""OpenRLHF: DeepSpeed's states sleep in place.

With ``--ds.enable_sleep`` OpenRLHF has DeepSpeed copy optimizer states, gradients and full-precision parameters
to the host and back around each training phase. With :func:`install` the same memory leaves and returns by
tag. The parameters that log probabilities and weight updates need stay, as they do without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Callable

from sublet.compat._binding import Framework, Target
from sublet.compat._moving import Movables, Moved, empty_cache

__all__ = ["install", "uninstall"]

_movables = Movables("openrlhf")


def _states(model: Any) -> Moved:
    return _movables.of(model, "states")


def _no_tensors() -> Iterable[Any]:
    # DeepSpeed keeps them to itself, and makes others only for a checkpoint that is loaded.
    return ()


def _offload(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def offload_deepspeed_states(
        model: Any, pin_memory: bool = True, non_blocking: bool = True
    ) -> None:
        was_tagged = _states(model).is_tagged
        _states(model).offload(lambda: theirs(model, pin_memory, non_blocking), _no_tensors)
        if was_tagged:
            # What theirs does in addition to the copies.
            model.empty_partition_cache()
            _finish()

    return offload_deepspeed_states


def _reload(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def reload_deepspeed_states(model: Any, non_blocking: bool = True) -> None:
        was_away = _states(model).is_away
        _states(model).load(lambda: theirs(model, non_blocking), _no_tensors)
        if was_away:
            _finish()

    return reload_deepspeed_states


def _finish() -> None:
    """Cached memory goes, and all ranks meet: callers rely on both."""
    empty_cache()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _save(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint reads the states also while they sleep."""

    def save_ckpt(strategy: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with _states(model).resident() if _is_engine(model) else contextlib.nullcontext():
            return theirs(strategy, model, *args, **kwargs)

    return save_ckpt


def _load(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Loading one makes states of its own."""

    def load_ckpt(strategy: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_engine(model):
            _states(model).renew()
        return theirs(strategy, model, *args, **kwargs)

    return load_ckpt


def _is_engine(model: Any) -> bool:
    return hasattr(model, "zero_optimization_stage")


_framework = Framework(
    "OpenRLHF",
    ("openrlhf",),
    {
        "openrlhf.utils.deepspeed.deepspeed_utils": (
            Target(
                "offload_deepspeed_states",
                _offload,
                ("model", "pin_memory", "non_blocking"),
                everywhere=True,
            ),
            Target(
                "reload_deepspeed_states", _reload, ("model", "non_blocking"), everywhere=True
            ),
        ),
        "openrlhf.utils.deepspeed.deepspeed": (
            Target("DeepspeedStrategy.save_ckpt", _save, ("model",)),
            Target("DeepspeedStrategy.load_ckpt", _load, ("model",)),
        ),
    },
    _movables.bring_back,
)

install, uninstall = _framework.install, _framework.uninstall
