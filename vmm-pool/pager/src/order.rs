//! The order in which chunks are used. It foretells that uses repeat: a training step is like the one before it.
//!
//! All uses are kept, up to a number. A cursor stands at a place in this record: the uses before that place are most like the
//! last uses. If the next use is the one at the cursor, the cursor moves on. Otherwise another place is found. The forecast
//! decides only when chunks come, and which leave first.

/// The least number of uses that are kept. At most twice as many are.
const KEPT: usize = 1 << 14;
/// The number of uses before a place that are compared.
const COMPARED: usize = 48;
/// The number of places that are compared: the last ones. Each launch that was not foretold pays for that.
const PLACES: usize = 64;

/// See the head of this module.
#[derive(Debug, Default)]
pub(super) struct Order {
    uses: Vec<usize>,
    /// The place of the next use in `uses`, if the order is as before.
    cursor: Option<usize>,
}

impl Order {
    /// Records a use of this chunk. False if it was not foretold.
    pub(super) fn used(&mut self, id: usize) -> bool {
        if self.uses.last() == Some(&id) {
            return true;
        }
        if self.uses.len() >= 2 * KEPT {
            self.uses.drain(..KEPT);
            self.cursor = self.cursor.and_then(|at| at.checked_sub(KEPT));
        }
        self.uses.push(id);
        let as_foretold = self.cursor.filter(|&at| self.uses[at] == id);
        self.cursor = as_foretold.map(|at| at + 1).or_else(|| self.place());
        as_foretold.is_some()
    }

    /// Returns the uses of the last step. Empty while the next use is not foretold.
    pub(super) fn step(&self) -> Vec<usize> {
        // The cursor may stand several steps back.
        let step = self.cursor.and_then(|_| self.uses.get(self.place()?..));
        step.unwrap_or_default().to_vec()
    }

    /// The chunk that was used last.
    pub(super) fn last(&self) -> Option<usize> {
        self.uses.last().copied()
    }

    /// Finds the place whose uses before it are most like the last uses. Of equals it takes the last.
    fn place(&self) -> Option<usize> {
        let now = self.uses.len();
        let (last, before) = self.uses.split_last()?;
        let places = before.iter().enumerate().rev().filter(|(_, id)| *id == last).take(PLACES);
        let likeness = |at: usize| {
            let one = self.uses[..at].iter().rev();
            one.zip(self.uses[..now - 1].iter().rev())
                .take(COMPARED)
                .take_while(|(a, b)| a == b)
                .count()
        };
        places.map(|(at, _)| at + 1).max_by_key(|at| (likeness(at - 1), *at))
    }

    /// Counts the uses before the next use of each of `chunks` chunks. Chunks that are not foretold have the largest number.
    pub(super) fn next_uses(&self, chunks: usize) -> Vec<usize> {
        let mut next = vec![usize::MAX; chunks];
        let ahead = self.cursor.and_then(|at| self.uses.get(at..)).unwrap_or_default();
        let mut unknown = chunks;
        for (distance, &id) in ahead.iter().enumerate() {
            if unknown == 0 {
                break;
            }
            if let Some(known) = next.get_mut(id).filter(|known| **known == usize::MAX) {
                *known = distance;
                unknown -= 1;
            }
        }
        next
    }

    /// Returns the chunks that are used next, `count` at most.
    pub(super) fn ahead(&self, count: usize) -> Vec<usize> {
        let ahead = self.cursor.and_then(|at| self.uses.get(at..)).unwrap_or_default();
        let mut found = Vec::new();
        for &id in ahead {
            if found.len() == count {
                break;
            }
            if !found.contains(&id) {
                found.push(id);
            }
        }
        found
    }

