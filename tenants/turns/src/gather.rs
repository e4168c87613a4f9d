//! The scene of this moment, from the answers of all tenants and from the claims.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm_pool::{Contents, KeptBytes};

use crate::claims::Found;
use crate::clock::{boot, now_us};
use crate::decision::history::History;
use crate::decision::idle_after_us;
use crate::decision::scene::{Contexts, Cost, Held, Scene, Standing, Waiting, Wish};
use crate::turn_files::TurnDir;
use tenants::class::Class;
use tenants::coordinator::{Coordinator, Holdings, Options, TenantStats, by_process};
use tenants::identity::TenantName;
use tenants::run_dir::{RunDir, RunDirError};
use tenants::wire::{Idleness, MemberState, MemberStats, Phase, PhaseReport};

/// The best copy speed, in bytes a microsecond. It gives the guessed cost of a tenant that has not been paused yet. So its first
/// quantum is short: much of its memory may be zeros, and the first switch measures the cost.
const COPY_BYTES_PER_US: u64 = 50_000;
/// The longest time for an answer of a process.
const ANSWER: Duration = Duration::from_secs(2);

/// The time for which a silent tenant is not contacted again. It doubles each further time,
const SILENT_MIN_US: u64 = 5_000_000;
/// up to this time.
const SILENT_MAX_US: u64 = 60_000_000;

/// The longest wait for the lock to restore lost lines of the history. A caller that did not get the lock tries again.
const LOCK_WAIT: Duration = Duration::from_millis(250);

/// Tenants that did not answer, a record that all deciding processes share. No process contacts such a tenant for a while,
/// because under the lock everybody would wait for it. Only a process that would give up because of them contacts them again,
/// without the lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Silent(BTreeMap<String, Rest>);

/// The time for which one tenant is not contacted, in microseconds of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Rest {
    until_us: u64,
    time_us: u64,
}

impl Silent {
    pub(super) fn is_left_alone(&self, tenant: &TenantName, now_us: u64) -> bool {
        let rest = self.0.get(tenant.as_str());
        // Times from before the machine's start are of another clock.
        rest.is_some_and(|rest| {
            now_us < rest.until_us && rest.until_us <= now_us.saturating_add(SILENT_MAX_US)
        })
    }

    /// Returns the same record with all rests over. A tenant that still does not answer then rests for twice as long.
    pub(super) fn rested(&self) -> Self {
        let over = |rest: &Rest| Rest { until_us: 0, ..*rest };
        Self(self.0.iter().map(|(tenant, rest)| (tenant.clone(), over(rest))).collect())
    }

    /// Notes whether a tenant answered.
    pub(super) fn note(&mut self, tenant: &TenantName, is_silent: bool, now_us: u64) {
        if !is_silent {
            self.0.remove(tenant.as_str());
            return;
        }
        let before = self.0.get(tenant.as_str()).map(|rest| rest.time_us);
        let time_us =
            before.map_or(SILENT_MIN_US, |time_us| time_us.saturating_mul(2).min(SILENT_MAX_US));
        let until_us = now_us.saturating_add(time_us);
        self.0.insert(tenant.to_string(), Rest { until_us, time_us });
    }
}

/// Returns the claims of processes that wait and show signs of life.
pub(super) fn waiting(claims: &[Found]) -> impl Iterator<Item = &Found> {
    claims
        .iter()
        .filter(|found| found.claim.waits && !found.is_silent())
        .filter(|found| TenantName::new(&found.claim.tenant).is_ok())
}

fn as_waiting(found: &Found) -> Option<Waiting> {
    let tenant = TenantName::new(&found.claim.tenant).ok()?;
    Some(Waiting { tenant, wish: found.claim.wish.clone() })
}

