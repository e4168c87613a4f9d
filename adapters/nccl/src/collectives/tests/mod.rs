//! Tests against an NCCL made of closures: the calls that are counted, and those that are not.

mod derived;
mod held;
mod others;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};

use tenants::cut::{CommunicatorId, Lane};

use super::*;

const ID: CommunicatorId = CommunicatorId(77);
const FAILED: NcclResult = NcclResult(5);

/// The state that NCCL reports of every communicator with a call in progress. Only one test may change it: tests run in threads
/// of one process.
static STATE: AtomicI32 = AtomicI32::new(0);

#[derive(Default)]
struct Fake {
    cut: Cut,
    notes: RefCell<Vec<String>>,
    capture: Cell<Option<u64>>,
    captured: RefCell<HashMap<u64, Vec<Increment>>>,
    places: RefCell<HashMap<usize, usize>>,
    ranks: RefCell<HashMap<usize, (u32, u32)>>,
    spoilt: Cell<u32>,
}

impl Process for Fake {
    fn cut(&self) -> &Cut {
        &self.cut
    }
    fn note(&self, text: &str) {
        self.notes.borrow_mut().push(text.to_owned());
    }
    fn seed(&self) -> u64 {
        1
    }
    fn capture_of(&self, _stream: usize) -> Option<u64> {
        self.capture.get()
    }
    fn add_to_capture(&self, capture: u64, increments: Vec<Increment>) {
        self.captured.borrow_mut().entry(capture).or_default().extend(increments);
    }
    fn communicator_at(&self, place: usize) -> usize {
        self.places.borrow().get(&place).copied().unwrap_or(0)
    }
    fn rank_of(&self, communicator: usize) -> Option<(u32, u32)> {
        self.ranks.borrow().get(&communicator).copied()
    }
    fn state_of(&self) -> fn(usize) -> NcclResult {
        |_| NcclResult(STATE.load(Ordering::SeqCst))
    }
    fn spoil_group(&self) {
        self.spoilt.set(self.spoilt.get() + 1);
    }
}

impl Fake {
    fn count(&self, communicator: CommunicatorId, series: Series, rank: u32) -> u64 {
        self.cut.counter(Lane { communicator, series }, rank).launched()
    }

    fn collectives(&self) -> u64 {
        self.count(ID, Series::Collectives, 1)
    }

    /// Writes `pointer` to `place`, as NCCL does.
    fn write(&self, place: usize, pointer: usize) {
        self.places.borrow_mut().insert(place, pointer);
    }
}

fn ok() -> NcclResult {
    NcclResult::SUCCESS
}

/// Makes rank 1 of 4 of communicator `ID`, at pointer 500.
fn job() -> (Fake, Collectives) {
    let (fake, all) = (Fake::default(), Collectives::default());
    let made = all.create(&fake, "init", (ID, 1, 4), 8, || {
        fake.write(8, 500);
        ok()
    });
    assert_eq!(made, NcclResult::SUCCESS);
    (fake, all)
}

fn reduce(fake: &Fake, all: &Collectives, result: NcclResult) -> NcclResult {
    all.launch(fake, "ncclAllReduce", (500, Operation::Collective), 3, || result)
}

fn send(fake: &Fake, all: &Collectives, peer: i32) -> NcclResult {
    all.launch(fake, "ncclSend", (500, Operation::Send { peer }), 3, ok)
}

#[test]
fn a_communicator_counts_its_making_its_collectives_and_its_end_once() {
    let (fake, all) = job();
    assert_eq!(fake.count(ID, Series::Creation, 1), 1);
    reduce(&fake, &all, ok());
    reduce(&fake, &all, ok());
    assert_eq!(fake.collectives(), 2);
    let end = fake.cut.counter(Lane { communicator: ID, series: Series::End }, 1);
    all.finalize(&fake, 500, ok);
    assert_eq!(end.launched(), 1);
    all.destroy(&fake, 500, ok);
    assert_eq!(end.launched(), 1, "counted once");
    assert_eq!(fake.collectives(), 0, "the rank has left and its counters are gone");
}

#[test]
fn a_call_that_fails_counts_nothing() {
    let (fake, all) = job();
    assert_eq!(reduce(&fake, &all, FAILED), FAILED);
    assert_eq!(fake.collectives(), 0);
    let id = CommunicatorId(78);
    assert_eq!(all.create(&fake, "init", (id, 0, 2), 16, || FAILED), FAILED);
    assert_eq!(fake.count(id, Series::Creation, 0), 0);
}

