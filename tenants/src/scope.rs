//! Which memory of a tenant a pause or resume is about.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use vmm_pool::Tags;

use crate::identity::MemberId;

/// Which memory of a tenant a pause or resume is about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scope {
    /// All of it. The processes stand still while it is away.
    #[default]
    Whole,
    /// That of regions with these tags. The processes run on without it.
    Tags {
        /// Which tags.
        tags: TagNames,
        /// One process's own memory only, wherever it was imported; everybody's when not given.
        owner: Option<MemberId>,
    },
}

/// Tags of regions, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TagNames {
    /// Every tag there is.
    All,
    /// These.
    Named(BTreeSet<String>),
}

impl TagNames {
    /// Is `tag` one of them?
    pub fn has(&self, tag: &str) -> bool {
        Tags::from(self).has(tag)
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
    /// Is `id` one whose own memory this is about?
    pub fn is_about(&self, id: MemberId) -> bool {
        match self {
            Self::Whole | Self::Tags { owner: None, .. } => true,
            Self::Tags { owner: Some(owner), .. } => *owner == id,
        }
    }
}