/// Returns the state of all tenants, and the processes that wait. Of `silent` tenants only the name is known. Waiting tenants,
/// and `wanted`, report the memory that they need; running tenants report whether they are idle.
pub(super) fn gather(
    run_dir: &RunDir,
    claims: &[Found],
    wanted: Option<&TenantName>,
    silent: &mut Silent,
) -> Scene {
    let mut scene =
        Scene { waiting: waiting(claims).filter_map(as_waiting).collect(), ..Scene::default() };
    let somebody_waits = wanted.is_some() || !scene.waiting.is_empty();
    let wants_more = |waiting: &Waiting| {
        waiting.wish.bytes().next().is_some() || waiting.wish.context().is_some()
    };
    let mut somebody_wants_more = scene.waiting.iter().any(wants_more);
    // The caller may hold the lock, so the answers have a short time limit.
    let options = Options { timeout: Some(ANSWER), contact_timeout: ANSWER, ..Options::default() };
    let mut asked = Vec::new();
    for name in run_dir.tenants().unwrap_or_default() {
        if wanted != Some(&name) && silent.is_left_alone(&name, now_us()) {
            scene.unheard.insert(name);
        } else {
            asked.push(Coordinator::new(run_dir.clone(), name, options.clone()));
        }
    }
    let found = Holdings::of_all(&asked.iter().collect::<Vec<_>>());
    // A tenant whose contexts are away cannot report the free memory.
    let mut cannot_say = Vec::new();
    for (coordinator, found) in asked.iter().zip(&found) {
        let name = coordinator.tenant();
        let waits = wanted == Some(name) || scene.waiting.iter().any(|other| other.tenant == *name);
        if waits && found.stats.as_ref().is_ok_and(|stats| contexts_of(stats).are_away) {
            cannot_say.push(name.clone());
            somebody_wants_more = true;
        }
    }
    for (coordinator, Holdings { stats, is_silent, is_overdue }) in asked.iter().zip(found) {
        let name = coordinator.tenant().clone();
        // A stopped process costs no time, and may continue at any instant.
        silent.note(&name, is_overdue, now_us());
        if is_silent {
            scene.unheard.insert(name.clone());
        }
        // A tenant that has ended, or cannot be contacted, cannot be paused for others.
        let Ok(stats) = stats else { continue };
        if stats.members.iter().any(|member| !member.member.state.rests()) {
            scene.moving.insert(name.clone());
        }
        let mut standing = standing_of(&stats);
        let has_claim = |found: &Found| {
            found.claim.tenant == name.as_str()
                && (!found.claim.waits || found.claim.wish == Wish::Turn)
        };
        standing.has_turn = claims.iter().any(|found| !found.claim.waits && has_claim(found));
        standing.comes_back |= claims.iter().any(has_claim);
        let waits = wanted == Some(&name) || scene.waiting.iter().any(|other| other.tenant == name);
        let is_heard = !is_silent || wanted == Some(&name);
        if is_heard
            && !standing.contexts.are_away
            && ((waits && !standing.is_active) || somebody_wants_more)
        {
            let needs = coordinator.needs(standing.is_active || somebody_wants_more);
            let needs = needs.unwrap_or_default();
            for (gpu, need) in needs {
                if !standing.is_active {
                    standing.held.entry(gpu.clone()).or_default().away_bytes = need.needed_bytes;
                }
                scene.total_bytes.insert(gpu.clone(), need.total_bytes);
                let free_bytes = scene.free_bytes.entry(gpu).or_default();
                *free_bytes = need.free_bytes.max(*free_bytes);
            }
        }
        if standing.is_active {
            // Only tenants that take turns are checked.
            let may_look = somebody_waits && standing.comes_back;
            standing.idle_since_us = idle_since_us(coordinator, &standing, &stats, may_look);
        }
        scene.tenants.insert(name, standing);
    }
    // If no other tenant can report it either, the resume will find out.
    for standing in cannot_say.iter().filter_map(|name| scene.tenants.get(name)) {
        for gpu in standing.gpus() {
            scene.free_bytes.entry(gpu.to_owned()).or_insert(u64::MAX);
        }
    }
    scene
}

/// Returns the contexts of one tenant.
fn contexts_of(stats: &TenantStats) -> Contexts {
    let are_away = |member: &MemberStats| member.member.state == MemberState::Deep;
    let are_away = stats.members.iter().any(are_away);
    let may_leave = !stats.members.is_empty()
        && stats.failures.is_empty()
        && stats.members.iter().all(|member| member.member.goes_deep);
    let processes = stats.members.len() as u64;
    Contexts { processes, may_leave: may_leave && !are_away, are_away }
}

