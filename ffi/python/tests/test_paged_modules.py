"""What `sublet.paged` makes of a module, and what it refuses: over a torch of a few lines, whose memory is a dict."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from dataclasses import dataclass
from typing import Any, Optional

import pytest

import sublet
from sublet import _paging, _planning

CHUNK = 64 << 20


@dataclass(frozen=True)
class Device:
    """As torch has it."""

    type: str
    index: int = 0


CUDA, CPU = Device("cuda"), Device("cpu")


class Storage:
    """Memory of a tensor."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size_bytes


class Tensor:
    """Numbers that are all the same, at an address."""

    memory: dict[int, float] = {}
    addresses = iter(range(1 << 20, 1 << 50, 1 << 30))

    def __init__(self, count: int, value: float = 0.0, device: Device = CUDA, address: Optional[int] = None) -> None:
        self.count, self.device, self.layout = count, device, "strided"
        self.address = next(Tensor.addresses) if address is None else address
        if address is None:
            Tensor.memory[self.address] = value
        self.shape, self.dtype, self.requires_grad = (count,), "float32", True
        self.extra_bytes = 0

    def untyped_storage(self) -> Storage:
        return Storage(self.address, 4 * self.count + self.extra_bytes)

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def data_ptr(self) -> int:
        return self.address

    def view(self, *_: object) -> Tensor:
        return self

    as_strided = view

    def detach(self) -> Tensor:
        return self

    def copy_(self, other: Tensor) -> None:
        Tensor.memory[self.address] = Tensor.memory[other.address]

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, other: Tensor) -> None:
        self.address, self.device = other.address, other.device


    def to(self, device: Device) -> Tensor:
        return Tensor(self.count, Tensor.memory[self.address], device)


class Parameter(Tensor):
    """A tensor of a module."""


class Module:
    """Named parameters."""

    def __init__(self, **params: Tensor) -> None:
        self.params = params
        self._buffers: dict[str, Optional[Tensor]] = {}

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return list({id(param): (name, param) for name, param in self.params.items()}.values())

    def parameters(self) -> list[Tensor]:
        return [param for _, param in self.named_parameters()]

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("", self)]


class Recurrent(Module):
    """A module whose weights cuDNN is given as one."""


