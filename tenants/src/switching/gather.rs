//! What is so now: asked of all tenants, and read from the claims.

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vmm_pool::Contents;

use crate::coordinator::{Coordinator, Options, TenantStats};
use crate::identity::TenantName;
use crate::run_dir::turn_files::Found;
use crate::run_dir::{RunDir, RunDirError};
use crate::turns::Class;
use crate::turns::history::History;
use crate::turns::scene::{Cost, Held, Scene, Standing, Waiting};
use crate::wire::{MemberState, MemberStats, Phase, PhaseReport};

/// How fast contents are copied where nothing was measured, in bytes a microsecond.
const COPY_BYTES_PER_US: u64 = 10_000;

/// The clock of turns, in microseconds: one for all processes of the machine, which goes on from its start.
pub(super) fn now_us() -> u64 {
    let now =
        clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or(nix::sys::time::TimeSpec::new(0, 0));
    let seconds = u64::try_from(now.tv_sec()).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000).saturating_add(nanoseconds / 1_000)
}

/// The claims of those that wait and show signs of life.
pub(super) fn waiting(claims: &[Found]) -> impl Iterator<Item = &Found> {
    claims
        .iter()
        .filter(|found| found.claim.waits && !found.is_silent())
        .filter(|found| TenantName::new(&found.claim.tenant).is_ok())
}

fn as_waiting(found: &Found) -> Option<Waiting> {
    let tenant = TenantName::new(&found.claim.tenant).ok()?;
    Some(Waiting { tenant, is_order: found.claim.is_order })
}

pub(super) fn order_of(tenant: &TenantName) -> Waiting {
    Waiting { tenant: tenant.clone(), is_order: true }
}

/// All tenants as they are, and who waits. What those need that wait, `wanted` too, is asked of them.
pub(super) fn gather(run_dir: &RunDir, claims: &[Found], wanted: Option<&TenantName>) -> Scene {
    let mut scene =
        Scene { waiting: waiting(claims).filter_map(as_waiting).collect(), ..Scene::default() };
    for name in run_dir.tenants().unwrap_or_default() {
        let coordinator = Coordinator::new(run_dir.clone(), name.clone(), Options::default());
        // One that has ended, or cannot be spoken to, makes no way for anybody.
        let Ok(stats) = coordinator.stats() else { continue };
        let mut standing = standing_of(&stats);
        standing.has_turn =
            claims.iter().any(|found| !found.claim.waits && found.claim.tenant == name.as_str());
        let waits = wanted == Some(&name) || scene.waiting.iter().any(|other| other.tenant == name);
        if waits && !standing.is_active {
            let needs = coordinator.needs().unwrap_or_default();
            for (gpu, need) in needs {
                standing.held.entry(gpu.clone()).or_default().away_bytes = need.needed_bytes;
                let free_bytes = scene.free_bytes.entry(gpu).or_default();
                *free_bytes = need.free_bytes.max(*free_bytes);
            }
        }
        scene.tenants.insert(name, standing);
    }
    scene
}

/// A tenant that holds nothing so far.
pub(super) fn newcomer() -> Standing {
    Standing { is_active: true, ..Standing::default() }
}

