//! The steps of a pause and of a resume, in one table.
//!
//! Both are two-phase commits: all processes take every step of [`Stage::Prepare`] before any is told to take the first
//! of [`Stage::Commit`], and until then [`Stage::Abort`] takes each of them back. A new step is a row here, an
//! [`Order`], and the code in the member that does it.
//!
//! A deep pause is no transaction more: its processes are paused already when their contexts leave, and stay so whatever fails
//! ([`Stage::AtRest`]).
//!
//! Exports, transfer and imports are steps of their own because the driver makes both ten times slower and more when one
//! process exports while another thread of it imports.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmm_pool::{Copies, Schedule};

use crate::references::Stay;
use crate::scope::Scope;

/// The two things that can be done to a tenant.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Action {
    /// Give the memory up.
    #[default]
    Pause,
    /// Take it back.
    Resume,
}

/// The steps of a pause and of a resume. All processes of a tenant finish one before any starts the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Phase {
    /// Pause 1: hold back new work; calls under way leave. Refused during stream capture.
    CloseGate,
    /// Pause 2: wait until the devices have nothing left to do, hand nothing out from now on, and say what is held of
    /// shared memory.
    Drain,
    /// Pause 3: by its [`Schedule`], save contents to host memory and files and unmap, or take all host memory and disk space that
    /// saving takes, and move nothing. Every handle is kept.
    Prepare,
    /// Pause 4, the point of no return: release own memory, a window of it at a time or all that is left; with all, imports too. What is not
    /// saved yet is saved before.
    Release,
    /// Pause 5: compare the device's free memory with what was released.
    Verify,
    /// Behind a deep pause, when it is over: the process learns that its contexts leave, and calls the driver for nothing
    /// from then on. Then the coordinator has the driver take them.
    Freeze,
    /// Before a resume, when the driver has brought the contexts back: the process may call it again.
    Thaw,
    /// Resume 1: create all memory, or none. A swap leaves it out.
    Create,
    /// Resume 2: map it at its old addresses and put contents back, a window at a time or all that is left; what is still away is
    /// created before. With all, export what peers will import.
    Restore,
    /// Resume 3: import peers' memory at its old addresses. What was imported from processes that have ended, or that do not have it any
    /// more, ends the resume, or is left out for ever: its addresses stay reserved and unmapped.
    Import,
    /// Resume 4: open the gate.
    Activate,
    /// Undo of all that comes before a point of no return. A pause maps again and opens the gate, and needs nobody else for that; a resume
    /// releases everything again, contents kept. Leaves a process that has not begun as it is.
    Abort,
    /// The coordinator of what is under way has ended: find out from the others how far they were told to
    /// go, and go the same way. Nothing is done when nothing is under way.
    Settle,
}

/// The role of a phase in its pause or resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It can be undone.
    Prepare,
    /// The point of no return, or behind it.
    Commit,
    /// It undoes what was prepared.
    Abort,
    /// It commits or aborts, whichever the others do.
    Settle,
    /// It is none of that: taken while the process stands paused and nothing is under way, and undone by its counterpart.
    AtRest,
}

/// A row of the table of phases: the properties of one phase.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    phase: Phase,
    /// For people, in a few words.
    label: &'static str,
    /// Its pause or resume; none if the process finds that out.
    action: Option<Action>,
    stage: Stage,
    /// The longest time that processes may take for it, unless another is requested.
    timeout: Duration,
    /// It is taken at a common cut of the ranks, where all processes take part.
    at_cut: bool,
    /// The bytes of its report are those that the action gives back or takes.
    moves_memory: bool,
    order: fn(&Told<'_>) -> Order,
}

/// The values that an order can carry. Each row of the table takes those that its phase needs.
#[derive(Clone, Debug)]
pub struct Told<'a> {
    /// The memory that the order is about.
    pub scope: &'a Scope,
    /// Shared memory that stays where it is.
    pub stays: &'a [Stay],
    /// The copies of earlier pauses that stay in host memory.
    pub copies: Copies,
    /// When contents are saved.
    pub schedule: Schedule,
    /// When [`Phase::Release`] saves what no phase before it has saved.
    pub rest: Schedule,
    /// The window that is moved now; none for all that is left.
    pub window: Option<Window>,
    /// Memory that was imported from processes that have ended is left out.
    pub without_lost: bool,
    /// The contexts are to leave when the pause is over.
    pub is_deep: bool,
    /// Processes stand still after a pause by tag.
    pub stands: bool,
}

impl<'a> Told<'a> {
    /// With the usual answers to all else.
    pub fn new(scope: &'a Scope, stays: &'a [Stay]) -> Self {
        Self {
            scope,
            stays,
            copies: Copies::default(),
            schedule: Schedule::default(),
            rest: Schedule::SaveMeanwhile,
            window: None,
            without_lost: false,
            is_deep: false,
            stands: false,
        }
    }
}

/// The amount of memory that one stage moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// The number of the stage in its process, counted from 0.
    pub stage: u32,
    /// Bytes at most, by the machine-wide name of the device; nothing of those that are not named.
    pub devices: Vec<(String, u64)>,
}

