//! Signals, and exchanges between experts.

use super::*;

const GROUP: usize = 700;
const HANDLE: usize = 800;

fn signal(peer: i32) -> Signal {
    Signal { peer, index: 0, context: 0 }
}

fn give(fake: &Fake, all: &Collectives, peer: i32) -> NcclResult {
    all.launch(fake, "ncclSignal", (500, Operation::Signal { signal: signal(peer) }), 3, ok)
}

fn signals(fake: &Fake, from: u32, to: u32, rank: u32) -> u64 {
    fake.count(ID, Series::Signal { from, to, index: 0, context: 0 }, rank)
}

#[test]
fn signals_count_by_pair_index_and_context_and_waits_by_what_they_wait_for() {
    let (fake, all) = job();
    give(&fake, &all, 2);
    give(&fake, &all, 2);
    give(&fake, &all, 1);
    assert_eq!((signals(&fake, 1, 2, 1), signals(&fake, 1, 1, 1)), (2, 0), "none to oneself");
    let awaited = [
        Awaited { signal: signal(0), count: 3 },
        Awaited { signal: Signal { index: 4, ..signal(0) }, count: 1 },
        Awaited { signal: signal(1), count: 9 },
    ];
    let wait = Operation::Wait { signals: &awaited };
    assert_eq!(all.launch(&fake, "ncclWaitSignal", (500, wait), 3, || FAILED), FAILED);
    assert_eq!(signals(&fake, 0, 1, 1), 0);
    all.launch(&fake, "ncclWaitSignal", (500, wait), 3, ok);
    assert_eq!(signals(&fake, 0, 1, 1), 3);
    let other = Series::Signal { from: 0, to: 1, index: 4, context: 0 };
    assert_eq!(fake.count(ID, other, 1), 1);
    assert_eq!(signals(&fake, 1, 1, 1), 0);
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn signals_of_a_group_and_of_a_capture_count_when_those_are_launched() {
    let (fake, all) = job();
    all.group_start(ok);
    give(&fake, &all, 2);
    assert_eq!(signals(&fake, 1, 2, 1), 0);
    all.group_end(&fake, ok);
    assert_eq!(signals(&fake, 1, 2, 1), 1);
    fake.capture.set(Some(9));
    let awaited = [Awaited { signal: signal(0), count: 3 }];
    all.launch(&fake, "ncclWaitSignal", (500, Operation::Wait { signals: &awaited }), 3, ok);
    let captured = fake.captured.borrow();
    assert_eq!((captured[&9].len(), captured[&9][0].launches), (1, 3));
    assert_eq!(signals(&fake, 0, 1, 1), 0);
}

/// Makes a group of experts, and a handle of it.
fn experts(fake: &Fake, all: &Collectives) -> NcclResult {
    let made = all.make_expert_group(fake, 500, 24, || {
        // NCCL EP does so, as a part of making a group.
        reduce(fake, all, ok());
        fake.write(24, GROUP);
        ok()
    });
    assert_eq!(made, NcclResult::SUCCESS);
    all.make_expert_handle(fake, GROUP, 32, || {
        fake.write(32, HANDLE);
        ok()
    })
}

fn exchange(fake: &Fake, all: &Collectives, result: NcclResult) -> NcclResult {
    all.exchange(fake, "ncclEpDispatch", HANDLE, 3, || result)
}

fn exchanges(fake: &Fake, group: u32) -> u64 {
    fake.count(ID, Series::Expert { group }, 1)
}

#[test]
fn a_group_of_experts_is_a_collective_and_its_exchanges_have_a_series_of_their_own() {
    let (fake, all) = job();
    experts(&fake, &all);
    assert_eq!(fake.collectives(), 1, "its own collectives are part of it");
    exchange(&fake, &all, ok());
    exchange(&fake, &all, ok());
    exchange(&fake, &all, FAILED);
    assert_eq!((exchanges(&fake, 0), fake.collectives()), (2, 1));
    // The calls of NCCL that make a handle are counted by themselves.
    all.make_expert_handle(&fake, GROUP, 32, || reduce(&fake, &all, ok()));
    assert_eq!(fake.collectives(), 2);
    // A second group has the same number on all ranks, even if some have failed to make one before.
    all.make_expert_group(&fake, 500, 24, || FAILED);
    experts(&fake, &all);
    exchange(&fake, &all, ok());
    assert_eq!((exchanges(&fake, 0), exchanges(&fake, 1)), (2, 1));
}

#[test]
fn an_exchange_is_launched_at_once_in_a_group_of_nccls_and_recorded_by_a_capture() {
    let (fake, all) = job();
    experts(&fake, &all);
    all.group_start(ok);
    all.exchange(&fake, "ncclEpCombine", HANDLE, 3, || {
        assert_eq!(exchanges(&fake, 0), 1);
        ok()
    });
    all.group_end(&fake, || FAILED);
    assert_eq!(exchanges(&fake, 0), 1);
    fake.capture.set(Some(9));
    exchange(&fake, &all, ok());
    assert_eq!(fake.captured.borrow()[&9].len(), 1);
    assert_eq!(exchanges(&fake, 0), 1);
}

#[test]
fn the_values_of_groups_and_handles_may_come_again_while_they_end() {
    let (fake, all) = job();
    experts(&fake, &all);
    // Another thread gets the handle's value before the call returns.
    all.end_expert_handle(HANDLE, || {
        experts(&fake, &all);
        ok()
    });
    exchange(&fake, &all, ok());
    assert_eq!(exchanges(&fake, 1), 1);
    assert_eq!(all.end_expert_handle(HANDLE, || FAILED), FAILED);
    exchange(&fake, &all, ok());
    assert_eq!(exchanges(&fake, 1), 2, "it was not ended");
    all.end_expert_handle(HANDLE, ok);
    exchange(&fake, &all, ok());
    assert_eq!(exchanges(&fake, 1), 2);
    assert_eq!(all.end_expert_group(GROUP, || FAILED), FAILED);
    all.end_expert_group(GROUP, || {
        experts(&fake, &all);
        ok()
    });
    exchange(&fake, &all, ok());
    assert_eq!(exchanges(&fake, 2), 1);
}
