//! Swaps that overlap, over members that do what they are told, or not, at each stage.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use sublet_coordinator::*;
use sublet_protocol::identity::MemberId;
use sublet_protocol::run_dir::RunDir;
use sublet_protocol::wire::{Action, FailureKind, MemberState, Phase};
use sublet_stage::fake::{Line, World, impatient, options, quiet, tenant};
use sublet_stage::job::SOON;
use sublet_stage::script::{
    Deed, Fault, GIB, PAUSE, RELEASE_WINDOW, RESTORE_WINDOW, RESUME, Script, active, paused, report,
};
use sublet_swap::{Swap, swap};

/// Eight stages of one process.
const WINDOW: u64 = GIB / 8;

/// No longer than it takes for one that is silent, and the others to answer on a busy machine.
fn waiting_for(fault: Fault) -> Options {
    if fault == Fault::Silent { impatient() } else { options() }
}

/// Tenant `train` with these members, and `infer` with those, whose ids count from 5.
fn world(train: &[Script], infer: &[Script]) -> World {
    let mut world = World::of(train);
    for (id, script) in (5..).zip(infer) {
        world.add("infer", id, script.clone());
    }
    world
}

/// A paused member on a device with room for so much more.
fn tight(free_bytes: u64) -> Script {
    Script { free_bytes, ..paused() }
}

/// So little that nobody waits long for one that is silent: the time to move it is less than a second.
fn small(script: Script) -> Script {
    let Script { holds_bytes, unit_bytes, .. } = script;
    Script { holds_bytes: holds_bytes / SMALL, unit_bytes: unit_bytes / SMALL, ..script }
}

/// The part of the usual size, of members and of windows.
const SMALL: u64 = 64;
const SMALL_WINDOW: Option<u64> = Some(WINDOW / SMALL);

fn at(script: Script, deed: impl Into<Deed>, stage: usize, fault: Fault) -> Script {
    Script { fault_at: Some(stage), ..script.with(deed, fault) }
}

fn pair(run_dir: &RunDir, options: &Options) -> (Coordinator, Coordinator) {
    let coordinator = |name| Coordinator::new(run_dir.clone(), tenant(name), options.clone());
    (coordinator("train"), coordinator("infer"))
}

fn swapped(world: &World, options: &Options) -> Result<Swap, Trouble> {
    swapped_in(world, Some(WINDOW), options)
}

fn swapped_in(world: &World, window: Option<u64>, options: &Options) -> Result<Swap, Trouble> {
    let (mut from, mut to) = pair(&world.run_dir, options);
    swap(&mut from, &mut to, window, &mut quiet)
}

fn began(id: u64, deed: impl Into<Deed>) -> Line {
    Line::Began(id, deed.into())
}

fn ended(id: u64, deed: impl Into<Deed>) -> Line {
    Line::Ended(id, deed.into())
}

/// The number of times that `id` began `deed`.
fn times(world: &World, id: u64, deed: impl Into<Deed>) -> usize {
    let line = began(id, deed);
    world.lines().into_iter().filter(|other| *other == line).count()
}

/// Returns the first position of `what` in the log.
fn position(world: &World, what: &Line) -> usize {
    world.lines().iter().position(|line| line == what).unwrap()
}

fn last_position(world: &World, what: &Line) -> usize {
    world.lines().iter().rposition(|line| line == what).unwrap()
}

#[test]
fn a_swap_overlaps_what_leaves_with_what_comes() {
    let slow = at(active(), RELEASE_WINDOW, 4, Fault::AfterBegan(5, RESTORE_WINDOW));
    let world = world(&[active(), slow], &[tight(0), tight(0)]);
    let done = swapped(&world, &options()).unwrap();
    let (out, back) = (report(done.paused), report(done.resumed));
    assert_eq!(world.states()[..2], [MemberState::Paused; 2]);
    assert_eq!(world.states()[2..], [MemberState::Active; 2]);
    let phases = |report: &Report| -> Vec<_> { report.phases.iter().map(|p| p.phase).collect() };
    let left = [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release, Phase::Verify];
    assert_eq!(phases(&out), left);
    let came = [Phase::Restore, Phase::Import, Phase::Activate];
    assert_eq!(phases(&back), came);
    assert_eq!((out.devices[0].bytes, back.window_bytes), (2 * GIB, Some(WINDOW)));
    assert_eq!(back.devices[0].bytes, 2 * GIB);
    let taken: u64 = back.phases.iter().take(1).map(PhaseSummary::bytes).sum();
    assert_eq!(taken, 2 * GIB);
    // The first to come has begun before the last has left, and after all have let go of what they had imported.
    let first_in = position(&world, &began(5, RESTORE_WINDOW));
    let last_out = [1, 2].map(|id| last_position(&world, &ended(id, Phase::Release)));
    assert!(last_out.iter().any(|last| first_in < *last), "{first_in} {last_out:?}");
    for id in [1, 2] {
        assert!(position(&world, &ended(id, RELEASE_WINDOW)) < first_in);
    }
    // Everybody has done all that can be undone before anything is released.
    for id in [1, 2] {
        let ready = position(&world, &ended(id, Phase::Prepare));
        assert!(ready < position(&world, &began(1, RELEASE_WINDOW)));
    }
}

