//! The place of an allocation's memory and contents: one state, one transition function.
//!
//! ```text
//!                Saved                 Released
//!   Resident -----------> Moving out ------------> Offloaded ----GivenUp----> Lost
//!     ^ ^ |                   |                      ^  |                (imports only)
//!     | | '-------------------|-------Released-------'  |
//!     | '--------Runs---------'            ^            | Returned
//!     |                                    '-Released-. v
//!     '-------------------Arrived------------------ Moving in
//! ```
//!
//! While memory moves out, the device has the current contents, and the saved contents are a copy. While memory moves
//! in, the saved contents are the current ones. The contents on the device are then undefined, until all have arrived.
//! Contents that nobody saves (imports, memory of the policy `discard`) go from Resident to Offloaded immediately.

use std::ops::Range;

use crate::copies::Way;
use crate::deferred::Physical;
use crate::store::Saved;

/// The place of the memory and contents of one allocation.
#[derive(Debug)]
pub(crate) enum Residency {
    /// The memory is on its device, which alone has its contents.
    Resident {
        handle: Physical,
        /// The parts, by offset, whose contents the next pause need not save. In order, none empty, none touching
        /// another.
        unused: Vec<Range<u64>>,
    },
    /// The memory is on its device, and moves out or in: the head of this file says which contents are current.
    Moving { way: Way, handle: Physical, kept: Kept },
    /// The memory is released to the driver.
    Offloaded { kept: Kept },
    /// The memory was imported from a process that has ended, and is given up. Nobody can restore it. Its user must
    /// still unmap and release it.
    Lost,
}

/// The record of an allocation that is off its device or being moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The place of its contents; none if nobody saved them.
    pub(crate) saved: Option<Saved>,
    /// The parts, by offset, that were not saved.
    pub(crate) unused: Vec<Range<u64>>,
    /// True if its process runs on without it, since a pause by tag.
    pub(crate) is_set_aside: bool,
}

/// A change in the residency of an allocation.
#[derive(Debug)]
pub(crate) enum Change {
    /// Its contents are saved at this place, and it may be unmapped.
    Saved(Saved),
    /// While the memory is off its device: its contents are at this place from now on.
    Spilled(Saved),
    /// The driver's handle is given up.
    Released,
    /// It is created or imported again.
    Returned(Physical),
    /// Contents are about to be written to its memory. A pause has saved that memory, and could not release it.
    Refilled,
    /// All its saved contents are on its device again.
    Arrived,
    /// The device has the current contents, and the saved ones are void. Nobody has used the unused parts.
    ContentsVoid,
    /// The process runs. Memory that is wholly mapped is resident, unless its contents have not arrived. The process
    /// goes on without all other memory.
    Runs { is_mapped: bool },
    /// The next pause need not save these parts.
    Unused(Vec<Range<u64>>),
    /// Nobody can restore the memory.
    GivenUp,
}

