//! Real members in more than one round: the orders that they follow, and their later answers about a round's end.

use std::fs;
use std::sync::mpsc;

use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::driver::sim::SimDriver;
use vmm_pool::{Class, Selection, Tags, Whose};

use super::settling::{BEFORE_ACTIVATE, BEFORE_RELEASE, is_under_way};
use super::*;
use sublet_member::Member;
use sublet_protocol::cut::{Limits, Seen};
use sublet_protocol::scope::TagNames;
use sublet_protocol::stepping::{SeenActivity, StepOrder};
use sublet_protocol::wire::{Hold, RoundEnd, StepOn, Withdraw};
use sublet_stage::job::{Job, Line, SOON, patient, until};

const BEFORE_STAGES: [Phase; 3] = [Phase::CloseGate, Phase::Drain, Phase::Prepare];

fn named(tag: &str) -> TagNames {
    TagNames::Named([tag.to_owned()].into())
}

fn of_tag(tag: &str) -> Scope {
    Scope::Tags { tags: named(tag), owner: None }
}

/// Acts like the application of `member` that requests this.
fn act_for_own_tags(member: &Member<SimDriver>, tag: &str, action: Action) {
    let outcome = tenants::requests::act_for_own_tags(member, named(tag), action, None).unwrap();
    assert!(matches!(outcome, tenants::coordinator::Outcome::Completed(_)), "{tag}: {action:?}");
}

fn refused(reply: Reply) -> String {
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    assert_eq!(failure.kind, FailureKind::WrongState, "{failure}");
    failure.message
}

/// Asks `member` how `round` ended, over a separate connection, and returns the answer.
fn told(member: &Member<SimDriver>, round: u64) -> RoundEnd {
    let reply = Line::to(member).ask(&Request::Withdraw(Withdraw { round }));
    let Reply::Told(told) = reply else { panic!("{reply:?}") };
    told
}

fn lead_all(lines: &mut [Line], phases: &[Phase], scope: &Scope) {
    for phase in phases {
        for line in &mut *lines {
            line.lead(*phase, scope);
        }
    }
}

fn lines_of(job: &Job) -> Vec<Line> {
    job.members.iter().map(|member| Line::to(member)).collect()
}

fn settled(job: &Job) {
    until("the members to settle", || !job.states().into_iter().any(is_under_way));
}

/// Two members with memory of two tags each.
fn with_tags() -> Job {
    let job = Job::new(2);
    for member in &job.members {
        for tag in ["x", "y"] {
            let class = Class { library: "app", tag: tag.to_owned(), ..Class::default() };
            sublet_stage::memory::create(member.pool(), DeviceOrdinal(0), 1, class);
        }
    }
    job
}

/// Leads `phases`, and ends after the first member was told `decision`. The second member learns of that late. By then the
/// first has acted alone more often than rounds are remembered.
fn ends_before_one_that_acts_alone(job: &Job, phases: &[Phase], decision: Phase, scope: &Scope) {
    let mut lines = lines_of(job);
    lead_all(&mut lines, phases, scope);
    lines[0].lead(decision, scope);
    let second = lines.pop();
    drop(lines);
    for _ in 0..10 {
        for action in [Action::Pause, Action::Resume] {
            act_for_own_tags(&job.members[0], "y", action);
        }
    }
    drop(second);
    settled(job);
}

#[test]
fn one_that_was_told_to_open_its_gate_and_acts_alone_takes_the_other_along() {
    let job = with_tags();
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
    let whole = Scope::Whole;
    ends_before_one_that_acts_alone(&job, &BEFORE_ACTIVATE, Phase::Activate, &whole);
    assert_eq!(job.states(), [MemberState::Active; 2]);
}

#[test]
fn one_that_was_told_to_release_a_tag_and_acts_alone_takes_the_other_along() {
    let job = with_tags();
    ends_before_one_that_acts_alone(&job, &BEFORE_RELEASE, Phase::Release, &of_tag("x"));
    for member in &job.members {
        let away = member.tags().into_iter().find(|row| row.tag == "x").map(|row| row.away_bytes);
        assert!(away.is_some_and(|bytes| bytes > 0), "{away:?}");
    }
}

