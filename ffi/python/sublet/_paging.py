"""Optimizers whose state lives in host memory and comes to the GPU in parts.

The library sees uses of the state at launches, and copies announced parts to the GPU before.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
import weakref
from collections import defaultdict
from typing import Any, Literal, Optional, TypeVar, Union

from sublet._errors import UsageError
from sublet._library import own_library
from sublet._native import Library, clear_stack
from sublet._paging_gone import Copies, State, hide_gradient, read_only, show_gradient
from sublet._paging_refusals import (
    PAGED_BY,
    device_of,
    not_in_backward,
    refuse_averaging,
    refuse_changed_groups,
    refuse_clipping,
    refuse_unfit,
)

Step = Literal["backward", "after"]

#: What moves together.
_CHUNK_BYTES = 64 << 20
#: Addresses of one optimizer. They cost no memory.
_WINDOW_BYTES = 1 << 40
#: How long a block waits for its state. The time of a pause does not count.
_WAIT_MS = 600_000
#: What tensors of a span begin at a multiple of, as PyTorch's own allocator has it, and spans too.
_ALIGNMENT_BYTES = 512
#: How many blocks are copied to the GPU ahead: two hide the copies, and more take frames from those in use.
_BLOCKS_AHEAD = 2
#: As many frames as the device and the budget give, for `page_open`.
_WHAT_IS_LEFT = (1 << 64) - 1
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_Target = TypeVar("_Target")


def _bytes_of(size: Union[int, str]) -> int:
    """A number of bytes, as a number or as text."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        for unit, factor in sorted(_UNITS.items(), key=lambda item: -len(item[0])):
            number = size[: -len(unit)].strip() if size.endswith(unit) else ""
            if number.replace(".", "", 1).isdecimal():
                return int(float(number) * factor)
    raise UsageError(f"paged: a size is a number of bytes or text such as '2GiB', not {size!r}")