/// Returns the time since which a tenant has launched nothing. None if that is too short to matter, or its devices still have
/// work. If the state of its devices is not known, it is queried if `may_look`.
fn idle_since_us(
    coordinator: &Coordinator,
    standing: &Standing,
    stats: &TenantStats,
    may_look: bool,
) -> Option<u64> {
    let least_us = idle_after_us(standing, true);
    let told = stats.members.iter().map(|member| member.idleness).collect::<Vec<_>>();
    let quiet_us = |all: &[Idleness]| all.iter().map(|one| one.quiet_us).min();
    // A process that does not answer may be at work.
    if !stats.failures.is_empty() || quiet_us(&told)? < least_us {
        return None;
    }
    let is_drained = |all: &[Idleness]| all.iter().all(|one| one.is_drained);
    let seen =
        if is_drained(&told) || !may_look { told } else { coordinator.look_idle(least_us).ok()? };
    let is_complete = seen.len() == stats.members.len() && is_drained(&seen);
    let quiet_us = quiet_us(&seen).filter(|quiet_us| is_complete && *quiet_us >= least_us)?;
    Some(now_us().saturating_sub(quiet_us))
}

/// Adds `tenant`, which wants a turn or its first context, if it was not found. `is_away`: it has memory, and is paused.
pub(super) fn complete(scene: &mut Scene, tenant: &TenantName, is_away: bool) {
    if scene.tenants.contains_key(tenant) {
        return;
    }
    if is_away {
        // Its socket was removed, and will be created again.
        scene.unheard.insert(tenant.clone());
    } else {
        // A process without device memory belongs to no tenant that can be contacted yet, and it needs nothing.
        let newcomer = Standing { is_active: true, ..Standing::default() };
        scene.tenants.insert(tenant.clone(), newcomer);
    }
}

/// Returns the state of one tenant, without its turn.
pub(super) fn standing_of(stats: &TenantStats) -> Standing {
    let mut standing = Standing::default();
    let members = &stats.members;
    // A tenant that is being paused is resumed by the process that pauses it.
    let is_active = |member: &MemberStats| member.member.state == MemberState::Active;
    standing.is_active = !members.is_empty() && members.iter().all(is_active);
    let named =
        members.iter().max_by_key(|member| (member.member.class, member.member.weight.get()));
    if let Some(member) = named {
        standing.class = member.member.class;
        standing.weight = member.member.weight;
    }
    standing.comes_back = queues(stats);
    for member in members {
        let unchanged = unchanged_share(member);
        for device in &member.pool.devices {
            let uuid = &device.uuid;
            let processes = || by_process(stats, uuid);
            standing.processes.entry(uuid.clone()).or_insert_with(processes);
            let held = standing.held.entry(uuid.clone()).or_default();
            for class in &device.classes {
                let leaves = class.resident_bytes.saturating_sub(class.pinned_bytes);
                held.away_bytes += class.own_bytes.saturating_sub(class.resident_bytes);
                match class.contents {
                    Contents::Discard => held.discarded_bytes += leaves,
                    Contents::Keep | Contents::File | Contents::DiscardByTag => {
                        let kept = u128::from(leaves) * u128::from(unchanged) / 1000;
                        let kept = u64::try_from(kept).unwrap_or(leaves);
                        held.unchanged_bytes += kept;
                        held.copied_bytes += leaves - kept;
                    }
                }
            }
        }
        if member.member.state.is_away() {
            // A second pause does not free what the first one left in place.
            for held in standing.held.values_mut() {
                *held = Held { away_bytes: held.away_bytes, ..Held::default() };
            }
        }
    }
    standing.cost = cost_of(&standing, members);
    standing.contexts = contexts_of(stats);
    standing
}

/// Returns the share of the kept bytes that the last pause did not copy, in thousandths.
fn unchanged_share(member: &MemberStats) -> u64 {
    // If a pause had stages, several phases have saved something.
    let kept = member.last_pause.iter().filter_map(|(_, report)| report.kept);
    let Some(kept) = kept.reduce(KeptBytes::plus) else { return 0 };
    let spared = kept.zero_bytes.saturating_add(kept.unchanged_bytes);
    let share = u128::from(spared) * 1000 / u128::from(kept.total_bytes().max(1));
    u64::try_from(share).unwrap_or(0)
}