#[test]
fn messages_count_by_pair_and_none_to_oneself() {
    let (fake, all) = job();
    send(&fake, &all, 2);
    send(&fake, &all, 1);
    all.launch(&fake, "ncclRecv", (500, Operation::Receive { peer: 0 }), 3, ok);
    assert_eq!(fake.count(ID, Series::Pair { from: 1, to: 2 }, 1), 1);
    assert_eq!(fake.count(ID, Series::Pair { from: 0, to: 1 }, 1), 1);
    assert_eq!(fake.count(ID, Series::Pair { from: 1, to: 1 }, 1), 0);
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn a_group_counts_at_its_outermost_end() {
    let (fake, all) = job();
    all.group_start(ok);
    all.group_start(ok);
    send(&fake, &all, 2);
    send(&fake, &all, 2);
    reduce(&fake, &all, ok());
    reduce(&fake, &all, FAILED);
    all.group_end(&fake, ok);
    let sent =
        fake.cut.counter(Lane { communicator: ID, series: Series::Pair { from: 1, to: 2 } }, 1);
    assert_eq!((sent.launched(), fake.collectives()), (0, 0), "nothing is launched yet");
    all.group_end(&fake, || {
        assert_eq!(sent.launched(), 2, "counted before NCCL launches");
        ok()
    });
    assert_eq!((sent.launched(), fake.collectives()), (2, 1));
    reduce(&fake, &all, ok());
    assert_eq!(fake.collectives(), 2, "the group is over");
}

#[test]
fn a_group_that_fails_or_is_simulated_counts_nothing() {
    let (fake, all) = job();
    all.group_start(ok);
    reduce(&fake, &all, ok());
    assert_eq!(all.group_end(&fake, || FAILED), FAILED);
    assert_eq!(fake.collectives(), 0);
    all.group_start(ok);
    reduce(&fake, &all, ok());
    all.group_simulate_end(&fake, ok);
    all.group_start(ok);
    all.group_end(&fake, ok);
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn what_nccl_calls_of_itself_within_a_call_is_part_of_it() {
    let (fake, all) = job();
    let outer = all.launch(&fake, "ncclAlltoAll", (500, Operation::Collective), 3, || {
        all.group_start(ok);
        send(&fake, &all, 2);
        all.group_end(&fake, ok)
    });
    assert_eq!(outer, NcclResult::SUCCESS);
    assert_eq!(fake.collectives(), 1);
    assert_eq!(fake.count(ID, Series::Pair { from: 1, to: 2 }, 1), 0);
}

#[test]
fn under_capture_entries_go_to_the_capture() {
    let (fake, all) = job();
    fake.capture.set(Some(9));
    reduce(&fake, &all, ok());
    reduce(&fake, &all, FAILED);
    all.group_start(ok);
    send(&fake, &all, 2);
    all.group_end(&fake, ok);
    assert_eq!(fake.captured.borrow()[&9].len(), 2);
    fake.capture.set(None);
    assert_eq!(fake.collectives(), 0);
    assert_eq!(fake.count(ID, Series::Pair { from: 1, to: 2 }, 1), 0);
}

#[test]
fn all_ranks_find_the_same_child_by_the_number_of_the_split_and_the_colour() {
    let children = [0, 1].map(|rank| {
        let (fake, all) = (Fake::default(), Collectives::default());
        all.create(&fake, "init", (ID, rank, 2), 8, || {
            fake.write(8, 500);
            ok()
        });
        fake.ranks.borrow_mut().insert(600, (u32::try_from(rank).unwrap(), 2));
        for color in [-1, 3] {
            all.split(&fake, 500, color, 16, || {
                fake.write(16, if color < 0 { 0 } else { 600 });
                ok()
            });
        }
        assert_eq!(fake.count(ID, Series::Collectives, rank.unsigned_abs()), 2);
        all.launch(&fake, "ncclAllReduce", (600, Operation::Collective), 3, ok);
        let child = identity::of_split(ID, 1, 3);
        assert_eq!(fake.count(child, Series::Collectives, rank.unsigned_abs()), 1);
        child
    });
    assert_eq!(children[0], children[1]);
}

#[test]
fn communicators_of_a_group_are_there_when_the_group_has_ended() {
    let (fake, all) = (Fake::default(), Collectives::default());
    let other = CommunicatorId(78);
    all.group_start(ok);
    // NCCL writes the first pointer immediately, and the second at the end.
    all.create(&fake, "init", (ID, 1, 4), 8, || {
        fake.write(8, 500);
        ok()
    });
    all.create(&fake, "init", (other, 0, 4), 16, ok);
    assert_eq!(fake.count(ID, Series::Creation, 1), 0);
    all.group_end(&fake, || {
        fake.write(16, 600);
        ok()
    });
    assert_eq!(fake.count(ID, Series::Creation, 1), 1);
    assert_eq!(fake.count(other, Series::Creation, 0), 1);
    for pointer in [500, 600] {
        all.launch(&fake, "ncclBroadcast", (pointer, Operation::Collective), 3, ok);
    }
    assert_eq!((fake.collectives(), fake.count(other, Series::Collectives, 0)), (1, 1));
}

#[test]
fn all_ranks_of_one_process_are_known() {
    let (fake, all) = (Fake::default(), Collectives::default());
    all.create_all(&fake, 2, 800, || {
        fake.write(800, 500);
        fake.write(808, 501);
        ok()
    });
    let id = identity::of_local(1, 0);
    all.group_start(ok);
    for pointer in [500, 501] {
        all.launch(&fake, "ncclAllReduce", (pointer, Operation::Collective), 3, ok);
    }
    all.group_end(&fake, ok);
    assert_eq!([0, 1].map(|rank| fake.count(id, Series::Collectives, rank)), [1, 1]);
}

#[test]
fn shrinking_is_a_making_for_those_that_stay_and_no_collective() {
    let (fake, all) = job();
    all.shrink(&fake, (500, false), &[0, 3], 16, || {
        fake.write(16, 600);
        ok()
    });
    let child = identity::of_shrink(ID, 0, &[0, 3]);
    assert_eq!(fake.count(child, Series::Creation, 0), 1, "rank 1 is the first that stays");
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn unknown_and_revoked_communicators_pass_and_are_noted_once() {
    let (fake, all) = job();
    for _ in 0..2 {
        let result = all.launch(&fake, "ncclAllReduce", (999, Operation::Collective), 3, || FAILED);
        assert_eq!(result, FAILED);
    }
    assert_eq!(fake.notes.borrow().len(), 1);
    all.revoke(&fake, 500, ok);
    assert_eq!(reduce(&fake, &all, ok()), NcclResult::SUCCESS);
    all.abort(&fake, 500, ok);
    assert_eq!(fake.collectives(), 0);
    assert_eq!(fake.notes.borrow().len(), 1);
}

#[test]
fn a_pointer_that_comes_again_is_the_new_communicator() {
    let (fake, all) = job();
    reduce(&fake, &all, ok());
    all.destroy(&fake, 500, ok);
    let next = CommunicatorId(78);
    all.create(&fake, "init", (next, 0, 2), 8, ok);
    reduce(&fake, &all, ok());
    assert_eq!(fake.count(next, Series::Collectives, 0), 1);
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn a_child_of_a_split_that_goes_on_is_there_once_the_application_is_told() {
    let (fake, all) = job();
    fake.ranks.borrow_mut().insert(600, (0, 2));
    let split = all.split(&fake, 500, 3, 16, || NcclResult::IN_PROGRESS);
    assert_eq!(split, NcclResult::IN_PROGRESS);
    assert_eq!(fake.collectives(), 1);
    assert_eq!(all.state(&fake, 500, || NcclResult::IN_PROGRESS), NcclResult::IN_PROGRESS);
    fake.write(16, 600);
    assert_eq!(all.state(&fake, 500, ok), NcclResult::SUCCESS);
    all.launch(&fake, "ncclAllReduce", (600, Operation::Collective), 3, ok);
    assert_eq!(fake.count(identity::of_split(ID, 0, 3), Series::Collectives, 0), 1);
    assert_eq!(fake.notes.borrow().len(), 0);
}

#[test]
fn a_call_that_goes_on_is_over_when_nccl_says_so_or_the_application_knows() {
    let (fake, all) = job();
    let communicator = all.communicators.find(500).unwrap();
    reduce(&fake, &all, NcclResult::IN_PROGRESS);
    assert_eq!(fake.collectives(), 1);
    STATE.store(NcclResult::IN_PROGRESS.0, Ordering::SeqCst);
    assert!(!communicator.is_finished(fake.state_of()));
    let inside = |fake: &Fake| fake.cut.report(0).inside.into_iter().map(|call| call.what);
    assert_eq!(inside(&fake).collect::<Vec<_>>(), ["ncclAllReduce"], "a cut waits for its launch");
    STATE.store(NcclResult::SUCCESS.0, Ordering::SeqCst);
    assert_eq!(inside(&fake).count(), 0);
    assert!(communicator.is_finished(fake.state_of()));
    // NCCL is not queried any more once the application knows.
    reduce(&fake, &all, NcclResult::IN_PROGRESS);
    all.state(&fake, 500, ok);
    assert!(communicator.is_finished(|_| NcclResult::IN_PROGRESS));
    reduce(&fake, &all, NcclResult::IN_PROGRESS);
    all.abort(&fake, 500, ok);
    assert!(communicator.is_finished(|_| NcclResult::IN_PROGRESS));
}
