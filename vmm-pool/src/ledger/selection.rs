//! The memory that a pause or resume moves.

use std::collections::BTreeSet;

use super::row::Row;
use super::table::RowTable;
use crate::ids::{PeerId, VirtualHandle};
use crate::store::Store;

/// The tags of memory that libraries allocate for themselves. The library ensures that nobody touches such memory while
/// it is off its device. No region has these tags.
pub const LIBRARY_TAGS: [&str; 1] = ["nccl"];

/// Does memory of this tag, or of none, belong to no region?
fn is_of_no_region(tag: &str) -> bool {
    tag.is_empty() || LIBRARY_TAGS.contains(&tag)
}

/// Tags of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tags {
    /// Every tag. Memory outside any region has no tag, unless it is a library's.
    All,
    /// Every tag of a region.
    Regions,
    /// These tags.
    Named(BTreeSet<String>),
}

impl Tags {
    /// Is `tag` one of them? Memory without a tag (an empty one) never is.
    pub fn has(&self, tag: &str) -> bool {
        match self {
            Self::All => !tag.is_empty(),
            Self::Regions => !is_of_no_region(tag),
            Self::Named(tags) => tags.contains(tag),
        }
    }
}

/// The owner of the selected memory, as one process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Memory of the process itself, and all that it has imported.
    Everybody,
    /// Memory of the process itself.
    Own,
    /// Memory that the process has imported from this owner.
    Owner(PeerId),
}

/// The memory that one pause or resume moves. When that begins, the selection becomes a list of allocations.
///
/// Memory that a pause by tag has given up while the process runs on is *set aside*. A pause of everything, and the
/// resume after it, leave such memory off its device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Selection {
    /// A whole pause or resume: everything except memory that is set aside.
    #[default]
    Whole,
    /// A pause of the rest after a pause by tag, in a process that stands still: all that is on its devices.
    Rest,
    /// A pause by tag of a process that runs on.
    Tagged(Tags, Whose),
    /// A pause by tag of a process that stands still meanwhile: a whole resume restores the memory.
    Standing(Tags, Whose),
    /// A resume by tag of a process that runs: memory with these tags that is set aside.
    SetAside(Tags, Whose),
    /// A resume by tag of a process that is wholly paused: memory of no region, and of these tags.
    Staged(Tags),
}

/// The state of a process when a pause of it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The process is paused: only calls go in that give memory up or ask about it.
    Paused,
    /// The process runs on without the released memory.
    Running,
}

/// The allocations that one pause or resume moves, or those of one window, in the ledger's order. They are chosen once,
/// at the beginning, so that the first and the last step move the same allocations.
///
/// None is added meanwhile, because calls that create or import memory wait at the gate. An allocation may end
/// meanwhile, with its last ticket. Then its handle finds no row, and later steps skip it. Each step checks which
/// allocations may leave: that can change after the choice ([`RowTable::set_stays`]), and an import can be lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    handles: Vec<VirtualHandle>,
    /// Allocations whose tag a resume restores, and whose importers are still without them. Some are on their devices
    /// already.
    owed: Vec<VirtualHandle>,
}

impl Rows {
    /// Makes the list of the allocations of a window.
    pub(crate) fn of(handles: impl Iterator<Item = VirtualHandle>) -> Self {
        let mut handles: Vec<_> = handles.collect();
        handles.sort_unstable_by_key(|handle| handle.index());
        Self { handles, owed: Vec::new() }
    }

    pub(crate) fn has(&self, row: &Row) -> bool {
        is_in(&self.handles, row)
    }

    /// Does a pause of these allocations save `row` to `store`?
    pub(super) fn save_to(&self, row: &Row, store: Store) -> bool {
        row.backing().has_contents() && self.has(row) && row.is_saved_to(store)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Does a resume restore the tag of `row`, while its importers are still without the row?
    pub(super) fn owes(&self, row: &Row) -> bool {
        is_in(&self.owed, row)
    }

    pub(super) fn handles(&self) -> impl Iterator<Item = VirtualHandle> + use<'_> {
        self.handles.iter().copied()
    }

    /// Returns all allocations that importers fetch again.
    pub(super) fn fetched(&self) -> impl Iterator<Item = VirtualHandle> + use<'_> {
        let others = self.owed.iter().filter(|handle| find(&self.handles, **handle).is_err());
        self.handles().chain(others.copied())
    }
}

/// Finds the position in `handles`, which are in order, of `handle` or of another handle with the same index.
fn find(handles: &[VirtualHandle], handle: VirtualHandle) -> Result<usize, usize> {
    handles.binary_search_by_key(&handle.index(), |handle| handle.index())
}

fn is_in(handles: &[VirtualHandle], row: &Row) -> bool {
    find(handles, row.handle()).is_ok_and(|at| handles[at] == row.handle())
}

impl RowTable {
    /// Returns the rows that `selection` has now.
    pub(crate) fn choose(&self, selection: &Selection) -> Rows {
        let of = |choose: &dyn Fn(&Row) -> bool| {
            self.iter().filter(|row| choose(row)).map(Row::handle).collect()
        };
        Rows {
            handles: of(&|row| selection.has(row)),
            owed: of(&|row| row.sharing().is_owed_by_tag() && selection.brings_tag_of(row)),
        }
    }
}

impl Selection {
    pub(crate) fn has(&self, row: &Row) -> bool {
        let tag = &row.class().tag;
        match self {
            Self::Whole => !row.is_set_aside(),
            Self::Rest => row.is_resident() && !row.is_set_aside(),
            Self::Tagged(tags, whose) | Self::Standing(tags, whose) => {
                tags.has(tag) && whose.has(row)
            }
            Self::SetAside(tags, whose) => row.is_set_aside() && tags.has(tag) && whose.has(row),
            Self::Staged(tags) => (is_of_no_region(tag) && !row.is_set_aside()) || tags.has(tag),
        }
    }

    /// Is it a resume that restores the tag of `row`?
    fn brings_tag_of(&self, row: &Row) -> bool {
        let tag = &row.class().tag;
        match self {
            Self::SetAside(tags, whose) => tags.has(tag) && whose.has(row),
            Self::Staged(tags) => tags.has(tag),
            Self::Whole | Self::Rest | Self::Tagged(..) | Self::Standing(..) => false,
        }
    }

    /// Returns the state of a process after a pause of this selection.
    pub fn after_pause(&self) -> After {
        match self {
            Self::Tagged(..) => After::Running,
            Self::Whole
            | Self::Rest
            | Self::Standing(..)
            | Self::SetAside(..)
            | Self::Staged(_) => After::Paused,
        }
    }

    /// Returns the tags that this pause releases from a process that stands still, while it leaves all else. None for
    /// other selections.
    pub fn stands_without(&self) -> Option<&Tags> {
        match self {
            Self::Standing(tags, _) => Some(tags),
            Self::Whole | Self::Rest | Self::Tagged(..) | Self::SetAside(..) | Self::Staged(_) => {
                None
            }
        }
    }

    /// Does it select by tag, and not all that is not set aside?
    pub fn is_by_tag(&self) -> bool {
        match self {
            Self::Tagged(..) | Self::Standing(..) | Self::SetAside(..) | Self::Staged(_) => true,
            Self::Whole | Self::Rest => false,
        }
    }
}

impl Whose {
    fn has(&self, row: &Row) -> bool {
        match self {
            Self::Everybody => true,
            Self::Own => row.is_own(),
            Self::Owner(wanted) => row.owner() == Some(*wanted),
        }
    }
}
