"""Reports of pauses and resumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["completed", "already", "nothing", "partial"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def _shown(size_bytes: int) -> str:
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"


@dataclass(frozen=True)
class Report:
    """What a pause, resume or switch did.

    Attributes:
        outcome: ``"completed"``; ``"already"``: there was nothing to do; ``"nothing"``: no process of the tenant has
            device memory yet, and none is paused; or ``"partial"``: processes were lost, or memory stays that was to
            make room for others (``details["stays"]`` has how much for which reason). A resume brings all back.
        seconds: how long it took; 0 if there was nothing to do.
        freed_bytes: device memory that was given back, on all devices together.
        returned_bytes: device memory that was brought back.
        stayed_bytes: device memory that stays, and was to make room for others.
        paused: tenants that were paused for it.
        reasons: why they did, a line each.
        details: all that is known, as ``sublet --json`` prints it in ``report``: plain dicts and lists, times in ``_us``
            (microseconds), sizes in ``_bytes``.

    >>> print(sublet.resume())
    already
    """

    outcome: Outcome
    seconds: float = 0.0
    freed_bytes: int = 0
    returned_bytes: int = 0
    stayed_bytes: int = 0
    paused: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        said = [f"{self.outcome} in {self.seconds:.3f} s" if self.seconds else self.outcome]
        amounts = (
            (self.freed_bytes, "given back"),
            (self.returned_bytes, "brought back"),
            (self.stayed_bytes, "stayed"),
        )
        moved = ", ".join(f"{_shown(size)} {what}" for size, what in amounts if size)
        return ": ".join([*said, moved] if moved else said)


@dataclass(frozen=True)
class SwapReport:
    """The report of a swap.

    Attributes:
        paused: of the tenant that was paused.
        resumed: of the tenant that runs now.
    """

    paused: Report
    resumed: Report

    def __str__(self) -> str:
        return f"out {self.paused}; in {self.resumed}"


def of(details: dict[str, Any]) -> Report:
    """The report of one answer, of the library or of the command."""
    outcome = str(details["outcome"])
    # The command says which of the two it was.
    settled: Any = "already" if outcome.startswith("already") else outcome
    # A switch is pauses and a resume, each with a report of its own.
    parts = details.get("changes") or [details]
    return Report(
        outcome=settled,
        seconds=sum(part.get("wall_us", 0) for part in parts) / 1e6,
        freed_bytes=sum(part.get("freed_bytes", 0) for part in parts),
        returned_bytes=sum(part.get("taken_bytes", 0) for part in parts),
        stayed_bytes=sum(part.get("stayed_bytes", 0) for part in parts),
        paused=tuple(details.get("paused") or ()),
        reasons=tuple(details.get("reasons") or ()),
        details=details,
    )


def of_swap(details: dict[str, Any]) -> SwapReport:
    """The report of a swap of the library's."""
    return SwapReport(of(details["paused"]), of(details["resumed"]))
