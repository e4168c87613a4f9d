//! Every fault in every phase of every member.

use super::*;
use vmm_pool::{HostDemand, Schedule};

use sublet_protocol::code::Code;
use sublet_protocol::host_memory::{HostLimit, HostNeed, LimitKind};

const MEMBERS: usize = 3;
const REVERSIBLE_PAUSE: &[Phase] = &[Phase::CloseGate, Phase::Drain, Phase::Prepare];
const REVERSIBLE_RESUME: &[Phase] = &[Phase::Create, Phase::Restore, Phase::Import];

/// Three members, the one with index `victim` faulty in `phase`.
fn world(state: MemberState, victim: usize, phase: Phase, fault: Fault) -> World {
    let scripts: Vec<_> = (0..MEMBERS)
        .map(|index| {
            let script = Script::new(state);
            if index == victim { script.with(phase, fault) } else { script }
        })
        .collect();
    World::of(&scripts)
}

fn act(world: &World, action: Action) -> Result<Outcome, Trouble> {
    act_by(&mut world.coordinator(), action)
}

fn act_by(coordinator: &mut Coordinator, action: Action) -> Result<Outcome, Trouble> {
    match action {
        Action::Pause => coordinator.pause(&mut quiet),
        Action::Resume => coordinator.resume(&mut quiet),
    }
}

struct Case {
    action: Action,
    start: MemberState,
    phases: &'static [Phase],
    undo: Phase,
    no_return: Phase,
}

const CASES: [Case; 2] = [
    Case {
        action: Action::Pause,
        start: MemberState::Active,
        phases: REVERSIBLE_PAUSE,
        undo: Phase::Abort,
        no_return: Phase::Release,
    },
    Case {
        action: Action::Resume,
        start: MemberState::Paused,
        phases: REVERSIBLE_RESUME,
        undo: Phase::Abort,
        no_return: Phase::Activate,
    },
];

/// The limit for a pause or resume that fails, which is much shorter than the time of the phase.
const ENDS_WITHIN: Duration = Duration::from_mins(1);

/// Runs `fault` in each reversible phase of each member and checks that the survivors are as before.
fn fault_in_each_reversible_phase(fault: Fault) {
    for case in CASES {
        for phase in case.phases {
            // The cases run in parallel, since tests of silence wait.
            std::thread::scope(|scope| {
                for victim in 0..MEMBERS {
                    let case = &case;
                    scope.spawn(move || fault_in_one(case, *phase, victim, fault));
                }
            });
        }
    }
}

fn fault_in_one(case: &Case, phase: Phase, victim: usize, fault: Fault) {
    let world = world(case.start, victim, phase, fault);
    let started = Instant::now();
    let error = act(&world, case.action).unwrap_err();
    assert!(started.elapsed() < ENDS_WITHIN, "{:?}", started.elapsed());
    let Trouble::Refused { failures, .. } = &error else {
        panic!("{error}");
    };
    let victim_id = victim as u64 + 1;
    let of_victim = |failure: &MemberFailure| {
        failure.who.member == MemberId(victim_id) && failure.step == Step::Phase(phase)
    };
    assert!(failures.iter().any(of_victim), "{error}");
    // While one member is silent, a busy machine may make others late.
    assert!(fault == Fault::Silent || failures.len() == 1, "{error}");
    let pid = std::process::id().to_string();
    assert!(error.to_string().contains(&pid), "{error}");
    assert!(error.to_string().contains(phase.label()), "{error}");
    for id in 1..=MEMBERS as u64 {
        let dead = fault == Fault::Die && id == victim_id;
        assert!(!world.phases_of(id).contains(&case.no_return));
        if !dead {
            assert_eq!(world.phases_of(id).last(), Some(&case.undo));
            assert_eq!(world.state(id), case.start);
        }
    }
}

/// Kinds of failure that the coordinator neither waits for nor tries again.
const KINDS: [FailureKind; 11] = [
    FailureKind::CutNotReached,
    FailureKind::DrainTimeout,
    FailureKind::OutOfHostMemory,
    FailureKind::WrongState,
    FailureKind::PeerGone,
    FailureKind::NoConsent,
    FailureKind::NotNow,
    FailureKind::Shared,
    FailureKind::Unknown,
    FailureKind::Driver,
    FailureKind::Faulted,
];

