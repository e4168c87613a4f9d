//! The decision for each process that waits.

use std::collections::{BTreeMap, BTreeSet};

use super::depth::in_words;
use super::history::History;
use super::quanta::{
    BOUND_US, COST_FACTOR, QUANTUM_MIN_US, idle_after_us, quantum_at_us, quantum_us, time,
};
use super::scene::{Scene, Standing, Waiting, Wish};
use super::victims::{Candidate, choose};
use tenants::class::Class;
use tenants::coordinator::end_some;
use tenants::identity::TenantName;
use tenants::size::Size;

/// The step that a waiting process is to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Pause these tenants, in this order, and resume its own.
    Go(Vec<TenantName>),
    /// Pause this tenant if it runs, remove its contexts, and decide again.
    Sink(TenantName),
    /// Decide again when something has changed, and at this time of the clock at the latest, if one is known.
    Wait(Option<u64>),
    /// Its tenant does not fit, even if all others are paused.
    Never,
}

/// The decision for one process that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The tenant that the process waits for.
    pub tenant: TenantName,
    /// The step that it is to take.
    pub verdict: Verdict,
    /// The reasons, for people: one line, and one more for each tenant that is paused.
    pub reasons: Vec<String>,
    /// Do the contexts of the paused tenants leave too, if they may?
    pub contexts_leave: bool,
}

/// May a tenant that has its GPUs be paused for one that waits?
pub(super) enum Hold {
    Free(String),
    Until(u64, String),
    WhileItLasts(String),
}

/// Decides what each process of `scene.waiting` is to do at `now_us`. The decisions are in the same order.
///
/// A tenant that may go is switched to before the next `scene` is gathered. GPUs of a tenant that goes or waits are for none that
/// comes after it.
pub fn decide(scene: &Scene, history: &History, now_us: u64) -> Vec<Decision> {
    let view = View { scene, history, now_us };
    let mut order: Vec<usize> = (0..scene.waiting.len()).collect();
    order.sort_by_key(|index| {
        let waiting = &scene.waiting[*index];
        let class = scene.tenants.get(&waiting.tenant).map(|standing| standing.class);
        std::cmp::Reverse((waiting.wish.is_order(), class))
    });
    let mut taken: BTreeMap<&str, &TenantName> = BTreeMap::new();
    let mut decisions = vec![None; order.len()];
    for index in order {
        let waiting = &scene.waiting[index];
        let Some(standing) = scene.tenants.get(&waiting.tenant) else { continue };
        let before = waiting.gpus(standing).find_map(|gpu| taken.get(gpu)).copied();
        let joins = standing.is_active && standing.has_turn && waiting.wish == Wish::Turn;
        let first = before.filter(|other| **other != waiting.tenant && !joins);
        let decision = match first {
            Some(other) => Decision::wait(waiting, None, &format!("'{other}' comes first")),
            None => view.decision(waiting, standing),
        };
        let comes = match decision.verdict {
            Verdict::Go(_) | Verdict::Sink(_) => true,
            // A process keeps its place, but no GPU, if its wait may never end or its tenant must stay paused for now.
            Verdict::Wait(until_us) => {
                first.is_some() || (until_us.is_some() && view.away(waiting, standing).is_none())
            }
            Verdict::Never => false,
        };
        if comes {
            for gpu in waiting.gpus(standing) {
                taken.entry(gpu).or_insert(&waiting.tenant);
            }
            // Two of them together could pause one tenant twice.
            let leave = match &decision.verdict {
                Verdict::Go(victims) => victims.as_slice(),
                Verdict::Sink(one) => std::slice::from_ref(one),
                Verdict::Wait(_) | Verdict::Never => &[],
            };
            for name in leave {
                let Some((name, victim)) = scene.tenants.get_key_value(name) else { continue };
                for gpu in victim.gpus() {
                    taken.entry(gpu).or_insert(name);
                }
            }
        }
        decisions[index] = Some(decision);
    }
    let gone = |waiting: &Waiting| Decision {
        tenant: waiting.tenant.clone(),
        verdict: Verdict::Never,
        reasons: vec![if scene.unheard.contains(&waiting.tenant) {
            format!("'{}' does not answer", waiting.tenant)
        } else {
            format!("'{}' has no process", waiting.tenant)
        }],
        contexts_leave: false,
    };
    decisions
        .into_iter()
        .zip(&scene.waiting)
        .map(|(decision, waiting)| decision.unwrap_or_else(|| gone(waiting)))
        .collect()
}

