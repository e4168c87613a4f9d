//! Which of our functions stands in for which of the driver's.
//!
//! Callers find the driver's functions by name, in three ways: `dlsym` on `libcuda.so.1`,
//! `cuGetProcAddress` (by base name, version and flags), and plain ELF binding. The first two are answered
//! by **identity**: the driver is asked as the caller asked, and its answer is exchanged when it is the
//! address of a function that we stand in for. So version and flag rules stay the driver's own.

use crate::functions::Function;

/// One hooked function.
#[derive(Clone, Copy, Debug)]
pub struct Hook {
    /// The driver's exported name, with its ABI suffix.
    pub symbol: &'static str,
    /// The name that `cuGetProcAddress` knows it by.
    pub base: &'static str,
    /// The version that `cuGetProcAddress` is asked at to get exactly this function.
    pub version: i32,
    /// Does it use the per-thread default stream (`_ptsz`, `_ptds`)?
    pub per_thread: bool,
    /// The address of our function. A function itself, because no constant may hold an address as a number.
    pub wrapper: fn() -> usize,
}

impl Hook {
    /// The hook of a function in the table.
    pub const fn of(function: Function, wrapper: fn() -> usize) -> Self {
        let Function { symbol, base, version, per_thread } = function;
        Self::new(symbol, base, version, per_thread, wrapper)
    }

    /// A hook of the exported name `symbol` under any base name.
    pub const fn new(
        symbol: &'static str,
        base: &'static str,
        version: i32,
        per_thread: bool,
        wrapper: fn() -> usize,
    ) -> Self {
        Self { symbol, base, version, per_thread, wrapper }
    }
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
pub const FLAG_PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
pub const FLAG_LEGACY: u64 = 1;

/// Splits an exported name into base name and whether it is the per-thread variant.
pub const fn base_name_const(symbol: &'static str) -> (&'static str, bool) {
    let bytes = symbol.as_bytes();
    let mut end = bytes.len();
    let per_thread = end > 5
        && bytes[end - 5] == b'_'
        && bytes[end - 4] == b'p'
        && bytes[end - 3] == b't'
        && (bytes[end - 2] == b's' || bytes[end - 2] == b'd')
        && (bytes[end - 1] == b'z' || bytes[end - 1] == b's');
    if per_thread {
        end -= 5;
    }
    if end > 3
        && bytes[end - 3] == b'_'
        && bytes[end - 2] == b'v'
        && bytes[end - 1].is_ascii_digit()
    {
        end -= 3;
    }
    let (base, _) = symbol.split_at(end);
    (base, per_thread)
}

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

    /// Is `address` one of ours?
    pub fn is_wrapper(&self, address: usize) -> bool {
        self.pairs.iter().any(|pair| pair.1 == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_come_off_the_base_name_const() {
        assert_eq!(base_name_const("cuMemAlloc_v2"), ("cuMemAlloc", false));
        assert_eq!(base_name_const("cuMemcpyDtoH_v2_ptds"), ("cuMemcpyDtoH", true));
        assert_eq!(base_name_const("cuLaunchKernel_ptsz"), ("cuLaunchKernel", true));
        assert_eq!(base_name_const("cuMemCreate"), ("cuMemCreate", false));
    }

    #[test]
    fn only_known_addresses_are_exchanged() {
        let exchange = Exchange::new(vec![(20, 200), (10, 100), (0, 1), (20, 300)]);
        assert_eq!(exchange.wrapper_of(10), Some(100));
        assert_eq!(exchange.wrapper_of(20), Some(200));
        assert_eq!(exchange.wrapper_of(0), None);
        assert_eq!(exchange.wrapper_of(15), None);
        assert!(exchange.is_wrapper(100));
        assert_eq!(exchange.span(), Some(10..=20));
        assert_eq!(Exchange::default().span(), None);
    }
}
