"""What a tenant does during the other's work, on a clock of the test's own: leave, wait, come back, and when to set out."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Played:
    """A sequence during the generator's work, played on a clock of its own: what was done, and when."""

    def __init__(self, due_s: Optional[float], ends_s: float = 100.0, comes: Any = "came", pause_s: float = 2.0) -> None:
        from rl import absence

        self.now_s, self.done, played = 0.0, list[tuple[float, str]](), self

        def act(name: str, takes_s: float, told: Any) -> Any:
            played.done.append((played.now_s, name))
            played.now_s += takes_s
            if isinstance(told, Exception):
                raise told
            return told

        class Sequence(absence.Absence):
            def is_called_off(self, timeout_s: float) -> bool:
                assert timeout_s >= 0
                called_off = ends_s <= played.now_s + timeout_s
                played.now_s = max(played.now_s, ends_s) if called_off else played.now_s + timeout_s
                return called_off

        self.sequence = Sequence(
            absence.TRAINER, lambda: act("leave", pause_s, "left"), lambda: act("away", 0.5, None), lambda: act("arrive", 1.0, comes), due_s, lambda: self.now_s
        )
        self.sequence.play()
        self.state = self.sequence.state.value

    def acts(self) -> list[tuple[str, float, float, Any]]:
        return [(act.phase, act.begin_s, act.end_s, act.told) for act in self.sequence.acts]


LEFT = ("leaves", 0.0, 2.0, "left")


def test_the_trainer_leaves_waits_until_it_is_due_and_comes_back() -> None:
    played = Played(due_s=7.0)
    assert played.done == [(0.0, "leave"), (2.0, "away"), (7.0, "arrive")] and played.state == "back"
    assert played.acts() == [LEFT, ("arrives", 7.0, 8.0, "came")]
    # A look that takes long makes it late, and no more than that.
    assert Played(due_s=2.2).done[-1] == (2.5, "arrive")


@pytest.mark.parametrize(
    ("words", "done"),
    [
        ({"due_s": None}, [(0.0, "leave")]),
        ({"due_s": 1.9}, [(0.0, "leave")]),
        # The generator is done while the trainer leaves, or while it waits.
        ({"due_s": 7.0, "ends_s": 1.0}, [(0.0, "leave")]),
        ({"due_s": 7.0, "ends_s": 5.0}, [(0.0, "leave"), (2.0, "away")]),
        ({"due_s": 7.0, "comes": None}, [(0.0, "leave"), (2.0, "away"), (7.0, "arrive")]),
    ],
)
def test_the_trainer_stays_away_where_it_is_not_to_come_back_beside_the_generator(words: Any, done: list[tuple[float, str]]) -> None:
    played = Played(**words)
    assert (played.state, played.done, played.acts()) == ("away", done, [LEFT])


def test_what_fails_beside_the_generator_ends_the_sequence_and_is_told() -> None:
    from rl.problem import Problem

    played = Played(due_s=7.0, comes=Problem("it does not come"))
    assert played.state == "failed" and played.acts() == [LEFT]
    begun = played.sequence
    with pytest.raises(Problem, match="it does not come"):
        begun.check(0)


def test_the_trainer_sets_out_by_how_long_turns_and_returns_were() -> None:
    from rl.absence import Habits

    habits = Habits()
    assert habits.due_s(10.0) is None
    habits.worked(4.0)
    assert habits.due_s(10.0) is None
    habits.returned(0.2)
    assert habits.due_s(10.0) == pytest.approx(10 + 4 - (1.5 * 0.2 + 0.1))
    for return_s in (0.6, 0.4):
        habits.returned(return_s)
    assert habits.due_s(10.0) == pytest.approx(10 + 4 - (1.5 * 0.6 + 0.1)), "the longer of the last two"
    habits.returned(0.2)
    habits.worked(5.0)
    assert habits.due_s(10.0) == pytest.approx(10 + 5 - (1.5 * 0.4 + 0.1))


@pytest.mark.parametrize("what", ["pause", "return"])
def test_what_goes_on_beside_the_generator_is_waited_for_until_the_deadline(what: str) -> None:
    from rl.absence import TRAINER, Absence
    from rl.problem import Problem

    over, slow = threading.Event(), threading.Event()

    def act(name: str) -> bool:
        if name == what:
            slow.set()
            return over.wait(60)
        return True

    begun = Absence(TRAINER, lambda: act("pause"), lambda: None, lambda: act("return"), time.monotonic() + 0.2, time.monotonic)
    begun.begin()
    try:
        assert slow.wait(60) and not begun.end(0.05)
        with pytest.raises(Problem, match=f"the {what} of tenant 'train' .* has not ended 0 s after the generator had"):
            begun.check(0.05)
    finally:
        over.set()
    assert begun.end(60)
    begun.check(60)
    assert [each.phase for each in begun.acts] == ["leaves", "arrives"][: 1 + (what == "return")]
