//! Deep pauses and their resumes. When all processes of a tenant are paused, the driver removes their contexts from the GPUs, by
//! their process ids.
//!
//! This is no further transaction: after any failure the tenant stays paused, with all contents, and a resume can run it again.
//! All processes are told first ([`Phase::Freeze`]), then locked, then checkpointed. A process that was told makes no driver
//! calls. If a step fails for one process, it is undone in the others. If a coordinator ends half-way, processes stay deep, and
//! only the driver knows the state of each. The next coordinator queries the driver, and goes on from there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};

use crossbeam_channel::Sender;
use vmm_pool::driver::DriverCode;

use super::{limit, word};
use sublet_coordinator::{Contexts, MemberFailure, OnFailure, Peers, Session, Step};
use sublet_protocol::checkpoints::{
    Call, CheckpointError, Checkpointer, ProcessState, unavailable,
};
use sublet_protocol::time::micros;
use sublet_protocol::wire::{FailureKind, MemberState, Phase, PhaseReport};

/// The folder in which CUDA programs look for the control daemon of MPS, unless the environment names another.
const MPS_PIPE_DIR: &str = "/tmp/nvidia-mps";
const MPS_PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY=";

/// The index of a process, the result of a call about it, and the time of the call.
type Made = (usize, Result<(), CheckpointError>, Duration);

/// Some of a session's members in a phase, with the result and the time of the driver's calls about each.
struct Moved {
    phase: Phase,
    members: Vec<usize>,
    done: BTreeMap<usize, PhaseReport>,
    failures: Vec<MemberFailure>,
    /// Members that were skipped because the driver could not report their state, and why.
    unseen: BTreeMap<usize, CheckpointError>,
}

impl Moved {
    fn by(phase: Phase, members: Vec<usize>) -> Self {
        let (done, failures, unseen) = Default::default();
        Self { phase, members, done, failures, unseen }
    }

    fn note(&mut self, index: usize, call: Call, took: Duration) {
        let report = self.done.entry(index).or_default();
        report.steps.push((word(call).to_owned(), micros(took)));
        report.elapsed_us += micros(took);
        report.driver_calls += 1;
    }

    fn fail(&mut self, peers: &Peers, index: usize, error: &CheckpointError) {
        let kind = match error {
            // The driver does not report how much is missing.
            CheckpointError::Driver { code: DriverCode::OUT_OF_MEMORY, .. }
                if self.phase == Phase::Thaw =>
            {
                FailureKind::OutOfDeviceMemory { missing_bytes: 0 }
            }
            CheckpointError::Unavailable { .. } => FailureKind::WrongState,
            CheckpointError::Driver { .. }
            | CheckpointError::Silent { .. }
            | CheckpointError::State { .. } => FailureKind::Driver,
        };
        let (who, step) = (peers.who(index), Step::Phase(self.phase));
        self.failures.push(MemberFailure::new(who, step, kind, error.to_string()));
    }
}

/// An implementation of [`Contexts`] with the driver's calls about other processes.
#[derive(Debug)]
struct ByDriver(Arc<dyn Checkpointer>);

/// Returns the [`Contexts`] that `driver` serves. Calls nothing yet.
pub fn contexts(driver: Arc<dyn Checkpointer>) -> Arc<dyn Contexts> {
    Arc::new(ByDriver(driver))
}

impl Contexts for ByDriver {
    fn check(&self, leg: &Session<'_>) -> Result<(), String> {
        let peers = &leg.cast.peers;
        peers.all().into_iter().try_for_each(|index| {
            let pid = known(peers.pid_here(index)).map_err(|error| error.to_string());
            let checked = pid.and_then(|pid| check(&*self.0, pid));
            checked.map_err(|why| format!("{}: {why}", peers.who(index)))
        })
    }

    fn take(&self, leg: &mut Session<'_>) {
        let lost = |who| leg.report.losses.iter().any(|loss| loss.who == who);
        let mut members = leg.cast.peers.all();
        members.retain(|index| leg.cast.peers.is_up(*index) && !lost(leg.cast.peers.who(*index)));
        for index in &members {
            leg.cast.peers.set_state(*index, MemberState::Paused);
        }
        self.freeze(leg, members);
    }

    fn take_rest(&self, leg: &mut Session<'_>) -> bool {
        let peers = &leg.cast.peers;
        let mut members = peers.all();
        members.retain(|index| {
            let state = peers.state(*index);
            let is_away = || self.state(peers, *index) == Ok(ProcessState::Checkpointed);
            peers.is_up(*index)
                && (state == Some(MemberState::Paused)
                    || state == Some(MemberState::Deep) && !is_away())
        });
        let is_some = !members.is_empty();
        if is_some {
            self.freeze(leg, members);
        }
        is_some
    }

