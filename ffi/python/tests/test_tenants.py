"""Driving tenants from a process that is not under Sublet."""

from __future__ import annotations

import pytest

import sublet
from package_stage import TIMEOUT_S, Stage


@pytest.fixture(autouse=True)
def run_dir(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks where the workers are."""
    monkeypatch.setenv("SUBLET_RUN_DIR", stage.run_dir)


def test_driving_does_not_attach_the_driver_process(stage: Stage) -> None:
    assert sublet.tenants() == []
    assert not sublet.attached()


def test_tenant_is_paused_and_resumed_from_outside(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    assert sublet.tenants() == ["train"]
    assert train.state == "active"
    assert train.pause(leave_lent=True).outcome == "completed"
    assert train.state == "paused"
    assert train.pause().outcome == "already"
    assert worker.do("sublet.is_paused()") is True
    members = train.stats()["members"]
    assert [member["member"]["pid"] for member in members] == [worker.pid]
    assert train.resume().outcome == "completed"
    assert worker.do("memory.read() == b'\\x07' * 4 * MIB") is True
    assert not sublet.attached()


def test_host_memory_of_a_first_pause_is_brought_in_before(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    assert train.prepare(wait=False)["outcome"] in ("partial", "completed")
    report = train.prepare(timeout=TIMEOUT_S)
    assert report["outcome"] == "completed"
    host = train.stats()["members"][0]["host"]
    assert host["held_bytes"] == host["wanted_bytes"] == 4 << 20
    train.pause()
    train.resume()
    assert train.stats()["members"][0]["host"]["held_bytes"] == host["held_bytes"]
    assert worker.do("memory.read() == b'\\x07' * 4 * MIB") is True
    with pytest.raises(sublet.UsageError, match="nobody"):
        sublet.Tenant("nobody").prepare()
    with pytest.raises(sublet.UsageError, match="leave timeout out"):
        train.prepare(wait=False, timeout=1)


def test_thread_that_needs_a_device_waits_and_others_run_on(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    train.pause()
    worker.do("thread = threading.Thread(target=lambda: done.append(simdriver.allocate(2 * MIB, fill=1)))")
    worker.do("done = []; thread.start()")
    assert worker.do("thread.join(0.2)") is None
    assert worker.do("(thread.is_alive(), len(done))") == [True, 0]
    train.resume()
    worker.do(f"thread.join({TIMEOUT_S})")
    assert worker.do("done[0].read() == b'\\x01' * 2 * MIB") is True


def test_tags_of_all_processes_leave_and_the_processes_run_on_as_agreed(stage: Stage) -> None:
    workers = [stage.worker("train") for _ in range(2)]
    for worker in workers:
        worker.do("weights = sublet.region('weights', runs_without=True)(simdriver.allocate)(4 * MIB, fill=7)")
        worker.do("other = simdriver.allocate(2 * MIB, fill=9)")
    train = sublet.Tenant("train")
    train.pause("weights")
    for worker in workers:
        assert worker.do("(sublet.is_paused('weights'), sublet.is_paused())") == [True, False]
        assert worker.do("other.read() == b'\\x09' * 2 * MIB") is True
    train.resume(["weights"])
    for worker in workers:
        assert worker.do("weights.read() == b'\\x07' * 4 * MIB") is True
    with pytest.raises(sublet.UsageError, match="caches") as caught:
        train.pause("caches")
    assert caught.value.tags == ("weights",)


def test_processes_that_have_not_agreed_stand_still_without_a_tag(stage: Stage) -> None:
    workers = [stage.worker("train") for _ in range(2)]
    for worker, agreed in zip(workers, (True, False)):
        worker.do(f"weights = sublet.region('weights', runs_without={agreed})(simdriver.allocate)(4 * MIB, fill=7)")
    train = sublet.Tenant("train")
    report = train.pause("weights")
    assert (report.outcome, report.stayed_bytes, report.details["stands_still"]) == ("completed", 0, True)
    for worker in workers:
        # Not as a whole.
        assert worker.do("(sublet.is_paused('weights'), sublet.is_paused())") == [True, False]
    assert train.pause("weights").outcome == "already"
    # The rest.
    assert (train.pause().outcome, train.pause().outcome) == ("completed", "already")
    for worker in workers:
        assert worker.do("sublet.is_paused()") is True
    train.resume()
    for worker in workers:
        assert worker.do("weights.read() == b'\\x07' * 4 * MIB") is True


def test_tags_of_one_process_or_of_its_tenant(stage: Stage) -> None:
    one, other = stage.worker("train"), stage.worker("train")
    for worker in (one, other):
        worker.do("weights = sublet.region('weights')(simdriver.allocate)(4 * MIB, fill=7)")
    one.do("sublet.pause('weights')")
    assert (one.do("sublet.is_paused('weights')"), other.do("sublet.is_paused('weights')")) == (True, False)
    one.do("sublet.Tenant().pause('weights')")
    assert other.do("sublet.is_paused('weights')") is True
    one.do("sublet.Tenant().resume()")
    for worker in (one, other):
        assert worker.do("weights.read() == b'\\x07' * 4 * MIB") is True


def test_process_without_device_memory_pauses_its_tenant(stage: Stage) -> None:
    launcher, worker = stage.worker("train"), stage.worker("train")
    worker.do("weights = sublet.region('weights')(simdriver.allocate)(4 * MIB, fill=7)")
    launcher.do("sublet.pause()")
    assert worker.do("sublet.is_paused()") is True
    launcher.do("sublet.resume()")
    assert worker.do("sublet.is_paused()") is False
    worker.do("sublet.pause('weights')")
    launcher.do("sublet.resume()")
    assert worker.do("weights.read() == b'\\x07' * 4 * MIB") is True


def test_processes_pause_together_without_the_interpreter_lock(stage: Stage) -> None:
    one, other = stage.worker("train"), stage.worker("train")
    for worker in (one, other):
        worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    one.do("pause = threading.Thread(target=sublet.pause, kwargs={'together': True}); pause.start()")
    never = "threading.Event().wait(0.01)"
    for _ in range(20):
        # Its main thread runs on, while the other one waits for `other`.
        assert one.do(f"{never} or pause.is_alive()") is True
    other.do("sublet.pause(together=True)")
    one.do(f"pause.join({TIMEOUT_S})")
    assert one.do("sublet.is_paused()") is True and other.do("sublet.is_paused()") is True
    one.tell("sublet.resume(together=True)")
    other.do("sublet.resume(together=True)")
    one.answer()
    assert one.do("memory.read() == b'\\x07' * 4 * MIB") is True


def test_process_that_does_not_pause_together_is_named(stage: Stage) -> None:
    one = stage.worker("train", SUBLET_WAIT="1s")
    other = stage.worker("train")
    for worker in (one, other):
        worker.do("memory = simdriver.allocate(2 * MIB)")
    kind, args = one.do("failure(lambda: sublet.pause(together=True), 'args')")
    assert kind == "RetryError" and f"process {other.pid} has not called" in args[0]
    assert one.do("sublet.is_paused()") is False


def test_together_takes_no_tags_and_no_timeout(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(2 * MIB)")
    for arguments in ("tags='kv'", "timeout=1"):
        code = f"failure(lambda: sublet.pause({arguments}, together=True), 'tags')"
        assert worker.do(code) == ["UsageError", []]


def test_tenants_are_swapped(stage: Stage) -> None:
    workers = {name: stage.worker(name) for name in ("train", "infer")}
    for worker in workers.values():
        worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
    train, infer = sublet.Tenant("train"), sublet.Tenant("infer")
    assert sublet.tenants() == ["infer", "train"]
    infer.pause()
    train.swap_to(infer)
    assert workers["train"].do("sublet.is_paused()") and not workers["infer"].do("sublet.is_paused()")
    sublet.swap("infer", train)
    assert not workers["train"].do("sublet.is_paused()") and workers["infer"].do("sublet.is_paused()")
    assert workers["train"].do("memory.read() == b'\\x07' * 4 * MIB") is True
    infer.resume()


def test_tenants_are_swapped_by_tag(stage: Stage) -> None:
    workers = {name: stage.worker(name) for name in ("train", "infer")}
    for worker in workers.values():
        worker.do("memory = simdriver.allocate(4 * MIB, fill=7)")
        worker.do("with sublet.region('kv'): cache = simdriver.allocate(4 * MIB, fill=8)")
    train, infer = sublet.Tenant("train"), sublet.Tenant("infer")
    infer.pause("kv")
    done = train.swap_to(infer, "kv")
    assert done.paused.details["window_bytes"] == done.resumed.details["window_bytes"] > 0
    assert (done.paused.freed_bytes, done.resumed.returned_bytes) == (4 << 20, 4 << 20)
    assert workers["train"].do("sublet.is_paused('kv')") and not workers["train"].do("sublet.is_paused()")
    assert workers["infer"].do("cache.read() == b'\\x08' * 4 * MIB") is True
    # All of the one, for a tag of the other.
    sublet.swap(infer, "train", in_tags=["kv"])
    assert workers["infer"].do("sublet.is_paused()") is True
    assert workers["train"].do("cache.read() == b'\\x08' * 4 * MIB") is True
    with pytest.raises(sublet.UsageError, match="no memory with the tag 'no'"):
        train.swap_to(infer, out_tags="no")
    with pytest.raises(sublet.UsageError, match="no tag is named"):
        train.swap_to(infer, [])
    infer.resume()


def test_tenant_that_is_not_there_is_named(stage: Stage) -> None:
    nobody = sublet.Tenant("nobody")
    for call in (nobody.pause, nobody.resume, nobody.stats):
        with pytest.raises(sublet.UsageError, match="nobody"):
            call()
    with pytest.raises(sublet.UsageError):
        sublet.Tenant("no/name").pause()


def test_command_of_the_package_drives_tenants_too(stage: Stage) -> None:
    worker = stage.worker("train")
    worker.do("memory = simdriver.allocate(4 * MIB)")
    ran = stage.run("-m", "sublet", "ps")
    assert ran.returncode == 0 and "train" in ran.stdout and str(worker.pid) in ran.stdout
    assert stage.run("-m", "sublet", "pause", "train").returncode == 0
    assert worker.do("sublet.is_paused()") is True
    assert stage.run("-m", "sublet", "resume", "train").returncode == 0