impl Decision {
    pub(super) fn new(waiting: &Waiting, verdict: Verdict, reasons: Vec<String>) -> Self {
        Self { tenant: waiting.tenant.clone(), verdict, reasons, contexts_leave: false }
    }

    pub(super) fn wait(waiting: &Waiting, until_us: Option<u64>, why: &str) -> Self {
        let reason = format!("'{}' waits: {why}", waiting.tenant);
        Self::new(waiting, Verdict::Wait(until_us), vec![reason])
    }
}

pub(super) struct View<'a> {
    pub(super) scene: &'a Scene,
    pub(super) history: &'a History,
    pub(super) now_us: u64,
}

impl<'a> View<'a> {
    /// Returns the decision for a tenant that had to leave and must stay paused for a while.
    fn away(&self, waiting: &Waiting, standing: &Standing) -> Option<Decision> {
        let hurries = waiting.wish.is_order() || standing.class == Class::Guaranteed;
        let past = self.history.of(&waiting.tenant);
        let left_us = past.left_us.filter(|_| past.is_displaced && !hurries)?;
        let one_us = standing.cost.both_us().saturating_mul(COST_FACTOR);
        let one_us = one_us.max(QUANTUM_MIN_US);
        let grown_us = one_us.saturating_mul(past.growth.saturating_sub(1));
        let until_us = left_us.saturating_add(standing.cost.pause_us).saturating_add(grown_us);
        (until_us > self.now_us && !standing.is_active).then(|| {
            let why = format!("it has just left, and stays away for {} more", self.left(until_us));
            Decision::wait(waiting, Some(until_us), &why)
        })
    }

    fn decision(&self, waiting: &'a Waiting, standing: &'a Standing) -> Decision {
        if let Some(stays_away) = self.away(waiting, standing) {
            return stays_away;
        }
        let tenant = &waiting.tenant;
        if waiting.wish.spares_others() && !standing.is_active && !self.was_displaced(tenant) {
            let why = format!("it was paused by name, and stays so until `sublet resume {tenant}`");
            return Decision::wait(waiting, None, &why);
        }
        let lacks = self.lacks(waiting, standing);
        if standing.is_active && lacks.is_empty() {
            let reason = format!("'{tenant}' has its GPUs");
            return Decision::new(waiting, Verdict::Go(Vec::new()), vec![reason]);
        }
        if let Some(sinks) = self.makes_way_for_contexts(waiting, standing, &lacks) {
            return sinks;
        }
        let short = self.short(lacks);
        if short.is_empty() {
            let what = if standing.is_active { "has what it wanted" } else { "is resumed" };
            let reason = format!("'{tenant}' {what}: it fits next to what is there");
            return Decision::new(waiting, Verdict::Go(Vec::new()), vec![reason]);
        }
        self.with_victims(waiting, standing, &short)
    }

    fn was_displaced(&self, tenant: &TenantName) -> bool {
        let past = self.history.tenants.get(tenant.as_str());
        past.is_some_and(|past| past.is_displaced)
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
                || (waiting.wish.spares_others() && !other.comes_back)
                || gives.values().all(|bytes| *bytes == 0)
            {
                continue;
            }
            let past = self.history.of(tenant);
            let quantum_us = quantum_us(other, past.growth).max(1);
            holds.insert(tenant, self.hold(tenant, other, standing.class, waiting.wish.is_order()));
            all.push(Candidate {
                tenant,
                class: other.class,
                is_idle: self.idle_us(other, standing.class > other.class).is_some(),
                over_quanta: past.used_us.saturating_sub(least_us) / quantum_us,
                copied_bytes: other.copied_bytes(),
                gives,
            });
        }
        if choose(&all, short).is_none() {
            if let Some(moving) = self.moving(waiting, short) {
                let until_us = self.now_us.saturating_add(QUANTUM_MIN_US);
                let why = format!("'{moving}' is being paused or resumed");
                return Decision::wait(waiting, Some(until_us), &why);
            }
            if let Some(sinks) = self.gives_contexts(waiting, short, Some(&all), &holds) {
                return sinks;
            }
            let reason = format!(
                "'{}' cannot {}, even if all others make way: {}",
                waiting.tenant,
                if standing.is_active { "have more" } else { "come" },
                self.too_large(standing, short).unwrap_or_else(|| {
                    let lacking = self.lacking(waiting, short, &all);
                    let contexts = self.keep_contexts(waiting, short);
                    format!("{lacking}{contexts}{}", self.unheard(&waiting.tenant))
                })
            );
            // A tenant that waits to be resumed may wait for as long as it lives.
            let lasts = waiting.wish == Wish::Back;
            let verdict = if lasts { Verdict::Wait(None) } else { Verdict::Never };
            return Decision::new(waiting, verdict, vec![reason]);
        }
        let lasts = |tenant: &TenantName| matches!(holds.get(tenant), Some(Hold::WhileItLasts(_)));
        let bounded: Vec<_> =
            all.iter().filter(|candidate| !lasts(candidate.tenant)).cloned().collect();
        let goes = |candidate: &&Candidate<'_>| self.refuses(candidate.tenant).is_none();
        let willing: Vec<_> = bounded.iter().filter(goes).cloned().collect();
        // A person's order is tried all the same.
        let others = || choose(&bounded, short).filter(|_| waiting.wish.is_order());
        let Some(victims) = choose(&willing, short).or_else(others) else {
            let lasting = holds.iter().filter_map(|(tenant, hold)| match hold {
                Hold::WhileItLasts(why) => Some(why.clone()),
                Hold::Free(_) | Hold::Until(..) => self.refuses(tenant),
            });
            return Decision::wait(waiting, None, &lasting.collect::<Vec<_>>().join(", and "));
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
        let what = if standing.is_active { "gets more memory" } else { "is resumed" };
        reasons.push(format!("'{}' {what}: it lacked {}", waiting.tenant, in_words(short)));
        let victims = victims.into_iter().cloned().collect();
        let contexts_leave = standing.margin_bytes() > 0;
        Decision { contexts_leave, ..Decision::new(waiting, Verdict::Go(victims), reasons) }
    }

