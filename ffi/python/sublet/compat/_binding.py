"""Putting functions of ours in the place of a framework's, all of a module's or none, and taking them back."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Callable, Optional

from sublet._errors import UsageError
from sublet._library import attached
from sublet.compat._importing import forget, is_half_imported, when_imported
from sublet.compat._tried import note_untried, version_of

_log = logging.getLogger("sublet")
_MISSING = object()


@dataclass(frozen=True)
class Target:
    """One function of theirs, or one method, that ours stands in for.

    Attributes:
        name: as the module has it, such as ``"offload"`` or ``"Engine.offload"``.
        ours: given theirs, makes ours.
        parameters: what calls of ours give it or ask of it; a function without one is another function.
        everywhere: other modules that have taken the function by this name get ours too.
        optional: versions of theirs without it are served all the same: they have nothing to stand in for.
    """

    name: str
    ours: Callable[[Callable[..., Any]], Callable[..., Any]]
    parameters: tuple[str, ...] = ()
    everywhere: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Installed:
    """What an ``install()`` did.

    Attributes:
        framework: whose functions.
        version: the framework's, where it is installed.
        replaced: what Sublet serves from now on, such as ``"areal.engine.fsdp_engine.FSDPEngine.offload"``.
        awaited: modules that are not imported yet; theirs are replaced when they are.
        refused: why modules were left as they are; not empty only after an import that followed.
    """

    framework: str
    version: Optional[str] = None
    replaced: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass
class _Bound:
    """The replacements in one module."""

    module: ModuleType
    #: Holder, name in it, theirs (or ``_MISSING``, where a class inherits it), ours.
    places: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    #: Names that others may have taken: name, theirs, ours.
    shared: list[tuple[str, Any, Any]] = field(default_factory=list)
    names: tuple[str, ...] = ()


class Framework:
    """A framework whose functions Sublet can serve. One object each; methods are safe from any thread.

    Args:
        name: what people call it.
        packages: the packages, of which a process has one or more.
        modules: for each module, the functions of it that are replaced together.
        bring_back: called before theirs are put back, so that they find all memory resident.
    """

    def __init__(
        self,
        name: str,
        packages: tuple[str, ...],
        modules: dict[str, tuple[Target, ...]],
        bring_back: Callable[[], None],
    ) -> None:
        self.name, self.packages, self.modules = name, packages, modules
        self._bring_back = bring_back
        self._lock = threading.RLock()
        self._is_installed = False
        self._bound: dict[str, _Bound] = {}
        self._refused: dict[str, str] = {}

    def install(self, *, stacklevel: int = 2) -> Installed:
        """Has Sublet serve what the module says, instead of the framework's own functions.

        Call it in each process of the trainer, before or after the framework is imported; or name the
        framework in ``SUBLET_COMPAT``. In a process that is not under Sublet it warns and does nothing. A
        second call changes nothing.

        Args:
            stacklevel: whose line a warning names, as in ``warnings.warn``.

        Raises:
            UsageError: the framework that is imported lacks a name or a parameter that is needed: none of
                its functions is replaced.
        """
        if not attached():
            warnings.warn(
                f"sublet.compat: this process is not under Sublet, and {self.name} does what it does "
                "without: start it with `sublet run --tenant NAME -- ...`",
                RuntimeWarning,
                stacklevel=stacklevel,
            )
            return Installed(self.name, self.version())
        with self._lock:
            if not self._is_installed:
                self._refuse_lacking()
                self._is_installed = True
                for name in self.modules:
                    when_imported(name, self._act)
            return self.standing()

    def uninstall(self) -> None:
        """Brings the memory back that has left, and puts the framework's own functions back. Does nothing where nothing was installed."""
        with self._lock:
            if not self._is_installed:
                return
            self._bring_back()
            for name in self.modules:
                forget(name, self._act)
            for bound in self._bound.values():
                _unbind(bound)
            self._bound.clear()
            self._refused.clear()
            self._is_installed = False

    def standing(self) -> Installed:
        """Returns the present replacements."""
        with self._lock:
            if not self._is_installed:
                return Installed(self.name, self.version())
            replaced = tuple(name for bound in self._bound.values() for name in bound.names)
            done = {*self._bound, *self._refused}
            awaited = tuple(name for name in self.modules if name not in done)
            refused = tuple(self._refused.values())
            return Installed(self.name, self.version(), replaced, awaited, refused)

    def version(self) -> Optional[str]:
        """The version of the package that is here, or ``None``; imports nothing."""
        return version_of(self.packages)

    def _refuse_lacking(self) -> None:
        for name, targets in self.modules.items():
            module = sys.modules.get(name)
            if module is None:
                continue
            if is_half_imported(module):
                raise UsageError(f"install: {name} is being imported: call this before, or after it")
            lacking = _lacking(module, targets)
            if lacking is not None:
                raise UsageError(f"install: {self._refusal(lacking)}")

    def _refusal(self, lacking: str) -> str:
        return (
            f"{self.name} {self.version() or 'of an unknown version'} {lacking}: nothing of that module "
            "is replaced; frameworks.md in the folder of `sublet docs` names what was read"
        )

    def _act(self, module: ModuleType) -> None:
        with self._lock:
            name, targets = module.__name__, self.modules[module.__name__]
            before = self._bound.get(name)
            if before is not None and before.module is module:
                return
            lacking = _lacking(module, targets)
            if lacking is not None:
                # An import that was none of our caller's must not fail for our sake.
                self._refused[name] = self._refusal(lacking)
                warnings.warn(f"sublet.compat: {self._refused[name]}", RuntimeWarning, stacklevel=2)
                return
            self._refused.pop(name, None)
            self._bound[name] = _bind(module, targets)
            _log.info("%s: served by Sublet: %s", self.name, ", ".join(self._bound[name].names))
            note_untried(self.name, self.packages)


