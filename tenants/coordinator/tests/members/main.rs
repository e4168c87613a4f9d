//! Tests of the coordinator with members that use real sockets and fail in every way and place.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

mod contexts;
mod cuts;
mod faults;
mod gone;
mod nameless;
mod panics;
mod rounds;
mod settling;
mod termination;

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use sublet_coordinator::*;
use sublet_protocol::identity::MemberId;
use sublet_protocol::run_dir::RunDirError;
use sublet_protocol::scope::Scope;
use sublet_protocol::wire::{
    Action, FailureKind, MemberState, Phase, Reply, Request, TakePhase, Told,
};
use sublet_stage::fake::{Line, World, impatient, options, quiet, tenant};
use sublet_stage::script::{
    AtTheGate, Deed, Fault, GIB, PAUSE, RELEASE_WINDOW, RESTORE_WINDOW, RESUME, Script, active,
    paused, report,
};

/// Checks that no member began a phase before all `members` ended the phase before.
fn assert_in_step(lines: &[Line], members: usize, phases: &[Phase]) {
    let mut order = Vec::new();
    for phase in phases {
        order.extend(std::iter::repeat_n(*phase, members));
    }
    let began: Vec<_> = lines
        .iter()
        .filter_map(|line| match line {
            Line::Began(_, deed) => Some(deed.phase()),
            Line::Schedule(..)
            | Line::Ended(..)
            | Line::Consent(_)
            | Line::GivenUp(..)
            | Line::CalledOff(_) => None,
        })
        .collect();
    assert_eq!(began, order);
    for phase in phases {
        let last_end = lines
            .iter()
            .rposition(|line| matches!(line, Line::Ended(_, ended) if ended.phase() == *phase));
        let next_start = lines
            .iter()
            .position(|line| matches!(line, Line::Began(_, began) if began.phase() > *phase));
        assert!(next_start.is_none() || last_end < next_start);
    }
}

#[test]
fn a_pause_and_a_resume_take_all_members_through_all_phases_together() {
    let world = World::of(&[active(), active().with(Phase::Drain, Fault::Slow(20)), active()]);
    let mut coordinator = world.coordinator();
    let mut events = 0;
    let paused = coordinator.pause(&mut |_| events += 1).unwrap();
    let paused = report(paused);
    assert_in_step(&world.lines(), 3, &PAUSE);
    assert_eq!(world.states(), [MemberState::Paused; 3]);
    // A greeting, the cut and five phases; for each a start, one line for each of three members, and an end.
    assert_eq!(events, 7 * 5);
    let phases: Vec<_> = paused.phases.iter().map(|phase| phase.phase).collect();
    assert_eq!(phases, PAUSE);
    assert_eq!(paused.phases[0].slowest_us(), 3000);
    assert_eq!(paused.phases[0].bytes(), 3 * GIB);
    assert!(paused.phases[1].wall_us >= 20_000);
    assert!(paused.wall_us >= paused.phases.iter().map(|phase| phase.wall_us).sum());
    assert_eq!(paused.devices.len(), 1);
    assert_eq!(paused.devices[0].bytes, 3 * GIB);
    assert_eq!(paused.devices[0].free_bytes, 5 * GIB);
    assert!(paused.losses.is_empty() && paused.notes.is_empty());

    assert_eq!(
        coordinator.pause(&mut quiet).unwrap(),
        Outcome::AlreadyPaused { stays: Vec::new() }
    );
    world.log.lock().unwrap().clear();
    let resumed = report(coordinator.resume(&mut quiet).unwrap());
    assert_in_step(&world.lines(), 3, &RESUME);
    assert_eq!(world.states(), [MemberState::Active; 3]);
    assert_eq!(resumed.devices[0].bytes, 3 * GIB);
    assert_eq!(coordinator.resume(&mut quiet).unwrap(), Outcome::AlreadyActive);
}

