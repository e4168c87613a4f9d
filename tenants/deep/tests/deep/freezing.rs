//! Deep pauses, with a driver that fails in every call. All members of a world are in this process, so the driver knows one.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::driver::DriverCode;

use sublet_coordinator::{Coordinator, Options, Outcome, Trouble};
use sublet_protocol::checkpoints::{Call, CheckpointError, Checkpointer, ProcessState};
use sublet_protocol::scope::Scope;
use sublet_protocol::transport::poll_until;
use sublet_protocol::wire::{FailureKind, MemberState, Phase};
use sublet_stage::fake::{World, options, quiet, tenant};
use sublet_stage::script::{Fault, PAUSE, RESUME, Script, active, paused, report};

/// The driver's part, of one process.
#[derive(Debug)]
struct Driver(Mutex<Standing>);

#[derive(Debug)]
struct Standing {
    state: ProcessState,
    /// Calls that fail, each once, by name.
    fails: Vec<(&'static str, DriverCode)>,
    made: Vec<&'static str>,
    /// The time that the first look at a process takes.
    answers_after: Duration,
    /// A call that says that it is done, and does nothing.
    lies: Option<&'static str>,
    /// Locks wait until this ends.
    silence: Option<crossbeam_channel::Receiver<()>>,
}

impl Standing {
    /// Why `call` fails now, if it is to.
    fn fails(&mut self, call: &'static str) -> Option<CheckpointError> {
        let at = self.fails.iter().position(|(fails, _)| *fails == call)?;
        let (_, code) = self.fails.remove(at);
        Some(CheckpointError::Driver { call, code })
    }
}

impl Driver {
    fn at(state: ProcessState) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Standing {
            state,
            fails: Vec::new(),
            made: Vec::new(),
            answers_after: Duration::ZERO,
            lies: None,
            silence: None,
        })))
    }

    fn fail(&self, call: &'static str, code: DriverCode) {
        self.0.lock().unwrap().fails.push((call, code));
    }

    fn state(&self) -> ProcessState {
        self.0.lock().unwrap().state
    }

    fn take_made(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().made)
    }

    fn step(
        &self,
        call: &'static str,
        from: ProcessState,
        to: ProcessState,
    ) -> Result<(), CheckpointError> {
        let mut standing = self.0.lock().unwrap();
        standing.made.push(call);
        if let Some(error) = standing.fails(call) {
            return Err(error);
        }
        if standing.state != from {
            return Err(CheckpointError::Driver { call, code: DriverCode::ILLEGAL_STATE });
        }
        if standing.lies != Some(call) {
            standing.state = to;
        }
        Ok(())
    }
}

impl Checkpointer for Driver {
    fn state(&self, _: u32) -> Result<ProcessState, CheckpointError> {
        let mut standing = self.0.lock().unwrap();
        // Nothing arrives on an empty list.
        let until = Instant::now() + std::mem::take(&mut standing.answers_after);
        poll_until(&mut [], until).unwrap();
        standing.fails("state").map_or(Ok(standing.state), Err)
    }

    fn make(&self, call: Call, _: u32) -> Result<(), CheckpointError> {
        match call {
            Call::Lock(_) => {
                let silence = self.0.lock().unwrap().silence.clone();
                if let Some(silence) = silence {
                    silence.recv().unwrap_err();
                }
                self.step("lock", ProcessState::Running, ProcessState::Locked)
            }
            Call::Checkpoint => {
                self.step("checkpoint", ProcessState::Locked, ProcessState::Checkpointed)
            }
            Call::Restore => self.step("restore", ProcessState::Checkpointed, ProcessState::Locked),
            Call::Unlock => self.step("unlock", ProcessState::Locked, ProcessState::Running),
        }
    }
}

const RUNNING: ProcessState = ProcessState::Running;
const CHECKPOINTED: ProcessState = ProcessState::Checkpointed;

fn coordinator(world: &World, driver: &Arc<Driver>) -> Coordinator {
    within(world, driver, options())
}

/// One that pauses deep, with the other options of these.
fn within(world: &World, driver: &Arc<Driver>, options: Options) -> Coordinator {
    let contexts = Some(sublet_deep::contexts(Arc::clone(driver) as Arc<dyn Checkpointer>));
    let options = Options { is_deep: true, contexts, ..options };
    Coordinator::new(world.run_dir.clone(), tenant("train"), options)
}

