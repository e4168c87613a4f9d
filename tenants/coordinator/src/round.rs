//! One pause or resume: its memory, its members, and its orders to them.
//!
//! A pause acts on the active members, a resume on the paused ones.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_pool::PinnedBytes;

use super::agreement::{Agreed, refuse_missing};
use super::cast::Cast;
use super::lending::Loans;
use super::options::{LostImports, Meanwhile, Options, TakesPart};
use super::peers::Peers;
use super::trouble::Trouble;
use sublet_protocol::phase::{Stage, Told};
use sublet_protocol::scope::{LIBRARY_TAGS, NCCL_TAG, Scope, TagNames};
use sublet_protocol::time::millis;
use sublet_protocol::wire::{Action, MemberState, Order, Phase, TagBytes, TakePhase};

/// One pause or resume, as its coordinator leads it.
#[derive(Debug)]
pub struct Round<'a> {
    options: &'a Options,
    action: Action,
    /// The number that tells the round from others.
    pub(super) number: u64,
    /// The memory to pause or resume.
    scope: Scope,
    /// Are all processes stopped while a pause by tag lasts?
    pub(super) stands: bool,
    /// Does another tenant use the memory of this one meanwhile, or release its own for it?
    pub(super) overlaps: bool,
    /// The decision that all processes follow.
    pub(super) agreed: Agreed,
}

impl<'a> Round<'a> {
    /// Makes the round of `action` from `options`. Nothing is sent yet.
    pub(super) fn new(options: &'a Options, action: Action) -> Self {
        let (number, scope, agreed) = (new_number(), options.scope.clone(), Agreed::default());
        Self { options, action, number, scope, stands: false, overlaps: false, agreed }
    }

    pub(super) fn action(&self) -> Action {
        self.action
    }

    /// The memory to pause or resume.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Records that another tenant moves its memory meanwhile.
    pub fn overlap(&mut self) {
        self.overlaps = true;
    }

    /// Begins a new pause or resume with another number, after all that was done is undone.
    pub(super) fn begin_again(&mut self) {
        self.number = new_number();
    }

    /// Does no process but one take part?
    pub(super) fn acts_alone(&self) -> bool {
        self.options.takes_part != TakesPart::Everybody
    }

    /// Is this a pause that takes contexts too?
    pub(super) fn is_deep(&self) -> bool {
        self.action == Action::Pause && self.options.is_deep
    }

    /// The phases that can be undone. If another tenant moves its memory meanwhile, memory is created window by window, as soon
    /// as there is room for it.
    pub(super) fn prepares(&self) -> impl Iterator<Item = Phase> + use<> {
        let overlaps = self.overlaps;
        let phases = self.action.phases(Stage::Prepare);
        phases.filter(move |phase| !(overlaps && *phase == Phase::Create))
    }

