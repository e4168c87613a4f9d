//! The history of tenants: when each got and lost its GPUs, how long it had them, and which were paused early.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::quanta::{GROWTH_MAX, idle_after_us, quantum_us, time};
use super::scene::{Scene, Standing};
use tenants::identity::TenantName;

/// The number of early pauses within [`PUSHED_QUANTA`] after which a tenant stays paused for longer.
const PUSHED_MAX: usize = 3;
/// See [`PUSHED_MAX`].
const PUSHED_QUANTA: u64 = 4;
/// The shortest time, in microseconds, for which no pause is tried again after a tenant could not be paused.
const REFUSED_MIN_US: u64 = 1_000_000;
/// The longest such time, or [`REFUSED_TRIES`] times the length of the try, if that is more.
const REFUSED_MAX_US: u64 = 60_000_000;
const REFUSED_TRIES: u64 = 10;
/// The time after that, in microseconds, after which the failed pauses no longer count.
const REFUSED_FORGOTTEN_US: u64 = 600_000_000;

/// The history of all tenants, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// The tenants that decisions were about.
    pub tenants: BTreeMap<String, Past>,
    /// The time of the latest change, in microseconds of the clock.
    pub changed_us: u64,
    /// The id of the machine's start that the times count from; empty if it is not known.
    #[serde(default)]
    pub boot: String,
}

/// The history of one tenant. Times are in microseconds of the clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// The time at which it got its GPUs; none if that is not known.
    pub came_us: Option<u64>,
    /// The time at which it was last paused for another tenant.
    pub left_us: Option<u64>,
    /// Was it paused for another tenant, and not resumed since?
    pub is_displaced: bool,
    /// The start of its present turn, or of its last one since it got its GPUs.
    pub turn_us: Option<u64>,
    /// The total time for which it had its GPUs, divided by its weight.
    pub used_us: u64,
    /// The factor by which its quantum has grown: 1, 2, 4 and so on.
    pub growth: u64,
    /// The times at which it was paused early.
    pub pushed_us: Vec<u64>,
    /// Its failed pauses for other tenants, if no pause has succeeded since.
    #[serde(default)]
    pub refusal: Option<Refusal>,
    /// The failed tries to remove its contexts, if none has succeeded since.
    #[serde(default)]
    pub keeps_contexts: Option<Refusal>,
}

/// Consecutive failures to pause one tenant, or to remove its contexts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The number of failures.
    pub times: u32,
    /// Until this time no pause of it is tried again, and others are paused before it.
    pub until_us: u64,
    /// The reason for the last failure.
    pub why: String,
}

impl Default for Past {
    fn default() -> Self {
        Self {
            came_us: None,
            left_us: None,
            is_displaced: false,
            turn_us: None,
            used_us: 0,
            growth: 1,
            pushed_us: Vec::new(),
            refusal: None,
            keeps_contexts: None,
        }
    }
}

impl Refusal {
    /// Notes in `place` that a try failed with `why` after `took_us`. Returns one line that says `what` failed, and for how long
    /// it is not tried again. See [`History::refused`].
    fn note(place: &mut Option<Self>, what: &str, why: &str, took_us: u64, now_us: u64) -> String {
        let is_known =
            |refusal: &Self| now_us <= refusal.until_us.saturating_add(REFUSED_FORGOTTEN_US);
        let before = place.take().filter(is_known).map_or(0, |refusal| refusal.times);
        let most_us = REFUSED_MAX_US.max(took_us.saturating_mul(REFUSED_TRIES));
        let factor = 1_u64.checked_shl(before).unwrap_or(u64::MAX);
        let rests_us = took_us.max(REFUSED_MIN_US).saturating_mul(factor).min(most_us);
        let (times, until_us) = (before.saturating_add(1), now_us.saturating_add(rests_us));
        *place = Some(Self { times, until_us, why: why.to_owned() });
        format!(
            "{what}, {times} time{} in a row: it is passed over for {} ({why})",
            if times == 1 { "" } else { "s" },
            time(rests_us)
        )
    }
}

