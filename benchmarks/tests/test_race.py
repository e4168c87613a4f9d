"""The race, on the simulated driver and on made-up records: its cases, what it skips and its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

JOBS = Path(__file__).resolve().parent.parent

import cli  # noqa: E402
import common  # noqa: E402
import head_to_head  # noqa: E402
import race_figures  # noqa: E402
import race_job  # noqa: E402
import race_memory  # noqa: E402
import sim_node  # noqa: E402
from common import JobError, Result  # noqa: E402
from race_job import CASES, Race  # noqa: E402
from suite import NotRun, Row, words_of  # noqa: E402

MIB = common.MIB
SMALL = ["--kept-gib", "0.0157", "--swap-gib", "0.0157", "--every-gib", "0.0079", "--block-mib", "6", "--copy-mib", "4"]


@pytest.fixture
def node(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two simulated GPUs of 128 MiB that all processes share, and no torch."""
    environment = sim_node.make(tmp_path / "node", [128 * MIB] * 2)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    yield work
    common.stop_children()


def raced(work: Path, *arguments: str, cases: tuple[Row, ...] = CASES) -> dict[str, Any]:
    """The record of a race, after its end."""
    given = [*SMALL, "--cold-host", "--deadline", "120", "--scale", "0.05", "--out", str(work / "race.json"), *arguments]
    args, result = race_job.parse(given), Result(work / "race.json", "race", {})
    race = Race(cases, args, result, work)
    race.run(race.rows)
    result.finish()
    return result.data


def verdicts(data: dict[str, Any]) -> dict[str, bool]:
    """The checks by name."""
    return {entry["what"]: entry["passed"] for entry in data["checks"]}


# ---------------------------------------------------------------- the whole, on the simulated driver


def test_every_case_that_needs_no_torch_runs_and_its_contents_are_right(node: Path) -> None:
    data = raced(node)
    assert data["status"] == "passed", data["checks"]
    assert verdicts(data)["kept: a pause gives all of it back"]
    assert set(data["samples"]["wrong_blocks"]) == {0}
    for series in ("kept_first", "kept_all", "kept_nothing", "kept_tenth", "kept_scattered", "kept_zero", "every"):
        pauses, resumes = (data["samples"][f"{series}_{action}_s"] for action in ("pause", "resume"))
        assert len(pauses) == len(resumes) > 0
    assert len(data["samples"]["swap_s"]) == 4 and len(data["samples"]["prepare_s"]) == 1
    assert {"prepared_first", "swap"} <= {each["key"] for each in data["figures"]}
    assert data["skipped"] == dict.fromkeys(("nccl", "saver", "legacy"), "no torch here")
    assert len(json.dumps(data, indent=1)) < 200 * 1024


def test_case_that_wants_more_gpus_is_skipped_by_name(node: Path) -> None:
    data = raced(node, "--gpus", "1", cases=tuple(case for case in CASES if case.gpus_min > 1))
    assert data["skipped"] == {
        "every": "it wants 2 GPUs, and there is 1",
        "nccl": "it wants 2 GPUs, and there is 1",
        "legacy": "it wants 2 GPUs, and there is 1",
    }


def test_case_that_fails_leaves_the_others_their_turn_and_no_process(node: Path) -> None:
    def fails(race: Race) -> None:
        """Starts a process and fails."""
        race.hold("left", 4 * MIB)
        raise JobError("too hot")

    def is_skipped(race: Race) -> None:
        raise NotRun("no hat here")

    def breaks(race: Race) -> None:
        raise KeyError("hat")

    cases = (Row("hot", fails), Row("hatless", is_skipped), Row("wrong", breaks), CASES[0])
    data = raced(node, cases=cases)
    checks = verdicts(data)
    assert checks == {
        "hot: ended by itself": False,
        "wrong: ended by itself": False,
        "pinned: ended by itself": True,
    }
    assert data["skipped"] == {"hatless": "no hat here"} and data["status"] == "failed"
    told = cli.sublet("ps", "--json")
    assert told["exit"] == 0 and cli.tenants(told) == [], told