    /// The values for the round's orders.
    pub fn told(&self) -> Told<'_> {
        Told {
            copies: self.agreed.copies,
            schedule: self.agreed.schedule,
            is_deep: self.is_deep(),
            stands: self.stands,
            without_lost: self.options.lost_imports == LostImports::LeaveOut,
            ..Told::new(&self.scope, &self.agreed.stays)
        }
    }

    /// Makes `phase` a part of this pause or resume.
    pub fn question(&self, phase: Phase) -> TakePhase {
        self.order(phase.order(&self.told()), millis(self.options.phase_timeout(phase)))
    }

    /// Makes `order` a part of this pause or resume.
    pub fn order(&self, order: Order, timeout_ms: u64) -> TakePhase {
        TakePhase { round: self.number, alone: self.acts_alone(), order, timeout_ms }
    }

    /// Device memory that the pause of the whole tenant has left. A pause by tag does not cover that memory.
    pub(super) fn stays(&self, peers: &Peers) -> Vec<PinnedBytes> {
        let mut stays = Vec::new();
        if self.scope == Scope::Whole {
            peers.infos().for_each(|info| PinnedBytes::merge(&mut stays, &info.stays));
        }
        stays
    }

    /// The members for which the round has work; empty if there is none. A resume without tags, of a tenant that runs, is a
    /// resume of all its tags.
    pub(super) fn members(&mut self, cast: &mut Cast<'_>) -> Result<Vec<usize>, Trouble> {
        let action = self.action;
        self.refuse_unknown_tags(cast)?;
        let active = cast.peers.those(|info| info.state == MemberState::Active);
        let mut paused = cast.peers.those(|info| info.state == MemberState::Paused);
        paused.extend(cast.peers.those(|info| info.state == MemberState::Deep));
        if action == Action::Resume && paused.is_empty() && self.scope == Scope::Whole {
            self.scope = Scope::Tags { tags: TagNames::All, owner: None };
        }
        if let Some(without) = cast.peers.stands_without() {
            match (action, &self.scope) {
                (Action::Pause, Scope::Tags { tags, .. }) if without.cover(tags) => {
                    return Ok(Vec::new());
                }
                (Action::Resume, Scope::Tags { tags, .. }) if tags.cover(&without) => {}
                (Action::Resume, Scope::Whole) => {}
                // The pause of the rest of the memory.
                (Action::Pause, Scope::Whole) => {
                    let standing = cast.peers.standing();
                    return Ok(active.into_iter().chain(standing).collect());
                }
                (Action::Pause | Action::Resume, _) => refuse_standing(cast)?,
            }
        }
        let members = match action {
            Action::Pause => active,
            Action::Resume if paused.is_empty() => active,
            Action::Resume => {
                self.refuse_without_partners(cast, &paused)?;
                return Ok(paused);
            }
        };
        let Scope::Tags { tags, .. } = &self.scope else {
            return Ok(members);
        };
        if action == Action::Pause && !paused.is_empty() {
            return Err(Trouble::PausedAlready { tenant: cast.tenant() });
        }
        let infos = || members.iter().filter_map(|index| cast.peers.info(*index));
        let rows = infos().flat_map(|info| info.tags.iter().map(|row| (info.id, row)));
        let tags = match action {
            Action::Pause => tags.to_pause(),
            Action::Resume => tags.to_resume(),
        };
        let bytes = rows.filter(|(_, row)| tags.has(&row.tag)).map(|(id, row)| {
            match (action, self.scope.is_about(id)) {
                (Action::Pause, true) => row.resident_bytes,
                (Action::Pause, false) => 0,
                // Imports by others may be released while the owner's own memory is not.
                (Action::Resume, true) => row.away_bytes + row.imported_away_bytes,
                (Action::Resume, false) => row.imported_away_bytes,
            }
        });
        // Calls into NCCL wait as requested, even if NCCL has no memory to release.
        let nccl_waits = action == Action::Pause;
        let is_nccl_as_asked = !tags.has(NCCL_TAG)
            || infos()
                .filter(|info| self.scope.is_about(info.id))
                .all(|info| info.nccl_waits == nccl_waits);
        let is_nothing_to_do = bytes.sum::<u64>() == 0 && is_nccl_as_asked;
        let has_agreed = |row: &TagBytes| row.resident_bytes == 0 || row.runs_without;
        let mut leaving = infos().flat_map(|info| &info.tags).filter(|row| tags.has(&row.tag));
        let stands = action == Action::Pause
            && self.options.meanwhile == Meanwhile::AsAgreed
            && !leaving.all(has_agreed);
        self.stands = stands;
        if is_nothing_to_do {
            return Ok(Vec::new());
        }
        if action == Action::Resume {
            self.refuse_without_partners(cast, &members)?;
        }
        Ok(members)
    }

    /// Refuses, before anything is created, if a process that shares memory with others is missing. Memory that its owner has
    /// freed meanwhile is created for the processes that hold it, and released when all have it. Without one of them that
    /// memory would be lost.
    fn refuse_without_partners(
        &self,
        cast: &mut Cast<'_>,
        members: &[usize],
    ) -> Result<(), Trouble> {
        if self.acts_alone() {
            return Ok(());
        }
        let partners = Loans::new(cast, &self.scope, members).partners();
        let found = partners.and_then(|partners| refuse_missing(&cast.peers, partners.iter()));
        found.map_err(|failures| {
            let runs = members.first().is_some_and(|index| cast.peers.runs(*index));
            Trouble::refused(cast.tenant(), (Action::Resume, runs), failures)
        })
    }

    fn refuse_unknown_tags(&self, cast: &Cast<'_>) -> Result<(), Trouble> {
        let Scope::Tags { tags: TagNames::Named(wanted), .. } = &self.scope else {
            return Ok(());
        };
        let rows = cast.peers.infos().flat_map(|info| &info.tags);
        let known: BTreeSet<String> = rows.map(|row| row.tag.clone()).collect();
        let mut unknown: Vec<String> = wanted.difference(&known).cloned().collect();
        // A library may begin to use its tag at any time.
        unknown.retain(|tag| !LIBRARY_TAGS.contains(&tag.as_str()));
        if unknown.is_empty() {
            return Ok(());
        }
        let known = known.into_iter().collect();
        Err(Trouble::UnknownTags { tenant: cast.tenant(), unknown, known })
    }

    /// The part of the scope that is resident in `members` now. A later resume of this part restores no memory that was
    /// released before.
    pub fn resident_part(&self, peers: &Peers, members: &[usize]) -> Scope {
        let Scope::Tags { tags, owner } = &self.scope else { return Scope::Whole };
        let infos = || members.iter().filter_map(|index| peers.info(*index));
        let leaves = tags.to_pause();
        let rows = infos().flat_map(|info| &info.tags);
        let resident = rows.filter(|row| row.resident_bytes > 0 && leaves.has(&row.tag));
        let mut names: BTreeSet<String> = resident.map(|row| row.tag.clone()).collect();
        // NCCL's calls are let through again only if they were before.
        if leaves.has(NCCL_TAG) && infos().any(|info| !info.nccl_waits) {
            names.insert(NCCL_TAG.to_owned());
        }
        Scope::Tags { tags: TagNames::Named(names), owner: *owner }
    }
}

/// Refuses an action that would end a pause by tag in which members are stopped, or change it.
///
/// # Errors
/// [`Trouble::StandsStill`].
pub fn refuse_standing(cast: &Cast<'_>) -> Result<(), Trouble> {
    let Some(tags) = cast.peers.stands_without() else { return Ok(()) };
    let tenant = cast.tenant();
    let what = Scope::Tags { tags, owner: None }.subject(&tenant);
    Err(Trouble::StandsStill { tenant, what })
}

/// Returns a number that no other pause or resume has.
fn new_number() -> u64 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let counted = || {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        (u64::from(std::process::id()) << 32) | u64::from(count)
    };
    getrandom::u64().unwrap_or_else(|_| counted())
}
