"""The machinery of the GPU lane's jobs, without a GPU and without torch: `runner.py` and the modules next to it.

A name that is not there costs minutes on a machine with GPUs, so every job is imported here too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import subprocess
import sys
import symtable
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the jobs are written for Python 3.11", allow_module_level=True)

FOLDER = Path(__file__).resolve().parent

import cli  # noqa: E402
import common  # noqa: E402
import driver  # noqa: E402
import phases  # noqa: E402
from common import JobError, Result  # noqa: E402
from observer import Observer  # noqa: E402
from runner import Child, Process, Ranks  # noqa: E402

MIB = common.MIB
STEPS, SAYS = str(FOLDER / "steps.py"), str(FOLDER / "says.py")
FILES = sorted(path for folder in common.FOLDERS for glob in ("*.py", "programs/*.py") for path in folder.glob(glob))
MODULES = {path.stem for path in FILES if path.parent in common.FOLDERS}
#: What is no script of its own: it is imported, or run by others.
PARTS = {
    "bench_ops", "checksum", "cli", "common", "compact", "driver", "head_to_head", "launch", "observer", "pairs", "phases",
    "captured_calls", "deep_calls", "deep_libraries", "deep_memory", "engines_figures", "engines_offline",
    "engines_serve", "engines_tools", "engines_train", "engines_verl", "larger_models", "larger_picture", "larger_weights",
    "race_figures", "race_memory", "race_nccl", "race_saver", "rank", "runner", "sim_node", "suite", "summary", "training_run",
}  # fmt: skip
SCRIPTS = [path for path in FILES if path.parent in common.FOLDERS and path.stem not in PARTS]


@pytest.fixture
def result(work: Path) -> Result:
    """An empty record."""
    return Result(work / "result.json", "test", {})


def checks(result: Result) -> dict[str, bool]:
    """The verdicts so far."""
    return {entry["what"]: entry["passed"] for entry in result.data["checks"]}


# ---------------------------------------------------------------- ranks


def shows_when_there(monkeypatch: pytest.MonkeyPatch, process: Process, words: str) -> None:
    """Has `process` show its output once these words are in it: on a busy machine it may be late with what it was told to write."""
    as_it_is = process.show

    def show(what: str) -> None:
        common.wait_until(f"'{words}' of {process.label}", lambda: words in process.tail(8000), 60)
        as_it_is(what)

    monkeypatch.setattr(process, "show", show)


@pytest.mark.parametrize("launcher", ["launch", "alone"])
def test_ranks_do_steps_and_answer_in_order(work: Path, launcher: str) -> None:
    world = 3 if launcher == "launch" else 1
    ranks = Ranks(work, "ranks", world, [STEPS], launcher=launcher)
    assert ranks.call("who", 60) == [{"rank": rank, "world": world} for rank in range(world)]
    assert ranks.call("who", 60, ranks=[world - 1]) == [{"rank": world - 1, "world": world}]
    assert len(set(ranks.pids.values())) == world
    ranks.close()
    assert ranks.process.returncode == 0
    assert ranks.tail().count("left in order") == world


def test_label_is_used_again(work: Path) -> None:
    for _ in range(2):
        ranks = Ranks(work, "ranks", 1, [STEPS], launcher="alone")
        assert ranks.call("who", 60)
        ranks.close()


def test_failed_step_names_rank_and_reason_and_the_ranks_go_on(work: Path) -> None:
    ranks = Ranks(work, "ranks", 2, [STEPS])
    with pytest.raises(JobError, match=r"ranks rank 1, fail: JobError: too hot"):
        ranks.call("fail", 60, ranks=[1], why="too hot")
    with pytest.raises(JobError, match=r"rank \d, nonsense: KeyError"):
        ranks.call("nonsense", 60)
    assert len(ranks.call("who", 60)) == 2


def test_passed_deadline_shows_stacks_and_the_late_answer_is_dropped(
    work: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(work, "ranks", 2, [STEPS])
    shows_when_there(monkeypatch, ranks, "hang_in_here")
    entered, release = work / "entered", work / "release"
    chosen = ranks.send("hang", [0], entered=str(entered), release=str(release))
    common.wait_until("the hang", entered.exists, 60)
    with pytest.raises(JobError, match=r"ranks \[0\] did not finish hang within 0 s"):
        ranks.collect("hang", chosen, 0.4)
    shown = capfd.readouterr().out
    assert "hang_in_here" in shown and "stacks and last output" in shown
    release.touch()
    assert [reply["rank"] for reply in ranks.call("who", 60)] == [0, 1]


def test_dead_rank_is_named_with_its_last_words(work: Path) -> None:
    ranks = Ranks(work, "ranks", 2, [STEPS], env={"LAUNCH_KEEP_SURVIVORS": "1"})
    pid = ranks.pids[1]
    with pytest.raises(JobError, match=rf"ranks rank 1 \(process {pid}\) ended during die: goodbye"):
        ranks.call("die", 60, ranks=[1], words="goodbye")
    with pytest.raises(JobError, match=r"rank 1 \(process \d+\) ended"):
        ranks.call("who", 60)
    assert ranks.call("who", 60, ranks=[0])[0]["rank"] == 0
    ranks.kill()
    assert ranks.ended


def test_rank_that_cannot_start_says_why(work: Path) -> None:
    with pytest.raises(JobError, match="ended with 1 at start: no GPU on this machine"):
        Ranks(work, "ranks", 1, [STEPS, "--cannot-start"], launcher="alone")


def test_step_may_answer_twice(work: Path) -> None:
    ranks = Ranks(work, "ranks", 1, [STEPS])
    chosen = ranks.send("ask_again")
    assert ranks.collect("the first half", chosen, 60) == ["half way"]
    ranks.links[0].send({"word": "go"})
    assert ranks.collect("the second half", chosen, 60) == ["go"]


# ---------------------------------------------------------------- ranks under Sublet


def resident_bytes(stats: dict[str, Any]) -> int:
    """What a process holds on devices."""
    return sum(entry["resident_bytes"] for device in stats["pool"]["devices"] for entry in device["memory"])


@pytest.fixture
def tenant(work: Path) -> Ranks:
    """Two processes with 8 MiB each."""
    ranks = Ranks(work, "tenant", 2, [STEPS], tenant=f"runner-{os.getpid()}")
    assert ranks.call("take", 60, size_bytes=8 * MIB) == [True, True]
    return ranks


def test_two_programs_may_be_one_tenant(tenant: Ranks, work: Path) -> None:
    other = Ranks(work, "other", 1, [STEPS], tenant=tenant.tenant)
    assert other.call("take", 60, size_bytes=MIB) == [True]
    (shown,) = cli.tenants(cli.sublet("ps", "--json"))
    assert shown["tenant"] == tenant.tenant and len(shown["members"]) == 3


def test_rank_without_a_tenant_is_not_under_sublet(work: Path) -> None:
    assert Ranks(work, "plain", 1, [STEPS]).call("take", 60, size_bytes=MIB) == [False]


@pytest.mark.parametrize(("how", "who"), [("together", None), ("tenant", [1])])
def test_ranks_pause_and_resume_from_inside(tenant: Ranks, how: str, who: list[int] | None) -> None:
    assert [resident_bytes(stats) for stats in tenant.call("stats")] == [8 * MIB] * 2
    for action, state, held in (("pause", "paused", 0), ("resume", "active", 8 * MIB)):
        replies = tenant.call("act", 60, ranks=who, how=how, action=action)
        assert all(reply["seconds"] > 0 for reply in replies)
        stats = tenant.call("stats")
        assert [each["member"]["state"] for each in stats] == [state] * 2
        assert [resident_bytes(each) for each in stats] == [held] * 2


def test_discarded_region_is_not_saved_and_the_log_has_the_numbers(tenant: Ranks) -> None:
    tenant.call("take_in_region", 30, size_bytes=4 * MIB)
    tenant.call("act", 60, ranks=[0], how="tenant", action="pause")
    stats = tenant.call("stats", 60, print_too=True)[0]
    saved = phases.phase_table(stats["last_pause"])["prepare"]["bytes"]
    assert saved == phases.copied_bytes(stats["last_pause"]) == 8 * MIB
    assert "tag=scratch contents=Discard own=4194304 resident=0" in tenant.tail()


def test_command_is_recorded_and_its_phases_are_gathered(tenant: Ranks) -> None:
    gathered = phases.Phases()
    for action in ("pause", "resume"):
        told = cli.sublet(action, str(tenant.tenant), "--json", timeout_s=60)
        assert told["exit"] == 0, cli.say(told)
        gathered.add(action, told["json"]["report"])
    assert gathered.flat_walls()["pause.prepare"][0] > 0
    assert gathered.summaries()["pause"]["prepare"]["bytes"]["median"] == 16 * MIB
    gathered.print()
    refused = cli.sublet("pause", "no-such-tenant", timeout_s=60)
    assert refused["exit"] != 0 and "no-such-tenant" in cli.say(refused)


# ---------------------------------------------------------------- observer and driver


def test_observer_sees_takes_and_holds_memory(work: Path) -> None:
    observer = Observer(work)
    before = observer.settled_free()
    assert observer.info["count"] == len(before) > 1
    assert observer.hold([[0, 16 * MIB], [1, MIB]]) == [16 * MIB, MIB]
    assert [then - now for then, now in zip(before, observer.free(), strict=True)][:2] == [16 * MIB, 2 * MIB]
    assert observer.drop() == 2
    assert observer.settled_free() == before
    taken = observer.take([[0, MIB, 4 * MIB], [1, 0, before[1] * 2]])
    assert [entry["allocated"] for entry in taken] == [True, False]
    observer.close()


def test_block_keeps_its_address_while_its_memory_goes_and_comes(work: Path) -> None:
    script = (
        "import driver\n"
        "gpus = driver.Driver(); gpus.use(0); unit = driver.granularity_bytes(0)\n"
        "before = gpus.free()[0]; gpus.use(0)\n"
        "block = driver.Block(0, unit + 1, unit=unit); there = gpus.free()[0]; gpus.use(0)\n"
        "assert before - there == 2 * unit, (before, there)\n"
        "gpus.fill(block.address, 7, 16); gpus.synchronize()\n"
        "interface = block.__cuda_array_interface__\n"
        "assert interface['data'] == (block.address, False) and interface['shape'] == (unit + 1,)\n"
        "block.unmap_and_release(); assert gpus.free()[0] == before; gpus.use(0)\n"
        "block.create_and_map(); gpus.fill(block.address, 9, 16); gpus.synchronize()\n"
        "import ctypes; word = ctypes.c_uint32()\n"
        "driver.copy(ctypes.addressof(word), block.address, 4); assert word.value == 9, word\n"
        "try: driver.call('cuMemRelease', ctypes.c_uint64(12345))\n"
        "except driver.DriverError as error: assert error.name == 'cuMemRelease' and error.code\n"
        "else: raise AssertionError\n"
    )
    environment = common.child_env()
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_array_interface_has_what_torch_reads() -> None:
    assert driver.array_interface(4096, 3, "<f4") == {
        "shape": (3,),
        "typestr": "<f4",
        "data": (4096, False),
        "version": 3,
        "strides": None,
    }


# ---------------------------------------------------------------- children


def test_what_a_child_says_is_in_the_record(work: Path, result: Result) -> None:
    child = Child(work, "child", [SAYS])
    assert child.wait_fact("ready", 60) == [1, 2]
    assert child.finish(result, 60) == {"ready": [1, 2]}
    assert checks(result) == {"child: one is one": True, "child: one is two": False, "child: ended by itself": True}
    assert result.data["samples"] == {"child_seconds": [1.5]}
    assert result.data["versions"]["torch"] == "none"
    assert json.loads(result.path.read_text())[0]["facts"] == {"child": {"ready": [1, 2]}}
    assert child.tail() == "last words"


def test_failed_child_is_a_failed_check_with_its_last_line(work: Path, result: Result) -> None:
    child = Child(work, "child", [SAYS, "fail"])
    child.finish(result, 60, prefix="it")
    entry = result.data["checks"][-1]
    assert not entry["passed"] and entry["detail"].startswith("exit 5: last words")
    with pytest.raises(JobError, match="ended with 5 before 'more'"):
        child.wait_fact("more", 60)


def test_late_child_writes_its_stacks_and_is_ended(
    work: Path, result: Result, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(work, "child", [SAYS, "hang"])
    shows_when_there(monkeypatch, child, "sleep_in_here")
    child.wait_fact("entered", 60)
    child.finish(result, 0.5)
    assert "sleep_in_here" in capfd.readouterr().out
    assert not checks(result)["child: ended by itself"] and child.ended


# ---------------------------------------------------------------- a whole job


JOB = """
import sys, time
import common
from runner import Ranks

