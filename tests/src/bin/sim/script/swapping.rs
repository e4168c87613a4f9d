//! Two tenants change places, with or without a mishap on either side.

use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::LostImports;
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::GRANULARITY_BYTES;

use super::mishap::Mishap;
use super::{Ending, Script, full, is_wrong_shortage, outline};
use crate::coordinate::{Request, STAGES, SwapWith, Verdict, Way};
use crate::tally::Tally;

impl Script {
    /// Now and then, one that runs and one that is paused.
    pub(super) fn choose_pair(&mut self) -> Option<(usize, usize)> {
        if self.next.is_some() || self.world.random.u8(..2) == 0 {
            return None;
        }
        let tenants = &self.world.tenants;
        let peopled = (0..tenants.len()).filter(|index| !tenants[*index].workers.is_empty());
        let (paused, active): (Vec<usize>, Vec<usize>) =
            peopled.partition(|index| tenants[*index].is_paused);
        let random = &mut self.world.random;
        Some((random.choice(active)?, random.choice(paused)?))
    }

    /// Asks for the swap, has something go wrong or not, and looks at what came of it for both.
    pub(super) fn swap(&mut self, from: usize, to: usize) -> Outcome {
        self.start_work(from)?;
        self.start_trade(from)?;
        self.start_trade(to)?;
        let (victim, action) =
            if self.world.random.bool() { (from, Action::Pause) } else { (to, Action::Resume) };
        let mishap = self.choose_mishap(victim, action);
        let way = self.choose_way(&mishap);
        let request = self.swap_request(from, to, way);
        self.tell(&format!(
            "swap of {} with {:?} by {way:?} with {mishap:?} in {}",
            request.tenant, request.swap, self.world.tenants[victim].name
        ));
        if !mishap.is_none() {
            for tenant in [from, to] {
                self.world.tenants[tenant].market.is_in_trouble();
            }
        }
        let stranger = self.prepare(victim, &mishap)?;
        let deaths = self.world.deaths;
        let verdict = self.ask(victim, way, &request, &mishap)?;
        let fired = self.clear(victim, &mishap)?;
        self.tell(&format!("  {}", outline(&verdict)));
        drop(stranger);
        self.end_faulted(victim, &mishap)?;
        if let Mishap::ContextLost { worker, .. } = mishap
            && fired > 0
        {
            self.kill(victim, worker, "worker whose context was lost")?;
        }
        self.count_swap(&verdict, &mishap);
        let mut endings = Vec::new();
        for (tenant, action) in [(from, Action::Pause), (to, Action::Resume)] {
            if self.world.tenants[tenant].workers.is_empty() {
                // All are dead: the next one to join starts anew.
                self.world.tenants[tenant].is_paused = false;
                continue;
            }
            if matches!(&verdict, Verdict::Refused(refusal) if !refusal.left_unchanged) {
                self.repair(tenant, Action::Resume)?;
            }
            endings.push((tenant, self.ending(tenant, action, &verdict, deaths)?));
        }
        if let [(_, left), (_, came)] = &endings[..] {
            self.judge_swap((from, to), &verdict, &mishap, [left, came])?;
        }
        for (tenant, ending) in &endings {
            self.conclude(*tenant, ending)?;
        }
        Ok(())
    }

    fn swap_request(&mut self, from: usize, to: usize, way: Way) -> Request {
        let random = &mut self.world.random;
        let units = random.u64(1..=4);
        let with = SwapWith {
            tenant: self.world.tenants[to].name.to_string(),
            overlap: random.u8(..5) > 0,
            window_bytes: random.bool().then_some(units * GRANULARITY_BYTES),
        };
        // The command has no word for it.
        let leaves_out = way != Way::Command && random.u8(..4) > 0;
        Request {
            tenant: self.world.tenants[from].name.clone(),
            action: Action::Pause,
            lost_imports: if leaves_out { LostImports::LeaveOut } else { LostImports::Refuse },
            scope: Scope::Whole,
            swap: Some(with),
        }
    }

    fn judge_swap(
        &self,
        (from, to): (usize, usize),
        verdict: &Verdict,
        mishap: &Mishap,
        [left, came]: [&Ending; 2],
    ) -> Outcome {
        let are = |first, second| left.standing.all_are(first) && came.standing.all_are(second);
        let somebody_died = left.somebody_died || came.somebody_died;
        let has_orphans = [from, to].iter().any(|tenant| self.world.tenants[*tenant].has_orphans);
        let wrong = match verdict {
            Verdict::Done { .. } if !are(MemberState::Paused, MemberState::Active) => {
                Some("it succeeded, and the states are others")
            }
            _ if somebody_died => None,
            Verdict::Done { losses, .. } if *losses > 0 => Some("members were lost, and none died"),
            Verdict::Refused(refusal)
                if refusal.both_are_paused && !are(MemberState::Paused, MemberState::Paused) =>
            {
                Some("it was refused with both paused, which is not so")
            }
            Verdict::Refused(refusal)
                if !refusal.both_are_paused
                    && refusal.left_unchanged
                    && !are(MemberState::Active, MemberState::Paused) =>
            {
                Some("it was refused with everything as before, which is not so")
            }
            Verdict::Refused(refusal) if mishap.is_none() => {
                let says = |words: &str| refusal.text.contains(words);
                let is_full = says("bytes free and") || says("does not fit");
                let is_short = is_full && !is_wrong_shortage(refusal);
                let is_lost = has_orphans && refusal.text.contains("--without-lost");
                (!is_short && !is_lost).then_some("it was refused without a reason")
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

    fn count_swap(&mut self, verdict: &Verdict, mishap: &Mishap) {
        let tally = &mut self.world.tally;
        match verdict {
            Verdict::Done { notes, .. } => {
                tally.swaps += 1;
                tally.overlapped += u64::from(notes.iter().any(|note| note.ends_with(STAGES)));
            }
            Verdict::Refused(_) => {
                let cause = if mishap.is_none() { "no device memory" } else { mishap.cause() };
                Tally::count(&mut tally.refused, format!("swap: {cause}"), 1);
            }
            Verdict::Killed => {
                Tally::count(&mut tally.refused, "swap: unknown, the coordinator was killed", 1);
            }
        }
    }
}
