//! Which memory a pause or resume is about.

use std::collections::BTreeSet;

use super::Row;
use crate::PeerId;

/// Tags of regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tags {
    /// Every tag. Memory outside any region has none.
    All,
    /// These.
    Named(BTreeSet<String>),
}

impl Tags {
    /// Is `tag` one of them? Memory without a tag (an empty one) never is.
    pub fn has(&self, tag: &str) -> bool {
        match self {
            Self::All => !tag.is_empty(),
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
    /// A resume by tag of a process that is wholly paused: what has no tag, and these tags.
    Staged(Tags),
}

impl Selection {
    pub(crate) fn has(&self, row: &Row) -> bool {
        let tag = &row.class().tag;
        match self {
            Self::Whole => !row.is_set_aside(),
            Self::Tagged(tags, whose) => tags.has(tag) && whose.has(row),
            Self::SetAside(tags, whose) => row.is_set_aside() && tags.has(tag) && whose.has(row),
            Self::Staged(tags) => tag.is_empty() || tags.has(tag),
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
