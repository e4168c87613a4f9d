"""Turns on the GPUs."""

from __future__ import annotations

import pytest

import sublet
from package_stage import Stage


@pytest.fixture(autouse=True)
def run_dir(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks where the workers are."""
    monkeypatch.setenv("SUBLET_RUN_DIR", stage.run_dir)


def test_turn_of_a_tenant_that_has_its_gpus_begins_at_once_and_nests(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    worker.do("turn = sublet.turn(); inner = sublet.turn()")
    assert worker.do("turn.__enter__().outcome") == "already"
    assert worker.do("list(inner.__enter__().paused)") == []
    worker.do("inner.__exit__(None, None, None)")
    worker.do("turn.__exit__(None, None, None)")
    kind, args = worker.do("failure(lambda: sublet._library.any_library().turn_end(), 'args')")
    assert kind == "UsageError" and "no turn of this process" in args[0]
    kind, args = worker.do("failure(lambda: sublet.turn(timeout=0).__enter__(), 'args')")
    assert kind == "UsageError" and "timeout" in args[0]


def test_tenant_is_switched_to_from_outside(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    assert train.switch().outcome == "already"
    train.pause()
    report = train.switch()
    assert report.outcome == "completed" and report.paused == ()
    assert "'train' is resumed" in report.reasons[0]
    assert worker.do("memory.read() == b'\\x07' * 4 * MIB") is True
    with pytest.raises(sublet.UsageError, match="nobody"):
        sublet.Tenant("nobody").switch()


def test_tenant_is_resumed_in_its_place_among_those_that_wait(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    assert train.resume(queue=True).outcome == "already"
    train.pause()
    report = train.resume(queue=True, wait=1)
    assert report.outcome == "completed" and report.paused == ()
    assert "'train' is resumed" in report.reasons[0]
    assert report.details["tenant"] == "train"
    assert worker.do("memory.read() == b'\\x07' * 4 * MIB") is True
    with pytest.raises(sublet.UsageError, match="nobody"):
        sublet.Tenant("nobody").resume(queue=True)
    with pytest.raises(sublet.UsageError, match="whole tenant"):
        train.resume(["kv"], queue=True)