class Pages:
    """The library, whose windows are numbers."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.planned: list[dict[str, int]] = []
        self.end = 1 << 60

    def page_open(self, *size: int) -> int:
        self.said.append(("open", *size))
        return 7

    def page_alloc(self, _pager: int, size_bytes: int) -> int:
        self.said.append(("alloc", size_bytes))
        self.end += -(-size_bytes // 512) * 512
        return self.end - -(-size_bytes // 512) * 512

    def page_report(self, _pager: int) -> str:
        return '{"calls": 3}'

    def page_plan(self, _pager: int) -> str:
        return json.dumps(self.planned)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.said.append((name, *args))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """A process under Sublet with a torch."""
    torch: Any = types.ModuleType("torch")
    torch.strided, torch.device = "strided", Device
    torch.no_grad = contextlib.nullcontext
    torch.nn = types.SimpleNamespace(Module=Module, Parameter=Parameter, RNNBase=Recurrent)
    torch.cuda = types.SimpleNamespace(
        device=lambda _: contextlib.nullcontext(),
        current_device=lambda: 0,
        is_current_stream_capturing=lambda: False,
        empty_cache=lambda: None,
    )
    torch.as_tensor = lambda raw, device: Tensor(
        raw.__cuda_array_interface__["shape"][0] // 4, device=device, address=raw.__cuda_array_interface__["data"][0]
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    library = Pages()
    monkeypatch.setattr(_paging, "own_library", lambda: library)
    return library


def test_parameters_stay_the_same_objects_and_lie_in_the_window_in_order(pages: Pages) -> None:
    first, second = Parameter(100, 1.5), Parameter(CHUNK // 4, 2.5)
    module = Module(first=first, second=second, tied=first)
    assert sublet.paged(module, frames="1GiB") is module
    assert module.parameters() == [first, second]
    assert (first.address, second.address) == (1 << 60, (1 << 60) + 512)
    assert [Tensor.memory[param.address] for param in (first, second)] == [1.5, 2.5]
    # No more frames than all of it needs.
    assert pages.said[:3] == [("open", 0, 2 * CHUNK, CHUNK, 2 * CHUNK), ("alloc", 400), ("page_acquire", 7, [1 << 60], _paging._WAIT_MS)]
    held = [said for said in pages.said if said[0] in ("page_acquire", "page_release")]
    assert [(said[0], said[2]) for said in held] == [
        (name, [address])
        for address in (first.address, second.address)
        for name in ("page_acquire", "page_release")
    ]
    report = [entry for entry in sublet.report() if entry.get("module") == "Module"]
    assert report[-1] == {"device": 0, "module": "Module", "parameters": 2, "calls": 3}
    with pytest.raises(sublet.UsageError, match="paged already"):
        sublet.paged(module, frames="1GiB")


@pytest.mark.parametrize("built_on", [CPU, CUDA])
def test_buffers_follow_parameters_from_the_cpu_to_the_device(pages: Pages, built_on: Device) -> None:
    torch: Any = sys.modules["torch"]
    # What is made there has the tensor that it is given as its count.
    torch.utils = types.SimpleNamespace(swap_tensors=lambda param, made: setattr(param, "data", made.count))
    module = Module(weight=Parameter(100, 1.5, built_on))
    table, there = Tensor(8, 2.5, CPU), Tensor(8, 3.5)
    module._buffers = {"table": table, "none": None, "there": there}
    sublet.paged(module, frames="1GiB")
    moved = module._buffers["table"]
    assert moved is not None and moved.device == (CUDA if built_on == CPU else CPU)
    assert Tensor.memory[moved.address] == 2.5
    assert module._buffers["none"] is None and module._buffers["there"] is there


def test_too_few_frames_are_refused_with_the_least_that_works(pages: Pages) -> None:
    module = Module(first=Parameter(100), second=Parameter(CHUNK // 4))
    with pytest.raises(sublet.UsageError, match="give at least '128MiB', better a third of all 128 MiB"):
        sublet.paged(module, frames="64MiB")
    assert pages.said == []


def test_frames_change_within_what_works(pages: Pages) -> None:
    module = Module(first=Parameter(100), second=Parameter(CHUNK // 4), third=Parameter(CHUNK // 4))
    with pytest.raises(sublet.UsageError, match="set_frames: this Module is not paged"):
        sublet.set_frames(module, "1GiB")
    sublet.paged(module, frames="130MiB")
    pages.said.clear()
    with pytest.raises(sublet.UsageError, match="give at least '128MiB'"):
        sublet.set_frames(module, "64MiB")
    sublet.set_frames(module, "1GiB")
    sublet.set_frames(module, 2 * CHUNK)
    assert [said[:3] for said in pages.said] == [("page_set_frames", 7, size) for size in (3 * CHUNK, 2 * CHUNK)]


def test_without_a_figure_the_window_has_what_is_left(pages: Pages) -> None:
    sublet.paged(Module(first=Parameter(CHUNK // 4)))
    assert pages.said[0] == ("open", 0, CHUNK, CHUNK, (1 << 64) - 1)


def test_plan_says_what_the_link_needs_for_other_frames(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_planning, "own_library", lambda: pages)
    monkeypatch.setattr(_planning, "_link_bytes_s", lambda _device: 40e9)
    module = sublet.paged(Module(first=Parameter(CHUNK // 4)), frames="64MiB")
    with pytest.raises(sublet.UsageError, match="call it after the third"):
        sublet.plan(module)
    pages.planned = [{"frames_bytes": 1 << 30, "in_bytes": 20_000_000_000}, {"frames_bytes": 4 << 30, "in_bytes": 0}]
    plan = sublet.plan(module, step_s=0.4)
    assert [(row["link_s"], row["step_s"]) for row in plan.rows] == [(0.5, 0.5), (0.0, 0.4)]
    assert str(plan).splitlines()[1] == "  1.00 GiB           20.0 GB       0.500 s         0.500 s"
    assert sublet.plan(module).rows[0]["step_s"] is None and str(sublet.plan(module)).endswith("-")
    with pytest.raises(sublet.UsageError, match="plan: this int is not paged"):
        sublet.plan(3)


def managed() -> Parameter:
    param = Parameter(4)
    param.ds_id = 1  # type: ignore[attr-defined]
    return param


def view() -> Parameter:
    param = Parameter(4)
    param.extra_bytes = 4
    return param


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Module(), "has no parameters"),
        (Module(w=managed()), "the parameter w is managed by DeepSpeed"),
        (Module(w=view()), "the parameter w shares its memory"),
        (Module(w=Tensor(4)), "the parameter w is a Tensor"),
        (Recurrent(w=Parameter(4)), "hands all its weights to cuDNN"),
        (Module(w=Parameter(4), v=Parameter(4, device=CPU)), "are on one device"),
        (Module(w=Parameter(4, device=Device("meta"))), "are on one device"),
    ],
)
def test_what_cannot_move_is_refused_by_name(pages: Pages, module: Module, why: str) -> None:
    with pytest.raises(sublet.UsageError, match=why):
        sublet.paged(module, frames="1GiB")
    assert pages.said == []
