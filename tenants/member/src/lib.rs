//! One process's part in its tenant: the state that all its threads use, and the two threads that answer for the process.
//!
//! ```text
//!   application threads --hooks--> Pool (its gate, its ledger) --> driver
//!   agent thread, `Agent`:     sockets only; answers immediately, calls the driver only to hand a descriptor out
//!   worker thread, `Executor`: one phase at a time; the only thread of ours that drives the device
//! ```
//!
//! [`Member`] consists of objects, each with locks of its own. The locks are leaves: nothing is called while they are held. The
//! exception is the lock of the rounds, which comes before that of [`Lifecycle`].

#![forbid(unsafe_code)]

mod agent;
mod asking;
mod captures;
mod clients;
mod config;
mod counting;
mod executor;
mod failures;
mod idle;
mod keeping;
mod lifecycle;
mod neighbours;
mod notes;
mod phase_log;
mod presence;
mod progress;
mod rounds;
mod sharing;
mod signals;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use vmm_pool::{HostBudget, Pool, Selection, TagTotals, Whose};
use vmm_pool::{driver::Driver, gate::Gate, sync::lock};

pub use asking::{Asking, AskingThread, Turn, Waited};
pub use captures::{BeforeCapture, Captures, ContextWait};
pub use clients::{CONNECTIONS_MAX, OPEN_REQUESTS_MAX, REQUESTS_PER_TURN_MAX, STALL_MAX};
pub use config::{FAMILY_WAIT, JoinError, MemberConfig};
pub use counting::{Counted, Counting};
pub use failures::{OwnPid, PID, pool_failure};
pub use keeping::{Desk, Keeping};
pub use lifecycle::Lifecycle;
pub use notes::Notes;
pub use presence::Presence;
pub use sharing::{IPC_LIBRARY, ImportError, Sharing};

use idle::Idle;
use phase_log::{LoggedPhases, PhaseLog};
use rounds::Rounds;
use signals::{CallingOff, Waker};
use sublet_protocol::wire::{
    Action, HostProgress, HostStep, MemberInfo, MemberState, MemberStats, TagBytes,
};
use sublet_protocol::{cut::Cut, descriptors::DescriptorLimit, host_memory::budget, region};

/// One process's part in its tenant. Shared by all its threads.
#[derive(Debug)]
pub struct Member<D: Driver> {
    presence: Arc<Presence>,
    pool: Arc<Pool<D>>,
    cut: Cut,
    lifecycle: Arc<Lifecycle>,
    rounds: Mutex<Rounds>,
    phase_log: PhaseLog,
    notes: Arc<Notes>,
    waker: Waker,
    sharing: Sharing<D>,
    /// Raised to end the phase under way early, because it will be undone.
    calling_off: CallingOff,
    /// Raised while memory is restored.
    descriptor_limit: DescriptorLimit,
    asking: Asking,
    keeping: Option<Arc<dyn Keeping<D>>>,
    idle: Idle<D>,
}

impl<D: Driver> Member<D> {
    /// Joins the tenant: listens in its directory and answers from two threads of its own, which live as
    /// long as the process.
    ///
    /// # Errors
    /// [`JoinError`]; nothing is left behind.
    pub fn join(config: MemberConfig, driver: Arc<D>) -> Result<Arc<Self>, JoinError> {
        Self::join_with(config, driver, |_, _| None)
    }

    /// As [`Member::join`], with the interface that `keeping` makes from the process's memory and its presence.
    ///
    /// # Errors
    /// [`JoinError`]; nothing is left behind.
    pub fn join_with(
        config: MemberConfig,
        driver: Arc<D>,
        keeping: impl FnOnce(Arc<Pool<D>>, Arc<Presence>) -> Option<Arc<dyn Keeping<D>>>,
    ) -> Result<Arc<Self>, JoinError> {
        vmm_pool::support::check(&*driver)?;
        let system = |what| move |source| JoinError::System { what, source };
        let (presence, listener) = Presence::begin(config)?;
        let (presence, notes) = (Arc::new(presence), Arc::<Notes>::default());
        let (waker, wakeups) = signals::wake_pair().map_err(system("a pipe"))?;
        let lifecycle = Arc::new(Lifecycle::new(presence.tenant().clone(), waker.clone()));
        let config = presence.config();
        let (pool, keeper) = Pool::new(driver, config.toucher_threads, config.own_contexts);
        let (of_pool, of_presence) = (|| Arc::clone(&pool), || Arc::clone(&presence));
        let idle = Idle::new(of_pool());
        let sharing = Sharing::new(of_pool(), of_presence(), Arc::clone(&lifecycle));
        let keeping = keeping(of_pool(), of_presence());
        let member = Arc::new(Self {
            pool,
            presence,
            cut: Cut::default(),
            lifecycle,
            rounds: Mutex::default(),
            phase_log: PhaseLog::default(),
            notes,
            asking: Asking::new(waker.clone()),
            waker,
            sharing,
            calling_off: CallingOff::default(),
            descriptor_limit: DescriptorLimit::default(),
            keeping,
            idle,
        });
        member.pool.devices().place_on_nodes(member.config().node_of);
        if let Err(source) = agent::spawn(&member, keeper, listener, wakeups) {
            member.leave();
            return Err(JoinError::System { what: "a thread", source });
        }
        member.config().counting.iter().for_each(|counting| counting.begin(&*member));
        let presence = &member.presence;
        tracing::info!(tenant = %presence.tenant(), member = %presence.id(), "joined");
        Ok(member)
    }