def body(args, result, work):
    ranks = Ranks(work, "ranks", 2, [{steps!r}])
    result.sample("pids", list(ranks.pids.values()))
    result.save()
    {end}

args = common.job_parser(None, 60).parse_args(sys.argv[1:])
common.run_job(args, "job", body)
"""


def is_running(pid: int) -> bool:
    """Whether a process is there, and no mere entry that its parent has not read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        ("ranks.close()", 0, "passed"),
        ("result.check('is right', False)", 1, "failed"),
        ("ranks.call('die', 60, words='goodbye')", 1, "error"),
        # That of the options may come before the ranks have.
        ("common.arm_deadline(0.2); time.sleep(200)", common.EXIT_DEADLINE, "deadline"),
    ],
)
def test_job_writes_its_record_and_leaves_nobody(work: Path, end: str, code: int, status: str) -> None:
    script, out = work / "job.py", work / "out.json"
    script.write_text(JOB.format(steps=STEPS, end=end))
    command = [sys.executable, str(script), "--out", str(out), "--logs", str(work / "logs.txt"), "--deadline", "120"]
    done = subprocess.run(command, env=common.child_env(), capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stdout + done.stderr
    record = json.loads(out.read_text())[0]
    assert record["status"] == status
    if status == "deadline":
        assert "stacks follow" in done.stderr and " in body" in done.stderr
    if status == "error":
        assert "goodbye" in record["notes"][0]
    common.wait_until("the end of all ranks", lambda: not any(map(is_running, record["samples"]["pids"][0])), 60)
    assert "ranks.log" in (work / "logs.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--deadline", "1"], "the job"),
        (["--role", "says", "--cycles", "3"], "3 of kind a, 2.5, False"),
        (["--role", "says", "--kind", "b", "--deep", "--much", "7"], "5 of kind b, 2.5, True, 7"),
    ],
)
def test_file_is_the_job_or_the_role_that_is_named(work: Path, arguments: list[str], says: str) -> None:
    script, out = work / "job.py", work / "out.json"
    script.write_text(
        "import time, runner, suite\n"
        "runner.versions = dict\n"
        "def body(args, result, work):\n    result.note('the job')\n    time.sleep(200)\n"
        "def says(args):\n    print(f'{args.cycles} of kind {args.kind}, {args.share}, {args.deep}', *([f', {args.much}'] if args.much else []), sep='')\n"
        "parse = suite.options(None, 60, cycles=(5, 'text'), share=2.5, kind=['a', 'b'], deep=False, much=int, role=suite.role_of('says'))\n"
        "suite.main(parse, lambda args: f'job_{args.kind}', body, {'says': says})\n"
    )
    command = [sys.executable, str(script), "--out", str(out), "--logs", str(work / "logs.txt"), *arguments]
    done = subprocess.run(command, env=common.child_env(), capture_output=True, text=True, timeout=120)
    assert says in done.stdout, done.stdout + done.stderr
    if says == "the job":
        (record,) = json.loads(out.read_text())
        assert (done.returncode, record["name"], record["status"]) == (common.EXIT_DEADLINE, "job_a", "deadline")
    else:
        assert done.returncode == 0 and '"name": "versions"' in done.stdout