#[test]
fn a_deep_pause_freezes_behind_the_pause_and_a_resume_thaws_before_all_else() {
    let (world, driver) = (World::of(&[active()]), Driver::at(RUNNING));
    let mut coordinator = coordinator(&world, &driver);
    let paused = report(coordinator.pause(&mut quiet).unwrap());
    assert_eq!(world.phases_of(1), [&PAUSE[..], &[Phase::Freeze]].concat());
    assert_eq!((driver.state(), world.states()), (CHECKPOINTED, vec![MemberState::Deep]));
    assert_eq!(driver.take_made(), ["lock", "checkpoint"]);
    let freeze = paused.phases.last().unwrap();
    assert_eq!(freeze.phase, Phase::Freeze);
    let steps: Vec<_> = freeze.members[0].report.steps.iter().map(|step| step.0.as_str()).collect();
    assert_eq!(steps, ["lock", "checkpoint"]);
    assert!(!paused.is_partial());
    let again = coordinator.pause(&mut quiet).unwrap();
    assert_eq!(again, Outcome::AlreadyPaused { stays: Vec::new() });

    world.log.lock().unwrap().clear();
    let resumed = report(coordinator.resume(&mut quiet).unwrap());
    assert_eq!(world.phases_of(1), [&[Phase::Thaw], &RESUME[..]].concat());
    assert_eq!(resumed.phases[0].phase, Phase::Thaw);
    assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Active]));
    assert_eq!(driver.take_made(), ["restore", "unlock"]);
}

#[test]
fn the_time_of_a_deep_pause_is_all_that_it_took() {
    let loading = Duration::from_millis(300);
    for script in [active(), paused()] {
        let (world, driver) = (World::of(&[script]), Driver::at(RUNNING));
        // The first look loads the driver.
        driver.0.lock().unwrap().answers_after = loading;
        let done = report(coordinator(&world, &driver).pause(&mut quiet).unwrap());
        assert!(Duration::from_micros(done.wall_us) >= loading, "{} us", done.wall_us);
    }
}

#[test]
fn a_deep_resume_names_the_look_that_failed() {
    let (world, driver) = (World::of(&[active()]), Driver::at(RUNNING));
    let mut coordinator = coordinator(&world, &driver);
    report(coordinator.pause(&mut quiet).unwrap());
    driver.fail("state", DriverCode::UNKNOWN);
    let error = coordinator.resume(&mut quiet).unwrap_err();
    let why = error.failures()[0].to_string();
    assert!(why.contains("state failed with CUDA_ERROR_UNKNOWN"), "{why}");
    report(coordinator.resume(&mut quiet).unwrap());
    assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Active]));
}

#[test]
fn a_tenant_that_is_paused_is_frozen_without_another_pause() {
    let (world, driver) = (World::of(&[paused()]), Driver::at(RUNNING));
    let done = report(coordinator(&world, &driver).pause(&mut quiet).unwrap());
    assert_eq!(world.phases_of(1), [Phase::Freeze]);
    assert_eq!(done.phases.len(), 1);
    assert_eq!((driver.state(), world.states()), (CHECKPOINTED, vec![MemberState::Deep]));
}

/// The coordinator of a deep pause, or of a resume, has ended between two calls: the driver alone knows how far it had
/// come.
#[test]
fn what_was_left_half_way_goes_on_from_where_the_driver_says_that_it_is() {
    let half_way = [RUNNING, ProcessState::Locked, CHECKPOINTED];
    for (state, missing) in
        half_way.into_iter().zip([&["lock", "checkpoint"][..], &["checkpoint"], &[]])
    {
        let (world, driver) = (World::of(&[Script::new(MemberState::Deep)]), Driver::at(state));
        let done = coordinator(&world, &driver).pause(&mut quiet).unwrap();
        assert_eq!(driver.take_made(), missing, "{state:?}");
        assert_eq!(matches!(done, Outcome::AlreadyPaused { .. }), state == CHECKPOINTED);
        assert_eq!((driver.state(), world.states()), (CHECKPOINTED, vec![MemberState::Deep]));
    }
    for (state, missing) in half_way.into_iter().zip([&[][..], &["unlock"], &["restore", "unlock"]])
    {
        let (world, driver) = (World::of(&[Script::new(MemberState::Deep)]), Driver::at(state));
        report(coordinator(&world, &driver).resume(&mut quiet).unwrap());
        assert_eq!(driver.take_made(), missing, "{state:?}");
        assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Active]));
    }
}

#[test]
fn a_call_that_fails_leaves_the_tenant_paused_and_the_next_command_goes_on() {
    for call in ["lock", "checkpoint"] {
        let (world, driver) = (World::of(&[active()]), Driver::at(RUNNING));
        driver.fail(call, DriverCode::UNKNOWN);
        let mut coordinator = coordinator(&world, &driver);
        let done = report(coordinator.pause(&mut quiet).unwrap());
        assert!(done.is_partial() && done.losses.is_empty(), "{call}");
        let why = done.not_deep[0].to_string();
        assert!(why.contains(call) && why.contains("CUDA_ERROR_UNKNOWN"), "{why}");
        assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Paused]));
        assert!(!report(coordinator.pause(&mut quiet).unwrap()).is_partial(), "{call}");
        assert_eq!((driver.state(), world.states()), (CHECKPOINTED, vec![MemberState::Deep]));
    }
    for (call, code) in [
        ("restore", DriverCode::UNKNOWN),
        ("unlock", DriverCode::UNKNOWN),
        ("restore", DriverCode::OUT_OF_MEMORY),
    ] {
        let world = World::of(&[Script::new(MemberState::Deep)]);
        let driver = Driver::at(CHECKPOINTED);
        driver.fail(call, code);
        let mut coordinator = coordinator(&world, &driver);
        let error = coordinator.resume(&mut quiet).unwrap_err();
        assert!(error.to_string().contains("step 'thaw'"), "{error}");
        let is_short = code == DriverCode::OUT_OF_MEMORY;
        assert_eq!(
            (error.missing_device_bytes(), error.is_retryable()),
            (is_short.then_some(0), is_short)
        );
        assert_eq!(world.states(), [MemberState::Deep], "{call}");
        report(coordinator.resume(&mut quiet).unwrap());
        assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Active]));
    }
}

