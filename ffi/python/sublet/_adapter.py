"""Questions of the package to PyTorch, in programs that use PyTorch."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Optional

from sublet._native import Library


def torch_adapter() -> Optional[ModuleType]:
    """``sublet._torch`` when PyTorch is loaded and has a device; PyTorch is never imported from here."""
    torch: Any = sys.modules.get("torch")
    # While it is being imported, it lacks most of what it will have.
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return None
    return importlib.import_module("sublet._torch")


def reserved_bytes() -> dict[int, int]:
    """Bytes that PyTorch has from the driver, by device. A PyTorch that has used no device is not asked."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return {}
    adapter = torch_adapter()
    return {} if adapter is None else adapter.reserved_bytes()


#: Memory that a program gives up with a pause that it makes, in addition to what PyTorch has unused.
_given_up: list[tuple[int, int]] = []


@contextlib.contextmanager
def giving_up(library: Library, blocks: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Pauses inside do not save these blocks, each an address and bytes."""
    answer_pauses(library)
    blocks = list(blocks)
    _given_up.extend(blocks)
    try:
        yield
    finally:
        for block in blocks:
            _given_up.remove(block)


def _unused_blocks() -> list[tuple[int, int]]:
    # One that has used no device has nothing, and is not made to.
    torch: Any = sys.modules.get("torch")
    is_used = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
    adapter = torch_adapter() if is_used else None
    found = [] if adapter is None else adapter.unused_blocks(None)
    return [*found, *_given_up]


class _Questions:
    """Pauses ask this process, once PyTorch is in it, which memory need not be saved."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._are_answered = False

    def answer_from_now_on(self, library: Library) -> None:
        with self._lock:
            if not self._are_answered:
                library.set_unused_source(_unused_blocks)
                # A pause that comes while the interpreter ends asks nobody.
                atexit.register(library.set_unused_source, None)
                self._are_answered = True


_questions = _Questions()


def answer_pauses(library: Library) -> None:
    """Makes each later pause, also one from outside, skip unused memory that PyTorch has cached."""
    if torch_adapter() is not None:
        _questions.answer_from_now_on(library)


def answer_later_pauses(library: Library) -> None:
    """The same, for a PyTorch that may not have looked for devices yet: a look keeps its forked children from using devices."""
    _questions.answer_from_now_on(library)
