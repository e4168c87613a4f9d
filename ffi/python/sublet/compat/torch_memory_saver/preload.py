"""The object to preload, under the names by which frameworks look for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sublet._errors import UsageError
from sublet.compat import alias_path

PRELOAD = "LD_PRELOAD"
#: What the name of the object has in it.
NAME = "torch_memory_saver"
STEM = "torch_memory_saver_hook_mode_preload"


def get_binary_path_from_package(stem: str) -> Path:
    """The path of the object that frameworks preload, whatever CUDA runtime the process has.

    Args:
        stem: ``"torch_memory_saver_hook_mode_preload"``; the one for the mode ``torch`` is the
        same.

    Raises:
        UsageError: the package was not installed from a wheel.
    """
    path = Path(alias_path()) / f"{STEM}.abi3.so"
    if not path.is_file():
        raise UsageError(
            f"{stem}: the package has no {path.name}: it was not installed from a wheel; build one "
            "with `cargo xtask wheel` and install that"
        )
    return path


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
    before = os.environ.get(PRELOAD)
    if not preloaded():
        path = str(get_binary_path_from_package(STEM))
        os.environ[PRELOAD] = f"{path}:{before}" if before else path
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PRELOAD, None)
        else:
            os.environ[PRELOAD] = before
