//! A process that runs on without NCCL's memory: its calls into NCCL wait at the cut.
//!
//! They wait from the end of a pause that names NCCL to the end of the resume, also where NCCL had no memory at that
//! moment: what it allocates later would be there in spite of the pause.

use vmm_pool::driver::Driver;
use vmm_pool::{Selection, Whose};

use super::Member;
use super::failures::wrong_state;
use crate::scope::{NCCL_TAG, Scope};
use crate::wire::Failure;

impl<D: Driver> Member<D> {
    /// `selection` has left or come back: lets calls into NCCL wait, or no longer.
    pub(super) fn nccl_follows(&self, selection: &Selection) {
        let asked = match selection {
            Selection::Tagged(tags, whose) if is_about_own(whose) => Some((tags, true)),
            Selection::SetAside(tags, whose) if is_about_own(whose) => Some((tags, false)),
            Selection::Staged(tags) => Some((tags, false)),
            Selection::Whole | Selection::Tagged(..) | Selection::SetAside(..) => None,
        };
        let is_asked_away = {
            let mut status = self.status();
            if let Some((_, is_away)) = asked.filter(|(tags, _)| tags.has(NCCL_TAG)) {
                status.nccl_is_asked_away = is_away;
            }
            status.nccl_is_asked_away
        };
        self.cut.set_away(is_asked_away || self.pool.is_set_aside(NCCL_TAG));
    }

    /// Lets them through, whatever is away.
    pub(super) fn let_nccl_through(&self) {
        self.status().nccl_is_asked_away = false;
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
