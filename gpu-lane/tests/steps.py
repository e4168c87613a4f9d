"""A rank of the runner's tests: steps that answer, fail, hang and die, and a process of a tenant without torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import common
import rank
import runner
from driver import Driver


def who() -> dict[str, int]:
    return {"rank": int(os.environ.get("RANK", "0")), "world": int(os.environ.get("WORLD_SIZE", "1"))}


def fail(why: str) -> NoReturn:
    raise common.JobError(why)


def hang_in_here(entered: str, release: str) -> str:
    """Answers when the file `release` is there, and makes the file `entered` first."""
    Path(entered).touch()
    while not Path(release).exists():
        time.sleep(0.02)
    return "late"


def die(words: str) -> NoReturn:
    """Ends the process in the middle of a step."""
    print(words, flush=True)
    os._exit(7)


class Memory:
    """Device memory of this process, and its tenant."""

    def take(self, size_bytes: int) -> bool:
        """Allocates, with bytes that a pause has to copy; whether this process is under Sublet."""
        self.gpus = Driver()
        self.gpus.hold(0, size_bytes)
        for gpu, block in self.gpus.held:
            self.gpus.use(gpu)
            self.gpus.fill(block.value, 0x5AA5, size_bytes // 4)
        self.gpus.synchronize()
        self.tenancy = rank.Tenancy()
        return self.tenancy.present

    def take_in_region(self, size_bytes: int) -> None:
        """Allocates in a region that is discarded."""
        with self.tenancy.discarded("scratch"):
            self.gpus.hold(0, size_bytes)

    def act(self, how: str, action: str) -> dict[str, float]:
        """Pauses or resumes, `together` or the `tenant`."""
        return getattr(self.tenancy, how)(action)

    def stats(self, print_too: bool = False) -> Any:
        """This process's numbers."""
        return self.tenancy.stats(print_too)


def main() -> None:
    if "--cannot-start" in sys.argv:
        raise SystemExit("no GPU on this machine")
    link = runner.connect()
    memory = Memory()

    def ask_again() -> Any:
        """Answers, waits for a message, and answers with it."""
        link.reply(value="half way")
        return link.receive(60)["word"]

    steps = {
        "who": who,
        "fail": fail,
        "hang": hang_in_here,
        "die": die,
        "ask_again": ask_again,
        "take": memory.take,
        "take_in_region": memory.take_in_region,
        "act": memory.act,
        "stats": memory.stats,
        "exit": lambda: print("left in order", flush=True),
    }
    runner.serve(link, steps)


if __name__ == "__main__":
    main()
