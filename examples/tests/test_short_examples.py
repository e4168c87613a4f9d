"""The short examples do what they say on the simulated driver; those that need PyTorch say that they do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0
SUBLET = [sys.executable, "-m", "sublet"]
SIMULATE = [*SUBLET, "simulate", "--"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S)


def simulated(name: str) -> str:
    """What an example prints on simulated GPUs, where it succeeds."""
    done = run(*SIMULATE, sys.executable, str(EXAMPLES / name))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tags_leave_one_by_one() -> None:
    said = simulated("tags.py")
    free = [int(line.split()[-3]) for line in said.splitlines() if line.endswith("MiB free")]
    assert free == [320, 448, 512, 320], said
    assert "the weights are as they were" in said and "first saved byte: 7" in said


def test_grpo_by_turns_learns_what_it_learns_without() -> None:
    said = simulated("grpo.py")
    rewards = [float(line.split()[3].rstrip(";")) for line in said.splitlines() if line.startswith("step ")]
    assert len(rewards) == 8 and rewards[-1] > 2 * rewards[0], said
    assert "the policy is the one that is learned without turns" in said


def test_two_tenants_swap() -> None:
    said = simulated("swap.py")
    assert said.count("infer to train in") == 3 and "counted to 3 and 3" in said, said


def test_two_tenants_take_turns() -> None:
    said = simulated("turns.py")
    assert said.count("train, turn") == said.count("infer, turn") == 3, said
    # The first of train at least needs the memory of the other.
    assert "infer made way" in said and "counted to 3 and 3" in said, said


def test_a_budget_refuses_and_admits() -> None:
    said = simulated("budgets.py")
    assert "the GPU has 128 MiB, 64 MiB free" in said
    assert "96 MiB more: cuMemAlloc_v2 failed with 2" in said and "96 MiB more: allocated" in said, said


def test_a_family_hands_over_and_names_who_has_it_open() -> None:
    said = simulated("families.py")
    assert "the bytes that arrived are right" in said and "cudaIpcCloseMemHandle" in said
    assert "a pause of the lender now: completed" in said, said


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
@pytest.mark.parametrize("name", ["graphs.py", "nccl_alone.py", "pause_torchrun.py"])
def test_without_pytorch_an_example_says_so(name: str) -> None:
    done = run(*SIMULATE, sys.executable, str(EXAMPLES / name))
    assert done.returncode == 2 and "needs PyTorch" in done.stderr, done.stdout + done.stderr


def test_the_c_program_pauses_by_ncclpause(tmp_path: Path) -> None:
    program = tmp_path / "nccl_pause"
    made = run(os.environ.get("CC", "cc"), "-Wall", "-Wextra", "-Werror", "-o", str(program), str(EXAMPLES / "nccl_pause.c"), "-ldl")
    assert made.returncode == 0, made.stderr
    simulate = [*SUBLET, "simulate", "--memory", "256MiB", "--"]
    alone = run(*simulate, str(program))
    assert alone.returncode == 2 and "sublet run --tenant train" in alone.stderr
    under = run(*simulate, *SUBLET, "run", "--tenant", "train", "--", str(program))
    assert under.returncode == 0, under.stdout + under.stderr
    free = [int(line.split()[1]) for line in under.stdout.splitlines() if line.endswith("MiB free")]
    assert free == [192, 256, 192], under.stdout
    assert "the bytes are as they were" in under.stdout


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    scripts = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".c") and path.name not in ("device.py", "stage.py")]
    for name in scripts:
        assert f"({name}" in table, name
