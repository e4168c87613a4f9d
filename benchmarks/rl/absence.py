"""What one side does while the other works: it leaves, waits, and comes back shortly before the other is done."""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
from typing import Any, Callable, Optional

from rl.problem import Problem

#: How much earlier than the return took lately it begins.
_FACTOR, _SPARE_S = 1.5, 0.1
_RETURNS = 2


@dataclasses.dataclass(frozen=True)
class Side:
    """Who leaves: its tenant, what its pause and its return are called in a record, and who works meanwhile."""

    tenant: str
    leaves: str
    arrives: str
    other: str


TRAINER = Side("train", "leaves", "arrives", "generator")
GENERATOR = Side("infer", "generator_leaves", "generator_arrives", "trainer")


class Habits:
    """How long the other's last turn was and one's own last returns, and when the next return is due by that."""

    def __init__(self) -> None:
        self._turn_s: Optional[float] = None
        self._returns_s: collections.deque[float] = collections.deque(maxlen=_RETURNS)

    def worked(self, turn_s: float) -> None:
        """The other has had a turn of so many seconds."""
        self._turn_s = turn_s

    def returned(self, return_s: float) -> None:
        """This side has come back within so many seconds."""
        self._returns_s.append(return_s)

    def due_s(self, begin_s: float) -> Optional[float]:
        """When to set out, where the other began at `begin_s`; None where there was no step before."""
        if self._turn_s is None or not self._returns_s:
            return None
        return begin_s + self._turn_s - (_FACTOR * max(self._returns_s) + _SPARE_S)


class State(enum.Enum):
    """Where the sequence is; AWAY, BACK and FAILED are its ends."""

    LEAVING = "leaving"
    WAITING = "waiting"
    ARRIVING = "arriving"
    AWAY = "away"
    BACK = "back"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Act:
    """A pause or a return that came to its end: its phase, when it was, and what its call has returned."""

    phase: str
    begin_s: float
    end_s: float
    told: Any


class Absence:
    """Leave, wait until `due_s` or until it is called off, arrive: once, in a thread of its own.

    Without `due_s`, and where that is past when it has left, it stays away. `away` is called where it is to come back,
    as soon as it has left. `arrive` returns None where there was no room.
    """

    def __init__(
        self,
        side: Side,
        leave: Callable[[], Any],
        away: Callable[[], None],
        arrive: Callable[[], Any],
        due_s: Optional[float],
        clock: Callable[[], float],
    ) -> None:
        self.side = side
        self._leave, self._away, self._arrive, self._due_s, self._clock = leave, away, arrive, due_s, clock
        self._called_off = threading.Event()
        self._thread = threading.Thread(target=self.play, name="absence", daemon=True)
        self._error: Optional[Exception] = None
        self.state, self.acts = State.LEAVING, list[Act]()

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def play(self) -> None:
        """The sequence itself."""
        try:
            self.state = self._sequence()
        except Exception as error:
            self._error, self.state = error, State.FAILED

    def _sequence(self) -> State:
        self._act(self.side.leaves, self._leave)
        if self._due_s is None or self._due_s < self._clock():
            return State.AWAY
        self.state = State.WAITING
        if self.is_called_off(0.0):
            return State.AWAY
        self._away()
        if self.is_called_off(max(0.0, self._due_s - self._clock())):
            return State.AWAY
        self.state = State.ARRIVING
        return State.BACK if self._act(self.side.arrives, self._arrive) else State.AWAY

    def _act(self, phase: str, call: Callable[[], Any]) -> bool:
        begin_s = self._clock()
        told = call()
        if told is not None:
            self.acts.append(Act(phase, begin_s, self._clock(), told))
        return told is not None

    def is_called_off(self, timeout_s: float) -> bool:
        """Waits so long for it."""
        return self._called_off.wait(timeout_s)

    def call_off(self) -> None:
        """The other is done, or dead: what is under way ends, and nothing more begins."""
        self._called_off.set()

    def end(self, timeout_s: float) -> bool:
        """Calls it off; whether it has come to its end, well or not."""
        self.call_off()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self, waited_s: float) -> None:
        """Raises what an act has raised, and Problem where one has not ended though it was waited for so long."""
        if self._thread.is_alive():
            what, other = "return" if self.state is State.ARRIVING else "pause", self.side.other
            raise Problem(
                f"the {what} of tenant '{self.side.tenant}' that went on during the {other} has not ended {waited_s:.0f} s after the {other} had: "
                f"`sublet stats` says how its processes stand"
            )
        if self._error is not None:
            raise self._error
