//! Real members led message by message: their answers about a decision, and the state after an undone step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use vmm_pool::driver::sim::{FaultSpan, GRANULARITY_BYTES, SimDriver};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _, DriverCode, DriverOp};
use vmm_pool::{Class, Contents, Selection};

use super::*;
use sublet_member::{CONNECTIONS_MAX, Member};
use sublet_protocol::cut::{Limits, Seen};
use sublet_protocol::scope::TagNames;
use sublet_protocol::stepping::Calls;
use sublet_protocol::wire::{Hold, Needed, Needs};
use sublet_stage::job::{Job, Line, ROUND, SOON, patient, until};
use vmm_pool::gate::Passage;

pub(super) const BEFORE_RELEASE: [Phase; 3] = [Phase::CloseGate, Phase::Drain, Phase::Prepare];
pub(super) const BEFORE_ACTIVATE: [Phase; 3] = [Phase::Create, Phase::Restore, Phase::Import];
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

fn kv() -> Scope {
    Scope::Tags { tags: TagNames::Named(["kv".to_owned()].into()), owner: None }
}

/// Allocates kept memory of the tag `kv`.
fn allocate(member: &Member<SimDriver>) {
    let pool = member.pool();
    pool.driver().make_current(DEVICE).unwrap();
    let class = Class { library: "test", tag: "kv".to_owned(), contents: Contents::Keep };
    let prop = AllocationProp::pinned_on(DEVICE);
    pool.enter().block_allocate(GRANULARITY_BYTES, &prop, &[DEVICE], class).unwrap();
}

/// A process of the tenant that accepts connections and answers nothing, like a stopped one.
fn silent(job: &Job) -> impl Sized + use<> {
    job.members[0].presence().run_dir().listen(&tenant("train"), MemberId(1)).unwrap()
}

pub(super) fn is_under_way(state: MemberState) -> bool {
    matches!(state, MemberState::Offloading | MemberState::Restoring)
}

/// Does the gate let work through, now or after another holder has released it?
fn lets_work_through(member: &std::sync::Arc<Member<SimDriver>>) -> bool {
    lets_through(Passage::Use, member)
}

fn lets_through(passage: Passage, member: &std::sync::Arc<Member<SimDriver>>) -> bool {
    let (tell, hear) = mpsc::channel();
    let member = std::sync::Arc::clone(member);
    std::thread::spawn(move || {
        drop(member.gate().pass(passage));
        let _told = tell.send(());
    });
    hear.recv_timeout(Duration::from_secs(10)).is_ok()
}

#[test]
fn a_capture_that_a_call_begins_behind_the_shut_gate_refuses_the_drain_and_no_device_is_asked() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let waits = || member.pool().driver().faults().calls(DriverOp::ContextSynchronize);
    let before = waits();
    let mut line = Line::to(member);
    let call = member.gate().pass_for("cuStreamBeginCapture", Passage::Capture);
    line.lead(Phase::CloseGate, &Scope::Whole);
    member.captures().begun();
    drop(call);
    let reply = line.phase_of(Phase::Drain, &Scope::Whole);
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    assert_eq!((failure.kind, waits()), (FailureKind::InCapture, before), "{failure:?}");
    line.lead(Phase::Abort, &Scope::Whole);
    member.captures().ended();
    report(job.coordinator(patient()).pause(&mut quiet).unwrap());
}

#[test]
fn what_the_driver_refuses_to_release_is_not_offered_again_with_every_look_at_the_cut() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let faults = member.pool().driver().faults();
    faults.fail(DriverOp::Release, FaultSpan::From(1), DriverCode::UNKNOWN);
    let mut line = Line::to(member);
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify] {
        line.lead(phase, &kv());
    }
    let look = Request::Cut(Hold { limits: Limits::default(), seen: Seen::default(), wait_ms: 0 });
    // When the member answers, all work after the last step is done.
    assert!(matches!(line.ask(&look), Reply::Cut(_)));
    let offered = faults.calls(DriverOp::Release);
    assert!(offered > 1, "{offered}");
    for _ in 0..3 {
        assert!(matches!(line.ask(&look), Reply::Cut(_)));
    }
    assert_eq!(faults.calls(DriverOp::Release), offered);
}