impl History {
    /// Returns this history, or an empty one if it is older than the machine's present start. `boot` is the id of that start, and
    /// `now_us` its time.
    #[must_use]
    pub fn of_this_start(self, boot: &str, now_us: u64) -> Self {
        let is_of_another = !self.boot.is_empty() && !boot.is_empty() && self.boot != boot;
        let history =
            if is_of_another || self.changed_us > now_us { Self::default() } else { self };
        Self { boot: boot.to_owned(), ..history }
    }

    /// Was `tenant` paused for another, and not resumed since? None if the history does not know the tenant.
    pub fn is_displaced(&self, tenant: &TenantName) -> Option<bool> {
        self.tenants.get(tenant.as_str()).map(|past| past.is_displaced)
    }

    /// Returns what is known of `tenant`.
    pub fn of(&self, tenant: &TenantName) -> Past {
        self.tenants.get(tenant.as_str()).cloned().unwrap_or_default()
    }

    /// Returns the time since which the tenant has its turn, or else its GPUs.
    pub(super) fn since_us(&self, tenant: &TenantName, standing: &Standing) -> u64 {
        let past = self.tenants.get(tenant.as_str());
        let turn_us = past.and_then(|past| past.turn_us).filter(|_| standing.has_turn);
        turn_us.or_else(|| past.and_then(|past| past.came_us)).unwrap_or(0)
    }

    fn at(&mut self, tenant: &TenantName) -> &mut Past {
        // A new tenant begins with the smallest time of any tenant.
        let least_us = self.tenants.values().map(|past| past.used_us).min().unwrap_or(0);
        self.tenants
            .entry(tenant.as_str().to_owned())
            .or_insert_with(|| Past { used_us: least_us, ..Past::default() })
    }

    /// Notes that `tenant` was paused for another; `scene` is the state before that. If it was paused early, and not for the
    /// first time, the consequence is returned as one line.
    pub fn left(&mut self, tenant: &TenantName, scene: &Scene, now_us: u64) -> Option<String> {
        let standing = scene.tenants.get(tenant).cloned().unwrap_or_default();
        let since_us = self.since_us(tenant, &standing);
        let past = self.at(tenant);
        let quantum_us = quantum_us(&standing, past.growth);
        // A pause of an idle tenant is not early: the tenant did nothing with its GPUs.
        let idle_us = standing.idle_since_us.map_or(0, |since_us| now_us.saturating_sub(since_us));
        let was_idle = !standing.has_turn && idle_us >= idle_after_us(&standing, true);
        let ended = was_idle || (!standing.has_turn && past.turn_us.is_some());
        if let Some(came_us) = past.came_us {
            past.used_us += now_us.saturating_sub(came_us) / standing.weight.get();
        }
        past.left_us = Some(now_us);
        past.came_us = None;
        past.turn_us = None;
        past.is_displaced = true;
        past.refusal = None;
        let ran_us = now_us.saturating_sub(since_us);
        self.changed_us = now_us;
        let past = self.at(tenant);
        if ended || ran_us >= quantum_us {
            past.pushed_us.clear();
            past.growth = 1;
            return None;
        }
        let span_us = quantum_us.saturating_mul(PUSHED_QUANTA);
        past.pushed_us.retain(|pushed_us| now_us.saturating_sub(*pushed_us) <= span_us);
        past.pushed_us.push(now_us);
        if past.pushed_us.len() < PUSHED_MAX || past.growth >= GROWTH_MAX {
            // Earlier ones do not matter.
            past.pushed_us.drain(..past.pushed_us.len().saturating_sub(PUSHED_MAX));
            return None;
        }
        past.growth = (past.growth * 2).min(GROWTH_MAX);
        past.pushed_us.clear();
        Some(format!(
            "'{tenant}' was pushed out {PUSHED_MAX} times within {PUSHED_QUANTA} quanta of {}: its quantum is {} times as long from \
             here on, and it stays away for longer",
            time(quantum_us),
            past.growth
        ))
    }

