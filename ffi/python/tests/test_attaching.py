"""Coming under Sublet in a process that was started without."""

from __future__ import annotations

from package_stage import Stage


def test_attached_process_pauses_as_a_preloaded_one(stage: Stage) -> None:
    worker = stage.worker(None)
    assert worker.do("sublet.attached()") is False
    worker.do("report = sublet.attach('train')")
    assert worker.do("[report.tenant, report.was_preloaded]") == ["train", False]
    assert worker.do("report.launches_are_held and not report.reserved_bytes") is True
    assert worker.do("[row['state'] for row in report.libraries if 'ctypes' in row['path']]") == ["hooked"]
    assert worker.do("sublet.attached()") is True
    worker.do("weights = sublet.region('weights')(simdriver.allocate)(4 * MIB, fill=7)")
    worker.do("sublet.pause('weights')")
    assert worker.do("sublet.is_paused('weights')") is True
    worker.do("sublet.resume()")
    worker.do("sublet.pause(); sublet.resume()")
    assert worker.do("weights.read() == b'\\x07' * 4 * MIB") is True
    # Again is fine; another tenant is not.
    assert worker.do("sublet.attach() is sublet.attach('train') is report") is True
    kind, args = worker.do("failure(lambda: sublet.attach('other'), 'args')")
    assert kind == "UsageError" and "'train'" in args[0] and "'other'" in args[0]


def test_memory_from_before_stays_and_its_devices_are_reported(stage: Stage) -> None:
    worker = stage.worker(None)
    worker.do("early = simdriver.allocate(4 * MIB, fill=7)")
    report = worker.do("[(row['device'], row['used_bytes']) for row in sublet.attach('train').devices]")
    assert report == [[0, 4 << 20]]


def test_bad_name_attaches_nothing(stage: Stage) -> None:
    worker = stage.worker(None)
    kind, _ = worker.do("failure(lambda: sublet.attach('no/name'), 'args')")
    assert kind == "UsageError"
    assert worker.do("sublet.attached()") is False


def test_a_call_for_another_tenant_names_no_family(stage: Stage) -> None:
    for worker in (stage.worker("train"), stage.worker(None)):
        worker.do("sublet.attach('train')")
        kind, _ = worker.do("failure(lambda: sublet.attach('other', family='rl'), 'args')")
        assert kind == "UsageError"
        worker.do("weights = simdriver.allocate(4 * MIB, fill=7)")
        assert " rl " not in stage.run("-m", "sublet", "ps").stdout


def test_a_family_is_named_with_the_tenant_and_is_one_for_life(stage: Stage) -> None:
    worker = stage.worker(None)
    kind, args = worker.do("failure(lambda: sublet.attach('train', family='no/name'), 'args')")
    assert kind == "UsageError" and "no family's name" in args[0]
    assert worker.do("sublet.attached()") is False
    worker.do("sublet.attach('train', family='rl')")
    worker.do("weights = simdriver.allocate(4 * MIB, fill=7)")
    listed = stage.run("-m", "sublet", "ps").stdout
    assert listed.split()[:2] == ["TENANT", "FAMILY"] and " rl " in listed
    worker.do("sublet.attach('train', family='rl')")
    kind, args = worker.do("failure(lambda: sublet.attach('train', family='other'), 'args')")
    assert kind == "UsageError" and "family rl" in args[0] and "other" in args[0]