    fn bring_back(&self, leg: &mut Session<'_>, deep: &[usize]) -> Result<(), Vec<MemberFailure>> {
        let (began, mut moved) = (Instant::now(), Moved::by(Phase::Thaw, deep.to_vec()));
        self.thaw(leg, &mut moved);
        leg.report.add(leg.cast.summary(Phase::Thaw, began.elapsed(), moved.done));
        if moved.failures.is_empty() {
            return Ok(());
        }
        self.take_again(leg);
        Err(moved.failures)
    }

    fn take_again(&self, leg: &mut Session<'_>) {
        let phases = &leg.report.phases;
        let Some(thawed) = phases.iter().find(|summary| summary.phase == Phase::Thaw) else {
            return;
        };
        let mut members = leg.cast.peers.all();
        members.retain(|index| {
            let who = leg.cast.peers.who(*index);
            leg.cast.peers.is_up(*index) && thawed.members.iter().any(|other| other.who == who)
        });
        for failure in self.take_off(leg, members).failures {
            tracing::warn!(%failure, "paused, and not deep as before");
        }
    }
}

/// Returns the id of a process for the driver's calls. An id of another PID namespace may be another process here.
fn known(pid_here: Option<u32>) -> Result<u32, CheckpointError> {
    pid_here.ok_or_else(|| {
        unavailable("it has no id in this pid namespace: use a command in its container, or outside of both".to_owned())
    })
}

/// Lets `members` take `phase`, notes their answers, and returns those that have taken it.
fn tell(leg: &mut Session<'_>, phase: Phase, members: &[usize], moved: &mut Moved) -> Vec<usize> {
    let told = leg.cast.take(&leg.round.question(phase), members, OnFailure::WaitForAll);
    moved.failures.extend(told.failures.into_iter().map(|(_, failure)| failure));
    let note = |(index, report)| {
        moved.done.entry(index).or_default().add(report);
        index
    };
    told.done.into_iter().map(note).collect()
}

impl ByDriver {
    /// Removes the contexts of `members`, which are paused, from the devices. The report has the failures. After a failure,
    /// all members are paused as before.
    fn freeze(&self, leg: &mut Session<'_>, members: Vec<usize>) {
        let began = Instant::now();
        let Moved { phase, done, failures, .. } = self.take_off(leg, members);
        if failures.is_empty() {
            leg.report.add(leg.cast.summary(phase, began.elapsed(), done));
            // The driver has removed that memory with the contexts.
            leg.report.set_stays(Vec::new());
        }
        leg.report.not_deep = failures;
    }

    /// Removes the contexts of `members` from the devices. If that fails for one, it is undone in all others, as far as the
    /// driver does its part.
    fn take_off(&self, leg: &mut Session<'_>, members: Vec<usize>) -> Moved {
        let mut moved = Moved::by(Phase::Freeze, members);
        tell(leg, Phase::Freeze, &moved.members.clone(), &mut moved);
        if moved.failures.is_empty() {
            self.checkpoint(leg, &mut moved);
        }
        if !moved.failures.is_empty() {
            // This brings all into the same state again, as far as possible; a resume does the rest. A process that has not
            // answered in time may be ready by now.
            let up = |index: &usize| leg.cast.peers.is_up(*index);
            let asked = moved.members.iter().copied().filter(up).collect();
            let mut undone = Moved::by(Phase::Freeze, asked);
            self.thaw(leg, &mut undone);
            moved.failures.extend(undone.failures);
        }
        moved
    }

    /// Locks all, then checkpoints all. Stops after the first step that failed for any process.
    fn checkpoint(&self, leg: &Session<'_>, moved: &mut Moved) {
        let peers = &leg.cast.peers;
        let lock = Call::Lock(leg.cast.options.phase_timeout(Phase::Freeze));
        self.make_each(peers, lock, ProcessState::Running, moved);
        if moved.failures.is_empty() {
            self.make_each(peers, Call::Checkpoint, ProcessState::Locked, moved);
        }
        if moved.failures.is_empty() {
            self.arrived(peers, ProcessState::Checkpointed, moved);
        }
    }

