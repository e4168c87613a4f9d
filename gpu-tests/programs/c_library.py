"""C files of this folder as libraries, compiled at the start."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from steps import not_run, program_failed

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")


def built(source: str, library: Path) -> ctypes.CDLL:
    """The C file `source` of this folder as `library`, loaded. The program does not run where there is no compiler."""
    library = library.resolve()
    library.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", *FLAGS, "-o", str(library), str(Path(__file__).with_name(source)), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        not_run("no C compiler here")
        raise
    if done.returncode != 0:
        program_failed(f"cc: {done.stderr[-800:]}")
    return ctypes.CDLL(str(library))
