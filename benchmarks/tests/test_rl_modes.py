"""`rl/run.py --simulate` from end to end: modes with equal results, the page against the record, deaths and bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1]
RUN = BENCHMARKS / "rl" / "run.py"
TIMEOUT_S = 600.0
PANELS = ("time", "memory", "curves", "metrics", "about")

sys.path.insert(0, str(BENCHMARKS))


#: The example in whose steps nobody is done before the other has left.
HELD = f"import sys; sys.path[:0] = [{str(BENCHMARKS)!r}, {str(Path(__file__).parent)!r}]; import test_rl_turns; test_rl_turns.run_held()"


def start(out: Path, *words: str, held: bool = False) -> subprocess.Popen[str]:
    """Starts the example."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    script = ["-c", HELD] if held else [str(RUN)]
    command = [sys.executable, *script, "--simulate", "--tokens", "48", "--out", str(out), *words]
    return subprocess.Popen(command, env=environment, cwd=out.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def play(out: Path, *words: str, held: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end."""
    run = start(out, *words, held=held)
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
    done = play(out, "--modes", "all", "--steps", "2", held=True)
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
    run = start(out, "--modes", "keep-both,sublet,cpu", "--steps", "9")
    try:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("sublet: step 2 of 9"):
                run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=TIMEOUT_S)[1]
    finally:
        run.kill()
    assert run.returncode == 1 and "sublet: ended by SIGTERM, after " in said and "Traceback" not in said, said
    written = record(out)
    assert [entry["mode"] for entry in written["runs"]] == ["keep-both", "sublet"], "and no other mode begins"
    assert 2 <= len(written["runs"][1]["steps"]) < 9 and written["runs"][1]["metrics"]["lost_share"] is not None
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
