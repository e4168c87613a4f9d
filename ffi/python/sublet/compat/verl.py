"""verl: the FSDP engine's model and optimizer leave in place.

With ``param_offload`` and ``optimizer_offload`` verl's FSDP engine copies both to the host and back around each
phase, to other addresses each time. With :func:`install` they leave and return by tag. Its other engines
do what they do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Callable

from sublet.compat import _moving
from sublet.compat._binding import Framework, Target
from sublet.compat._moving import Hold, Movables, of_module, states

__all__ = ["install", "uninstall"]

_movables = Movables("verl")


def _offload_model(theirs: Callable[..., Any]) -> Callable[..., Any]:
    # In the place of verl's own function for its FSDP engine alone, whose reads of a model that is away
    # are known.
    def offload_fsdp_model_to_cpu(model: Any, empty_cache: bool = True) -> None:
        _movables.of(model, "model").offload(
            lambda: theirs(model, empty_cache), lambda: of_module(model)
        )
        if empty_cache:
            _moving.empty_cache()

    return offload_fsdp_model_to_cpu


def _load_model(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def load_fsdp_model_to_gpu(model: Any) -> None:
        _movables.of(model, "model").load(lambda: theirs(model), lambda: of_module(model))

    return load_fsdp_model_to_gpu


def _offload_optimizer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def offload_fsdp_optimizer(optimizer: Any) -> None:
        # Its state comes to be at the first step.
        if optimizer.state:
            _movables.of(optimizer, "optimizer").offload(
                lambda: theirs(optimizer), lambda: states(optimizer.state)
            )

    return offload_fsdp_optimizer


def _load_optimizer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def load_fsdp_optimizer(optimizer: Any, device_id: Any) -> None:
        if optimizer.state:
            _movables.of(optimizer, "optimizer").load(
                lambda: theirs(optimizer, device_id), lambda: states(optimizer.state)
            )

    return load_fsdp_optimizer


def _read_weights(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """verl reads copies on the host where it has offloaded: ours stays until the last tensor is read."""

    def read(engine: Any, *args: Any, **kwargs: Any) -> Any:
        hold = _movables.of(engine.module, "model").hold()
        try:
            parameters, config = theirs(engine, *args, **kwargs)
        except BaseException:
            hold.release()
            raise
        return _held(parameters, hold), config

    return read


def _held(parameters: Iterable[Any], hold: Hold) -> Iterator[Any]:
    try:
        yield from parameters
    finally:
        hold.release()


def _once(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
        # The first round gives back all that there is: nothing is cached behind it any more.
        theirs(force_sync=force_sync, max_retries=min(max_retries, 1))

    return aggressive_empty_cache


_framework = Framework(
    "verl",
    ("verl",),
    {
        "verl.workers.engine.fsdp.transformer_impl": (
            Target("offload_fsdp_model_to_cpu", _offload_model, ("model", "empty_cache")),
            Target("load_fsdp_model_to_gpu", _load_model, ("model",)),
            Target("offload_fsdp_optimizer", _offload_optimizer, ("optimizer",)),
            Target("load_fsdp_optimizer", _load_optimizer, ("optimizer", "device_id")),
            Target("FSDPEngine.get_per_tensor_param", _read_weights),
            # verl has it from 0.9.0 on.
            Target("FSDPEngine.get_per_tensor_param_shard", _read_weights, optional=True),
        ),
        "verl.utils.memory_utils": (
            Target(
                "aggressive_empty_cache", _once, ("force_sync", "max_retries"), everywhere=True
            ),
        ),
    },
    _movables.bring_back,
)

install, uninstall = _framework.install, _framework.uninstall