impl Residency {
    /// Returns the state after `change`, and a handle that nobody in the ledger owns any more.
    ///
    /// # Errors
    /// The state as it was, which does not allow that change.
    pub(crate) fn next(self, change: Change) -> Result<(Self, Option<Physical>), Box<Self>> {
        Ok(match (self, change) {
            (Self::Resident { handle, unused }, Change::Saved(saved)) => {
                let kept = Kept { saved: Some(saved), unused, is_set_aside: false };
                (Self::Moving { way: Way::Out, handle, kept }, None)
            }
            (Self::Moving { way: Way::Out, handle, kept }, Change::Saved(saved)) => {
                let kept = Kept { saved: Some(saved), ..kept };
                (Self::Moving { way: Way::Out, handle, kept }, None)
            }
            (
                Self::Offloaded { kept: kept @ Kept { saved: Some(_), .. } },
                Change::Spilled(saved),
            ) => (Self::Offloaded { kept: Kept { saved: Some(saved), ..kept } }, None),
            (Self::Resident { handle, unused }, Change::Released) => {
                let kept = Kept { unused, ..Kept::default() };
                (Self::Offloaded { kept }, Some(handle))
            }
            (Self::Moving { handle, kept, .. }, Change::Released) => {
                (Self::Offloaded { kept }, Some(handle))
            }
            (Self::Offloaded { kept }, Change::Returned(handle)) => {
                (Self::Moving { way: Way::In, handle, kept }, None)
            }
            (
                Self::Moving { handle, kept: kept @ Kept { saved: Some(_), .. }, .. },
                Change::Refilled,
            ) => (Self::Moving { way: Way::In, handle, kept }, None),
            (Self::Moving { way: Way::In, handle, .. }, Change::Arrived)
            | (
                Self::Resident { handle, .. } | Self::Moving { way: Way::Out, handle, .. },
                Change::Runs { is_mapped: true },
            ) => (Self::Resident { handle, unused: Vec::new() }, None),
            (state @ Self::Resident { .. }, Change::ContentsVoid) => (state, None),
            (Self::Moving { way: Way::Out, handle, kept }, Change::ContentsVoid) => {
                (Self::Moving { way: Way::Out, handle, kept: Kept { saved: None, ..kept } }, None)
            }
            // The driver has unmapped the memory in part and refused the rest, or has unmapped it and could not save
            // it. Its process may map it at other addresses, and use it.
            (
                Self::Resident { handle, .. }
                | Self::Moving { way: Way::Out, handle, kept: Kept { saved: None, .. } },
                Change::Runs { is_mapped: false },
            ) => {
                let kept = Kept { is_set_aside: true, ..Kept::default() };
                (Self::Moving { way: Way::Out, handle, kept }, None)
            }
            // The same is true if the process runs on without memory that is only partly restored, mapped or not.
            (Self::Moving { way, handle, kept }, Change::Runs { .. }) => {
                (Self::Moving { way, handle, kept: Kept { is_set_aside: true, ..kept } }, None)
            }
            (Self::Offloaded { kept }, Change::Runs { .. }) => {
                (Self::Offloaded { kept: Kept { is_set_aside: true, ..kept } }, None)
            }
            (Self::Resident { handle, .. }, Change::Unused(unused)) => {
                (Self::Resident { handle, unused }, None)
            }
            (Self::Offloaded { .. }, Change::GivenUp) => (Self::Lost, None),
            // The memory is back on its device meanwhile, or is lost.
            (state, Change::Returned(handle)) => (state, Some(handle)),
            (state, Change::Spilled(_) | Change::Refilled | Change::Arrived)
            | (
                state @ (Self::Moving { way: Way::In, .. } | Self::Offloaded { .. } | Self::Lost),
                Change::Saved(_) | Change::ContentsVoid,
            )
            | (state @ (Self::Offloaded { .. } | Self::Lost), Change::Released)
            | (
                state @ (Self::Moving { .. } | Self::Offloaded { .. } | Self::Lost),
                Change::Unused(_),
            )
            | (state @ Self::Lost, Change::Runs { .. } | Change::GivenUp)
            | (state @ (Self::Resident { .. } | Self::Moving { .. }), Change::GivenUp) => {
                return Err(Box::new(state));
            }
        })
    }

    /// Returns the driver's handle, while the memory is on its device.
    pub(crate) fn handle(&self) -> Option<&Physical> {
        match self {
            Self::Resident { handle, .. } | Self::Moving { handle, .. } => Some(handle),
            Self::Offloaded { .. } | Self::Lost => None,
        }
    }

    /// As [`Residency::handle`].
    pub(super) fn handle_mut(&mut self) -> Option<&mut Physical> {
        match self {
            Self::Resident { handle, .. } | Self::Moving { handle, .. } => Some(handle),
            Self::Offloaded { .. } | Self::Lost => None,
        }
    }

    /// Does its device have the current contents?
    pub(crate) fn has_contents(&self) -> bool {
        match self {
            Self::Resident { .. } | Self::Moving { way: Way::Out, .. } => true,
            Self::Moving { way: Way::In, .. } | Self::Offloaded { .. } | Self::Lost => false,
        }
    }

    /// Is the memory on its device again, while the saved contents are still the current ones?
    pub(super) fn is_coming(&self) -> bool {
        matches!(self, Self::Moving { way: Way::In, .. })
    }

