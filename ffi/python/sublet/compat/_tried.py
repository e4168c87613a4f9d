"""Which versions of engines and frameworks were run under Sublet on a GPU: the one list of them, and what is said of others."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterable
from typing import Optional

#: By the name that people use: each version, and the GPU. Of all others only names and parameters were compared, or nothing.
TRIED: dict[str, dict[str, str]] = {"vLLM": {"0.24.0": "H200"}, "SGLang": {"0.5.17": "H200"}}

_noted: set[str] = set()


def version_of(packages: Iterable[str]) -> Optional[str]:
    """The version of the first of the packages that is here, or ``None``; imports nothing."""
    for package in packages:
        told = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(told, str):
            return told
        try:
            return importlib.metadata.version(package.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def note_untried(name: str, packages: Iterable[str]) -> None:
    """Warns, once a process, of a version that is not in the list. It is served all the same."""
    version = version_of(packages) or "of an unknown version"
    tried = TRIED.get(name, {})
    # What follows the plus sign names a build.
    if version.partition("+")[0] in tried or name in _noted:
        return
    _noted.add(name)
    known = ", ".join(f"{each} ({gpu})" for each, gpu in tried.items())
    were = f"tried was {known}" if known else "nor was another version"
    warnings.warn(
        f"sublet.compat: {name} {version} is served, but was not tried on a GPU; {were}", RuntimeWarning, stacklevel=2
    )
