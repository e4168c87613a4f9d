"""Acting on modules of others when they are imported, now or later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Callable, Optional

#: What is done with a module once it has run.
Action = Callable[[ModuleType], None]

_lock = threading.Lock()
_wanted: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Has ``action`` called with the module ``name`` each time that it has run, and now if it has.

    What ``action`` raises comes out of the import. Importing goes on as everybody else wants it.
    """
    with _lock:
        _wanted.setdefault(name, []).append(action)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    if module is not None and not is_half_imported(module):
        action(module)


def forget(name: str, action: Action) -> None:
    """Undoes :func:`when_imported`."""
    with _lock:
        actions = _wanted.get(name, [])
        if action in actions:
            actions.remove(action)
        if not actions:
            _wanted.pop(name, None)


def is_half_imported(module: ModuleType) -> bool:
    """Is the module in the middle of its own code?"""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as everybody does, and acts on those that are wanted once they have run."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname not in _wanted:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: Optional[importlib.machinery.ModuleSpec] = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs a module as its own loader does, then acts on it; in all else it is that loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        module: Optional[ModuleType] = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for action in list(_wanted.get(module.__name__, ())):
            action(module)
