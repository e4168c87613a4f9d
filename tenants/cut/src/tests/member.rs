//! The member's side: who is let through, who is counted, and who is told of.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::super::*;

const COORDINATOR: u64 = 7;

pub(super) fn lane(communicator: u128, series: Series) -> Lane {
    Lane { communicator: CommunicatorId(communicator), series }
}

pub(super) fn collectives(communicator: u128) -> Lane {
    lane(communicator, Series::Collectives)
}

pub(super) fn local(communicator: u128, rank: u32, ranks: u32) -> Rank {
    Rank { communicator: CommunicatorId(communicator), rank, ranks }
}

pub(super) fn limits(of: &[(Lane, u64)]) -> Limits {
    let mut limits = Limits::default();
    for (lane, limit) in of {
        limits.raise(*lane, *limit);
    }
    limits
}

pub(super) fn increment(cut: &Cut, lane: Lane, launches: u64) -> Increment {
    Increment { counter: cut.counter(lane, 0), launches }
}

pub(super) fn hold(cut: &Cut, of: &[(Lane, u64)]) -> u64 {
    let asked = cut.claim(COORDINATOR);
    assert!(cut.hold(COORDINATOR, limits(of)));
    asked
}

/// Waits until so many threads wait at the hold.
pub(super) fn until_waiting(cut: &Cut, threads: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while cut.report(0).waiting.len() != threads {
        assert!(Instant::now() < deadline, "{:?}", cut.report(0));
        thread::yield_now();
    }
}

#[test]
fn an_open_cut_counts_and_lets_through() {
    let cut = Cut::default();
    cut.add_rank(local(1, 0, 2));
    let increments = [increment(&cut, collectives(1), 1), increment(&cut, collectives(2), 3)];
    drop(cut.enter("ncclAllReduce", &increments));
    let launch = cut.enter("ncclAllReduce", &increments);
    assert_eq!(cut.report(0).inside.len(), 1);
    assert_eq!(cut.report(0).inside[0].what, "ncclAllReduce");
    drop(launch);
    let report = cut.report(0);
    assert!(report.inside.is_empty() && report.waiting.is_empty());
    let counts: Vec<_> = report.counters.iter().map(|counter| counter.launched).collect();
    assert_eq!(counts, [2, 6]);
    assert_eq!(report.ranks, [local(1, 0, 2)]);
}

#[test]
fn a_launch_that_failed_is_not_counted() {
    let cut = Cut::default();
    let increments = [increment(&cut, collectives(1), 2)];
    cut.enter("ncclAllReduce", &increments).not_launched();
    assert_eq!(increments[0].counter.launched(), 0);
    assert!(cut.report(0).inside.is_empty());
}

#[test]
fn a_call_within_a_call_passes_and_counts_nothing() {
    let cut = Cut::default();
    let increments = [increment(&cut, collectives(1), 1)];
    let outer = cut.enter("ncclGroupEnd", &increments);
    hold(&cut, &[]);
    drop(cut.enter("ncclAllReduce", &increments));
    cut.enter("ncclAllReduce", &increments).not_launched();
    assert_eq!(cut.report(0).inside.len(), 1);
    drop(outer);
    assert!(cut.report(0).inside.is_empty());
    assert_eq!(increments[0].counter.launched(), 1);
}

#[test]
fn a_held_launch_waits_for_all_of_its_lanes() {
    let cut = Cut::default();
    let (a, b) = (collectives(1), collectives(2));
    let group = [increment(&cut, a, 1), increment(&cut, b, 2)];
    hold(&cut, &[(a, 1)]);
    thread::scope(|scope| {
        let late = scope.spawn(|| drop(cut.enter("ncclGroupEnd", &group)));
        until_waiting(&cut, 1);
        let report = cut.report(0);
        assert_eq!(report.waiting[0].what, "ncclGroupEnd");
        let needed: Vec<_> = report.waiting[0].needs.iter().map(|n| (n.lane, n.needed)).collect();
        assert_eq!(needed, [(a, 1), (b, 2)]);
        hold(&cut, &[(a, 1), (b, 1)]);
        assert_eq!(cut.report(0).counters.iter().map(|counter| counter.launched).sum::<u64>(), 0);
        hold(&cut, &[(a, 1), (b, 2)]);
        late.join().unwrap();
        drop(cut.enter("nothing", &[]));
        assert!(cut.report(0).is_at_rest(&limits(&[(a, 1), (b, 2)])));
        let next = scope.spawn(|| drop(cut.enter("ncclGroupEnd", &group)));
        until_waiting(&cut, 1);
        cut.release();
        next.join().unwrap();
    });
    assert_eq!(group[0].counter.launched(), 2);
}

