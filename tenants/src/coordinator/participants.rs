//! Which members take part in a pause or resume: a pause takes those that are active, a resume those that are paused.
//! What a coordinator that has ended left half done is settled before.

use std::collections::BTreeSet;

use super::CoordinatorError;
use super::report::Event;
use super::session::Session;
use super::steps::OnFailure;
use crate::scope::{LIBRARY_TAGS, NCCL_TAG, Scope, TagNames};
use crate::wire::{Action, MemberState, Phase};

impl Session<'_> {
    pub(super) fn state(&self, index: usize) -> Option<MemberState> {
        self.peers.list[index].info.as_ref().map(|info| info.state)
    }

    /// The members that are in `state`.
    fn members_in(&self, state: MemberState) -> Vec<usize> {
        (0..self.peers.list.len()).filter(|index| self.state(*index) == Some(state)).collect()
    }

    /// Device memory that the pauses of members that are paused should have given back and have not.
    pub(super) fn stayed_bytes(&self) -> u64 {
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        infos.map(|info| info.stayed_bytes).fold(0, u64::saturating_add)
    }

    /// The members that `action` has something to do for; empty when there is nothing to be done. A resume
    /// without tags of a tenant that runs is one of all its tags.
    pub(super) fn members_for(&mut self, action: Action) -> Result<Vec<usize>, CoordinatorError> {
        self.refuse_unknown_tags()?;
        let active = self.members_in(MemberState::Active);
        let mut paused = self.members_in(MemberState::Paused);
        paused.extend(self.members_in(MemberState::Deep));
        if action == Action::Resume && paused.is_empty() && self.scope == Scope::Whole {
            self.scope = Scope::Tags { tags: TagNames::All, owner: None };
        }
        let members = match action {
            Action::Pause => active,
            Action::Resume if paused.is_empty() => active,
            Action::Resume => return Ok(paused),
        };
        let Scope::Tags { tags, .. } = &self.scope else {
            return Ok(members);
        };
        if action == Action::Pause && !paused.is_empty() {
            return Err(CoordinatorError::PausedAlready { tenant: self.tenant() });
        }
        let infos = || members.iter().filter_map(|index| self.peers.list[*index].info.as_ref());
        let rows = infos().flat_map(|info| info.tags.iter().map(|row| (info.id, row)));
        let tags = match action {
            Action::Pause => tags.to_pause(),
            Action::Resume => tags.to_resume(),
        };
        let bytes = rows.filter(|(_, row)| tags.has(&row.tag)).map(|(id, row)| {
            match (action, self.scope.is_about(id)) {
                (Action::Pause, true) => row.resident_bytes,
                (Action::Pause, false) => 0,
                // What others have imported may be away where the owner's own memory is not.
                (Action::Resume, true) => row.away_bytes + row.imported_away_bytes,
                (Action::Resume, false) => row.imported_away_bytes,
            }
        });
        // Calls into NCCL wait as requested, whether or not it has memory to give.
        let nccl_waits = action == Action::Pause;
        let is_nccl_as_asked = !tags.has(NCCL_TAG)
            || infos()
                .filter(|info| self.scope.is_about(info.id))
                .all(|info| info.nccl_waits == nccl_waits);
        let is_nothing_to_do = bytes.sum::<u64>() == 0 && is_nccl_as_asked;
        Ok(if is_nothing_to_do { Vec::new() } else { members })
    }

    /// What a pause of the scope takes of `members` now, so that a resume of it brings nothing back that was away before.
    pub(super) fn resident_part(&self, members: &[usize]) -> Scope {
        let Scope::Tags { tags, owner } = &self.scope else { return Scope::Whole };
        let infos = || members.iter().filter_map(|index| self.peers.list[*index].info.as_ref());
        let leaves = tags.to_pause();
        let rows = infos().flat_map(|info| &info.tags);
        let resident = rows.filter(|row| row.resident_bytes > 0 && leaves.has(&row.tag));
        let mut names: BTreeSet<String> = resident.map(|row| row.tag.clone()).collect();
        // Its calls are let through again where they were before.
        if leaves.has(NCCL_TAG) && infos().any(|info| !info.nccl_waits) {
            names.insert(NCCL_TAG.to_owned());
        }
        Scope::Tags { tags: TagNames::Named(names), owner: *owner }
    }

    /// Does this member run, so that what comes back to it comes by tag?
    pub(super) fn runs(&self, index: usize) -> bool {
        self.state(index) == Some(MemberState::Active)
    }

    fn refuse_unknown_tags(&self) -> Result<(), CoordinatorError> {
        let Scope::Tags { tags: TagNames::Named(wanted), .. } = &self.scope else {
            return Ok(());
        };
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        let known: BTreeSet<String> =
            infos.flat_map(|info| &info.tags).map(|row| row.tag.clone()).collect();
        let mut unknown: Vec<String> = wanted.difference(&known).cloned().collect();
        // A library's may come to be at any time.
        unknown.retain(|tag| !LIBRARY_TAGS.contains(&tag.as_str()));
        if unknown.is_empty() {
            return Ok(());
        }
        let known = known.into_iter().collect();
        Err(CoordinatorError::UnknownTags { tenant: self.tenant(), unknown, known })
    }

    /// Has every member that a dead coordinator left half-way finish or undo its part, so that every member
    /// is active or paused. They agree among themselves which way ([`Phase::Settle`]).
    pub(super) fn recover(&mut self) -> Result<(), CoordinatorError> {
        let is_half_way = |index: &usize| match &self.peers.list[*index].info {
            Some(info) => match info.state {
                MemberState::Offloading | MemberState::Restoring => true,
                MemberState::Active => info.held,
                MemberState::Paused | MemberState::Deep | MemberState::Faulted => false,
            },
            None => false,
        };
        let half_way: Vec<usize> = (0..self.peers.list.len()).filter(is_half_way).collect();
        if half_way.is_empty() {
            return self.refuse_faulted();
        }
        for index in &half_way {
            let who = self.peers.list[*index].who;
            (self.progress)(Event::Recovering { who });
        }
        let result = self.phase_step(Phase::Settle, &half_way, OnFailure::WaitForAll);
        // One that ended meanwhile is left half-way no more.
        let mut failures = result.failures;
        failures.retain(|(index, _)| !self.is_dead(*index));
        if !failures.is_empty() {
            return Err(CoordinatorError::Unrecovered {
                tenant: self.tenant(),
                failures: failures.into_iter().map(|(_, failure)| failure).collect(),
            });
        }
        self.peers.drop_ended();
        self.greet()?;
        self.refuse_faulted()
    }

    fn refuse_faulted(&self) -> Result<(), CoordinatorError> {
        let infos = self.peers.list.iter().filter_map(|peer| peer.info.as_ref());
        for info in infos {
            match info.state {
                MemberState::Faulted => {
                    return Err(CoordinatorError::Faulted { tenant: self.tenant(), pid: info.pid });
                }
                MemberState::Active
                | MemberState::Paused
                | MemberState::Deep
                | MemberState::Offloading
                | MemberState::Restoring => {}
            }
        }
        Ok(())
    }
}
