//! A deep pause, and the way back: the driver takes the contexts of a tenant's processes off the GPUs, by their process ids, when all of them stand paused.
//!
//! No transaction more: whatever fails, the tenant stays paused, with all contents, and a resume brings it back. All processes are told
//! first ([`Phase::Freeze`]), then locked, then checkpointed: one that knows calls the driver for nothing. What one process could not do is undone
//! in the others. A coordinator that ends half-way leaves processes that stand deep, and the driver alone knows how far each has come; the
//! next one asks it, and goes on from there.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmm_pool::driver::DriverCode;

use super::cast::{Cast, OnFailure, StepResult};
use super::report::{MemberFailure, Report, Step};
use super::round::Round;
use super::trouble::Trouble;
use sublet_protocol::checkpoints::{CheckpointError, Checkpointer, ProcessState, unavailable};
use sublet_protocol::scope::Scope;
use sublet_protocol::time::micros;
use sublet_protocol::wire::{Action, FailureKind, MemberState, Phase, PhaseReport};

/// The time limit of a checkpoint or a restore, for which the driver has no timeout. By what was measured, it is enough
/// for 8 TiB of pinned host memory.
const DRIVER_TIMEOUT: Duration = Duration::from_mins(3);
/// Beyond the timeout that the driver is told, for its answer.
const ANSWER_MARGIN: Duration = Duration::from_secs(5);
/// The folder in which CUDA programs look for the control daemon of MPS, unless the environment names another.
const MPS_PIPE_DIR: &str = "/tmp/nvidia-mps";
const MPS_PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY=";

/// The process by its index, what came of a call about it, and how long that took.
type Made = (usize, Result<(), CheckpointError>, Duration);

/// One call of [`Checkpointer`].
#[derive(Clone, Copy)]
enum Call {
    Lock(Duration),
    Checkpoint,
    Restore,
    Unlock,
}

impl Call {
    /// The name of the driver's call, and that under which reports list its time.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Lock(_) => ("cuCheckpointProcessLock", "lock"),
            Self::Checkpoint => ("cuCheckpointProcessCheckpoint", "checkpoint"),
            Self::Restore => ("cuCheckpointProcessRestore", "restore"),
            Self::Unlock => ("cuCheckpointProcessUnlock", "unlock"),
        }
    }

    fn timeout(self) -> Duration {
        match self {
            Self::Lock(timeout) => timeout + ANSWER_MARGIN,
            Self::Checkpoint | Self::Restore | Self::Unlock => DRIVER_TIMEOUT,
        }
    }

    fn make(self, driver: &dyn Checkpointer, pid: u32) -> Result<(), CheckpointError> {
        match self {
            Self::Lock(timeout) => driver.lock(pid, timeout),
            Self::Checkpoint => driver.checkpoint(pid),
            Self::Restore => driver.restore(pid),
            Self::Unlock => driver.unlock(pid),
        }
    }
}

/// Some of a session's members, what the driver has done with each, and how long that took.
#[derive(Default)]
struct Moved {
    done: Vec<(usize, PhaseReport)>,
    failures: Vec<MemberFailure>,
}

impl Moved {
    fn of(&mut self, index: usize) -> &mut PhaseReport {
        let position = self.done.iter().position(|(known, _)| *known == index);
        let position = position.unwrap_or_else(|| {
            self.done.push((index, PhaseReport::default()));
            self.done.len() - 1
        });
        &mut self.done[position].1
    }

    fn note(&mut self, index: usize, call: Call, took: Duration) {
        let report = self.of(index);
        report.steps.push((call.names().1.to_owned(), micros(took)));
        report.elapsed_us += micros(took);
        report.driver_calls += 1;
    }
}

/// The way to the contexts of a tenant's processes, for a pause or resume of it.
pub(super) struct Freezer<'s, 'a> {
    cast: &'s mut Cast<'a>,
    round: &'s Round<'a>,
}

