//! What the processes of one tenant offer each other, and what may come of it.

use std::collections::BTreeSet;

use sublet_tests::{Outcome, Trouble};

use crate::orders::{Answer, Deal, Offer, Paper, Taken, TakenHow, Why};
use crate::process::Worker;
use crate::tally::Tally;

/// Papers that are kept at most; older ones are let go.
const OPEN_MAX: usize = 10;

/// Where an offer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Anybody may have it.
    Open,
    /// This process has been sent for it, once.
    Sent(u64),
    /// Whether it was redeemed nobody knows: a fault or a death came in between.
    Unsure,
}

#[derive(Clone, Debug)]
struct Standing {
    offer: Offer,
    place: Place,
}

/// See the head of this module.
#[derive(Debug, Default)]
pub(crate) struct Market {
    offers: Vec<Standing>,
    /// Tags that may be paused; none that is paused is missing.
    pub(crate) away: BTreeSet<String>,
    /// As `away`, and what was paused since answers were last read.
    away_lately: BTreeSet<String>,
    /// Tags of its own that some process is about to pause.
    pending: BTreeSet<String>,
    /// Calls of some process were made to fail, or one has died, since answers were last read.
    pub(crate) is_troubled: bool,
    /// Who said that an allocation is gone, of which owner.
    said_gone: Vec<(u64, u128)>,
}

impl Market {
    /// A pause of this tag has been requested.
    pub(crate) fn tag_goes(&mut self, tag: &str) {
        self.away_lately.insert(tag.to_owned());
        self.away.insert(tag.to_owned());
    }

    /// This tag may have been away for a while, and is back.
    pub(crate) fn tag_was_away(&mut self, tag: &str) {
        self.away_lately.insert(tag.to_owned());
    }

    /// As [`Market::tag_goes`], by a process of its own accord, before or after what comes now.
    pub(crate) fn tag_may_go(&mut self, tag: &str) {
        self.pending.insert(tag.to_owned());
        self.tag_goes(tag);
    }

    /// These tags are back, and no others.
    pub(crate) fn tags_are_back(&mut self, is_back: impl Fn(&str) -> bool) {
        self.away.retain(|tag| !is_back(tag) || self.pending.contains(tag));
    }

    pub(crate) fn away_tags(&self) -> Vec<String> {
        self.away.iter().cloned().collect()
    }

    /// What is refused from now on, until answers are read, may be so for a fault.
    pub(crate) fn is_in_trouble(&mut self) {
        self.is_troubled = true;
    }

    pub(crate) fn taker_died(&mut self, taker: u64) {
        self.is_troubled = true;
        for standing in &mut self.offers {
            if standing.place == Place::Sent(taker) {
                standing.place = Place::Unsure;
            }
        }
    }

    /// Allocations of `owner` with a ticket that nobody has redeemed. Of a tag that is away some may have been.
    pub(crate) fn open_ids(&self, owner: u64) -> Vec<u128> {
        let theirs = self.offers.iter().filter(|standing| standing.offer.owner == owner);
        let tickets = theirs.filter(|standing| matches!(standing.offer.paper, Paper::Ticket(_)));
        tickets.map(|standing| standing.offer.id).collect()
    }

    /// Up to `count` offers of others, for `taker` to come for.
    pub(crate) fn send(
        &mut self,
        taker: u64,
        count: usize,
        random: &mut fastrand::Rng,
    ) -> Vec<Offer> {
        let suits = |standing: &&mut Standing| {
            standing.place == Place::Open && standing.offer.owner != taker
        };
        let suited: Vec<&mut Standing> = self.offers.iter_mut().filter(suits).collect();
        let chosen = random.choose_multiple(suited, count);
        let send = |standing: &mut Standing| {
            if let Paper::Ticket(_) = standing.offer.paper {
                standing.place = Place::Sent(taker);
            }
            standing.offer.clone()
        };
        chosen.into_iter().map(send).collect()
    }

    /// Enters what `process` has answered.
    pub(crate) fn enter(&mut self, process: u64, answer: Answer, tally: &mut Tally) -> Outcome {
        match answer {
            Answer::Offers(offers) => {
                tally.offered += offers.len() as u64;
                let open = |offer| Standing { offer, place: Place::Open };
                self.offers.extend(offers.into_iter().map(open));
            }
            Answer::Taken(all) => {
                for taken in all {
                    self.enter_one(process, &taken, tally)?;
                }
            }
            Answer::Tagged(refused) => {
                let name = if refused.is_some() { "own tag, refused" } else { "own tag" };
                Tally::count(&mut tally.commands, name, 1);
            }
            Answer::Touched { was_away } => {
                let what = if was_away { "touches what is away" } else { "touches what is there" };
                Tally::count(&mut tally.deals, what, 1);
            }
            Answer::Done
            | Answer::Worked(_)
            | Answer::Account(_)
            | Answer::Inventory(_)
            | Answer::Saved(_)
            | Answer::Failed(_)
            | Answer::Violation(_) => {}
        }
        Ok(())
    }

