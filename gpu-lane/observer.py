"""How much device memory is free, as a plain process outside any tenant sees it?

A small program over libcuda alone (no torch, nothing preloaded). It keeps a context on every GPU, so its own cost
is constant (some 500 MiB a GPU), tells free bytes per GPU, and on `take` plays the next tenant: it first fills what was
free anyhow (the ballast), then allocates, writes and reads back the given bytes, which only fit if the paused tenant's
memory really came back. `hold` allocates until `drop`.

Bound: writing at about 4 TB/s takes 2.5 ms for 10 GB; cuMemGetInfo takes some 10 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runner
from common import JobError, Result
from driver import Driver
from runner import Ranks

#: Longer than any job.
LIFE_S = 1200.0


def main() -> None:
    link = runner.connect()
    driver = Driver()
    steps: dict[str, Callable[..., Any]] = {
        "info": lambda: driver.info,
        "free": driver.free,
        "take": lambda entries: [driver.take(*entry) for entry in entries],
        "hold": lambda entries: [driver.hold(*entry) for entry in entries],
        "drop": driver.drop,
    }
    runner.serve(link, steps)


class Observer(Ranks):
    """The job's side: starts the program, outside any tenant or as one, and asks it."""

    def __init__(self, work: Path, tenant: str | None = None) -> None:
        super().__init__(work, "observer", 1, [__file__], tenant=tenant, launcher="alone", life_s=LIFE_S)
        self.info: dict[str, Any] = self.ask("info", 90)

    def ask(self, op: str, timeout_s: float = 60, **arguments: Any) -> Any:
        return self.call(op, timeout_s, **arguments)[0]

    def free(self) -> list[int]:
        """Free bytes per GPU, now."""
        return self.ask("free")

    def settled_free(self, timeout_s: float = 3.0) -> list[int]:
        """Free bytes per GPU once three readings in a row agree (processes that end free their memory late)."""
        end, last, same = time.monotonic() + timeout_s, self.free(), 0
        while same < 3 and time.monotonic() < end:
            time.sleep(0.1)
            now = self.free()
            same = same + 1 if now == last else 0
            last = now
        return last

    def take(self, entries: list[list[int]]) -> list[dict[str, Any]]:
        """Per entry `[gpu, ballast bytes, bytes]`: see Driver.take."""
        return self.ask("take", 110, entries=entries)

    def hold(self, entries: list[list[int]]) -> list[int]:
        """Per entry `[gpu, bytes]`: see Driver.hold."""
        return self.ask("hold", entries=entries)

    def drop(self) -> int:
        """Frees what `hold` took."""
        return self.ask("drop")


def observed(args: Any, result: Result, work: Path) -> tuple[Observer, int]:
    """An observer, and how many GPUs the job uses: as many as wanted, or all. The record says both."""
    observer = Observer(work)
    count = observer.info["count"]
    gpus = args.gpus or count
    if not 1 <= gpus <= count:
        raise JobError(f"{gpus} GPUs wanted, {count} found")
    result.data["parameters"]["gpus"] = gpus
    result.machine(observer.info)
    return observer, gpus


if __name__ == "__main__":
    main()
