"""Starts one process per GPU, as torchrun does, with the environment that `env://` wants, and waits for them.

`python3 launch.py N PROGRAM [ARGS...]`. The first process that fails ends the others, by id, unless
LAUNCH_KEEP_SURVIVORS=1. It takes about 10 ms, so times of jobs are not times of a launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time


def die_with_parent() -> None:
    """Asks the kernel to end this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def main() -> int:
    """Starts, waits, answers with the first failing exit code."""
    if len(sys.argv) < 3 or "--dry-run" in sys.argv:
        print("dry run of launch")
        return 0
    die_with_parent()
    world, program = int(sys.argv[1]), sys.argv[2:]
    ranks = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        ranks.append(subprocess.Popen([sys.executable, *program], env=env, stdin=subprocess.DEVNULL))
    keep = os.environ.get("LAUNCH_KEEP_SURVIVORS") == "1"
    failed, failed_at = 0, 0.0
    while any(child.poll() is None for child in ranks):
        codes = [child.returncode for child in ranks if child.returncode]
        if codes and not failed:
            failed, failed_at = codes[0], time.monotonic()
        if failed and not keep and time.monotonic() - failed_at > 5:
            for child in ranks:
                if child.poll() is None:
                    child.kill()
        time.sleep(0.02)
    codes = [child.returncode for child in ranks if child.returncode]
    return failed or (codes[0] if codes else 0)


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