def test_case_ends_with_its_time(node: Path) -> None:
    def waits(race: Race) -> None:
        """Asks for a step when there is no time for one."""
        race.hold("waits", 4 * MIB)
        race.row_ends = 0.0
        race.within()

    data = raced(node, "--deadline", "30", cases=(Row("waits", waits), Row("late", waits, least_s=1000)))
    assert "time was over" in data["checks"][0]["detail"] and not data["checks"][0]["passed"]
    assert "RACE_CASES=late runs it alone" in data["skipped"]["late"]


def named(*names: str) -> tuple[Row, ...]:
    """Cases by name."""
    return tuple(case for case in CASES if case.name in names)


@pytest.mark.parametrize("code", [0, 801])
def test_checkpoint_is_timed_or_its_refusal_named(node: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    asked: list[str] = []

    def call(self: Any, op: str, timeout_s: float = 60.0, ranks: Any = None, **arguments: Any) -> list[Any]:
        if op == "checkpoint":
            asked.append(arguments["step"])
            return [{"code": code if arguments["step"] == "restore" else 0, "seconds": 0.5}]
        answers: list[Any] = real(self, op, timeout_s, ranks, **arguments)
        return [{**answers[0], "checkpoints": True}] if op == "info" else answers

    real = race_job.Ranks.call
    monkeypatch.setattr("race_job.Ranks.call", call)
    data = raced(node, cases=named("checkpoint"))
    assert data["status"] == "passed", data["checks"]
    if code == 0:
        assert asked == ["lock", "checkpoint", "restore", "unlock"]
        assert data["samples"]["checkpoint_pause_s"] == data["samples"]["checkpoint_resume_s"] == [1.0]
        assert data["figures"][0]["key"] == "checkpoint"
    else:
        assert data["skipped"] == {"checkpoint": "cuCheckpointProcessRestore returned 801"}


def test_ways_by_tag_have_their_first_pause_apart(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Way:
        """A process of a way that has ended well."""

        def finish(self, result: Result, timeout_s: float, prefix: str) -> dict[str, float]:
            assert timeout_s > 0
            for seconds in (4.0, 0.4, 0.5):
                result.sample(f"{prefix}_pause_s", seconds)
            result.sample(f"{prefix}_resume_s", 0.5)
            return {"kept_bytes": 20e9}

    started: list[str] = []

    def start(work: Path, way: str, kept_gb: float) -> Way:
        assert kept_gb > 0
        started.append(way)
        return Way()

    monkeypatch.setattr("suite.is_there", lambda module: module == "torch")
    monkeypatch.setattr("race_saver.start", start)
    data = raced(node, cases=named("saver"))
    assert started == ["sublet"] and set(data["skipped"]) == {"saver_retained", "saver_saver"}
    monkeypatch.setattr("race_job.has_rival", lambda: True)
    data = raced(node, cases=named("saver"))
    assert started == ["sublet", "sublet", "retained", "saver"] and data["skipped"] == {}
    assert data["samples"]["saver_retained_first_pause_s"] == [4.0]
    assert data["samples"]["saver_retained_pause_s"] == [0.4, 0.5]
    assert data["samples"]["saver_saver_pause_s"] == [4.0, 0.4, 0.5], "which has no better ones"
    assert data["summary"]["saver_sublet_out_gb_s"]["median"] == pytest.approx(45)


def test_what_a_resume_says_goes_into_the_record() -> None:
    import race_saver
    import sublet

    said = {"phases": [], "wall_us": 12}
    assert json.loads(json.dumps(race_saver.told(sublet.Report("completed", details=said)))) == said
    assert race_saver.told(None) is None


def test_race_that_runs_out_of_time_has_the_figures_that_it_got_to(node: Path) -> None:
    script = (
        "import sys, time, common, race_job\n"
        "race_job.CASES = (race_job.CASES[0], race_job.Row('long', lambda race: (common.arm_deadline(0.2), time.sleep(60))))\n"
        "common.run_job(race_job.parse(sys.argv[1:]), 'race', race_job.body)\n"
    )
    given = [*SMALL, "--cold-host", "--deadline", "120", "--scale", "0", "--out", str(node / "race.json")]
    command = [sys.executable, "-c", script, *given, "--logs", str(node / "logs.txt")]
    done = subprocess.run(command, env=common.child_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == common.EXIT_DEADLINE and "stacks follow" in done.stderr, done.stdout + done.stderr
    record = json.loads((node / "race.json").read_text())[0]
    assert record["status"] == "deadline" and record["samples"]["pinned_out_gb_s"] and record["figures"] == []


def test_wrong_contents_are_found(node: Path) -> None:
    ranks = race_job.Ranks(node, "alone", 1, [race_job.HOLDER], launcher="alone")
    assert ranks.call("hold", 30, size_bytes=20 * MIB, block_bytes=8 * MIB) == [{"bytes": 20 * MIB, "blocks": 3}]
    assert ranks.call("wrong") == [0]
    for what, size in (("tenth", 2 * MIB), ("scattered", 2 * MIB), ("zero", 20 * MIB), ("nothing", 0)):
        assert ranks.call("write", what=what, seed=5) == [size]
        assert ranks.call("wrong") == [0]
    # A run in which somebody else has written.
    script = "import race_memory; p = race_memory.Process(0); p.hold(4 << 20); p._held()._all(9); print(p.wrong())"
    done = subprocess.run([sys.executable, "-c", script], env=common.child_env(), capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1", done.stderr


# ---------------------------------------------------------------- choosing, and what is not there


def test_words_choose_cases_and_the_limit_comes_along(node: Path) -> None:
    race = Race(CASES, race_job.parse(SMALL), Result(node / "race.json", "race", {}), node)
    names = [case.name for case in CASES]
    assert [case.name for case in race.chosen([])] == names
    assert [case.name for case in race.chosen(words_of("swap, check"))] == ["pinned", "swap", "checkpoint"]
    with pytest.raises(JobError, match="no row has nonsense in its name; there are pinned, kept"):
        race.chosen(["swap", "nonsense"])


def test_available_memory_is_read() -> None:
    assert race_job.host_available_bytes("MemTotal: 9 kB\nMemAvailable:   12 kB\n") == 12 * 1024
    assert race_job.host_available_bytes("nothing") == 0


def test_limit_of_the_control_group_is_read(tmp_path: Path) -> None:
    assert race_job.cgroup_left_bytes(tmp_path) is None
    (tmp_path / "memory.current").write_text("30\n")
    for limit, left in (("max", None), ("100", 70), ("10", 0), ("nonsense", None)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert race_job.cgroup_left_bytes(tmp_path) == left


def test_words_that_are_mixed_are_never_all_alike() -> None:
    words = [race_memory.mixed(number, race_memory.seed_of(3, 1)) for number in range(1000)]
    assert len(set(words)) > 990
    assert race_memory.seed_of(3, 1) != race_memory.seed_of(4, 1) != race_memory.seed_of(4, 2)


# ---------------------------------------------------------------- figures


def made_up() -> dict[str, Any]:
    """A record of a run that nobody made: 60 GB in 1.2 s and the like."""
    samples = {
        "pinned_out_gb_s": [54.0, 55.0, 56.0],
        "pinned_in_gb_s": [55.0],
        "pinned_both_gb_s": [50.0],
        "pinned_every_out_gb_s": [100.0],
        "pinned_every_in_gb_s": [120.0],
        "kept_all_pause_s": [1.2, 1.0, 1.1],
        "kept_all_resume_s": [1.5],
        "kept_nothing_pause_s": [0.02],
        "kept_nothing_resume_s": [0.02],
        "every_pause_s": [0.4],
        "every_resume_s": [0.3],
        "swap_s": [1.25],
        "nccl2_pause_s": [0.05, 0.07, 0.06],
        "nccl2_resume_s": [0.1],
        "nccl2_rebuild_destroy_s": [0.5],
        "nccl2_rebuild_rebuild_s": [1.5],
        "nccl2_host_mib": [300.0, 310.0],
    }
    sizes = {"kept_all": 60e9, "kept_nothing": 60e9, "every": 16e9, "swap": 60e9, "nccl2": 1.1e9}
    member = {"who": {"pid": 7}, "report": {"elapsed_us": 30_000}}
    phases = [{"phase": "prepare", "wall_us": 40_000, "members": [member]}, {"phase": "release", "wall_us": 9_000, "members": []}]
    report = {"action": "pause", "wall_us": 50_000, "phases": phases}
    return {
        "name": "race", "date": "2026-01-02T03:04:05+00:00", "commit": "abc1234", "status": "passed", "driver": "580.1",
        "gpu": {"name": "Some GPU", "count": 2}, "versions": {"torch": "2.11.0", "nccl": "2.28.9"},
        "parameters": {"gpus": 2}, "samples": samples, "sizes": sizes, "baseline": {}, "summary": {},
        "told": [report, {"json": {"version": 1, "paused": {"report": report}}}],
    }  # fmt: skip


def test_figures_are_medians_with_limit_baseline_and_what_bounds_them() -> None:
    figures = {each["key"]: each for each in race_figures.figures(made_up())}
    kept = figures["kept_all"]
    assert kept["out"]["median"] == pytest.approx(60 / 1.1) and kept["out"]["count"] == 3
    assert kept["out"]["p99"] == pytest.approx(60 / 1.2), "the slowest, for a rate"
    assert kept["limit"] == {"out": 55.0, "in": 55.0} and kept["unit"] == "GB/s"
    assert figures["every"]["limit"] == {"out": 50.0, "in": 60.0}, "of each GPU"
    assert figures["swap"]["each_way"] and "in" not in figures["swap"]
    assert figures["nccl2"]["out"]["p99"] == pytest.approx(70) and figures["nccl2"]["limit"]["out"] == pytest.approx(20)
    assert all(each["baseline"] and each["bound"] for each in figures.values())
    assert "saver_saver" not in figures, "nothing was measured"


def test_goals_say_what_was_reached_and_fail_nothing() -> None:
    goals = {each["what"]: each for each in race_figures.goals(made_up())}
    assert goals["everything rewritten, out: 95 % of the pinned copy"]["reached"]
    assert not goals["everything rewritten, in: 95 % of the pinned copy"]["reached"]
    assert goals["nothing rewritten, out: 10 times as fast as copying"]["reached"]
    assert goals["swap: 90 % of both ways together"]["reached"]
    assert not goals["nccl2: pause and resume together"]["reached"]


def test_reports_are_found_however_deep() -> None:
    record = made_up()
    assert len(race_figures.reports(record["told"])) == 2


def test_table_has_a_line_for_each_figure() -> None:
    record = made_up()
    record["figures"] = race_figures.figures(record)
    table = race_figures.rows(record)
    assert len(table) == 1 + len(record["figures"]) and len({len(line) for line in table}) == 1
    assert ("swap", "48.0") == (table[3][1], table[3][2])


def test_head_to_head_picture_of_the_readme_is_that_of_its_records() -> None:
    drawn = JOBS.parent / "docs" / "head-to-head.svg"
    assert drawn.read_text() == head_to_head.picture()
    # Sublet is the first bar of each group, and the least of what leaves the GPU as completely.
    for group in head_to_head.groups():
        assert group.bars[0][0] == "Sublet" and group.bars[0][1] < group.bars[1][1]
