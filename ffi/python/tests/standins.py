"""Stand-ins for frameworks, made of what is recorded of their interfaces: their names and parameters, bodies of ours.

A stand-in is a tree of source files, imported as the framework would be. Each function hands its arguments to
the test's body of that name; one without a body makes the calls that are recorded of it, in their order.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional

import simdriver
from simdriver import MIB, Memory

FOLDER = Path(__file__).resolve().parent / "interfaces"
#: By module and name; each is called with the arguments by name.
Bodies = dict[str, Callable[..., Any]]
_bodies: Bodies = {}


def recorded(framework: str) -> dict[str, Any]:
    """What is recorded of it."""
    found: dict[str, Any] = json.loads((FOLDER / f"{framework}.json").read_text())
    return found


@contextmanager
def standing_in(framework: str, folder: Path, bodies: Bodies, without: str = "") -> Iterator[None]:
    """A framework that can be imported inside; lacks the function ``without`` names."""
    recording = recorded(framework)
    for name, module in recording["modules"].items():
        write(folder, name, module, without)
    package = next(iter(recording["modules"])).partition(".")[0]
    (folder / package / "__init__.py").write_text("__version__ = '1.2.3'\n")
    _bodies.clear()
    _bodies.update(bodies)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def write(folder: Path, name: str, module: dict[str, Any], without: str) -> None:
    """The source of one module."""
    path = folder / Path(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(folder).parents:
        (folder / parent / "__init__.py").touch()
    lines = ["import sys", "import standins", "import torch", "dist = torch.distributed"]
    for imported, origin in module.get("imports", {}).items():
        lines.append(f"from {origin} import {imported}")
    classes: dict[str, list[str]] = {}
    for function, entry in module["functions"].items():
        if f"{name}.{function}" == without:
            continue
        holder, _, last = function.rpartition(".")
        classes.setdefault(holder, []).append(
            f"def {last}({entry['parameters']}):\n"
            f"    return standins.run({name!r}, {function!r}, dict(locals()), globals())\n"
        )
    lines += classes.pop("", [])
    for holder, methods in classes.items():
        body = "".join(methods).replace("\n", "\n    ").rstrip()
        lines.append(f"class {holder}:\n    {body}\n")
    path.write_text("\n".join(lines) + "\n")


def run(module: str, function: str, arguments: dict[str, Any], names: dict[str, Any]) -> Any:
    """What the function does."""
    body = _bodies.get(f"{module}.{function}")
    if body is not None:
        further = arguments.pop("kwargs", {})
        return body(*arguments.pop("args", ()), **arguments, **further)
    framework = module.partition(".")[0]
    entry = recorded(framework)["modules"][module]["functions"][function]
    for call in entry.get("calls", ()):
        dotted(call, {**names, **arguments})()
    return None


def dotted(name: str, names: dict[str, Any]) -> Any:
    """What a dotted name means."""
    first, *rest = name.split(".")
    found = names[first]
    for part in rest:
        found = getattr(found, part)
    return found


class Torch(types.ModuleType):
    """As much of torch as frameworks use in addition to tensors; has no device, so memory is the driver's own."""

    def __init__(self, meet: Optional[Callable[[], None]] = None) -> None:
        super().__init__("torch")
        self.said: list[str] = []
        say = self.said.append
        self.cuda = types.SimpleNamespace(
            is_available=lambda: False,
            is_initialized=lambda: False,
            empty_cache=lambda: say("empty_cache"),
            synchronize=lambda: say("synchronize"),
        )

        def barrier(group: object = None) -> None:
            say("barrier")
            if meet is not None:
                meet()

        self.distributed = types.SimpleNamespace(is_initialized=lambda: True, barrier=barrier)


class Tensor:
    """Bytes on the device or on the host, moved as torch moves a tensor in place."""

    def __init__(self, fill: int, size_bytes: int = 2 * MIB) -> None:
        self.nbytes = size_bytes
        self._memory: Optional[Memory] = simdriver.allocate(size_bytes, fill=fill)
        self._host = b""

    @property
    def is_cuda(self) -> bool:
        """Is it on the device?"""
        return self._memory is not None

    def data_ptr(self) -> int:
        """Where it begins, on the device."""
        return 0 if self._memory is None else self._memory.address

    def move(self, device: str) -> None:
        """To ``"cpu"`` or to another device."""
        if device == "cpu" and self._memory is not None:
            self._host = self._memory.read()
            self._memory.free()
            self._memory = None
        elif device != "cpu" and self._memory is None:
            self._memory = simdriver.allocate(self.nbytes)
            self._memory.write(self._host)

    @property
    def device(self) -> str:
        """Where it is."""
        return "cuda" if self.is_cuda else "cpu"

    def to(self, device: str) -> Tensor:
        """Itself, moved."""
        self.move(device)
        return self

    def read(self) -> bytes:
        """Its bytes, wherever they are."""
        return self._host if self._memory is None else self._memory.read()

    def write(self, data: bytes) -> None:
        """Puts ``data`` at its beginning on the device."""
        assert self._memory is not None
        self._memory.write(data)


class Model:
    """As much of a module of torch's as frameworks move."""

    def __init__(self, fills: list[int]) -> None:
        self.tensors = [Tensor(fill) for fill in fills]
        self.moves = 0

    def parameters(self) -> Iterator[Tensor]:
        """All but the last."""
        return iter(self.tensors[:-1])

    def buffers(self) -> Iterator[Tensor]:
        """The last."""
        return iter(self.tensors[-1:])

    def to(self, device: str) -> Model:
        """Moves them."""
        self.moves += any(tensor.is_cuda != (device != "cpu") for tensor in self.tensors)
        for tensor in self.tensors:
            tensor.move(device)
        return self

    def bytes(self) -> list[int]:
        """The first byte of each."""
        return [tensor.read()[0] for tensor in self.tensors]


class Optimizer:
    """As much of an optimizer of torch's: a state that the first step makes."""

    def __init__(self) -> None:
        self.state: dict[int, dict[str, Any]] = {}
        self.moves = 0

    def step(self, fill: int) -> None:
        """Makes the state, or changes it."""
        for index in range(2):
            if index not in self.state:
                self.state[index] = {"step": 1, "exp_avg": Tensor(fill)}
            self.state[index]["exp_avg"].write(bytes([fill]) * 16)

    def move(self, device: str) -> None:
        """Moves the state."""
        tensors = [state["exp_avg"] for state in self.state.values()]
        self.moves += any(tensor.is_cuda != (device != "cpu") for tensor in tensors)
        for tensor in tensors:
            tensor.move(device)

    def bytes(self) -> list[int]:
        """The first byte of each tensor."""
        return [state["exp_avg"].read()[0] for state in self.state.values()]
