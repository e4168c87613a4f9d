//! Where an allocation's memory and contents are: one state, one transition function.
//!
//! ```text
//!              Saved                Released
//!   Resident ---------> Moving -----------------> Offloaded ---Lost---> Lost
//!      ^  |               ^ |  <----------------      ^                (imports only)
//!      |  |      Resumed  | |      Returned           |
//!      +--|---------------|-+                         |
//!         +---------------|-----------Released--------+
//! ```
//!
//! Contents that nobody saves (imports, memory of the policy `discard`) go from Resident to Offloaded at once.

use std::ops::Range;

use crate::deferred::Physical;
use crate::store::Saved;

/// Where memory and contents of one allocation are.
#[derive(Debug)]
pub(crate) enum Residency {
    /// On its device, which alone has its contents.
    Resident {
        handle: Physical,
        /// Parts, by offset, whose contents the next pause need not save. In order, none empty, none touching another.
        unused: Vec<Range<u64>>,
    },
    /// On its device, and on its way out or in.
    Moving { handle: Physical, kept: Kept },
    /// Given back to the driver.
    Offloaded { kept: Kept },
    /// Imported from a process that has ended, and given up: it never comes back, and waits for its user to unmap
    /// and release it.
    Lost,
}

/// What is kept of an allocation that is not simply on its device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// Where its contents are; none when nobody saved them.
    pub(crate) saved: Option<Saved>,
    /// Parts, by offset, that were not saved.
    pub(crate) unused: Vec<Range<u64>>,
    /// Its process runs on without it, since a pause by tag.
    pub(crate) is_set_aside: bool,
}

/// What can become of an allocation.
#[derive(Debug)]
pub(crate) enum Change {
    /// Its contents are saved here, and it may be unmapped.
    Saved(Saved),
    /// Its handle is given up.
    Released,
    /// It is created or imported again.
    Returned(Physical),
    /// The device has the contents: what was saved of them is void.
    ContentsVoid,
    /// The process runs: what is wholly mapped is resident, and the rest it goes on without.
    Runs { is_mapped: bool },
    /// The next pause need not save these parts.
    Unused(Vec<Range<u64>>),
    /// Nobody can bring it back.
    GivenUp,
}

impl Residency {
    /// The state after `change`, with a handle that nobody in the ledger owns any more. A change that the state does
    /// not have leaves it as it is.
    #[must_use = "the handle must be released"]
    pub(crate) fn next(self, change: Change) -> (Self, Option<Physical>) {
        match (self, change) {
            (Self::Resident { handle, unused }, Change::Saved(saved)) => {
                let kept = Kept { saved: Some(saved), unused, is_set_aside: false };
                (Self::Moving { handle, kept }, None)
            }
            (Self::Moving { handle, kept }, Change::Saved(saved)) => {
                (Self::Moving { handle, kept: Kept { saved: Some(saved), ..kept } }, None)
            }
            (Self::Resident { handle, unused }, Change::Released) => {
                let kept = Kept { unused, ..Kept::default() };
                (Self::Offloaded { kept }, Some(handle))
            }
            (Self::Moving { handle, kept }, Change::Released) => {
                (Self::Offloaded { kept }, Some(handle))
            }
            (Self::Offloaded { kept }, Change::Returned(handle)) => {
                (Self::Moving { handle, kept }, None)
            }
            (Self::Resident { handle, .. }, Change::ContentsVoid) => {
                (Self::Resident { handle, unused: Vec::new() }, None)
            }
            (Self::Moving { handle, kept }, Change::ContentsVoid) => {
                let kept = Kept { is_set_aside: kept.is_set_aside, ..Kept::default() };
                (Self::Moving { handle, kept }, None)
            }
            (
                Self::Resident { handle, .. } | Self::Moving { handle, .. },
                Change::Runs { is_mapped: true },
            ) => (Self::Resident { handle, unused: Vec::new() }, None),
            // The driver has unmapped it in part, and refused the rest.
            (Self::Resident { handle, unused }, Change::Runs { is_mapped: false }) => {
                let kept = Kept { saved: None, unused, is_set_aside: true };
                (Self::Moving { handle, kept }, None)
            }
            (Self::Moving { handle, kept }, Change::Runs { is_mapped: false }) => {
                (Self::Moving { handle, kept: Kept { is_set_aside: true, ..kept } }, None)
            }
            (Self::Offloaded { kept }, Change::Runs { .. }) => {
                (Self::Offloaded { kept: Kept { is_set_aside: true, ..kept } }, None)
            }
            (Self::Resident { handle, .. }, Change::Unused(unused)) => {
                (Self::Resident { handle, unused }, None)
            }
            (Self::Offloaded { .. }, Change::GivenUp) => (Self::Lost, None),
            // It has come back meanwhile, or is gone for good.
            (state, Change::Returned(handle)) => (state, Some(handle)),
            (
                state @ (Self::Offloaded { .. } | Self::Lost),
                Change::Saved(_) | Change::Released,
            )
            | (state @ (Self::Offloaded { .. } | Self::Lost), Change::ContentsVoid)
            | (
                state @ (Self::Moving { .. } | Self::Offloaded { .. } | Self::Lost),
                Change::Unused(_),
            )
            | (state @ Self::Lost, Change::Runs { .. } | Change::GivenUp)
            | (state @ (Self::Resident { .. } | Self::Moving { .. }), Change::GivenUp) => {
                (state, None)
            }
        }
    }

