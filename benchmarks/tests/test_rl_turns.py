"""Turns of a trainer and a generator in one step of the RL example, played in this process: who leaves and comes back when, and what
becomes of acts that fail."""

from __future__ import annotations

import dataclasses
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
from test_rl_modes import BACK_ABSENCES, BACK_AFTER, OUT, RUN, TIMEOUT_S, actions, phases


class Tenants:
    """`sublet.Tenant`, without tenants: what was asked of whom; a cache does not come while the trainer is there."""

    #: What there is room after.
    makes_room = "pause train all"

    def __init__(self, error: type[Exception]) -> None:
        import sublet

        self.asked: list[str] = []
        self.error, self.name = error, ""
        self.said: Any = sublet.Report("already")

    def __call__(self, name: str) -> Any:
        made = Tenants(self.error)
        made.asked, made.name = self.asked, name
        return made

    def pause(self, tags: str = "all", timeout: float = 0) -> Any:
        self.asked.append(f"pause {self.name} {tags}")
        return self.said

    def ask(self, op: str) -> None:
        self.asked.append(op)

    def swap_to(self, other: Any, timeout: float = 0) -> Any:
        self.asked.append(f"swap {self.name} {other.name}")
        return self.said

    def resume(self, tags: str = "all", timeout: float = 0) -> Any:
        self.asked.append(f"resume {self.name} {tags}")
        if self.asked[-2:-1] != [self.makes_room]:
            raise self.error("no room")
        return self.said


