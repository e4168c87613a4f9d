"""Processes on one GPU that make, share, use and end NCCL's memory by its own driver calls, without NCCL: replay.c.

    python3 launch.py 2 programs/replay.py --steps 500

COMMUNICATORS (20) are divided among the pairs of processes. A step ends one of them and makes it again, writes a quarter
of them, and compares every word of all, with every handle and address. `--width` 512 is the size that was recorded; less
has fewer channels. REPLAY_FAULT makes rank 0 do something that must be noticed: `byte`, `address` or `left out`.
"""

from __future__ import annotations

import ctypes
import os

from c_library import built
from steps import Steps, program_failed

WIDTH_WHOLE = 512
#: A step makes a communicator, so it is slow.
TIMED_STEPS, UNTIMED_STEPS = 24, 4


def main() -> None:
    steps = Steps(__doc__, timed=(TIMED_STEPS, UNTIMED_STEPS))
    # By this name Sublet takes it for NCCL.
    library = built("replay.c", steps.args.out / f"rank{steps.rank}" / "libnccl.so.2")
    for name in ("replay_open", "replay_step", "replay_close"):
        getattr(library, name).restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> None:
        failed = getattr(library, name)(*arguments)
        if failed:
            program_failed(failed.decode())

    communicators = int(os.environ.get("COMMUNICATORS", "20"))
    parts = max(1, WIDTH_WHOLE // steps.args.width)
    call("replay_open", steps.rank, steps.world, communicators, parts, str(steps.args.out).encode())

    def step(number: int) -> str:
        words = ctypes.c_uint64()
        call("replay_step", number, ctypes.byref(words))
        return str(words.value)

    def finish() -> str:
        call("replay_close")
        return f"communicators {communicators}"

    steps.run(step, finish)


if __name__ == "__main__":
    main()
