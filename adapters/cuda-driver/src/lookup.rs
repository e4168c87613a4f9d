//! The exchange of the driver's functions for those of ours that stand in for them.
//!
//! Callers find the driver's functions by name, in three ways: `dlsym` on `libcuda.so.1`,
//! `cuGetProcAddress` (by base name, version and flags), and plain ELF binding. The first two are answered
//! by **identity**: the driver is asked as the caller asked, and its answer is exchanged when it is the
//! address of a function that we stand in for. So version and flag rules stay the driver's own.

use crate::functions::Function;

/// One hooked function.
#[derive(Clone, Copy, Debug)]
pub struct Hook {
    /// The driver's.
    pub function: Function,
    /// The address of our function. A function itself, because no constant may hold an address as a number.
    pub wrapper: fn() -> usize,
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
pub const FLAG_PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
pub const FLAG_LEGACY: u64 = 1;

/// Addresses of the driver's functions, each with ours. Sorted by address.
#[derive(Debug, Default)]
pub struct Exchange {
    pairs: Vec<(usize, usize)>,
}

impl Exchange {
    /// Built from pairs of the driver's address and ours. An address that several names share keeps the
    /// first.
    pub fn new(mut pairs: Vec<(usize, usize)>) -> Self {
        pairs.retain(|pair| pair.0 != 0);
        pairs.sort_by_key(|pair| pair.0);
        pairs.dedup_by_key(|pair| pair.0);
        Self { pairs }
    }

    /// Our function for the driver's at `real`.
    pub fn wrapper_of(&self, real: usize) -> Option<usize> {
        let index = self.pairs.binary_search_by_key(&real, |pair| pair.0).ok()?;
        Some(self.pairs[index].1)
    }

    /// The driver's addresses all lie in here; `None` when there are none.
    pub fn span(&self) -> Option<std::ops::RangeInclusive<usize>> {
        Some(self.pairs.first()?.0..=self.pairs.last()?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_addresses_are_exchanged() {
        let exchange = Exchange::new(vec![(20, 200), (10, 100), (0, 1), (20, 300)]);
        assert_eq!(exchange.wrapper_of(10), Some(100));
        assert_eq!(exchange.wrapper_of(20), Some(200));
        assert_eq!(exchange.wrapper_of(0), None);
        assert_eq!(exchange.wrapper_of(15), None);
        assert_eq!(exchange.span(), Some(10..=20));
        assert_eq!(Exchange::default().span(), None);
    }
}
