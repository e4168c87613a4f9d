"""Has vLLM use Sublet's allocator and backend, by the names under which its modules are imported."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn

from sublet import compat
from sublet._errors import UsageError
from sublet._library import own_library
from sublet.compat._importing import forget, when_imported
from sublet.compat.vllm.allocator import CuMemAllocator

#: Where the allocator is. Development trees have had it in another place, behind the old name.
MODULES = ("vllm.device_allocator.cumem", "vllm.backends.platform.device_allocator.cumem")
#: Where backends are registered by name, and where one is looked up.
BACKENDS, WORKER = "vllm.device_allocator.sleep_mode_backend", "vllm.v1.worker.gpu_worker"
BACKEND = "sublet"


def install() -> None:
    """Has vLLM's modules find Sublet's ``CuMemAllocator``, now and when they are imported.

    Raises:
        UsageError: vLLM's own allocator has memory already.
    """
    for name in MODULES:
        forget(name, _bind)
        when_imported(name, _bind)


def load_plugin() -> None:
    """What vLLM calls in each of its processes, as one of its plugins; imports nothing of vLLM.

    Offers ``--sleep-mode-backend sublet``, and does :func:`install` if ``SUBLET_COMPAT`` names ``vllm``.
    """
    for name, action in ((BACKENDS, _offer), (WORKER, _follow)):
        forget(name, action)
        when_imported(name, action)
    if "vllm" in compat.asked():
        install()


def _offer(module: ModuleType) -> None:
    # A second registration of a name is an error there.
    with contextlib.suppress(ValueError):
        module.SleepModeBackendFactory.register_backend(BACKEND, "sublet.compat.vllm.backend", "SubletBackend")


def _follow(module: ModuleType) -> None:
    """A worker that is to sleep by our backend gets our allocator: its first tensors come long before it asks for the backend."""
    worker: Any = getattr(module, "Worker", None)
    theirs = getattr(worker, "__init__", None)
    if theirs is None or hasattr(theirs, "_is_of_sublet"):
        return

    @functools.wraps(theirs)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        model = self.vllm_config.model_config
        if getattr(model, "sleep_mode_backend", None) == BACKEND:
            _choose(model)

    setattr(made, "_is_of_sublet", True)
    worker.__init__ = made


def _choose(model: Any) -> None:
    """Raises NotAttachedError where the process is not under Sublet."""
    own_library()
    install()
    if getattr(model, "sleep_mode_offload_cudagraph", False):
        warnings.warn(
            "sublet: vLLM has graphs sleep with its backend 'cumem' alone: leave --sleep-mode-backend out and set "
            "SUBLET_COMPAT=vllm to have Sublet take them too",
            RuntimeWarning,
            stacklevel=3,
        )


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