/// For each kind, phase and state: the error describes the tenant as its processes are, and its code is that of the kind.
#[test]
fn what_an_error_says_of_the_tenant_is_what_its_processes_are() {
    for case in CASES {
        let all: &[Phase] = if case.action == Action::Pause { &PAUSE } else { &RESUME };
        for phase in all {
            std::thread::scope(|scope| {
                for kind in KINDS {
                    let case = &case;
                    // After the point of no return a process is whole or faulted; other failures are tried again for minutes.
                    if case.phases.contains(phase) || kind == FailureKind::Faulted {
                        scope.spawn(move || kind_in_one(case, *phase, kind));
                    }
                }
            });
        }
    }
}

fn kind_in_one(case: &Case, phase: Phase, kind: FailureKind) {
    let what = format!("{:?} in {phase:?}: {kind:?}", case.action);
    let world = world(case.start, 1, phase, Fault::Fail(kind));
    let done = act(&world, case.action);
    let survivors = [1, 3].map(|id| world.state(id));
    match done {
        Err(error) => {
            let is_unchanged = survivors == [case.start; 2];
            assert_eq!(error.left_unchanged(), is_unchanged, "{what}: {error}");
            assert_eq!(Code::from(&error), Code::from(kind), "{what}: {error}");
            assert_eq!(error.to_string().contains("as before"), is_unchanged, "{what}: {error}");
        }
        Ok(Outcome::Completed(report)) => {
            assert!(!case.phases.contains(&phase), "{what}: {report:?}");
            assert!(report.is_partial(), "{what}: {report:?}");
            assert!(!survivors.contains(&case.start), "{what}: {survivors:?}");
        }
        Ok(other) => panic!("{what}: {other:?}"),
    }
}

#[test]
fn a_failure_before_the_point_of_no_return_is_undone_in_all_members() {
    let failure = Fault::Fail(FailureKind::Driver);
    fault_in_each_reversible_phase(failure);
}

#[test]
fn a_death_before_the_point_of_no_return_is_undone_in_the_survivors_at_once() {
    fault_in_each_reversible_phase(Fault::Die);
}

#[test]
fn silence_before_the_point_of_no_return_ends_at_the_deadline() {
    fault_in_each_reversible_phase(Fault::Silent);
}

#[test]
fn an_answer_of_the_wrong_kind_is_a_failure() {
    fault_in_each_reversible_phase(Fault::WrongAnswer);
}

#[test]
fn an_answer_for_another_phase_is_a_failure() {
    fault_in_each_reversible_phase(Fault::OtherPhase);
}

/// The member's connection cannot be used any more: its process undoes without an order when the connection ends.
fn bad_bytes_in_each_reversible_phase(fault: Fault, words: &str) {
    for case in CASES {
        for phase in case.phases {
            let world = world(case.start, 1, *phase, fault);
            let error = act(&world, case.action).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words), "no '{words}' in: {text}");
            let Trouble::Refused { failures, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(failures[0].who.member, MemberId(2), "{error}");
            for id in [1, 3] {
                assert!(!world.phases_of(id).contains(&case.no_return));
                assert_eq!(world.state(id), case.start, "{error}");
            }
            assert!(!world.phases_of(2).contains(&case.no_return));
        }
    }
}

#[test]
fn bytes_that_are_no_answer_are_a_failure_of_who_sent_them() {
    bad_bytes_in_each_reversible_phase(Fault::Garbage, "no Sublet message");
}

#[test]
fn half_an_answer_ends_at_the_deadline() {
    bad_bytes_in_each_reversible_phase(Fault::HalfAnswer, "did not answer within");
}

#[test]
fn a_descriptor_beside_an_answer_is_a_failure() {
    bad_bytes_in_each_reversible_phase(Fault::WithFd, "descriptors where none belong");
}

#[test]
fn an_answer_given_twice_is_not_taken_for_the_next_one() {
    bad_bytes_in_each_reversible_phase(Fault::Twice, "an answer to no question");
}