/// The owner has looked before its memory was released, and another process has requested the memory since.
#[test]
fn one_that_resumes_a_tag_of_its_own_alone_is_refused_where_others_are_to_come_for_it() {
    let job = Job::new(2);
    let owner = &job.members[0];
    let class = Class { library: "app", tag: "x".to_owned(), ..Class::default() };
    let shared = sublet_stage::memory::create(owner.pool(), DeviceOrdinal(0), 1, class);
    let export = owner.pool().enter().export(shared).unwrap();
    let importer = job.members[1].presence().id().into();
    drop(owner.pool().redeem(export.id, export.serial, importer).unwrap());
    let away = || owner.tags().iter().map(|row| row.away_bytes).sum::<u64>();
    report(job.coordinator(Options { scope: of_tag("x"), ..patient() }).pause(&mut quiet).unwrap());
    assert!(away() > 0);
    let scope = Scope::Tags { tags: named("x"), owner: Some(owner.presence().id()) };
    let takes_part = TakesPart::Alone(owner.presence().id());
    let alone = Options { scope, takes_part, ..patient() };
    let error = job.coordinator(alone).resume(&mut quiet).unwrap_err();
    assert!(error.is_shared(), "{error}");
    assert!(
        owner.pool().holdings().is_shared(&Selection::SetAside(Tags::All, Whose::Own)),
        "it is owed still"
    );
    assert!(away() > 0);
    act_for_own_tags(owner, "x", Action::Resume);
    assert_eq!(away(), 0);
}

#[test]
fn orders_of_another_round_are_refused_while_one_is_under_way() {
    let job = Job::new(1);
    let member = &job.members[0];
    let mut first = Line::to(member);
    let mut second = Line::to(member);
    second.1 = 77;
    // The same holds on the way to a cut, before any order of the round.
    let hold = Request::Cut(Hold { limits: Limits::default(), seen: Seen::default(), wait_ms: 0 });
    assert!(matches!(first.ask(&hold), Reply::Cut(_)));
    for request in [&hold, &second.order(Phase::CloseGate, &Scope::Whole)] {
        let text = refused(second.ask(request));
        let leader = format!("which process {} leads", std::process::id());
        assert!(text.contains(&leader), "{text}");
    }
    for (step, next) in
        BEFORE_RELEASE.into_iter().zip([Phase::Drain, Phase::Prepare, Phase::Release])
    {
        first.lead(step, &Scope::Whole);
        for order in [step, next, Phase::Release, Phase::Verify, Phase::Create] {
            refused(second.ask(&second.order(order, &Scope::Whole)));
            // An order over another connection is refused too, though it names the round.
            refused(second.ask(&first.order(order, &Scope::Whole)));
        }
        let step = StepOrder::default();
        let look = StepOn { round: 77, step, seen: SeenActivity::default(), wait_ms: 0 };
        refused(second.ask(&Request::Step(look)));
        refused(second.ask(&hold));
        // The process has nothing to undo for this round, and the round under way is not undone.
        for request in [&second, &first].map(|line| line.order(Phase::Abort, &Scope::Whole)) {
            let reply = second.ask(&request);
            assert!(matches!(reply, Reply::PhaseDone(Phase::Abort, _)), "{reply:?}");
        }
        assert_eq!(member.lifecycle().state(), MemberState::Offloading);
    }
    let round = first.1;
    first.lead(Phase::Release, &Scope::Whole);
    first.lead(Phase::Verify, &Scope::Whole);
    assert_eq!(told(member, round), RoundEnd::Commit);
    assert_eq!(member.lifecycle().state(), MemberState::Paused);
    // The round is over: no late order belongs to it.
    second.1 = round;
    for late in [Phase::CloseGate, Phase::Create, Phase::Release, Phase::Verify] {
        refused(second.ask(&second.order(late, &Scope::Whole)));
    }
    report(job.coordinator(patient()).resume(&mut quiet).unwrap());
}

#[test]
fn whoever_settles_a_round_hangs_up_on_its_leader() {
    let job = Job::new(2);
    let mut lines = lines_of(&job);
    lead_all(&mut lines, &BEFORE_RELEASE, &Scope::Whole);
    // This is what a second command does that does not know of the first.
    let mut next = Line::to(&job.members[0]);
    next.lead(Phase::Settle, &Scope::Whole);
    settled(&job);
    assert_eq!(job.states(), [MemberState::Active; 2]);
    for line in &mut lines {
        let gone = line.0.receive::<Reply>(Instant::now() + SOON);
        assert!(gone.is_err_and(|error| error.peer_is_gone()));
    }
    next.lead(Phase::CloseGate, &Scope::Whole);
    next.lead(Phase::Abort, &Scope::Whole);
}