/// Bytes on the one device, as the answers have it, whenever an order to restore was sent.
#[test]
fn without_room_for_both_no_device_holds_more_than_the_larger_and_a_window() {
    for free_bytes in [0, WINDOW / 2, WINDOW, GIB] {
        let world = world(&[active()], &[tight(free_bytes)]);
        let done = swapped(&world, &options()).unwrap();
        let (out, back) = (report(done.paused), report(done.resumed));
        let mut stages: Vec<_> =
            out.stages.iter().map(|stage| (stage.ended_us, false, stage.bytes)).collect();
        stages.extend(back.stages.iter().map(|stage| (stage.ended_us, true, stage.bytes)));
        stages.sort_unstable();
        let (mut held, most) = (GIB, GIB + WINDOW.min(free_bytes));
        for (_, comes, bytes) in stages {
            held = if comes { held + bytes } else { held - bytes };
            assert!(held <= most, "{held} of {most} bytes, {free_bytes} free");
        }
        assert_eq!(times(&world, 5, Phase::Restore), 1);
    }
}

#[test]
fn with_room_for_both_the_first_leaves_in_one_step_and_the_second_comes_meanwhile() {
    let slow = active().with(Phase::Release, Fault::AfterEnded(5, RESTORE_WINDOW));
    let world = world(&[slow], &[tight(GIB + WINDOW)]);
    let done = swapped(&world, &options()).unwrap();
    assert!(matches!(done.resumed, Outcome::Completed(_)));
    assert_eq!((times(&world, 1, RELEASE_WINDOW), times(&world, 1, Phase::Release)), (0, 1));
    assert_eq!(times(&world, 5, RESTORE_WINDOW), 1);
    let came = position(&world, &ended(5, RESTORE_WINDOW));
    assert!(came < position(&world, &ended(1, Phase::Release)));
}

#[test]
fn one_that_moves_memory_is_not_overdue_whatever_the_deadline() {
    // Without its bytes, two seconds with the margin.
    let options = waiting_for(Fault::Silent);
    let slow = Fault::Slow(2500);
    for (leaves, comes) in [
        (active().with(Phase::Release, slow), tight(GIB + WINDOW)),
        (active(), tight(GIB + WINDOW).with(RESTORE_WINDOW, slow)),
        (active().with(Phase::Release, slow), tight(0)),
        // One allocation that is larger than a window.
        (at(Script { unit_bytes: GIB, ..active() }, RELEASE_WINDOW, 0, slow), tight(0)),
    ] {
        let world = world(&[leaves], &[comes]);
        let done = swapped(&world, &options).unwrap();
        let (out, back) = (report(done.paused), report(done.resumed));
        assert!(out.losses.is_empty() && back.losses.is_empty(), "{out:?} {back:?}");
        assert_eq!(world.states(), [MemberState::Paused, MemberState::Active]);
    }
}

#[test]
fn small_tenants_are_asked_no_more_often_than_in_a_pause_and_a_resume() {
    let world = world(&[active()], &[tight(0)]);
    let done = swapped_in(&world, Some(GIB), &options()).unwrap();
    assert!(matches!(done.resumed, Outcome::Completed(_)));
    assert_eq!((world.phases_of(1).len(), world.phases_of(5).len()), (PAUSE.len(), RESUME.len()));
}