#[test]
fn whoever_makes_calls_is_stopped_when_the_device_is_idle_that_they_were_for() {
    let are_made = Arc::new(AtomicBool::new(false));
    let waits = AtTheGate::WaitsForCalls(Arc::clone(&are_made));
    let parts = [waits, AtTheGate::MakesCalls(are_made)];
    let world = World::of(&parts.map(|part| Script { at_the_gate: Some(part), ..active() }));
    let options = Options { timeout: Some(Duration::from_secs(20)), ..options() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    report(coordinator.pause(&mut quiet).unwrap());
    assert_eq!(world.states(), [MemberState::Paused; 2]);
}

#[test]
fn members_that_are_where_they_should_be_are_left_alone() {
    let world = World::of(&[active(), paused()]);
    let outcome = world.coordinator().pause(&mut quiet).unwrap();
    assert_eq!(report(outcome).phases[0].members.len(), 1);
    assert!(world.phases_of(2).is_empty());
    assert_eq!(world.states(), [MemberState::Paused; 2]);

    let world = World::of(&[active(), paused()]);
    let outcome = world.coordinator().resume(&mut quiet).unwrap();
    assert_eq!(report(outcome).phases.len(), 4);
    assert!(world.phases_of(1).is_empty());
    assert_eq!(world.states(), [MemberState::Active; 2]);
}

#[test]
fn what_a_dead_coordinator_left_half_done_is_settled_by_the_members_first() {
    let offloading = Script::new(MemberState::Offloading);
    let restoring = Script::new(MemberState::Restoring);
    let world = World::of(&[active(), offloading, restoring]);
    let outcome = world.coordinator().pause(&mut quiet).unwrap();
    assert_eq!(report(outcome).phases[0].members.len(), 2);
    assert_eq!(world.phases_of(2)[0], Phase::Settle);
    assert_eq!(world.phases_of(2)[1..], PAUSE);
    assert_eq!(world.phases_of(3), [Phase::Settle]);
    assert_eq!(world.states(), [MemberState::Paused; 3]);
}

#[test]
fn a_member_that_cannot_be_settled_is_named_and_nothing_else_is_touched() {
    let failure = Fault::Fail(FailureKind::Driver);
    let half = Script::new(MemberState::Offloading).with(Phase::Settle, failure);
    let world = World::of(&[active(), half]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    assert!(matches!(error, Trouble::Unrecovered { .. }));
    assert!(!error.left_unchanged());
    assert_eq!(world.phases_of(2), [Phase::Settle]);
    assert!(world.phases_of(1).is_empty());
}

#[test]
fn a_half_way_member_that_dies_while_it_settles_is_left_out() {
    let dying = Script::new(MemberState::Offloading).with(Phase::Settle, Fault::Die);
    let world = World::of(&[active(), dying]);
    let report = report(world.coordinator().pause(&mut quiet).unwrap());
    assert_eq!(report.phases[0].members.len(), 1);
    assert_eq!(world.state(1), MemberState::Paused);
}

#[test]
fn an_action_called_off_before_the_point_of_no_return_is_undone() {
    for (start, action) in [(active(), Action::Pause), (paused(), Action::Resume)] {
        let before = start.state;
        let world = World::of(&[start.clone(), start]);
        let (interrupt, raise) = Interrupt::new().unwrap();
        let options = Options { interrupt: Some(interrupt), ..options() };
        let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
        let mut raise_first = |event: Event<'_>| {
            if matches!(event, Event::StepDone { step: Step::Phase(_), .. }) {
                nix::unistd::write(&raise, &[1]).unwrap();
            }
        };
        let error = match action {
            Action::Pause => coordinator.pause(&mut raise_first).unwrap_err(),
            Action::Resume => coordinator.resume(&mut raise_first).unwrap_err(),
        };
        assert!(matches!(error, Trouble::CalledOff { .. }), "{error}");
        assert!(error.left_unchanged());
        assert!(error.to_string().contains("as before"), "{error}");
        assert_eq!(world.states(), [before; 2]);
    }
}

#[test]
fn an_action_called_off_behind_the_point_of_no_return_is_finished() {
    let world = World::of(&[active(), active()]);
    let (interrupt, raise) = Interrupt::new().unwrap();
    let options = Options { interrupt: Some(interrupt), ..options() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    let outcome = coordinator.pause(&mut |event| {
        if matches!(event, Event::StepStarted { step: Step::Phase(Phase::Release), .. }) {
            nix::unistd::write(&raise, &[1]).unwrap();
        }
    });
    assert_eq!(report(outcome.unwrap()).phases.len(), 5);
    assert_eq!(world.states(), [MemberState::Paused; 2]);
}

#[test]
fn a_greeting_that_one_does_not_answer_can_be_called_off() {
    let silent = Script { hello: Some(Fault::Silent), ..active() };
    let world = World::of(&[active(), silent]);
    let (interrupt, raise) = Interrupt::new().unwrap();
    let timeout = Some(Duration::from_secs(30));
    let options = Options { timeout, interrupt: Some(interrupt), ..options() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    let error = coordinator.pause(&mut |event| {
        if matches!(event, Event::StepStarted { step: Step::Hello, .. }) {
            nix::unistd::write(&raise, &[1]).unwrap();
        }
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Trouble::CalledOff { .. }), "{error}");
    assert!(error.left_unchanged());
    assert!(world.lines().is_empty(), "the one that has answered is not paused without the other");
}

#[test]
fn one_that_waits_for_the_lock_and_is_stopped_keeps_nobody_from_a_pause_of_its_own() {
    let world = World::of(&[active(), active()]);
    let dir = world.run_dir.tenant(&tenant("train")).unwrap();
    let _stopped = dir.want_alone().unwrap();
    let lock_timeout = Duration::from_millis(40);
    let takes_part = TakesPart::Alone(MemberId(1));
    let options = Options { lock_timeout, takes_part, ..options() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    report(coordinator.pause(&mut quiet).unwrap());
    assert_eq!(world.states(), [MemberState::Paused, MemberState::Active]);
}

#[test]
fn a_faulted_member_is_named_and_nothing_is_touched() {
    let world = World::of(&[active(), Script::new(MemberState::Faulted)]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    assert!(matches!(error, Trouble::Faulted { .. }));
    assert!(world.lines().is_empty());
}

#[test]
fn members_of_different_versions_are_refused_by_version_and_process() {
    let mut other = active();
    other.version = "0.2.0";
    let world = World::of(&[active(), other]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Trouble::VersionsDiffer { .. }));
    let pid = std::process::id();
    assert!(text.contains(&format!("0.1.0 in process {pid}")), "{text}");
    assert!(text.contains("0.2.0"), "{text}");
    assert!(world.lines().is_empty());
}

#[test]
fn a_member_of_another_protocol_version_is_named() {
    use std::io::Write as _;
    let world = World::of(&[active()]);
    let dir = world.run_dir.tenant(&tenant("train")).unwrap();
    let listener = UnixListener::bind(dir.socket_path(MemberId(9)).unwrap()).unwrap();
    let stranger = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let header = [b'S', b'B', b'L', b'T', 77, 0, 0, 0, 0, 0, 0, 0];
        stream.write_all(&header).unwrap();
        stream
    });
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Trouble::NoGreeting { .. }));
    assert!(text.contains("protocol version 77"), "{text}");
    assert!(text.contains("with one Sublet version"), "{text}");
    drop(stranger.join().unwrap());
}

