//! The decision for each who waits.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::history::{History, Past};
use super::scene::{Scene, Standing, Waiting};
use super::victims::{Candidate, choose};
use super::{Class, Weight};
use crate::identity::TenantName;

/// The figures by which turns are decided. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The shortest quantum.
    pub quantum_min_us: u64,
    /// How many times as long as its switching takes (both ways) a tenant keeps the GPUs.
    pub cost_factor: u64,
    /// How long one that waits is held up by those of lower classes, at most, besides the switch itself.
    pub bound_us: u64,
    /// How many times as long a quantum grows at most.
    pub growth_max: u64,
    /// How long a background tenant launches nothing until it makes way.
    pub idle_background_us: u64,
    /// How long another one does.
    pub idle_us: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            quantum_min_us: 100_000,
            cost_factor: 10,
            bound_us: 1_000_000,
            growth_max: 8,
            idle_background_us: 50_000,
            idle_us: 500_000,
        }
    }
}

/// What somebody who waits is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Pause these, in this order, and resume its own tenant.
    Go(Vec<TenantName>),
    /// Ask again at this time of the clock at the latest, where one is known, and when something has changed.
    Wait(Option<u64>),
    /// Its tenant does not fit, whoever makes way.
    Never,
}

/// The decision for one who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// For whom.
    pub tenant: TenantName,
    /// What follows.
    pub verdict: Verdict,
    /// Why, for people: one line, and one more for each tenant that is paused.
    pub reasons: Vec<String>,
}

/// May one that has its GPUs be paused for one that waits?
enum Hold {
    Free(String),
    Until(u64, String),
    WhileItLasts(String),
}

/// What each of `scene.waiting` is to do at `now_us`, in the same order.
///
/// Whoever may go does so before `scene` is looked at again; GPUs of one who goes or waits are nobody's who comes after it.
pub fn decide(scene: &Scene, history: &History, settings: &Settings, now_us: u64) -> Vec<Decision> {
    let view = View { scene, history, settings, now_us };
    let mut order: Vec<usize> = (0..scene.waiting.len()).collect();
    order.sort_by_key(|index| {
        let waiting = &scene.waiting[*index];
        let class = scene.tenants.get(&waiting.tenant).map(|standing| standing.class);
        std::cmp::Reverse((waiting.is_order, class))
    });
    let mut taken: BTreeMap<&str, &TenantName> = BTreeMap::new();
    let mut decisions = vec![None; order.len()];
    for index in order {
        let waiting = &scene.waiting[index];
        let Some(standing) = scene.tenants.get(&waiting.tenant) else { continue };
        let before = standing.gpus().find_map(|gpu| taken.get(gpu)).copied();
        let joins = standing.is_active && standing.has_turn;
        let first = before.filter(|other| **other != waiting.tenant && !joins);
        let decision = match first {
            Some(other) => Decision::wait(waiting, None, &format!("'{other}' comes first")),
            None => view.decision(waiting, standing),
        };
        let comes = match decision.verdict {
            Verdict::Go(_) => true,
            // One that waits for what may never end, or stays away for now, keeps its place and no GPU.
            Verdict::Wait(until_us) => {
                first.is_some() || (until_us.is_some() && view.away(waiting, standing).is_none())
            }
            Verdict::Never => false,
        };
        if comes {
            for gpu in standing.gpus() {
                taken.entry(gpu).or_insert(&waiting.tenant);
            }
            // Two at once would pause one tenant twice.
            if let Verdict::Go(victims) = &decision.verdict {
                for name in victims {
                    let Some((name, victim)) = scene.tenants.get_key_value(name) else { continue };
                    for gpu in victim.gpus() {
                        taken.entry(gpu).or_insert(name);
                    }
                }
            }
        }
        decisions[index] = Some(decision);
    }
    let gone = |waiting: &Waiting| Decision {
        tenant: waiting.tenant.clone(),
        verdict: Verdict::Never,
        reasons: vec![format!("'{}' has no process", waiting.tenant)],
    };
    decisions
        .into_iter()
        .zip(&scene.waiting)
        .map(|(decision, waiting)| decision.unwrap_or_else(|| gone(waiting)))
        .collect()
}

/// How long a tenant keeps its GPUs against one of its own class.
pub(super) fn quantum_us(standing: &Standing, past: &Past, settings: &Settings) -> u64 {
    let cost_us = standing.cost.both_us().saturating_mul(settings.cost_factor);
    let one_us = cost_us.max(settings.quantum_min_us).saturating_mul(past.growth);
    one_us.saturating_mul(weight_of(standing).get())
}

/// Weights are of fair tenants alone.
fn weight_of(standing: &Standing) -> Weight {
    if standing.class == Class::Fair { standing.weight } else { Weight::default() }
}

impl Decision {
    fn new(waiting: &Waiting, verdict: Verdict, reasons: Vec<String>) -> Self {
        Self { tenant: waiting.tenant.clone(), verdict, reasons }
    }