#[test]
fn a_tenant_that_comes_to_other_devices_waits_for_nobody() {
    let world = world(&[active()], &[Script { uuid: "gpu-b", ..tight(2 * GIB) }]);
    let (out, back) = {
        let done = swapped(&world, &options()).unwrap();
        (report(done.paused), report(done.resumed))
    };
    assert_eq!((out.devices[0].uuid.as_str(), back.devices[0].uuid.as_str()), ("gpu-a", "gpu-b"));
    assert_eq!(back.devices.len(), 1);
    assert!(times(&world, 5, RESTORE_WINDOW) >= 1);
}

#[test]
fn a_process_without_device_memory_takes_part() {
    let empty = || Script { holds_bytes: 0, ..paused() };
    let world = world(&[active(), Script { holds_bytes: 0, ..active() }], &[tight(0), empty()]);
    let done = swapped(&world, &options()).unwrap();
    assert!(matches!(done.resumed, Outcome::Completed(_)));
    assert_eq!(world.states()[..2], [MemberState::Paused; 2]);
    assert_eq!(world.states()[2..], [MemberState::Active; 2]);
    assert_eq!(times(&world, 6, RESTORE_WINDOW), 1);
}

#[test]
fn a_swap_where_only_one_moves_is_a_pause_or_a_resume() {
    let one = world(&[paused()], &[tight(5 * GIB)]);
    let done = swapped(&one, &options()).unwrap();
    assert_eq!(done.paused, Outcome::AlreadyPaused { stays: Vec::new() });
    assert_eq!(one.phases_of(5), RESUME);
    let other = world(&[active()], &[active()]);
    let done = swapped(&other, &options()).unwrap();
    assert_eq!(done.resumed, Outcome::AlreadyActive);
    assert_eq!(other.phases_of(1), PAUSE);
    assert!(other.phases_of(5).is_empty());
}

#[test]
fn a_tenant_that_does_not_fit_stops_nobody() {
    // On a device of its own that nothing leaves.
    let world = world(&[active()], &[Script { uuid: "gpu-b", ..tight(GIB / 2) }]);
    let error = swapped(&world, &options()).unwrap_err();
    assert_eq!(error.missing_device_bytes(), Some(GIB / 2));
    assert!(
        error.is_about(&tenant("infer")) && error.is_retryable() && error.left_unchanged(),
        "{error}"
    );
    assert!(error.to_string().contains("not even without tenant 'train'"), "{error}");
    assert!(world.lines().is_empty());
}

#[test]
fn a_tenant_with_a_dead_or_faulted_process_stops_nobody() {
    for script in
        [Script::new(MemberState::Faulted), Script { hello: Some(Fault::Silent), ..paused() }]
    {
        let world = world(&[active()], &[tight(0), script]);
        let error = swapped(&world, &waiting_for(Fault::Silent)).unwrap_err();
        assert!(error.is_about(&tenant("infer")), "{error}");
        assert!(world.phases_of(1).is_empty());
        assert_eq!(world.state(1), MemberState::Active);
    }
}

#[test]
fn a_first_tenant_that_does_not_prepare_runs_on_and_the_second_is_not_asked() {
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare] {
        for fault in [Fault::Fail(FailureKind::OutOfHostMemory), Fault::Die, Fault::Silent] {
            let world = world(&[active(), active().with(phase, fault)], &[tight(0)]);
            let error = swapped(&world, &waiting_for(fault)).unwrap_err();
            assert!(error.is_about(&tenant("train")), "{error}");
            assert_eq!(world.state(1), MemberState::Active, "{phase:?} {fault:?}");
            assert!(world.phases_of(5).is_empty());
            assert_eq!(times(&world, 1, RELEASE_WINDOW), 0);
        }
    }
}

#[test]
fn a_second_tenant_that_fails_at_any_stage_is_undone_and_the_first_runs_again() {
    let faults = [
        Fault::Fail(FailureKind::OutOfDeviceMemory { missing_bytes: 7 }),
        Fault::Die,
        Fault::Silent,
        Fault::WrongAnswer,
        Fault::Garbage,
    ];
    for fault in faults {
        for (phase, stage) in [
            (RESTORE_WINDOW, 0),
            (RESTORE_WINDOW, 1),
            (Phase::Restore.into(), 0),
            (Phase::Import.into(), 0),
        ] {
            // It needs what both of the others have.
            let large = Script { holds_bytes: 2 * GIB, ..tight(0) };
            let failing = at(small(large), phase, stage, fault);
            let other = Script { holds_bytes: 0, ..paused() };
            let world = world(&[small(active()), small(active())], &[failing, other]);
            let error = swapped_in(&world, SMALL_WINDOW, &waiting_for(fault)).unwrap_err();
            let Trouble::WentBack { source, losses, .. } = &error else {
                panic!("{phase:?} {stage} {fault:?}: {error}")
            };
            assert!(losses.is_empty(), "{losses:?}");
            let failed =
                source.failures().iter().any(|failure| failure.step == Step::Phase(phase.phase()));
            assert!(failed, "{phase:?} {stage} {fault:?}: {source}");
            let said = "Tenant 'train' was paused for it, and is active again";
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(world.states()[..2], [MemberState::Active; 2]);
            assert_eq!(world.state(6), MemberState::Paused);
            // Its pause was finished before.
            for id in [1, 2] {
                let released = position(&world, &ended(id, Phase::Release));
                assert!(released < position(&world, &began(id, Phase::Create)));
            }
        }
    }
}

