//! When each chunk is used next, by the order of uses so far. Pure, and never an error: a wrong answer costs time.
//!
//! A training uses its chunks in the same order in every step. The order is recorded until its beginning comes again, and
//! followed around from then on. A use that is not the expected one moves the place in the order to it; after some of
//! these in a row the order is recorded again.

/// How many uses must come again before the order is known, and how many may come otherwise before it is not.
const PROOF: usize = 4;
const MISSES_MAX: usize = 8;
/// A record that does not come around is given up at so many times the chunks that there are.
const ROUNDS_MAX: usize = 8;

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Plan {
    order: Vec<usize>,
    /// The next use is expected here. `None` while the order is recorded.
    at: Option<usize>,
    /// Uses in a row that were not expected.
    misses: usize,
}

impl Plan {
    /// This chunk, of so many that there are, is used now.
    pub(super) fn used(&mut self, id: usize, chunks: usize) {
        match self.at {
            Some(at) => self.follow(at, id),
            None => self.record(id, chunks),
        }
    }

    fn record(&mut self, id: usize, chunks: usize) {
        if self.order.len() >= PROOF + ROUNDS_MAX * chunks {
            self.order.clear();
        }
        self.order.push(id);
        let (begin, end) = (self.order.first_chunk::<PROOF>(), self.order.last_chunk::<PROOF>());
        let round = self.order.len() - PROOF.min(self.order.len());
        if begin == end && round >= PROOF {
            self.order.truncate(round);
            self.at = Some(PROOF % round);
        }
    }

    fn follow(&mut self, at: usize, id: usize) {
        let round = self.order.len();
        let found = (0..round).map(|ahead| (at + ahead) % round);
        let found = found.into_iter().find(|&place| self.order[place] == id);
        self.misses = if found == Some(at) { 0 } else { self.misses + 1 };
        if self.misses > MISSES_MAX {
            *self = Self::default();
            self.order.push(id);
        } else if let Some(place) = found {
            self.at = Some((place + 1) % round);
        }
    }

    /// How many uses there are before the next of each of so many chunks. While the order is not known: as if it came again
    /// as it was last. The most is for chunks of which no use is known.
    pub(super) fn next_uses(&self, chunks: usize) -> Vec<usize> {
        let mut next = vec![usize::MAX; chunks];
        let round = self.order.len();
        let mut note = |id: usize, ahead: usize| {
            if let Some(next) = next.get_mut(id) {
                *next = ahead;
            }
        };
        match self.at {
            Some(at) => {
                (0..round).rev().for_each(|ahead| note(self.order[(at + ahead) % round], ahead));
            }
            None => (0..round).for_each(|place| note(self.order[place], place)),
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Misses in each round of a cache of `frames` that gives up what is used last, by the plan.
    fn misses(rounds: &[Vec<usize>], chunks: usize, frames: usize) -> Vec<usize> {
        let (mut plan, mut here) = (Plan::default(), Vec::new());
        let mut in_round = |round: &Vec<usize>| {
            let mut misses = 0;
            for &id in round {
                plan.used(id, chunks);
                if here.contains(&id) {
                    continue;
                }
                misses += 1;
                if here.len() == frames {
                    let next = plan.next_uses(chunks);
                    let victim = (0..frames).max_by_key(|&index| next[here[index]]);
                    here.swap_remove(victim.expect("a frame"));
                }
                here.push(id);
            }
            misses
        };
        rounds.iter().map(&mut in_round).collect()
    }

    /// The same, of one that knows what comes (Belady).
    fn least_misses(rounds: &[Vec<usize>], frames: usize) -> Vec<usize> {
        let all: Vec<_> = rounds.concat();
        let (mut here, mut at) = (Vec::new(), 0);
        let mut in_round = |round: &Vec<usize>| {
            let mut misses = 0;
            for &id in round {
                at += 1;
                if here.contains(&id) {
                    continue;
                }
                misses += 1;
                if here.len() == frames {
                    let next = |id: usize| {
                        all[at..].iter().position(|&use_of| use_of == id).unwrap_or(usize::MAX)
                    };
                    let victim = (0..frames).max_by_key(|&index| next(here[index]));
                    here.swap_remove(victim.expect("a frame"));
                }
                here.push(id);
            }
            misses
        };
        rounds.iter().map(&mut in_round).collect()
    }

    #[test]
    fn a_known_order_costs_as_few_misses_as_foresight() {
        let once: Vec<_> = (0..20).collect();
        let there_and_back: Vec<_> = (0..20).chain((0..20).rev()).collect();
        for order in [once, there_and_back] {
            let rounds = vec![order; 8];
            let (ours, least) = (misses(&rounds, 20, 6), least_misses(&rounds, 6));
            // Of the last round nobody knows the next.
            assert_eq!(ours[2..7], least[2..7], "of {}", rounds[0].len());
            let each = rounds[0].len();
            assert!(ours[2..].iter().all(|&misses| misses <= each * 3 / 4), "by last use: {each}");
        }
    }

    #[test]
    fn another_order_is_followed_as_soon_as_it_has_come_twice() {
        let (first, second): (Vec<_>, Vec<_>) = ((0..20).collect(), (0..20).rev().collect());
        let mut rounds = vec![first; 4];
        rounds.extend(vec![second; 6]);
        let (ours, least) = (misses(&rounds, 20, 6), least_misses(&rounds, 6));
        // One more in a round is the phase of the same period.
        let mut last = ours.iter().zip(&least).skip(6);
        assert!(last.all(|(ours, least)| *ours <= least + 1), "{ours:?} {least:?}");
    }

    #[test]
    fn a_use_out_of_order_moves_the_place_and_no_more() {
        let mut plan = Plan::default();
        (0..3).for_each(|_| (0..10).for_each(|id| plan.used(id, 10)));
        assert_eq!(plan.next_uses(11)[..3], [0, 1, 2]);
        assert_eq!(plan.next_uses(11)[10], usize::MAX, "never used");
        plan.used(7, 10);
        assert_eq!(plan.next_uses(10)[7..], [9, 0, 1]);
        plan.used(0, 10);
        assert_eq!(plan.next_uses(10)[..3], [9, 0, 1]);
        assert_eq!(plan.misses, 2);
        plan.used(1, 10);
        assert_eq!(plan.misses, 0);
        plan.used(10, 11);
        assert_eq!(plan.next_uses(11)[2], 0, "what is unknown moves nothing");
    }

    #[test]
    fn what_never_comes_around_is_given_up() {
        let mut plan = Plan::default();
        // Primes in turn: no four come again soon.
        let mut id = 1;
        for _ in 0..1000 {
            id = id * 75 % 65_537;
            plan.used(id, 3);
            assert!(plan.order.len() <= PROOF + 3 * ROUNDS_MAX);
        }
        assert!(plan.at.is_none());
    }
}