    fn enter_one(&mut self, process: u64, taken: &Taken, tally: &mut Tally) -> Outcome {
        let Some(index) = self.offers.iter().position(|found| found.offer.number == taken.offer)
        else {
            return Ok(());
        };
        let offer = self.offers[index].offer.clone();
        let is_ticket = matches!(offer.paper, Paper::Ticket(_));
        let is_away = |why: Why| why == Why::Away && self.away_lately.contains(&offer.tag);
        let (outcome, place) = match &taken.how {
            TakenHow::Held => ("taken", (!is_ticket).then_some(Place::Open)),
            TakenHow::Dropped => ("taken in vain, for a fault", Some(Place::Unsure)),
            TakenHow::NotMapped { why, .. } if is_away(*why) => {
                ("taken while its tag was away", None)
            }
            TakenHow::Refused { why, .. } if is_away(*why) => {
                ("refused while its tag was away", Some(Place::Open))
            }
            TakenHow::Refused { why: Why::Freed, .. } if !is_ticket => {
                self.said_gone.push((offer.owner, offer.id));
                ("refused, freed by its owner", None)
            }
            TakenHow::Refused { is_explained, .. } if *is_explained || self.is_troubled => {
                ("refused for a fault", Some(Place::Unsure))
            }
            // Whether its owner lives is looked at when all answers are read. One that lives keeps the memory for the ticket.
            TakenHow::Refused { why: Why::OwnerSilent, .. } => {
                self.said_gone.push((offer.owner, offer.id));
                ("refused, its owner is silent", is_ticket.then_some(Place::Unsure))
            }
            TakenHow::NotMapped { text, .. } | TakenHow::Refused { text, .. } => {
                return Err(Trouble::new(format!(
                    "worker {process} was refused without a reason: {text}; it came for {offer:?}"
                )));
            }
        };
        Tally::count(&mut tally.papers, outcome, 1);
        match place {
            Some(place) => self.offers[index].place = place,
            None => drop(self.offers.swap_remove(index)),
        }
        Ok(())
    }

    /// When all answers are read and the tenant is active: finds out what nobody knew, and lets old papers go.
    pub(crate) fn settle(&mut self, workers: &mut [Worker]) -> Outcome {
        self.settle_gone(workers)?;
        let number_of = |worker: &Worker| worker.number;
        let living: BTreeSet<u64> = workers.iter().map(number_of).collect();
        let old = self.offers.len().saturating_sub(OPEN_MAX);
        let mut kept = Vec::new();
        for (index, standing) in std::mem::take(&mut self.offers).into_iter().enumerate() {
            let owner = standing.offer.owner;
            let is_done = index < old || standing.place == Place::Unsure;
            let lives = living.contains(&owner);
            let is_away = self.away.contains(&standing.offer.tag);
            match (&standing.offer.paper, is_done) {
                // Of a dead owner one is kept for some time, to be refused.
                (_, false) => kept.push(standing),
                // Nobody can redeem it before its tag is back.
                (Paper::Ticket(_), true) if lives && is_away => kept.push(standing),
                (Paper::Ticket(ticket), true) if lives => {
                    let mut workers = workers.iter_mut();
                    if let Some(worker) = workers.find(|worker| worker.number == owner) {
                        worker.deal(Deal::Settle { ticket: ticket.clone() })?;
                    }
                }
                (Paper::Ticket(_) | Paper::Handle(_), true) => {}
            }
        }
        self.offers = kept;
        self.is_troubled = false;
        self.pending.clear();
        self.away_lately.clone_from(&self.away);
        Ok(())
    }

    /// A process that said that memory is gone must have been right.
    fn settle_gone(&mut self, workers: &mut [Worker]) -> Outcome {
        for (owner, id) in std::mem::take(&mut self.said_gone) {
            let Some(worker) = workers.iter_mut().find(|worker| worker.number == owner) else {
                continue;
            };
            let items = worker.inventory()?;
            let found = items.iter().find(|item| item.id == id && item.is_own);
            // Freed while its tag is away it is kept for those who have it, and for nobody else.
            if let Some(item) = found
                && !self.away_lately.contains(&item.tag)
                && !self.is_troubled
            {
                return Err(Trouble::new(format!(
                    "worker {owner} has {item:?}, and somebody who came for it was told that it is gone"
                )));
            }
        }
        Ok(())
    }
}