#[test]
fn several_entries_on_one_post_add_up() {
    let cut = Cut::default();
    let a = collectives(1);
    let group = [increment(&cut, a, 1), increment(&cut, a, 1)];
    hold(&cut, &[(a, 1)]);
    thread::scope(|scope| {
        scope.spawn(|| drop(cut.enter("ncclGroupEnd", &group)));
        until_waiting(&cut, 1);
        hold(&cut, &[(a, 2)]);
    });
    assert_eq!(group[0].counter.launched(), 2);
}

#[test]
fn while_the_tenant_stands_paused_only_the_end_of_a_communicator_passes() {
    let cut = Cut::default();
    let end = [increment(&cut, lane(1, Series::End), 1)];
    let more = [increment(&cut, collectives(1), 1)];
    cut.pause();
    drop(cut.enter("ncclCommDestroy", &end));
    thread::scope(|scope| {
        let launch = scope.spawn(|| drop(cut.enter("ncclAllReduce", &more)));
        until_waiting(&cut, 1);
        // A coordinator that went away after the pause leaves it paused.
        cut.claim(COORDINATOR);
        cut.abandon(COORDINATOR);
        assert_eq!(cut.report(0).waiting.len(), 1);
        assert!(!launch.is_finished());
        cut.release();
    });
}

#[test]
fn a_hold_ends_with_its_holder_and_is_not_begun_after() {
    let cut = Cut::default();
    let increments = [increment(&cut, collectives(1), 1)];
    hold(&cut, &[]);
    thread::scope(|scope| {
        scope.spawn(|| drop(cut.enter("ncclAllReduce", &increments)));
        until_waiting(&cut, 1);
        cut.abandon(COORDINATOR + 1);
        assert!(cut.is_held());
        cut.abandon(COORDINATOR);
    });
    assert!(!cut.is_held());
    assert!(!cut.hold(COORDINATOR, Limits::default()));
    assert!(!cut.is_held());
}

#[test]
fn a_watcher_hears_of_a_wait_of_rest_and_of_the_end() {
    let cut = Cut::default();
    let a = collectives(1);
    let increments = [increment(&cut, a, 1)];
    let far = Instant::now() + Duration::from_mins(10);
    let asked = hold(&cut, &[]);
    let first = cut.watch(Seen::default(), asked, far, &|| 0).unwrap();
    assert!(first.seen.at_rest);
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(cut.enter("ncclAllReduce", &increments));
        });
        let waits = cut.watch(first.seen, asked, far, &|| 0).unwrap();
        assert_eq!(waits.waiting.len(), 1);
        let asked = hold(&cut, &[(a, 1)]);
        let behind = Seen { at_rest: false, ..waits.seen };
        let rest = cut.watch(behind, asked, far, &|| 0).unwrap();
        assert!(rest.seen.at_rest);
        assert_eq!(rest.counters[0].launched, 1);
        // A capture keeps it from rest.
        assert!(!cut.watch(rest.seen, asked, far, &|| 1).unwrap().seen.at_rest);
        // Another request ends the watch; so does the end of the hold.
        let seen = rest.seen;
        let watched = &cut;
        let newer = scope.spawn(move || watched.watch(seen, asked, far, &|| 0));
        let asked = cut.claim(COORDINATOR);
        assert!(newer.join().unwrap().is_some());
        cut.abandon(COORDINATOR);
        assert_eq!(cut.watch(rest.seen, asked, far, &|| 0), None);
    });
}

#[test]
fn work_that_goes_on_after_its_call_keeps_the_process_from_rest() {
    let cut = Cut::default();
    let a = lane(1, Series::Creation);
    let increments = [increment(&cut, a, 1)];
    let (tell, hear) = mpsc::channel::<()>();
    let hear = Mutex::new(hear);
    let launch = cut.enter("ncclCommInitRankConfig", &increments);
    launch.unfinished(Box::new(move || hear.lock().unwrap().try_recv().is_ok()));
    let report = cut.report(0);
    assert_eq!(report.inside.len(), 1);
    assert_eq!(report.inside[0].what, "ncclCommInitRankConfig");
    tell.send(()).unwrap();
    assert!(cut.report(0).inside.is_empty());
}

#[test]
fn an_identity_is_text_for_people_and_a_number_on_the_wire() {
    let id = CommunicatorId((0xab12_cd34 << 96) + 7);
    let text = serde_json::to_string(&id).unwrap();
    assert_eq!(text, "\"ab12cd34000000000000000000000007\"");
    assert_eq!(serde_json::from_str::<CommunicatorId>(&text).unwrap(), id);
    let bytes = postcard::to_stdvec(&id).unwrap();
    assert_eq!(postcard::from_bytes::<CommunicatorId>(&bytes).unwrap(), id);
    assert_eq!(id.to_string(), "ab12cd34");
}

