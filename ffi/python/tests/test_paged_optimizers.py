"""What `sublet.paged` makes of an optimizer, and what it refuses: over a torch of a few lines, whose device is a dict."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import types
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Optional

import pytest

import sublet
from sublet import _paging
from sublet._paging_refusals import moved_by

CHUNK = 64 << 20


@dataclass(frozen=True)
class Device:
    """As torch has it."""

    type: str
    index: int


DEVICE, CPU = Device("cuda", 0), Device("cpu", 0)


class Tensor:
    """Numbers that are all the same, on a device at an address."""

    memory: dict[int, float] = {}
    addresses = iter(range(1 << 40, 1 << 50, 1 << 30))

    def __init__(self, count: int, value: float = 0.0, device: Any = DEVICE, address: Optional[int] = None) -> None:
        self.count, self.device = count, device
        self.address = next(Tensor.addresses) if address is None else address
        if address is None:
            Tensor.memory[self.address] = value
        self.shape, self.dtype, self.requires_grad = (count,), "float32", True
        self._grad: Optional[Tensor] = None
        self.hooks: list[Any] = []

    value = property(lambda self: Tensor.memory[self.address])

    @property
    def grad(self) -> Optional[Tensor]:
        return self._grad

    @grad.setter
    def grad(self, gradient: Optional[Tensor]) -> None:
        self._grad = gradient

    def zero_(self) -> Tensor:
        """As a subclass is asked."""
        ask = getattr(type(self), "__torch_function__", None)
        if ask is not None:
            found: Tensor = ask(Tensor.zero_, (type(self),), (self,), None)
            return found
        Tensor.memory[self.address] = 0.0
        return self

    def as_subclass(self, kind: type[Tensor]) -> Tensor:
        found = kind.__new__(kind)
        found.__dict__.update(self.__dict__)
        return found

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return self.address

    def view(self, *_: object) -> Tensor:
        return self

    def is_contiguous(self) -> bool:
        return True

    def detach(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        Tensor.memory[self.address] = other.value

    def cpu(self) -> Tensor:
        return Tensor(self.count, self.value, CPU)

    def to(self, device: Any) -> Tensor:
        return Tensor(self.count, self.value, device)

    def register_post_accumulate_grad_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def backward(self, value: float) -> None:
        """Gets a gradient, without Python's part in it."""
        if self._grad is None:
            self._grad = Tensor(self.count)
        Tensor.memory[self._grad.address] += value
        for hook in self.hooks:
            hook(self)


class Optimizer:
    """Adds up gradients in a state of one tensor, and counts steps."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params, "lr": 1.0, **options}]
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    total = state.setdefault("sum", Tensor(param.count))
                    Tensor.memory[total.address] += param.grad.value
                    state["steps"] = state.get("steps", 0) + 1

    def load_state_dict(self, _state: dict[str, Any]) -> None: ...

    def zero_grad(self) -> None:
        params = (param for group in self.param_groups for param in group["params"])
        for param in (param for param in params if param.grad is not None):
            param.grad = None


class Adam(Optimizer):
    """By its name alone."""


class LBFGS(Optimizer):
    """By its name alone."""


class CountsInGroup(Optimizer):
    """As NVIDIA's fused Adam has its count of steps."""

    def step(self) -> None:
        super().step()
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


