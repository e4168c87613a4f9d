"""The object to preload, under the names by which frameworks look for it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sublet._errors import UsageError
from sublet.compat import alias_path

PRELOAD = "LD_PRELOAD"
#: What the name of the object has in it.
NAME = "torch_memory_saver"
STEM = "torch_memory_saver_hook_mode_preload"


def get_binary_path_from_package(stem: str) -> Path:
    """The path of the object that frameworks preload, named for the CUDA runtime of the process.

    Args:
        stem: ``"torch_memory_saver_hook_mode_preload"``; the one for the mode ``torch`` is the
        same.

    Raises:
        UsageError: the package was not installed from a wheel.
    """
    return binary_beside(Path(alias_path()) / NAME, stem)


def binary_beside(package: Path, stem: str) -> Path:
    """As :func:`get_binary_path_from_package`, of a package that lies at ``package``.

    The objects of one stem differ in their names alone, and the one without a suffix serves where
    there is none for this runtime.
    """
    stems = [stem] if stem == STEM else [stem, STEM]
    for folder in (package, package.parent):
        for name in (f"{each}{suffix}.abi3.so" for each in stems for suffix in _suffixes()):
            if (folder / name).is_file():
                return folder / name
    raise UsageError(
        f"{stem}: the package has no {STEM}.abi3.so: it was not installed from a wheel; build one "
        "with `cargo xtask wheel` and install that"
    )


def _suffixes() -> list[str]:
    """Returns the suffixes after the stem, first the one for the CUDA runtime that torch was built for."""
    version: Any = getattr(sys.modules.get("torch"), "version", None)
    cuda = getattr(version, "cuda", None)
    if cuda is None or getattr(version, "hip", None) is not None:
        return [""]
    return [f"_cu{str(cuda).partition('.')[0]}", ""]


def preloaded() -> list[str]:
    """The entries of ``LD_PRELOAD`` that are ``torch_memory_saver``'s, of whomever."""
    entries = os.environ.get(PRELOAD, "").replace(" ", ":").split(":")
    return [entry for entry in entries if NAME in entry]


def check() -> None:
    """Raises UsageError where another ``torch_memory_saver`` is preloaded, or ours twice."""
    entries = preloaded()
    others = [entry for entry in entries if not _is_ours(Path(entry))]
    if others:
        raise UsageError(
            f"torch_memory_saver: {others[0]} is preloaded, which is not Sublet's and takes the "
            f"same calls: preload {get_binary_path_from_package(STEM)} in its place"
        )
    if len(entries) > 1:
        raise UsageError(f"torch_memory_saver: preloaded more than once: {' '.join(entries)}")


def _is_ours(path: Path) -> bool:
    """Is it a filter of libsublet.so, wherever it was copied to?"""
    with contextlib.suppress(OSError):
        return b"libsublet.so" in path.read_bytes()
    return False


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes started inside the ``with`` block have the object preloaded, before what is there.

    ``LD_PRELOAD`` is restored afterwards. It is not changed where the object is in it already.
    """
    with preloading(str(get_binary_path_from_package(STEM))):
        yield


@contextlib.contextmanager
def preloading(path: str) -> Iterator[None]:
    """As :func:`configure_subprocess`, with the object at ``path``."""
    before = os.environ.get(PRELOAD)
    if preloaded():
        yield
        return
    with change_env(PRELOAD, f"{path}:{before}" if before else path):
        yield


@contextlib.contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """The environment variable ``key`` is ``value`` inside the ``with`` block, and as before after."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def is_xpu() -> bool:
    """Does the torch of this process, where it is imported, see a GPU of Intel's? Imports nothing."""
    xpu: Any = getattr(sys.modules.get("torch"), "xpu", None)
    return xpu is not None and bool(xpu.is_available())
