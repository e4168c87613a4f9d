"""A tenant's name is for one launch, and what runs outside of all tenants is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sublet
from package_stage import FOLDER, TIMEOUT_S, Stage, simulated_node
from simdriver import MIB

PACKAGE = Path(sublet.__file__).parent
#: A process with memory on the GPU, until its input ends.
HOLDS = (
    f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import simdriver; "
    "memory = simdriver.allocate(8 << 20); print('taken', flush=True); sys.stdin.read()"
)
START_CHILD = f"""
import os, subprocess, sys
environment = {{name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}}
child = subprocess.Popen([sys.executable, "-c", {HOLDS!r}], env=environment, stdin=-1, stdout=-1)
child.stdout.readline()
"""


def start(stage: Stage, *words: str, **variables: str) -> subprocess.Popen[str]:
    command = [str(PACKAGE / "bin/sublet"), *words]
    environment = {**stage.environment(), **variables}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def said(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out + errors


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """A node of its own, which NVIDIA's management library knows too."""
    return {**simulated_node(tmp_path / "node", 256 * MIB), "LD_LIBRARY_PATH": str(PACKAGE / "lib/simulated")}


def test_second_job_of_a_name_is_refused_and_joins_when_it_says_so(stage: Stage) -> None:
    worker = stage.worker("infer")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    code, text = said(start(stage, "run", "--tenant", "infer", "--", "true"))
    assert code == 1
    assert f"'infer' runs already: process {worker.pid}" in text and "waiting for up to 10 s" in text
    assert "sublet run --join --tenant infer -- COMMAND" in text
    code, text = said(start(stage, "run", "--join", "--tenant", "infer", "--", "true"))
    assert code == 0 and "this job joins it" in text


def test_second_job_of_a_name_waits_for_the_end_of_the_first(stage: Stage) -> None:
    worker = stage.worker("infer")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    second = start(stage, "run", "--tenant", "infer", "--", "echo", "begun")
    assert second.stderr is not None
    assert "waiting for up to 10 s" in second.stderr.readline()
    worker.close()
    assert said(second) == (0, "begun\n")


@pytest.mark.parametrize("launcher", [{"PMIX_NAMESPACE": "prterun-1"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}])
def test_ranks_of_one_launcher_are_one_job(stage: Stage, launcher: dict[str, str]) -> None:
    worker = stage.worker("train", **launcher)
    worker.do("memory = simdriver.allocate(4 * MIB)")
    assert said(start(stage, "run", "--tenant", "train", "--", "true", **launcher)) == (0, "")


def test_job_may_start_parts_of_itself_under_its_name(stage: Stage) -> None:
    inner = f"import subprocess, sys; sys.exit(subprocess.call([{str(PACKAGE / 'bin/sublet')!r}, 'run', '--', 'true']))"
    assert said(start(stage, "run", "--tenant", "train", "--", sys.executable, "-c", inner)) == (0, "")


def test_process_id_is_taken_for_its_tenant(stage: Stage) -> None:
    worker = stage.worker("infer")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    code, text = said(start(stage, "pause", str(worker.pid)))
    assert code == 0 and "paused tenant 'infer'" in text
    code, text = said(start(stage, "resume", str(worker.pid)))
    assert code == 0 and "resumed tenant 'infer'" in text
    code, text = said(start(stage, "pause", str(os.getpid())))
    assert code == 1 and f"process {os.getpid()}" in text and "was not started under `sublet run`" in text


def test_pause_waits_for_a_job_that_has_no_memory_yet(stage: Stage) -> None:
    waits = start(stage, "pause", "late", "--wait")
    worker = stage.worker("late")
    worker.tell("memory = simdriver.allocate(4 * MIB)")
    code, text = said(waits)
    assert code == 0 and "paused tenant 'late'" in text
    assert said(start(stage, "resume", "late"))[0] == 0
    assert said(start(stage, "pause", "nobody", "--wait", "100ms"))[0] == 1


def test_child_that_runs_outside_is_named_by_ps_and_by_a_pause(stage: Stage, node: dict[str, str]) -> None:
    worker = stage.worker("train", **node)
    worker.do("memory = simdriver.allocate(16 * MIB)")
    worker.do(START_CHILD)
    child = worker.do("child.pid")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], env={**stage.environment(), **node}, stdin=-1, stdout=-1
    ) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        listed: dict[int, Any] = {
            process["pid"]: process["strayed_from"] for process in document(stage, node, "ps", "--json")["outside"]
        }
        assert listed == {child: "train", stranger.pid: None}
        _, text = said(start(stage, "ps", **node))
        assert text.count("(outside Sublet)") == 2 and f"process {child} (" in text
        code, text = said(start(stage, "pause", "train", **node))
        assert code == 3 and "started by this job, runs outside Sublet: no pause moves its 8 MiB" in text
        paused = document(stage, node, "pause", "train", "--json")
        assert paused["outcome"] == "partial" and [stray["pid"] for stray in paused["strayed"]] == [child]
        stranger.communicate()
    worker.do("child.communicate()")
    assert said(start(stage, "pause", "train", **node))[0] == 0


def document(stage: Stage, variables: dict[str, str], *words: str) -> Any:
    return json.loads(said(start(stage, *words, **variables))[1])