#[test]
fn after_the_point_of_no_return_the_survivors_are_taken_to_the_end() {
    let faults = [Fault::Die, Fault::Silent, Fault::Fail(FailureKind::Faulted), Fault::WrongAnswer];
    let late = [
        (Action::Pause, MemberState::Active, Phase::Release),
        (Action::Pause, MemberState::Active, Phase::Verify),
        (Action::Resume, MemberState::Paused, Phase::Activate),
    ];
    for fault in faults {
        for (action, start, phase) in late {
            for victim in 0..MEMBERS {
                let world = world(start, victim, phase, fault);
                let report = report(act(&world, action).unwrap());
                let victim_id = victim as u64 + 1;
                assert_eq!(report.losses.len(), 1);
                assert_eq!(report.losses[0].who.member, MemberId(victim_id));
                assert_eq!(report.losses[0].step, Step::Phase(phase));
                let end = match action {
                    Action::Pause => MemberState::Paused,
                    Action::Resume => MemberState::Active,
                };
                for id in (1..=MEMBERS as u64).filter(|id| *id != victim_id) {
                    assert_eq!(world.state(id), end);
                }
            }
        }
    }
}

#[test]
fn a_short_timeout_limits_no_phase_that_finishes_or_undoes() {
    // Phases that prepare have two seconds, including the margin.
    let patient = Options { finish_timeout: Duration::from_secs(30), ..impatient() };
    let slow = Fault::Slow(2500);
    for (start, phase) in
        [(active(), Phase::Release), (active(), Phase::Verify), (paused(), Phase::Activate)]
    {
        let action =
            if start.state == MemberState::Active { Action::Pause } else { Action::Resume };
        let world = World::of(&[start.clone().with(phase, slow), start]);
        let mut coordinator =
            Coordinator::new(world.run_dir.clone(), tenant("train"), patient.clone());
        let report = report(act_by(&mut coordinator, action).unwrap());
        assert!(report.losses.is_empty(), "{phase:?}: {:?}", report.losses);
    }
    for (start, fails, undo) in
        [(active(), Phase::Drain, Phase::Abort), (paused(), Phase::Restore, Phase::Abort)]
    {
        let action =
            if start.state == MemberState::Active { Action::Pause } else { Action::Resume };
        let failing = start.clone().with(fails, Fault::Fail(FailureKind::Driver));
        let world = World::of(&[failing, start.with(undo, slow)]);
        let mut coordinator =
            Coordinator::new(world.run_dir.clone(), tenant("train"), patient.clone());
        let error = act_by(&mut coordinator, action).unwrap_err();
        assert!(error.left_unchanged(), "{error}");
    }
}

