//! The hold of the cut in every interleaving of a thread that launches and one that holds.
//!
//! A launch adds to a counter that no ordering helps along. A thread that reports a process at rest must find in the
//! report what that counter says, and find it unchanged until it lets go. Loom reports a deadlock where a launch is
//! never woken. Each ordering of `cut/mod.rs` and `cut/hold.rs` was weakened by hand to see a model here fail.

use std::time::{Duration, Instant};

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use sublet_loom::cut::{
    CommunicatorId, Cut, CutReport, Increment, Lane, Limits, Rank, Seen, Series,
};
use sublet_loom::explore;

const HOLDER: u64 = 1;
const COMMUNICATOR: CommunicatorId = CommunicatorId(7);
const COLLECTIVES: Lane = Lane { communicator: COMMUNICATOR, series: Series::Collectives };
const END: Lane = Lane { communicator: COMMUNICATOR, series: Series::End };

#[derive(Debug, Default)]
struct Process {
    cut: Cut,
    /// What has really been launched.
    launched: AtomicU64,
}

impl Process {
    fn increment(&self, lane: Lane) -> [Increment; 1] {
        [Increment { counter: self.cut.counter(lane, 0), launches: 1 }]
    }

    fn launch(&self, increments: &[Increment]) {
        let _launch = self.cut.enter("ncclAllReduce", increments);
        self.launched.fetch_add(1, Ordering::Relaxed);
    }

    fn hold(&self, limit: u64) {
        let mut limits = Limits::default();
        limits.raise(COLLECTIVES, limit);
        self.cut.claim(HOLDER);
        assert!(self.cut.hold(HOLDER, limits));
    }

    /// Watches the held process from `report` on, as a coordinator does, until it `is` as wanted.
    fn watch(&self, mut report: CutReport, is: impl Fn(&CutReport) -> bool) -> CutReport {
        let asked = self.cut.claim(HOLDER);
        let far = Instant::now() + Duration::from_hours(1);
        while !is(&report) {
            let looked = self.cut.watch(report.seen, asked, far, &|| 0);
            report = looked.unwrap_or_else(|| panic!("nobody holds it"));
        }
        report
    }
}

/// A process, and a thread in it that launches `times`.
fn launching(times: usize) -> (std::sync::Arc<Process>, thread::JoinHandle<()>) {
    let process = std::sync::Arc::new(Process::default());
    let own = std::sync::Arc::clone(&process);
    let increment = process.increment(COLLECTIVES);
    let launcher = thread::spawn(move || {
        for _ in 0..times {
            own.launch(&increment);
        }
    });
    (process, launcher)
}

fn count(report: &CutReport) -> u64 {
    report.counters.iter().map(|counter| counter.launched).sum()
}

#[test]
fn a_launch_let_through_before_the_hold_is_counted_or_seen_inside() {
    explore(4, || {
        // The second time the thread has its slot: no lock orders it and the holder.
        let (process, launcher) = launching(2);
        process.hold(0);
        let report = process.cut.report(0);
        if report.inside.is_empty() {
            assert_eq!(process.launched.load(Ordering::Relaxed), count(&report));
        }
        process.cut.release();
        launcher.join().unwrap();
    });
}

#[test]
fn who_is_at_rest_launches_nothing_until_it_is_let_go() {
    explore(2, || {
        let (process, launcher) = launching(1);
        process.hold(0);
        let seen = process.cut.report(0);
        // The launch waits, or will, or is over and counted. A thread that finds itself held shows inside for a
        // moment, as it steps out.
        if seen.seen.at_rest {
            let again = process.cut.report(0);
            assert_eq!(count(&again), count(&seen));
            assert_eq!(process.launched.load(Ordering::Relaxed), count(&seen));
        }
        process.cut.release();
        launcher.join().unwrap();
    });
}