def _found(module: ModuleType, name: str) -> tuple[Any, str]:
    """The module or class that has ``name``, and its name in it."""
    holder, _, last = name.rpartition(".")
    return (getattr(module, holder, None) if holder else module), last


def _lacking(module: ModuleType, targets: Iterable[Target]) -> Optional[str]:
    """Returns, as text, the first need that the module lacks; ``None`` if it lacks nothing."""
    for target in targets:
        if target.optional and _theirs(module, target.name) is None:
            continue
        found = lacking(module, target.name, target.parameters)
        if found is not None:
            return found
    return None


def lacking(module: ModuleType, name: str, parameters: Sequence[str]) -> Optional[str]:
    """Returns what one function lacks in the module: the function itself, or a parameter. ``None`` if nothing."""
    theirs = _theirs(module, name)
    if not callable(theirs):
        return f"has no {module.__name__}.{name}"
    try:
        known = inspect.signature(theirs).parameters
    except (TypeError, ValueError):
        return None
    for parameter in parameters:
        if parameter not in known:
            return f"has a {module.__name__}.{name} without the parameter '{parameter}'"
    return None


def _theirs(module: ModuleType, name: str) -> Any:
    """Returns their object of this name; ``None`` if there is none."""
    holder, last = _found(module, name)
    return getattr(holder, last, None)


def _bind(module: ModuleType, targets: Iterable[Target]) -> _Bound:
    bound = _Bound(module)
    names = []
    for target in targets:
        holder, last = _found(module, target.name)
        theirs = _theirs(module, target.name)
        if theirs is None:
            # It is an optional one: `_lacking` has seen all others.
            continue
        ours = functools.wraps(theirs)(target.ours(theirs))
        own = vars(holder).get(last, _MISSING)
        setattr(holder, last, ours)
        bound.places.append((holder, last, own, ours))
        if target.everywhere:
            bound.shared.append((last, theirs, ours))
            _exchange(last, theirs, ours)
        names.append(f"{module.__name__}.{target.name}")
    bound.names = tuple(names)
    return bound


def _unbind(bound: _Bound) -> None:
    for name, theirs, ours in bound.shared:
        _exchange(name, ours, theirs)
    for holder, name, own, ours in bound.places:
        # Code that has replaced ours since keeps what it has put there.
        if vars(holder).get(name) is not ours:
            continue
        if own is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, own)


def _exchange(name: str, before: Any, after: Any) -> None:
    """Modules that have ``before`` by this name have ``after``."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is before:
            setattr(module, name, after)
