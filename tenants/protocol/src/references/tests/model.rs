//! A model of one allocation that three processes share: its owner, a process that has imported it, and one that joins.
//!
//! Every possible event happens here in every order: writes, pins, redeemed tickets, frees on any side, also while the memory
//! is released. Names of sockets are removed and made. Pauses of everything and by tag go step by step in each process. A step
//! fails, a process dies, a coordinator ends. The product's code itself decides which memory stays in a pause ([`decide`]).

mod events;
mod names;

use std::collections::BTreeSet;

use vmm_pool::{AllocationId, Shareable, StayReason};

use super::{References, decide};
use crate::identity::MemberId;

pub(super) use events::Event;

/// The process that creates the memory.
pub(super) const OWNER: usize = 0;
/// The process that is in the tenant from the start.
pub(super) const IMPORTER: usize = 1;
/// The process that may join at any time.
pub(super) const NEWCOMER: usize = 2;
pub(super) const ALL: [usize; 3] = [OWNER, IMPORTER, NEWCOMER];

const ID: AllocationId = AllocationId([1; 16]);

/// The state of the allocation in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Memory {
    /// No row in the process's table.
    None,
    /// The physical memory of this number.
    Resident(u8),
    /// A row without memory.
    Away,
    /// A row whose memory, as the process knows, cannot be restored.
    Lost,
}

/// The progress of a process in a pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Stage {
    Runs,
    Shut,
    Drained,
    Saved,
    Paused,
    Created,
    Imported,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, and all combinations are meant"
)]
pub(super) struct Process {
    pub(super) is_member: bool,
    pub(super) lives: bool,
    /// Has its socket a name, by which commands and others find it?
    is_named: bool,
    pub(super) stage: Stage,
    pub(super) memory: Memory,
    /// Does its application hold the memory?
    pub(super) is_held: bool,
    pinned: bool,
    stays: bool,
    frozen: bool,
    /// The report of the last step, once the coordinator has it.
    said: Option<Said>,
    /// Has the resume in progress restored its memory? An undo of the resume releases that memory again.
    restored: bool,
}

/// The part of [`References`] that concerns one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Said {
    given: bool,
    taken: bool,
    pinned: bool,
    /// The processes with which it shares the memory, except for dead ones.
    partners: [bool; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    Close,
    Drain,
    Save,
    Release,
    Create,
    Import,
    Activate,
    UndoPause,
    UndoResume,
}

/// The pause or resume under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Action {
    step: Step,
    /// The processes that take part.
    members: [bool; 3],
    /// The processes that were found, whether they take part or not.
    found: [bool; 3],
    /// The processes that have done the step.
    done: [bool; 3],
    by_tag: bool,
    without_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) processes: [Process; 3],
    /// The value that each physical memory holds, by its number.
    values: [u8; 10],
    made: u8,
    /// The value that was written last.
    written: u8,
    /// The owner's knowledge: possible importers, processes that have fetched the memory again, an open ticket, saved contents.
    importers: [bool; 3],
    fetched: Option<[bool; 3]>,
    ticket: bool,
    saved: Option<u8>,
    pub(super) action: Option<Action>,
    /// The events that may still happen.
    pub(super) left: Left,
    /// Did the owner save memory that the decision counted as without an owner?
    pub(super) disowned: bool,
}

/// The number of times that each kind of event may still happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Left {
    pub(super) pauses: u8,
    pub(super) writes: u8,
    pub(super) pins: u8,
    pub(super) failures: u8,
    pub(super) deaths: u8,
    pub(super) names: u8,
}

impl State {
    pub(super) fn new(left: Left) -> Self {
        let process = |is_member, memory, is_held| Process {
            is_member,
            lives: true,
            is_named: true,
            stage: Stage::Runs,
            memory,
            is_held,
            pinned: false,
            stays: false,
            frozen: false,
            said: None,
            restored: false,
        };
        Self {
            processes: [
                process(true, Memory::Resident(0), true),
                process(true, Memory::None, false),
                process(false, Memory::None, false),
            ],
            values: [0; 10],
            made: 1,
            written: 0,
            importers: [false; 3],
            fetched: None,
            ticket: false,
            saved: None,
            action: None,
            left,
            disowned: false,
        }
    }

