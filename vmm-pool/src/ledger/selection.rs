//! Which memory a pause or resume is about.

use std::collections::{BTreeSet, HashSet};

use super::Row;
use crate::{PeerId, VirtualHandle};

/// Tags that libraries' own memory has by itself: its library sees to it that nobody touches it while it is away. No
/// region has them.
pub const LIBRARY_TAGS: [&str; 1] = ["nccl"];

/// Does memory of this tag, or of none, belong to no region?
fn is_of_no_region(tag: &str) -> bool {
    tag.is_empty() || LIBRARY_TAGS.contains(&tag)
}

/// Tags of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tags {
    /// Every tag. Memory outside any region has none, unless it is a library's.
    All,
    /// Every tag of a region.
    Regions,
    /// These.
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

/// Whose memory, as one process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Its own, and all that it has imported.
    Everybody,
    /// Its own.
    Own,
    /// What it has imported from this owner.
    Owner(PeerId),
}

/// Memory that one pause or resume moves; the same from its first step to its last.
///
/// Memory that a pause by tag has given up while the process runs on is *set aside*. A pause of everything
/// finds it gone and leaves it so, and the resume after it too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Selection {
    /// A whole pause or resume: everything but what is set aside.
    #[default]
    Whole,
    /// A pause by tag.
    Tagged(Tags, Whose),
    /// A resume by tag of a process that runs: what is set aside of these.
    SetAside(Tags, Whose),
    /// A resume by tag of a process that is wholly paused: what belongs to no region, and these tags.
    Staged(Tags),
    /// What one stage moves of a selection that moves by stages.
    Part(HashSet<VirtualHandle>),
}

impl Selection {
    pub(crate) fn has(&self, row: &Row) -> bool {
        let tag = &row.class().tag;
        match self {
            Self::Whole => !row.is_set_aside(),
            Self::Tagged(tags, whose) => tags.has(tag) && whose.has(row),
            Self::SetAside(tags, whose) => row.is_set_aside() && tags.has(tag) && whose.has(row),
            Self::Staged(tags) => (is_of_no_region(tag) && !row.is_set_aside()) || tags.has(tag),
            Self::Part(rows) => rows.contains(&row.handle()),
        }
    }

    /// Is it a resume that brings back the tag of `row`?
    pub(super) fn brings_tag_of(&self, row: &Row) -> bool {
        let tag = &row.class().tag;
        match self {
            Self::SetAside(tags, whose) => tags.has(tag) && whose.has(row),
            Self::Staged(tags) => tags.has(tag),
            Self::Whole | Self::Tagged(..) | Self::Part(_) => false,
        }
    }

    /// The allocations of a part, in the ledger's order.
    pub(super) fn part_in_order(&self) -> Option<Vec<VirtualHandle>> {
        let Self::Part(rows) = self else { return None };
        let mut rows: Vec<_> = rows.iter().copied().collect();
        rows.sort_unstable_by_key(|row| row.index());
        Some(rows)
    }

    /// Is it about tags, and not about all that is not set aside?
    pub(crate) fn is_by_tag(&self) -> bool {
        match self {
            Self::Tagged(..) | Self::SetAside(..) | Self::Staged(_) => true,
            Self::Whole | Self::Part(_) => false,
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
