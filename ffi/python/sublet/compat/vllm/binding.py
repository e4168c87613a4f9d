"""Has vLLM use Sublet's allocator, by the names under which its modules are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn, Optional

from sublet._errors import UsageError
from sublet.compat.vllm.allocator import CuMemAllocator

#: Where the allocator is. Recent trees have it in another place, and keep the old name.
MODULES = ("vllm.device_allocator.cumem", "vllm.backends.platform.device_allocator.cumem")
#: Set to 1, has vLLM's own loading of plugins install this in each of its processes.
VARIABLE = "SUBLET_VLLM"


def install() -> None:
    """Has vLLM's modules find Sublet's ``CuMemAllocator``, now and when they are imported.

    Raises:
        UsageError: vLLM's own allocator has memory already.
    """
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _bind(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install_if_asked() -> None:
    """:func:`install`, where ``SUBLET_VLLM`` is 1: vLLM calls this when it loads plugins."""
    if os.environ.get(VARIABLE) == "1":
        install()


def _bind(module: ModuleType) -> None:
    """Puts our names in the place of theirs, also where others have taken them from the module."""
    theirs: Any = getattr(module, "CuMemAllocator", None)
    if theirs is CuMemAllocator:
        return
    instance = getattr(theirs, "instance", None)
    if instance is not None and getattr(instance, "pointer_to_data", None):
        raise UsageError(
            f"install: {module.__name__} has memory already: call this before the model is loaded"
        )
    for other in list(sys.modules.values()):
        if theirs is not None and getattr(other, "__dict__", {}).get("CuMemAllocator") is theirs:
            setattr(other, "CuMemAllocator", CuMemAllocator)
    setattr(module, "CuMemAllocator", CuMemAllocator)
    setattr(module, "cumem_available", True)
    for name in ("create_and_map", "unmap_and_release"):
        setattr(module, name, _one_by_one)


def _one_by_one(*_handle: object) -> NoReturn:
    raise UsageError(
        "memory of Sublet's CuMemAllocator is not mapped piece by piece: use its sleep, discard and "
        "wake_up"
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as everybody does, and binds our names once they have run."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname not in MODULES:
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
    """Runs a module as its own loader does, then binds our names in it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        module: Optional[ModuleType] = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _bind(module)