    fn wait(waiting: &Waiting, until_us: Option<u64>, why: &str) -> Self {
        let reason = format!("'{}' waits: {why}", waiting.tenant);
        Self::new(waiting, Verdict::Wait(until_us), vec![reason])
    }
}

struct View<'a> {
    scene: &'a Scene,
    history: &'a History,
    settings: &'a Settings,
    now_us: u64,
}

impl<'a> View<'a> {
    /// The decision for one that has had to leave and stays away for a while.
    fn away(&self, waiting: &Waiting, standing: &Standing) -> Option<Decision> {
        let hurries = waiting.is_order || standing.class == Class::Guaranteed;
        let past = self.history.of(&waiting.tenant);
        let left_us = past.left_us.filter(|_| past.is_displaced && !hurries)?;
        let one_us = standing.cost.both_us().saturating_mul(self.settings.cost_factor);
        let one_us = one_us.max(self.settings.quantum_min_us);
        let grown_us = one_us.saturating_mul(past.growth.saturating_sub(1));
        let until_us = left_us.saturating_add(standing.cost.pause_us).saturating_add(grown_us);
        (until_us > self.now_us && !standing.is_active).then(|| {
            let why = format!("it has just left, and stays away for {} more", self.left(until_us));
            Decision::wait(waiting, Some(until_us), &why)
        })
    }

    fn decision(&self, waiting: &Waiting, standing: &'a Standing) -> Decision {
        if let Some(stays_away) = self.away(waiting, standing) {
            return stays_away;
        }
        let tenant = &waiting.tenant;
        if standing.is_active {
            let reason = format!("'{tenant}' has its GPUs");
            return Decision::new(waiting, Verdict::Go(Vec::new()), vec![reason]);
        }
        let short = self.short(standing);
        if short.is_empty() {
            let reason = format!("'{tenant}' is resumed: it fits beside what is there");
            return Decision::new(waiting, Verdict::Go(Vec::new()), vec![reason]);
        }
        self.with_victims(waiting, standing, &short)
    }

    fn with_victims(
        &self,
        waiting: &Waiting,
        standing: &Standing,
        short: &BTreeMap<&'a str, u64>,
    ) -> Decision {
        let mut holds = BTreeMap::new();
        let mut all = Vec::new();
        let least_us = self.history.tenants.values().map(|past| past.used_us).min().unwrap_or(0);
        for (tenant, other) in &self.scene.tenants {
            let gives: BTreeMap<&str, u64> =
                short.keys().map(|gpu| (*gpu, other.given_bytes(gpu))).collect();
            if *tenant == waiting.tenant
                || !other.is_active
                || gives.values().all(|bytes| *bytes == 0)
            {
                continue;
            }
            let past = self.history.of(tenant);
            let quantum_us = quantum_us(other, &past, self.settings).max(1);
            holds.insert(tenant, self.hold(tenant, other, standing.class, waiting.is_order));
            all.push(Candidate {
                tenant,
                class: other.class,
                over_quanta: past.used_us.saturating_sub(least_us) / quantum_us,
                copied_bytes: other.copied_bytes(),
                gives,
            });
        }
        if choose(&all, short).is_none() {
            let reason = format!(
                "'{}' cannot come, whoever makes way: {}",
                waiting.tenant,
                lacking(short, &all)
            );
            return Decision::new(waiting, Verdict::Never, vec![reason]);
        }
        let lasts = |tenant: &TenantName| matches!(holds.get(tenant), Some(Hold::WhileItLasts(_)));
        let bounded: Vec<_> =
            all.iter().filter(|candidate| !lasts(candidate.tenant)).cloned().collect();
        let Some(victims) = choose(&bounded, short) else {
            let whys = holds.values().filter_map(|hold| match hold {
                Hold::WhileItLasts(why) => Some(why.as_str()),
                Hold::Free(_) | Hold::Until(..) => None,
            });
            return Decision::wait(waiting, None, &whys.collect::<Vec<_>>().join(", and "));
        };
        let mut until_us = self.now_us;
        let (mut whys, mut reasons) = (Vec::new(), Vec::new());
        for tenant in &victims {
            match &holds[tenant] {
                Hold::Until(end_us, why) => {
                    until_us = until_us.max(*end_us);
                    whys.push(why.as_str());
                }
                Hold::Free(why) => reasons.push(self.sacrifice(tenant, why, short)),
                Hold::WhileItLasts(_) => {}
            }
        }
        if !whys.is_empty() {
            return Decision::wait(waiting, Some(until_us), &whys.join(", and "));
        }
        let missing: Vec<_> =
            short.iter().map(|(gpu, bytes)| format!("{} on {gpu}", Bytes(*bytes))).collect();
        reasons.push(format!("'{}' is resumed: it lacked {}", waiting.tenant, missing.join(", ")));
        let victims = victims.into_iter().cloned().collect();
        Decision::new(waiting, Verdict::Go(victims), reasons)
    }