#[test]
fn two_silent_members_cost_no_more_time_than_one() {
    let silent = active().with(Phase::Drain, Fault::Silent);
    let world = World::of(&[silent.clone(), silent, active()]);
    let timeout = Some(Duration::from_secs(3));
    let options = Options { timeout, ..impatient() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
    let error = coordinator.pause(&mut quiet).unwrap_err();
    let Trouble::Refused { failures, .. } = &error else {
        panic!("{error}");
    };
    // Both members have had the same time. If they were asked one after the other, the second would have had twice as long.
    let seconds = [1, 2].map(|id| {
        let of = failures.iter().find(|failure| failure.who.member == MemberId(id));
        let said = of.and_then(|failure| failure.failure.message.split(' ').nth_back(1));
        said.and_then(|seconds| seconds.parse::<f64>().ok()).unwrap_or_else(|| panic!("{error}"))
    });
    assert!(seconds[1] < 1.8 * seconds[0] && seconds[0] < 1.8 * seconds[1], "{error}");
}

#[test]
fn a_late_answer_is_not_taken_for_the_answer_to_the_undo() {
    // The member's answer to the phase arrives during the wait for the undo.
    let late = active().with(Phase::Prepare, Fault::Late);
    let world = World::of(&[late, active()]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    let Trouble::Refused { undo_failures, .. } = &error else {
        panic!("{error}");
    };
    assert!(undo_failures.is_empty(), "{error}");
    assert_eq!(world.states(), [MemberState::Active; 2]);
}

#[test]
fn an_undo_that_fails_is_part_of_the_error() {
    let failure = Fault::Fail(FailureKind::Driver);
    let stuck = active().with(Phase::Abort, Fault::Fail(FailureKind::Faulted));
    let world = World::of(&[active().with(Phase::Drain, failure), stuck]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    assert!(!error.left_unchanged() && !error.is_retryable());
    let text = error.to_string();
    assert!(text.contains("but taking back failed for process"), "{text}");
}

#[test]
fn a_pause_that_copies_much_or_is_told_to_releases_while_it_saves() {
    let pause = |world: &World, releases_early| {
        let options = Options { releases_early, ..options() };
        let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
        report(coordinator.pause(&mut quiet).unwrap())
            .phases
            .iter()
            .map(|summary| summary.phase)
            .collect::<Vec<_>>()
    };
    let (first, meanwhile) = (Schedule::SaveFirst, Schedule::SaveMeanwhile);
    for (mib, releases_early, expected) in
        [(2048, false, meanwhile), (1, false, first), (1, true, meanwhile)]
    {
        let mut copies = active();
        copies.host.demand.copying.to_memory_bytes = mib << 20;
        let world = World::of(&[active(), copies]);
        let phases =
            [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify];
        assert_eq!(pause(&world, releases_early), phases);
        for id in [1, 2] {
            assert!(world.log.lock().unwrap().contains(&Line::Schedule(id, expected)));
        }
        assert_eq!([1, 2].map(|id| world.phases_of(id)), [phases, phases]);
    }
}

#[test]
fn members_that_fit_the_host_alone_but_not_together_are_refused_before_anything_is_saved() {
    let limits = vec![HostLimit { kind: LimitKind::Available, bytes: 3 * GIB }];
    let mut script = active();
    let demand = HostDemand {
        saved_bytes: 2 * GIB,
        grow_bytes: 2 * GIB,
        grow_with_needed_bytes: 2 * GIB,
        grow_with_all_bytes: 4 * GIB,
        ..HostDemand::default()
    };
    script.host = HostNeed { demand, limits };
    let world = World::of(&[script.clone()]);
    assert_eq!(report(world.coordinator().pause(&mut quiet).unwrap()).phases.len(), 5);

    let world = World::of(&[script.clone(), script]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("needs 4294967296 bytes of host memory"), "{text}");
    assert!(text.contains("MemAvailable leaves 3221225472"), "{text}");
    assert!(error.is_retryable() && error.left_unchanged());
    for id in [1, 2] {
        let phases = [Phase::CloseGate, Phase::Drain, Phase::Abort];
        assert_eq!(world.phases_of(id), phases);
    }
}

#[test]
fn missing_device_memory_is_told_and_can_be_tried_again() {
    let missing_bytes = 3 * GIB;
    let failure = Fault::Fail(FailureKind::OutOfDeviceMemory { missing_bytes });
    let world = World::of(&[paused(), paused().with(Phase::Create, failure)]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err();
    assert_eq!(error.missing_device_bytes(), Some(missing_bytes));
    assert!(error.is_retryable() && error.left_unchanged());
    assert!(error.to_string().contains("paused, contents kept"), "{error}");
}

#[test]
fn without_the_consent_of_all_nothing_is_touched() {
    let mut refusing = active();
    refusing.consent = Some(Fault::Fail(FailureKind::NoConsent));
    let mut waiting = active();
    waiting.consent = Some(Fault::Silent);
    let world = World::of(&[refusing, waiting]);
    let mut asking = options();
    asking.consent = Some(Duration::from_mins(1));
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), asking);
    let started = Instant::now();
    let error = coordinator.pause(&mut quiet).unwrap_err();
    // The other member still waits for its application; the coordinator does not wait for that.
    assert!(started.elapsed() < Duration::from_secs(40));
    assert!(error.to_string().contains("own call to pause"), "{error}");
    assert!(error.is_retryable());
    assert_eq!(world.states(), [MemberState::Active; 2]);
    assert!(!world.phases_of(2).contains(&Phase::Abort));
}

#[test]
fn with_the_consent_of_all_the_pause_goes_on() {
    let world = World::of(&[active(), active()]);
    let mut asking = options();
    asking.consent = Some(Duration::from_secs(5));
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), asking);
    assert_eq!(report(coordinator.pause(&mut quiet).unwrap()).phases.len(), 5);
    let lines = world.lines();
    assert!(matches!(lines[0], Line::Consent(_)) && matches!(lines[1], Line::Consent(_)));
}

