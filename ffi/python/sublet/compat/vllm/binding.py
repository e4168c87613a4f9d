"""Has vLLM use Sublet's allocator and backend, by the names under which its modules are imported.

A vLLM whose modules lack what is needed, or ask for what Sublet's allocator lacks, keeps its own sleep, and a warning names what it is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn, Optional

from sublet import compat
from sublet._errors import UsageError
from sublet._library import attached, own_library
from sublet.compat._binding import lacking
from sublet.compat._importing import forget, is_half_imported, when_imported
from sublet.compat._tried import note_untried, version_of
from sublet.compat.vllm.allocator import CuMemAllocator

#: Where the allocator is. Development trees have had it in another place, behind the old name.
MODULES = ("vllm.device_allocator.cumem", "vllm.backends.platform.device_allocator.cumem")
#: Where backends are registered by name, and where one is looked up.
BACKENDS, WORKER = "vllm.device_allocator.sleep_mode_backend", "vllm.v1.worker.gpu_worker"
BACKEND = "sublet"
_PACKAGES = ("vllm",)
_ALLOCATOR = {
    "CuMemAllocator.get_instance": (),
    "CuMemAllocator.use_memory_pool": ("tag",),
    "CuMemAllocator.sleep": ("offload_tags",),
    "CuMemAllocator.wake_up": ("tags",),
    "CuMemAllocator.get_current_usage": (),
}
#: By module: the functions that are needed of it, with the parameters that are.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(MODULES, _ALLOCATOR),
    BACKENDS: {
        "SleepModeBackendFactory.register_backend": ("name", "module_path", "class_name"),
        "CuMemBackend.suspend": ("level",),
        "CuMemBackend.resume": ("tags",),
    },
    WORKER: {"Worker.__init__": ("vllm_config",)},
}


def install() -> None:
    """Has vLLM's modules find Sublet's ``CuMemAllocator``, now and when they are imported.

    Raises:
        UsageError: vLLM's own allocator has memory already; or the vLLM that is imported lacks a name that is needed. Its own
            allocator then stays.
    """
    refusal = _refusal_of_imported()
    if refusal is not None:
        raise UsageError(f"install: {refusal}")
    for name in MODULES:
        forget(name, _bind)
        when_imported(name, _bind)


def load_plugin() -> None:
    """The plugin function that vLLM calls in each of its processes; imports nothing of vLLM.

    Offers ``--sleep-mode-backend sublet``, and does :func:`install` if ``SUBLET_COMPAT`` names ``vllm``.
    """
    for name, action in ((BACKENDS, _offer), (WORKER, _follow)):
        forget(name, action)
        when_imported(name, action)
    if "vllm" in compat.asked():
        _install_if_possible()


def _install_if_possible() -> None:
    """vLLM goes on with its own sleep where ours does not fit."""
    refusal = _refusal_of_imported()
    if refusal is None:
        install()
    else:
        _warn(refusal)


def _refusal_of_imported() -> Optional[str]:
    """Why the allocator of the vLLM that is imported stays; ``None`` if it need not, or none is imported."""
    imported = (sys.modules.get(name) for name in MODULES)
    refusals = (_refusal(module) for module in imported if module is not None and not is_half_imported(module))
    return next((refusal for refusal in refusals if refusal is not None), None)


def _refusal(module: ModuleType) -> Optional[str]:
    """Returns, as a sentence, what prevents our replacement in this module."""
    if getattr(module, "CuMemAllocator", None) is CuMemAllocator:
        return None
    found = (lacking(module, name, parameters) for name, parameters in NEEDED[module.__name__].items())
    reason = next((each for each in found if each is not None), None)
    if reason is None and module.__name__ in MODULES:
        reason = _beyond_ours(module)
    if reason is None:
        return None
    version = version_of(_PACKAGES) or "of an unknown version"
    return f"vLLM {version} {reason}: its own sleep stays; coming-from-vllm-sleep.md in the folder of `sublet docs` names what was read"


def _beyond_ours(module: ModuleType) -> Optional[str]:
    """Returns, as text, what their allocator has and ours lacks: vLLM may call it."""
    theirs: Any = getattr(module, "CuMemAllocator")
    for name in vars(theirs):
        if name.startswith("_"):
            continue
        if not hasattr(CuMemAllocator, name):
            return f"has a {module.__name__}.CuMemAllocator.{name}, which Sublet's allocator lacks"
        if callable(getattr(theirs, name)):
            given = inspect.signature(getattr(theirs, name)).parameters
            known = inspect.signature(getattr(CuMemAllocator, name)).parameters
            beyond = next((parameter for parameter in given if parameter not in known), None)
            if beyond is not None:
                return f"has a {module.__name__}.CuMemAllocator.{name} with '{beyond}', which Sublet's allocator lacks"
    return None


def _warn(refusal: str) -> None:
    warnings.warn(f"sublet.compat: {refusal}", RuntimeWarning, stacklevel=3)


def _is_served(module: ModuleType) -> bool:
    """Has it what is needed? A process that is not under Sublet is told nothing."""
    refusal = _refusal(module)
    if refusal is not None and attached():
        _warn(refusal)
    return refusal is None


def _offer(module: ModuleType) -> None:
    if not _is_served(module):
        return
    # A second registration of a name is an error there.
    with contextlib.suppress(ValueError):
        module.SleepModeBackendFactory.register_backend(BACKEND, "sublet.compat.vllm.backend", "SubletBackend")


def _follow(module: ModuleType) -> None:
    """A worker that is to sleep by our backend gets our allocator: its first tensors come long before it asks for the backend."""
    if not _is_served(module):
        return
    worker: Any = getattr(module, "Worker")
    theirs = worker.__init__
    if hasattr(theirs, "_is_of_sublet"):
        return

    @functools.wraps(theirs)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        model = getattr(getattr(self, "vllm_config", None), "model_config", None)
        if getattr(model, "sleep_mode_backend", None) == BACKEND:
            _choose(model)

    setattr(made, "_is_of_sublet", True)
    worker.__init__ = made


def _choose(model: Any) -> None:
    """Raises NotAttachedError where the process is not under Sublet."""
    own_library()
    _install_if_possible()
    if getattr(model, "sleep_mode_offload_cudagraph", False):
        warnings.warn(
            "sublet: vLLM has graphs sleep with its backend 'cumem' alone: leave --sleep-mode-backend out and set "
            "SUBLET_COMPAT=vllm to have Sublet take them too",
            RuntimeWarning,
            stacklevel=3,
        )


def _bind(module: ModuleType) -> None:
    """Puts our names in the place of theirs, also where others have taken them from the module."""
    refusal = _refusal(module)
    if refusal is not None:
        # An import that was none of our caller's must not fail for our sake.
        _warn(refusal)
        return
    theirs: Any = getattr(module, "CuMemAllocator")
    if theirs is CuMemAllocator:
        return
    instance = getattr(theirs, "instance", None)
    if instance is not None and getattr(instance, "pointer_to_data", None):
        raise UsageError(
            f"install: {module.__name__} has memory already: call this before the model is loaded"
        )
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get("CuMemAllocator") is theirs:
            setattr(other, "CuMemAllocator", CuMemAllocator)
    setattr(module, "CuMemAllocator", CuMemAllocator)
    setattr(module, "cumem_available", True)
    for name in ("create_and_map", "unmap_and_release"):
        setattr(module, name, _one_by_one)
    note_untried("vLLM", _PACKAGES)


def _one_by_one(*_handle: object) -> NoReturn:
    raise UsageError(
        "memory of Sublet's CuMemAllocator is not mapped piece by piece: use its sleep, discard and "
        "wake_up"
    )