impl<'s, 'a> Freezer<'s, 'a> {
    /// For `cast`, in `round`. The driver is asked nothing yet.
    pub(super) fn new(cast: &'s mut Cast<'a>, round: &'s Round<'a>) -> Self {
        Self { cast, round }
    }

    /// Refuses a deep pause that would not come to its end, before anything moves.
    pub(super) fn refuse_shallow(&self) -> Result<(), Trouble> {
        let refused = |why: String| Trouble::NotDeep { tenant: self.cast.tenant(), why };
        if *self.round.scope() != Scope::Whole {
            let why = "its processes run on without the memory of a tag, and need their contexts";
            return Err(refused(why.to_owned()));
        }
        let driver = self.driver().map_err(|error| refused(error.to_string()))?;
        for index in self.cast.peers.all() {
            let pid = self.pid_here(index).map_err(|error| error.to_string());
            let why = pid.map_or_else(Some, |pid| obstacle(&*driver, pid));
            if let Some(why) = why {
                return Err(refused(format!("{}: {why}", self.cast.peers.who(index))));
            }
        }
        Ok(())
    }

    fn driver(&self) -> Result<Arc<dyn Checkpointer>, CheckpointError> {
        self.cast.options.checkpointer.clone().ok_or_else(|| {
            unavailable(format!(
                "a process of a job cannot have the driver freeze processes, nor thaw them: the command can (sublet pause {0} --deep, sublet \
                 resume {0})",
                self.cast.tenant()
            ))
        })
    }

    /// The pause of all members that are not lost is complete: freezes them, and those that were paused before.
    pub(super) fn freeze_all(&mut self, report: &mut Report) {
        let mut members = self.cast.peers.all();
        members.retain(|index| {
            let who = self.cast.peers.who(*index);
            self.cast.peers.is_up(*index) && !report.losses.iter().any(|loss| loss.who == who)
        });
        for index in &members {
            self.cast.peers.set_state(*index, MemberState::Paused);
        }
        self.freeze(&members, report);
    }

    /// Those of all members that the driver has not taken off the devices.
    pub(super) fn not_frozen(&self) -> Vec<usize> {
        let mut members = self.cast.peers.all();
        members.retain(|index| {
            let state = self.cast.peers.state(*index);
            let is_away = || self.driver_state(*index) == Ok(ProcessState::Checkpointed);
            self.cast.peers.is_up(*index)
                && (state == Some(MemberState::Paused)
                    || state == Some(MemberState::Deep) && !is_away())
        });
        members
    }

    /// Takes the contexts of `members`, which stand paused, off the devices. What failed is in `report`, and those members, and all others,
    /// are paused as before.
    pub(super) fn freeze(&mut self, members: &[usize], report: &mut Report) {
        let began = Instant::now();
        let told = self.take(Phase::Freeze, members);
        let ready: Vec<usize> = told.done.iter().map(|(index, _)| *index).collect();
        let failures = told.failures.into_iter().map(|(_, failure)| failure).collect();
        let mut moved = Moved { done: told.done, failures };
        if moved.failures.is_empty() {
            self.take_off(&ready, &mut moved);
        }
        if moved.failures.is_empty() {
            report.add(self.cast.summary(Phase::Freeze, began.elapsed(), moved.done));
            // The driver has taken that with the contexts.
            report.set_stays(Vec::new());
            return;
        }
        // All stand alike again, as far as that goes; a resume does the rest. One that has not answered in time may be ready by now.
        let up = |index: &usize| self.cast.peers.is_up(*index);
        let asked: Vec<usize> = members.iter().copied().filter(up).collect();
        let mut undone = Moved::default();
        self.bring_back(&asked, Phase::Freeze, &mut undone);
        report.not_deep = moved.failures;
        report.not_deep.extend(undone.failures);
    }