#[test]
fn one_that_followed_a_decision_tells_it_to_those_that_ask_later() {
    let pause = (MemberState::Active, BEFORE_RELEASE, Phase::Release, MemberState::Paused);
    let resume = (MemberState::Paused, BEFORE_ACTIVATE, Phase::Activate, MemberState::Active);
    for (before, phases, decision, after) in [pause, resume] {
        let job = Job::new(3);
        if before == MemberState::Paused {
            report(job.coordinator(options()).pause(&mut quiet).unwrap());
        }
        let mut lines: Vec<_> = job.members.iter().map(|member| Line::to(member)).collect();
        for phase in phases {
            for line in &mut lines {
                line.lead(phase, &Scope::Whole);
            }
        }
        // The first is told and the second asks it. Then the first has ended, and the third asks the second.
        lines[0].lead(decision, &Scope::Whole);
        let third = lines.pop();
        drop(lines.pop());
        until("the second to follow", || !is_under_way(job.states()[1]));
        assert_eq!(job.states()[1], after);
        job.members[0].leave();
        drop(third);
        until("the third to follow", || !is_under_way(job.states()[2]));
        assert_eq!(job.states()[2], after);
    }
}

#[test]
fn beside_a_silent_process_all_go_back() {
    for (phases, is_resume) in [(BEFORE_RELEASE, false), (BEFORE_ACTIVATE, true)] {
        let job = Job::new(2);
        if is_resume {
            report(job.coordinator(options()).pause(&mut quiet).unwrap());
        }
        let _silent = silent(&job);
        let mut lines: Vec<_> = job.members.iter().map(|member| Line::to(member)).collect();
        for phase in phases {
            for line in &mut lines {
                line.lead(phase, &Scope::Whole);
            }
        }
        drop(lines);
        until("the members to settle", || !job.states().into_iter().any(is_under_way));
        let before = if is_resume { MemberState::Paused } else { MemberState::Active };
        assert_eq!(job.states(), [before; 2], "is it a resume: {is_resume}");
    }
}

#[test]
fn one_that_has_not_saved_all_goes_back_whatever_others_may_have_been_told() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let _silent = silent(&job);
    let mut line = Line::to(member);
    line.lead(Phase::CloseGate, &Scope::Whole);
    line.lead(Phase::Drain, &Scope::Whole);
    let faults = member.pool().driver().faults();
    faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    line.fail(Phase::Prepare, &Scope::Whole);
    drop(line);
    until("the member to settle", || !is_under_way(member.lifecycle().state()));
    assert_eq!(member.lifecycle().state(), MemberState::Active);
    let resident = member.pool().holdings().resident_bytes(&Selection::Whole);
    assert_eq!(resident.get(&DEVICE), Some(&GRANULARITY_BYTES));
}

#[test]
fn an_undone_pause_lets_ranks_go_while_its_coordinator_is_still_there() {
    let job = Job::new(1);
    let member = &job.members[0];
    let mut line = Line::to(member);
    let hold = Request::Cut(Hold { limits: Limits::default(), seen: Seen::default(), wait_ms: 0 });
    // The round is undone after each step, and also after the hold alone.
    for steps in 0..=BEFORE_RELEASE.len() {
        let reply = line.ask(&hold);
        assert!(matches!(reply, Reply::Cut(_)), "{reply:?}");
        assert!(member.info().held);
        for phase in &BEFORE_RELEASE[..steps] {
            line.lead(*phase, &Scope::Whole);
        }
        line.lead(Phase::Abort, &Scope::Whole);
        assert!(!member.info().held, "after {steps} steps");
        assert!(lets_work_through(member), "after {steps} steps");
    }
}