class Library:
    """Frames without a device: spans are addresses."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.held: list[int] = []
        self.spans = iter(range(1 << 50, 1 << 60, 1 << 40))
        self.closed: list[int] = []
        self.sizes: list[int] = []
        self.fails_in, self.fails_at = "", 0

    def may_fail(self, call: str) -> None:
        if call == self.fails_in:
            self.fails_at -= 1
            if self.fails_at == 0:
                raise sublet.OutOfHostMemory("no place")

    def page_open(self, device: int, window: int, chunk: int, frames: int) -> int:
        self.opened.append(frames)
        return len(self.opened)

    def page_close(self, pager: int) -> None:
        self.closed.append(pager)

    def page_alloc(self, pager: int, size_bytes: int) -> int:
        self.may_fail("alloc")
        self.sizes.append(size_bytes)
        return next(self.spans)

    def page_free(self, pager: int, span: int) -> None: ...

    def page_acquire(self, pager: int, spans: list[int], wait_ms: int) -> None:
        self.may_fail("acquire")
        self.held += spans

    def page_release(self, pager: int, spans: list[int]) -> None:
        for span in spans:
            self.held.remove(span)

    def page_announce(self, pager: int, spans: list[int]) -> None: ...

    def page_set_frames(self, pager: int, frames: int, wait_ms: int) -> None:
        self.opened.append(frames)


def clip_grad_norm_(parameters: Any, max_norm: float) -> float:
    """Torch's own."""
    return math.sqrt(sum(param.grad.value**2 for param in parameters if param.grad is not None))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A process under Sublet with a torch."""
    torch: Any = types.ModuleType("torch")
    optim = types.SimpleNamespace(Optimizer=Optimizer, LBFGS=LBFGS, Adam=Adam, AdamW=Adam)
    cuda = types.SimpleNamespace(
        device=lambda _device: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
    )
    torch.optim, torch.cuda, torch.Tensor = optim, cuda, Tensor
    torch.as_tensor = lambda raw, device: Tensor(
        raw.__cuda_array_interface__["shape"][0] // 4, device=device, address=raw.__cuda_array_interface__["data"][0]
    )
    clip_grad: Any = types.ModuleType("torch.nn.utils.clip_grad")
    clip_grad.clip_grad_norm_ = clip_grad_norm_
    torch.nn = types.SimpleNamespace(utils=types.SimpleNamespace(clip_grad=clip_grad))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn.utils.clip_grad", clip_grad)
    # It is put into every module that has it by name, this one too.
    monkeypatch.setattr(sys.modules[__name__], "clip_grad_norm_", clip_grad_norm_)
    library = Library()
    monkeypatch.setattr(_paging, "own_library", lambda: library)
    # They live until they are collected, and `sublet.report` would ask them.
    monkeypatch.setattr(_paging, "_live", weakref.WeakSet())
    return library


def parameters(*counts: int) -> list[Tensor]:
    """Parameters of so many numbers."""
    return [Tensor(count) for count in counts]


def test_state_comes_as_copies_and_steps_are_the_stock_ones(library: Library) -> None:
    params = parameters(CHUNK // 4, CHUNK // 4, 8)
    stock, optimizer = Optimizer(params), Optimizer(params)
    sublet.paged(optimizer, frames="256MiB")
    for step in (1.0, 2.0):
        for param in params:
            param.grad = Tensor(param.count, step)
        stock.step()
        optimizer.step()
    for param in params:
        ours, theirs = optimizer.state[param], stock.state[param]
        assert (ours["sum"].value, ours["steps"]) == (theirs["sum"].value, theirs["steps"]) == (3.0, 2)
        assert ours["sum"].device is CPU
    assert library.held == []


@pytest.mark.parametrize(
    ("kind", "frames", "least"),
    [(Adam, "128MiB", "256MiB"), (Optimizer, "63MiB", "64MiB")],
)
def test_frames_that_do_not_hold_a_block_are_refused_with_the_least_that_works(
    library: Library, kind: type[Optimizer], frames: str, least: str
) -> None:
    # 128 MiB of state for each of Adam's two, and nothing known of the other's.
    optimizer = kind(parameters(2 * CHUNK // 4, 16))
    with pytest.raises(sublet.UsageError, match=f"give at least '{least}'"):
        sublet.paged(optimizer, frames=frames)
    assert library.opened == []
    sublet.paged(optimizer, frames=least)
    with pytest.raises(sublet.UsageError, match=f"give at least '{least}'"):
        sublet.set_frames(optimizer, frames)
    sublet.set_frames(optimizer, "1GiB")
    assert library.opened[1:] == [1 << 30]


@pytest.mark.parametrize("call", ["alloc", "acquire"])
def test_state_that_is_there_is_counted_and_stays_where_a_call_is_refused(library: Library, call: str) -> None:
    optimizer = Optimizer(parameters(3 * CHUNK // 4, 16))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = Tensor(param.count, 5.0)
    optimizer.step()
    before = {param: state["sum"] for param, state in optimizer.state.items()}
    with pytest.raises(sublet.UsageError, match="give at least '192MiB'"):
        sublet.paged(optimizer, frames="128MiB")
    assert {param: state["sum"] for param, state in optimizer.state.items()} == before
    # Of two blocks the second fails: before the first has moved, or behind that.
    library.fails_in, library.fails_at = call, 2
    with pytest.raises(sublet.OutOfHostMemory):
        sublet.paged(optimizer, frames="192MiB")
    assert library.closed == [1]
    if call == "alloc":
        assert {param: state["sum"] for param, state in optimizer.state.items()} == before
    assert type(optimizer.state) is defaultdict
    found = [optimizer.state[param] for param in before]
    assert [(state["sum"].value, state["sum"].device, state["steps"]) for state in found] == [(5.0, DEVICE, 1)] * 2
    optimizer.step()
    sublet.paged(optimizer, frames="192MiB")
    assert [optimizer.state[param]["sum"].value for param in before] == [10.0, 10.0]


def test_spans_of_blocks_are_as_large_as_their_state_and_there_before_the_first_step(library: Library) -> None:
    # Adam's two tensors for each; blocks end where a chunk is full, by what Adam has.
    optimizer = Adam(parameters(3 * CHUNK // 16, CHUNK // 16, 8))
    sublet.paged(optimizer, frames="192MiB")
    assert library.sizes == [3 * CHUNK // 2, CHUNK // 2 + 2 * 512]
    for param in optimizer.param_groups[0]["params"]:
        param.grad = Tensor(param.count, 1.0)
    optimizer.step()
    assert len(library.sizes) == 2, "what was there is used"


class Wrapper(Optimizer):
    """As accelerate hands one out."""

    optimizer = Optimizer([])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (LBFGS(parameters(8)), "LBFGS has one state for all"),
        (Wrapper(parameters(8)), "Wrapper wraps another optimizer"),
        (Optimizer(parameters(8), max_grad_norm=1.0), "Optimizer clips by the norm of all"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Optimizer) else "",
)
def test_optimizers_that_look_across_parameters_are_refused_by_name(
    library: Library, optimizer: Optimizer, said: str
) -> None:
    with pytest.raises(sublet.UsageError, match=said):
        sublet.paged(optimizer, frames="1GiB")
    assert library.opened == []


def test_graph_under_capture_neither_steps_nor_reads_nor_makes_state(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Optimizer(parameters(8)), Optimizer(parameters(8))
    (param,) = old.param_groups[0]["params"]
    for optimizer in (old, new):
        sublet.paged(optimizer, frames="1GiB")
        optimizer.param_groups[0]["params"][0].grad = Tensor(8, 1.0)
    old.step()
    cuda: Any = sys.modules["torch"].cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: True)
    for use in (old.step, new.step, lambda: old.state[param]):
        with pytest.raises(sublet.UsageError, match="a graph under capture cannot use: step outside of the graph"):
            use()
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
    assert (old.state[param]["sum"].value, library.held) == (1.0, [])


def test_step_that_keeps_something_in_its_group_is_refused_at_its_first_block(library: Library) -> None:
    optimizer = CountsInGroup(parameters(CHUNK // 4, CHUNK // 4))
    sublet.paged(optimizer, frames="1GiB")
    for param in optimizer.param_groups[0]["params"]:
        param.grad = Tensor(param.count, 1.0)
    with pytest.raises(sublet.UsageError, match="changes 'count' of its group"):
        optimizer.step()
    assert library.held == [] and "count" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("attribute", "whose"),
    [("_local_tensor", "FSDP2"), ("_is_flat_param", "FSDP,"), ("_fsdp_flattened", "FSDP,"), ("ds_id", "DeepSpeed")],
)
def test_parameters_that_others_manage_are_refused(library: Library, attribute: str, whose: str) -> None:
    params = parameters(8, 8)
    setattr(params[1], attribute, True)
    with pytest.raises(sublet.UsageError, match=f"managed by {whose}"):
        sublet.paged(Optimizer(params), frames="1GiB")


def test_state_is_moved_by_paging_or_by_a_drop_in_and_not_by_both(library: Library) -> None:
    from sublet.compat.verl import _movables

    moved, paged = Optimizer(parameters(8)), Optimizer(parameters(8))
    _movables.of(moved, "optimizer")
    with pytest.raises(sublet.UsageError, match="moved by sublet.compat.verl already"):
        sublet.paged(moved, frames="1GiB")
    sublet.paged(paged, frames="1GiB")
    with pytest.raises(sublet.UsageError, match="is paged"):
        _movables.of(paged, "optimizer")
    with pytest.raises(sublet.UsageError, match="sublet.trl.TakeTurns: this optimizer is paged"):
        moved_by(paged, "sublet.trl.TakeTurns")


def test_what_cannot_be_in_backward_is_refused_and_named(library: Library) -> None:
    params = parameters(8, 8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB", step="backward")
    for param in params:
        param.backward(2.0)
    with pytest.raises(sublet.UsageError, match='clipping of gradients.*step="after"'):
        clip_grad_norm_(iter(params), 1.0)
    others = parameters(8)
    others[0].grad = Tensor(8, 3.0)
    assert clip_grad_norm_(others, 1.0) == 3.0
    setattr(optimizer, "grad_scale", Tensor(1))
    with pytest.raises(sublet.UsageError, match='a GradScaler.*step="after"'):
        optimizer.step()
    delattr(optimizer, "grad_scale")
    optimizer.step()
    for param in params:
        param.backward(2.0)
    with pytest.raises(sublet.UsageError, match='accumulated.*step="after"'):
        params[0].backward(2.0)


def clear(params: list[Tensor]) -> None:
    """As `module.zero_grad()` has it, of which the optimizer does not hear."""
    for param in params:
        param.grad = None


@pytest.mark.parametrize("stepped", [0, 1])
@pytest.mark.parametrize("by_optimizer", [True, False])
def test_backward_that_has_failed_half_way_is_skipped_and_the_next_ones_work(
    library: Library, stepped: int, by_optimizer: bool
) -> None:
    params = parameters(*[CHUNK // 8] * stepped, 8, 8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB", step="backward")
    for param in params[:-1]:
        param.backward(1.0)
    optimizer.zero_grad() if by_optimizer else clear(params)
    for _ in range(3):
        for param in params:
            param.backward(1.0)
        optimizer.step()
        clear(params)
    assert [optimizer.state[param]["sum"].value for param in params] == [4.0] * stepped + [3.0, 3.0]


def test_backward_that_has_failed_between_blocks_ends_with_zero_grad(library: Library) -> None:
    params = parameters(CHUNK // 8, 8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB", step="backward")
    params[0].backward(1.0)
    with pytest.raises(sublet.UsageError, match=r"call optimizer.zero_grad\(\)"):
        params[0].backward(1.0)
    optimizer.zero_grad()
    for param in params:
        param.backward(1.0)
    optimizer.step()
    assert [optimizer.state[param]["sum"].value for param in params] == [2.0, 1.0]


def test_step_that_fails_half_way_ends_its_pass(library: Library) -> None:
    params = parameters(8, 8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB", step="backward")
    for param in params:
        param.backward(1.0)
    optimizer.step()
    params[0].backward(1.0)
    owner = getattr(optimizer, "_sublet_paged")
    stock = owner._stock_step

    def finds_no_room(_optimizer: Any) -> None:
        owner._stock_step = stock
        raise sublet.OutOfHostMemory("no place")

    owner._stock_step = finds_no_room
    with pytest.raises(sublet.OutOfHostMemory):
        optimizer.step()
    # Nothing has stepped: it is as if the next pass were accumulated.
    params[0].backward(1.0)
    optimizer.step()
    assert [optimizer.state[param]["sum"].value for param in params] == [3.0, 1.0]


def test_gradients_that_are_kept_are_there_for_a_norm_and_step_once(library: Library) -> None:
    params = parameters(8, 8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB", step="backward", keep_gradients=True)
    for times in (1, 2):
        for param in params:
            param.backward(3.0)
        assert [param.grad.value for param in params if param.grad is not None] == [3.0, 3.0]
        optimizer.step()
        optimizer.zero_grad()
        assert [optimizer.state[param]["steps"] for param in params] == [times, times]


def norm(params: list[Tensor]) -> float:
    """As a program has it for its log."""
    return math.sqrt(sum(param.grad.value**2 for param in params if param.grad is not None))


def test_reading_a_gradient_that_its_step_has_freed_is_an_error_until_gradients_are_cleared(library: Library) -> None:
    # PyTorch itself reads them, and so does whatever clears them.
    of_torch: dict[str, Any] = {"__name__": "torch.optim.lr_scheduler"}
    exec("def counted(params): return sum(param.grad is not None for param in params)", of_torch)

    def zero_grad() -> None:
        for param in params:
            if param.grad is not None:
                param.grad = None

    params = parameters(CHUNK // 8, 8)
    frozen = parameters(8)[0]
    frozen.requires_grad = False
    optimizer = Optimizer([*params, frozen])
    sublet.paged(optimizer, frames="1GiB", step="backward")
    for clear_all in (optimizer.zero_grad, zero_grad, lambda: clear(params)):
        for param in params:
            param.backward(3.0)
        for _ in range(2):
            with pytest.raises(sublet.UsageError, match=r"gradient is gone.*keep_gradients=True.*step=\"after\""):
                norm(params)
            assert (of_torch["counted"](params), frozen.grad) == (0, None)
            optimizer.step()
        clear_all()
        assert norm(params) == 0.0
        assert {type(param) for param in params} == {Tensor}
    # The next passes need no clearing, and a gradient of the program's own is read.
    for _ in range(3):
        for param in params:
            param.backward(1.0)
        optimizer.step()
    assert {type(param).__base__ for param in params} == {Tensor}
    params[1].grad = Tensor(8, 4.0)
    assert norm(params[1:]) == 4.0


def test_state_that_is_read_is_not_written_and_what_state_dicts_have_is(library: Library) -> None:
    of_torch: dict[str, Any] = {"__name__": "torch.optim.optimizer"}
    exec("def state_dict(optimizer): return {id(key): value for key, value in optimizer.state.items()}", of_torch)
    params = parameters(8)
    optimizer = Optimizer(params)
    sublet.paged(optimizer, frames="1GiB")
    params[0].grad = Tensor(8, 5.0)
    # There is none yet, and what a program writes is what the first step finds.
    optimizer.state[params[0]]["steps"] = 10
    optimizer.step()
    reads: list[Any] = [
        lambda: optimizer.state[params[0]],
        lambda: optimizer.state.get(params[0]),
        lambda: list(optimizer.state.values())[0],
        lambda: dict(optimizer.state.items())[params[0]],
    ]
    writes: list[Any] = [
        lambda state: state["sum"].zero_(),
        lambda state: state.update(steps=0),
        lambda state: state.pop("sum"),
        lambda state: state.setdefault("more", 1),
        lambda state: state.clear(),
        lambda state: state.__setitem__("steps", 0),
        lambda state: state.__delitem__("steps"),
    ]
    for read in reads:
        for write in writes:
            with pytest.raises(sublet.UsageError, match="copies of paged state.*load_state_dict"):
                write(read())
        assert (read()["sum"].value, read()["steps"]) == (5.0, 11)
    for copied in (copy.deepcopy(reads[0]()), of_torch["state_dict"](optimizer)[id(params[0])]):
        copied["steps"] = 0
        assert copied["sum"].zero_().value == 0.0
    assert type(copied) is dict and type(copied["sum"]) is Tensor
    assert reads[0]()["sum"].value == 5.0


class Averaged:
    """As DistributedDataParallel knows its parameters."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params

    def parameters(self) -> list[Tensor]:
        return self.params


@pytest.mark.parametrize("is_started", [True, False])
def test_gradients_that_are_averaged_when_backward_ends_are_not_stepped_in_backward(
    library: Library, is_started: bool
) -> None:
    torch: Any = sys.modules["torch"]
    torch.distributed = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: is_started)
    torch.nn.parallel = types.SimpleNamespace(DistributedDataParallel=Averaged)
    params, others = parameters(8, 8), parameters(8)
    optimizer, other = Optimizer(params), Optimizer(others)
    for each in (optimizer, other):
        sublet.paged(each, frames="1GiB", step="backward")
    _averaged = Averaged(params)
    others[0].backward(2.0)
    refused = pytest.raises(sublet.UsageError, match='DistributedDataParallel averages.*step="after"')
    with refused if is_started else contextlib.nullcontext():
        params[0].backward(2.0)
