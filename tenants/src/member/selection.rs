//! What of a scope this process has.

use vmm_pool::driver::Driver;
use vmm_pool::{Selection, Whose};

use super::Member;
use crate::identity::MemberId;
use crate::scope::Scope;
use crate::state::MemberState;

impl<D: Driver> Member<D> {
    /// What of `scope` a pause takes from this process.
    pub fn paused_selection(&self, scope: &Scope) -> Selection {
        match scope {
            Scope::Whole => Selection::Whole,
            Scope::Tags { tags, owner } => Selection::Tagged(tags.to_pause(), self.whose(*owner)),
        }
    }

    /// What of `scope` a resume brings back to this process in `state`.
    pub(crate) fn resumed_selection(&self, scope: &Scope, state: MemberState) -> Selection {
        match (scope, state) {
            (Scope::Whole, _) => Selection::Whole,
            (Scope::Tags { tags, .. }, MemberState::Paused) => Selection::Staged(tags.to_resume()),
            (
                Scope::Tags { tags, owner },
                MemberState::Active
                | MemberState::Offloading
                | MemberState::Restoring
                | MemberState::Faulted,
            ) => Selection::SetAside(tags.to_resume(), self.whose(*owner)),
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