# ---------------------------------------------------------------- every file


def is_builtin(name: str) -> bool:
    return hasattr(builtins, name) or name in {"__file__", "__name__", "__doc__"}


def undefined_names(path: Path) -> list[str]:
    """Names that a file uses and nobody defines."""
    table = symtable.symtable(path.read_text(), str(path), "exec")
    at_top = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    at_top |= {child.get_name() for child in table.get_children()}
    found: list[str] = []

    def walk(scope: symtable.SymbolTable) -> None:
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            if symbol.is_referenced() and symbol.is_global() and name not in at_top and not is_builtin(name):
                found.append(f"{path.name}: {name} in {scope.get_name()}")
        for child in scope.get_children():
            walk(child)

    walk(table)
    return found


def missing_of_own_modules(path: Path) -> list[str]:
    """Names that a file takes from modules next to it and that are not there."""
    tree = ast.parse(path.read_text())
    own: dict[str, str] = {}
    found: list[str] = []

    def check(module: str, name: str) -> None:
        if not hasattr(importlib.import_module(module), name):
            found.append(f"{path.name}: {module}.{name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            own |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                check(node.module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            check(own[node.value.id], node.attr)
    return found


@pytest.mark.parametrize("find", [undefined_names, missing_of_own_modules])
def test_every_name_of_every_job_is_there(find: Callable[[Path], list[str]]) -> None:
    assert [name for path in FILES for name in find(path)] == []


@pytest.mark.parametrize("job", SCRIPTS, ids=lambda path: path.stem)
def test_job_can_be_imported_and_reads_its_options(job: Path) -> None:
    command = [sys.executable, str(job), "--dry-run"]
    done = subprocess.run(command, env=common.child_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("dry run of "), done.stderr


def test_every_suite_has_its_job() -> None:
    text = (FOLDER.parent / "run.sh").read_text()
    jobs = set(re.findall(r"\b(?:\w+_job|selfcheck|conformance)\.py\b", text))
    assert jobs | {"scaling_job.py"} == {path.name for path in SCRIPTS}, "scaling needs no GPU"