#[test]
fn a_dead_members_socket_is_removed_and_the_others_go_on() {
    let world = World::of(&[active()]);
    let dir = world.run_dir.tenant(&tenant("train")).unwrap();
    let dead = dir.socket_path(MemberId(7)).unwrap();
    drop(UnixListener::bind(&dead).unwrap());
    let mut removed = Vec::new();
    let outcome = world.coordinator().pause(&mut |event| {
        if let Event::StaleRemoved { member } = event {
            removed.push(member);
        }
    });
    assert_eq!(report(outcome.unwrap()).phases.len(), 5);
    assert_eq!(removed, [MemberId(7)]);
    assert!(!dead.exists());
}

#[test]
fn a_tenant_of_dead_processes_is_cleaned_up_and_then_unknown() {
    let mut world = World::new();
    world.add("infer", 1, active());
    let dir = world.run_dir.tenant(&tenant("train")).unwrap();
    drop(UnixListener::bind(dir.socket_path(MemberId(7)).unwrap()).unwrap());
    let mut coordinator = world.coordinator();
    let error = coordinator.pause(&mut quiet).unwrap_err();
    assert!(matches!(error, Trouble::NoProcess { .. }));
    assert!(!dir.path().exists());
    let error = coordinator.pause(&mut quiet).unwrap_err();
    assert_eq!(error.to_string(), "there is no tenant 'train' (there are: infer)");
    assert!(error.left_unchanged() && !error.is_retryable());
}