    fn is_in(&self, who: usize) -> bool {
        self.processes[who].is_member && self.processes[who].lives
    }

    fn runs(&self, who: usize) -> bool {
        self.is_in(who) && self.processes[who].stage == Stage::Runs
    }

    /// The number of the memory that `who` can use now.
    pub(super) fn usable(&self, who: usize) -> Option<u8> {
        match self.processes[who].memory {
            Memory::Resident(number) if self.runs(who) => Some(number),
            Memory::Resident(_) | Memory::None | Memory::Away | Memory::Lost => None,
        }
    }

    pub(super) fn value_of(&self, number: u8) -> u8 {
        self.values[usize::from(number)]
    }

    pub(super) fn written(&self) -> u8 {
        self.written
    }

    fn some_are(&self, stage: Stage) -> bool {
        ALL.into_iter().any(|who| self.is_in(who) && self.processes[who].stage == stage)
    }

    /// Is there memory to restore?
    pub(super) fn needs_resume(&self) -> bool {
        let is_away = |who| self.is_in(who) && self.processes[who].memory == Memory::Away;
        self.some_are(Stage::Paused) || ALL.into_iter().any(is_away)
    }

    fn go_back(&mut self) {
        let Some(action) = &mut self.action else {
            return;
        };
        let undo = match action.step {
            Step::Close | Step::Drain | Step::Save => Step::UndoPause,
            Step::Create | Step::Import => Step::UndoResume,
            // If one of these steps fails, the next command does it, or the process alone.
            Step::Release | Step::Activate | Step::UndoPause | Step::UndoResume => return,
        };
        action.step = undo;
        action.done = [false; 3];
    }

    fn do_step(&mut self, who: usize) {
        let Some(action) = self.action.clone() else {
            return;
        };
        let done = match action.step {
            Step::Close => {
                self.processes[who].stage = Stage::Shut;
                true
            }
            Step::Drain => {
                self.drain(who);
                true
            }
            Step::Save => self.save(who),
            Step::Release => {
                self.release(who, action.by_tag);
                true
            }
            Step::Create => {
                self.create(who);
                true
            }
            Step::Import => self.import(who, action.without_lost),
            Step::Activate => {
                self.activate(who);
                true
            }
            Step::UndoPause => {
                self.undo_pause(who);
                true
            }
            Step::UndoResume => {
                self.undo_resume(who, action.by_tag);
                true
            }
        };
        if !done {
            self.go_back();
        } else if let Some(action) = &mut self.action {
            action.done[who] = true;
        }
    }

    fn drain(&mut self, who: usize) {
        let is_shared = self.importers.contains(&true) || self.ticket;
        let partners = self.partners(who);
        let process = &mut self.processes[who];
        process.stage = Stage::Drained;
        process.frozen = true;
        let is_there = matches!(process.memory, Memory::Resident(_));
        process.said = Some(Said {
            given: who == OWNER && process.memory != Memory::None && is_shared,
            taken: who != OWNER && is_there,
            pinned: process.pinned,
            partners,
        });
    }

    /// Returns the coordinator's decision from all reports.
    fn decision(&self, members: [bool; 3]) -> Option<StayReason> {
        let name = |who: usize| MemberId(who as u64);
        let said = |who: usize| self.processes[who].said.filter(|_| members[who]);
        let references = ALL.map(|who| {
            let held = |said: Said| Shareable { id: ID, is_pinned: said.pinned };
            let given = said(who).filter(|said| said.given).map(held).into_iter().collect();
            let taken = said(who).filter(|said| said.taken).map(held);
            let taken = taken.map(|held| (name(OWNER), vec![held])).into_iter().collect();
            References { given, taken, ..References::default() }
        });
        let take_part: Vec<_> = ALL
            .into_iter()
            .filter(|who| members[*who])
            .map(|who| (name(who), &references[who]))
            .collect();
        let apart = ALL.into_iter().filter(|who| self.is_found(*who) && !members[*who]);
        let bystanders: BTreeSet<MemberId> = apart.map(name).collect();
        decide(&take_part, &bystanders).first().map(|stay| stay.reason)
    }