#[test]
fn a_held_launch_passes_as_soon_as_the_limits_admit_it() {
    explore(2, || {
        let (process, launcher) = launching(2);
        process.hold(1);
        process.hold(2);
        // Nothing lets go: the limits do.
        launcher.join().unwrap();
        let report = process.cut.report(0);
        assert_eq!(count(&report), 2);
        assert!(report.seen.at_rest, "{report:?}");
    });
}

#[test]
fn no_more_passes_than_the_limits_admit() {
    explore(2, || {
        let (process, launcher) = launching(2);
        process.hold(1);
        let before = process.cut.report(0);
        // Where the hold came before the first launch, the second waits.
        if count(&before) == 0 && before.inside.is_empty() {
            let full = Seen { waits: 1, at_rest: true };
            let report = process.watch(before, |report| report.seen == full);
            assert_eq!(count(&report), 1);
            assert_eq!(process.launched.load(Ordering::Relaxed), 1);
        }
        process.cut.release();
        launcher.join().unwrap();
    });
}

#[test]
fn a_launch_that_fails_makes_room_for_one_that_waits() {
    explore(4, || {
        let process = std::sync::Arc::new(Process::default());
        process.hold(1);
        let increment = process.increment(COLLECTIVES);
        let failing = process.cut.enter("ncclAllReduce", &increment);
        let own = std::sync::Arc::clone(&process);
        let other = increment.clone();
        let launcher = thread::spawn(move || own.launch(&other));
        failing.not_launched();
        launcher.join().unwrap();
        assert_eq!(count(&process.cut.report(0)), 1);
    });
}

#[test]
fn a_hold_ends_with_its_holder_for_those_who_wait() {
    explore(4, || {
        let (process, launcher) = launching(1);
        process.hold(0);
        process.cut.abandon(HOLDER);
        launcher.join().unwrap();
        assert_eq!(process.launched.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn while_the_tenant_stands_paused_only_the_end_of_a_communicator_passes() {
    explore(2, || {
        let process = std::sync::Arc::new(Process::default());
        process.cut.pause();
        let threads = [COLLECTIVES, END].map(|lane| {
            let own = std::sync::Arc::clone(&process);
            let increment = process.increment(lane);
            thread::spawn(move || own.launch(&increment))
        });
        let [launcher, ender] = threads;
        ender.join().unwrap();
        assert_eq!(process.launched.load(Ordering::Relaxed), 1);
        process.cut.release();
        launcher.join().unwrap();
    });
}

#[test]
fn who_watches_learns_of_a_launch_that_waits() {
    explore(2, || {
        let (process, launcher) = launching(1);
        process.hold(0);
        let first = process.cut.report(0);
        let over = |report: &CutReport| count(report) == 1;
        if !over(&first) {
            let waits = |report: &CutReport| !report.waiting.is_empty() || over(report);
            process.watch(first, waits);
        }
        process.cut.release();
        launcher.join().unwrap();
    });
}

#[test]
fn who_ends_a_communicator_meets_no_held_thread_with_it_in_hand() {
    explore(2, || {
        let process = std::sync::Arc::new(Process::default());
        process.cut.add_rank(Rank { communicator: COMMUNICATOR, rank: 0, ranks: 2 });
        process.hold(0);
        let own = std::sync::Arc::clone(&process);
        let increment = process.increment(COLLECTIVES);
        let launcher = thread::spawn(move || {
            let withdrawal = own.cut.enter_if_there("ncclGroupEnd", &increment, &[]).unwrap_err();
            // What it does with the communicator here, it must do before that is freed.
            assert_eq!(own.launched.load(Ordering::Relaxed), 0, "it is freed");
            drop(withdrawal);
        });
        let first = process.cut.report(0);
        process.watch(first, |report| !report.waiting.is_empty());
        process.cut.give_up_rank(COMMUNICATOR, 0);
        assert!(process.cut.wait_for_withdrawals(COMMUNICATOR, Duration::from_hours(1)));
        process.launched.store(1, Ordering::Relaxed);
        launcher.join().unwrap();
        assert!(process.cut.report(0).waiting.is_empty());
    });
}
