"""Has vLLM use Sublet's allocator, by the names under which its modules are imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from sublet import compat
from sublet._errors import UsageError
from sublet.compat._importing import forget, when_imported
from sublet.compat.vllm.allocator import CuMemAllocator

#: Where the allocator is. Recent trees have it in another place, and keep the old name.
MODULES = ("vllm.device_allocator.cumem", "vllm.backends.platform.device_allocator.cumem")


def install() -> None:
    """Has vLLM's modules find Sublet's ``CuMemAllocator``, now and when they are imported.

    Raises:
        UsageError: vLLM's own allocator has memory already.
    """
    for name in MODULES:
        forget(name, _bind)
        when_imported(name, _bind)


def install_if_asked() -> None:
    """:func:`install`, if ``SUBLET_COMPAT`` names ``vllm``: vLLM calls this when it loads plugins."""
    if "vllm" in compat.asked():
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