    /// What the tenant lacks on each GPU.
    fn short(&self, standing: &'a Standing) -> BTreeMap<&'a str, u64> {
        let missing = |(gpu, held): (&'a String, &super::scene::Held)| {
            let free_bytes = self.scene.free_bytes.get(gpu).copied().unwrap_or(0);
            (gpu.as_str(), held.away_bytes.saturating_sub(free_bytes))
        };
        standing.held.iter().map(missing).filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// May `tenant`, which has its GPUs, be paused for one of `class` that waits?
    fn hold(&self, tenant: &TenantName, standing: &Standing, class: Class, is_order: bool) -> Hold {
        let idle_after_us = match standing.class {
            Class::Background => self.settings.idle_background_us,
            Class::Fair | Class::Guaranteed => self.settings.idle_us,
        };
        if let Some(idle_since_us) = standing.idle_since_us
            && self.now_us.saturating_sub(idle_since_us) >= idle_after_us
        {
            let idle_us = self.now_us.saturating_sub(idle_since_us);
            return Hold::Free(format!("has launched nothing for {}", time(idle_us)));
        }
        let past = self.history.of(tenant);
        if !standing.has_turn && past.turn_us.is_some() {
            return Hold::Free("its turn is over".to_owned());
        }
        if !standing.has_turn && is_order {
            return Hold::Free("is in no turn".to_owned());
        }
        let what = if standing.has_turn { "is in its turn" } else { "has not given up its GPUs" };
        if class < standing.class && !is_order {
            return Hold::WhileItLasts(format!("'{tenant}' ({}) {what}", standing.class));
        }
        let quantum_us = quantum_us(standing, &past, self.settings);
        let is_higher = class > standing.class;
        let kept_us = if is_higher { quantum_us.min(self.settings.bound_us) } else { quantum_us };
        let since_us = self.history.since_us(tenant, standing);
        let until_us = since_us.saturating_add(kept_us);
        if until_us <= self.now_us {
            let ran_us = self.now_us - since_us;
            let figure = if is_higher { "the bound" } else { "its quantum" };
            return Hold::Free(if since_us == 0 {
                "takes no turns".to_owned()
            } else {
                format!("has run for {}, and {figure} is {}", time(ran_us), time(kept_us))
            });
        }
        let why = format!(
            "'{tenant}' ({}) {what}, and keeps it for {} more",
            standing.class,
            self.left(until_us)
        );
        Hold::Until(until_us, why)
    }

    fn left(&self, until_us: u64) -> String {
        time(until_us.saturating_sub(self.now_us))
    }

    /// The line on a tenant that makes way.
    fn sacrifice(&self, tenant: &TenantName, why: &str, short: &BTreeMap<&str, u64>) -> String {
        let standing = &self.scene.tenants[tenant];
        let mut parts = Vec::new();
        let sum = |of: fn(&super::scene::Held) -> u64| {
            standing.held.values().fold(0_u64, |all, held| all.saturating_add(of(held)))
        };
        for (label, bytes) in [
            ("cached", sum(|held| held.cached_bytes)),
            ("given up", sum(|held| held.discarded_bytes)),
            ("unchanged", sum(|held| held.unchanged_bytes)),
            ("to be copied", sum(|held| held.copied_bytes)),
        ] {
            if bytes > 0 {
                parts.push(format!("{} {label}", Bytes(bytes)));
            }
        }
        let gpus: BTreeSet<&str> =
            short.keys().copied().filter(|gpu| standing.given_bytes(gpu) > 0).collect();
        let gpus: Vec<_> = gpus.into_iter().collect();
        format!(
            "'{tenant}' ({}) is paused: {why}; it makes room on {}: {}",
            standing.class,
            gpus.join(", "),
            parts.join(", ")
        )
    }
}

/// What nobody can make free.
fn lacking(short: &BTreeMap<&str, u64>, all: &[Candidate<'_>]) -> String {
    let lines = short.iter().filter_map(|(gpu, missing_bytes)| {
        let given = all.iter().filter_map(|candidate| candidate.gives.get(gpu).copied());
        let given_bytes = given.fold(0, u64::saturating_add);
        (given_bytes < *missing_bytes).then(|| {
            format!(
                "it lacks {} on {gpu}, and other tenants hold {} there that a pause gives back; end what holds the rest",
                Bytes(*missing_bytes),
                Bytes(given_bytes)
            )
        })
    });
    lines.collect::<Vec<_>>().join("; ")
}

/// A size for people.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 3] = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            if self.0 >= 1 << shift {
                let tenths = (u128::from(self.0) * 10) >> shift;
                let (whole, tenth) = (tenths / 10, tenths % 10);
                return if tenth == 0 {
                    write!(f, "{whole} {unit}")
                } else {
                    write!(f, "{whole}.{tenth} {unit}")
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// A time for people.
pub(super) fn time(us: u64) -> String {
    match us {
        0..10_000 => format!("{}.{} ms", us / 1_000, us % 1_000 / 100),
        10_000..10_000_000 => format!("{} ms", us / 1_000),
        10_000_000.. => format!("{} s", us / 1_000_000),
    }
}