    /// Locks all, then has all checkpointed. Stops behind the first step that failed for somebody.
    fn take_off(&self, members: &[usize], moved: &mut Moved) {
        let lock = Call::Lock(self.cast.options.phase_timeout(Phase::Freeze));
        let mut unseen = Vec::new();
        let running = self.in_state(members, ProcessState::Running, &mut unseen);
        self.make_each(lock, &running, Phase::Freeze, moved);
        if moved.failures.is_empty() {
            let locked = self.in_state(members, ProcessState::Locked, &mut unseen);
            self.make_each(Call::Checkpoint, &locked, Phase::Freeze, moved);
        }
        if moved.failures.is_empty() {
            for index in members {
                if let Err(error) = self.expect_state(*index, ProcessState::Checkpointed, &unseen) {
                    moved.failures.push(self.failure(*index, Phase::Freeze, &error));
                }
            }
        }
    }

    /// Brings the contexts of those of `members` back that stand deep, for a resume, and adds what came of it to `report`.
    ///
    /// # Errors
    /// [`Trouble::Refused`]: those that are not back. All stand as before, as far as the driver does its part.
    pub(super) fn thaw(&mut self, members: &[usize], report: &mut Report) -> Result<(), Trouble> {
        let is_deep = |index: &usize| self.cast.peers.state(*index) == Some(MemberState::Deep);
        let deep: Vec<usize> = members.iter().copied().filter(is_deep).collect();
        if deep.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let mut moved = Moved::default();
        self.bring_back(&deep, Phase::Thaw, &mut moved);
        report.add(self.cast.summary(Phase::Thaw, began.elapsed(), moved.done));
        if moved.failures.is_empty() {
            return Ok(());
        }
        self.freeze_again(report);
        Err(Trouble::refused(self.cast.tenant(), (Action::Resume, false), moved.failures))
    }

    /// A resume came to nothing: what it has thawed, by its `report`, is as before, as far as the driver does its part.
    pub(super) fn freeze_again(&mut self, report: &Report) {
        let Some(thawed) = report.phases.iter().find(|summary| summary.phase == Phase::Thaw) else {
            return;
        };
        let mut members = self.cast.peers.all();
        members.retain(|index| {
            let who = self.cast.peers.who(*index);
            self.cast.peers.is_up(*index) && thawed.members.iter().any(|other| other.who == who)
        });
        let mut report = Report::new(&self.cast.tenant(), Action::Pause);
        self.freeze(&members, &mut report);
        for failure in report.not_deep {
            tracing::warn!(%failure, "paused, and not deep as before");
        }
    }

    /// From wherever each of `members` is. `phase` is what it is part of.
    fn bring_back(&mut self, members: &[usize], phase: Phase, moved: &mut Moved) {
        let mut unseen = Vec::new();
        let away = self.in_state(members, ProcessState::Checkpointed, &mut unseen);
        self.make_each(Call::Restore, &away, phase, moved);
        let locked = self.in_state(members, ProcessState::Locked, &mut unseen);
        self.make_each(Call::Unlock, &locked, phase, moved);
        let mut back = Vec::new();
        for index in members {
            let who = self.cast.peers.who(*index);
            match self.expect_state(*index, ProcessState::Running, &unseen) {
                Ok(()) => back.push(*index),
                // Why is said already.
                Err(_) if moved.failures.iter().any(|failure| failure.who == who) => {}
                Err(error) => moved.failures.push(self.failure(*index, phase, &error)),
            }
        }
        let told = self.take(Phase::Thaw, &back);
        for (index, report) in &told.done {
            self.cast.peers.set_state(*index, MemberState::Paused);
            moved.of(*index).add(report.clone());
        }
        moved.failures.extend(told.into_failures());
    }

    fn take(&mut self, phase: Phase, members: &[usize]) -> StepResult<PhaseReport> {
        self.cast.take(&self.round.question(phase), members, OnFailure::WaitForAll)
    }