    fn save(&mut self, who: usize) -> bool {
        let Some(action) = &self.action else {
            return false;
        };
        let reason = self.decision(action.members);
        let has_row = self.processes[OWNER].memory != Memory::None;
        if who == OWNER && has_row && !matches!(reason, None | Some(StayReason::Pinned)) {
            self.disowned = true;
            return false;
        }
        let process = &mut self.processes[who];
        process.stays = reason.is_some() && process.memory != Memory::None;
        process.stage = Stage::Saved;
        if let (OWNER, Memory::Resident(number), false) =
            (who, process.memory, process.pinned || process.stays)
        {
            self.saved = Some(self.values[usize::from(number)]);
        }
        true
    }

    fn release(&mut self, who: usize, by_tag: bool) {
        let process = &mut self.processes[who];
        if let (Memory::Resident(_), false) = (process.memory, process.pinned || process.stays) {
            process.memory = Memory::Away;
        }
        process.stage = if by_tag { Stage::Runs } else { Stage::Paused };
        process.frozen = !by_tag;
    }

    fn create(&mut self, who: usize) {
        let process = &mut self.processes[who];
        process.stage = Stage::Created;
        process.frozen = true;
        process.restored = false;
        if who == OWNER && process.memory == Memory::Away {
            process.memory = Memory::Resident(self.made);
            process.restored = true;
            // Contents that were not saved are replaced by others.
            self.values[usize::from(self.made)] = self.saved.unwrap_or(u8::MAX);
            self.made += 1;
            self.fetched = Some([false; 3]);
        }
    }

    fn import(&mut self, who: usize, without_lost: bool) -> bool {
        self.processes[who].stage = Stage::Imported;
        if who == OWNER || self.processes[who].memory != Memory::Away {
            return true;
        }
        let owner = &self.processes[OWNER];
        match owner.memory {
            Memory::Resident(_) if owner.lives => {
                self.processes[who].memory = owner.memory;
                self.processes[who].restored = true;
                self.importers[who] = true;
                if let Some(fetched) = &mut self.fetched {
                    fetched[who] = true;
                }
                true
            }
            // The owner has the memory, and takes no part: the tag must be resumed first.
            Memory::Away if owner.lives => false,
            Memory::Resident(_) | Memory::None | Memory::Away | Memory::Lost => {
                if without_lost {
                    self.processes[who].memory = Memory::Lost;
                }
                without_lost
            }
        }
    }

    fn activate(&mut self, who: usize) {
        self.run_on(who);
        if who == OWNER {
            if let Some(fetched) = self.fetched.take() {
                self.importers = fetched;
            }
            self.saved = None;
            self.forget_unheld(OWNER);
        }
    }

    fn run_on(&mut self, who: usize) {
        let process = &mut self.processes[who];
        process.stage = Stage::Runs;
        process.frozen = false;
        process.stays = false;
        process.restored = false;
        process.said = None;
    }

    fn undo_pause(&mut self, who: usize) {
        self.run_on(who);
        if who == OWNER && matches!(self.processes[OWNER].memory, Memory::Resident(_)) {
            self.saved = None;
        }
    }

    fn undo_resume(&mut self, who: usize, by_tag: bool) {
        let process = &mut self.processes[who];
        if !matches!(process.stage, Stage::Created | Stage::Imported) {
            return;
        }
        if process.restored {
            process.memory = Memory::Away;
            process.restored = false;
        }
        process.stage = if by_tag { Stage::Runs } else { Stage::Paused };
        process.frozen = !by_tag;
        if who == OWNER {
            self.fetched = None;
        }
    }

    /// Does the coordinator's work: begins the next step after all processes have done this one.
    fn advance(&mut self) {
        let Some(action) = self.action.clone() else {
            return;
        };
        if ALL.into_iter().any(|who| action.members[who] && !action.done[who]) {
            return;
        }
        let next = match action.step {
            Step::Close => Step::Drain,
            Step::Drain if self.somebody_joined(action.members) => Step::UndoPause,
            Step::Drain if Self::are_missing(self.said_partners(action.members), action.found) => {
                Step::UndoPause
            }
            Step::Drain => Step::Save,
            Step::Save => Step::Release,
            Step::Create => Step::Import,
            Step::Import => Step::Activate,
            Step::Release | Step::Activate | Step::UndoPause | Step::UndoResume => {
                self.action = None;
                return;
            }
        };
        let members = action.members;
        self.action =
            members.contains(&true).then_some(Action { step: next, done: [false; 3], ..action });
    }
}