#[test]
fn a_seat_that_is_left_takes_its_counts_with_it() {
    let cut = Cut::default();
    cut.add_rank(local(1, 0, 2));
    cut.add_rank(local(2, 0, 2));
    drop(cut.enter("ncclAllReduce", &[increment(&cut, collectives(1), 1)]));
    drop(cut.enter("ncclAllReduce", &[increment(&cut, collectives(2), 1)]));
    cut.remove_rank(CommunicatorId(1), 0);
    let report = cut.report(0);
    assert_eq!(report.ranks, [local(2, 0, 2)]);
    assert_eq!(report.counters.len(), 1);
}

#[test]
fn a_rank_that_has_not_begun_is_behind() {
    let cut = Cut::default();
    cut.add_rank(local(1, 3, 4));
    let report = cut.report(0);
    let pair = |from, to| lane(1, Series::Pair { from, to });
    let all = limits(&[(collectives(1), 2), (pair(0, 3), 1), (pair(0, 1), 1), (collectives(2), 5)]);
    let behind: Vec<_> = report.behind(&all).collect();
    assert_eq!(behind, [(collectives(1), 3, 0), (pair(0, 3), 3, 0)]);
    // It is told of its own lanes, and of communicators that it may be about to join.
    let mut all = all;
    all.raise(lane(9, Series::Creation), 1);
    let told: Vec<_> = all.for_member(&report).iter().map(|(lane, _)| lane).collect();
    assert_eq!(told, [collectives(1), pair(0, 3), lane(9, Series::Creation)]);
}

#[test]
fn nothing_is_launched_once_a_report_says_rest() {
    // Threads launch as fast as they can; holds come at any instant.
    let cut = Cut::default();
    let stop = AtomicBool::new(false);
    let launches = [0, 1, 2].map(|thread| {
        [increment(&cut, collectives(thread), 1), increment(&cut, collectives(9), 1)]
    });
    thread::scope(|scope| {
        let _end = LetGo { cut: &cut, stop: &stop };
        for increments in &launches {
            let (cut, stop) = (&cut, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    drop(cut.enter("ncclAllReduce", increments));
                }
            });
        }
        for _ in 0..100 {
            let asked = hold(&cut, &[]);
            let far = Instant::now() + Duration::from_secs(30);
            let mut seen = Seen::default();
            let mut plan = plan::Plan::default();
            let rest = loop {
                let report = cut.watch(seen, asked, far, &|| 0).unwrap();
                assert!(Instant::now() < far, "{report:?}");
                if report.inside.is_empty() {
                    break report;
                }
                seen = report.seen;
            };
            let counts = rest.counters.clone();
            plan.update(&[&rest], plan::Pace::Moving);
            assert!(cut.hold(COORDINATOR, plan.limits().clone()));
            for _ in 0..50 {
                thread::yield_now();
                assert_eq!(cut.report(0).counters, counts);
            }
            cut.release();
        }
    });
}

#[test]
fn what_is_counted_while_the_slots_are_looked_at_is_in_the_report() {
    let cut = Cut::default();
    let making = [increment(&cut, lane(1, Series::Creation), 1)];
    let counter = cut.counter(collectives(1), 0);
    let counted = Arc::clone(&counter);
    // This is asked after the slots. It stands for a thread that was inside, and is out again when they are.
    let finished = move || counted.launched.fetch_add(1, Ordering::SeqCst) == 0;
    cut.enter("ncclCommInitRank", &making).unfinished(Box::new(finished));
    let report = cut.report(0);
    let row = report.counters.iter().find(|row| row.lane == counter.lane()).unwrap();
    assert_eq!((row.launched, counter.launched()), (1, 1), "{report:?}");
}