    /// Notes that `tenant` is about to be paused for another. This is noted before the pause, so that the tenant is resumed even
    /// if the pausing process dies.
    pub fn is_leaving(&mut self, tenant: &TenantName) {
        self.at(tenant).is_displaced = true;
    }

    /// Notes that a pause of `tenant` for another failed with `why` after `took_us`. Returns one line that says for how long no
    /// pause is tried again. That time is first as long as the try, and doubles after each further failure. It is at most ten
    /// times as long as the try, or a minute. So a tenant whose pauses always fail is stopped for less than a tenth of the time.
    pub fn refused(&mut self, tenant: &TenantName, why: &str, took_us: u64, now_us: u64) -> String {
        self.changed_us = now_us;
        let what = format!("'{tenant}' could not be paused");
        Refusal::note(&mut self.at(tenant).refusal, &what, why, took_us, now_us)
    }

    /// Notes the same of a failure to remove its contexts.
    pub fn kept_contexts(
        &mut self,
        tenant: &TenantName,
        why: &str,
        took_us: u64,
        now_us: u64,
    ) -> String {
        self.changed_us = now_us;
        let what = format!("the contexts of '{tenant}' could not leave");
        Refusal::note(&mut self.at(tenant).keeps_contexts, &what, why, took_us, now_us)
    }

    /// Notes that `tenant` was paused by name.
    pub fn stays_away(&mut self, tenant: &TenantName) {
        self.at(tenant).is_displaced = false;
    }

    /// Notes that `tenant` has got its GPUs.
    pub fn came(&mut self, tenant: &TenantName, now_us: u64) {
        let past = self.at(tenant);
        past.came_us = Some(now_us);
        past.turn_us = None;
        past.is_displaced = false;
        self.changed_us = now_us;
    }

    /// Notes that others were paused for `tenant`, which had its GPUs already. Its quantum begins again, or the others would be
    /// resumed immediately.
    pub fn got_more(&mut self, tenant: &TenantName, scene: &Scene, now_us: u64) {
        let standing = scene.tenants.get(tenant);
        let weight = standing.map_or(1, |standing| standing.weight.get());
        let has_turn = standing.is_some_and(|standing| standing.has_turn);
        let past = self.at(tenant);
        if let Some(came_us) = past.came_us {
            past.used_us += now_us.saturating_sub(came_us) / weight;
        }
        past.came_us = Some(now_us);
        past.turn_us = has_turn.then_some(now_us);
        self.changed_us = now_us;
    }

    /// Notes that a process of `tenant` begins a turn. If `has_turn`, another process is in the turn already, and that turn goes
    /// on.
    pub fn began_turn(&mut self, tenant: &TenantName, has_turn: bool, now_us: u64) {
        let past = self.at(tenant);
        if !has_turn || past.turn_us.is_none() {
            past.turn_us = Some(now_us);
        }
        self.changed_us = now_us;
    }

    /// Notes what `scene` shows: a tenant that runs is not displaced, a tenant that does not run could be paused, and contexts
    /// that are away could leave.
    pub fn note_back(&mut self, scene: &Scene) {
        for (name, past) in &mut self.tenants {
            let mut tenants = scene.tenants.iter();
            let Some((_, is)) = tenants.find(|(tenant, _)| tenant.as_str() == name) else {
                continue;
            };
            if is.is_active {
                past.is_displaced = false;
            } else if is.gpus().next().is_some() {
                past.refusal = None;
            }
            if is.contexts.are_away {
                past.keeps_contexts = None;
            }
        }
    }

    /// Forgets all but these tenants.
    pub fn keep_only(&mut self, live: &[TenantName]) {
        self.tenants.retain(|name, _| live.iter().any(|tenant| tenant.as_str() == name));
    }
}
