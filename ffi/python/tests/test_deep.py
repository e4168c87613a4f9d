"""Nothing is left on the devices: pauses by the command, which alone can have the driver freeze and thaw a process."""

from __future__ import annotations

from pathlib import Path

import pytest

import sublet
from package_stage import Stage, simulated_node
from simdriver import MIB
from worker import Worker

DEVICE_BYTES = 512 * MIB
CONTEXT_BYTES = 64 * MIB


@pytest.fixture
def variables(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What processes need to meet on a node; this one and the command have it too."""
    found = {**simulated_node(tmp_path / "node", DEVICE_BYTES), "SIMCUDA_CONTEXT_BYTES": str(CONTEXT_BYTES)}
    for name, value in {**stage.environment(), **found}.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def train(stage: Stage, variables: dict[str, str]) -> Worker:
    """A process of the tenant `train` with memory."""
    worker = stage.worker("train", **variables)
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    return worker


def is_right(worker: Worker) -> bool:
    """Has it the bytes that it had?"""
    return bool(worker.do("memory.read() == b'\\x07' * 4 * MIB"))


def state(name: str) -> str:
    """Where its first process stands."""
    return str(sublet.Tenant(name).stats()["members"][0]["member"]["state"])



def test_another_tenant_is_paused_deep_and_resumed_as_ever(train: Worker) -> None:
    tenant = sublet.Tenant("train")
    report = tenant.pause(deep=True)
    assert (report.outcome, report.freed_bytes, state("train")) == ("completed", 4 * MIB, "deep")
    assert tenant.pause(deep=True).outcome == "already"
    report = tenant.resume()
    assert (report.outcome, report.returned_bytes, state("train")) == ("completed", 4 * MIB, "active")
    assert is_right(train)
    # One that is paused already is deepened.
    tenant.pause()
    with tenant.paused(deep=True):
        assert state("train") == "deep"
    assert state("train") == "active" and is_right(train)


def test_process_pauses_itself_deep_and_comes_back(train: Worker) -> None:
    assert train.do("sublet.pause(deep=True).outcome") == "completed"
    assert state("train") == "deep" and train.do("sublet.is_paused()") is True
    assert train.do("sublet.resume().outcome") == "completed"
    assert is_right(train)
    train.do("with sublet.paused(deep=True):\n    inside = sublet.Tenant().stats()['members'][0]['member']['state']")
    assert train.do("inside") == "deep" and state("train") == "active"
    assert is_right(train)


def test_tenant_that_makes_way_in_a_swap_goes_deep(
    train: Worker, stage: Stage, variables: dict[str, str]
) -> None:
    infer = stage.worker("infer", **variables)
    infer.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    sublet.Tenant("infer").pause()
    report = sublet.swap("train", "infer", deep=True)
    assert (report.paused.outcome, report.resumed.outcome) == ("completed", "completed")
    assert (state("train"), state("infer")) == ("deep", "active")
    # The other way the one that comes is thawed.
    sublet.Tenant("infer").swap_to("train")
    assert (state("train"), state("infer")) == ("active", "paused")
    assert is_right(train)
    sublet.Tenant("infer").resume()
    assert is_right(infer)


def test_what_the_command_refuses_is_raised_as_ever(train: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sublet.UsageError, match="there is no tenant 'nobody'"):
        sublet.Tenant("nobody").pause(deep=True)
    for arguments in ("'kv', deep=True", "deep=True, together=True"):
        kind, _ = train.do(f"failure(lambda: sublet.pause({arguments}), 'args')")
        assert kind == "UsageError"
    # The driver that the command finds knows of no such process.
    monkeypatch.delenv("SIMCUDA_NODE")
    with pytest.raises(sublet.RefusedError, match="cannot be paused deep.*sublet pause train"):
        sublet.Tenant("train").pause(deep=True)
    assert is_right(train)
