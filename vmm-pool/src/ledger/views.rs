//! Places mapped for a copy of a pause or resume, and not taken down yet.

use std::collections::BTreeMap;

use crate::driver::VaRange;

/// See the head of this module. By start address; each is here from its reservation on, until it is gone.
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