/// Removes the lock's file, as a cleaner of old files does.
fn remove_lock(job: &Job) {
    fs::remove_file(job.run_dir.path().join("train").join("coordinator.lock")).unwrap();
}

#[test]
fn of_two_commands_that_hold_the_lock_one_is_done_and_the_other_changes_nothing() {
    let job = Job::new(2);
    let (greeted, has_greeted) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // The second coordinator has greeted all members, and is delayed before its first order.
        let mut second = job.coordinator(patient());
        let second = scope.spawn(move || {
            second.pause(&mut |event| {
                if let Event::StepStarted { step: Step::Cut, .. } = event {
                    greeted.send(()).unwrap();
                    may_go_on.recv().unwrap();
                }
            })
        });
        has_greeted.recv_timeout(SOON).unwrap();
        remove_lock(&job);
        let mut second = Some(second);
        let mut refused = None;
        let first = job.coordinator(patient()).pause(&mut |event| {
            if let Event::StepStarted { step: Step::Phase(Phase::Release), .. } = event
                && let Some(second) = second.take()
            {
                go_on.send(()).unwrap();
                refused = Some(second.join().unwrap());
            }
        });
        let error = refused.unwrap().unwrap_err();
        assert!(error.to_string().contains("takes part in another pause or resume"), "{error}");
        assert!(error.left_unchanged(), "{error}");
        let first = report(first.unwrap());
        assert!(first.losses.is_empty(), "{:?}", first.losses);
    });
    assert_eq!(job.states(), [MemberState::Paused; 2]);
    report(job.coordinator(patient()).resume(&mut quiet).unwrap());
}

#[test]
fn a_command_whose_lock_was_removed_begins_nothing() {
    let job = Job::new(2);
    let error = job
        .coordinator(patient())
        .pause(&mut |event| {
            if let Event::StepDone { step: Step::Hello, .. } = event {
                remove_lock(&job);
            }
        })
        .unwrap_err();
    let gone = matches!(error, Trouble::RunDir(RunDirError::LockGone { .. }));
    assert!(gone && error.is_retryable() && error.left_unchanged(), "{error}");
    assert!(job.members.iter().all(|member| member.stats().last_pause.is_empty()));
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn a_late_question_about_a_round_leaves_the_next_command_connected() {
    let job = Job::new(1);
    let member = &job.members[0];
    let mut line = Line::to(member);
    let first = line.1;
    line.lead(Phase::CloseGate, &Scope::Whole);
    line.lead(Phase::Abort, &Scope::Whole);
    let mut next = Line::to(member);
    next.1 = line.1;
    next.lead(Phase::CloseGate, &Scope::Whole);
    assert_eq!(told(member, first), RoundEnd::Abort);
    next.lead(Phase::Drain, &Scope::Whole);
    assert_eq!(member.lifecycle().state(), MemberState::Offloading);
    next.lead(Phase::Abort, &Scope::Whole);
}

#[test]
fn one_that_has_begun_to_release_goes_on_whatever_others_say() {
    let job = Job::new(2);
    let mut lines = lines_of(&job);
    lead_all(&mut lines, &BEFORE_STAGES, &Scope::Whole);
    lines[0].lead(RELEASE_WINDOW, &Scope::Whole);
    let round = lines[0].1;
    lines[1].lead(Phase::Abort, &Scope::Whole);
    assert_eq!(told(&job.members[1], round), RoundEnd::Abort);
    drop(lines);
    settled(&job);
    assert_eq!(job.states(), [MemberState::Paused, MemberState::Active]);
}

#[test]
fn what_one_has_settled_alone_it_tells_to_those_that_ask_later() {
    let job = Job::new(3);
    let mut lines = lines_of(&job);
    lead_all(&mut lines, &BEFORE_RELEASE, &Scope::Whole);
    // The first member can ask only the second, which was told to release. The third asks after the second has ended.
    lines[1].lead(Phase::Release, &Scope::Whole);
    let third = lines.pop();
    let path = job.members[2].presence().socket_path();
    let elsewhere = path.with_extension("elsewhere");
    fs::rename(path, &elsewhere).unwrap();
    let round = lines[0].1;
    drop(lines);
    until("the first to settle", || !is_under_way(job.states()[0]));
    assert_eq!(told(&job.members[0], round), RoundEnd::Commit);
    job.members[1].leave();
    fs::rename(&elsewhere, path).unwrap();
    drop(third);
    until("the third to follow", || !is_under_way(job.states()[2]));
    assert_eq!(job.states(), [MemberState::Paused; 3]);
}
