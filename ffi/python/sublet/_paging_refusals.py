"""Refusals of ``sublet.paged``: optimizers, parameters and uses for which a step by blocks would give another result."""

from __future__ import annotations

import gc
import sys
from typing import Any

from sublet._errors import UsageError

#: The attribute by which an optimizer shows that drop-ins of Sublet's move its state as a whole, and the one of a paged optimizer.
MOVED_BY, PAGED_BY = "_sublet_moved_by", "_sublet_paged"
#: Attributes by which parameters show that others move them or keep them in parts, and whose they are.
_MANAGED = {
    "_local_tensor": "FSDP2 or tensor parallelism (DTensor)",
    "_is_flat_param": "FSDP",
    "_fsdp_flattened": "FSDP",
    "ds_id": "DeepSpeed",
}


def moved_by(optimizer: Any, mover: str) -> None:
    """Notes that ``mover`` moves the state of ``optimizer`` as a whole.

    Raises:
        UsageError: the optimizer is paged already.
    """
    if hasattr(optimizer, PAGED_BY):
        raise UsageError(f"{mover}: this optimizer is paged (sublet.paged), and its state moves by itself: leave its offload off")
    setattr(optimizer, MOVED_BY, mover)


def refuse_unfit(optimizer: Any, torch: Any) -> None:
    """Raises UsageError for optimizers and parameters with which a step by blocks would not be the step."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("paged: LBFGS has one state for all parameters, which are needed together")
    if isinstance(getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None), torch.optim.Optimizer):
        raise UsageError(f"paged: {name} wraps another optimizer: page that one, before it is wrapped")
    if any(group.get("max_grad_norm") for group in optimizer.param_groups):
        raise UsageError(f"paged: {name} clips by the norm of all gradients in its step (max_grad_norm), which needs them together")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UsageError("paged: hooks of the optimizer's step would run for each block: remove them first")
    mover = getattr(optimizer, MOVED_BY, None)
    if mover is not None:
        raise UsageError(f"paged: the state of {name} is moved by {mover} already: leave that off for this optimizer")
    for group in optimizer.param_groups:
        for param in group["params"]:
            for attribute, whose in _MANAGED.items():
                if hasattr(param, attribute):
                    raise UsageError(
                        f"paged: a parameter is managed by {whose}, which moves it or keeps it in parts: page an optimizer of "
                        "plain parameters"
                    )


def refuse_unfit_module(module: Any, params: list[Any], torch: Any) -> Any:
    """Raises UsageError for modules whose parameters cannot move, or whose uses no launch names. The device that uses them."""
    if not params:
        raise UsageError(f"paged: {type(module).__name__} has no parameters")
    devices = {param.device for param in params}
    if len(devices) != 1 or next(iter(devices)).type not in ("cuda", "cpu"):
        raise UsageError(f"paged: all parameters of the module are on one device, not {sorted(map(str, devices))}")
    places: set[int] = set()
    for name, param in module.named_parameters():
        for attribute, whose in _MANAGED.items():
            if hasattr(param, attribute):
                raise UsageError(
                    f"paged: the parameter {name} is managed by {whose}, which moves it or keeps it in parts: page a module of plain "
                    "parameters"
                )
        if type(param) is not torch.nn.Parameter:
            raise UsageError(f"paged: the parameter {name} is a {type(param).__name__}, whose memory is not its own alone")
        if param.layout is not torch.strided or not _is_dense(param):
            raise UsageError(f"paged: the parameter {name} is not dense")
        storage = param.untyped_storage()
        if storage.nbytes() != param.numel() * param.element_size() or storage.data_ptr() in places:
            raise UsageError(
                f"paged: the parameter {name} shares its memory with other tensors, which would not see its changes: copy it first"
            )
        places.add(storage.data_ptr())
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.RNNBase):
            raise UsageError(f"paged: {name or type(part).__name__} hands all its weights to cuDNN as one: it cannot be paged")
    device = devices.pop()
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _is_dense(tensor: Any) -> bool:
    """Does it fill its memory, in whatever order of dimensions?"""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return bool(tensor.numel() > 0)


def refuse_changed_groups(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """A step that keeps something for all parameters in a group would be run, and count, once a block."""
    for was, now in zip(before, after):
        for name, value in now.items():
            if value is not was.get(name) and (name not in was or bool(value != was[name])):
                raise UsageError(
                    f"paged: this optimizer's step changes '{name}' of its group, which is of all parameters together: only "
                    "optimizers that treat each parameter by itself can be paged"
                )


def device_of(optimizer: Any) -> Any:
    """The device of all parameters."""
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise UsageError(
            f"paged: all parameters of the optimizer are on one CUDA device, not {sorted(map(str, devices))}"
        )
    return devices.pop()


def not_in_backward(what: str) -> str:
    """Why something is refused with ``step="backward"``."""
    return (
        f'paged: {what} cannot be with step="backward", where a block steps as soon as its gradients are there: '
        'use step="after"'
    )


def refuse_averaging(params: list[Any], torch: Any) -> None:
    """Raises UsageError if ``DistributedDataParallel`` averages gradients of these over ranks: it ends that when backward ends.

    Looks through all objects of the process, which takes some 0.1 s.
    """
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    ours = {id(param) for param in params}
    for each in gc.get_objects():
        # Asking a proxy for its class may make what it stands for.
        if issubclass(type(each), torch.nn.parallel.DistributedDataParallel):
            if any(id(param) in ours for param in each.parameters()):
                raise UsageError(not_in_backward("gradients that DistributedDataParallel averages over ranks"))


def refuse_clipping(torch: Any) -> None:
    """Has torch's functions that clip gradients refuse those of optimizers that step in backward, which are gone by then."""
    clip_grad = torch.nn.utils.clip_grad
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_", "clip_grads_with_norm_"):
        stock = getattr(clip_grad, name, None)
        if stock is None or hasattr(stock, "_is_of_sublet"):
            continue

        def checked(parameters: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            each = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            if any(getattr(param, "_steps_in_backward", False) for param in each):
                raise UsageError(not_in_backward("clipping of gradients"))
            return _stock(parameters, *args, **kwargs)

        checked._is_of_sublet = True  # type: ignore[attr-defined]
        # Programs import the functions by name.
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is stock:
                setattr(module, name, checked)