/// Returns the measured cost, or a guess by the bytes if nothing was measured.
fn cost_of(standing: &Standing, members: &[MemberStats]) -> Cost {
    let took = |phases: fn(&MemberStats) -> &[(Phase, PhaseReport)]| {
        let all = members.iter().map(|member| {
            phases(member)
                .iter()
                .fold(0, |all: u64, (_, report)| all.saturating_add(report.elapsed_us))
        });
        all.max().unwrap_or(0)
    };
    let held = standing.held.values();
    let bytes = held.fold(0_u64, |all, held| {
        all.saturating_add(held.away_bytes).saturating_add(held.copied_bytes)
    });
    let guess_us = bytes / COPY_BYTES_PER_US;
    let measured = |us: u64, otherwise: u64| if us > 0 { us } else { otherwise };
    let last_pause_us = took(|member| &member.last_pause);
    let pause_us = measured(last_pause_us, guess_us);
    let resume_us = measured(took(|member| &member.last_resume), pause_us);
    Cost { pause_us, resume_us, is_measured: last_pause_us > 0 }
}

/// One claim, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Claimant {
    /// Its tenant.
    pub tenant: String,
    /// Its class.
    pub class: Class,
    /// Its process; none where that has no id here.
    pub pid: Option<u32>,
    /// Is its tenant in its turn? Else it waits.
    pub is_in_turn: bool,
    /// Is it a person's order?
    pub is_order: bool,
    /// The aim of its wait, in a word: `order`, `turn`, `resume`, `back`, `memory` or `context`.
    pub wish: &'static str,
    /// Bytes that an allocation did not get, on all GPUs; 0 for any other wish.
    pub wanted_bytes: u64,
    /// For how long its tenant has been idle, in microseconds, where it runs and that is known.
    pub idle_us: Option<u64>,
    /// The time for which it has waited, or had its turn, in microseconds.
    pub since_us: u64,
}

/// The claims of those that have a turn and of those that wait, in order, and the last decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnsView {
    /// Those in their turn, and then those that wait, each in the order in which they came.
    pub claims: Vec<Claimant>,
    /// Decisions, oldest first.
    pub decisions: Vec<LoggedDecision>,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LoggedDecision {
    /// When, in microseconds since 1970.
    pub at_unix_us: u64,
    /// The process that decided.
    pub pid: u32,
    /// The decision, and its reason.
    pub text: String,
}

/// Returns who has a turn and who waits, and the last `count` decisions. Takes no lock and changes nothing.
///
/// # Errors
/// [`RunDirError`].
pub fn look(run_dir: &RunDir, count: usize) -> Result<TurnsView, RunDirError> {
    let Some(turns) = TurnDir::existing(run_dir)? else { return Ok(TurnsView::default()) };
    let found = turns.claims(None)?;
    let now_us = now_us();
    let scene = gather(run_dir, &[], None, &mut turns.silent());
    let mut claims: Vec<Claimant> = found
        .into_iter()
        .map(|Found { claim, pid, .. }| {
            let standing = TenantName::new(&claim.tenant).ok();
            let standing = standing.and_then(|tenant| scene.tenants.get(&tenant));
            Claimant {
                class: standing.map(|standing| standing.class).unwrap_or_default(),
                pid,
                is_in_turn: !claim.waits,
                is_order: claim.wish.is_order(),
                wish: claim.wish.label(),
                wanted_bytes: claim
                    .wish
                    .bytes()
                    .fold(0, |all, (_, bytes)| all.saturating_add(bytes)),
                idle_us: standing
                    .and_then(|standing| standing.idle_since_us)
                    .map(|since_us| now_us.saturating_sub(since_us)),
                since_us: now_us.saturating_sub(claim.since_us),
                tenant: claim.tenant,
            }
        })
        .collect();
    claims.sort_by_key(|claim| !claim.is_in_turn);
    let lines = turns.log_lines();
    let last = lines.iter().skip(lines.len().saturating_sub(count));
    let decisions = last
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            Some(LoggedDecision {
                at_unix_us: words.next()?.parse::<u64>().ok()?.saturating_mul(1000),
                pid: words.next()?.parse().ok()?,
                text: words.next()?.to_owned(),
            })
        })
        .collect();
    Ok(TurnsView { claims, decisions })
}

/// Returns the history since the machine was started.
pub(super) fn history_of(turns: &TurnDir) -> History {
    turns.history::<History>().of_this_start(boot(), now_us())
}

/// Is a tenant paused for another? The history says so. If the history was lost with the run directory, its last answer counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Displaced(bool);