#[test]
fn two_coordinators_never_work_at_once() {
    let slow = || active().with(Phase::Drain, Fault::Slow(40));
    let world = World::of(&[slow(), slow()]);
    let (mut first, mut second) = (world.coordinator(), world.coordinator());
    let outcomes = std::thread::scope(|scope| {
        let other = scope.spawn(move || second.pause(&mut quiet).unwrap());
        [first.pause(&mut quiet).unwrap(), other.join().unwrap()]
    });
    let already =
        outcomes.iter().filter(|outcome| **outcome == Outcome::AlreadyPaused { stays: Vec::new() });
    assert_eq!(already.count(), 1);
    assert_in_step(&world.lines(), 2, &PAUSE);
}

#[test]
fn a_coordinator_that_waits_too_long_for_another_names_it() {
    let world = World::of(&[active()]);
    let dir = world.run_dir.tenant(&tenant("train")).unwrap();
    let _held = dir.lock(Instant::now()).unwrap();
    let (interrupt, _raise) = Interrupt::new().unwrap();
    // With an interrupt the coordinator checks the interrupt from time to time.
    for (interrupt, wait_ms) in [(None, 20), (Some(interrupt), 250)] {
        let lock_timeout = Duration::from_millis(wait_ms);
        let impatient = Options { lock_timeout, interrupt, ..options() };
        let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), impatient);
        let error = coordinator.pause(&mut quiet).unwrap_err();
        assert!(error.is_retryable());
        let text = error.to_string();
        assert!(text.contains(&std::process::id().to_string()), "{text}");
        let Trouble::RunDir(RunDirError::Locked { waited_ms, .. }) = error else {
            panic!("{text}");
        };
        assert!(waited_ms >= wait_ms, "{text}");
        assert!(world.lines().is_empty());
    }
}

#[test]
fn stats_list_who_answers_and_who_does_not() {
    let mut silent = paused();
    silent.stats = Some(Fault::Silent);
    let mut dying = paused();
    dying.stats = Some(Fault::Die);
    let world = World::of(&[active(), silent, dying]);
    let stats = world.coordinator().stats().unwrap();
    assert_eq!(stats.members.len(), 1);
    assert_eq!(stats.members[0].member.id, MemberId(1));
    assert_eq!(stats.members[0].member.pid, std::process::id(), "as this process knows it");
    let mut failed: Vec<_> = stats.failures.iter().map(|f| f.who.member.0).collect();
    failed.sort_unstable();
    assert_eq!(failed, [2, 3]);
}

#[test]
fn all_tenants_are_asked_what_they_hold_simultaneously() {
    // Each member answers only after both were asked.
    let meeting = std::sync::Arc::default();
    let script = || Script { stats_with: Some((std::sync::Arc::clone(&meeting), 2)), ..active() };
    let mut world = World::of(&[script()]);
    world.add("infer", 5, script());
    let all = ["train", "infer"].map(|name| {
        let patient = Options { contact_timeout: Duration::from_secs(15), ..options() };
        Coordinator::new(world.run_dir.clone(), tenant(name), patient)
    });
    for found in Holdings::of_all(&all.each_ref()) {
        let stats = found.stats.unwrap();
        assert_eq!((stats.members.len(), stats.failures.len()), (1, 0), "{:?}", stats.failures);
        assert!(!found.is_silent);
    }
}
