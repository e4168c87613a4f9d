//! What of a scope this process has; and its calls into NCCL, which wait at the cut while it runs on without NCCL's memory.
//!
//! They wait from the end of a pause that names NCCL to the end of the resume, also where NCCL had no memory at that
//! moment: what it allocates later would be there in spite of the pause.

use std::sync::atomic::Ordering;

use vmm_pool::driver::Driver;
use vmm_pool::{Aside, Away, Selection, Whose};

use super::Member;
use super::failures::wrong_state;
use crate::scope::{NCCL_TAG, Scope, whose};
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
    /// What of `scope` a pause takes from this process, which `stands` still meanwhile or not. One that stands still already gives the rest.
    pub(super) fn leaving_selection(&self, scope: &Scope, stands: bool) -> Selection {
        match scope {
            Scope::Whole if self.stood_without_tags() => Selection::Rest,
            Scope::Tags { tags, owner } if stands => {
                Selection::Standing(tags.to_pause(), whose(*owner, self.presence.id()))
            }
            Scope::Whole | Scope::Tags { .. } => scope.paused(self.presence.id()),
        }
    }

    /// Does it stand still without some tags, or did it when the pause under way began?
    pub(super) fn stood_without_tags(&self) -> bool {
        self.lifecycle.stands_without().is_some()
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
            ) => Resumed::Aside(Aside(tags.to_resume(), whose(*owner, self.presence.id()))),
        }
    }

    /// Refuses what would come back to this process alone, and is others' too: the caller may have looked before
    /// they came for it. Nobody comes while it is away.
    pub(super) fn refuse_shared(&self, scope: &Scope) -> Result<(), Failure> {
        let acts_alone = self.rounds().acts_alone();
        if acts_alone
            && self
                .pool
                .holdings()
                .is_shared(&self.resumed_selection(scope, self.lifecycle.state()))
        {
            let message = "other processes hold some of this memory, or may come for it: resume it in all of them together";
            return Err(Failure { kind: FailureKind::Shared, message: message.to_owned() });
        }
        Ok(())
    }
}

impl<D: Driver> Member<D> {
    /// `selection` has left or come back: lets calls into NCCL wait, or no longer.
    pub(super) fn nccl_follows(&self, selection: &Selection) {
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
            self.nccl_is_asked_away.store(is_away, Ordering::Relaxed);
        }
        let is_asked_away = self.nccl_is_asked_away.load(Ordering::Relaxed);
        self.cut.set_away(is_asked_away || self.pool.holdings().is_set_aside(NCCL_TAG));
    }

    /// Lets them through, whatever is away.
    pub(super) fn let_nccl_through(&self) {
        self.nccl_is_asked_away.store(false, Ordering::Relaxed);
        self.cut.set_away(false);
    }

    /// Refuses to take NCCL's memory from a process that runs on, where work that we do not hold back may need it.
    pub(super) fn refuse_unseen_nccl(&self, scope: &Scope) -> Result<(), Failure> {
        let Scope::Tags { tags, .. } = scope else { return Ok(()) };
        let (is_named, _) = tags.names_nccl();
        let Some(why) = (self.config.unseen_nccl)().filter(|_| is_named) else { return Ok(()) };
        let own = std::process::id();
        Err(wrong_state(format!(
            "NCCL's memory of process {own} cannot be paused alone: {why}; pause the whole tenant instead"
        )))
    }
}

/// Is this about the process's own memory, and not about another's only?
fn is_about_own(whose: &Whose) -> bool {
    match whose {
        Whose::Everybody | Whose::Own => true,
        Whose::Owner(_) => false,
    }
}