    /// Restores the contexts of each member, whatever its state is.
    fn thaw(&self, leg: &mut Session<'_>, moved: &mut Moved) {
        let peers = &leg.cast.peers;
        self.make_each(peers, Call::Restore, ProcessState::Checkpointed, moved);
        self.make_each(peers, Call::Unlock, ProcessState::Locked, moved);
        let back = self.arrived(peers, ProcessState::Running, moved);
        for index in tell(leg, Phase::Thaw, &back, moved) {
            leg.cast.peers.set_state(index, MemberState::Paused);
        }
    }

    /// Returns the members that are in state `wanted`, by the driver. The others are noted as failed.
    fn arrived(&self, peers: &Peers, wanted: ProcessState, moved: &mut Moved) -> Vec<usize> {
        let mut arrived = moved.members.clone();
        arrived.retain(|index| {
            let error = match self.state(peers, *index) {
                Ok(state) if state == wanted => return true,
                Ok(state) => moved.unseen.remove(index).unwrap_or(CheckpointError::State { state }),
                Err(error) => error,
            };
            let who = peers.who(*index);
            if !moved.failures.iter().any(|said| said.who == who) {
                moved.fail(peers, *index, &error);
            }
            false
        });
        arrived
    }

    /// Makes one call, in parallel, about each member in state `from`. Waits for all, with a deadline.
    fn make_each(&self, peers: &Peers, call: Call, from: ProcessState, moved: &mut Moved) {
        let mut ready = moved.members.clone();
        ready.retain(|index| {
            let state = self.state(peers, *index);
            let is_ready = state == Ok(from);
            state.err().map(|error| moved.unseen.entry(*index).or_insert(error));
            is_ready
        });
        let (say, hear) = crossbeam_channel::unbounded();
        let mut waited_for = Vec::new();
        for index in ready {
            let begun = known(peers.pid_here(index)).and_then(|pid| {
                let begun = self.begin(call, (index, pid), &say);
                begun.map_err(|error| {
                    unavailable(format!("no thread to call the driver on ({error})"))
                })
            });
            match begun {
                Ok(()) => waited_for.push(index),
                Err(error) => moved.fail(peers, index, &error),
            }
        }
        let until = Instant::now() + limit(call);
        while !waited_for.is_empty() {
            let Ok((index, made, took)) = hear.recv_deadline(until) else { break };
            waited_for.retain(|waited| *waited != index);
            match made {
                Ok(()) => moved.note(index, call, took),
                Err(error) => moved.fail(peers, index, &error),
            }
        }
        let silent = CheckpointError::Silent { call: call.name(), waited: limit(call) };
        for index in waited_for {
            moved.fail(peers, index, &silent);
        }
    }

    /// Makes one call on its own thread, which sends the result. Calls run in parallel because each takes some 0.4 s and more.
    fn begin(&self, call: Call, (index, pid): (usize, u32), say: &Sender<Made>) -> io::Result<()> {
        let driver = Arc::clone(&self.0);
        let (say, say_so, began) = (say.clone(), say.clone(), Instant::now());
        // The thread that waited may have given up.
        vmm_pool::threads::spawn(
            "sublet-driver",
            move || drop(say.send((index, driver.make(call, pid), began.elapsed()))),
            move |text| {
                let error = unavailable(format!("Sublet failed inside ({text})"));
                drop(say_so.send((index, Err(error), began.elapsed())));
            },
        )
    }

    fn state(&self, peers: &Peers, index: usize) -> Result<ProcessState, CheckpointError> {
        self.0.state(known(peers.pid_here(index))?)
    }
}

/// Fails with the reason if the driver cannot remove or restore the contexts of process `pid`.
fn check(driver: &dyn Checkpointer, pid: u32) -> Result<(), String> {
    if let Some(tracer) = tracer_of(&PathBuf::from(format!("/proc/{pid}/status"))) {
        return Err(format!("process {tracer} traces it (a debugger?): end that first"));
    }
    if let Some(dir) = mps_of(&PathBuf::from(format!("/proc/{pid}/environ"))) {
        let dir = dir.display();
        return Err(format!("it runs under MPS ({dir}), where the driver cannot freeze a process"));
    }
    match driver.state(pid) {
        Ok(ProcessState::Failed) => {
            Err("the driver says that it could not bring it back: end it".to_owned())
        }
        state => state.map(drop).map_err(|error| error.to_string()),
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
    use super::*;

    #[test]
    fn a_process_of_another_pid_namespace_is_refused() {
        let why = known(None).unwrap_err().to_string();
        assert!(why.contains("no id in this pid namespace"), "{why}");
        assert_eq!(known(Some(7)), Ok(7));
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