    /// Returns the place where its contents are saved; none if they are not saved.
    pub(crate) fn saved(&self) -> Option<&Saved> {
        match self {
            Self::Moving { kept, .. } | Self::Offloaded { kept } => kept.saved.as_ref(),
            Self::Resident { .. } | Self::Lost => None,
        }
    }

    /// Forgets the fingerprints of the saved contents, which may not be valid any more.
    pub(super) fn forget_prints(&mut self) {
        if let Self::Moving { kept: Kept { saved: Some(saved), .. }, .. }
        | Self::Offloaded { kept: Kept { saved: Some(saved), .. } } = self
        {
            saved.prints = None;
        }
    }

    /// Returns the parts, by offset, whose contents are not saved, or need not be.
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
        let saved = Saved::whole(Store::Host, u64::from(index), 1);
        match index % 13 {
            0 => Change::Saved(saved),
            1 | 2 => Change::Released,
            3 | 4 => Change::Returned(handle(u64::from(index))),
            5 => Change::ContentsVoid,
            6 => Change::Runs { is_mapped: true },
            7 => Change::Runs { is_mapped: false },
            8 => Change::Unused(vec![Range { start: 0, end: 1 }]),
            9 => Change::Spilled(saved),
            10 => Change::Refilled,
            11 => Change::Arrived,
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
                let (next, out) = state.next(change).unwrap_or_else(|state| (*state, None));
                let after = next.handle().map(Physical::raw);
                let after: Vec<_> = after.into_iter().chain(out.map(|out| out.raw())).collect();
                prop_assert_eq!(before.len(), after.len());
                prop_assert!(before.iter().all(|raw| after.contains(raw)));
                state = next;
            }
        }
    }

    fn at() -> Saved {
        Saved::whole(Store::Host, 7, 1)
    }

    fn elsewhere() -> Saved {
        Saved::whole(Store::File, 8, 1)
    }

    fn part(at: u64) -> Vec<Range<u64>> {
        vec![Range { start: at, end: at + 1 }]
    }

    /// The visible part of a state.
    #[derive(Clone, Debug, PartialEq, Eq)]
    enum Seen {
        Resident { raw: u64, unused: Vec<Range<u64>> },
        Moving { way: Way, raw: u64, kept: Kept },
        Offloaded { kept: Kept },
        Lost,
    }

    impl Seen {
        fn of(state: &Residency) -> Self {
            match state {
                Residency::Resident { handle, unused } => {
                    Self::Resident { raw: handle.raw().0, unused: unused.clone() }
                }
                Residency::Moving { way, handle, kept } => {
                    Self::Moving { way: *way, raw: handle.raw().0, kept: kept.clone() }
                }
                Residency::Offloaded { kept } => Self::Offloaded { kept: kept.clone() },
                Residency::Lost => Self::Lost,
            }
        }

        fn state(&self) -> Residency {
            match self.clone() {
                Self::Resident { raw, unused } => {
                    Residency::Resident { handle: handle(raw), unused }
                }
                Self::Moving { way, raw, kept } => {
                    Residency::Moving { way, handle: handle(raw), kept }
                }
                Self::Offloaded { kept } => Residency::Offloaded { kept },
                Self::Lost => Residency::Lost,
            }
        }
    }

    fn kept(saved: Option<Saved>, unused: Vec<Range<u64>>, is_set_aside: bool) -> Kept {
        Kept { saved, unused, is_set_aside }
    }

    /// On its device, nowhere else, with a part that need not be saved.
    fn resident() -> Seen {
        Seen::Resident { raw: 1, unused: part(0) }
    }

    /// On its device and saved, but for that part, and on its way out.
    fn leaving(is_set_aside: bool) -> Seen {
        let kept = kept(Some(at()), part(0), is_set_aside);
        Seen::Moving { way: Way::Out, raw: 1, kept }
    }

    /// The same, on its way in.
    fn coming(is_set_aside: bool) -> Seen {
        Seen::Moving { way: Way::In, raw: 1, kept: kept(Some(at()), part(0), is_set_aside) }
    }

    fn offloaded(is_set_aside: bool) -> Seen {
        Seen::Offloaded { kept: kept(Some(at()), part(0), is_set_aside) }
    }

    /// The outcome of a change in a state.
    #[derive(Clone, Debug, PartialEq, Eq)]
    enum After {
        /// That state, and the handle that comes out.
        Is(Seen, Option<u64>),
        /// It does not have the change.
        Refused,
    }

    const REFUSED: After = After::Refused;

    /// Asserts the outcome of `change` for each state, in the order of `before`.
    fn assert_after(change: impl Fn() -> Change, expected: [After; 8]) {
        let before = [
            resident(),
            leaving(false),
            leaving(true),
            coming(false),
            coming(true),
            offloaded(false),
            offloaded(true),
            Seen::Lost,
        ];
        for (before, expected) in before.into_iter().zip(expected) {
            let after = match before.state().next(change()) {
                Ok((after, out)) => After::Is(Seen::of(&after), out.map(|out| out.raw().0)),
                Err(state) => {
                    assert_eq!(Seen::of(&state), before, "{:?} changes nothing", change());
                    REFUSED
                }
            };
            assert_eq!(after, expected, "{before:?} after {:?}", change());
        }
    }

    /// That state, and no handle comes out.
    fn stays(seen: Seen) -> After {
        After::Is(seen, None)
    }

    /// That state, and the handle that there was comes out.
    fn goes(seen: Seen) -> After {
        After::Is(seen, Some(1))
    }

    /// As a process has it that runs.
    fn runs() -> After {
        stays(Seen::Resident { raw: 1, unused: Vec::new() })
    }

    #[test]
    fn what_is_saved_is_on_its_way_out_and_keeps_its_handle() {
        let saved = |aside| {
            let kept = kept(Some(elsewhere()), part(0), aside);
            stays(Seen::Moving { way: Way::Out, raw: 1, kept })
        };
        let [whole, aside] = [saved(false), saved(true)];
        let expected = [whole.clone(), whole, aside, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED];
        assert_after(|| Change::Saved(elsewhere()), expected);
    }

    #[test]
    fn only_saved_contents_that_are_away_lie_elsewhere_from_then_on() {
        let spilled =
            |aside| stays(Seen::Offloaded { kept: kept(Some(elsewhere()), part(0), aside) });
        let (whole, aside) = (spilled(false), spilled(true));
        let expected = [REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, whole, aside, REFUSED];
        assert_after(|| Change::Spilled(elsewhere()), expected);
    }

    #[test]
    fn what_is_released_gives_its_handle_out_once_and_keeps_what_is_saved() {
        let unsaved = Seen::Offloaded { kept: kept(None, part(0), false) };
        let expected = [
            goes(unsaved),
            goes(offloaded(false)),
            goes(offloaded(true)),
            goes(offloaded(false)),
            goes(offloaded(true)),
            REFUSED,
            REFUSED,
            REFUSED,
        ];
        assert_after(|| Change::Released, expected);
    }

    #[test]
    fn a_handle_that_comes_back_is_taken_where_there_is_none() {
        let back = |aside| {
            let kept = kept(Some(at()), part(0), aside);
            stays(Seen::Moving { way: Way::In, raw: 2, kept })
        };
        let unwanted = |seen| After::Is(seen, Some(2));
        let expected = [
            unwanted(resident()),
            unwanted(leaving(false)),
            unwanted(leaving(true)),
            unwanted(coming(false)),
            unwanted(coming(true)),
            back(false),
            back(true),
            unwanted(Seen::Lost),
        ];
        assert_after(|| Change::Returned(handle(2)), expected);
    }

    #[test]
    fn what_was_saved_and_is_written_to_again_is_on_its_way_in() {
        let whole = || stays(coming(false));
        let aside = || stays(coming(true));
        let expected = [REFUSED, whole(), aside(), whole(), aside(), REFUSED, REFUSED, REFUSED];
        assert_after(|| Change::Refilled, expected);
        let unsaved = Seen::Moving { way: Way::Out, raw: 1, kept: Kept::default() };
        unsaved.state().next(Change::Refilled).expect_err("nothing can be written to it");
    }

    #[test]
    fn only_what_is_on_its_way_in_arrives() {
        let expected = [REFUSED, REFUSED, REFUSED, runs(), runs(), REFUSED, REFUSED, REFUSED];
        assert_after(|| Change::Arrived, expected);
    }

    #[test]
    fn copies_are_void_where_the_device_has_the_contents() {
        let void =
            |aside| stays(Seen::Moving { way: Way::Out, raw: 1, kept: kept(None, part(0), aside) });
        let here = stays(resident());
        let expected = [here, void(false), void(true), REFUSED, REFUSED, REFUSED, REFUSED, REFUSED];
        assert_after(|| Change::ContentsVoid, expected);
    }

    #[test]
    fn what_is_wholly_mapped_when_its_process_runs_is_resident_but_for_what_has_not_arrived() {
        let aside = || stays(offloaded(true));
        let half = || stays(coming(true));
        let expected = [runs(), runs(), runs(), half(), half(), aside(), aside(), REFUSED];
        assert_after(|| Change::Runs { is_mapped: true }, expected);
    }

    #[test]
    fn what_is_not_wholly_mapped_when_its_process_runs_is_set_aside() {
        let unsaved = || Seen::Moving { way: Way::Out, raw: 1, kept: kept(None, Vec::new(), true) };
        let void = Kept { unused: part(0), ..Kept::default() };
        let (after, _) = Seen::Moving { way: Way::Out, raw: 1, kept: void }
            .state()
            .next(Change::Runs { is_mapped: false })
            .expect("it has that change");
        assert_eq!(Seen::of(&after), unsaved(), "its process may use all of it");
        let expected = [
            stays(unsaved()),
            stays(leaving(true)),
            stays(leaving(true)),
            stays(coming(true)),
            stays(coming(true)),
            stays(offloaded(true)),
            stays(offloaded(true)),
            REFUSED,
        ];
        assert_after(|| Change::Runs { is_mapped: false }, expected);
    }

    #[test]
    fn parts_are_marked_unused_only_where_the_device_alone_has_the_contents() {
        let marked = stays(Seen::Resident { raw: 1, unused: part(4) });
        let expected = [marked, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED];
        assert_after(|| Change::Unused(part(4)), expected);
    }

    #[test]
    fn only_what_is_away_is_given_up() {
        let lost = || stays(Seen::Lost);
        let expected = [REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, lost(), lost(), REFUSED];
        assert_after(|| Change::GivenUp, expected);
    }

    #[test]
    fn a_state_says_what_it_is() {
        let says = |seen: Seen| {
            let state = seen.state();
            let raw = state.handle().map(|handle| handle.raw().0);
            let has_contents = (state.has_contents(), state.is_coming());
            (
                raw,
                state.saved().cloned(),
                has_contents,
                state.unused().to_vec(),
                state.is_set_aside(),
            )
        };
        let (here, on_its_way_in, away) = ((true, false), (false, true), (false, false));
        assert_eq!(says(resident()), (Some(1), None, here, part(0), false));
        for aside in [false, true] {
            assert_eq!(says(leaving(aside)), (Some(1), Some(at()), here, part(0), aside));
            assert_eq!(says(coming(aside)), (Some(1), Some(at()), on_its_way_in, part(0), aside));
            assert_eq!(says(offloaded(aside)), (None, Some(at()), away, part(0), aside));
        }
        let lost = (None, None, away, Vec::new(), true);
        assert_eq!(says(Seen::Lost), lost, "its process runs without it");
    }

    #[test]
    fn what_was_saved_of_memory_that_has_arrived_is_void() {
        let saved = at();
        let state = Residency::Resident { handle: handle(1), unused: Vec::new() };
        let (state, _) = state.next(Change::Saved(saved.clone())).unwrap();
        let (state, out) = state.next(Change::Released).unwrap();
        assert!(out.is_some());
        assert_eq!(state.saved(), Some(&saved));
        let (state, _) = state.next(Change::Returned(handle(2))).unwrap();
        assert_eq!(state.saved(), Some(&saved), "the copy is the contents until it has arrived");
        let (state, _) = state.next(Change::Arrived).unwrap();
        assert_eq!(state.saved(), None);
        assert!(matches!(state, Residency::Resident { .. }));
    }
}
