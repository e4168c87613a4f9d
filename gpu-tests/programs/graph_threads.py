"""Graphs that many threads make, clone, update, launch and destroy simultaneously, on one GPU: graph_threads.c, by driver calls.

    python3 programs/graph_threads.py --steps 500

A step is one of each thread; every word is checked there. The C file is compiled at the start.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from c_library import built
from rawcuda import Driver
from steps import Steps, program_failed

THREADS, WORDS = 16, 1 << 16


def opened(folder: Path) -> ctypes.CDLL:
    """The C file as a library."""
    found = built("graph_threads.c", folder / "graph_threads.so")
    found.graph_threads_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t]
    found.graph_threads_step.argtypes = [ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)]
    found.graph_threads_open.restype = found.graph_threads_step.restype = ctypes.c_char_p
    return found


def main() -> None:
    steps = Steps(__doc__)
    library, driver = opened(steps.args.out), Driver()
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
