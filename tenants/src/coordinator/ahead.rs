//! Has every process of a tenant bring in the host memory that its next pause takes, while the application runs.
//!
//! It takes no part in pauses and resumes: it holds no lock, and one of them may come at any time. Each process goes on by
//! itself once it has been asked, also when the asker ends.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::cast::Everybody;
use super::conversation::{Inquiry, Next};
use super::peers::Peers;
use super::report::{MemberFailure, Who};
use super::{Coordinator, Trouble};
use crate::host_memory::shortage;
use crate::run_dir::TenantDir;
use crate::time::{micros, millis};
use crate::wire::{HostProgress, HostStage, HostStep};

/// The time after which a process that has nothing new to say says the same again.
const SLICE: Duration = Duration::from_millis(500);

/// Whether the asker waits until all is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It does.
    ForAll,
    /// Until then at most: what is missing comes in afterwards.
    Until(Instant),
}

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
    /// Is all there that every process wanted?
    pub fn is_complete(&self) -> bool {
        let is_there = |process: &PreparedProcess| {
            process.host.stage == HostStage::Rests
                && process.host.held_bytes >= process.host.wanted_bytes
        };
        self.failures.is_empty() && self.processes.iter().all(is_there)
    }
}

/// All processes, and what they have said last.
struct Preparing {
    peers: Peers,
    /// By index of the peer.
    said: Vec<Option<HostProgress>>,
    failures: Vec<MemberFailure>,
}

impl Coordinator {
    /// Has every process bring in the host memory that a pause of now would take, at low priority, and waits as `waits`
    /// says. `progress` is told about all processes each time one of them says something. Pauses and resumes may come
    /// at any time.
    ///
    /// # Errors
    /// [`Trouble`]. Where some processes come to an end before all is there, it succeeds and says which and why.
    pub fn prepare(
        &mut self,
        waits: Waits,
        progress: &mut dyn FnMut(&[PreparedProcess]),
    ) -> Result<PrepareReport, Trouble> {
        let span = tracing::info_span!("tenant.prepare", tenant = %self.tenant);
        let _entered = span.enter();
        let started = Instant::now();
        let mut all = self.greet_everybody(&self.dir()?)?;
        self.ask_all(&mut all, HostStep::Need)?;
        let needs = || all.said.iter().flatten().filter_map(|said| said.need.as_ref());
        if let Some(shortage) = shortage(needs()) {
            return Err(Trouble::HostShort { tenant: self.tenant.clone(), shortage });
        }
        self.ask_all(&mut all, HostStep::Begin { most_bytes: u64::MAX })?;
        progress(&processes(&all.peers, &all.said));
        if let Err(error) = self.watch(&mut all, waits, progress) {
            let members = all.peers.all();
            all.peers.tell(&members, HostStep::CallOff, self.options.contact_timeout);
            return Err(error);
        }
        Ok(PrepareReport {
            tenant: self.tenant.to_string(),
            wall_us: micros(started.elapsed()),
            processes: processes(&all.peers, &all.said),
            failures: all.failures,
        })
    }

    fn greet_everybody(&self, dir: &TenantDir) -> Result<Preparing, Trouble> {
        let (timeout, interrupt) = (self.options.contact_timeout, self.options.interrupt.as_ref());
        let Everybody { peers, failures } = Everybody::greeted(dir, timeout, interrupt)?;
        self.refuse_interrupted()?;
        let said = vec![None; peers.all().len()];
        Ok(Preparing { peers, said, failures })
    }

    /// Asks everybody who has greeted, and waits for all answers.
    fn ask_all(&self, all: &mut Preparing, step: HostStep) -> Result<(), Trouble> {
        let Preparing { peers, said, failures } = all;
        let mut members = peers.greeted();
        members.retain(|index| peers.is_up(*index));
        peers.converse(&members, self.inquiry(step), |_, index, says| {
            said[index] = says.map_err(|failure| failures.push(failure)).ok();
            Next::Done
        });
        self.refuse_interrupted()
    }

    fn watch(
        &self,
        all: &mut Preparing,
        waits: Waits,
        progress: &mut dyn FnMut(&[PreparedProcess]),
    ) -> Result<(), Trouble> {
        let timeout = SLICE + self.options.contact_timeout;
        let Preparing { peers, said, failures } = all;
        let watch = |seen_bytes| HostStep::Watch { seen_bytes, wait_ms: millis(SLICE) };
        let mut members = peers.all();
        members.retain(|index| goes_on(said[*index].as_ref(), waits).is_some());
        // One that has brought anything in answers immediately.
        let first = Inquiry::of(watch(0), timeout, self.options.interrupt.as_ref());
        peers.converse(&members, first, |peers, index, says| {
            said[index] = says.map_err(|failure| failures.push(failure)).ok();
            progress(&processes(peers, said));
            goes_on(said[index].as_ref(), waits).map_or(Next::Done, |seen| Next::Again(watch(seen)))
        });
        self.refuse_interrupted()
    }

    fn refuse_interrupted(&self) -> Result<(), Trouble> {
        if self.options.is_called_off() {
            return Err(Trouble::NotPrepared { tenant: self.tenant.clone() });
        }
        Ok(())
    }
}

/// Is more to be heard of one that has `said` this? Then what it has brought in so far, in bytes.
fn goes_on(said: Option<&HostProgress>, waits: Waits) -> Option<u64> {
    if let Waits::Until(end) = waits
        && Instant::now() >= end
    {
        return None;
    }
    let said = said?;
    match said.stage {
        HostStage::Grows | HostStage::Waits => Some(said.brought_in_bytes),
        HostStage::Rests | HostStage::Stopped(_) => None,
    }
}

/// All that have said something, by process id.
fn processes(peers: &Peers, said: &[Option<HostProgress>]) -> Vec<PreparedProcess> {
    let each = said.iter().enumerate().filter_map(|(index, said)| {
        let command = peers.info(index)?.command.clone();
        let host = HostProgress { need: None, ..said.clone()? };
        Some(PreparedProcess { who: peers.who(index), command, host })
    });
    let mut processes: Vec<_> = each.collect();
    processes.sort_by_key(|process| process.who.pid);
    processes
}
