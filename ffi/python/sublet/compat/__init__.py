"""Drop-ins: the interfaces of other projects, answered by Sublet.

``sublet.compat.torch_memory_saver`` and ``sublet.compat.vllm`` can be used by these names. To have
programs find them that import the originals, see :func:`install` and :func:`alias_path`.

``sublet.compat.slime``, ``verl``, ``openrlhf``, ``nemo_rl``, ``areal`` and ``vllm`` each have an ``install()``, which
puts functions of Sublet's in the place of some of the framework's.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

from sublet._errors import Error, UsageError

__all__ = ["FRAMEWORKS", "VARIABLE", "alias_path", "install", "install_if_asked"]

#: Frameworks that have a module here.
FRAMEWORKS = ("areal", "nemo_rl", "openrlhf", "slime", "verl", "vllm")
#: Names of them, separated by commas: a process that imports torch then installs these.
VARIABLE = "SUBLET_COMPAT"

_ALIAS = Path(__file__).resolve().parent.parent / "alias"


def alias_path() -> str:
    """The folder from which ``import torch_memory_saver`` finds Sublet's, for ``PYTHONPATH``.

    Frameworks look next to that package for an object to preload; those are there too, each a few
    KiB that lead the loader to ``libsublet.so``.
    """
    return str(_ALIAS)


def install(name: str) -> None:
    """Has this process find Sublet's drop-in where it imports ``name``.

    Processes that it starts by ``multiprocessing`` import it too; for others, such as Ray's
    workers, set ``PYTHONPATH`` to :func:`alias_path`, or ``SUBLET_COMPAT=vllm``.

    Args:
        name: ``"torch_memory_saver"``, or one of :data:`FRAMEWORKS`.

    Raises:
        UsageError: the original is in use already, or there is no drop-in of that name.
    """
    if name in FRAMEWORKS:
        importlib.import_module(f"sublet.compat.{name}").install()
        return
    if name != "torch_memory_saver":
        known = ", ".join(repr(each) for each in ("torch_memory_saver", *FRAMEWORKS))
        raise UsageError(f"install: there is no drop-in for {name!r}: use one of {known}")
    loaded = sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and (origin is None or not Path(origin).is_relative_to(_ALIAS)):
        raise UsageError(f"install: {name} was imported from {origin} before: call this earlier")
    if alias_path() not in sys.path:
        sys.path.insert(0, alias_path())
    importlib.import_module(name)


def asked() -> list[str]:
    """Returns the names in ``SUBLET_COMPAT``."""
    return os.environ.get(VARIABLE, "").replace(",", " ").split()


def install_if_asked() -> None:
    """Installs what ``SUBLET_COMPAT`` names; what cannot be is warned of.

    ``import torch`` calls this, as it calls whatever packages offer for ``torch.backends``. It imports
    nothing and returns immediately if ``SUBLET_COMPAT`` is not set.
    """
    for name in asked():
        try:
            if name not in FRAMEWORKS:
                raise UsageError(f"there is no {name!r}: use {', '.join(FRAMEWORKS)}")
            install(name)
        except Error as error:
            warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=2)