#[test]
fn a_member_silent_at_the_greeting_is_named_and_nothing_is_touched() {
    let mut silent = active();
    silent.hello = Some(Fault::Silent);
    let world = World::of(&[active(), silent]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    assert!(matches!(&error, Trouble::NoGreeting { failure, .. }
        if failure.who.member == MemberId(2)));
    assert!(world.lines().is_empty());
}

#[test]
fn a_longer_timeout_is_one_for_the_greeting_too() {
    let mut slow = active();
    slow.hello = Some(Fault::Slow(11_000));
    let world = World::of(&[active(), slow]);
    // Other questions have the contact timeout, which is ample on a busy machine, and shorter than the greeting.
    let told = |seconds, contact_timeout| Options {
        timeout: Some(Duration::from_secs(seconds)),
        contact_timeout,
        ..options()
    };
    let pause = |options| {
        Coordinator::new(world.run_dir.clone(), tenant("train"), options).pause(&mut quiet)
    };
    let error = pause(told(0, Duration::from_millis(1))).unwrap_err();
    assert!(matches!(error, Trouble::NoGreeting { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("pause of 'train' not started: process "), "{text}");
    assert!(
        text.contains("`--timeout` gives it more time, or end it; nothing was changed"),
        "{text}"
    );
    assert_eq!(report(pause(told(300, Duration::from_secs(10))).unwrap()).phases.len(), 5);
}

#[test]
fn a_member_that_dies_at_the_greeting_is_left_out() {
    let mut dying = active();
    dying.hello = Some(Fault::Die);
    let world = World::of(&[active(), dying]);
    let outcome = world.coordinator().pause(&mut quiet).unwrap();
    assert_eq!(report(outcome).phases[0].members.len(), 1);
}

#[test]
fn those_who_wait_together_are_told_why_it_will_not_happen() {
    let world = World::of(&[active(), active().with(Phase::Drain, Fault::Die), active()]);
    let mut asking = options();
    asking.consent = Some(Duration::from_secs(5));
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), asking);
    let error = coordinator.pause(&mut quiet).unwrap_err();
    let told: Vec<_> = world
        .lines()
        .into_iter()
        .filter_map(|line| match line {
            Line::GivenUp(id, why) => Some((id, why)),
            Line::Schedule(..)
            | Line::Began(..)
            | Line::Ended(..)
            | Line::Consent(_)
            | Line::CalledOff(_) => None,
        })
        .collect();
    let mut ids: Vec<_> = told.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 3]);
    for (_, why) in told {
        assert_eq!(why, error.to_string());
        assert!(why.contains("(python train.py)"), "{why}");
    }
}

#[test]
fn a_resume_that_leaves_lost_imports_out_asks_for_that() {
    let world = World::of(&[paused(), paused()]);
    let leaving = Options { lost_imports: LostImports::LeaveOut, ..options() };
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), leaving);
    let report = report(coordinator.resume(&mut quiet).unwrap());
    assert_eq!(report.phases[2].phase, Phase::Import);
    assert_eq!(world.states(), [MemberState::Active; 2]);
}

#[test]
fn what_is_lent_still_when_the_devices_are_drained_ends_a_pause() {
    let mut lender = active();
    lender.lent = Some(MemberId(9));
    let world = World::of(&[active(), lender]);
    // The members name no family, so that they are not asked before. The pause tries until the deadline.
    let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), impatient());
    let error = coordinator.pause(&mut quiet).unwrap_err();
    let kinds: Vec<_> = error.failures().iter().map(|member| member.failure.kind).collect();
    assert_eq!(kinds, [FailureKind::Lent], "{error}");
    assert!(error.left_unchanged(), "{error}");
    assert_eq!(world.states(), [MemberState::Active; 2]);
    assert!(!world.phases_of(2).contains(&Phase::Prepare));
}
