//! Makes room in host memory for a pause that lacks it. Saved contents of the longest paused tenant go to its file, if its
//! processes have opted in.
//!
//! The coordinator of a pause does this between two tries, when all processes of its own tenant run again. It takes the other
//! tenant's lock only if the lock is free, because it has a lock already. It holds that lock for one step at a time, so that a
//! command on the other tenant can come between. All of this has a deadline. Whenever it ends, all contents are in host memory or
//! in the file.
//!
//! Allocations that move are stored in the arena after those that stay, because host memory is freed from the arena's end, in
//! chunks. An allocation moves as a whole: its file is on the disk before it counts as saved there. A step is about 1 GiB, and
//! ends soon after its requester's connection closes. An allocation whose location a reader has got does not move. A resume reads
//! each allocation from its store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sublet_coordinator::{
    Coordinator, Event, Everybody, Inquiry, MakesRoom, Next, Options, Peers, Step, Trouble,
    moving_time,
};
use sublet_protocol::host_memory::{HostShortage, LimitKind};
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{RunDir, pause_thread};
use sublet_protocol::size::Size;
use sublet_protocol::wire::{SpillProgress, SpillStep};

/// The most times that one pause makes room. It may need several, because others allocate host memory meanwhile.
const TRIES_MAX: u32 = 3;
/// The number of bytes, approximately, that one step moves.
const STEP_BYTES: u64 = 1 << 30;
/// The timeout of a plain answer of another tenant's process.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// The time beyond a step for its answer to arrive.
const ANSWER_MARGIN: Duration = Duration::from_secs(10);
/// The time for one try to make room, in addition to the time that a slow disk needs for the requested bytes.
const ROOM_TIME: Duration = Duration::from_mins(1);
/// The time between two steps. It is longer than the interval at which others look for the lock.
const BETWEEN_STEPS: Duration = Duration::from_millis(60);

/// The room that was made for one pause.
#[derive(Debug, Default)]
struct Room {
    tries: u32,
    /// The bytes of host memory that each tenant has freed.
    given: BTreeMap<TenantName, u64>,
}

/// Returns the initial state, for [`Options::room`].
pub fn room() -> Box<dyn MakesRoom> {
    Box::<Room>::default()
}

impl MakesRoom for Room {
    /// Makes room, from the longest paused tenants first.
    fn make(
        &mut self,
        run_dir: &RunDir,
        tenant: &TenantName,
        options: &Options,
        short: &HostShortage,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> bool {
        self.tries += 1;
        if self.tries > TRIES_MAX || options.is_called_off() {
            return false;
        }
        // A tenth of the freed host memory stays free.
        let asked = short.missing_bytes().div_ceil(9).saturating_mul(10);
        let (mut missing, until) = (asked, Instant::now() + ROOM_TIME + moving_time(asked));
        let names = run_dir.live_tenants().unwrap_or_default();
        let others = names.into_iter().filter(|name| name != tenant).filter_map(|name| {
            let other = Other(Coordinator::new(run_dir.clone(), name, options.clone()));
            let willing = other.willing(&short.kind).ok()?.1;
            // The tenant counts as paused since the last change of any of these processes.
            Some((willing.values().map(|said| said.rests_ms).min()?, other))
        });
        let mut others: Vec<_> = others.collect();
        others.sort_by_key(|(rests_ms, _)| std::cmp::Reverse(*rests_ms));
        for (_, other) in others {
            if missing == 0 || options.is_called_off() || Instant::now() >= until {
                break;
            }
            let tenant = other.0.tenant();
            match other.spill(&short.kind, missing, until, progress) {
                Ok(0) => {}
                Ok(given) => {
                    missing = missing.saturating_sub(given);
                    *self.given.entry(tenant.clone()).or_default() += given;
                }
                Err(error) => tracing::info!(%error, %tenant, "no room was made there"),
            }
        }
        missing < asked
    }

    fn notes(&self) -> Vec<String> {
        let note = |(tenant, bytes): (&TenantName, &u64)| {
            format!(
                "host memory was short, so saved contents of tenant '{tenant}' went to its file and {} were given back: its \
                 resume reads them from there",
                Size(*bytes)
            )
        };
        self.given.iter().map(note).collect()
    }
}

/// Processes of a tenant with contents whose move would help, and their answers.
type Willing = BTreeMap<usize, SpillProgress>;

/// A tenant that may make room.
struct Other(Coordinator);

impl Other {
    /// Connects to the processes of this tenant, and asks which contents they can move if `kind` is short.
    fn willing(&self, kind: &LimitKind) -> Result<(Peers, Willing), Trouble> {
        let until = Instant::now() + ASK_TIMEOUT;
        let mut all = Everybody::connect(&self.0.dir()?, Step::Spill, until)?;
        let members = all.peers.all();
        let willing = self.step_of(&mut all.peers, &members, kind, (0, ASK_TIMEOUT)).1;
        Ok((all.peers, willing))
    }

    /// Lets this tenant free bytes of host memory, or as many as it can `until` then. Returns how many it freed. The tenant's
    /// lock is held for one step at a time. If another process has the lock, that process wants the tenant.
    fn spill(
        &self,
        kind: &LimitKind,
        missing: u64,
        until: Instant,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<u64, Trouble> {
        let dir = self.0.dir()?;
        let mut lock = Some(dir.lock(Instant::now())?);
        let began = Instant::now();
        let (mut peers, mut willing) = self.willing(kind)?;
        let (tenant, step, members) = (self.0.tenant(), Step::Spill, peers.all().len());
        progress(Event::StepStarted { tenant, step, members });
        let mut given = 0;
        while given < missing && !self.0.options().is_called_off() && Instant::now() < until {
            let Some((index, _)) = willing.pop_first() else { break };
            if lock.is_none() {
                pause_thread(BETWEEN_STEPS);
                lock = dir.lock(Instant::now()).ok();
            }
            let Some(held) = lock.take() else { break };
            let much = (STEP_BYTES.min(missing - given), SpillStep::TIME_MAX + ANSWER_MARGIN);
            let (bytes, more) = self.step_of(&mut peers, &[index], kind, much);
            given += bytes;
            willing.extend(more);
            if self.0.options().is_called_off() {
                // Closing the connections ends a step that is under way. So the next holder of the lock does not wait for it.
                drop(peers);
                break;
            }
            drop(held);
        }
        progress(Event::StepDone { step: Step::Spill, elapsed: began.elapsed() });
        Ok(given)
    }

    /// Lets each of `members` move about `most_bytes`, within `timeout`. Returns the bytes that they have freed, and the members
    /// with more contents whose move would help.
    fn step_of(
        &self,
        peers: &mut Peers,
        members: &[usize],
        kind: &LimitKind,
        (most_bytes, timeout): (u64, Duration),
    ) -> (u64, Willing) {
        let (mut given_bytes, mut willing) = (0, Willing::new());
        let step =
            Inquiry::of(SpillStep { most_bytes }, timeout, self.0.options().interrupt.as_ref());
        peers.converse(members, step, |_, index, said| {
            match said {
                Ok(said) => {
                    given_bytes += said.given_back_bytes;
                    if said.left_bytes > 0 && said.limits.iter().any(|limit| limit.kind == *kind) {
                        willing.insert(index, said);
                    }
                }
                Err(failure) => tracing::info!(%failure, "a process makes no room"),
            }
            Next::Done
        });
        (given_bytes, willing)
    }
}
