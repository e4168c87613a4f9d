//! The memory of a tenant to pause or resume.
//!
//! Each process translates the scope into a selection of its pool. The selection stays the same from the first step to the
//! last, and to the undo.
//!
//! The memory that a pause by tag releases is *set aside*: its processes run on without it, and a whole pause and resume skip
//! it. If another process requests that pause and one process has not agreed, all processes stop instead, and the memory is as
//! after a whole pause. A resume by tag of a wholly paused process restores the memory without a tag and the memory of these
//! tags.
//!
//! An import belongs to its owner's tag, which arrives with the descriptor. A process that pauses its own tags acts alone,
//! unless a peer has imported some of that memory. Then all processes take part.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
pub use vmm_pool::LIBRARY_TAGS;
use vmm_pool::{Selection, Tags, Whose};

use crate::identity::{MemberId, TenantName};

/// The memory of a tenant to pause or resume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// All memory. The processes stop while it is released.
    #[default]
    Whole,
    /// The memory with these tags. A process runs on without it if it made the request itself, or has agreed.
    Tags {
        /// The tags of that memory.
        tags: TagNames,
        /// The process whose own memory is meant, wherever it was imported; none: every process's memory.
        owner: Option<MemberId>,
    },
}

/// The tag of NCCL's own memory. While some of it is released, calls into NCCL wait at the cut.
pub const NCCL_TAG: &str = LIBRARY_TAGS[0];

/// Tags, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum TagNames {
    /// Every tag of a region; for a resume, every tag there is.
    All,
    /// These.
    Named(BTreeSet<String>),
}

impl TagNames {
    /// Returns the tags whose memory a pause releases.
    pub fn to_pause(&self) -> Tags {
        match self {
            Self::All => Tags::Regions,
            Self::Named(_) => self.into(),
        }
    }

    /// Returns the tags whose memory a resume restores.
    pub fn to_resume(&self) -> Tags {
        self.into()
    }

    /// Are all of `others` among these tags?
    pub fn cover(&self, others: &Self) -> bool {
        match (self, others) {
            (Self::All, _) => true,
            (Self::Named(names), Self::Named(others)) => names.is_superset(others),
            (Self::Named(_), Self::All) => false,
        }
    }

    /// Returns whether NCCL's own memory is named, and the number of other named tags.
    pub fn names_nccl(&self) -> (bool, usize) {
        match self {
            Self::All => (false, 0),
            Self::Named(names) => {
                let is_named = names.contains(NCCL_TAG);
                (is_named, names.len() - usize::from(is_named))
            }
        }
    }
}

impl From<&Tags> for TagNames {
    fn from(tags: &Tags) -> Self {
        match tags {
            Tags::Named(names) => Self::Named(names.clone()),
            Tags::All | Tags::Regions => Self::All,
        }
    }
}

impl From<&TagNames> for Tags {
    fn from(names: &TagNames) -> Self {
        match names {
            TagNames::All => Self::All,
            TagNames::Named(names) => Self::Named(names.clone()),
        }
    }
}

impl Scope {
    /// The tags that the scope names, in order; none if it covers all of a tenant, or every tag.
    fn names(&self) -> Vec<&str> {
        match self {
            Self::Whole | Self::Tags { tags: TagNames::All, .. } => Vec::new(),
            Self::Tags { tags: TagNames::Named(names), .. } => {
                names.iter().map(String::as_str).collect()
            }
        }
    }

    /// Names the memory of `tenant` that the scope covers, in words.
    pub fn subject(&self, tenant: &TenantName) -> String {
        match (self, self.names().as_slice()) {
            (Self::Whole, _) => format!("tenant '{tenant}'"),
            (Self::Tags { .. }, []) => format!("all tagged memory of tenant '{tenant}'"),
            (Self::Tags { .. }, [one]) => format!("tag '{one}' of tenant '{tenant}'"),
            (Self::Tags { .. }, several) => {
                format!("tags '{}' of tenant '{tenant}'", several.join("', '"))
            }
        }
    }

    /// Does the scope cover memory with this tag? `tag` is empty for memory without one.
    pub fn names_tag(&self, tag: &str) -> bool {
        match self {
            Self::Whole => true,
            Self::Tags { tags: TagNames::All, .. } => !tag.is_empty(),
            Self::Tags { tags: TagNames::Named(names), .. } => names.contains(tag),
        }
    }

    /// Returns [`Scope::subject`] with a capital first letter, to begin a sentence.
    pub fn subject_first(&self, tenant: &TenantName) -> String {
        let subject = self.subject(tenant);
        let mut letters = subject.chars();
        letters
            .next()
            .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
    }

    /// Says that this memory of `tenant` is paused, and whether the rest runs, to begin a sentence.
    pub fn is_away(&self, tenant: &TenantName) -> String {
        let subject = self.subject_first(tenant);
        let runs = match self {
            Self::Whole => "",
            Self::Tags { .. } => ", and the tenant runs without that memory",
        };
        let are = if self.names().len() > 1 { "are" } else { "is" };
        format!("{subject} {are} paused with all contents{runs}")
    }

    /// The command that resumes this memory of `tenant`.
    pub fn resume_command(&self, tenant: &TenantName) -> String {
        let option = |name: &&str| if LIBRARY_TAGS.contains(name) { "library" } else { "tag" };
        let names = self.names();
        let tags: Vec<_> = names.iter().map(|name| format!(" --{} {name}", option(name))).collect();
        format!("sublet resume {tenant}{}", tags.concat())
    }

    /// The part of the scope that a pause releases in process `own`.
    pub fn paused(&self, own: MemberId) -> Selection {
        match self {
            Self::Whole => Selection::Whole,
            Self::Tags { tags, owner } => Selection::Tagged(tags.to_pause(), whose(*owner, own)),
        }
    }

    /// Does the scope cover own memory of process `id`?
    pub fn is_about(&self, id: MemberId) -> bool {
        match self {
            Self::Whole | Self::Tags { owner: None, .. } => true,
            Self::Tags { owner: Some(owner), .. } => *owner == id,
        }
    }
}

/// The memory of `owner`, or of every process, from the view of process `own`.
pub fn whose(owner: Option<MemberId>, own: MemberId) -> Whose {
    match owner {
        None => Whose::Everybody,
        Some(owner) if owner == own => Whose::Own,
        Some(owner) => Whose::Owner(owner.into()),
    }
}
