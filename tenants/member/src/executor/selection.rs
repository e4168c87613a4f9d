//! The part of a scope that this process has. Also the process's calls into NCCL, which wait at the cut while the process runs
//! on without NCCL's memory.
//!
//! These calls wait from the end of a pause that names NCCL to the end of the resume, even if NCCL had no memory at that
//! moment. Otherwise NCCL would allocate memory later in spite of the pause.

use vmm_pool::driver::Driver;
use vmm_pool::{Aside, Away, Selection, Whose};

use super::Executor;
use sublet_protocol::scope::{NCCL_TAG, Scope, whose};
use sublet_protocol::state::MemberState;
use sublet_protocol::wire::{Failure, FailureKind};

/// Memory that a resume restores, by whether the process runs.
pub(super) enum Resumed {
    /// The process runs.
    Aside(Aside),
    /// The process's memory is released.
    Away(Away),
}

impl From<Resumed> for Selection {
    fn from(resumed: Resumed) -> Self {
        match resumed {
            Resumed::Aside(aside) => aside.into(),
            Resumed::Away(away) => away.into(),
        }
    }
}

impl<D: Driver> Executor<D> {
    /// The part of `scope` that a pause releases in this process. `stands` says whether the process stops meanwhile. A process
    /// that is stopped already releases the rest.
    pub(super) fn leaving(&self, scope: &Scope, stands: bool) -> Selection {
        let own = self.member.presence.id();
        match scope {
            Scope::Whole if self.stood_without_tags() => Selection::Rest,
            Scope::Tags { tags, owner } if stands => {
                Selection::Standing(tags.to_pause(), whose(*owner, own))
            }
            Scope::Whole | Scope::Tags { .. } => scope.paused(own),
        }
    }

    /// Is the process stopped without some tags, or was it when the pause under way began?
    pub(super) fn stood_without_tags(&self) -> bool {
        self.lifecycle.stands_without().is_some()
    }

    /// The part of `scope` that a resume restores in this process now.
    pub(super) fn resumed(&self, scope: &Scope) -> Resumed {
        match (scope, self.lifecycle.state()) {
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
            ) => {
                let whose = whose(*owner, self.member.presence.id());
                Resumed::Aside(Aside(tags.to_resume(), whose))
            }
        }
    }

    /// Refuses a resume of this process alone if the memory is others' too. The caller may have looked before the others
    /// imported it. No process imports it while it is released.
    pub(super) fn refuse_shared(&self, scope: &Scope) -> Result<(), Failure> {
        let acts_alone = self.member.rounds().acts_alone();
        if acts_alone && self.pool.holdings().is_shared(&self.resumed(scope).into()) {
            let message = "other processes hold some of this memory, or may come for it: resume it in all of them together";
            return Err(Failure { kind: FailureKind::Shared, message: message.to_owned() });
        }
        Ok(())
    }

    /// Makes calls into NCCL wait after `selection` was released, or lets them through after it was restored.
    pub(super) fn nccl_follows(&mut self, selection: &Selection) {
        let asked = match selection {
            Selection::Tagged(tags, whose) if is_about_own(whose) => Some((tags, true)),
            Selection::SetAside(tags, whose) if is_about_own(whose) => Some((tags, false)),
            Selection::Staged(tags) => Some((tags, false)),
            Selection::Whole
            | Selection::Rest
            | Selection::Tagged(..)
            | Selection::Standing(..)
            | Selection::SetAside(..) => None,
        };
        if let Some((_, is_away)) = asked.filter(|(tags, _)| tags.has(NCCL_TAG)) {
            self.nccl_is_asked_away = is_away;
        }
        let is_set_aside = || self.pool.holdings().is_set_aside(NCCL_TAG);
        self.member.cut.set_away(self.nccl_is_asked_away || is_set_aside());
    }

    /// Lets calls into NCCL through, whatever is released.
    pub(super) fn let_nccl_through(&mut self) {
        self.nccl_is_asked_away = false;
        self.member.cut.set_away(false);
    }
}

/// Does the selection include the process's own memory, and not only another's?
fn is_about_own(whose: &Whose) -> bool {
    match whose {
        Whose::Everybody | Whose::Own => true,
        Whose::Owner(_) => false,
    }
}
