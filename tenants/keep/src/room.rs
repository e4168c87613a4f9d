//! Room in host memory for a pause that has none: saved contents of the tenant that has been paused for longest go to its file,
//! where its processes have opted in.
//!
//! The coordinator of a pause does it between two tries, when all processes of its own tenant run again. It takes the other tenant's lock
//! only where that is free, since it has a lock already, and for one step at a time, so that a command that wants that tenant itself comes in between. All of
//! it has a deadline. Whatever it has come to when it ends, all contents are in host memory or in the file.
//!
//! All that moves lies in the arena behind all that stays: host memory goes back from the arena's end, in chunks. An
//! allocation moves as a whole: its file is on the disk before it counts as saved there. A step is about 1 GiB, and
//! ends soon after its asker's connection closes. An allocation whose place somebody was given to read does not move. A
//! resume reads each allocation from the store that it lies in.

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

/// The most times that one pause makes room: others take host memory meanwhile.
const TRIES_MAX: u32 = 3;
/// The number of bytes, approximately, that one step moves.
const STEP_BYTES: u64 = 1 << 30;
/// For a plain answer of another tenant's process.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Beyond the time of a step, for the answer to arrive.
const ANSWER_MARGIN: Duration = Duration::from_secs(10);
/// For all that is done for one pause at a time, and beyond that, at the speed of a slow disk, for what is asked.
const ROOM_TIME: Duration = Duration::from_mins(1);
/// Between two steps: longer than those wait that look for a lock.
const BETWEEN_STEPS: Duration = Duration::from_millis(60);

/// The room that was made for one pause.
#[derive(Debug, Default)]
struct Room {
    tries: u32,
    /// By tenant, in bytes of host memory.
    given: BTreeMap<TenantName, u64>,
}

/// Nothing yet, for [`Options::room`].
pub fn room() -> Box<dyn MakesRoom> {
    Box::<Room>::default()
}

impl MakesRoom for Room {
    /// Those first that have been paused for longest.
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
        // What is given back is host memory of which a tenth stays free.
        let asked = short.missing_bytes().div_ceil(9).saturating_mul(10);
        let (mut missing, until) = (asked, Instant::now() + ROOM_TIME + moving_time(asked));
        let names = run_dir.live_tenants().unwrap_or_default();
        let others = names.into_iter().filter(|name| name != tenant).filter_map(|name| {
            let other = Other(Coordinator::new(run_dir.clone(), name, options.clone()));
            let willing = other.willing(&short.kind).ok()?.1;
            // As long as the one of them that has changed last.
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

/// Processes of a tenant that have something to move where that helps, with what they have said.
type Willing = BTreeMap<usize, SpillProgress>;

/// A tenant that may make room.
struct Other(Coordinator);

impl Other {
    /// Connects to the processes of this tenant, and asks what they have to move where `kind` is short.
    fn willing(&self, kind: &LimitKind) -> Result<(Peers, Willing), Trouble> {
        let until = Instant::now() + ASK_TIMEOUT;
        let mut all = Everybody::connect(&self.0.dir()?, Step::Spill, until)?;
        let members = all.peers.all();
        let willing = self.step_of(&mut all.peers, &members, kind, (0, ASK_TIMEOUT)).1;
        Ok((all.peers, willing))
    }

    /// Has this tenant give back so many bytes, or as much as it can `until` then, and says how much that was. Its lock is held for a
    /// step at a time: by somebody else who has it then, the tenant is wanted.
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
                // Hanging up ends a step that is under way, and the next to have the lock waits for no more of it.
                drop(peers);
                break;
            }
            drop(held);
        }
        progress(Event::StepDone { step: Step::Spill, elapsed: began.elapsed() });
        Ok(given)
    }

    /// Has each of `members` move about so many bytes, within a time. Returns how many bytes they have given back, and those that
    /// have more to move, where that helps.
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
