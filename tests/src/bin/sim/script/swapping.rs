//! Two tenants change places, with or without a mishap on either side.

use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::LostImports;
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::GRANULARITY_BYTES;

use super::mishap::Mishap;
use super::{Ending, Script, cause_of, full, named, outline};
use crate::coordinate::{Refusal, Request, SwapWith, Verdict, Way};
use crate::tally::Tally;
use crate::worker::TAGS;

/// The two of a swap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// Runs, and leaves, all of it or by tag.
    from: usize,
    /// Is paused, all of it or by tag, and comes.
    to: usize,
}

/// What the swap does to one of them: the states before, and after a success.
#[derive(Clone, Copy, Debug)]
struct Change {
    before: MemberState,
    after: MemberState,
}

impl Script {
    /// Now and then, one that runs and one that is paused, or has tags that are.
    pub(super) fn choose_pair(&mut self) -> Option<Pair> {
        if self.next.is_some() || self.world.random.u8(..2) == 0 {
            return None;
        }
        let tenants = &self.world.tenants;
        let peopled = (0..tenants.len()).filter(|index| !tenants[*index].workers.is_empty());
        let peopled: Vec<usize> = peopled.collect();
        let active = peopled.iter().copied().filter(|index| !tenants[*index].is_paused);
        let from = self.world.random.choice(active.collect::<Vec<_>>())?;
        let comes = |index: &usize| {
            *index != from && (tenants[*index].is_paused || !tenants[*index].market.away.is_empty())
        };
        let to = self.world.random.choice(peopled.into_iter().filter(comes).collect::<Vec<_>>())?;
        Some(Pair { from, to })
    }

    /// Asks for the swap, has something go wrong or not, and looks at what came of it for both.
    pub(super) fn swap(&mut self, pair: Pair) -> Outcome {
        let Pair { from, to } = pair;
        for tenant in [from, to] {
            if !self.world.tenants[tenant].is_paused {
                self.start_work(tenant)?;
            }
            self.start_trade(tenant)?;
        }
        let (victim, action) =
            if self.world.random.bool() { (from, Action::Pause) } else { (to, Action::Resume) };
        let scarcity = self.make_scarce(&[from, to])?;
        let mishap = self.choose_mishap(victim, action, scarcity.as_ref());
        let way = self.choose_way(&mishap);
        let fails = mishap.fails();
        let request = Request { fails: fails.clone(), ..self.swap_request(pair, way) };
        let changes = self.changes(pair, &request);
        self.tell(&format!(
            "swap of {} {:?} with {:?} by {way:?} with {mishap:?} in {}",
            request.tenant, request.scope, request.swap, self.world.tenants[victim].name
        ));
        if !mishap.is_none() {
            for tenant in [from, to] {
                self.world.tenants[tenant].market.is_in_trouble();
            }
        }
        let stranger = self.prepare(&mishap)?;
        let deaths = self.world.deaths;
        let verdict = self.ask(victim, way, &request, &mishap)?;
        let fired = self.clear(&mishap)?;
        if let Some(fails) = &fails {
            Tally::count(&mut self.world.tally.faults, fails.call, fails.fired());
        }
        self.tell(&format!("  {}", outline(&verdict)));
        if let Some(scarcity) = &scarcity {
            self.end_scarcity(scarcity, &verdict)?;
        }
        drop(stranger);
        self.end_faulted(victim, &mishap)?;
        if let Mishap::ContextLost { worker, .. } = mishap
            && fired > 0
        {
            self.kill(worker, "worker whose context was lost")?;
        }
        self.count_swap(&request, &verdict, &mishap);
        self.enter_tags_of_swap(pair, &request, &verdict);
        let mut endings = Vec::new();
        for (tenant, action) in [(from, Action::Pause), (to, Action::Resume)] {
            if self.world.tenants[tenant].workers.is_empty() {
                // All are dead: the next one to join starts from nothing.
                self.world.tenants[tenant].is_paused = false;
                continue;
            }
            if matches!(&verdict, Verdict::Refused(refusal) if !refusal.left_unchanged) {
                self.repair(tenant, Action::Resume)?;
            }
            endings.push((tenant, self.ending(tenant, action, &verdict, deaths)?));
        }
        if let [(_, left), (_, came)] = &endings[..] {
            let is_scarce = scarcity.is_some();
            self.judge_swap(pair, &request, &verdict, (&mishap, is_scarce), changes, [left, came])?;
        }
        // Who came first: while one that runs again is on record as paused, all that it holds would be to be explained.
        for (tenant, ending) in endings.iter().rev() {
            self.conclude(*tenant, ending)?;
        }
        Ok(())
    }