/// One tenant, but for its turn.
fn standing_of(stats: &TenantStats) -> Standing {
    let mut standing = Standing::default();
    let members = &stats.members;
    let is_away = |member: &MemberStats| member.member.state == MemberState::Paused;
    standing.is_active = !members.is_empty() && !members.iter().any(is_away);
    let named =
        members.iter().max_by_key(|member| (member.member.class, member.member.weight.get()));
    if let Some(member) = named {
        standing.class = member.member.class;
        standing.weight = member.member.weight;
    }
    for member in members {
        let unchanged = unchanged_share(member);
        for device in &member.pool.devices {
            let held = standing.held.entry(device.uuid.clone()).or_default();
            for class in &device.classes {
                let leaves = class.resident_bytes.saturating_sub(class.pinned_bytes);
                held.away_bytes += class.own_bytes.saturating_sub(class.resident_bytes);
                match class.contents {
                    Contents::Discard => held.discarded_bytes += leaves,
                    Contents::Keep | Contents::File => {
                        let kept = u128::from(leaves) * u128::from(unchanged) / 1000;
                        let kept = u64::try_from(kept).unwrap_or(leaves);
                        held.unchanged_bytes += kept;
                        held.copied_bytes += leaves - kept;
                    }
                }
            }
        }
        if is_away(member) {
            // What a pause leaves in place is not given back by another.
            for held in standing.held.values_mut() {
                *held = Held { away_bytes: held.away_bytes, ..Held::default() };
            }
        }
    }
    standing.cost = cost_of(&standing, members);
    standing
}

/// Of what the last pause kept, in thousandths, what it did not copy.
fn unchanged_share(member: &MemberStats) -> u64 {
    let saved = member.last_pause.iter().find(|(phase, _)| *phase == Phase::Save);
    let Some(kept) = saved.and_then(|(_, report)| report.kept) else { return 0 };
    let spared = kept.zero_bytes.saturating_add(kept.unchanged_bytes);
    let share = u128::from(spared) * 1000 / u128::from(kept.total_bytes().max(1));
    u64::try_from(share).unwrap_or(0)
}

/// As measured; where nothing was, by the bytes.
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
    let pause_us = measured(took(|member| &member.last_pause), guess_us);
    let resume_us = measured(took(|member| &member.last_resume), pause_us);
    Cost { pause_us, resume_us }
}

/// One claim, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claimant {
    /// Its tenant.
    pub tenant: String,
    /// Its class.
    pub class: Class,
    /// Its process.
    pub pid: u32,
    /// Is its tenant in its turn? Else it waits.
    pub is_in_turn: bool,
    /// Is it a person's order?
    pub is_order: bool,
    /// How long it has waited, or had its turn, in microseconds.
    pub since_us: u64,
}

/// Who has a turn, who waits for one in which order, and what was decided last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TurnsView {
    /// Those in their turn, and then those that wait, each in the order in which they came.
    pub claims: Vec<Claimant>,
    /// Decisions, oldest first.
    pub decisions: Vec<LoggedDecision>,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoggedDecision {
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The process that decided.
    pub pid: u32,
    /// What, and why.
    pub text: String,
}

/// Who has a turn and who waits, and the last `count` decisions. Takes no lock and changes nothing.
///
/// # Errors
/// [`RunDirError`].
pub fn look(run_dir: &RunDir, count: usize) -> Result<TurnsView, RunDirError> {
    let Some(turns) = run_dir.existing_turns()? else { return Ok(TurnsView::default()) };
    let found = turns.claims(None)?;
    let now_us = now_us();
    let scene = gather(run_dir, &[], None);
    let mut claims: Vec<Claimant> = found
        .into_iter()
        .map(|Found { claim, .. }| {
            let standing = TenantName::new(&claim.tenant).ok();
            let standing = standing.and_then(|tenant| scene.tenants.get(&tenant));
            Claimant {
                class: standing.map(|standing| standing.class).unwrap_or_default(),
                pid: claim.pid,
                is_in_turn: !claim.waits,
                is_order: claim.is_order,
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
                unix_ms: words.next()?.parse().ok()?,
                pid: words.next()?.parse().ok()?,
                text: words.next()?.to_owned(),
            })
        })
        .collect();
    Ok(TurnsView { claims, decisions })
}

/// Was `tenant` paused for another by a decision, and has not come back since?
pub(super) fn is_displaced(run_dir: &RunDir, tenant: &TenantName) -> bool {
    let turns = run_dir.existing_turns().ok().flatten();
    turns.is_some_and(|turns| turns.history::<History>().of(tenant).is_displaced)
}
