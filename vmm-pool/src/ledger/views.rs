//! Ranges that are mapped for copies of a pause or resume, and not unmapped yet.

use std::collections::BTreeMap;

use crate::driver::VaRange;

/// The ranges by their start. Each is here from its reservation until it is freed.
#[derive(Debug, Default)]
pub(crate) struct Views(BTreeMap<u64, VaRange>);

impl Views {
    pub(crate) fn add(&mut self, range: VaRange) {
        self.0.insert(range.start.0, range);
    }

    pub(crate) fn remove(&mut self, range: VaRange) {
        self.0.remove(&range.start.0);
    }

    pub(crate) fn all(&self) -> Vec<VaRange> {
        self.0.values().copied().collect()
    }
}
