//! Forecasts the bytes that would come in a step with another number of frames. It replays the order of the last step with the
//! best choice of chunks that leave. Pure.

use std::collections::BTreeSet;

use serde::Serialize;
use vmm_pool::driver::Driver;

use super::Pager;

/// The bytes that a step would bring to the device with so many frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// Device memory for chunks, in bytes.
    pub frames_bytes: u64,
    /// The contents that come in a step, in bytes.
    pub in_bytes: u64,
}

/// Shares of all chunks that are tried, as numerator and denominator.
const SHARES: [(usize, usize); 10] =
    [(1, 12), (1, 8), (1, 6), (1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (7, 8), (1, 1)];

/// Counts the chunks that come in a step like the one before, if the chunk that is used last leaves first (Belady).
fn misses(step: &[usize], frames: usize) -> usize {
    let chunks = step.iter().max().map_or(0, |most| most + 1);
    // For each use in two rounds: the next use of the same chunk.
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
    /// Forecasts the bytes that a step would bring with other frames, by the order of the last step. Empty while no step was
    /// like the one before. Takes some milliseconds of the calling thread.
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
        // At each end the chunks in the frames are used again. So each of the two passes brings all other chunks.
        assert_eq!([4, 8, 12].map(|frames| misses(&there_and_back, frames)), [16, 8, 0]);
        assert_eq!(misses(&[3, 3, 5], 1), 2);
    }
}
