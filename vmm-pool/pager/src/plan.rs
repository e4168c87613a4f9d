//! The amount that would come in a step with other frames: the order of the last step, replayed with the best choice of
//! what leaves. Pure.

use std::collections::BTreeSet;

use serde::Serialize;
use vmm_pool::driver::Driver;

use super::Pager;

/// The amount that a step would bring to the device with so many frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// Device memory for chunks, in bytes.
    pub frames_bytes: u64,
    /// The contents that come in a step, in bytes.
    pub in_bytes: u64,
}

/// Shares of all chunks that are tried: parts, and of how many.
const SHARES: [(usize, usize); 10] =
    [(1, 12), (1, 8), (1, 6), (1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (7, 8), (1, 1)];

/// Chunks that come in a step which is like the one before, if what is used last leaves first (Belady).
fn misses(step: &[usize], frames: usize) -> usize {
    let chunks = step.iter().max().map_or(0, |most| most + 1);
    // Of each use in two rounds, when the same chunk is used next.
    let mut seen = vec![usize::MAX; chunks];
    let mut next = vec![usize::MAX; 3 * step.len()];
    for at in (0..3 * step.len()).rev() {
        let id = step[at % step.len()];
        next[at] = std::mem::replace(&mut seen[id], at);
    }
    let (mut here, mut count) = (BTreeSet::new(), 0);
    for at in 0..2 * step.len() {
        let id = step[at % step.len()];
        if !here.remove(&(at, id)) {
            count += usize::from(at >= step.len());
            if here.len() >= frames {
                here.pop_last();
            }
        }
        here.insert((next[at], id));
    }
    count
}

impl<D: Driver> Pager<D> {
    /// Works out what a step would bring with other frames, by the order of the last one. Empty as long as no step was
    /// like the one before. It takes some milliseconds of the calling thread.
    pub fn plan(&self) -> Vec<Planned> {
        let step = self.shared.calls().order.step();
        let chunk_bytes = self.shared.chunk_bytes;
        let chunks = step.iter().collect::<BTreeSet<_>>().len();
        let of_share = |(part, whole): (usize, usize)| {
            let frames = (chunks * part / whole).max(1);
            let come = misses(&step, frames) as u64;
            Planned { frames_bytes: frames as u64 * chunk_bytes, in_bytes: come * chunk_bytes }
        };
        if step.is_empty() { Vec::new() } else { SHARES.into_iter().map(of_share).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::misses;

    #[test]
    fn what_comes_is_the_least_that_must() {
        let around: Vec<_> = (0..12).collect();
        // All but those that stay: of four, four and three by turns.
        assert_eq!([1, 4, 11, 12].map(|frames| misses(&around, frames)), [12, 8, 1, 0]);
        let there_and_back: Vec<_> = (0..12).chain((0..12).rev()).collect();
        // At each end the frames are used again: two passes, each without them.
        assert_eq!([4, 8, 12].map(|frames| misses(&there_and_back, frames)), [16, 8, 0]);
        assert_eq!(misses(&[3, 3, 5], 1), 2);
    }
}