    /// All of both, of one of them what has a tag, or of both.
    fn swap_request(&mut self, Pair { from, to }: Pair, way: Way) -> Request {
        let scope = self.scope_to_leave(from);
        let with = SwapWith {
            tenant: self.world.tenants[to].name.to_string(),
            scope: self.scope_to_come(to),
            window_bytes: None,
        };
        let random = &mut self.world.random;
        let units = random.u64(1..=4);
        let window_bytes = random.bool().then_some(units * GRANULARITY_BYTES);
        let is_whole = scope == Scope::Whole;
        // The command has no word for it.
        let leaves_out = way != Way::Command && random.u8(..4) > 0;
        Request {
            tenant: self.world.tenants[from].name.clone(),
            action: Action::Pause,
            lost_imports: if leaves_out { LostImports::LeaveOut } else { LostImports::Refuse },
            early_release: random.bool(),
            is_deep: is_whole && random.u8(..3) == 0,
            fails: None,
            scope,
            swap: Some(SwapWith { window_bytes, ..with }),
        }
    }

    fn scope_to_leave(&mut self, from: usize) -> Scope {
        let tag = TAGS[self.world.random.usize(..TAGS.len())];
        let by_tag = self.world.random.u8(..3) == 0 && self.has_tag(from, tag);
        if by_tag { named(tag) } else { Scope::Whole }
    }

    fn scope_to_come(&mut self, to: usize) -> Scope {
        let random = &mut self.world.random;
        let found = &self.world.tenants[to];
        let tag = if found.is_paused {
            random.choice(TAGS)
        } else {
            random.choice(found.market.away.iter().map(String::as_str))
        };
        let by_tag = random.u8(..3) == 0;
        match tag.map(str::to_owned) {
            Some(tag) if by_tag && self.has_tag(to, &tag) => named(&tag),
            _ => Scope::Whole,
        }
    }

    /// What a success does to the one that leaves, and to the one that comes.
    fn changes(&self, pair: Pair, request: &Request) -> [Change; 2] {
        let after = match request.scope {
            Scope::Whole => MemberState::Paused,
            Scope::Tags { .. } => MemberState::Active,
        };
        let is_paused = self.world.tenants[pair.to].is_paused;
        let before = if is_paused { MemberState::Paused } else { MemberState::Active };
        [
            Change { before: MemberState::Active, after },
            Change { before, after: MemberState::Active },
        ]
    }

    /// Which tags may be paused now, of either.
    fn enter_tags_of_swap(&mut self, pair: Pair, request: &Request, verdict: &Verdict) {
        let Some(with) = &request.swap else { return };
        let left = match verdict {
            Verdict::Refused(refusal) => Verdict::Refused(Refusal {
                left_unchanged: refusal.left_unchanged && !refusal.both_are_paused,
                ..refusal.clone()
            }),
            Verdict::Done { .. } | Verdict::Killed => verdict.clone(),
        };
        let back = Request { action: Action::Resume, scope: with.scope.clone(), ..request.clone() };
        if let (Verdict::Refused(_), Scope::Tags { tags, .. }) = (verdict, &request.scope) {
            // It had left when the second could not come.
            let market = &mut self.world.tenants[pair.from].market;
            let gone = TAGS.iter().filter(|tag| tags.to_resume().has(tag));
            gone.for_each(|tag| market.tag_was_away(tag));
        }
        self.enter_tags(pair.from, request, &left);
        self.enter_tags(pair.to, &back, verdict);
    }

