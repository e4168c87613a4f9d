"""Drop-ins: the interfaces of other projects, answered by Sublet.

``sublet.compat.torch_memory_saver`` and ``sublet.compat.vllm`` can be used by these names. To have
programs find them that import the originals, see :func:`install` and :func:`alias_path`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from sublet._errors import UsageError

__all__ = ["alias_path", "install"]

_ALIAS = Path(__file__).resolve().parent.parent / "alias"


def alias_path() -> str:
    """The folder from which ``import torch_memory_saver`` finds Sublet's, for ``PYTHONPATH``.

    Frameworks look beside that package for an object to preload; those are there too, each a few
    KiB that lead the loader to ``libsublet.so``.
    """
    return str(_ALIAS)


def install(name: str) -> None:
    """Has this process find Sublet's drop-in where it imports ``name``.

    Processes that it starts by ``multiprocessing`` import it too; for others, such as Ray's
    workers, set ``PYTHONPATH`` to :func:`alias_path`, or ``SUBLET_VLLM=1``.

    Args:
        name: ``"torch_memory_saver"`` or ``"vllm"``.

    Raises:
        UsageError: the original is in use already, or there is no drop-in of that name.
    """
    if name == "vllm":
        importlib.import_module("sublet.compat.vllm").install()
        return
    if name != "torch_memory_saver":
        raise UsageError(
            f"install: there is no drop-in for {name!r}: use 'torch_memory_saver' or 'vllm'"
        )
    loaded = sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and (origin is None or not Path(origin).is_relative_to(_ALIAS)):
        raise UsageError(f"install: {name} was imported from {origin} before: call this earlier")
    if alias_path() not in sys.path:
        sys.path.insert(0, alias_path())
    importlib.import_module(name)