    /// Makes one call about each of `members` at the same time, and waits for all, with a deadline.
    fn make_each(&self, call: Call, members: &[usize], phase: Phase, moved: &mut Moved) {
        let (say, hear) = crossbeam_channel::unbounded();
        let mut waited_for = Vec::new();
        for &index in members {
            match self.begin(call, index, &say) {
                Ok(()) => waited_for.push(index),
                Err(error) => moved.failures.push(self.failure(index, phase, &error)),
            }
        }
        let until = Instant::now() + call.timeout();
        while !waited_for.is_empty() {
            let Ok((index, made, took)) = hear.recv_deadline(until) else { break };
            waited_for.retain(|waited| *waited != index);
            match made {
                Ok(()) => moved.note(index, call, took),
                Err(error) => moved.failures.push(self.failure(index, phase, &error)),
            }
        }
        let silent = CheckpointError::Silent { call: call.names().0, waited: call.timeout() };
        moved.failures.extend(waited_for.iter().map(|index| self.failure(*index, phase, &silent)));
    }

    /// Makes one call on a thread of its own, which says what came of it. Not one after the other: each takes some 0.4 s and
    /// more.
    fn begin(&self, call: Call, index: usize, say: &Sender<Made>) -> Result<(), CheckpointError> {
        let (driver, pid) = (self.driver()?, self.pid_here(index)?);
        let (say, say_so, began) = (say.clone(), say.clone(), Instant::now());
        // The thread that waited may have given up.
        let made = vmm_pool::threads::spawn(
            "sublet-driver",
            move || drop(say.send((index, call.make(&*driver, pid), began.elapsed()))),
            move |text| {
                let error = unavailable(format!("Sublet failed inside ({text})"));
                drop(say_so.send((index, Err(error), began.elapsed())));
            },
        );
        made.map_err(|error| unavailable(format!("no thread to call the driver on ({error})")))
    }

    fn driver_state(&self, index: usize) -> Result<ProcessState, CheckpointError> {
        self.driver()?.state(self.pid_here(index)?)
    }

    /// The id by which the driver is asked about a process. That of another pid namespace may be another process here.
    fn pid_here(&self, index: usize) -> Result<u32, CheckpointError> {
        self.cast.peers.pid_here(index).ok_or_else(|| {
            unavailable("it has no id in this pid namespace: use a command in its container, or outside of both".to_owned())
        })
    }

    /// Those of `members` that stand in `state`, by the driver. Whom it could not be asked about is `unseen`.
    fn in_state(
        &self,
        members: &[usize],
        state: ProcessState,
        unseen: &mut Vec<(usize, CheckpointError)>,
    ) -> Vec<usize> {
        let mut is = |index: &usize| {
            self.driver_state(*index).map_err(|error| unseen.push((*index, error))) == Ok(state)
        };
        members.iter().copied().filter(&mut is).collect()
    }

    /// Refuses a process that stands elsewhere. If it was `unseen`, and passed over for that, the call that failed is why.
    fn expect_state(
        &self,
        index: usize,
        wanted: ProcessState,
        unseen: &[(usize, CheckpointError)],
    ) -> Result<(), CheckpointError> {
        let state = self.driver_state(index)?;
        if state == wanted {
            return Ok(());
        }
        let missed = unseen.iter().find(|(other, _)| *other == index);
        Err(missed.map_or(CheckpointError::State { state }, |(_, error)| error.clone()))
    }

    fn failure(&self, index: usize, phase: Phase, error: &CheckpointError) -> MemberFailure {
        let kind = match error {
            // How much is missing the driver does not say.
            CheckpointError::Driver { code: DriverCode::OUT_OF_MEMORY, .. }
                if phase == Phase::Thaw =>
            {
                FailureKind::OutOfDeviceMemory { missing_bytes: 0 }
            }
            CheckpointError::Unavailable { .. } => FailureKind::WrongState,
            CheckpointError::Driver { .. }
            | CheckpointError::Silent { .. }
            | CheckpointError::State { .. } => FailureKind::Driver,
        };
        let who = self.cast.peers.who(index);
        MemberFailure::new(who, Step::Phase(phase), kind, error.to_string())
    }
}

