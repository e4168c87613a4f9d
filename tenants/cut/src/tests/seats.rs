//! Ranks that leave while threads are held, and signals that only one side waits for.

use std::thread;
use std::time::Duration;

use super::super::plan::{Pace, Plan, Verdict};
use super::super::*;
use super::member::{collectives, hold, increment, lane, local, until_waiting};

const LONG: Duration = Duration::from_secs(30);
const AT_ONCE: Duration = Duration::ZERO;

fn seat(cut: &Cut, communicator: u128, lane: Lane) -> [Increment; 1] {
    cut.add_rank(local(communicator, 0, 2));
    [increment(cut, lane, 1)]
}

#[test]
fn a_held_launch_of_a_rank_that_leaves_is_turned_back_and_counts_nothing() {
    let cut = Cut::default();
    let increments = seat(&cut, 1, collectives(1));
    hold(&cut, &[]);
    thread::scope(|scope| {
        let held = scope.spawn(|| cut.enter_if_there("ncclAllReduce", &increments, &[]).is_err());
        until_waiting(&cut, 1);
        cut.remove_rank(CommunicatorId(1), 0);
        assert!(held.join().unwrap(), "it was let in");
    });
    assert_eq!(increments[0].counter.launched(), 0);
    let report = cut.report(0);
    assert!(report.inside.is_empty() && report.waiting.is_empty(), "{report:?}");
    // The thread is as before: it launches elsewhere once it is let go.
    cut.release();
    let other = [increment(&cut, collectives(2), 1)];
    drop(cut.enter_if_there("ncclAllReduce", &other, &[]).unwrap());
    assert_eq!(other[0].counter.launched(), 1);
}

#[test]
fn a_launch_is_turned_back_for_any_rank_that_it_needs_and_for_no_other() {
    let cut = Cut::default();
    let making = [increment(&cut, lane(3, Series::Creation), 1)];
    let [parent, other] = [1, 2].map(|id| seat(&cut, id, collectives(id))[0].counter.clone());
    hold(&cut, &[]);
    let (needs_parent, needs_other) = ([parent], [other]);
    thread::scope(|scope| {
        let turned_back =
            scope.spawn(|| cut.enter_if_there("ncclCommShrink", &making, &needs_parent).is_err());
        let let_in =
            scope.spawn(|| cut.enter_if_there("ncclCommShrink", &making, &needs_other).is_ok());
        until_waiting(&cut, 2);
        cut.remove_rank(CommunicatorId(1), 0);
        assert!(turned_back.join().unwrap());
        until_waiting(&cut, 1);
        cut.release();
        assert!(let_in.join().unwrap());
    });
    assert_eq!(making[0].counter.launched(), 1);
}

#[test]
fn a_rank_that_has_left_turns_nobody_back_where_nothing_is_held() {
    let cut = Cut::default();
    let increments = seat(&cut, 1, collectives(1));
    cut.remove_rank(CommunicatorId(1), 0);
    // What such a call does is its application's matter, as without us.
    assert!(cut.enter_if_there("ncclAllReduce", &increments, &[]).is_ok());
}

#[test]
fn who_leaves_can_wait_until_those_turned_back_have_withdrawn() {
    let cut = Cut::default();
    let increments = seat(&cut, 1, collectives(1));
    hold(&cut, &[]);
    assert!(cut.wait_for_withdrawals(CommunicatorId(1), AT_ONCE), "nobody is held");
    thread::scope(|scope| {
        let (turned_back, hears) = std::sync::mpsc::channel();
        let (withdraw, go) = std::sync::mpsc::channel();
        let (cut, increments) = (&cut, &increments);
        scope.spawn(move || {
            let withdrawal = cut.enter_if_there("ncclGroupEnd", increments, &[]).unwrap_err();
            turned_back.send(()).unwrap();
            go.recv().unwrap();
            drop(withdrawal);
        });
        until_waiting(cut, 1);
        assert!(cut.wait_for_withdrawals(CommunicatorId(1), AT_ONCE), "it has not left");
        cut.give_up_rank(CommunicatorId(1), 0);
        hears.recv().unwrap();
        assert!(!cut.wait_for_withdrawals(CommunicatorId(1), Duration::from_millis(1)));
        assert!(cut.wait_for_withdrawals(CommunicatorId(2), AT_ONCE), "of another");
        withdraw.send(()).unwrap();
        assert!(cut.wait_for_withdrawals(CommunicatorId(1), LONG));
    });
}

