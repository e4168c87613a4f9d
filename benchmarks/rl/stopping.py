"""A run that is asked to end leaves what it has."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Stopped(BaseException):
    """SIGINT or SIGTERM asked the run to end; nothing takes it for a failure that it can go on from."""


@contextlib.contextmanager
def asked_to_end() -> Iterator[None]:
    """Either signal raises `Stopped` here, once; a second one does what it did before. For the main thread only."""

    def stop(number: int, _: object) -> None:
        restore()
        raise Stopped(f"ended by {signal.Signals(number).name}")

    def restore() -> None:
        for number, before in usual.items():
            signal.signal(number, before)

    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in usual:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