class _Bytes:
    """Memory at an address, as PyTorch takes it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Block:
    """Parameters that step together, and the place of their state."""

    def __init__(self) -> None:
        #: Each with the number of its group.
        self.params: list[tuple[int, Any]] = []
        self.span: Optional[int] = None
        self.span_bytes = 0
        #: What lies in the span, by parameter and name.
        self.tensors: dict[tuple[int, str], Any] = {}
        #: In this pass: the gradients that are there, each with its parameter, and did it step?
        self.ready: dict[int, tuple[Any, Any]] = {}
        self.has_stepped = False

    def held(self) -> Optional[int]:
        """The span, if there is anything in it."""
        return self.span if self.tensors else None

    def begin_pass(self) -> None:
        """No gradient exists, and the block has not stepped."""
        self.ready.clear()
        self.has_stepped = False

    def has_lost(self) -> bool:
        """Are gradients gone that were there, as ``zero_grad`` has it?"""
        return any(param.grad is not gradient for param, gradient in self.ready.values())

    def wanted(self) -> int:
        return sum(1 for _, param in self.params if param.requires_grad)


class _Paged:
    """The data that makes one optimizer paged."""

    def __init__(
        self, optimizer: Any, torch: Any, library: Library, frames: int, step: Step, keeps_gradients: bool = False
    ) -> None:
        self._torch = torch
        self._library = library
        self._optimizer = weakref.ref(optimizer)
        self._stock_step = _unbound(optimizer.step)
        self._stock_load = _unbound(optimizer.load_state_dict)
        self._when, self._keeps_gradients = step, keeps_gradients
        self._blocks: list[_Block] = []
        self._block_of: dict[int, _Block] = {}
        self.device = device_of(optimizer)
        self._make_blocks(optimizer)
        sizes = self._check_frames(optimizer, frames)
        #: The blocks in the order in which this backward pass has ended them, and in which the last one had.
        self._order: list[_Block] = []
        self._expected = self._blocks[::-1]
        #: Was there a gradient in backward?
        self._has_begun = False
        self.pager = library.page_open(self.device.index, _WINDOW_BYTES, _CHUNK_BYTES, frames)
        close = weakref.finalize(optimizer, library.page_close, self.pager)
        close.atexit = False
        try:
            # What the host cannot hold is refused before anything has moved.
            for block, size in zip(self._blocks, sizes):
                self._set_span(block, size)
            try:
                self._install(optimizer, optimizer.state)
            except BaseException:
                self._give_back(optimizer)
                raise
        except BaseException:
            close()
            raise

    def _set_span(self, block: _Block, size: int) -> None:
        """Gives the block a span of at least this many bytes. A new span is empty."""
        if size > block.span_bytes:
            if block.span is not None:
                self._library.page_free(self.pager, block.span)
            block.span, block.span_bytes, block.tensors = None, 0, {}
            block.span, block.span_bytes = self._library.page_alloc(self.pager, size), size

    def _make_blocks(self, optimizer: Any) -> None:
        size = 0
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if not self._blocks or size >= _CHUNK_BYTES:
                    self._blocks.append(_Block())
                    size = 0
                block = self._blocks[-1]
                block.params.append((number, param))
                self._block_of[id(param)] = block
                # As Adam has it; others have less.
                size += 2 * param.numel() * param.element_size()

    def _check_frames(self, optimizer: Any, frames: int) -> list[int]:
        """Of each block, what its state takes, in bytes. Raises UsageError if one would not fit the frames."""
        sizes = []
        for block in self._blocks:
            there = [
                value
                for _, param in block.params
                for value in optimizer.state.get(param, {}).values()
                if self._is_paged_kind(param, value)
            ]
            to_come = [param for number, param in block.params for _ in range(self._made_by_steps(optimizer, number))]
            sizes.append(max(_span_bytes(there), _span_bytes(to_come)))
        ends = list(itertools.accumulate(sizes))
        chunks = (-(-end // _CHUNK_BYTES) - (end - size) // _CHUNK_BYTES for end, size in zip(ends, sizes))
        self._least = max(1, *chunks) * _CHUNK_BYTES
        self._refuse_too_few(frames)
        return sizes

    def _refuse_too_few(self, frames: int) -> None:
        least = self._least
        if frames // _CHUNK_BYTES * _CHUNK_BYTES < least:
            raise UsageError(
                f"paged: frames of {frames} bytes do not hold the state of one block of parameters, which takes {least} "
                f"bytes: give at least '{least >> 20}MiB', better twice that"
            )

    def set_frames(self, frames: int) -> None:
        """Sets the size from now on."""
        self._refuse_too_few(frames)
        self._library.page_set_frames(self.pager, frames, _WAIT_MS)

    def _made_by_steps(self, optimizer: Any, number: int) -> int:
        """Returns how many tensors like a parameter the optimizer makes for it, as far as that is known here."""
        if not isinstance(optimizer, (self._torch.optim.Adam, self._torch.optim.AdamW)):
            return 0
        return 3 if optimizer.param_groups[number].get("amsgrad") else 2

    def _install(self, optimizer: Any, state: dict[Any, dict[str, Any]]) -> None:
        """Takes state over that is in the device's memory, block by block."""
        optimizer.state = State(self, {})
        known = dict(state)
        state.clear()
        try:
            for block in self._blocks:
                found = {param: known.pop(param) for _, param in block.params if param in known}
                dict.update(optimizer.state, found)
                del found
                self._adopt(optimizer, block)
        finally:
            dict.update(optimizer.state, known)

    def _give_back(self, optimizer: Any) -> None:
        """The optimizer has its state in ordinary memory of the device again."""
        state = optimizer.state
        plain: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for block in self._blocks:
            for _, param in block.params:
                if param in state:
                    names = {name for name in state.real(param) if (id(param), name) in block.tensors}
                    plain[param] = {
                        name: value.to(self.device) if name in names else value for name, value in state[param].items()
                    }
        optimizer.state = plain

    # Uses.

    def _refuse_capture(self) -> None:
        with self._torch.cuda.device(self.device):
            if self._torch.cuda.is_current_stream_capturing():
                raise UsageError(
                    "paged: the optimizer's state is paged, which a graph under capture cannot use: "
                    "step outside of the graph"
                )

    def _announce(self, blocks: list[_Block]) -> None:
        spans = [block.span for block in blocks if block.span is not None and block.tensors]
        if spans:
            self._library.page_announce(self.pager, spans)

    def readable(self, param: Any, state: dict[str, Any], is_for_writing: bool) -> dict[str, Any]:
        """``state`` of ``param``, with copies instead of what is paged. A write to them is refused if nobody would see it."""
        block = self._block_of.get(id(param))
        if block is None or block.held() is None:
            return state
        paged = {name for name in state if (id(param), name) in block.tensors}
        self._refuse_capture()
        copies = {name: state[name].detach().cpu() for name in paged}
        if is_for_writing:
            return {name: copies.get(name, value) for name, value in state.items()}
        fixed = {name: read_only(value, self._torch) for name, value in copies.items()}
        return Copies({name: fixed.get(name, value) for name, value in state.items()})

    def _adopt(self, optimizer: Any, block: _Block) -> None:
        """Moves tensors of the block's state into its span. If some lie there already, all move to another one."""
        tensors = [
            (param, name, value)
            for _, param in block.params
            if param in optimizer.state
            for name, value in optimizer.state.real(param).items()
            if self._is_paged_kind(param, value)
        ]
        if all(block.tensors.get((id(param), name)) is value for param, name, value in tensors):
            return
        self._refuse_capture()
        values = [value for _, _, value in tensors]
        places = [_span_bytes(values[:index]) for index in range(len(values))]
        new, old = block, block.held()
        if old is not None:
            new = _Block()
        self._set_span(new, _span_bytes(values))
        span: Any = new.span
        held = [span] if old is None else [span, old]
        with self._torch.cuda.device(self.device):
            # PyTorch asks the driver whose an address is: it has memory while it is held.
            self._library.page_acquire(self.pager, held, _WAIT_MS)
            try:
                moved = {}
                for (param, name, value), place in zip(tensors, places):
                    tensor = self._tensor_at(span + place, value)
                    tensor.copy_(value)
                    moved[id(param), name] = (param, tensor)
            finally:
                self._library.page_release(self.pager, held)
        block.span, block.span_bytes = new.span, new.span_bytes
        block.tensors = {key: tensor for key, (_, tensor) in moved.items()}
        for (_, name), (param, tensor) in moved.items():
            optimizer.state.real(param)[name] = tensor
        if old is not None:
            self._library.page_free(self.pager, old)

    def _is_paged_kind(self, param: Any, value: Any) -> bool:
        is_tensor = isinstance(value, self._torch.Tensor)
        return is_tensor and value.device == self.device and value.shape == param.shape and value.numel() > 1

    def _tensor_at(self, address: int, like: Any) -> Any:
        size_bytes = like.numel() * like.element_size()
        raw = self._torch.as_tensor(_Bytes(address, size_bytes), device=self.device)
        if raw.data_ptr() != address:
            raise UsageError("paged: this PyTorch copies memory that it is given: use another version")
        flat = raw.view(like.dtype)
        if like.is_contiguous():
            return flat.view(like.shape)
        # Dense in another order of dimensions, as after `memory_format`.
        return flat.as_strided(like.shape, like.stride())

    # Steps.

    def step_block(self, block: _Block) -> None:
        """Runs the optimizer's own step for the block's parameters that have gradients."""
        optimizer = self._optimizer()
        params = [(number, param) for number, param in block.params if param.grad is not None]
        if optimizer is None or not params:
            return
        groups, state = optimizer.param_groups, optimizer.state
        chosen: dict[int, list[Any]] = {}
        for number, param in params:
            chosen.setdefault(number, []).append(param)
        with self._torch.cuda.device(self.device):
            if block.held() is not None:
                self._refuse_capture()
            now = [{**groups[number], "params": some} for number, some in sorted(chosen.items())]
            before = [dict(group) for group in now]
            try:
                optimizer.param_groups = now
                optimizer.state = defaultdict(
                    dict, {param: state.real(param) for _, param in params if param in state}
                )
                # A fused or foreach launch has a table of addresses, of which it fills a part. In the rest lies what the step of
                # another block has left on the stack, and it would be taken for a use of that block's weights.
                clear_stack()
                self._stock_step(optimizer)
                dict.update(state, optimizer.state)
                refuse_changed_groups(before, optimizer.param_groups)
            finally:
                optimizer.param_groups, optimizer.state = groups, state
            self._adopt(optimizer, block)

    def step(self, closure: Any = None) -> Any:
        """Runs the optimizer's ``step`` with paged state."""
        optimizer = self._optimizer()
        loss = None
        if closure is not None:
            with self._torch.enable_grad():
                loss = closure()
        if self._when == "backward":
            if getattr(optimizer, "grad_scale", None) is not None:
                raise UsageError(not_in_backward("a GradScaler"))
            # What has gradients left: backward did not reach all parameters of its block.
            expected = self._order or self._expected
            try:
                for block in self._blocks:
                    if not (block.has_stepped and self._keeps_gradients):
                        self.step_block(block)
            finally:
                self.begin_pass()
            self._expected = expected
            self._announce(self._expected[:_BLOCKS_AHEAD])
            return loss
        self._announce(self._blocks[:_BLOCKS_AHEAD])
        for index, block in enumerate(self._blocks):
            self._announce(self._blocks[index + 1 : index + 1 + _BLOCKS_AHEAD])
            self.step_block(block)
        return loss

    def begin_pass(self) -> None:
        """Forgets the rest of the last pass, which has ended or failed."""
        self._order = []
        for block in self._blocks:
            block.begin_pass()

    def show_gradients(self) -> None:
        """Freed gradients are ``None``, as after ``zero_grad``."""
        for block in self._blocks:
            for _, param in block.params:
                show_gradient(param)

    def gradient_is_there(self, param: Any) -> None:
        """The gradient of ``param`` is complete."""
        if self._optimizer() is None:
            return
        if not self._has_begun:
            # A module that is made after its optimizer is there by now.
            refuse_averaging([param for block in self._blocks for _, param in block.params], self._torch)
            self._has_begun = True
        show_gradient(param)
        block = self._block_of[id(param)]
        if block.has_stepped or id(param) in block.ready:
            # Those of a pass that has failed are gone by the next one, and those that are accumulated are there.
            if not any(each.has_lost() for each in self._blocks):
                again = "gradients that are accumulated over several backward passes"
                raise UsageError(f"{not_in_backward(again)}; behind a backward that has failed, call optimizer.zero_grad() first")
            self.begin_pass()
        block.ready[id(param)] = (param, param.grad)
        if len(block.ready) < block.wanted():
            return
        block.has_stepped = True
        self._order.append(block)
        next_one = len(self._order)
        self._announce(self._expected[next_one : next_one + _BLOCKS_AHEAD])
        self.step_block(block)
        block.ready.clear()
        if not self._keeps_gradients:
            for _, each in block.params:
                if each.grad is not None:
                    each.grad = None
                    hide_gradient(each)

    def load(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's ``load_state_dict``; no more than one block of it is in other memory of the device."""
        optimizer: Any = self._optimizer()
        state = dict(state_dict["state"])
        self._stock_load(optimizer, {**state_dict, "state": {}})
        for block in self._blocks:
            block.tensors = {}
        optimizer.state = State(self, {})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        number_of = {id(param): number for number, param in zip(saved, params)}
        cast = self._torch.optim.Optimizer._process_value_according_to_param_policy
        for block in self._blocks:
            for _, param in block.params:
                number = number_of[id(param)]
                entries = {
                    name: cast(param, value, number, state_dict["param_groups"], name)
                    if isinstance(value, self._torch.Tensor)
                    else value
                    for name, value in state.pop(number, {}).items()
                }
                if entries:
                    dict.__setitem__(optimizer.state, param, entries)
            self._adopt(optimizer, block)
        dict.update(optimizer.state, state)

    def report(self) -> dict[str, Any]:
        """The place of each part, and the bytes that were copied."""
        found: dict[str, Any] = json.loads(self._library.page_report(self.pager))
        return {"device": self.device.index, "step": self._when, "blocks": len(self._blocks), **found}


#: Those whose optimizer or module lives.
_live: weakref.WeakSet[Any] = weakref.WeakSet()


def _unbound(method: Any) -> Any:
    """``method`` as a function of its object, which it does not keep alive."""
    if isinstance(method, types.MethodType):
        return method.__func__
    # As a learning-rate scheduler leaves it: it knows its optimizer.
    return lambda _self, *args, **kwargs: method(*args, **kwargs)


def _span_bytes(tensors: list[Any]) -> int:
    """Returns the bytes that these need in a span."""
    sizes = (tensor.numel() * tensor.element_size() for tensor in tensors)
    return sum(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)


def paged(
    target: _Target, *, frames: Union[int, str, None] = None, step: Step = "after", keep_gradients: bool = False
) -> _Target:
    """Moves the state of a PyTorch optimizer, or the parameters of a module, to host memory. Parts come to the GPU for their use.

    An optimizer's own ``step`` runs, on blocks of parameters: results are bitwise the same. Call it once, before or
    after the first step. Learning-rate schedulers go on as they are.

    A module keeps its parameters, the same objects, and nothing else about it changes. Each launch waits for what it uses:
    frozen and trained weights, tied ones and checkpointing work as they are. Page the module before its optimizer is made. Its
    parameters may be in the CPU's memory; then its buffers move to the device with the parameters.

    Args:
        target: a ``torch.nn.Module``, whose parameters are plain, and on one device. Or a ``torch.optim.Optimizer`` whose parameters are on one CUDA device. Its step must treat each
            parameter by itself, as all of PyTorch's do but ``LBFGS``. Parameters of FSDP, DTensor and DeepSpeed are refused, and
            so is an optimizer that a drop-in of Sublet's moves.
        frames: the most device memory for state or parameters, in bytes or as text such as ``"2GiB"``. ``frames`` must
            hold the state of one block of parameters, or the weights of one launch; the error for less has that size. By
            default, as much as the budget and the device give, less 1 GiB. Frames are given up if other memory of the process needs them.
        step: of an optimizer. ``"after"``: in ``optimizer.step()``, block by block. ``"backward"``: in ``backward()``, as
            soon as all gradients of a block exist; these gradients are freed then. That hides the copies, and excludes
            accumulation, clipping, a ``GradScaler`` and ``DistributedDataParallel``.
        keep_gradients: with ``"backward"``, gradients stay behind the step of their block until ``zero_grad``, and take device memory. Without
            it they are gone when backward ends: until ``zero_grad``, a program that reads ``p.grad`` gets a ``UsageError``.

    Returns:
        ``target``, the same object. ``optimizer.state`` and ``state_dict()`` give copies in host memory. A write to those of
        ``optimizer.state`` raises a ``UsageError``.

    Raises:
        UsageError: ``target`` is of another kind, or is paged already, or ``frames`` is too small. Later: something
            that ``step="backward"`` excludes was done; the message names ``"after"``.
        NotAttachedError: this process is not under Sublet.
        OutOfDeviceMemory: there is no device memory for the first frame.
        OutOfHostMemory: the host cannot hold the state. The optimizer is as it was.

    >>> optimizer = sublet.paged(torch.optim.AdamW(model.parameters(), fused=True), frames="2GiB")  # doctest: +SKIP
    """
    torch: Any = sys.modules.get("torch")
    size = _WHAT_IS_LEFT if frames is None else _bytes_of(frames)
    if _is_module(target):
        from sublet._paging_weights import page_module

        page_module(target, torch, own_library(), size)
        return target
    if torch is None or not isinstance(target, torch.optim.Optimizer):
        raise UsageError(f"paged: a torch.optim.Optimizer or a torch.nn.Module is needed, not {type(target).__name__}")
    if step not in ("backward", "after"):
        raise UsageError(f"paged: step is 'backward' or 'after', not {step!r}")
    optimizer: Any = target
    if hasattr(optimizer, PAGED_BY):
        raise UsageError("paged: this optimizer is paged already")
    refuse_unfit(optimizer, torch)
    owner = _Paged(optimizer, torch, own_library(), size, step, keep_gradients)
    _wrap(optimizer, owner)
    if step == "backward":
        refuse_clipping(torch)
        # A GradScaler hands its scale to an optimizer that says so, which then refuses it.
        optimizer._step_supports_amp_scaling = True
        for group in optimizer.param_groups:
            for param in group["params"]:
                param._steps_in_backward = True
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(owner.gradient_is_there)
    _live.add(owner)
    return target


def _is_module(target: Any) -> bool:
    module_type = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return module_type is not None and isinstance(target, module_type)


def _wrap(target: Any, owner: _Paged) -> None:
    """Replaces the optimizer's methods on the object, as learning-rate schedulers do."""

    def step(_self: Any, closure: Any = None, **_kwargs: Any) -> Any:
        return owner.step(closure)

    def load_state_dict(_self: Any, state_dict: dict[str, Any]) -> None:
        owner.load(state_dict)

    def add_param_group(_self: Any, _group: Any) -> None:
        raise UsageError("paged: add all groups of parameters before the optimizer is paged")

    stock_zero_grad = _unbound(target.zero_grad)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        owner.show_gradients()
        stock_zero_grad(self, *args, **kwargs)
        owner.begin_pass()

    if hasattr(target.step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    for function in (step, load_state_dict, add_param_group, zero_grad):
        setattr(target, function.__name__, types.MethodType(function, target))
    setattr(target, PAGED_BY, owner)