#[test]
fn a_resume_by_tag_that_fails_leaves_the_process_running() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let mut line = Line::to(member);
    let faults = member.pool().driver().faults();
    for phase in BEFORE_RELEASE.into_iter().chain([Phase::Release, Phase::Verify]) {
        line.lead(phase, &kv());
    }
    assert!(lets_work_through(member), "a pause by tag");

    faults.fail(DriverOp::Create, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    line.fail(Phase::Create, &kv());
    assert_eq!(member.lifecycle().state(), MemberState::Active);
    assert!(lets_work_through(member), "nothing was taken");

    faults.fail(DriverOp::CopyToDevice, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    line.lead(Phase::Create, &kv());
    line.fail(Phase::Restore, &kv());
    line.lead(Phase::Abort, &kv());
    assert_eq!(member.lifecycle().state(), MemberState::Active);
    assert!(lets_work_through(member), "undone");

    faults.clear();
    for phase in BEFORE_ACTIVATE.into_iter().chain([Phase::Activate]) {
        line.lead(phase, &kv());
    }
    assert!(lets_work_through(member), "it is back");
}

#[test]
fn a_whole_resume_that_fails_leaves_the_process_paused_and_frees_possible() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let mut line = Line::to(member);
    for phase in BEFORE_RELEASE.into_iter().chain([Phase::Release, Phase::Verify]) {
        line.lead(phase, &Scope::Whole);
    }
    let faults = member.pool().driver().faults();

    faults.fail(DriverOp::Create, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    line.fail(Phase::Create, &Scope::Whole);
    assert_eq!(member.lifecycle().state(), MemberState::Paused);
    assert!(lets_through(Passage::GiveUp, member), "nothing was taken");

    faults.fail(DriverOp::CopyToDevice, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    line.lead(Phase::Create, &Scope::Whole);
    line.fail(Phase::Restore, &Scope::Whole);
    line.lead(Phase::Abort, &Scope::Whole);
    assert_eq!(member.lifecycle().state(), MemberState::Paused);
    assert!(lets_through(Passage::GiveUp, member), "undone");

    faults.clear();
    for phase in BEFORE_ACTIVATE.into_iter().chain([Phase::Activate]) {
        line.lead(phase, &Scope::Whole);
    }
    assert!(lets_work_through(member), "it is back");
}

#[test]
fn a_coordinator_whose_work_is_over_makes_room_as_any_idle_client() {
    let job = Job::new(1);
    let member = &job.members[0];
    let mut first = Line::to(member);
    first.lead(Phase::CloseGate, &Scope::Whole);
    first.lead(Phase::Abort, &Scope::Whole);
    // All places are in use, and one more connection arrives.
    let others: Vec<_> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let mut line = Line::to(member);
            let reply = line.ask(&Request::Hello);
            assert!(matches!(reply, Reply::Member(_)), "{reply:?}");
            line
        })
        .collect();
    let gone = first.0.receive::<Reply>(Instant::now() + SOON);
    assert!(gone.is_err_and(|error| error.peer_is_gone()), "the longest idle");
    drop::<Vec<Line>>(others);
}

#[test]
fn one_whose_coordinator_ended_is_led_by_nobody_and_puts_its_name_back() {
    let job = Job::new(1);
    let mut line = Line::to(&job.members[0]);
    line.lead(Phase::CloseGate, &Scope::Whole);
    drop(line);
    until("it to run on", || job.states() == [MemberState::Active]);
    std::fs::remove_dir_all(job.run_dir.path()).unwrap();
    until("its socket", || job.members[0].presence().socket_path().exists());
}

#[test]
fn the_next_command_stays_connected_while_processes_settle_what_was_left_half_done() {
    let job = Job::new(2);
    report(job.coordinator(options()).pause(&mut quiet).unwrap());
    let mut lines: Vec<_> = job.members.iter().map(|member| Line::to(member)).collect();
    for phase in BEFORE_ACTIVATE {
        for line in &mut lines {
            line.lead(phase, &Scope::Whole);
        }
    }
    // The next coordinator leads before the process has seen the end of the other, and orders it to settle. The process asks
    // its peer, which settles the same round and asks in return.
    let mut next = Line::to(&job.members[0]);
    let settle = Request::Phase(TakePhase {
        round: ROUND + 1,
        alone: false,
        order: Phase::Settle.order(&Told::new(&Scope::Whole, &[])),
        timeout_ms: 30_000,
    });
    let reply = next.ask(&settle);
    assert!(matches!(reply, Reply::PhaseDone(Phase::Settle, _)), "{reply:?}");
    drop(lines);
    until("both to go back", || job.states() == [MemberState::Paused; 2]);
    assert!(matches!(next.ask(&Request::Hello), Reply::Member(_)), "it is still connected");
}

