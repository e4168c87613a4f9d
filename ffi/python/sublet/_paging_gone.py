"""Freed gradients, and copies of state: to read such a gradient, or to write such a copy, raises an error with the remedy."""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict, defaultdict
from typing import Any

from sublet._errors import UsageError

#: Set in a parameter whose gradient its step in backward has freed.
_IS_GONE = "_sublet_gradient_is_gone"
#: By a class of parameters, the one whose gradients are gone; by one of tensors, the one that refuses writes.
_gone: dict[type, type] = {}
_fixed: dict[type, type] = {}
#: Functions of PyTorch that write to their first argument, apart from those whose names end with one underscore.
_WRITES = {"__setitem__", "__set__"} | {
    f"__i{each}__"
    for each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}


def _is_own(frame: types.FrameType) -> bool:
    """Is it PyTorch's code, or Sublet's?"""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "sublet")


def hide_gradient(param: Any) -> None:
    """From now on a program that reads ``param.grad`` hears that a step has freed it. PyTorch itself reads ``None``."""
    kind = type(param)
    if kind not in _gone:
        stock: Any = kind.grad

        def read(self: Any) -> Any:
            gradient, reader = stock.__get__(self), sys._getframe(1)
            if gradient is not None or not getattr(self, _IS_GONE, False):
                return gradient
            is_clearing = reader.f_code.co_name == "zero_grad"
            if not is_clearing and not _is_own(reader):
                raise UsageError(
                    'paged: this gradient is gone: with step="backward" the optimizer has stepped, and freed it. Call '
                    'sublet.paged with keep_gradients=True to read gradients behind backward, or use step="after"'
                )
            if is_clearing:
                show_gradient(self)
            return None

        def write(self: Any, value: Any) -> None:
            stock.__set__(self, value)
            show_gradient(self)

        grad = property(read, write)
        _gone[kind] = types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(grad=grad))
    setattr(param, _IS_GONE, True)
    param.__class__ = _gone[kind]


def show_gradient(param: Any) -> None:
    """Undoes :func:`hide_gradient`."""
    if getattr(param, _IS_GONE, False):
        delattr(param, _IS_GONE)
        param.__class__ = type(param).__base__


def _refuse_write() -> None:
    raise UsageError(
        "paged: optimizer.state gives copies of paged state in host memory, and what is written to them is lost: change what "
        "optimizer.state_dict() gives, and call optimizer.load_state_dict() with it"
    )


class Copies(dict):  # type: ignore[type-arg]
    """State of a parameter, as copies that are read and not written."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        _refuse_write()

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        # What is saved may be loaded as weights alone.
        return (OrderedDict, (), None, None, iter(self.items()))


def read_only(tensor: Any, torch: Any) -> Any:
    """``tensor`` as one whose memory PyTorch's own functions do not write."""
    kind = torch.Tensor
    if kind not in _fixed:

        def called(cls: Any, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, kwargs = function.__name__, kwargs or {}
            is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
            first = args[0] if args and is_write else None
            written = list(first) if isinstance(first, (list, tuple)) else [first]
            if any(isinstance(each, cls) for each in (*written, kwargs.get("out"))):
                _refuse_write()
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **kwargs)
                places = [each.untyped_storage().data_ptr() for each in args if isinstance(each, cls)]

            def part(value: Any) -> Any:
                is_part = type(value) is kind and value.untyped_storage().data_ptr() in places
                return value.as_subclass(cls) if is_part else value

            if name == "as_subclass":
                return found
            return tuple(map(part, found)) if type(found) is tuple else part(found)

        def plain(self: Any) -> Any:
            return self.as_subclass(kind)

        body = {
            "__torch_function__": classmethod(called),
            "__reduce_ex__": lambda self, protocol: plain(self).__reduce_ex__(protocol),
            "__deepcopy__": lambda self, memo: copy.deepcopy(plain(self), memo),
        }
        _fixed[kind] = types.new_class("Copy", (kind,), {}, lambda space: space.update(body))
    return tensor.as_subclass(_fixed[kind])


class State(defaultdict):  # type: ignore[type-arg]
    """The state of a paged optimizer, for readers: its paged tensors are copies in host memory."""

    def __init__(self, owner: Any, state: dict[Any, dict[str, Any]]) -> None:
        super().__init__(dict, state)
        self._owner = owner

    def _seen(self, param: Any, reader: types.FrameType) -> Any:
        # PyTorch and Sublet make state dicts of it, which programs may change.
        return self._owner.readable(param, self.real(param), _is_own(reader))

    def __getitem__(self, param: Any) -> Any:
        return self._seen(param, sys._getframe(1))

    def get(self, param: Any, default: Any = None) -> Any:
        return self._seen(param, sys._getframe(1)) if param in self else default

    def values(self) -> Any:
        return [value for _, value in self._each(sys._getframe(1))]

    def items(self) -> Any:
        return self._each(sys._getframe(1))

    def _each(self, reader: types.FrameType) -> list[tuple[Any, Any]]:
        return [(param, self._seen(param, reader)) for param in self]

    def real(self, param: Any) -> dict[str, Any]:
        """The tensors themselves, to be touched only while their block is held."""
        found: dict[str, Any] = super().__getitem__(param)
        return found

    def __reduce__(self) -> Any:
        return (defaultdict, (dict,), None, None, iter(self.items()))