/// Returns what keeps the driver from taking the contexts of process `pid` away, or from bringing them back.
fn obstacle(driver: &dyn Checkpointer, pid: u32) -> Option<String> {
    if let Some(tracer) = tracer_of(&PathBuf::from(format!("/proc/{pid}/status"))) {
        return Some(format!("process {tracer} traces it (a debugger?): end that first"));
    }
    if let Some(dir) = mps_of(&PathBuf::from(format!("/proc/{pid}/environ"))) {
        return Some(format!(
            "it runs under MPS ({}), where the driver cannot freeze a process",
            dir.display()
        ));
    }
    match driver.state(pid) {
        Ok(ProcessState::Failed) => {
            Some("the driver says that it could not bring it back: end it".to_owned())
        }
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    }
}

/// Returns the id of the process that traces another one, by the kernel's `status` file of the latter.
fn tracer_of(status: &Path) -> Option<u32> {
    let status = fs::read_to_string(status).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok().filter(|pid| *pid > 0)
}

/// Returns the folder of the MPS control daemon that a process with this environment finds, if there is one.
fn mps_of(environ: &Path) -> Option<PathBuf> {
    let environ = fs::read(environ).unwrap_or_default();
    let mut words = environ.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let named = words.find_map(|word| word.strip_prefix(MPS_PIPE_VARIABLE).map(PathBuf::from));
    Some(named.unwrap_or_else(|| MPS_PIPE_DIR.into())).filter(|dir| dir.join("control").exists())
}

#[cfg(test)]
mod tests {
    use sublet_stage::fake::{World, tenant};
    use sublet_stage::script::Script;

    use super::*;
    use crate::session::Session;
    use crate::{Coordinator, Depth, Event, Options};

    /// The driver, of a process that runs, which nobody changes.
    #[derive(Debug)]
    struct Untouched;

    impl Checkpointer for Untouched {
        fn state(&self, _: u32) -> Result<ProcessState, CheckpointError> {
            Ok(ProcessState::Running)
        }

        fn lock(&self, _: u32, _: Duration) -> Result<(), CheckpointError> {
            panic!("nothing is to be called")
        }

        fn checkpoint(&self, _: u32) -> Result<(), CheckpointError> {
            panic!("nothing is to be called")
        }

        fn restore(&self, _: u32) -> Result<(), CheckpointError> {
            panic!("nothing is to be called")
        }

        fn unlock(&self, _: u32) -> Result<(), CheckpointError> {
            panic!("nothing is to be called")
        }
    }

    #[test]
    fn a_process_of_another_pid_namespace_is_refused_whatever_id_it_says_that_it_has() {
        let world = World::of(&[Script::new(MemberState::Active)]);
        let checkpointer: Option<Arc<dyn Checkpointer>> = Some(Arc::new(Untouched));
        let options = Options { depth: Depth::Contexts, checkpointer, ..Options::default() };
        let coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
        let held = coordinator.hold(Action::Pause).unwrap();
        let mut progress = |_: Event<'_>| {};
        let mut session =
            Session::open(&held, &coordinator.options, Action::Pause, &mut progress).unwrap();
        assert!(session.refuse_shallow().is_ok());
        assert!(session.cast.peers.who(0).pid.is_some(), "its own id, for reports");
        session.cast.peers.move_out_of_sight(0);
        let error = session.refuse_shallow().unwrap_err();
        assert!(error.to_string().contains("no id in this pid namespace"), "{error}");
    }

    #[test]
    fn a_tracer_and_a_daemon_of_mps_are_seen() {
        let base = tempfile::tempdir().unwrap();
        let status = base.path().join("status");
        for (text, tracer) in [("Name:\tx\nTracerPid:\t0\n", None), ("TracerPid:\t71\n", Some(71))]
        {
            fs::write(&status, text).unwrap();
            assert_eq!(tracer_of(&status), tracer);
        }
        let (environ, dir) = (base.path().join("environ"), base.path().join("mps"));
        fs::write(&environ, format!("A=1\0{MPS_PIPE_VARIABLE}{}\0", dir.display())).unwrap();
        fs::create_dir(&dir).unwrap();
        assert_eq!(mps_of(&environ), None, "nobody listens");
        fs::write(dir.join("control"), "").unwrap();
        assert_eq!(mps_of(&environ), Some(dir));
    }
}