/// A phase that prepares `action`, with what most rows have.
const fn row(
    phase: Phase,
    label: &'static str,
    action: Action,
    stage: Stage,
    order: fn(&Told<'_>) -> Order,
) -> Row {
    Row {
        phase,
        label,
        action: Some(action),
        stage,
        timeout: Duration::from_mins(1),
        at_cut: false,
        moves_memory: false,
        order,
    }
}

/// One row for each phase, in the order of [`Phase`], which is that of a pause and of a resume.
const TABLE: [Row; 13] = {
    use Action::{Pause, Resume};
    use Stage::{Abort, AtRest, Commit, Prepare, Settle};
    [
        Row {
            timeout: Duration::from_secs(10),
            at_cut: true,
            ..row(Phase::CloseGate, "close gate", Pause, Prepare, |told| Order::CloseGate {
                scope: told.scope.clone(),
                is_deep: told.is_deep,
                stands: told.stands,
            })
        },
        Row {
            timeout: Duration::from_secs(30),
            ..row(Phase::Drain, "drain", Pause, Prepare, |_| Order::Drain)
        },
        Row {
            timeout: Duration::from_mins(2),
            ..row(Phase::Prepare, "prepare", Pause, Prepare, |told| Order::Prepare {
                stays: told.stays.to_vec(),
                copies: told.copies,
                schedule: told.schedule,
            })
        },
        Row {
            moves_memory: true,
            ..row(Phase::Release, "release", Pause, Commit, |told| Order::Release {
                window: told.window.clone(),
                rest: told.rest,
            })
        },
        row(Phase::Verify, "verify", Pause, Commit, |_| Order::Verify),
        row(Phase::Freeze, "freeze", Pause, AtRest, |_| Order::Freeze),
        row(Phase::Thaw, "thaw", Resume, AtRest, |_| Order::Thaw),
        Row {
            moves_memory: true,
            ..row(Phase::Create, "create", Resume, Prepare, |told| Order::Create {
                scope: told.scope.clone(),
            })
        },
        Row {
            timeout: Duration::from_mins(2),
            moves_memory: true,
            ..row(Phase::Restore, "restore", Resume, Prepare, |told| Order::Restore {
                scope: told.scope.clone(),
                window: told.window.clone(),
            })
        },
        row(Phase::Import, "import", Resume, Prepare, |told| Order::Import {
            without_lost: told.without_lost,
        }),
        row(Phase::Activate, "activate", Resume, Commit, |_| Order::Activate),
        Row { action: None, ..row(Phase::Abort, "abort", Pause, Abort, |_| Order::Abort) },
        Row {
            action: None,
            // One that was told to release by stages may have all of its memory to save.
            timeout: Duration::from_mins(3),
            ..row(Phase::Settle, "settle", Pause, Settle, |_| Order::Settle)
        },
    ]
};

/// The longest time that a pause that fails may have held launches of some processes while work of others ran on.
/// It is the sum of the time-outs of the cut, of closing the gate and of the drain, unless others were requested.
pub const HELD_MAX: Duration = Duration::from_secs(70);

impl Action {
    /// Its point of no return.
    pub fn commit(self) -> Phase {
        match self {
            Self::Pause => Phase::Release,
            Self::Resume => Phase::Activate,
        }
    }

    /// Its phases of `stage`, in order.
    pub fn phases(self, stage: Stage) -> impl Iterator<Item = Phase> {
        let rows = TABLE.iter().filter(move |row| row.action == Some(self) && row.stage == stage);
        rows.map(|row| row.phase)
    }
}

impl Phase {
    fn row(self) -> &'static Row {
        // CAST: the table has a row for each phase, in their order; tests hold it to that.
        &TABLE[self as usize]
    }

    /// Returns what it does, in a few words.
    pub fn label(self) -> &'static str {
        self.row().label
    }

    /// Returns the action of the phase, or none if the process itself finds out which one it is.
    pub fn action(self) -> Option<Action> {
        self.row().action
    }

    /// Returns its role in its pause or resume.
    pub fn stage(self) -> Stage {
        self.row().stage
    }

    /// Returns the longest time that processes may take for it, unless another is requested.
    pub fn timeout(self) -> Duration {
        self.row().timeout
    }

    /// Is it the point of no return of its pause or resume, or behind it? Nobody is told to take such a
    /// step before everybody has done all steps before.
    pub fn is_decided(self) -> bool {
        self.stage() == Stage::Commit
    }

    /// Is what is under way no longer wanted once this has been requested?
    pub fn ends_early(self) -> bool {
        matches!(self.stage(), Stage::Abort | Stage::Settle)
    }

    /// Is nothing under way when this is done?
    pub fn is_last(self) -> bool {
        let is_decided = |row: &&Row| row.stage == Stage::Commit && row.action == self.action();
        let last = TABLE.iter().rfind(is_decided);
        self.ends_early()
            || self.stage() == Stage::AtRest
            || last.is_some_and(|row| row.phase == self)
    }

    /// Is it taken at a common cut of the ranks, where all processes take part?
    pub fn is_at_cut(self) -> bool {
        self.row().at_cut
    }

    /// Are the bytes of its report those that the pause gives back, or the resume takes?
    pub fn moves_memory(self) -> bool {
        self.row().moves_memory
    }

    /// The order to take it.
    pub fn order(self, told: &Told<'_>) -> Order {
        (self.row().order)(told)
    }
}

