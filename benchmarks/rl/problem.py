"""What went wrong, as one sentence for the reader."""

from __future__ import annotations

from typing import Optional


class Problem(Exception):
    """The run cannot go on; the text says why and what to do."""


class WorkerGone(Problem):
    """A process of a tenant has ended before it was told to."""

    def __init__(self, role: str, rank: int, status: Optional[int], log: str) -> None:
        self.role, self.rank, self.status = role, rank, status
        super().__init__(f"process {rank} of tenant '{role}' ended by itself: {ended(status)}{last_words(log)}")


def ended(status: Optional[int]) -> str:
    """An exit status in words; `None` where it is not known."""
    if status is None:
        return "its exit status is not known"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def last_words(log: str) -> str:
    """The end of a log, to be put behind a sentence."""
    lines = [line for line in log.splitlines() if line.strip()][-6:]
    return "".join(f"\n    {line[:300]}" for line in lines)
