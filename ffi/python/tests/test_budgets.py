"""How much GPU memory a tenant may hold."""

from __future__ import annotations

import pytest

import sublet
from package_stage import Stage
from simdriver import MIB

OUT_OF_MEMORY = ["DriverError", ["cuMemAlloc_v2 failed with 2"]]


@pytest.fixture(autouse=True)
def run_dir(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks where the workers are."""
    monkeypatch.setenv("SUBLET_RUN_DIR", stage.run_dir)


def test_a_process_shows_and_changes_the_budget_of_its_tenant(stage: Stage) -> None:
    worker = stage.worker("infer")
    worker.do("memory = simdriver.allocate(16 * MIB, fill=7)")
    none = worker.do("sublet.budget()")
    assert none == {"tenant": "infer", "budgets": None, "gpus": [], "failures": []}
    changed = worker.do("sublet.budget('0=24MiB')")
    assert (changed["outcome"], changed["budgets"], changed["failures"]) == ("completed", "0=24MiB", [])
    gpu = changed["gpus"][0]
    assert (gpu["index"], gpu["budget_bytes"], gpu["held_bytes"]) == (0, 24 * MIB, 16 * MIB)
    assert gpu["uuid"].startswith("GPU-") and gpu["total_bytes"] > 24 * MIB
    assert worker.do("failure(lambda: simdriver.allocate(16 * MIB), 'args')") == OUT_OF_MEMORY
    # Less than is held takes nothing away.
    assert worker.do("sublet.budget({0: '8MiB'})['gpus'][0]['held_bytes']") == 16 * MIB
    assert worker.do("memory.read() == b'\\x07' * 16 * MIB") is True
    assert worker.do("sublet.budget('none')['gpus'][0]['budget_bytes']") is None
    worker.do("more = simdriver.allocate(16 * MIB)")


def test_another_tenant_has_its_budget_changed_from_outside(stage: Stage) -> None:
    workers = [stage.worker("infer") for _ in range(2)]
    for worker in workers:
        worker.do("memory = simdriver.allocate(4 * MIB)")
    infer = sublet.Tenant("infer")
    assert infer.budget()["gpus"] == []
    changed = infer.budget("1=64MiB,0=6MiB")
    # Each worker has simulated GPUs of its own.
    assert sum(gpu["held_bytes"] for gpu in changed["gpus"] if gpu["index"] == 0) == 8 * MIB
    shown = infer.budget()
    assert shown["budgets"] == "0=6MiB,1=64MiB" and "outcome" not in shown
    assert infer.stats()["budgets"] == shown["gpus"]
    assert workers[1].do("failure(lambda: simdriver.allocate(4 * MIB), 'args')") == OUT_OF_MEMORY
    assert not sublet.attached()


@pytest.mark.parametrize("wrong", ["60PB", "", "gpu=1GiB", "0=1GiB,0=2GiB", "0=1GiB\0", {}, {0: "many"}, 40, [("0", "1GiB")]])
def test_what_is_no_budget_is_refused_and_changes_nothing(stage: Stage, wrong: object) -> None:
    worker = stage.worker("infer")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    with pytest.raises((sublet.UsageError, ValueError)) as caught:
        sublet.Tenant("infer").budget(wrong)  # type: ignore[arg-type]
    if "\0" not in str(wrong):
        assert isinstance(caught.value, sublet.UsageError) and "budget" in str(caught.value)
    assert sublet.Tenant("infer").budget()["budgets"] is None


def test_a_tenant_that_nobody_is_in_and_a_process_outside_are_told(stage: Stage) -> None:
    for change in (None, "1GiB"):
        with pytest.raises(sublet.UsageError, match="nobody"):
            sublet.Tenant("nobody").budget(change)
        with pytest.raises(sublet.NotAttachedError):
            sublet.budget(change)
    launcher = stage.worker("infer")
    kind, args = launcher.do("failure(lambda: sublet.budget('1GiB'), 'args')")
    assert kind == "UsageError" and "infer" in args[0]
