//! Memory that crosses processes: who offers, comes for it, lets it go, and when.

use std::time::Duration;

use sublet_tests::Outcome;

use super::Script;
use crate::orders::{Deal, EndOrder};
use crate::worker::TAGS;

/// Of a crowd not all trade simultaneously.
const TRADERS_MAX: usize = 8;
/// From before the first message of a command to after the last.
const TRADE_SPREAD_US: u64 = 30_000;

impl Script {
    /// Deals that meet the command which comes now at any instant.
    pub(super) fn start_trade(&mut self, tenant: usize) -> Outcome {
        let is_paused = self.world.tenants[tenant].is_paused;
        for _ in 0..self.world.tenants[tenant].workers.len().min(TRADERS_MAX) {
            let world = &mut self.world;
            let random = &mut world.random;
            let found = &mut world.tenants[tenant];
            if random.u8(..3) == 0 {
                continue;
            }
            let index = random.usize(..found.workers.len());
            let number = found.workers[index].number;
            let is_some_away = !is_paused && !found.market.away.is_empty();
            let deal = match random.u8(..100) {
                0..50 if is_some_away => Deal::Touch,
                // Of what is said while all stand paused, only what gives up gets anywhere.
                0..30 => Deal::LetOneGo,
                30..45 => Deal::End { order: any_order(random) },
                45..70 => Deal::Accept {
                    offers: {
                        let count = random.usize(1..=2);
                        found.market.send(number, count, random)
                    },
                },
                70..78 => Deal::Touch,
                78..90 => Deal::Offer { count: random.usize(1..=2) },
                90..92 => Deal::Pin,
                92..98 if !is_paused => {
                    let tag = TAGS[random.usize(..TAGS.len())].to_owned();
                    found.market.tag_may_go(&tag);
                    Deal::OwnTag { tag, is_pause: true }
                }
                _ => continue,
            };
            let after = Duration::from_micros(random.u64(..TRADE_SPREAD_US));
            let name = name_of(&deal);
            let line = format!("worker {number} of tenant{tenant}: {name} after {after:?}");
            crate::tally::Tally::count(&mut world.tally.deals, name, 1);
            found.workers[index].send_deal(after, deal)?;
            self.tell(&line);
        }
        Ok(())
    }

    /// All of a tenant let go of what they share; also while it is paused.
    pub(super) fn end_all_trade(&mut self, tenant: usize) -> Outcome {
        for worker in &mut self.world.tenants[tenant].workers {
            worker.deal(Deal::End { order: EndOrder::Any })?;
        }
        Ok(())
    }

    /// A new communicator: somebody offers memory, and some others take it.
    pub(super) fn share(&mut self, index: usize) -> Outcome {
        let world = &mut self.world;
        let random = &mut world.random;
        let tenant = &mut world.tenants[index];
        let count = tenant.workers.len();
        for _ in 0..random.usize(1..=count.min(3)) {
            let owner = random.usize(..count);
            let answer = tenant.workers[owner].deal(Deal::Offer { count: random.usize(1..=2) })?;
            let number = tenant.workers[owner].number;
            tenant.market.enter(number, answer, &mut world.tally)?;
        }
        for _ in 0..random.usize(1..=count.min(4)) {
            let taker = random.usize(..count);
            let number = tenant.workers[taker].number;
            let offers = tenant.market.send(number, 2, random);
            let answer = tenant.workers[taker].deal(Deal::Accept { offers })?;
            tenant.market.enter(number, answer, &mut world.tally)?;
        }
        Ok(())
    }
}

fn any_order(random: &mut fastrand::Rng) -> EndOrder {
    match random.u8(..3) {
        0 => EndOrder::ImportsFirst,
        1 => EndOrder::OwnFirst,
        _ => EndOrder::Any,
    }
}

fn name_of(deal: &Deal) -> &'static str {
    match deal {
        Deal::Offer { .. } => "offers",
        Deal::Accept { .. } => "comes for memory",
        Deal::End { .. } => "ends its communicator",
        Deal::LetOneGo => "lets one go",
        Deal::DropImports { .. } => "drops imports",
        Deal::Settle { .. } => "settles a ticket",
        Deal::Pin => "pins one",
        Deal::OwnTag { .. } => "pauses a tag of its own",
        Deal::Touch => "comes to touch some",
    }
}