    #[expect(clippy::too_many_arguments, reason = "all that was seen of one command")]
    fn judge_swap(
        &self,
        Pair { from, to }: Pair,
        request: &Request,
        verdict: &Verdict,
        (mishap, is_scarce): (&Mishap, bool),
        [leaves, comes]: [Change; 2],
        [left, came]: [&Ending; 2],
    ) -> Outcome {
        let are = |first, second| left.standing.all_are(first) && came.standing.all_are(second);
        let somebody_died = left.somebody_died || came.somebody_died;
        let has_orphans = [from, to].iter().any(|tenant| self.may_have_orphans(*tenant));
        let wrong = match verdict {
            Verdict::Done { .. } if !are(leaves.after, comes.after) => {
                Some("it succeeded, and the states are others")
            }
            _ if somebody_died => None,
            Verdict::Done { losses, .. } if *losses > 0 => Some("members were lost, and none died"),
            Verdict::Refused(refusal)
                if refusal.both_are_paused && !are(leaves.after, comes.before) =>
            {
                Some("it was refused with both paused, which is not so")
            }
            Verdict::Refused(refusal)
                if !refusal.both_are_paused
                    && refusal.left_unchanged
                    && !are(leaves.before, comes.before) =>
            {
                Some("it was refused with everything as before, which is not so")
            }
            Verdict::Refused(refusal) if mishap.is_none() => {
                let is_lost = has_orphans && refusal.is_for_lost_imports();
                // The last memory of a tag may be freed just then.
                let is_gone = is_by_tag(request) != [false, false] && refusal.is_before_all();
                let has_no_host = is_scarce && refusal.is_short_of_host();
                let is_unfreezable = request.is_deep && refusal.left_unchanged;
                let is_explained = is_lost || is_gone || has_no_host || is_unfreezable;
                (!refusal.is_short_of_devices() && !is_explained)
                    .then_some("it was refused without a reason")
            }
            Verdict::Done { .. } | Verdict::Refused(_) | Verdict::Killed => None,
        };
        match wrong {
            Some(what) => Err(Trouble::new(format!(
                "{what}: {}; {:?} {:?}",
                full(verdict),
                left.standing.states,
                came.standing.states
            ))),
            None => Ok(()),
        }
    }

    fn count_swap(&mut self, request: &Request, verdict: &Verdict, mishap: &Mishap) {
        let tally = &mut self.world.tally;
        match verdict {
            Verdict::Done { overlapped, .. } => {
                tally.swaps += 1;
                tally.overlapped += u64::from(*overlapped);
                let name = match is_by_tag(request) {
                    [false, false] => "of all of both",
                    [true, false] => "of a tag for all",
                    [false, true] => "of all for a tag",
                    [true, true] => "of a tag for a tag",
                };
                Tally::count(&mut tally.swapped, name, 1);
            }
            Verdict::Refused(refusal) => {
                let cause = if mishap.is_none() { cause_of(refusal) } else { mishap.cause() };
                Tally::count(&mut tally.refused, format!("swap: {cause}"), 1);
            }
            Verdict::Killed => {
                Tally::count(&mut tally.refused, "swap: unknown, the coordinator was killed", 1);
            }
        }
    }
}

/// Does the one that leaves do so by tag, and does the one that comes?
fn is_by_tag(request: &Request) -> [bool; 2] {
    let comes = request.swap.as_ref().map(|with| &with.scope);
    [Some(&request.scope), comes].map(|scope| matches!(scope, Some(Scope::Tags { .. })))
}