#[test]
fn the_next_command_settles_what_a_process_has_not_begun_to_do_of_the_last() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    report(job.coordinator(options()).pause(&mut quiet).unwrap());
    let faults = member.pool().driver().faults();
    let mut busy = Some(faults.hold(DriverOp::MemoryGetInfo));
    let mut creating = Some(faults.hold(DriverOp::Create));
    let mut asker = Line::to(member);
    let needs = Needs { scope: Scope::Whole, timeout_ms: 30_000, all_devices: false };
    asker.0.send(&Request::Needs(needs), &[], Instant::now() + SOON).unwrap();
    assert!(busy.as_ref().unwrap().is_met(SOON));
    // The command ends before the process has begun its order.
    let line = Line::to(member);
    let Line(mut connection, _) = line;
    let create = Phase::Create.order(&Told::new(&Scope::Whole, &[]));
    let create = TakePhase { round: ROUND, alone: false, order: create, timeout_ms: 30_000 };
    connection.send(&Request::Phase(create), &[], Instant::now() + SOON).unwrap();
    until("the order to be read", || member.info().in_round);
    drop(connection);
    assert_eq!(member.lifecycle().state(), MemberState::Paused);
    let mut recovered = false;
    let resumed = job.coordinator(options()).resume(&mut |event: Event<'_>| {
        if matches!(event, Event::StepDone { step: Step::Hello, .. }) && busy.take().is_some() {
            until("it to begin", || member.lifecycle().state() == MemberState::Restoring);
        } else if matches!(event, Event::Recovering { .. }) {
            recovered = true;
            creating = None;
        }
    });
    report(resumed.unwrap());
    assert!(recovered);
    assert_eq!(member.lifecycle().state(), MemberState::Active);
}

#[test]
fn what_a_resume_needs_a_paused_process_says_and_one_on_its_way_refuses() {
    let job = Job::new(1);
    let member = &job.members[0];
    allocate(member);
    let mut line = Line::to(member);
    let question = Needs { scope: Scope::Whole, timeout_ms: 30_000, all_devices: false };
    let mut needs = || line.0.call(&question, Instant::now() + SOON).unwrap();
    assert_eq!(needs(), Ok(Needed::default()), "nothing is away");
    for phase in BEFORE_RELEASE {
        line.lead(phase, &Scope::Whole);
    }
    let refused = line.0.call(&question, Instant::now() + SOON).unwrap().unwrap_err();
    assert_eq!(
        (refused.kind, member.lifecycle().state()),
        (FailureKind::WrongState, MemberState::Offloading)
    );
    for phase in [Phase::Release, Phase::Verify] {
        line.lead(phase, &Scope::Whole);
    }
    let devices = line.0.call(&question, Instant::now() + SOON).unwrap().unwrap();
    assert_eq!(devices.devices.iter().map(|device| device.bytes).sum::<u64>(), GRANULARITY_BYTES);
    assert_eq!(member.lifecycle().state(), MemberState::Paused);
    assert_eq!(member.info().asked.map(|asked| asked.phase), Some(Phase::Verify));
}

#[test]
fn who_has_made_an_idle_device_busy_is_not_let_on_next() {
    let job = Job::new(1);
    let member = &job.members[0];
    let driver = member.pool().driver();
    driver.make_current(DEVICE).unwrap();
    let prop = AllocationProp::pinned_on(DEVICE);
    let _row = member.pool().enter().create(GRANULARITY_BYTES, &prop, Class::default()).unwrap();
    let mut line = Line::to(member);
    line.lead(Phase::CloseGate, &Scope::Whole);
    // The device is idle until a thread is let in, and does not finish the work that the thread launches.
    let mut order = 0;
    let mut next = |calls| {
        order += 1;
        line.step(order, calls)
    };
    let (at_work, is_over) = (Arc::clone(member), Arc::new(AtomicBool::new(false)));
    let ends = Arc::clone(&is_over);
    let thread = std::thread::spawn(move || {
        while !ends.load(Ordering::Relaxed) {
            drop(at_work.gate().pass(Passage::Use));
        }
    });
    until("the thread waits", || next(Calls::None).waiting == 1);
    until("the device is idle", || next(Calls::None).is_idle);
    let launched = driver.faults().hold(DriverOp::ContextSynchronize);
    next(Calls::Ready(8));
    until("the thread waits again", || next(Calls::None).waiting == 1);
    let said = next(Calls::Ready(8));
    assert_eq!((said.steps, said.ready, said.is_idle), (1, 0, false));
    drop(launched);
    until("the device is idle", || next(Calls::None).is_idle);
    assert_eq!(next(Calls::None).ready, 1);
    is_over.store(true, Ordering::Relaxed);
    line.lead(Phase::Abort, &Scope::Whole);
    thread.join().unwrap();
}