    /// Its handle, while it is on its device.
    pub(crate) fn handle(&self) -> Option<&Physical> {
        match self {
            Self::Resident { handle, .. } | Self::Moving { handle, .. } => Some(handle),
            Self::Offloaded { .. } | Self::Lost => None,
        }
    }

    /// Where its contents are saved; none when they are not.
    pub(crate) fn saved(&self) -> Option<Saved> {
        match self {
            Self::Moving { kept, .. } | Self::Offloaded { kept } => kept.saved,
            Self::Resident { .. } | Self::Lost => None,
        }
    }

    /// Parts, by offset, whose contents are not saved, or need not be.
    pub(crate) fn unused(&self) -> &[Range<u64>] {
        match self {
            Self::Resident { unused, .. } => unused,
            Self::Moving { kept, .. } | Self::Offloaded { kept } => &kept.unused,
            Self::Lost => &[],
        }
    }

    /// Does its process run without it?
    pub(crate) fn is_set_aside(&self) -> bool {
        match self {
            Self::Resident { .. } => false,
            Self::Moving { kept, .. } | Self::Offloaded { kept } => kept.is_set_aside,
            Self::Lost => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::driver::RawHandle;
    use crate::store::Store;

    fn handle(raw: u64) -> Physical {
        Physical::new(RawHandle(raw), 0, None)
    }

    fn change(index: u8) -> Change {
        let saved = Saved { store: Store::Host, offset_bytes: u64::from(index) };
        match index % 10 {
            0 => Change::Saved(saved),
            1 | 2 => Change::Released,
            3 | 4 => Change::Returned(handle(u64::from(index))),
            5 => Change::ContentsVoid,
            6 => Change::Runs { is_mapped: true },
            7 => Change::Runs { is_mapped: false },
            8 => Change::Unused(vec![Range { start: 0, end: 1 }]),
            _ => Change::GivenUp,
        }
    }

    proptest! {
        #[test]
        fn a_handle_is_in_the_row_or_handed_out_and_never_both_or_neither(
            changes in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut state = Residency::Resident { handle: handle(1000), unused: Vec::new() };
            for index in changes {
                let change = change(index);
                let came = if let Change::Returned(handle) = &change { Some(handle.raw()) } else { None };
                let before: Vec<_> = state.handle().map(Physical::raw).into_iter().chain(came).collect();
                let (next, out) = state.next(change);
                let after = next.handle().map(Physical::raw);
                let after: Vec<_> = after.into_iter().chain(out.map(|out| out.raw())).collect();
                prop_assert_eq!(before.len(), after.len());
                prop_assert!(before.iter().all(|raw| after.contains(raw)));
                state = next;
            }
        }
    }

    #[test]
    fn what_was_saved_of_memory_that_runs_again_is_void() {
        let saved = Saved { store: Store::Host, offset_bytes: 7 };
        let state = Residency::Resident { handle: handle(1), unused: Vec::new() };
        let (state, _) = state.next(Change::Saved(saved));
        let (state, out) = state.next(Change::Released);
        assert!(out.is_some());
        assert_eq!(state.saved(), Some(saved));
        let (state, _) = state.next(Change::Returned(handle(2)));
        assert_eq!(state.saved(), Some(saved), "the copy is the contents until the process runs");
        let (state, _) = state.next(Change::Runs { is_mapped: true });
        assert_eq!(state.saved(), None);
    }
}
