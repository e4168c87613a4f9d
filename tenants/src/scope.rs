//! Which memory of a tenant a pause or resume is about, and what of it one process has.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use vmm_pool::driver::Driver;
use vmm_pool::{Selection, Tags, Whose};

use crate::identity::MemberId;
use crate::member::Member;
use crate::wire::MemberState;

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

impl<D: Driver> Member<D> {
    /// What of `scope` a pause takes from this process.
    pub fn paused_selection(&self, scope: &Scope) -> Selection {
        match scope {
            Scope::Whole => Selection::Whole,
            Scope::Tags { tags, owner } => Selection::Tagged(tags.into(), self.whose(*owner)),
        }
    }

    /// What of `scope` a resume brings back to this process in `state`.
    pub(crate) fn resumed_selection(&self, scope: &Scope, state: MemberState) -> Selection {
        match (scope, state) {
            (Scope::Whole, _) => Selection::Whole,
            (Scope::Tags { tags, .. }, MemberState::Paused) => Selection::Staged(tags.into()),
            (
                Scope::Tags { tags, owner },
                MemberState::Active
                | MemberState::Offloading
                | MemberState::Restoring
                | MemberState::Faulted,
            ) => Selection::SetAside(tags.into(), self.whose(*owner)),
        }
    }

    fn whose(&self, owner: Option<MemberId>) -> Whose {
        match owner {
            None => Whose::Everybody,
            Some(owner) if owner == self.id() => Whose::Own,
            Some(owner) => Whose::Owner(owner.into()),
        }
    }
}
