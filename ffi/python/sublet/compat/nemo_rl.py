"""NeMo-RL: the policy workers' model and optimizer leave in place.

NeMo-RL's workers copy their model and optimizer to the host and back around each refit and generation. With
:func:`install` the DTensor workers' model and optimizer, and the Megatron worker's optimizer, leave and come
back by tag. Megatron's parameter and gradient buffers are moved by Megatron itself, as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Callable

from sublet.compat._binding import Framework, Target
from sublet.compat._moving import Movables, empty_cache, of_module, states

__all__ = ["install", "uninstall"]

_WORKERS = "nemo_rl.models.policy.workers"
#: What reads or writes a model or an optimizer wherever it is.
READERS = ("save_checkpoint", "load_checkpoint", "prepare_refit_info", "stream_weights_via_ipc_zmq")
MODEL_READERS = ("return_state_dict", "broadcast_weights_for_collective")
#: The same, of workers and versions that have them.
NEWER_READERS = ("stream_weights_via_http", "_checkpoint_engine_params")

_movables = Movables("nemo_rl")


def _to_cpu(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def move_to_cpu(worker: Any, model: Any) -> Any:
        if worker.cpu_offload:
            return theirs(worker, model)
        _movables.of(model, "model").offload(
            lambda: theirs(worker, model), lambda: of_module(model)
        )
        empty_cache()
        return model

    return move_to_cpu


def _to_cuda(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def move_to_cuda(worker: Any, model: Any) -> Any:
        if worker.cpu_offload:
            return theirs(worker, model)
        _movables.of(model, "model").load(lambda: theirs(worker, model), lambda: of_module(model))
        return model

    return move_to_cuda


def _move_optimizer(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def move(worker: Any, device: Any) -> None:
        optimizer = worker.optimizer
        tensors = list(_optimizer_states(optimizer))
        if not tensors:
            # The state comes to be at the first step.
            theirs(worker, device)
            return
        moved = _movables.of(optimizer, "optimizer")
        change = moved.offload if str(device) == "cpu" else moved.load
        change(lambda: theirs(worker, device), lambda: _optimizer_states(optimizer))

    return move


def _optimizer_states(optimizer: Any) -> Iterator[Any]:
    # Megatron's single optimizer has it behind a method; its chained one, and torch's, do not.
    is_chained = hasattr(optimizer, "chained_optimizers")
    of = None if is_chained else getattr(optimizer, "_get_state", None)
    return states(optimizer.state if of is None else of())


def _read(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def with_all_resident(worker: Any, *args: Any, **kwargs: Any) -> Any:
        for owner, kind in _parts(worker):
            # It stays until the worker moves it again: what is returned may refer to it.
            _movables.of(owner, kind).stay()
        return theirs(worker, *args, **kwargs)

    return with_all_resident


def _parts(worker: Any) -> Iterable[tuple[Any, str]]:
    for kind in ("model", "optimizer"):
        owner = getattr(worker, kind, None)
        if owner is not None:
            yield owner, kind


def _dtensor(worker: str) -> tuple[Target, ...]:
    return (
        Target(f"{worker}.move_to_cpu", _to_cpu, ("model",)),
        Target(f"{worker}.move_to_cuda", _to_cuda, ("model",)),
        Target(f"{worker}.move_optimizer_to_device", _move_optimizer, ("device",)),
        *(Target(f"{worker}.{name}", _read) for name in (*READERS, *MODEL_READERS)),
        *(Target(f"{worker}.{name}", _read, optional=True) for name in NEWER_READERS),
    )


def _megatron(worker: str) -> tuple[Target, ...]:
    return (
        Target(f"{worker}.move_optimizer", _move_optimizer, ("device",)),
        *(Target(f"{worker}.{name}", _read) for name in READERS),
    )


_framework = Framework(
    "NeMo RL",
    ("nemo_rl",),
    {
        f"{_WORKERS}.dtensor_policy_worker_v2": _dtensor("DTensorPolicyWorkerV2Impl"),
        f"{_WORKERS}.dtensor_policy_worker": _dtensor("DTensorPolicyWorkerImpl"),
        f"{_WORKERS}.megatron_policy_worker": _megatron("MegatronPolicyWorkerImpl"),
    },
    _movables.bring_back,
)

install, uninstall = _framework.install, _framework.uninstall
