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

use super::cast::Everybody;
use super::conversation::{Inquiry, Next};
use super::overlap::SLOWEST_BYTES_PER_SECOND;
use super::peers::Peers;
use super::report::{Event, Step};
use super::{Coordinator, Trouble};
use crate::host_memory::LimitKind;
use crate::identity::TenantName;
use crate::member::SPILL_STEP_TIME as STEP_TIME;
use crate::run_dir::pause_thread;
use crate::size::Size;
use crate::wire::{SpillProgress, SpillStep};

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
pub(super) struct Room {
    tries: u32,
    /// By tenant, in bytes of host memory.
    given: BTreeMap<TenantName, u64>,
}

/// A tenant whose contents may move.
struct Candidate {
    tenant: TenantName,
    rests_ms: u64,
}

impl Room {
    /// For the report of the pause.
    pub(super) fn notes(&self) -> Vec<String> {
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

impl Coordinator {
    /// Has tenants that are paused give host memory back, those first that have been so for longest, where that is what a
    /// pause lacks. True when some was given, and the same pause may succeed now.
    pub(super) fn makes_room(
        &self,
        room: &mut Room,
        error: &Trouble,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> bool {
        let short = error.host_short().filter(|short| short.kind != LimitKind::Configured);
        // Everybody runs again, and others may have room to give.
        let Some(short) = short.filter(|_| error.left_unchanged()) else { return false };
        // Applications that wait in a call of their own were told that it has failed.
        if self.options.consent.is_some() {
            return false;
        }
        room.tries += 1;
        if room.tries > TRIES_MAX || self.options.is_called_off() {
            return false;
        }
        let mut candidates = self.candidates(&short.kind);
        candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.rests_ms));
        // What is given back is host memory of which a tenth stays free.
        let asked = short.missing_bytes().div_ceil(9).saturating_mul(10);
        let mut missing = asked;
        let slowest = Duration::from_secs(asked / SLOWEST_BYTES_PER_SECOND);
        let until = Instant::now() + ROOM_TIME + slowest;
        for Candidate { tenant, .. } in candidates {
            if missing == 0 || self.options.is_called_off() || Instant::now() >= until {
                break;
            }
            match self.spill(&tenant, (&short.kind, missing), until, progress) {
                Ok(given) => {
                    missing = missing.saturating_sub(given);
                    if given > 0 {
                        *room.given.entry(tenant).or_default() += given;
                    }
                }
                Err(error) => tracing::info!(%error, %tenant, "no room was made there"),
            }
        }
        missing < asked
    }

    /// The other tenants that have something to move, as far as they answer.
    fn candidates(&self, kind: &LimitKind) -> Vec<Candidate> {
        let names = self.run_dir.live_tenants().unwrap_or_default();
        let others = names.into_iter().filter(|name| *name != self.tenant);
        let asked = others.filter_map(|tenant| {
            let mut peers = self.peers_of(&tenant).ok()?;
            let said = self.step_of_all(&mut peers, 0);
            let willing = said.values().filter(|said| may_give(said, kind));
            // As long as the one of them that has changed last.
            let rests_ms = willing.map(|said| said.rests_ms).min()?;
            Some(Candidate { tenant, rests_ms })
        });
        asked.collect()
    }

    fn peers_of(&self, tenant: &TenantName) -> Result<Peers, Trouble> {
        let other = Self::new(self.run_dir.clone(), tenant.clone(), self.options.clone());
        let Everybody { peers, .. } =
            Everybody::connect(&other.dir()?, Step::Spill, Instant::now() + ASK_TIMEOUT)?;
        Ok(peers)
    }

    /// Has `tenant` give back so many bytes, or as much as it can `until` then, and says how much that was. Its lock is held for a step at a time: by somebody
    /// else who has it then, the tenant is wanted.
    fn spill(
        &self,
        tenant: &TenantName,
        (kind, missing): (&LimitKind, u64),
        until: Instant,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<u64, Trouble> {
        let other = Self::new(self.run_dir.clone(), tenant.clone(), self.options.clone());
        let dir = other.dir()?;
        let mut lock = Some(dir.lock(Instant::now())?);
        let mut peers = self.peers_of(tenant)?;
        let began = Instant::now();
        let members = peers.all().len();
        progress(Event::StepStarted { tenant, step: Step::Spill, members });
        let mut left = self.step_of_all(&mut peers, 0);
        let mut given = 0;
        while given < missing && !self.options.is_called_off() && Instant::now() < until {
            let willing = left.iter().find(|(_, said)| may_give(said, kind));
            let Some((&index, _)) = willing else { break };
            if lock.is_none() {
                pause_thread(BETWEEN_STEPS);
                lock = dir.lock(Instant::now()).ok();
            }
            let Some(held) = lock.take() else { break };
            let most_bytes = STEP_BYTES.min(missing - given);
            let timeout = STEP_TIME + ANSWER_MARGIN;
            match self.steps_of(&mut peers, &[index], most_bytes, timeout).remove(&index) {
                Some(said) => {
                    given += said.given_back_bytes;
                    left.insert(index, said);
                }
                None => drop(left.remove(&index)),
            }
            if self.options.is_called_off() {
                // Hanging up ends a step that is under way, and the next to have the lock waits for no more of it.
                drop((peers, held));
                break;
            }
            drop(held);
        }
        progress(Event::StepDone { step: Step::Spill, elapsed: began.elapsed() });
        Ok(given)
    }

    /// Has each of `peers` do one step; the results of those that answer.
    fn step_of_all(&self, peers: &mut Peers, most_bytes: u64) -> BTreeMap<usize, SpillProgress> {
        let members = peers.all();
        self.steps_of(peers, &members, most_bytes, ASK_TIMEOUT)
    }

    /// Has each of `members` do one step; the results of those that answer.
    fn steps_of(
        &self,
        peers: &mut Peers,
        members: &[usize],
        most_bytes: u64,
        timeout: Duration,
    ) -> BTreeMap<usize, SpillProgress> {
        let mut came = BTreeMap::new();
        let step = Inquiry::of(SpillStep { most_bytes }, timeout, self.options.interrupt.as_ref());
        peers.converse(members, step, |_, index, said| {
            match said {
                Ok(progress) => drop(came.insert(index, progress)),
                Err(failure) => tracing::info!(%failure, "a process makes no room"),
            }
            Next::Done
        });
        came
    }
}

/// Has it something to move, and does that help where `kind` is short?
fn may_give(said: &SpillProgress, kind: &LimitKind) -> bool {
    said.left_bytes > 0 && said.limits.iter().any(|limit| limit.kind == *kind)
}
