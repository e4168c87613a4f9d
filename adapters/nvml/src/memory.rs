//! The size of a GPU's memory, and of its free part.
//!
//! The figures are those of `cuMemGetInfo`. The total is the smaller of the GPU's and the budget. The free part is the smaller
//! of the bytes that the tenant can have and those that it may still take. The used part is the rest, as in NVML: all three add
//! up.

use crate::Bound;

/// `nvmlMemory_t`: memory that the driver reserves counts as used.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The total, in bytes.
    pub total: u64,
    /// The free part, in bytes.
    pub free: u64,
    /// The rest, in bytes.
    pub used: u64,
}

/// `nvmlMemory_v2_t`: memory that the driver reserves is a figure of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryV2 {
    /// The size and number of this structure, which the caller fills in.
    pub version: u32,
    /// The total, in bytes.
    pub total: u64,
    /// The driver's own part, in bytes.
    pub reserved: u64,
    /// The part that is neither reserved nor used, in bytes.
    pub free: u64,
    /// The rest, in bytes.
    pub used: u64,
}

/// An answer about memory.
pub trait Narrow {
    /// Returns the answer for the memory inside `bound`, in bytes. Its total is never larger than that of the original answer.
    #[must_use]
    fn within(self, bound: Bound) -> Self;
}

fn left(free: u64, bound: Bound) -> u64 {
    let can_have = free.saturating_add(bound.others_bytes);
    can_have.min(bound.budget_bytes.saturating_sub(bound.held_bytes))
}

impl Narrow for Memory {
    fn within(self, bound: Bound) -> Self {
        let total = self.total.min(bound.budget_bytes);
        let free = left(self.free, bound).min(total);
        Self { total, free, used: total - free }
    }
}

impl Narrow for MemoryV2 {
    fn within(self, bound: Bound) -> Self {
        let total = self.total.min(bound.budget_bytes);
        // The driver's own memory does not count against a budget.
        let reserved = if total < self.total { 0 } else { self.reserved };
        let free = left(self.free, bound).min(total.saturating_sub(reserved));
        let used = total.saturating_sub(reserved).saturating_sub(free);
        Self { version: self.version, total, reserved, free, used }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: Memory = Memory { total: 140, free: 100, used: 40 };
    const GPU_V2: MemoryV2 = MemoryV2 { version: 2, total: 140, reserved: 3, free: 100, used: 37 };

    fn bound(budget_bytes: u64, held_bytes: u64) -> Bound {
        Bound { budget_bytes, held_bytes, ..Bound::NONE }
    }

    #[test]
    fn a_gpu_is_as_large_as_the_budget_and_the_rest_is_used() {
        assert_eq!(GPU.within(bound(60, 20)), Memory { total: 60, free: 40, used: 20 });
        let version_2 = MemoryV2 { version: 2, total: 60, reserved: 0, free: 40, used: 20 };
        assert_eq!(GPU_V2.within(bound(60, 20)), version_2);
        // Others use more than the budget leaves.
        assert_eq!(GPU.within(bound(130, 20)), Memory { total: 130, free: 100, used: 30 });
    }

    #[test]
    fn a_tenant_above_its_budget_sees_nothing_free() {
        assert_eq!(GPU.within(bound(60, 90)), Memory { total: 60, free: 0, used: 60 });
        assert_eq!(GPU_V2.within(bound(60, 90)).used, 60);
    }

    #[test]
    fn a_budget_above_the_gpu_leaves_it_as_large_as_it_is() {
        assert_eq!(GPU.within(bound(u64::MAX - 1, 0)), GPU);
        assert_eq!(GPU_V2.within(bound(u64::MAX - 1, 0)), GPU_V2);
        let most = GPU_V2.within(bound(140, 60));
        assert_eq!((most.total, most.reserved, most.free, most.used), (140, 3, 80, 57));
    }

    #[test]
    fn memory_that_others_would_give_up_counts_as_free() {
        let turns = Bound { others_bytes: 30, ..Bound::NONE };
        assert_eq!(GPU.within(turns), Memory { total: 140, free: 130, used: 10 });
        assert_eq!(GPU_V2.within(turns).free, 130);
        let all = Bound { others_bytes: 90, ..Bound::NONE };
        assert_eq!(GPU.within(all), Memory { total: 140, free: 140, used: 0 });
        let budget = Bound { others_bytes: 30, ..bound(60, 20) };
        assert_eq!(GPU.within(budget), Memory { total: 60, free: 40, used: 20 });
    }

    #[test]
    fn figures_that_make_no_sense_do_not_wrap() {
        let odd = Memory { total: 10, free: 100, used: 0 };
        assert_eq!(odd.within(bound(50, 0)), Memory { total: 10, free: 10, used: 0 });
        let odd = MemoryV2 { version: 2, total: 10, reserved: 20, free: 100, used: 0 };
        let within = odd.within(bound(50, 0));
        assert_eq!((within.free, within.used), (0, 0));
    }
}
