"""Is there room for what a run writes? Asked before anything is started."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from rl.problem import Problem


def check(needed: Mapping[Path, int]) -> None:
    """Problem where a folder has fewer free bytes than `needed` says, or is not there."""
    for folder, needed_bytes in needed.items():
        try:
            free_bytes = shutil.disk_usage(folder).free
        except OSError as error:
            raise Problem(f"{folder} cannot be used: {error.strerror}; name another by --out or --shm") from error
        if free_bytes < needed_bytes:
            raise Problem(
                f"{folder} has {mib(free_bytes)} free, and this run needs {mib(needed_bytes)} there: make room, or name "
                "another folder by --out (results) or --shm (memory that is shared; in a container, --shm-size)"
            )


def mib(size_bytes: int) -> str:
    """Bytes for a reader."""
    return f"{size_bytes / (1 << 30):.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / (1 << 20):.0f} MiB"
