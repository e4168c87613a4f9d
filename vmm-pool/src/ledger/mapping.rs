//! A place where an allocation is mapped.

use std::collections::BTreeMap;

use crate::VirtualHandle;
use crate::driver::{AccessDesc, Location, RawContext, VaRange};

/// A place where an allocation is mapped, and the rights set on it.
#[derive(Debug)]
pub(crate) struct Mapping {
    range: VaRange,
    allocation: VirtualHandle,
    /// Rights by place, as last set. Empty: never set, so nobody may touch it.
    access: BTreeMap<Location, i32>,
    presence: Presence,
    /// It is about to be taken out of the driver's page tables: what the driver says of it holds no more.
    is_leaving: bool,
    /// How often that has begun.
    departures: u64,
    /// How often a block of another process was opened here and not closed yet; 0 for any other mapping.
    opened: u32,
    /// For a block: the context in which it was allocated, with which it ends.
    context: Option<RawContext>,
    /// Rights were set on a part of it: what is recorded of them may not hold for all.
    is_uneven: bool,
    /// For a block: one caller gives it up at this moment, and no other may.
    is_claimed: bool,
}

/// How much of a mapping is in the driver's page tables now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Nothing.
    Absent,
    /// It is mapped, and its rights are still to be set.
    Bare,
    /// All that its record says.
    Whole,
}

impl Mapping {
    pub(super) fn new(range: VaRange, allocation: VirtualHandle) -> Self {
        let (access, presence) = (BTreeMap::new(), Presence::Absent);
        Self {
            range,
            allocation,
            access,
            presence,
            is_leaving: false,
            departures: 0,
            opened: 0,
            context: None,
            is_uneven: false,
            is_claimed: false,
        }
    }

    pub(crate) fn range(&self) -> VaRange {
        self.range
    }

    pub(crate) fn allocation(&self) -> VirtualHandle {
        self.allocation
    }

    pub(crate) fn presence(&self) -> Presence {
        self.presence
    }

    /// Is anything of it in the driver's page tables?
    pub(crate) fn is_present(&self) -> bool {
        self.presence != Presence::Absent
    }

    /// Rights are about to be set on a part of it.
    pub(super) fn set_uneven(&mut self) {
        self.is_uneven = true;
    }

    /// May a kernel on `place` read all of it, as far as is known?
    pub(crate) fn is_readable_by_kernels(&self, place: Location) -> bool {
        let rights = self.rights_of(place).unwrap_or(0);
        self.presence == Presence::Whole && !self.is_leaving && !self.is_uneven && rights != 0
    }

    pub(crate) fn access_list(&self) -> Vec<AccessDesc> {
        self.access.iter().map(|(&location, &flags)| AccessDesc { location, flags }).collect()
    }

    /// The rights of `place`; none where they were never set.
    pub(crate) fn rights_of(&self, place: Location) -> Option<i32> {
        self.access.get(&place).copied()
    }

    /// Who has rights.
    pub(crate) fn accessors(&self) -> impl Iterator<Item = Location> {
        self.access.keys().copied()
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// What [`super::Ledger::sight_of`] tells two looks apart by; `None` while the driver knows less than the record.
    pub(super) fn standing(&self) -> Option<u64> {
        (self.presence == Presence::Whole && !self.is_leaving).then_some(self.departures)
    }

    pub(super) fn set_presence(&mut self, presence: Presence) {
        self.presence = presence;
        self.is_leaving = false;
    }

    pub(super) fn begin_leaving(&mut self) {
        self.is_leaving = true;
        self.departures += 1;
    }

    pub(super) fn call_off_leaving(&mut self) {
        self.is_leaving = false;
    }

    pub(super) fn add_access(&mut self, access: &[AccessDesc]) {
        self.access.extend(access.iter().map(|desc| (desc.location, desc.flags)));
    }

    pub(crate) fn context(&self) -> Option<RawContext> {
        self.context
    }

    pub(super) fn set_context(&mut self, context: Option<RawContext>) {
        self.context = context;
    }

    pub(super) fn is_claimed(&self) -> bool {
        self.is_claimed
    }

    pub(super) fn set_claimed(&mut self, is_claimed: bool) {
        self.is_claimed = is_claimed;
    }

    pub(super) fn set_opened(&mut self, opened: u32) {
        self.opened = opened;
    }
}