#[test]
fn what_the_driver_says_is_done_and_is_not_leaves_the_tenant_paused() {
    for (lies, state) in [("lock", RUNNING), ("checkpoint", ProcessState::Locked)] {
        let (world, driver) = (World::of(&[active()]), Driver::at(RUNNING));
        driver.0.lock().unwrap().lies = Some(lies);
        let done = report(coordinator(&world, &driver).pause(&mut quiet).unwrap());
        let why = done.not_deep[0].to_string();
        assert!(why.contains(&format!("the driver says that it is {state:?}")), "{why}");
        assert_eq!((driver.state(), world.states()), (RUNNING, vec![MemberState::Paused]));
    }
}

#[test]
fn a_driver_that_does_not_answer_is_why_the_tenant_is_not_deep() {
    let (world, driver) = (World::of(&[paused()]), Driver::at(RUNNING));
    let (over, silence) = crossbeam_channel::bounded(0);
    driver.0.lock().unwrap().silence = Some(silence);
    // Time for the other steps, also on a busy machine.
    let ample = Duration::from_secs(10);
    let options = Options { timeout: Some(ample), finish_timeout: ample, ..options() };
    let mut coordinator = within(&world, &driver, options);
    let done = report(coordinator.pause(&mut quiet).unwrap());
    let why = done.not_deep[0].to_string();
    assert!(why.contains("cuCheckpointProcessLock did not return within 15 s"), "{why}");
    assert_eq!(world.states(), [MemberState::Paused]);
    drop(over);
}

#[test]
fn a_member_that_refuses_to_freeze_leaves_the_tenant_paused() {
    let refuses = active().with(Phase::Freeze, Fault::Fail(FailureKind::NotNow));
    let (world, driver) = (World::of(&[refuses, active()]), Driver::at(RUNNING));
    let done = report(coordinator(&world, &driver).pause(&mut quiet).unwrap());
    assert_eq!(done.not_deep.len(), 1);
    assert_eq!(driver.take_made(), [""; 0]);
    assert_eq!(world.phases_of(2).last(), Some(&Phase::Thaw));
    assert_eq!(world.states()[1], MemberState::Paused);
}

#[test]
fn a_resume_that_comes_to_nothing_leaves_the_tenant_deep() {
    let full = FailureKind::OutOfDeviceMemory { missing_bytes: 7 };
    let script = Script::new(MemberState::Deep).with(Phase::Create, Fault::Fail(full));
    let (world, driver) = (World::of(&[script]), Driver::at(CHECKPOINTED));
    let error = coordinator(&world, &driver).resume(&mut quiet).unwrap_err();
    assert!(error.missing_device_bytes().is_some(), "{error}");
    assert_eq!((driver.state(), world.states()), (CHECKPOINTED, vec![MemberState::Deep]));
}

#[test]
fn what_cannot_be_frozen_or_thawed_is_refused_before_anything_moves() {
    let scope = Scope::Tags { tags: sublet_protocol::scope::TagNames::All, owner: None };
    let refused = |world: &World, options: Options| {
        let mut coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
        let error = coordinator.pause(&mut quiet).unwrap_err();
        assert!(matches!(error, Trouble::NotDeep { .. }) && error.left_unchanged());
        assert!(error.to_string().contains("`sublet pause train` frees its memory"), "{error}");
        assert!(world.phases_of(1).is_empty());
        error.to_string()
    };
    let world = World::of(&[active()]);
    let deep = || Options { is_deep: true, ..options() };
    let why = refused(&world, deep());
    assert!(why.contains("sublet pause train --deep"), "{why}");
    let with =
        |driver: Arc<Driver>| Options { contexts: Some(sublet_deep::contexts(driver)), ..deep() };
    let why = refused(&world, Options { scope, ..with(Driver::at(RUNNING)) });
    assert!(why.contains("memory of a tag"), "{why}");
    let why = refused(&world, with(Driver::at(ProcessState::Failed)));
    assert!(why.contains("could not bring it back"), "{why}");

    let world = World::of(&[Script::new(MemberState::Deep)]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err();
    assert!(error.to_string().contains("sublet resume train"), "{error}");
    assert_eq!(world.states(), [MemberState::Deep]);
}
