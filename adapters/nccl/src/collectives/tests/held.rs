//! Threads that are held while another ends the communicator that they are about to use.

use std::sync::atomic::AtomicUsize;
use std::sync::{Condvar, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tenants::cut::Limits;

use super::*;

const HOLDER: u64 = 1;
const PARENT: usize = 500;

/// The events of a test, in the order in which they happen.
#[derive(Debug, Default)]
struct Story {
    lines: Mutex<Vec<&'static str>>,
    told: Condvar,
}

impl Story {
    fn tell(&self, line: &'static str) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        self.told.notify_all();
    }

    fn lines(&self) -> Vec<&'static str> {
        self.lines.lock().unwrap().clone()
    }
}

/// A process of several threads: locks protect the parts that they share.
#[derive(Default)]
struct Shared {
    cut: Cut,
    notes: Mutex<Vec<String>>,
    /// The communicator that NCCL has written to place 8.
    made: AtomicUsize,
    story: Story,
}

impl Process for &Shared {
    fn cut(&self) -> &Cut {
        &self.cut
    }
    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
    fn seed(&self) -> u64 {
        1
    }
    fn capture_of(&self, _stream: usize) -> Option<u64> {
        None
    }
    fn add_to_capture(&self, _capture: u64, _increments: Vec<Increment>) {}
    fn communicator_at(&self, _place: usize) -> usize {
        self.made.load(Ordering::SeqCst)
    }
    fn rank_of(&self, _communicator: usize) -> Option<(u32, u32)> {
        None
    }
    fn state_of(&self) -> fn(usize) -> NcclResult {
        |_| NcclResult::SUCCESS
    }
    fn spoil_group(&self) {
        self.story.tell("the group is spoilt");
    }
}

impl Shared {
    fn until_waiting(&self, threads: usize) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.cut.report(0).waiting.len() != threads {
            assert!(Instant::now() < deadline, "{:?}", self.cut.report(0));
            thread::yield_now();
        }
    }
}

/// Makes rank 0 of 2 of communicator `ID`, with a hold in force.
fn held_job() -> (Shared, Collectives) {
    let (shared, all) = (Shared::default(), Collectives::default());
    all.create(&&shared, "init", (ID, 0, 2), 8, || {
        shared.made.store(PARENT, Ordering::SeqCst);
        ok()
    });
    shared.cut.claim(HOLDER);
    assert!(shared.cut.hold(HOLDER, Limits::default()));
    (shared, all)
}

/// Runs `held` on a thread that waits at the hold, and then `leave`. Returns the result of `held`.
fn while_held(
    shared: &Shared,
    held: impl FnOnce() -> NcclResult + Send,
    leave: impl FnOnce() -> NcclResult,
) -> NcclResult {
    thread::scope(|scope| {
        let thread = scope.spawn(held);
        shared.until_waiting(1);
        assert_eq!(leave(), NcclResult::SUCCESS);
        thread.join().unwrap()
    })
}

#[test]
fn a_held_collective_is_turned_back_when_another_thread_aborts_or_revokes() {
    for revoke in [false, true] {
        let (shared, all) = held_job();
        let reduce = || {
            let what = (PARENT, Operation::Collective);
            all.launch(&&shared, "ncclAllReduce", what, 3, || panic!("it entered NCCL"))
        };
        let send = || {
            let what = (PARENT, Operation::Send { peer: 1 });
            all.launch(&&shared, "ncclSend", what, 3, || panic!("it entered NCCL"))
        };
        let leave = || {
            let call = || {
                shared.story.tell("NCCL ends it");
                ok()
            };
            if revoke {
                all.revoke(&&shared, PARENT, call)
            } else {
                all.abort(&&shared, PARENT, call)
            }
        };
        let result = thread::scope(|scope| {
            let other = scope.spawn(send);
            shared.until_waiting(1);
            let thread = scope.spawn(reduce);
            shared.until_waiting(2);
            assert_eq!(leave(), NcclResult::SUCCESS);
            [thread.join().unwrap(), other.join().unwrap()]
        });
        assert_eq!(result, [NcclResult::INVALID_USAGE; 2]);
        let notes = shared.notes.lock().unwrap();
        assert!(notes.iter().any(|note| note.starts_with("ncclAllReduce was held")), "{notes:?}");
        assert!(shared.cut.report(0).waiting.is_empty());
    }
}

#[test]
fn a_group_is_ended_in_failure_before_nccl_frees_what_it_names() {
    let (shared, all) = held_job();
    let group = || {
        all.group_start(ok);
        all.launch(&&shared, "ncclAllReduce", (PARENT, Operation::Collective), 3, ok);
        let result = all.group_end(&&shared, || {
            shared.story.tell("NCCL's group is over");
            FAILED
        });
        // The thread's next group is a new one.
        assert!(!group::is_open() && !group::is_inside());
        result
    };
    let abort = || {
        all.abort(&&shared, PARENT, || {
            shared.story.tell("NCCL frees the communicator");
            ok()
        })
    };
    assert_eq!(while_held(&shared, group, abort), NcclResult::INVALID_USAGE);
    let wanted = ["the group is spoilt", "NCCL's group is over", "NCCL frees the communicator"];
    assert_eq!(shared.story.lines(), wanted);
}

#[test]
fn a_shrinking_is_turned_back_when_its_parent_is_aborted_and_not_when_it_aborts_itself() {
    let (shared, all) = held_job();
    let shrink = || all.shrink(&&shared, (PARENT, false), &[1], 16, || panic!("it entered NCCL"));
    let abort = || all.abort(&&shared, PARENT, ok);
    assert_eq!(while_held(&shared, shrink, abort), NcclResult::INVALID_USAGE);
    assert_eq!(shared.cut.ranks(), [], "what the shrinking took is given back");

    let (shared, all) = held_job();
    let shrink = || all.shrink(&&shared, (PARENT, true), &[1], 16, ok);
    let release = || {
        shared.cut.release();
        ok()
    };
    assert_eq!(while_held(&shared, shrink, release), NcclResult::SUCCESS);
}

#[test]
fn another_communicators_thread_stays_held() {
    let (shared, all) = held_job();
    let other = CommunicatorId(78);
    thread::scope(|scope| {
        let making = scope.spawn(|| all.create(&&shared, "init", (other, 0, 2), 8, ok));
        shared.until_waiting(1);
        all.abort(&&shared, PARENT, ok);
        shared.until_waiting(1);
        shared.cut.release();
        assert_eq!(making.join().unwrap(), NcclResult::SUCCESS);
    });
}