/// A phase to be taken, with what it needs to know. The steps that begin something say which memory it is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// [`Phase::CloseGate`].
    CloseGate {
        /// The memory that the pause is about.
        scope: Scope,
        /// Is [`Phase::Freeze`] to follow? What stands in the way of that refuses the pause.
        is_deep: bool,
        /// Does the process stand still after a pause by tag?
        stands: bool,
    },
    /// [`Phase::Drain`].
    Drain,
    /// [`Phase::Prepare`].
    Prepare {
        /// Shared memory that stays where it is.
        stays: Vec<Stay>,
        /// The copies of earlier pauses that may stay in host memory.
        copies: Copies,
        /// When contents are saved.
        schedule: Schedule,
    },
    /// [`Phase::Release`].
    Release {
        /// The window, or none for all that is left. One allocation that is larger than its device's window goes, too.
        window: Option<Window>,
        /// When contents that are not saved yet are saved.
        rest: Schedule,
    },
    /// [`Phase::Verify`].
    Verify,
    /// [`Phase::Freeze`].
    Freeze,
    /// [`Phase::Thaw`].
    Thaw,
    /// [`Phase::Create`].
    Create {
        /// The memory that the resume is about.
        scope: Scope,
    },
    /// [`Phase::Restore`].
    Restore {
        /// The memory that the resume is about.
        scope: Scope,
        /// The window, and no more, or none for all that is left.
        window: Option<Window>,
    },
    /// [`Phase::Import`].
    Import {
        /// Is what nobody has any more left out?
        without_lost: bool,
    },
    /// [`Phase::Activate`].
    Activate,
    /// [`Phase::Abort`].
    Abort,
    /// [`Phase::Settle`].
    Settle,
}

impl Order {
    /// The phase that the order requests.
    pub fn phase(&self) -> Phase {
        match self {
            Self::CloseGate { .. } => Phase::CloseGate,
            Self::Drain => Phase::Drain,
            Self::Prepare { .. } => Phase::Prepare,
            Self::Release { .. } => Phase::Release,
            Self::Verify => Phase::Verify,
            Self::Freeze => Phase::Freeze,
            Self::Thaw => Phase::Thaw,
            Self::Create { .. } => Phase::Create,
            Self::Restore { .. } => Phase::Restore,
            Self::Import { .. } => Phase::Import,
            Self::Activate => Phase::Activate,
            Self::Abort => Phase::Abort,
            Self::Settle => Phase::Settle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every phase that there is: the decoder knows them all.
    fn all() -> Vec<Phase> {
        let decoded = (0_u8..).map_while(|number| postcard::from_bytes(&[number]).ok());
        decoded.collect()
    }

    #[test]
    fn every_phase_has_its_row_and_its_order() {
        let all = all();
        assert_eq!(all.len(), TABLE.len());
        for phase in all {
            assert_eq!(phase.row().phase, phase);
            let told = Told::new(&Scope::Whole, &[]);
            assert_eq!(phase.order(&told).phase(), phase);
            let in_json = serde_json::to_value(phase).unwrap();
            assert_eq!(in_json, phase.label().replace(' ', "_"), "one name everywhere");
        }
    }

    #[test]
    fn a_pause_and_a_resume_have_their_phases_in_order() {
        use Phase::{
            Activate, CloseGate, Create, Drain, Freeze, Import, Prepare, Release, Restore, Thaw,
            Verify,
        };
        let of = |action: Action, stage| action.phases(stage).collect::<Vec<_>>();
        assert_eq!(of(Action::Pause, Stage::Prepare), [CloseGate, Drain, Prepare]);
        assert_eq!(of(Action::Pause, Stage::Commit), [Release, Verify]);
        assert_eq!(of(Action::Pause, Stage::AtRest), [Freeze]);
        assert_eq!(of(Action::Resume, Stage::AtRest), [Thaw]);
        assert_eq!(of(Action::Resume, Stage::Prepare), [Create, Restore, Import]);
        assert_eq!(of(Action::Resume, Stage::Commit), [Activate]);
        for action in [Action::Pause, Action::Resume] {
            assert_eq!(action.phases(Stage::Commit).next(), Some(action.commit()));
        }
    }

    #[test]
    fn a_pause_or_resume_is_over_after_its_last_phase_or_when_it_is_undone_or_settled() {
        let over: Vec<Phase> = all().into_iter().filter(|phase| phase.is_last()).collect();
        let expected = [
            Phase::Verify,
            Phase::Freeze,
            Phase::Thaw,
            Phase::Activate,
            Phase::Abort,
            Phase::Settle,
        ];
        assert_eq!(over, expected);
    }
}
