//! The choice of tenants whose contexts leave the GPUs too, the longest paused first. A pause of memory alone leaves contexts
//! there. The size of a context is not known. So the contexts of one tenant leave, and the decision is made again with the memory
//! that is free then.

use std::collections::BTreeMap;
use std::time::Duration;

use super::decide::{Decision, Hold, Verdict, View};
use super::history::Refusal;
use super::scene::{CONTEXT_BYTES, Standing, Waiting};
use super::victims::Candidate;
use tenants::identity::TenantName;
use tenants::size::Size;

/// The number of failed tries after which contexts are known to stay.
const TRIES_MAX: u32 = 3;

/// Are the contexts of a paused tenant to leave? It has `rested` for this time, and is not in the queue.
pub fn is_due(rested: Duration, after: Option<Duration>) -> bool {
    after.is_some_and(|after| rested >= after)
}

impl<'a> View<'a> {
    /// Returns the bytes that a waiting process needs on each GPU. If they are not known, it returns more than is free.
    pub(super) fn lacks(
        &self,
        waiting: &'a Waiting,
        standing: &'a Standing,
    ) -> BTreeMap<&'a str, u64> {
        let mut lacks = standing.lacks(&waiting.wish);
        let is_short = self.scene.short.contains(&waiting.tenant);
        let known: Vec<_> = lacks.keys().copied().filter(|_| is_short).collect();
        for gpu in known.into_iter().chain(waiting.wish.context()) {
            let free_bytes = self.scene.free_bytes.get(gpu).copied().unwrap_or(0);
            let bytes = lacks.entry(gpu).or_default();
            *bytes = (*bytes).max(free_bytes.saturating_add(1));
        }
        lacks
    }

    /// Decides that contexts of a paused tenant leave first, if the GPU may lack memory for the contexts that come.
    pub(super) fn makes_way_for_contexts(
        &self,
        waiting: &Waiting,
        standing: &Standing,
        lacks: &BTreeMap<&'a str, u64>,
    ) -> Option<Decision> {
        let margin_bytes = standing.margin_bytes();
        let is_short = self.scene.short.contains(&waiting.tenant);
        if margin_bytes == 0 && !is_short && waiting.wish.context().is_none() {
            return None;
        }
        let with_margin =
            lacks.iter().map(|(gpu, bytes)| (*gpu, bytes.saturating_add(margin_bytes)));
        let short = self.short(with_margin.collect());
        let leaves = self.gives_contexts(waiting, &short, None, &BTreeMap::new())?;
        matches!(leaves.verdict, Verdict::Sink(_)).then_some(leaves)
    }

    /// Decides the tenant whose contexts leave for the bytes that are `short`. If `all` is known, it is what pauses could free,
    /// and less than that: contexts leave only if they may be enough. A tenant that has its GPUs keeps them as `holds` says.
    pub(super) fn gives_contexts(
        &self,
        waiting: &Waiting,
        short: &BTreeMap<&str, u64>,
        all: Option<&[Candidate<'_>]>,
        holds: &BTreeMap<&TenantName, Hold>,
    ) -> Option<Decision> {
        let mut could = self.with_contexts(waiting, short);
        could.retain(|(tenant, standing)| {
            let makes_way = !standing.is_active || holds.contains_key(tenant);
            let stays = self.keeps_contexts(tenant).is_some_and(|kept| kept.times >= TRIES_MAX);
            standing.contexts.may_leave && makes_way && !stays && self.refuses(tenant).is_none()
        });
        let are_enough = all.is_none_or(|all| {
            short.iter().all(|(gpu, bytes)| {
                let gives = all.iter().filter_map(|candidate| candidate.gives.get(gpu).copied());
                let there = could.iter().filter(|(_, standing)| standing.held.contains_key(*gpu));
                let contexts = there.map(|(_, is)| is.contexts.processes * CONTEXT_BYTES);
                gives.chain(contexts).fold(0, u64::saturating_add) >= *bytes
            })
        });
        let leaver = |(tenant, _)| {
            let (from_us, why) = match (self.keeps_contexts(tenant), holds.get(tenant)) {
                (Some(kept), _) => {
                    let why = format!("the contexts of '{tenant}' could not leave ({})", kept.why);
                    (kept.until_us, why)
                }
                (None, None) => (0, "it rests".to_owned()),
                (None, Some(Hold::Free(why))) => (0, why.clone()),
                (None, Some(Hold::Until(until_us, why))) => (*until_us, why.clone()),
                (None, Some(Hold::WhileItLasts(_))) => return None,
            };
            Some((from_us, tenant, why))
        };
        let leavers = could.into_iter().filter(|_| are_enough).filter_map(leaver);
        let (from_us, tenant, why) = leavers.min_by_key(|(from_us, ..)| *from_us)?;
        if from_us > 0 {
            return Some(Decision::wait(waiting, Some(from_us), &why));
        }
        let is_context = waiting.wish.context().is_some();
        let lacks = if is_context { "room for a context".to_owned() } else { in_words(short) };
        let comes = &waiting.tenant;
        let reason =
            format!("the contexts of '{tenant}' leave too: {why}; '{comes}' lacks {lacks}");
        Some(Decision::new(waiting, Verdict::Sink(tenant.clone()), vec![reason]))
    }

    /// Returns the failed tries to remove the contexts of `tenant`, if it is too early to try again.
    fn keeps_contexts(&self, tenant: &TenantName) -> Option<&'a Refusal> {
        let past = self.history.tenants.get(tenant.as_str())?;
        past.keeps_contexts.as_ref().filter(|refusal| refusal.until_us > self.now_us)
    }

    /// Returns the tenants with contexts on one of these GPUs: the longest paused first, and last those that run or wait to be
    /// resumed.
    fn with_contexts(
        &self,
        waiting: &Waiting,
        short: &BTreeMap<&str, u64>,
    ) -> Vec<(&'a TenantName, &'a Standing)> {
        let is_there = |(tenant, standing): &(&TenantName, &Standing)| {
            **tenant != waiting.tenant
                && standing.contexts.processes > 0
                && !standing.contexts.are_away
                && !self.scene.moving.contains(*tenant)
                && short.keys().any(|gpu| standing.held.contains_key(*gpu))
        };
        let mut all: Vec<_> = self.scene.tenants.iter().filter(is_there).collect();
        all.sort_by_key(|(tenant, standing)| {
            let waits = self.scene.waiting.iter().any(|other| other.tenant == **tenant);
            (standing.is_active, waits, self.history.of(tenant).left_us)
        });
        all
    }

    /// Names the tenants that rest and keep contexts on GPUs that are `short`, and the command that helps.
    pub(super) fn keep_contexts(&self, waiting: &Waiting, short: &BTreeMap<&str, u64>) -> String {
        let mut keep = self.with_contexts(waiting, short);
        keep.retain(|(_, standing)| !standing.is_active);
        let Some((first, _)) = keep.first() else { return String::new() };
        let named: Vec<_> = keep.iter().map(|(tenant, _)| format!("'{tenant}'")).collect();
        format!(
            "; the contexts of {} stay there: `sublet pause {first} --deep` takes them off too, and `sublet run --turns auto,deep` has that happen \
             by itself",
            named.join(", ")
        )
    }
}

/// Returns a text with the bytes that each GPU lacks.
pub(super) fn in_words(short: &BTreeMap<&str, u64>) -> String {
    let each: Vec<_> =
        short.iter().map(|(gpu, bytes)| format!("{} on {gpu}", Size(*bytes))).collect();
    each.join(", ")
}