    /// Removes these chunks from the record: they belong to others from now on.
    pub(super) fn forget(&mut self, ids: &[usize]) {
        let known = self.uses.len();
        self.uses.retain(|id| !ids.contains(id));
        self.cursor = self.cursor.filter(|_| self.uses.len() == known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks forward, and then backward with their forward pass once more, as with checkpoints.
    fn step(blocks: usize) -> Vec<usize> {
        let of = |block: usize| block * 3..block * 3 + 3;
        let forward = (0..blocks).flat_map(of);
        let backward = (0..blocks).rev().flat_map(move |block| of(block).chain(of(block).rev()));
        forward.chain(backward).collect()
    }

    #[test]
    fn a_step_is_foretold_from_the_one_before() {
        let mut order = Order::default();
        let step = step(6);
        for &id in &step {
            order.used(id);
        }
        let missed = step.iter().filter(|id| !order.used(**id)).count();
        assert!(missed <= 2, "{missed}: where the first step begins again");
        let missed = step.iter().filter(|id| !order.used(**id)).count();
        assert_eq!(missed, 0);
        // The last use of one step is the first of the next. Two uses of a chunk in a row count once.
        let mut once = step.clone();
        once.dedup();
        assert_eq!(once.pop(), Some(once[0]));
        once.rotate_left(1);
        assert_eq!(order.step(), once);
        assert_eq!(order.ahead(4), [1, 2, 3, 4]);
        let next = order.next_uses(20);
        assert!(next[1] < next[2] && next[2] < next[17]);
        assert_eq!(next[18], usize::MAX);
    }

    #[test]
    fn another_order_is_learnt_and_nothing_is_foretold_at_first() {
        let mut order = Order::default();
        assert!(order.ahead(3).is_empty() && order.next_uses(1) == [usize::MAX]);
        for id in [0, 1, 2, 3, 0, 1, 2, 3] {
            order.used(id);
        }
        assert_eq!(order.ahead(2), [0, 1]);
        assert!(!order.used(2), "1 was left out");
        assert_eq!(order.ahead(1), [3]);
        order.forget(&[7]);
        assert_eq!(order.ahead(1), [3], "it was never used");
        order.forget(&[3]);
        assert!(order.ahead(1).is_empty());
    }

    /// Counts the misses in each round of a cache of `frames` chunks. The cache gives up the chunk that is used last by
    /// `next_uses`.
    fn misses(
        rounds: &[Vec<usize>],
        frames: usize,
        mut next_uses: impl FnMut(usize) -> Vec<usize>,
    ) -> Vec<usize> {
        let mut here: Vec<usize> = Vec::new();
        let in_round = |round: &Vec<usize>| {
            let mut misses = 0;
            for &id in round {
                let next = next_uses(id);
                if here.contains(&id) {
                    continue;
                }
                misses += 1;
                if here.len() == frames {
                    let victim = (0..frames).max_by_key(|&index| next[here[index]]);
                    here.swap_remove(victim.expect("a frame"));
                }
                here.push(id);
            }
            misses
        };
        rounds.iter().map(in_round).collect()
    }

    #[test]
    fn a_known_order_costs_as_few_misses_as_foresight() {
        const CHUNKS: usize = 20;
        let there: Vec<_> = (0..CHUNKS).collect();
        let there_and_back: Vec<_> = (0..CHUNKS).chain((0..CHUNKS).rev()).collect();
        for round in [there, there_and_back, step(6)] {
            let rounds = vec![round; 24];
            let mut order = Order::default();
            let ours = misses(&rounds, 6, |id| {
                order.used(id);
                order.next_uses(CHUNKS)
            });
            let mut left = rounds.concat().into_iter();
            // This is Belady's choice, which knows the coming uses.
            let least = misses(&rounds, 6, |_| {
                left.next();
                let next = |id| left.clone().position(|use_of| use_of == id);
                (0..CHUNKS).map(|id| next(id).unwrap_or(usize::MAX)).collect()
            });
            // Nobody knows what follows the last round.
            let known = ours[2..23].iter().zip(&least[2..]);
            assert!(known.clone().all(|(ours, least)| *ours <= least + 1), "{ours:?} {least:?}");
            let more: usize = known.map(|(ours, least)| ours - least.min(ours)).sum();
            assert!(more <= CHUNKS, "{ours:?} {least:?}");
            assert!(ours[2] <= rounds[0].len() * 3 / 4, "by last use: all");
        }
    }

    #[test]
    fn of_many_places_the_last_ones_are_compared() {
        for (count, foretold) in [(PLACES - 1, vec![2]), (PLACES, vec![9])] {
            let mut order = Order::default();
            let decoys = std::iter::repeat_n([1, 9], count).flatten();
            for id in [0, 1, 2].into_iter().chain(decoys).chain([0, 7, 0, 1]) {
                order.used(id);
            }
            assert_eq!(order.ahead(1), foretold, "{count} others in between");
        }
    }

    #[test]
    fn old_uses_are_forgotten() {
        let mut order = Order::default();
        for index in 0..5 * KEPT {
            order.used(index % 7);
        }
        assert!(order.uses.len() <= 2 * KEPT);
        assert_eq!(order.ahead(2).len(), 2);
    }
}
