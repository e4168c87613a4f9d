//! Lets every process of a tenant allocate the host memory of its next pause, while the application runs.
//!
//! It takes no part in pauses and resumes: it holds no lock, and one of them may begin at any time. After the request each
//! process goes on alone, even if the requester ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use sublet_coordinator::{Coordinator, Everybody, MemberFailure, Next, Peers, Trouble, Who};
use sublet_protocol::host_memory::shortage;
use sublet_protocol::time::micros;
use sublet_protocol::wire::{HostProgress, HostStage, HostStep};

/// The time between two looks at the progress of the processes.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// One process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PreparedProcess {
    /// The process.
    pub who: Who,
    /// Its command.
    pub command: String,
    /// Its progress with host memory for its next pause.
    pub host: HostProgress,
}

/// The account of the host memory that has come in.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PrepareReport {
    /// The tenant.
    pub tenant: String,
    /// From the first message to the last answer, in microseconds.
    pub wall_us: u64,
    /// By process id.
    pub processes: Vec<PreparedProcess>,
    /// Processes that did not answer.
    pub failures: Vec<MemberFailure>,
}

impl PrepareReport {
    /// Has every process got all the memory that it wanted?
    pub fn is_complete(&self) -> bool {
        let is_there = |process: &PreparedProcess| {
            process.host.stage == HostStage::Rests
                && process.host.held_bytes >= process.host.wanted_bytes
        };
        self.failures.is_empty() && self.processes.iter().all(is_there)
    }
}

/// Lets every process allocate the host memory that a pause would need now, at low priority. Waits until all is allocated, but no
/// longer than `until`; the rest is allocated afterwards. `progress` is called with all processes each time one of them reports.
/// Pauses and resumes may begin at any time.
///
/// # Errors
/// [`Trouble`]. If some processes stop before all is allocated, it succeeds, and the result says which and why.
pub fn prepare(
    coordinator: &Coordinator,
    until: Option<Instant>,
    progress: &mut dyn FnMut(&[PreparedProcess]),
) -> Result<PrepareReport, Trouble> {
    let span = tracing::info_span!("tenant.prepare", tenant = %coordinator.tenant());
    let _entered = span.enter();
    let started = Instant::now();
    let mut all = coordinator.greeted(&coordinator.dir()?)?;
    let mut said = BTreeMap::new();
    let mut members = all.peers.greeted();
    ask_host(coordinator, &mut all, HostStep::Need, &members, &mut said)?;
    if let Some(shortage) = shortage(said.values().filter_map(|said| said.need.as_ref())) {
        return Err(Trouble::HostShort { tenant: coordinator.tenant().clone(), shortage });
    }
    members.retain(|index| said.contains_key(index));
    let mut step = HostStep::Begin;
    let processes = loop {
        let asked = ask_host(coordinator, &mut all, step, &members, &mut said);
        if asked.is_err() {
            let within = coordinator.options().contact_timeout;
            all.peers.tell(&all.peers.all(), HostStep::CallOff, within);
            asked?;
        }
        let processes = processes(&all.peers, &said);
        progress(&processes);
        let goes_on =
            |said: &HostProgress| matches!(said.stage, HostStage::Grows | HostStage::Waits);
        members.retain(|index| said.get(index).is_some_and(goes_on));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
        if members.is_empty() || left.is_zero() {
            break processes;
        }
        coordinator.options().rest(left);
        step = HostStep::Look;
    };
    Ok(PrepareReport {
        tenant: coordinator.tenant().to_string(),
        wall_us: micros(started.elapsed()),
        processes,
        failures: all.failures,
    })
}

/// Lets `members` take a step, and notes their answers.
fn ask_host(
    coordinator: &Coordinator,
    all: &mut Everybody,
    step: HostStep,
    members: &[usize],
    said: &mut BTreeMap<usize, HostProgress>,
) -> Result<(), Trouble> {
    said.retain(|index, _| !members.contains(index));
    all.ask(members, coordinator.inquiry(step), |_, index, says| {
        said.insert(index, says);
        Next::Done
    });
    if coordinator.options().is_called_off() {
        return Err(Trouble::NotPrepared { tenant: coordinator.tenant().clone() });
    }
    Ok(())
}

/// Returns all processes that have answered, by process id.
fn processes(peers: &Peers, said: &BTreeMap<usize, HostProgress>) -> Vec<PreparedProcess> {
    let each = said.iter().filter_map(|(&index, said)| {
        let command = peers.info(index)?.command.clone();
        let host = HostProgress { need: None, ..said.clone() };
        Some(PreparedProcess { who: peers.who(index), command, host })
    });
    let mut processes: Vec<_> = each.collect();
    processes.sort_by_key(|process| process.who.pid);
    processes
}