def switch(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> tuple[Any, list[str]]:
    """Mode `sublet` over tenants that are none."""
    import sublet

    from rl import switching

    tenants = Tenants(error)
    monkeypatch.setattr(sublet, "Tenant", tenants)
    team: Any = tenants("team")
    return switching.make("sublet", team, team, "ipc", 5.0), tenants.asked


def test_a_cache_that_has_no_room_beside_the_trainer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    before = ["pause train all", "resume infer kv"]
    for expected in (before, ["resume infer kv", "trim", "resume infer kv", *before], before, before):
        made.to_generator()
        assert asked == expected and not made.leaves_meanwhile
        asked.clear()
    # What is no lack of room is not taken for one.
    made, asked = switch(monkeypatch, sublet.RetryError)
    made.to_generator()
    with pytest.raises(sublet.RetryError):
        made.to_generator()
    assert asked == [*before, "resume infer kv"]


def test_a_generator_that_has_no_room_beside_the_trainer_comes_when_that_has_emptied_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    monkeypatch.setattr(Tenants, "makes_room", "trim")
    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    made.before()
    assert asked == ["resume infer all", "trim", "resume infer all"]
    asked.clear()
    made.before()
    assert asked == ["trim", "resume infer all"], "each later step begins with it"
    monkeypatch.setattr(Tenants, "makes_room", "nothing")
    with pytest.raises(sublet.OutOfDeviceMemory):
        made.before()


def test_a_trainer_that_has_no_room_beside_the_generator_comes_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    assert made.may_return and made.arrive() is None and not made.may_return
    made.to_trainer()
    assert asked == ["resume train all", "pause infer kv", "swap infer train"]
    # What is no lack of room is not taken for one.
    made, asked = switch(monkeypatch, sublet.RetryError)
    with pytest.raises(sublet.RetryError):
        made.arrive()


@pytest.mark.parametrize("then", ["to_trainer", "rescue"])
def test_a_trainer_that_is_back_is_not_resumed_again(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    import sublet

    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    made.leave()
    assert made.arrive() is not None and made.may_return
    getattr(made, then)()
    assert asked == ["pause train all", "resume train all"]
    # The generator leaves while the trainer works.
    assert made.generator_leaves_meanwhile == (then == "to_trainer")
    asked.clear()
    made.leave()
    made.rescue()
    assert asked == ["pause train all", "resume train all"], "that was of one turn"


def play_here(monkeypatch: pytest.MonkeyPatch, mode: str = "sublet", works_s: float = 0.2, **acts: Callable[[Any], Any]) -> Any:
    """Three steps in this process, with generators that work so long, and with other ways for the trainer to `leave` or to
    `arrive` during them. Generators do not come back during the trainer's work, unless told how: that goes by its time."""
    from rl import arguments, switching
    from rl.conductor import Conductor
    from rl.simulated import jobs

    for name, act in {"generator_arrive": lambda _: None, **acts}.items():
        monkeypatch.setattr(switching.BySublet, name, act)
    monkeypatch.setattr(jobs, "_GENERATE_S", works_s)
    # Sockets have short names.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        run_dir, work = Path(place) / "run", Path(place) / "work"
        run_dir.mkdir(mode=0o700)
        work.mkdir()
        monkeypatch.setenv("SUBLET_RUN_DIR", str(run_dir))
        options = arguments.parse(["--simulate", "--steps", "3", "--out", place], "")
        return Conductor(options, jobs.SimulatedJobs(options, Path(place)), mode, work).play()


@pytest.fixture(scope="module")
def by_hand() -> Any:
    """The steps of `play_here` in mode `cpu`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return play_here(monkeypatch, "cpu", works_s=0.0)


def returns_early(monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> list[float]:
    """Has returns during the other's work, so many at most, be due shortly after the leaving, however long that takes. The times at
    which they are due are added to what is returned."""
    from rl.absence import Absence, Habits

    as_it_is, act, dues, far_s = Habits.due_s, Absence._act, list[float](), 3600.0

    def due_s(habits: Habits, begin_s: float) -> Optional[float]:
        usual_s = as_it_is(habits, begin_s)
        return usual_s if usual_s is None or len(dues) >= most else begin_s + far_s

    def acts(absence: Absence, phase: str, call: Callable[[], Any]) -> bool:
        has_acted = act(absence, phase, call)
        is_far = absence._due_s is not None and absence._due_s > absence._clock() + far_s / 2
        if phase == absence.side.leaves and is_far:
            dues.append(absence._clock() + 0.5)
            absence._due_s = dues[-1]
        return has_acted

    monkeypatch.setattr(Habits, "due_s", due_s)
    monkeypatch.setattr(Absence, "_act", acts)
    return dues


def holds_turns(monkeypatch: pytest.MonkeyPatch, until: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """Has each turn last until what the other side does meanwhile is so far, or over, for the order of events not to depend on the
    machine's speed. What begins so is added to what is returned."""
    from rl.absence import Absence, State
    from rl.teams import Team

    begin, said, begun, ends = Absence.begin, Team.said, list[Any](), {State.AWAY, State.BACK, State.FAILED}

    def begins(absence: Absence) -> None:
        begun.append(absence)
        begin(absence)

    def held(team: Team, what: str, *ranks: Any, **named: Any) -> list[dict[str, Any]]:
        messages = said(team, what, *ranks, **named)
        end = time.monotonic() + TIMEOUT_S
        while what in ("generate", "a training step") and begun and not until(begun[-1]) and begun[-1].state not in ends:
            assert time.monotonic() < end, "what goes on meanwhile does not come so far"
            time.sleep(0.01)
        return messages

    monkeypatch.setattr(Absence, "begin", begins)
    monkeypatch.setattr(Team, "said", held)
    return begun


def run_held() -> None:
    """The example, in whose steps nobody is done before the other has left."""
    holds_turns(pytest.MonkeyPatch(), lambda absence: bool(absence.acts))
    runpy.run_path(str(RUN), run_name="__main__")


def test_a_return_is_due_so_long_before_the_other_is_done_as_the_slowest_of_the_last_took() -> None:
    from rl.absence import Habits

    habits = Habits()
    assert habits.due_s(100.0) is None
    habits.worked(10.0)
    assert habits.due_s(100.0) is None
    for return_s in (9.0, 2.0, 1.0):
        habits.returned(return_s)
    assert habits.due_s(100.0) == pytest.approx(100.0 + 10.0 - (1.5 * 2.0 + 0.1))
    habits.worked(20.0)
    assert habits.due_s(100.0) == pytest.approx(100.0 + 20.0 - (1.5 * 2.0 + 0.1))


def whole(run: Any, by_hand: Any) -> dict[str, Any]:
    """The record of a run that came to its end with the same results as `by_hand`."""
    from rl import record as records

    assert run.failure is None and len(run.steps) == 3 and records.difference([run, by_hand]) is None
    return dataclasses.asdict(run)


def test_the_trainer_comes_back_while_the_generator_still_works(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> None:
    from rl import memory_chart, metrics
    from rl.simulated.jobs import CONTEXT_BYTES, KV_BYTES

    dues = returns_early(monkeypatch)
    holds_turns(monkeypatch)
    run = play_here(monkeypatch)
    found = whole(run, by_hand)
    assert not phases(found, "arrives", 0) and actions(found, 0)[-3:] == BACK_AFTER
    for step in (1, 2):
        ((_, gone),) = phases(found, "leaves", step)
        ((begin, end),) = phases(found, "arrives", step)
        ((_, done),) = phases(found, "generate", step)
        assert any(gone < due <= begin for due in dues) and begin < end < done
        assert actions(found, step) == [*OUT, *BACK_ABSENCES]
        (away,) = [each for each in found["samples"] if each["point"] == "generate" and gone < each["at_s"] < begin]
        (held,) = away["held"].values()
        assert sum(held["train"].values()) == CONTEXT_BYTES and held["infer"]["kv"] == KV_BYTES
        assert len([each for each in found["samples"] if each["point"] == "both" and done < each["at_s"]]) >= 1
    figures = found["metrics"]
    assert figures["left_bytes"]["train"] == CONTEXT_BYTES and "arrives" not in metrics.LOST
    assert figures["kv_bytes_free"] == by_hand.metrics["kv_bytes_free"], "room is counted while the trainer is away"
    assert figures["arrives_s"] == pytest.approx(metrics.median(end - begin for step in (1, 2) for begin, end in phases(found, "arrives", step)))
    titles = memory_chart.timeline(found).split("<title>")
    assert sum(title.startswith("trainer comes back while the generator works, step ") for title in titles) == 2


def test_the_generator_leaves_and_comes_back_while_the_trainer_works(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> None:
    from rl import memory_chart, metrics, switching
    from rl.simulated import jobs

    returns_early(monkeypatch)
    holds_turns(monkeypatch)
    run = play_here(monkeypatch, generator_arrive=switching.BySublet.generator_arrive)
    found = whole(run, by_hand)
    assert not phases(found, "generator_leaves", 0), "the trainer came in its place"
    for step in (1, 2):
        ((begin, gone),) = phases(found, "generator_leaves", step)
        ((back, end),) = phases(found, "generator_arrives", step)
        ((_, done),) = phases(found, "train", step)
        assert begin < gone < back < end < done
        (away,) = [each for each in found["samples"] if each["point"] == "train" and gone < each["at_s"] < back]
        (held,) = away["held"].values()
        assert sum(held["infer"].values()) == jobs.CONTEXT_BYTES and held["train"]["optimizer"]
    # All but its cache is there when the trainer asks for completions.
    came = [("infer", "resume")]
    assert actions(found, 1) == [*OUT, *BACK_ABSENCES, *came] and actions(found, 2) == [*OUT[1:], *BACK_ABSENCES, *came]
    figures = found["metrics"]
    assert figures["left_bytes"]["infer"] == jobs.CONTEXT_BYTES
    assert figures["generator_leaves_s"] > 0 and figures["generator_arrives_s"] > 0
    assert not {"generator_leaves", "generator_arrives"} & {*metrics.LOST, *metrics.PHASES}
    titles = memory_chart.timeline(found).split("<title>")
    for words in ("generator leaves while the trainer works", "generator comes back while the trainer works"):
        assert sum(title.startswith(f"{words}, step ") for title in titles) == 2


def test_a_generator_that_has_no_room_beside_the_trainer_comes_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    assert made.generator_may_return and made.generator_arrive() is None
    assert not made.generator_may_return and not made.generator_is_back
    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    made._trainer.pause()
    assert made.generator_arrive() is not None and made.generator_is_back
    made.before()
    assert asked == ["pause train all", "resume infer all"] and not made.generator_is_back, "it is resumed once"
    # What is no lack of room is not taken for one.
    made, _ = switch(monkeypatch, sublet.RetryError)
    with pytest.raises(sublet.RetryError):
        made.generator_arrive()


def test_a_trainer_that_made_room_by_its_cache_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    made, asked = switch(monkeypatch, sublet.OutOfDeviceMemory)
    made._trims = True
    made.leave()
    assert made.arrive() is not None
    made.to_trainer()
    assert asked == ["pause train all", "resume train all", "pause infer kv", "pause infer all"]
    assert not made.generator_leaves_meanwhile


@pytest.mark.parametrize("act", ["generator_leave", "generator_arrive"])
def test_a_pause_or_return_beside_the_trainer_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    import sublet

    def refused(_: Any) -> None:
        raise sublet.RefusedError("the driver says no")

    returns_early(monkeypatch)
    holds_turns(monkeypatch)
    run = play_here(monkeypatch, **{act: refused})
    assert run.failure == "the driver says no" and len(run.steps) == 2, "after the trainer's turn"


def test_a_generator_that_is_done_before_it_was_expected_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> None:
    from rl import absence

    # An hour is expected: the trainer would come back long after the generator is done.
    monkeypatch.setattr(absence.Habits, "due_s", lambda _, begin_s: begin_s + 3600)
    begin = time.monotonic()
    found = whole(play_here(monkeypatch), by_hand)
    assert time.monotonic() - begin < 1800
    for step in (1, 2):
        assert phases(found, "leaves", step) and not phases(found, "arrives", step)
        assert actions(found, step) == [*OUT, *BACK_AFTER]


def test_a_return_that_somebody_else_leaves_no_room_for_is_tried_once(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> None:
    from rl import switching

    as_it_is, came = switching.BySublet.arrive, []
    hog = "from device import Device; held = Device(0).allocate(24 << 20); print(flush=True); input()"

    def crowded(switch: Any) -> Any:
        # Another process takes what the trainer has left, until the refusal.
        environment = switch.infer._environment
        with subprocess.Popen([sys.executable, "-c", hog], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            came.append(as_it_is(switch))
            process.kill()
        return came[-1]

    returns_early(monkeypatch)
    holds_turns(monkeypatch)
    found = whole(play_here(monkeypatch, arrive=crowded), by_hand)
    assert came == [None], "refused, and not tried again"
    for step in (1, 2):
        assert actions(found, step) == [*OUT, *BACK_AFTER]


def test_a_pause_or_return_beside_the_generator_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    def refused(_: Any) -> None:
        raise sublet.RefusedError("no room for what is to be saved")

    for act, expected in (("leave", OUT[:2]), ("arrive", OUT)):
        with monkeypatch.context() as patch:
            returns_early(patch)
            holds_turns(patch)
            run = play_here(patch, **{act: refused})
        assert run.failure == "no room for what is to be saved" and len(run.steps) == 1
        assert actions(dataclasses.asdict(run), 1) == expected, "what was done before is kept"


@pytest.mark.parametrize("act", ["leave", "arrive"])
def test_what_is_left_of_an_act_when_the_generator_is_done_is_lost(monkeypatch: pytest.MonkeyPatch, by_hand: Any, act: str) -> None:
    from rl import metrics, switching
    from rl.absence import Habits, State
    from rl.simulated.jobs import CONTEXT_BYTES

    as_it_is, worked = getattr(switching.BySublet, act), Habits.worked
    if act == "arrive":
        returns_early(monkeypatch, most=1)
    begun = holds_turns(monkeypatch, lambda absence: act == "leave" or absence.state is State.ARRIVING)

    def slow(switch: Any) -> Any:
        # The generator is done by then.
        assert begun[-1].is_called_off(TIMEOUT_S)
        time.sleep(1.0)
        return as_it_is(switch)

    # Longer than that no turn is known to have been, however slow the machine is.
    monkeypatch.setattr(Habits, "worked", lambda habits, turn_s: worked(habits, min(turn_s, 1.0)))

    run = play_here(monkeypatch, **{act: slow})
    found = whole(run, by_hand)
    # The return of the first of these two steps is so slow that none is tried in the next.
    for step in (1, 2) if act == "leave" else (1,):
        ((_, done),) = phases(found, "generate", step)
        ((_, end),) = phases(found, f"{act}s", step)
        waited = phases(found, "to_trainer", step)
        assert waited[0][0] <= end <= waited[0][1] and end - done > 0.3
        assert metrics.seconds(run)[step]["to_trainer"] >= end - waited[0][0]
    assert len([each for each in found["phases"] if each["phase"] == "arrives"]) == (1 if act == "arrive" else 0)
    assert run.metrics["left_bytes"]["train"] == CONTEXT_BYTES, "it is looked at while the trainer is away"


def never_done(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Has the generator's turn in this step last until it dies: it is not told to begin."""
    from rl.teams import Team

    tell, turns = Team.tell, list[str]()

    def tells(team: Team, op: str, *more: Any, **named: Any) -> None:
        turns.extend([op] if op == "generate" else [])
        if op != "generate" or len(turns) != step + 1:
            tell(team, op, *more, **named)

    monkeypatch.setattr(Team, "tell", tells)


@pytest.mark.parametrize("moment", ["before leave", "after leave", "before arrive", "after arrive"])
def test_a_generator_that_dies_at_any_moment_leaves_a_whole_trainer(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    from rl import switching
    from rl.absence import Habits

    when, act = moment.split()
    as_it_is = getattr(switching.BySublet, act)

    def deadly(switch: Any) -> Any:
        if when == "before":
            os.kill(switch.infer.pids[0], signal.SIGKILL)
        told = as_it_is(switch)
        if when == "after":
            os.kill(switch.infer.pids[0], signal.SIGKILL)
        return told

    never_done(monkeypatch, 1)
    if act == "leave":
        # It stays away.
        monkeypatch.setattr(Habits, "due_s", lambda *_: None)
    else:
        returns_early(monkeypatch)
    run = play_here(monkeypatch, **{act: deadly})
    says = "the generator died in its turn, in step 1 (killed by signal 9); the trainer has resumed, and its weights are as they were"
    assert run.failure == says and len(run.steps) == 1
    found = dataclasses.asdict(run)
    assert actions(found, 1) == [*OUT, ("train", "resume")], "paused once, and resumed once"
    assert len(phases(found, "leaves", 1)) == 1 and len(phases(found, "arrives", 1)) == (act == "arrive")
