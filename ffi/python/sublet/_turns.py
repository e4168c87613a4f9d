"""Turns on the GPUs, from inside a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from sublet import _report
from sublet._contexts import context
from sublet._library import any_library, command
from sublet._pausing import timeout_ms
from sublet._report import Report


@context
def turn(*, timeout: Optional[float] = None) -> Iterator[Report]:
    """The tenant of this process has its GPUs inside the ``with`` block.

    Waits until the GPUs are free, or until it may pause the tenants in the way. It pauses as few as suffice. Waiting
    tenants come in the order of their classes (``sublet run --class``), then of their requests. After the block others may have this
    tenant paused. They may do so inside the block too, once the turn has lasted its quantum (ten times a switch of this tenant) and a
    tenant of at least its class waits. This tenant then resumes at its next turn.

    Blocks nest, and those of a tenant's processes and threads are one turn, which ends with the last of
    them. Tenants that fit together have their turns at the same time.

    Args:
        timeout: how long to wait, in seconds; by default ten minutes.

    Yields:
        Its ``outcome`` is ``"already"`` when the tenant had its GPUs; ``paused`` has the tenants that it paused, ``reasons`` why.

    Raises:
        RetryError: the time was up, and the message says who was in the way.
        OutOfDeviceMemory: the tenant would not fit even if all others were paused.
        UsageError, RefusedError, LostError: as for :func:`sublet.pause`, of a tenant in the way or of this
            one. A tenant that was paused for it runs again, unless the message says otherwise.

    Blocks without the interpreter lock. A signal is handled within half a second; if its handler raises, as that of Ctrl-C
    does, there is no turn.

    >>> with sublet.turn() as had:
    ...     had.outcome, sublet.is_paused()
    ('already', False)
    """
    library = any_library()
    begun: list[str] = []
    try:
        yield _report.of(command(library, "turn_begin", begun, wait_ms=timeout_ms(timeout)))
    finally:
        if begun:
            library.turn_end()