    /// Removes this process's name from the tenant's directory, at the end of the process. Waits a second at most, for a driver
    /// call that pins host memory. While the process is paused the name stays: an exit handler that needs its memory waits for
    /// a resume. The next command removes the name of a dead process.
    pub fn leave(&self) {
        self.presence.leave();
        self.keeping.iter().for_each(|keeping| keeping.end());
        if !self.gate().is_open() {
            return;
        }
        self.presence.remove_name();
        // The agent closes the socket: a socket that listens without a name would count as one that lost its name.
        self.waker.wake();
    }

    /// For a forked child, which is no member: closes its copy of the pool's file, unless another thread was changing it at the
    /// fork. Never blocks. [`vmm_pool::close_descriptors_in_child`] closes all other descriptors, and needs no member.
    pub fn let_go_in_child(&self) {
        self.descriptor_limit.put_back_in_child();
        self.pool.host_memory().close_file_in_child();
    }

    /// The state of the process.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.lifecycle
    }

    /// Notes for people.
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// The memory that the process shares with others.
    pub fn sharing(&self) -> &Sharing<D> {
        &self.sharing
    }

    /// The application's own pauses and resumes.
    pub fn asking(&self) -> &Asking {
        &self.asking
    }

    pub(crate) fn rounds(&self) -> MutexGuard<'_, Rounds> {
        lock(&self.rounds)
    }

    /// The process's identity and its name in the run directory.
    pub fn presence(&self) -> &Presence {
        &self.presence
    }

    /// Returns a function from the bytes of contents that host memory holds to the bytes by which it may grow. The function
    /// reads the machine's figures each time.
    pub fn host_budget(&self) -> impl Fn(u64) -> HostBudget + Send + Sync + use<D> {
        let limits = self.config().host_limits;
        move |held_bytes| budget(held_bytes, &limits())
    }

    /// The process's device memory.
    pub fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }

    /// The process's gate.
    pub fn gate(&self) -> &Gate {
        self.pool.gate()
    }

    /// Returns the cut, where launches that wait for other ranks are counted and held.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// The process's settings.
    pub fn config(&self) -> &MemberConfig {
        self.presence.config()
    }

    /// The process's stream captures.
    pub fn captures(&self) -> &Captures {
        &self.config().captures
    }

    /// Returns the process's identity, settings and state, for others.
    pub fn info(&self) -> MemberInfo {
        let (state, in_round, asked) = {
            let rounds = self.rounds();
            (self.lifecycle.state(), rounds.under_way().is_some(), rounds.asked)
        };
        let stands_without = self.lifecycle.stands_without();
        let gave_up = stands_without.as_ref().map_or(Selection::Whole, |tags| {
            Selection::Standing(tags.to_pause(), Whose::Everybody)
        });
        let stays = match state {
            // The driver has taken all memory off the devices with the contexts.
            MemberState::Deep | MemberState::Faulted => Vec::new(),
            MemberState::Paused => self.pool.stays(&gave_up, true),
            MemberState::Active | MemberState::Offloading | MemberState::Restoring => {
                self.pool.stays(&Selection::Whole, false)
            }
        };
        MemberInfo {
            id: self.presence.id(),
            pid: std::process::id(),
            family: self.presence.family().map(ToString::to_string),
            class: self.config().turns.class,
            weight: self.config().turns.weight,
            queues: self.config().turns.queues,
            goes_deep: self.config().turns.deep.is_some(),
            command: self.config().command.clone(),
            version: self.config().version.clone(),
            state,
            stands_without,
            stays,
            held: self.cut.is_held(),
            in_round,
            nccl_waits: self.cut.is_away(),
            asked,
            tags: self.tags(),
        }
    }

    /// The tags of its regions, in order of their names.
    pub fn tags(&self) -> Vec<TagBytes> {
        let mut bytes = self.pool.holdings().tag_bytes();
        for tag in region::tags().into_keys() {
            bytes.entry(tag).or_default();
        }
        let row = |(tag, totals): (String, TagTotals)| TagBytes {
            resident_bytes: totals.resident_bytes,
            away_bytes: totals.away_bytes,
            imported_away_bytes: totals.imported_away_bytes,
            runs_without: region::runs_without(&tag),
            tag,
        };
        bytes.into_iter().map(row).collect()
    }

    /// Returns figures on the process's memory, for others. Does not wait for a phase under way.
    pub fn stats(&self) -> MemberStats {
        let member = self.info();
        let mut pool = self.pool.report();
        if member.state == MemberState::Deep {
            // The driver has also taken off the memory that a pause leaves in place, with the contexts.
            for device in &mut pool.devices {
                device.pinned.clear();
                device.classes.iter_mut().for_each(|class| class.resident_bytes = 0);
            }
        }
        let LoggedPhases { mut last, pause_times } = self.phase_log.all();
        // All figures are of one instant: host memory may be growing.
        let held_bytes = pool.host_arena_bytes;
        let ahead = self.keeping.clone().map(|keeping| keeping.host(HostStep::Look));
        let host = HostProgress { held_bytes, ..ahead.unwrap_or_default() };
        MemberStats {
            member,
            pool,
            copied: self.pool.copied_bytes(),
            pauses: self.asking.done(Action::Pause),
            resumes: self.asking.done(Action::Resume),
            last_pause: last.remove(&Action::Pause).unwrap_or_default(),
            last_resume: last.remove(&Action::Resume).unwrap_or_default(),
            pause_times,
            host,
            idleness: self.idle.look(),
            lent: self.sharing.lent(&Selection::Whole),
            communicators: self.cut.ranks(),
            notes: self.notes.all(),
        }
    }

    /// Does a call of this process wait for its memory, or for other ranks at the cut?
    pub fn has_waiting_calls(&self) -> bool {
        !self.gate().waiting().is_empty() || self.cut.has_waiting()
    }
}

/// The time limit for exchanges between agents that need no device.
pub(crate) const AGENT_TIMEOUT: Duration = Duration::from_secs(30);