#[test]
fn one_that_dies_while_it_leaves_is_reported_and_the_second_comes() {
    for (phase, stage) in [(RELEASE_WINDOW, 0), (RELEASE_WINDOW, 3), (Phase::Release.into(), 0)] {
        let dying = at(active(), phase, stage, Fault::Die);
        let world = world(&[active(), dying], &[tight(0)]);
        let done = swapped(&world, &options()).unwrap();
        let out = report(done.paused);
        assert_eq!(out.losses.len(), 1, "{phase:?} {stage}");
        assert_eq!(out.losses[0].step, Step::Phase(phase.phase()));
        assert_eq!((world.state(1), world.state(5)), (MemberState::Paused, MemberState::Active));
    }
}

#[test]
fn one_that_is_silent_while_it_leaves_holds_nobody_up_for_ever() {
    let silent = at(small(active()), RELEASE_WINDOW, 1, Fault::Silent);
    let world = world(&[small(active()), silent], &[small(tight(0))]);
    let out = report(swapped_in(&world, SMALL_WINDOW, &waiting_for(Fault::Silent)).unwrap().paused);
    assert_eq!(out.losses.len(), 1);
    assert_eq!((world.state(1), world.state(5)), (MemberState::Paused, MemberState::Active));
}

#[test]
fn one_that_cannot_do_a_stage_is_told_to_release_what_is_left() {
    for stage in [0, 2] {
        let failing = at(active(), RELEASE_WINDOW, stage, Fault::Fail(FailureKind::Driver));
        let world = world(&[active(), failing], &[tight(0)]);
        let out = report(swapped(&world, &options()).unwrap().paused);
        assert!(out.losses.is_empty());
        assert!(out.notes.iter().any(|note| note.contains("was not released at first")), "{out:?}");
        assert_eq!(world.states()[..2], [MemberState::Paused; 2]);
        assert_eq!(times(&world, 2, Phase::Release), 1);
    }
}

#[test]
fn a_first_tenant_of_which_one_releases_too_late_comes_back_where_the_second_does_not_come() {
    let late = small(active()).with(Phase::Release, Fault::Slow(4000));
    let failing = small(tight(0)).with(Phase::Import, Fault::Fail(FailureKind::Driver));
    let world = world(&[late], &[failing]);
    let options = Options { contact_timeout: SOON, ..waiting_for(Fault::Silent) };
    let error = swapped(&world, &options).unwrap_err();
    let Trouble::WentBack { losses, .. } = &error else { panic!("{error}") };
    assert_eq!(losses[0].step, Step::Phase(Phase::Release));
    assert_eq!((world.state(1), world.state(5)), (MemberState::Active, MemberState::Paused));
}

#[test]
fn a_first_tenant_that_comes_back_slowly_has_the_time_of_an_undo() {
    let slow = active().with(Phase::Create, Fault::Slow(3000));
    let failing = tight(0).with(RESTORE_WINDOW, Fault::Fail(FailureKind::Driver));
    let world = world(&[slow], &[failing]);
    let options = Options { finish_timeout: SOON, ..impatient() };
    let error = swapped_in(&world, None, &options).unwrap_err();
    assert!(matches!(error, Trouble::WentBack { .. }), "{error}");
    assert_eq!((world.state(1), world.state(5)), (MemberState::Active, MemberState::Paused));
}