#[test]
fn a_paused_process_turns_launches_back_too() {
    let cut = Cut::default();
    let increments = seat(&cut, 1, collectives(1));
    cut.pause();
    thread::scope(|scope| {
        let held = scope.spawn(|| cut.enter_if_there("ncclAllReduce", &increments, &[]).is_err());
        until_waiting(&cut, 1);
        cut.give_up_rank(CommunicatorId(1), 0);
        assert!(held.join().unwrap());
    });
}

/// Returns the verdict on the reports of two processes that hold a rank each: whether they are at a cut.
fn settle(cuts: [&Cut; 2]) -> Verdict {
    let reports = cuts.map(|cut| cut.report(0));
    Plan::default().update(&[&reports[0], &reports[1]], Pace::Moving)
}

#[test]
fn nobody_is_waited_for_on_a_communicator_that_somebody_has_given_up() {
    let cuts = [Cut::default(), Cut::default(), Cut::default()];
    for ((cut, rank), launches) in cuts.iter().zip(0..).zip([6, 6, 5]) {
        cut.add_rank(local(1, rank, 3));
        let counter = cut.counter(collectives(1), rank);
        drop(cut.enter("ncclAllReduce", &[Increment { counter, launches }]));
    }
    assert_eq!(settle([&cuts[1], &cuts[2]]), Verdict::Open, "one is behind");
    cuts[0].give_up_rank(CommunicatorId(1), 0);
    let reports = [0, 1, 2].map(|at: usize| cuts[at].report(0));
    let mut plan = Plan::default();
    let reports: Vec<_> = reports.iter().collect();
    assert_eq!(plan.update(&reports, Pace::Moving), Verdict::Settled);
    // The member itself sees that it is waited for no more.
    cuts[2].claim(7);
    assert!(cuts[2].hold(7, plan.limits().for_member(reports[2])));
    assert!(cuts[2].report(0).seen.at_rest);
}

#[test]
fn what_was_given_up_is_told_of_to_a_limit() {
    let cut = Cut::default();
    for id in 0..1000 {
        cut.give_up_rank(CommunicatorId(id), 0);
        cut.give_up_rank(CommunicatorId(id), 1);
    }
    let told = cut.report(0).given_up;
    assert_eq!(told.len(), 64);
    assert_eq!(told.last(), Some(&CommunicatorId(999)));
}

#[test]
fn only_who_waits_for_a_signal_has_others_give_theirs() {
    let [giver, waiter] = [Cut::default(), Cut::default()];
    let signal = lane(1, Series::Signal { from: 0, to: 1, index: 0, context: 0 });
    let launch = |cut: &Cut, rank, launches| {
        let counter = cut.counter(signal, rank);
        drop(cut.enter("ncclSignal", &[Increment { counter, launches }]));
    };
    giver.add_rank(local(1, 0, 2));
    waiter.add_rank(local(1, 1, 2));
    launch(&giver, 0, 2);
    assert_eq!(settle([&giver, &waiter]), Verdict::Settled, "a signal too many holds nobody up");
    launch(&waiter, 1, 3);
    assert_eq!(settle([&giver, &waiter]), Verdict::Open, "one of three was not given");
    launch(&giver, 0, 1);
    assert_eq!(settle([&giver, &waiter]), Verdict::Settled);
}

#[test]
fn ranks_that_know_a_communicator_by_two_names_come_to_one_place() {
    let [old, new] = [Cut::default(), Cut::default()];
    let launch = |cut: &Cut, communicator, rank, launches| {
        let counter = cut.counter(collectives(communicator), rank);
        drop(cut.enter("ncclAllReduce", &[Increment { counter, launches }]));
    };
    old.add_rank(local(1, 0, 2));
    new.add_rank(local(2, 1, 2));
    launch(&old, 1, 0, 3);
    launch(&new, 2, 1, 2);
    assert_eq!(settle([&old, &new]), Verdict::Settled, "nobody knows that they are one");
    old.is_also(CommunicatorId(1), CommunicatorId(2));
    assert_eq!(settle([&old, &new]), Verdict::Open, "one is behind");
    let reports = [old.report(0), new.report(0)];
    let reports = [&reports[0], &reports[1]];
    assert_eq!(foreign_ranks(&reports), Vec::<String>::new(), "both are here");
    let mut plan = Plan::default();
    plan.update(&reports, Pace::Moving);
    let told = plan.limits().for_member(reports[1]);
    assert_eq!(told.of(collectives(2)), 3, "by the name that it knows");
    launch(&new, 2, 1, 1);
    assert_eq!(settle([&old, &new]), Verdict::Settled);
    old.remove_rank(CommunicatorId(1), 0);
    assert!(old.report(0).aliases.is_empty());
}