impl Displaced {
    /// Returns what the last look found.
    pub(super) fn is_so(self) -> bool {
        self.0
    }

    /// Looks up `tenant`, which is paused. If the history has lost its entry, writes the entry again, under the lock of turns.
    pub(super) fn look(&mut self, run_dir: &RunDir, tenant: &TenantName) -> bool {
        let turns = TurnDir::existing(run_dir).ok().flatten();
        match turns.and_then(|turns| history_of(&turns).is_displaced(tenant)) {
            Some(is_displaced) => self.0 = is_displaced,
            None if self.0 => {
                let leaves = |history: &mut History| history.is_leaving(tenant);
                if let Err(error) = write_down(run_dir, tenant, leaves) {
                    tracing::debug!(%tenant, %error, "that it is away for another is not written down yet");
                }
            }
            None => {}
        }
        self.0
    }

    /// Calls [`Displaced::look`] if the tenant was displaced at the last look, or is paused.
    pub(super) fn look_if_so(&mut self, run_dir: &RunDir, tenant: &TenantName, is_paused: bool) {
        if self.0 || is_paused {
            self.look(run_dir, tenant);
        }
    }
}

/// Writes `what` about `tenant` into the history, if the history does not know the tenant. Takes the lock of turns.
pub(super) fn write_down(
    run_dir: &RunDir,
    tenant: &TenantName,
    what: impl FnOnce(&mut History),
) -> Result<(), RunDirError> {
    let turns = TurnDir::make(run_dir)?;
    if history_of(&turns).is_displaced(tenant).is_some() {
        return Ok(());
    }
    let lock = turns.lock(Instant::now() + LOCK_WAIT)?;
    let mut history = history_of(&turns);
    if history.is_displaced(tenant).is_none() {
        what(&mut history);
        turns.keep_history(&lock, &history)?;
    }
    Ok(())
}

/// Do processes of `tenant` queue?
pub(super) fn queues(stats: &TenantStats) -> bool {
    !stats.members.is_empty() && stats.members.iter().all(|member| member.member.queues)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};

    use super::*;
    use tenants::coordinator::{MemberFailure, Step, Who};
    use tenants::member::{Member, MemberConfig};
    use tenants::wire::{Failure, FailureKind};

    #[test]
    fn a_tenant_is_idle_only_if_all_its_processes_say_so() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        let name = TenantName::new("train").unwrap();
        let config = MemberConfig::new(run_dir.clone(), name.clone(), "python train.py", "0.1.0");
        let node = SimNode::private(&[16 << 20]).unwrap();
        let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
        let member = Member::join(config, driver).unwrap();
        let coordinator = Coordinator::new(run_dir, name, Options::default());
        let mut stats = coordinator.stats().unwrap();
        let standing = standing_of(&stats);
        let idle = |stats: &TenantStats| idle_since_us(&coordinator, &standing, stats, false);
        stats.members[0].idleness = Idleness { quiet_us: 0, is_drained: true, waiting_calls: 0 };
        assert_eq!(idle(&stats), None);
        stats.members[0].idleness.quiet_us = u64::MAX / 2;
        assert!(idle(&stats).is_some());
        let failure = Failure { kind: FailureKind::PeerGone, message: "silent".to_owned() };
        let who = Who { pid: None, member: stats.members[0].member.id };
        stats.failures.push(MemberFailure { who, step: Step::Stats, failure });
        assert_eq!(idle(&stats), None, "the other may be at work");
        drop(member);
    }

    #[test]
    fn one_that_does_not_answer_is_asked_less_and_less_often_until_it_does() {
        let tenant = TenantName::new("a").unwrap();
        let mut silent = Silent::default();
        let mut now_us = 7;
        let mut rests = Vec::new();
        for _ in 0..6 {
            silent.note(&tenant, true, now_us);
            let began_us = now_us;
            while silent.is_left_alone(&tenant, now_us) {
                now_us += 1_000_000;
            }
            rests.push((now_us - began_us) / 1_000_000);
        }
        assert_eq!(rests, [5, 10, 20, 40, 60, 60]);
        silent.note(&tenant, true, now_us);
        assert!(!silent.is_left_alone(&tenant, 0), "the machine was started again");
        silent.note(&tenant, false, now_us);
        assert!(!silent.is_left_alone(&tenant, now_us));
    }
}
