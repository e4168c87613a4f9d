//! The steps of a pause and of a resume, in one table.
//!
//! Both are two-phase commits. All processes do every step of [`Stage::Prepare`] before any process is told to do the first
//! step of [`Stage::Commit`]. Until then [`Stage::Abort`] undoes each of them. A new step is a row here, an [`Order`], and the
//! code in the member that does it.
//!
//! A deep pause is no further transaction. Its processes are already paused when their contexts leave the devices, and stay
//! paused whatever fails ([`Stage::AtRest`]).
//!
//! Exports, transfer and imports are separate steps. The driver makes exports and imports at least ten times slower when one
//! process exports while another of its threads imports.

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
    /// The phase can be undone.
    Prepare,
    /// The phase is the point of no return, or follows it.
    Commit,
    /// The phase undoes what was prepared.
    Abort,
    /// The phase commits or aborts, whichever the other processes do.
    Settle,
    /// None of these: the phase is done while the process is paused and no action is under way. Its counterpart undoes it.
    AtRest,
}

/// A row of the table of phases: the properties of one phase.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    phase: Phase,
    /// The name for people, in a few words.
    label: &'static str,
    /// The action of the phase; none if the process finds that out.
    action: Option<Action>,
    stage: Stage,
    /// The longest time that processes may need for the phase, unless another is requested.
    timeout: Duration,
    /// Is the phase done at a common cut of the ranks, where all processes take part?
    at_cut: bool,
    /// Are the bytes of its report those that the action releases or allocates?
    moves_memory: bool,
    order: fn(&Told<'_>) -> Order,
}

/// The values that an order can carry. Each row of the table uses the values that its phase needs.
#[derive(Clone, Debug)]
pub struct Told<'a> {
    /// The memory to which the order applies.
    pub scope: &'a Scope,
    /// Shared memory that stays on its device.
    pub stays: &'a [Stay],
    /// The copies of earlier pauses that stay in host memory.
    pub copies: Copies,
    /// The time at which contents are saved.
    pub schedule: Schedule,
    /// The time at which [`Phase::Release`] saves contents that no earlier phase has saved.
    pub rest: Schedule,
    /// The window that is moved now; none: all that is left.
    pub window: Option<Window>,
    /// Is memory of owners that have ended left out?
    pub without_lost: bool,
    /// Will the contexts leave the devices after the pause?
    pub is_deep: bool,
    /// Do processes stop after a pause by tag?
    pub stands: bool,
}

impl<'a> Told<'a> {
    /// Makes the values for an order, with defaults for all others.
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
    /// The most bytes, by the machine-wide name of the device. A device that is not named moves none.
    pub devices: Vec<(String, u64)>,
}

/// A phase that prepares `action`, with the values of most rows.
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

/// One row for each phase, in the order of [`Phase`], which is the order of the steps in a pause and in a resume.
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
            // A process that was told to release by stages may still have to save all of its memory.
            timeout: Duration::from_mins(3),
            ..row(Phase::Settle, "settle", Pause, Settle, |_| Order::Settle)
        },
    ]
};

/// The longest time for which a failed pause may have held launches of some processes while other processes ran on.
/// It is the sum of the time-outs of the cut, of closing the gate and of the drain, unless others were requested.
pub const HELD_MAX: Duration = Duration::from_secs(70);

impl Action {
    /// The action's point of no return.
    pub fn commit(self) -> Phase {
        match self {
            Self::Pause => Phase::Release,
            Self::Resume => Phase::Activate,
        }
    }

    /// The action's phases of `stage`, in order.
    pub fn phases(self, stage: Stage) -> impl Iterator<Item = Phase> {
        let rows = TABLE.iter().filter(move |row| row.action == Some(self) && row.stage == stage);
        rows.map(|row| row.phase)
    }
}

impl Phase {
    fn row(self) -> &'static Row {
        // CAST: the table has a row for each phase, in their order; tests check that.
        &TABLE[self as usize]
    }

    /// Returns a short name of the phase, for people.
    pub fn label(self) -> &'static str {
        self.row().label
    }

    /// Returns the action of the phase, or none if the process itself finds out which one it is.
    pub fn action(self) -> Option<Action> {
        self.row().action
    }

    /// Returns the phase's role in its pause or resume.
    pub fn stage(self) -> Stage {
        self.row().stage
    }

    /// Returns the longest time that processes may need for the phase, unless another is requested.
    pub fn timeout(self) -> Duration {
        self.row().timeout
    }

    /// Is the phase the point of no return of its pause or resume, or after it? No process is told to do such a step before all
    /// processes have done all earlier steps.
    pub fn is_decided(self) -> bool {
        self.stage() == Stage::Commit
    }

    /// Does this phase call off the phase that is under way?
    pub fn ends_early(self) -> bool {
        matches!(self.stage(), Stage::Abort | Stage::Settle)
    }

    /// Is no action under way after this phase?
    pub fn is_last(self) -> bool {
        let is_decided = |row: &&Row| row.stage == Stage::Commit && row.action == self.action();
        let last = TABLE.iter().rfind(is_decided);
        self.ends_early()
            || self.stage() == Stage::AtRest
            || last.is_some_and(|row| row.phase == self)
    }

    /// Is the phase done at a common cut of the ranks, where all processes take part?
    pub fn is_at_cut(self) -> bool {
        self.row().at_cut
    }

    /// Are the bytes of the phase's report those that the pause releases, or the resume allocates?
    pub fn moves_memory(self) -> bool {
        self.row().moves_memory
    }

    /// The order to do this phase.
    pub fn order(self, told: &Told<'_>) -> Order {
        (self.row().order)(told)
    }
}

/// A phase to be done, with its values. The steps that begin something name its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// [`Phase::CloseGate`].
    CloseGate {
        /// The memory to pause.
        scope: Scope,
        /// Will [`Phase::Freeze`] follow? Anything that prevents the freeze then refuses the pause.
        is_deep: bool,
        /// Does the process stop after a pause by tag?
        stands: bool,
    },
    /// [`Phase::Drain`].
    Drain,
    /// [`Phase::Prepare`].
    Prepare {
        /// Shared memory that stays on its device.
        stays: Vec<Stay>,
        /// The copies of earlier pauses that may stay in host memory.
        copies: Copies,
        /// The time at which contents are saved.
        schedule: Schedule,
    },
    /// [`Phase::Release`].
    Release {
        /// The window, or none for all that is left. An allocation that is larger than its device's window is released too.
        window: Option<Window>,
        /// The time at which unsaved contents are saved.
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
        /// The memory to resume.
        scope: Scope,
    },
    /// [`Phase::Restore`].
    Restore {
        /// The memory to resume.
        scope: Scope,
        /// The window, and no more; none for all that is left.
        window: Option<Window>,
    },
    /// [`Phase::Import`].
    Import {
        /// Is memory that no process has any more left out?
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

    /// Every phase: the decoder knows them all.
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
