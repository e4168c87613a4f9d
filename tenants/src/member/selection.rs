//! What of a scope this process has.

use vmm_pool::driver::Driver;
use vmm_pool::{Aside, Away, Selection, Whose};

use super::Member;
use crate::identity::MemberId;
use crate::scope::Scope;
use crate::state::MemberState;
use crate::wire::{Failure, FailureKind};

/// What a resume brings back, by whether the process runs.
pub(super) enum Resumed {
    /// It does.
    Aside(Aside),
    /// Its memory is away.
    Away(Away),
}

impl<D: Driver> Member<D> {
    /// What of `scope` a pause takes from this process.
    pub fn paused_selection(&self, scope: &Scope) -> Selection {
        match scope {
            Scope::Whole => Selection::Whole,
            Scope::Tags { tags, owner } => Selection::Tagged(tags.to_pause(), self.whose(*owner)),
        }
    }

    /// What of `scope` a resume brings back to this process in `state`.
    pub(super) fn resumed_selection(&self, scope: &Scope, state: MemberState) -> Selection {
        match self.resumed(scope, state) {
            Resumed::Aside(aside) => aside.into(),
            Resumed::Away(away) => away.into(),
        }
    }

    pub(super) fn resumed(&self, scope: &Scope, state: MemberState) -> Resumed {
        match (scope, state) {
            (Scope::Whole, _) => Resumed::Away(Away::Whole),
            (Scope::Tags { tags, .. }, MemberState::Paused) => {
                Resumed::Away(Away::Staged(tags.to_resume()))
            }
            (
                Scope::Tags { tags, owner },
                MemberState::Active
                | MemberState::Offloading
                | MemberState::Deep
                | MemberState::Restoring
                | MemberState::Faulted,
            ) => Resumed::Aside(Aside(tags.to_resume(), self.whose(*owner))),
        }
    }

    /// Refuses what would come back to this process alone, and is others' too: the caller may have looked before
    /// they came for it. Nobody comes while it is away.
    pub(super) fn refuse_shared(&self, scope: &Scope) -> Result<(), Failure> {
        let acts_alone = self.status().rounds.acts_alone();
        if acts_alone && self.pool.is_shared(&self.resumed_selection(scope, self.state())) {
            let message = "other processes hold some of this memory, or may come for it: resume it in all of them together";
            return Err(Failure { kind: FailureKind::Shared, message: message.to_owned() });
        }
        Ok(())
    }

    fn whose(&self, owner: Option<MemberId>) -> Whose {
        match owner {
            None => Whose::Everybody,
            Some(owner) if owner == self.id() => Whose::Own,
            Some(owner) => Whose::Owner(owner.into()),
        }
    }
}