#[test]
fn a_first_tenant_that_cannot_come_back_is_named_beside_the_cause() {
    let stuck = active().with(Phase::Create, Fault::Fail(FailureKind::Driver));
    let failing = tight(0).with(RESTORE_WINDOW, Fault::Fail(FailureKind::Driver));
    let world = world(&[stuck], &[failing]);
    let error = swapped(&world, &options()).unwrap_err();
    let Trouble::NotBack { resume, source, .. } = &error else { panic!("{error}") };
    assert_eq!(resume.failures()[0].step, Step::Phase(Phase::Create));
    assert_eq!(source.failures()[0].step, Step::Phase(Phase::Restore));
    let said = error.to_string();
    for part in [
        "resuming tenant 'infer' failed",
        "The tenant is paused, contents kept as before",
        ". Tenant 'train' was paused for it, and could not be brought back",
        ". Tenant 'train' is paused with all contents: `sublet resume train` tries again",
    ] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!((world.state(1), world.state(5)), (MemberState::Paused, MemberState::Paused));
}

/// Swaps, and calls it off where `at` says so.
fn called_off(world: &World, at: impl Fn(&Event<'_>) -> bool) -> Trouble {
    let (interrupt, raise): (Interrupt, OwnedFd) = Interrupt::new().unwrap();
    let options = Options { interrupt: Some(interrupt), ..options() };
    let (mut from, mut to) = pair(&world.run_dir, &options);
    let mut tell = |event: Event<'_>| {
        if at(&event) {
            nix::unistd::write(&raise, &[1]).unwrap();
        }
    };
    swap(&mut from, &mut to, Some(WINDOW), &mut tell).unwrap_err()
}

#[test]
fn a_swap_called_off_is_undone_wherever_it_is() {
    let step_is = |event: &Event<'_>, wanted| {
        let (Event::StepDone { step, .. } | Event::MemberDone { step, .. }) = event else {
            return false;
        };
        *step == Step::Phase(wanted)
    };
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare] {
        let world = world(&[active()], &[tight(0)]);
        let error = called_off(&world, |event| step_is(event, phase));
        assert!(matches!(error, Trouble::CalledOff { .. }), "{error}");
        assert_eq!((world.state(1), world.state(5)), (MemberState::Active, MemberState::Paused));
        assert_eq!(times(&world, 1, RELEASE_WINDOW), 0);
    }
    for phase in [Phase::Release, Phase::Restore, Phase::Import] {
        let world = world(&[active()], &[tight(0)]);
        let error = called_off(&world, |event| step_is(event, phase));
        let Trouble::WentBack { source, .. } = &error else { panic!("{phase:?}: {error}") };
        let Trouble::CalledOff { action, .. } = **source else { panic!("{source}") };
        assert_eq!(action, Action::Resume);
        assert_eq!((world.state(1), world.state(5)), (MemberState::Active, MemberState::Paused));
    }
}

#[test]
fn two_swaps_the_opposite_way_take_turns() {
    let world = world(&[active()], &[tight(0)]);
    std::thread::scope(|scope| {
        let (mut from, mut to) = pair(&world.run_dir, &options());
        let there =
            scope.spawn(move || swap(&mut from, &mut to, Some(WINDOW), &mut quiet).map(drop));
        let (mut to, mut from) = pair(&world.run_dir, &options());
        let back =
            scope.spawn(move || swap(&mut from, &mut to, Some(WINDOW), &mut quiet).map(drop));
        there.join().unwrap().unwrap();
        back.join().unwrap().unwrap();
    });
    let states = (world.state(1), world.state(5));
    let either =
        [(MemberState::Paused, MemberState::Active), (MemberState::Active, MemberState::Paused)];
    assert!(either.contains(&states), "{states:?}");
}

#[test]
fn a_swap_with_a_tenant_that_is_not_there_pauses_nothing() {
    let world = World::of(&[active()]);
    let mut from = world.coordinator();
    let mut to = Coordinator::new(world.run_dir.clone(), tenant("infer"), options());
    let error = swap(&mut from, &mut to, None, &mut quiet).unwrap_err();
    assert!(error.is_gone() && error.is_about(&tenant("infer")), "{error}");
    assert!(world.lines().is_empty());
    // One whose processes are all dead is not there either.
    let dir = world.run_dir.tenant(&tenant("infer")).unwrap();
    drop(UnixListener::bind(dir.socket_path(MemberId(7)).unwrap()).unwrap());
    let error = swap(&mut from, &mut to, None, &mut quiet).unwrap_err();
    assert!(error.is_gone() && error.is_about(&tenant("infer")), "{error}");
    assert!(world.lines().is_empty());
}
