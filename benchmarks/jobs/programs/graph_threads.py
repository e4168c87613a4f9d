"""Graphs that many threads make, clone, update, launch and destroy at once, on one GPU: graph_threads.c, by driver calls.

    python3 programs/graph_threads.py --steps 500

A step is one of each thread; every word is checked there. The C file is compiled at the start.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from rawcuda import Driver
from steps import Steps, not_run, program_failed

THREADS, WORDS = 16, 1 << 16
SOURCE = Path(__file__).with_name("graph_threads.c")


def built(folder: Path) -> ctypes.CDLL:
    """The C file as a library."""
    library = folder.resolve() / "graph_threads.so"
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command += ["-o", str(library), str(SOURCE), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        not_run("no C compiler here")
        raise
    if done.returncode != 0:
        program_failed(f"cc: {done.stderr[-800:]}")
    found = ctypes.CDLL(str(library))
    found.graph_threads_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t]
    found.graph_threads_step.argtypes = [ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)]
    found.graph_threads_open.restype = found.graph_threads_step.restype = ctypes.c_char_p
    return found


def main() -> None:
    steps = Steps(__doc__)
    library, driver = built(steps.args.out), Driver()
    driver.use(0)
    words = min(WORDS, steps.args.width * 128)
    failed = library.graph_threads_open(driver.contexts[0], driver.kernel(0), THREADS, words)
    if failed:
        program_failed(failed.decode())

    def step(number: int) -> str:
        value = ctypes.c_uint64()
        wrong = library.graph_threads_step(number, ctypes.byref(value))
        if wrong:
            program_failed(wrong.decode())
        return f"{value.value:x}"

    steps.run(step, lambda: f"threads {THREADS}")


if __name__ == "__main__":
    main()