#[test]
fn while_memory_is_away_launches_wait_whoever_holds_and_ends_pass() {
    let cut = Cut::default();
    let launch = [increment(&cut, collectives(1), 1)];
    let end = [increment(&cut, lane(1, Series::End), 1)];
    cut.set_away(true);
    let (launched, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _let_go = LetGo { cut: &cut, stop: &stop };
        scope.spawn(|| {
            drop(cut.enter("ncclAllReduce", &launch));
            launched.store(true, Ordering::SeqCst);
        });
        while cut.report(0).waiting.is_empty() {
            thread::yield_now();
        }
        // No limit lets it go, and so none may be raised for it.
        let is_listed =
            || matches!(&cut.report(0).waiting[..], [waiting] if waiting.needs.is_empty());
        let waits = || !launched.load(Ordering::SeqCst) && is_listed();
        cut.release();
        assert!(waits(), "nobody holds");
        let mut limits = Limits::default();
        limits.raise(launch[0].counter.lane(), 5);
        cut.claim(COORDINATOR);
        assert!(cut.hold(COORDINATOR, limits));
        assert!(waits(), "its limits admit it");
        cut.abandon(COORDINATOR);
        assert!(waits(), "the holder is gone");
        cut.pause();
        cut.release();
        assert!(waits(), "a pause of everything is over");
        drop(cut.enter("ncclCommDestroy", &end));
        assert!(waits());
        cut.set_away(false);
    });
    assert!(launched.load(Ordering::SeqCst));
}

#[test]
fn where_launches_fail_while_memory_is_away_those_that_wait_do_and_ends_pass() {
    let cut = Cut::default();
    let launch = [increment(&cut, collectives(1), 1)];
    let end = [increment(&cut, lane(1, Series::End), 1)];
    let enter = || cut.enter_if_there("ncclAllReduce", &launch, &[]).map_err(|left| left.why());
    cut.fail_while_away();
    drop(enter().unwrap());
    cut.claim(COORDINATOR);
    assert!(cut.hold(COORDINATOR, Limits::default()));
    thread::scope(|scope| {
        let held = scope.spawn(|| enter().map(drop));
        while cut.report(0).waiting.is_empty() {
            thread::yield_now();
        }
        cut.set_away(true);
        cut.release();
        assert_eq!(held.join().unwrap(), Err(TurnedBack::Away));
    });
    assert!(cut.report(0).waiting.is_empty());
    assert_eq!(enter().map(drop), Err(TurnedBack::Away));
    drop(cut.enter_if_there("ncclCommDestroy", &end, &[]).unwrap());
    cut.set_away(false);
    drop(enter().unwrap());
    assert_eq!(launch[0].counter.launched(), 2, "those that failed are not counted");
}

/// Lets the threads of a test end, however it does.
struct LetGo<'a> {
    cut: &'a Cut,
    stop: &'a AtomicBool,
}

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.cut.set_away(false);
        self.cut.release();
    }
}

#[test]
#[ignore = "a measurement: run it with --release --nocapture"]
fn time_of_an_open_pass() {
    let cut = Cut::default();
    let increments = [increment(&cut, collectives(1), 1)];
    let rounds = 10_000_000_u32;
    let begin = Instant::now();
    for _ in 0..rounds {
        drop(cut.enter("ncclAllReduce", std::hint::black_box(&increments)));
    }
    let each = begin.elapsed() / rounds;
    assert!(each < Duration::from_nanos(50), "{each:?} a pass");
}

/// Runs at the end of its thread, behind the destructor of what the cut keeps for it.
struct AtEnd(Box<dyn Fn()>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        (self.0)();
    }
}

thread_local! {
    static AT_END: std::cell::Cell<Option<AtEnd>> = const { std::cell::Cell::new(None) };
}

#[test]
fn a_launch_that_a_thread_makes_while_it_ends_waits_at_the_hold() {
    let cut = Arc::new(Cut::default());
    cut.add_rank(local(1, 0, 2));
    let (tell, hear) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let thread = {
        let cut = Arc::clone(&cut);
        thread::spawn(move || {
            let late = Arc::clone(&cut);
            // Made before the thread's first launch, so it ends after what the cut keeps for the thread.
            AT_END.set(Some(AtEnd(Box::new(move || {
                assert!(LEASE.try_with(|_| ()).is_err(), "the slot is gone by now");
                wait.recv().unwrap();
                let increments = [increment(&late, collectives(1), 1)];
                let launch = late.enter("ncclBroadcast", &increments);
                tell.send(late.report(0).inside.len()).unwrap();
                drop(launch);
            }))));
            drop(cut.enter("ncclAllReduce", &[increment(&cut, collectives(1), 1)]));
        })
    };
    until_launched(&cut, 1);
    hold(&cut, &[(collectives(1), 1)]);
    go.send(()).unwrap();
    until_waiting(&cut, 1);
    assert_eq!(hear.try_recv(), Err(mpsc::TryRecvError::Empty));
    assert!(cut.hold(COORDINATOR, limits(&[(collectives(1), 2)])));
    thread.join().unwrap();
    assert_eq!(hear.recv(), Ok(1), "it was counted as inside");
    assert!(cut.report(0).inside.is_empty());
}

fn until_launched(cut: &Cut, launches: u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while cut.counter(collectives(1), 0).launched() != launches {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}
