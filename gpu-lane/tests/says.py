"""A child of the runner's tests: says what it is told to, and ends as it is told to."""

from __future__ import annotations

import sys
import time

import runner


def sleep_in_here() -> None:
    """Longer than anyone waits."""
    runner.fact("entered", True)
    time.sleep(300)


def main() -> None:
    runner.begin(200)
    runner.row("one is one", True)
    runner.row("one is two", False, "it is not")
    runner.sample("seconds", 1.5)
    runner.fact("versions", {"torch": "none"})
    runner.fact("ready", [1, 2])
    print("last words", flush=True)
    if "hang" in sys.argv:
        sleep_in_here()
    sys.exit(5 if "fail" in sys.argv else 0)


if __name__ == "__main__":
    main()
