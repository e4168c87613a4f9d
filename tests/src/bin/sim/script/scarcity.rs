//! Host memory is short: what a pause takes is not there unless tenants that are paused move what they have saved to a file.

use sublet_tests::{Outcome, Trouble};
use tenants::wire::MemberState;
use vmm_pool::driver::sim::GRANULARITY_BYTES;

use super::Script;
use crate::coordinate::Verdict;
use crate::orders::{HostRoom, Order};
use crate::process::Worker;
use crate::tally::Tally;
use crate::usage::held_host_bytes;

/// Host memory is short during one command.
#[derive(Clone, Debug)]
pub(super) struct Scarcity {
    /// Tenants that are paused meanwhile, which may make room.
    pub(super) givers: Vec<usize>,
    /// What each of their processes had in its file before, by its number.
    before: Vec<(u64, u64)>,
}

impl Script {
    /// Now and then, before a pause or swap of `takers` while others are paused.
    pub(super) fn make_scarce(&mut self, takers: &[usize]) -> Outcome<Option<Scarcity>> {
        let tenants = &self.world.tenants;
        let others = (0..tenants.len()).filter(|index| !takers.contains(index));
        let givers: Vec<usize> = others.filter(|index| tenants[*index].is_paused).collect();
        let has_keepers = |index: &usize| tenants[*index].workers.iter().any(|w| w.is_keeper);
        let is_time = self.world.random.u8(..3) == 0;
        if !is_time || !givers.iter().any(has_keepers) || !takers.iter().any(has_keepers) {
            return Ok(None);
        }
        let workers = || tenants.iter().flat_map(|tenant| &tenant.workers);
        let pids: Vec<u32> = workers().map(Worker::pid).collect();
        let held: u64 = pids.iter().map(|pid| held_host_bytes(*pid)).sum();
        // From nothing to what some of those who are about to save take.
        let units = self.world.random.u64(..16);
        let total_bytes = held + units * GRANULARITY_BYTES;
        let room = HostRoom::Shared { total_bytes, pids };
        self.tell(&format!(
            "host memory is short: {total_bytes} bytes in all, {held} of them held"
        ));
        self.order_all(&Order::HostLimit { room })?;
        let mut before = Vec::new();
        for giver in &givers {
            // What has no room on the disk either stays where it is.
            let units = self.world.random.u64(..6);
            let is_full = self.world.random.u8(..4) == 0;
            let most_bytes = is_full.then_some(units * GRANULARITY_BYTES);
            if is_full {
                self.tell(&format!("tenant{giver} finds {most_bytes:?} bytes on the disk"));
                Tally::count(&mut self.world.tally.scarce, "of them with a disk that is full", 1);
            }
            for worker in &mut self.world.tenants[*giver].workers {
                worker.obey(&Order::FileLimit { most_bytes })?;
                before.push((worker.number, worker.saved()?.spilled_bytes));
            }
        }
        Ok(Some(Scarcity { givers, before }))
    }

    /// There is enough again. Counts what has moved; who made room must be paused as before.
    pub(super) fn end_scarcity(&mut self, scarcity: &Scarcity, verdict: &Verdict) -> Outcome {
        self.order_all(&Order::HostLimit { room: HostRoom::Plenty })?;
        let (mut moved_bytes, mut movers) = (0, 0);
        for giver in &scarcity.givers {
            if self.world.tenants[*giver].workers.is_empty() {
                // All are dead: the next one to join starts from nothing.
                self.world.tenants[*giver].is_paused = false;
                continue;
            }
            for worker in &mut self.world.tenants[*giver].workers {
                worker.obey(&Order::FileLimit { most_bytes: None })?;
                let now = worker.saved()?.spilled_bytes;
                let known = scarcity.before.iter().find(|(number, _)| *number == worker.number);
                let more = now.saturating_sub(known.map_or(now, |(_, before)| *before));
                moved_bytes += more;
                movers += u64::from(more > 0);
            }
            let standing = self.world.standing(*giver)?;
            if !standing.all_are(MemberState::Paused) {
                let states = &standing.states;
                return Err(Trouble::new(format!("tenant{giver} was to make room: {states:?}")));
            }
        }
        let tally = &mut self.world.tally;
        tally.spilled_bytes += moved_bytes;
        tally.spillers += movers;
        let outcome = match (verdict, movers > 0) {
            (Verdict::Done { .. }, true) => "succeeded, as room was made",
            (Verdict::Done { .. }, false) => "succeeded with what there was",
            (Verdict::Refused(_), true) => "refused after room was made",
            (Verdict::Refused(_), false) => "refused",
            (Verdict::Killed, true) => "killed after room was made",
            (Verdict::Killed, false) => "killed",
        };
        Tally::count(&mut tally.scarce, outcome, 1);
        if movers > 0 {
            self.tell(&format!("  {movers} processes moved {moved_bytes} bytes to their files"));
        }
        Ok(())
    }

    fn order_all(&mut self, order: &Order) -> Outcome {
        let tenants = self.world.tenants.iter_mut();
        let mut workers = tenants.flat_map(|tenant| &mut tenant.workers);
        workers.try_for_each(|worker| worker.obey(order).map(drop))
    }
}