    /// Returns another tenant that is being paused or resumed, with memory on a GPU that is short of it.
    fn moving(&self, waiting: &Waiting, short: &BTreeMap<&'a str, u64>) -> Option<&'a TenantName> {
        let is_in_the_way = |tenant: &&TenantName| {
            let mut gpus = self.scene.tenants.get(*tenant).into_iter().flat_map(Standing::gpus);
            **tenant != waiting.tenant && gpus.any(|gpu| short.contains_key(gpu))
        };
        self.scene.moving.iter().find(is_in_the_way)
    }

    /// Returns the part of `lacks` that is not free.
    pub(super) fn short(&self, mut lacks: BTreeMap<&'a str, u64>) -> BTreeMap<&'a str, u64> {
        lacks.retain(|gpu, bytes| {
            let free_bytes = self.scene.free_bytes.get(*gpu).copied().unwrap_or(0);
            *bytes = bytes.saturating_sub(free_bytes);
            *bytes > 0
        });
        lacks
    }

    /// May `tenant`, which has its GPUs, be paused for one of `class` that waits?
    fn hold(&self, tenant: &TenantName, standing: &Standing, class: Class, is_order: bool) -> Hold {
        let past = self.history.of(tenant);
        if !standing.has_turn && past.turn_us.is_some() {
            return Hold::Free("its turn is over".to_owned());
        }
        if let Some(idle_us) = self.idle_us(standing, class > standing.class) {
            return Hold::Free(format!("has launched nothing for {}", time(idle_us)));
        }
        if !standing.has_turn && is_order {
            return Hold::Free("is in no turn".to_owned());
        }
        let what = if standing.has_turn { "is in its turn" } else { "has not given up its GPUs" };
        if class < standing.class && !is_order {
            return Hold::WhileItLasts(format!("'{tenant}' ({}) {what}", standing.class));
        }
        let is_higher = class > standing.class;
        let own_us = quantum_us(standing, past.growth);
        let kept_us = match (is_higher, is_order) {
            (true, _) => own_us.min(BOUND_US),
            (false, true) => own_us,
            (false, false) => own_us.max(self.longest_quantum_us(standing)),
        };
        let since_us = self.history.since_us(tenant, standing);
        let until_us = since_us.saturating_add(kept_us);
        if until_us <= self.now_us {
            let ran_us = self.now_us - since_us;
            let figure = if is_higher { "the bound" } else { "its quantum" };
            return Hold::Free(if since_us == 0 {
                "has had no turn".to_owned()
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

    /// Returns the longest quantum of the tenants of its class that wait for its GPUs, with its weight. The tenant keeps the GPUs
    /// for as long as they will. With its own quantum alone, its share would be in proportion to its switching time. A tenant
    /// that is switched very fast would then get no work done.
    fn longest_quantum_us(&self, standing: &Standing) -> u64 {
        let waiting_us = self.scene.waiting.iter().filter_map(|waiting| {
            let other = self.scene.tenants.get(&waiting.tenant)?;
            let wants = waiting.gpus(other).any(|gpu| standing.held.contains_key(gpu));
            (wants && other.class == standing.class).then(|| quantum_at_us(standing, other.cost, 1))
        });
        waiting_us.max().unwrap_or(0)
    }

    /// Returns why `tenant` is not to be paused now, if a pause of it has failed.
    pub(super) fn refuses(&self, tenant: &TenantName) -> Option<String> {
        let past = self.history.tenants.get(tenant.as_str())?;
        let refusal = past.refusal.as_ref().filter(|refusal| refusal.until_us > self.now_us)?;
        Some(format!(
            "'{tenant}' could not be paused ({}), and is asked again in {}",
            refusal.why,
            self.left(refusal.until_us)
        ))
    }

    /// Returns for how long a tenant has been idle, if that is long enough to pause it. A tenant in a turn keeps the turn while
    /// it is idle: its program says that it goes on.
    fn idle_us(&self, standing: &Standing, is_for_higher: bool) -> Option<u64> {
        let least_us = idle_after_us(standing, is_for_higher);
        let idle_us = self.now_us.saturating_sub(standing.idle_since_us?);
        (!standing.has_turn && idle_us >= least_us).then_some(idle_us)
    }

    fn left(&self, until_us: u64) -> String {
        time(until_us.saturating_sub(self.now_us))
    }

    /// Returns a line if the tenant wants more memory than a GPU has. No pause can help then.
    fn too_large(&self, standing: &Standing, short: &BTreeMap<&str, u64>) -> Option<String> {
        short.iter().find_map(|(gpu, missing_bytes)| {
            let total_bytes = *self.scene.total_bytes.get(*gpu)?;
            let free_bytes = self.scene.free_bytes.get(*gpu).copied().unwrap_or(0);
            let own_bytes = if standing.is_active { standing.given_bytes(gpu) } else { 0 };
            let needed_bytes = missing_bytes.saturating_add(free_bytes).saturating_add(own_bytes);
            (needed_bytes > total_bytes).then(|| {
                format!(
                    "it needs {} on {gpu}, which has {} in all: {}",
                    Size(needed_bytes),
                    Size(total_bytes),
                    end_some(standing.processes.get(*gpu).map_or(&[], Vec::as_slice))
                )
            })
        })
    }

    /// Names the GPUs on which pauses cannot free enough, and the bytes that are lacking there.
    fn lacking(
        &self,
        waiting: &Waiting,
        short: &BTreeMap<&str, u64>,
        all: &[Candidate<'_>],
    ) -> String {
        let lines = short.iter().filter_map(|(gpu, missing_bytes)| {
            let given = all.iter().filter_map(|candidate| candidate.gives.get(gpu).copied());
            let given_bytes = given.fold(0, u64::saturating_add);
            let spared = self.spared(waiting, gpu);
            let given = match given_bytes {
                0 => "no other tenant there makes way".to_owned(),
                _ => format!(
                    "other tenants hold {} there that a pause gives back",
                    Size(given_bytes)
                ),
            };
            let missing = Size(*missing_bytes);
            (given_bytes < *missing_bytes).then(|| {
                format!("it lacks {missing} on {gpu}, and {given}; {spared}end what holds the rest")
            })
        });
        lines.collect::<Vec<_>>().join("; ")
    }

    /// Names the other tenants that do not answer, and so may hold some of the memory.
    fn unheard(&self, waiting: &TenantName) -> String {
        let others = self.scene.unheard.iter().filter(|tenant| *tenant != waiting);
        let named: Vec<_> = others.map(|tenant| format!("'{tenant}'")).collect();
        if named.is_empty() {
            return String::new();
        }
        format!("; what {} may hold is not known, which does not answer now", named.join(", "))
    }

    /// Names the tenants that are not paused for `gpu`, because nothing would resume them.
    fn spared(&self, waiting: &Waiting, gpu: &str) -> String {
        let is_spared = |tenant: &TenantName, other: &Standing| {
            waiting.wish.spares_others()
                && *tenant != waiting.tenant
                && other.is_active
                && !other.comes_back
                && other.given_bytes(gpu) > 0
        };
        let spared = self.scene.tenants.iter().filter(|(tenant, other)| is_spared(tenant, other));
        let named: Vec<_> = spared
            .map(|(tenant, other)| format!("'{tenant}' holds {}", Size(other.given_bytes(gpu))))
            .collect();
        if named.is_empty() {
            return String::new();
        }
        format!(
            "{} and does not come back by itself: start it with `sublet run --turns auto`, or pause it by name; or ",
            named.join(", ")
        )
    }

    /// Returns the line about a tenant that is paused for another.
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
                parts.push(format!("{} {label}", Size(bytes)));
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
