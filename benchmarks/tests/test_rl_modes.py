"""`rl/run.py --simulate` from end to end: modes with equal results, the page against the record, deaths and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1]
RUN = BENCHMARKS / "rl" / "run.py"
TIMEOUT_S = 600.0
PANELS = ("time", "memory", "curves", "metrics", "about")

sys.path.insert(0, str(BENCHMARKS))


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    """Starts the example."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(RUN), "--simulate", "--tokens", "48", "--out", str(out), *words]
    return subprocess.Popen(command, env=environment, cwd=out.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def play(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end."""
    run = start(out, *words)
    try:
        said = run.communicate(timeout=TIMEOUT_S)
    finally:
        run.kill()
    return subprocess.CompletedProcess(run.args, run.returncode, *said)


def record(out: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((out / "rl_grpo.json").read_text())
    return written


def page(out: Path) -> ET.Element:
    """The page, parsed as strictly as XML is."""
    text = (out / "rl_grpo.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 300 * 1024
    head, body = text.split("\n", 1)
    assert head == "<!DOCTYPE html>"
    for word in ("<script", "http:", "https:", "src=", "@import", "url("):
        assert word not in body, word
    return ET.fromstring(body)


def text_of(element: ET.Element) -> str:
    return "".join(element.itertext())


def by_id(root: ET.Element, name: str) -> ET.Element:
    found = [element for element in root.iter() if element.get("id") == name]
    assert len(found) == 1, f"{name}: {len(found)}"
    return found[0]


@pytest.fixture(scope="module")
def all_modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record and page of a run in every mode, with weights by CUDA IPC."""
    out = tmp_path_factory.mktemp("all") / "out"
    done = play(out, "--modes", "all", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rewards, losses and weights of 5 modes are identical" in done.stdout
    return out


def test_every_mode_computes_the_same(all_modes: Path) -> None:
    written = record(all_modes)
    assert written["identical"] is True and written["compared"] == 5
    first = written["runs"][0]
    assert len({step["fingerprint"] for step in first["steps"]} | {first["weights"]}) == 2, "each step changes the weights"
    for run in written["runs"]:
        assert run["failure"] is None and len(run["steps"]) == 2
        assert [step["reward"] for step in run["steps"]] == [step["reward"] for step in first["steps"]]
        assert all(step["reward"] > 0 and step["loss"] is not None for step in run["steps"])


def test_memory_leaves_with_its_tenant_in_the_modes_that_say_so(all_modes: Path) -> None:
    from rl.simulated.jobs import CONTEXT_BYTES, KV_BYTES, WEIGHTS_BYTES

    metrics = {run["mode"]: run["metrics"] for run in record(all_modes)["runs"]}
    for mode in ("sublet", "cpu", "destroy-groups"):
        assert metrics[mode]["left_bytes"] == {"train": CONTEXT_BYTES, "infer": CONTEXT_BYTES}, mode
    assert metrics["keep-both"]["left_bytes"]["train"] > 3 * WEIGHTS_BYTES
    assert metrics["restart"]["left_bytes"]["infer"] == 0
    # At the hand-over the cache is away, but for where all stays.
    assert metrics["keep-both"]["handover_peak_bytes"] - metrics["sublet"]["handover_peak_bytes"] == KV_BYTES
    assert metrics["sublet"]["kv_bytes_free"] > metrics["keep-both"]["kv_bytes_free"]


def test_the_record_has_what_each_command_took(all_modes: Path) -> None:
    runs = {run["mode"]: run["commands"] for run in record(all_modes)["runs"]}
    assert all(not commands for mode, commands in runs.items() if mode != "sublet")
    trainer = [each for each in runs["sublet"] if each["tenant"] == "train"]
    assert [(each["step"], each["action"]) for each in trainer] == [(step, action) for step in (0, 1) for action in ("pause", "resume")]
    assert all(each["wall_ms"] > 0 and each["phases"] for each in runs["sublet"])
    assert all(each["saved_bytes"] > 0 for each in trainer if each["action"] == "pause")


def test_the_page_shows_what_the_record_says(all_modes: Path) -> None:
    from rl import page as pages

    written, root = record(all_modes), page(all_modes)
    for name in PANELS:
        by_id(root, name)
    assert "identical" in text_of(by_id(root, "verdict"))
    rows = by_id(root, "metrics").findall(".//tbody/tr")
    assert len(rows) == len(pages.ROWS)
    for row, (words, show, path) in zip(rows, pages.ROWS):
        assert text_of(row.findall("th")[0]) == words
        assert [text_of(cell) for cell in row.findall("td")] == [pages.cell(run, show, path) for run in written["runs"]]
    for run in written["runs"]:
        panel = by_id(root, f"memory-{run['mode']}")
        titles = [title.text or "" for title in panel.iter("title")]
        turns = [phase for phase in run["phases"] if phase["phase"] == "generate"]
        assert sum(title.startswith("generator works") for title in titles) == len(turns) == 2
        assert any(title == "train: optimizer" for title in titles)
        assert "device size 128 MiB" in text_of(panel)


def test_shapes_lie_inside_their_plots(all_modes: Path) -> None:
    drawn = 0
    for rect in page(all_modes).iter("rect"):
        x, width = float(rect.get("x", "")), float(rect.get("width", ""))
        y, height = float(rect.get("y", "")), float(rect.get("height", ""))
        assert -0.1 <= x and x + width <= 1001.1 and y >= 0 and y + height <= 1000.1
        drawn += 1
    assert drawn > 40


def test_saved_bytes_are_handed_over_on_two_gpus(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = play(out, "--modes", "sublet,cpu", "--handover", "host", "--gpus", "2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    written = record(out)
    assert written["identical"] is True
    for run in written["runs"]:
        assert sorted(gpu["device"] for gpu in run["gpus"].values()) == [0, 1]
    sublet, cpu = (run["metrics"] for run in written["runs"])
    # The weights of both are never on the device together.
    assert sublet["handover_peak_bytes"] <= cpu["handover_peak_bytes"]
    assert len(page(out).findall(".//figcaption")) == 2 * 2 + 2


def phases(run: dict[str, Any], name: str, step: int) -> list[tuple[float, float]]:
    """Begins and ends."""
    return [(each["begin_s"], each["end_s"]) for each in run["phases"] if (each["phase"], each["step"]) == (name, step)]


def actions(run: dict[str, Any], step: int) -> list[tuple[str, str]]:
    """What was asked of whom, in order."""
    return [(each["tenant"], each["action"]) for each in run["commands"] if each["step"] == step]


#: The ways of the trainer that leaves during the generator's work, and comes back during it, or after it.
OUT = [("infer", "resume"), ("infer", "resume"), ("train", "pause")]
BACK_ABSENCES = [("train", "resume"), ("infer", "pause"), ("infer", "pause")]
BACK_AFTER = [("infer", "pause"), ("infer", "pause"), ("train", "resume")]


def test_the_trainer_leaves_while_the_generator_works(all_modes: Path) -> None:
    from rl import metrics
    from rl.simulated.jobs import CONTEXT_BYTES

    runs = {run["mode"]: run for run in record(all_modes)["runs"]}
    assert all(run["metrics"]["leaves_s"] is None for mode, run in runs.items() if mode != "sublet")
    run = runs["sublet"]
    # The first step has the order of a device that is too small for both.
    assert [each["step"] for each in run["phases"] if each["phase"] == "leaves"] == [1]
    ((begin, end),) = phases(run, "leaves", 1)
    ((works, done),) = phases(run, "generate", 1)
    waited = phases(run, "to_trainer", 1)
    assert works <= begin < done and done <= waited[0][0] and end <= waited[0][1]
    assert "leaves" not in metrics.LOST and run["metrics"]["leaves_s"] == pytest.approx(end - begin)
    # The cache came first, while all of the trainer was there.
    assert actions(run, 1)[:3] == OUT
    both = [sample for sample in run["samples"] if sample["point"] == "both"]
    (held,) = both[0]["held"].values()
    assert held["train"]["optimizer"] and held["infer"]["kv"] and run["metrics"]["left_bytes"]["train"] == CONTEXT_BYTES
    titles = [title.text or "" for title in by_id(page(all_modes), "memory-sublet").iter("title")]
    assert sum(title.startswith("trainer leaves while the generator works, step 1") for title in titles) == 1


def test_what_the_trainer_has_cached_goes_where_it_is_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = play(out, "--modes", "sublet,cpu", "--steps", "3", "--gpu-mib", "112")
    assert done.returncode == 0, done.stdout + done.stderr
    written = record(out)
    assert written["identical"] is True
    assert [each["step"] for each in written["runs"][0]["phases"] if each["phase"] == "leaves"] == [1, 2]
    for sample in written["runs"][0]["samples"]:
        if sample["point"] == "both":
            (held,) = sample["held"].values()
            assert held["train"]["optimizer"] and not held["train"].get("caches")


def test_without_room_for_both_the_trainer_leaves_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = play(out, "--modes", "sublet,cpu", "--steps", "3", "--gpu-mib", "106")
    assert done.returncode == 0, done.stdout + done.stderr
    written = record(out)
    assert written["identical"] is True
    run = written["runs"][0]
    assert not [each for each in run["phases"] if each["phase"] in ("leaves", "arrives")]
    for step in range(3):
        assert actions(run, step)[:3] == [("infer", "resume"), ("train", "pause"), ("infer", "resume")]


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


def play_here(monkeypatch: pytest.MonkeyPatch, mode: str = "sublet", works_s: float = 1.0, **acts: Callable[[Any], Any]) -> Any:
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


#: How long both sides work in `returns_early`, and when the one that has left sets out: ample for both ways on a busy machine.
WORKS_S, SETS_OUT_S = 4.0, 2.0


def returns_early(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has returns during the other's work begin early in it, for the order of events not to depend on the machine's speed. The
    times at which they are due are added to what is returned."""
    from rl.absence import Habits

    as_it_is, dues = Habits.due_s, list[float]()

    def due_s(habits: Habits, begin_s: float) -> Optional[float]:
        if as_it_is(habits, begin_s) is None:
            return None
        dues.append(begin_s + SETS_OUT_S)
        return dues[-1]

    monkeypatch.setattr(Habits, "due_s", due_s)
    return dues


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
    run = play_here(monkeypatch, works_s=WORKS_S)
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

    monkeypatch.setattr(jobs, "_TRAIN_S", WORKS_S)
    returns_early(monkeypatch)
    run = play_here(monkeypatch, generator_arrive=switching.BySublet.generator_arrive, works_s=WORKS_S)
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
    from rl.absence import Habits
    from rl.simulated import jobs

    def refused(_: Any) -> None:
        raise sublet.RefusedError("the driver says no")

    usual = Habits.due_s

    def due_s(habits: Habits, begin_s: float) -> Optional[float]:
        # In the midst of the trainer's turn, however slow the machine is.
        return begin_s + 3.0 if (habits._turn_s or 0) > 5 else usual(habits, begin_s)

    monkeypatch.setattr(jobs, "_TRAIN_S", 6.0)
    monkeypatch.setattr(Habits, "due_s", due_s)
    run = play_here(monkeypatch, **{act: refused})
    assert run.failure == "the driver says no" and len(run.steps) == 2, "after the trainer's turn"


def test_a_generator_that_is_done_before_it_was_expected_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, by_hand: Any) -> None:
    from rl import absence

    # An hour is expected: the trainer would come back long after the generator is done.
    monkeypatch.setattr(absence.Habits, "due_s", lambda _, begin_s: begin_s + 3600)
    begin = time.monotonic()
    found = whole(play_here(monkeypatch, works_s=0.2), by_hand)
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

    found = whole(play_here(monkeypatch, works_s=1.5, arrive=crowded), by_hand)
    assert came == [None], "refused, and not tried again"
    for step in (1, 2):
        assert actions(found, step) == [*OUT, *BACK_AFTER]


def test_a_pause_or_return_beside_the_generator_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    def refused(_: Any) -> None:
        raise sublet.RefusedError("no room for what is to be saved")

    for act, expected in (("leave", OUT[:2]), ("arrive", OUT)):
        with monkeypatch.context() as patch:
            run = play_here(patch, **{act: refused})
        assert run.failure == "no room for what is to be saved" and len(run.steps) == 1
        assert actions(dataclasses.asdict(run), 1) == expected, "what was done before is kept"


@pytest.mark.parametrize("act", ["leave", "arrive"])
def test_what_is_left_of_an_act_when_the_generator_is_done_is_lost(monkeypatch: pytest.MonkeyPatch, by_hand: Any, act: str) -> None:
    from rl import metrics, switching
    from rl.simulated.jobs import CONTEXT_BYTES

    as_it_is = getattr(switching.BySublet, act)

    def slow(switch: Any) -> Any:
        time.sleep(1.5)
        return as_it_is(switch)

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


@pytest.mark.parametrize("moment", ["before leave", "after leave", "before arrive", "after arrive"])
def test_a_generator_that_dies_at_any_moment_leaves_a_whole_trainer(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    from rl import switching

    when, act = moment.split()
    as_it_is = getattr(switching.BySublet, act)

    def deadly(switch: Any) -> Any:
        if when == "before":
            os.kill(switch.infer.pids[0], signal.SIGKILL)
        told = as_it_is(switch)
        if when == "after":
            os.kill(switch.infer.pids[0], signal.SIGKILL)
        return told

    run = play_here(monkeypatch, works_s=1.5, **{act: deadly})
    says = "the generator died in its turn, in step 1 (killed by signal 9); the trainer has resumed, and its weights are as they were"
    assert run.failure == says and len(run.steps) == 1
    found = dataclasses.asdict(run)
    assert actions(found, 1) == [*OUT, ("train", "resume")], "paused once, and resumed once"
    assert len(phases(found, "leaves", 1)) == 1 and len(phases(found, "arrives", 1)) == (act == "arrive")


def test_a_run_whose_generator_died_ends_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rl import run, switching

    as_it_is = switching.ByHand.to_generator

    def deadly(switch: Any) -> None:
        as_it_is(switch)
        os.kill(switch.infer.pids[0], signal.SIGKILL)

    monkeypatch.setattr(switching.ByHand, "to_generator", deadly)
    out = tmp_path / "out"
    assert run.main(["--simulate", "--tokens", "48", "--modes", "cpu", "--steps", "3", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    for words in ("died in its turn, in step 0", "killed by signal 9", "the trainer has resumed", "weights are as they were"):
        assert words in said, said
    assert record(out)["identical"] is None and "did not come to its end" in text_of(page(out))


def test_a_run_that_is_told_to_end_leaves_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = start(out, "--modes", "keep-both,sublet,cpu", "--steps", "5")
    try:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("sublet: step 2 of 5"):
                run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=TIMEOUT_S)[1]
    finally:
        run.kill()
    assert run.returncode == 1 and "sublet: ended by SIGTERM, after " in said and "Traceback" not in said, said
    written = record(out)
    assert [entry["mode"] for entry in written["runs"]] == ["keep-both", "sublet"], "and no other mode begins"
    assert 2 <= len(written["runs"][1]["steps"]) < 5 and written["runs"][1]["metrics"]["lost_share"] is not None
    assert written["identical"] is True and written["compared"] == 2, "what is over is compared"
    assert "in 2 modes, as far as each of them came" in text_of(page(out))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "none"], "there is no mode 'none'"),
        (["--modes", "sublet,sublet"], "names each mode once"),
        (["--modes", ","], "at least one"),
        (["--steps", "0"], "--steps is more than 0"),
        (["--gpus", "-1"], "--gpus is more than 0"),
        (["--deadline", "nan"], "--deadline is more than 0"),
        (["--generations", "1"], "at least 2"),
        (["--generations", "6", "--micro-batch", "4"], "--micro-batch divides --generations, 6: 4 does not"),
        (["--micro-batch", "0"], "--micro-batch divides"),
        (["--handover", "post"], "invalid choice"),
        (["--gpu-mib", "0"], "--gpu-mib is more than 0"),
        (["--shm", "/nonexistent"], "/nonexistent cannot be used"),
        # A folder with nothing free, as a container's /dev/shm may be.
        (["--shm", "/proc"], "make room, or name another folder"),
    ],
)
def test_bad_input_is_refused_with_the_next_step(tmp_path: Path, words: list[str], says: str) -> None:
    done = play(tmp_path / "out", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_completions_that_a_model_has_no_positions_for_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from rl import arguments

    assert arguments.parse(["--tokens", "4078"], "").tokens == 4078
    with pytest.raises(SystemExit, match="2"):
        arguments.parse(["--tokens", "4079"], "")
    assert "--tokens is at most 4078, not 4079" in capsys.readouterr().err


def test_without_the_simulated_driver_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBLET_TEST_SIMCUDA_DIR")
    done = play(tmp_path / "out")
    assert done.returncode == 2 and "cargo xtask built --python" in done.stderr, done.stderr


def test_processes_that_do_not_come_are_waited_for_until_the_deadline(tmp_path: Path) -> None:
    from rl.problem import Problem, WorkerGone
    from rl.teams import Team

    silent = Team("infer", 1, [["sleep", "600"]], dict(os.environ), tmp_path, deadline_s=0.3)
    with pytest.raises(Problem, match="0 of 1 processes of tenant 'infer' came within"):
        silent.start()
    silent.kill()
    ended = Team("infer", 1, [["sh", "-c", "echo no memory; exit 7"]], dict(os.environ), tmp_path, deadline_s=60)
    with pytest.raises(WorkerGone, match="exit status 7\n +no memory"):
        ended.start()
    ended.kill()


def test_a_message_that_came_with_the_one_before_is_not_waited_for(tmp_path: Path) -> None:
    from rl.links import Link
    from rl.teams import Team

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"op": "hello"}\n{"op": "rollout"}\n')
        team = Team("train", 1, [], {}, tmp_path, deadline_s=0.3)
        team._links[0], team._sockets[0] = Link(ours), ours
        assert team._links[0].receive(60) == {"op": "hello"}
        assert team.said("a training step") == [{"op": "rollout"}]


def test_runs_that_differ_are_told_apart() -> None:
    from rl import record as records

    def run(mode: str, loss: float, weights: str) -> records.Run:
        step = {"step": 0, "reward": 0.5, "loss": loss, "fingerprint": "f", "tokens": 1}
        return records.Run(mode=mode, handover="ipc", steps=[step], weights=weights)

    same = [run("sublet", 0.1, "w"), run("cpu", 0.1, "w")]
    assert records.difference(same) is None
    assert "'cpu' differs from 'sublet' at step 0" in (records.difference([same[0], run("cpu", 0.1000001, "w")]) or "")
    assert "at the end" in (records.difference([same[0], run("cpu", 0.1, "v")]) or "")
    # Of a run that did not come to its end, what is over is compared; weights it has none.
    ended = run("cpu", 0.1, "")
    ended.weights, ended.failure = None, "it was killed"
    assert records.document([ended, same[0]], {}, {})["identical"] is True
    ended.steps[0]["loss"] = 0.2
    assert "'cpu' differs from 'sublet' at step 0" in (records.difference([ended, same[0]]) or "")
    # Nothing of it is over.
    ended.steps[0]["reward"] = None
    assert records.document([same[0], ended], {}, {})["identical"] is None
    longer = run("cpu", 0.1, "w")
    longer.steps = [*longer.steps, *longer.steps]
    assert "'cpu' has 2 steps, 'sublet' 1" in (records.difference([same[0], longer]) or "")


def synthetic(gpus: int, modes: int, samples: int) -> dict[str, Any]:
    """A record as long as a large machine makes it."""
    from rl import metrics, sampling
    from rl.record import Run, document

    runs = []
    for mode in list(sorted(("cpu", "destroy-groups", "keep-both", "restart", "sublet")))[:modes]:
        run = Run(mode=mode, handover="ipc", weights="w")
        run.gpus = {f"GPU-{number}": {"device": number, "name": "A & B <GPU>", "total_bytes": 140 << 30} for number in range(gpus)}
        for step in range(20):
            run.steps.append({"step": step, "reward": 0.1 * step, "loss": -0.1, "fingerprint": str(step), "tokens": 100})
            begin = 10.0 * step
            for name, at, length in (("train", 0, 4), ("to_generator", 4, 1), ("handover", 5, 1), ("generate", 6, 3), ("to_trainer", 9, 1)):
                run.phases.append({"phase": name, "step": step, "begin_s": begin + at, "end_s": begin + at + length})
        for number in range(samples):
            kinds = {kind: ((number * 7919 + index * 104729) % 97) << 26 for index, kind in enumerate(sampling.KINDS)}
            held = {gpu: {"train": kinds, "infer": kinds} for gpu in run.gpus}
            run.samples.append({"at_s": 200.0 * number / samples, "point": "generate" if number % 9 == 0 else "", "held": held})
        run.metrics = metrics.compute(run)
        runs.append(run)
    options = {"simulate": False, "modes": [], "handover": "ipc", "gpus": gpus, "shape": "7b", "steps": 20, "generations": 16, "tokens": 192}
    return document(runs, options, {"torch": "<2>"})


def test_a_page_of_eight_gpus_and_five_modes_stays_small() -> None:
    from rl import page as pages

    text = pages.html(synthetic(gpus=8, modes=5, samples=400))
    assert len(text.encode()) < pages.BYTES_MAX
    ET.fromstring(text.split("\n", 1)[1])
    assert "A &amp; B &lt;GPU&gt;" in text and "NaN" not in text


def test_figures_leave_the_first_step_out() -> None:
    run = synthetic(gpus=1, modes=1, samples=20)["runs"][0]
    found = run["metrics"]
    assert found["step_s"]["all"] == pytest.approx(10.0)
    assert found["lost_share"] == pytest.approx(0.3)
    assert found["switch_s"] == {"median": pytest.approx(1.0), "p99": pytest.approx(1.0), "first": pytest.approx(1.0)}
    assert found["tokens_per_s"] == pytest.approx(10.0)


def test_memory_is_told_apart_by_tag_by_library_and_by_what_its_process_says() -> None:
    from rl import sampling

    def entry(library: str, tag: str, size_bytes: int) -> dict[str, Any]:
        return {"library": library, "tag": tag, "resident_bytes": size_bytes, "own_bytes": size_bytes}

    classes = [entry("torch", "", 100), entry("nccl", "nccl", 7), entry("torch", "kv", 30)]
    device = {"uuid": "GPU-a", "memory": classes}
    member = {"member": {"pid": 5}, "pool": {"devices": [device]}}
    document = {"gpus": [], "tenants": [{"tenant": "train", "members": [member]}, {"tenant": "other", "members": [member]}]}
    found = sampling.by_kind(document, {5: {"weights": 40, "optimizer": 50}}, {5: ("GPU-a", 3)})
    assert found == {
        "GPU-a": {"train": {"weights": 40, "optimizer": 50, "caches": 10, "nccl": 7, "kv": 30, "context": 3}}
    }
    document["gpus"] = [{"uuid": "GPU-a", "used_bytes": 200}]
    assert sampling.by_kind(document, {}, {})["GPU-a"]["train"]["context"] == 200 - 137
