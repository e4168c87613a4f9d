//! A pause, a resume or a swap while calls of the driver fail, and all that must be so behind it.

use std::sync::Arc;

use sublet_stage::Place;
use tenants::coordinator::{Options, Outcome, Trouble};
use tenants::scope::Scope;
use tenants::swap::swap;
use tenants::wire::Action;
use tenants::wire::MemberState::{self, Active, Paused};
use vmm_pool::Schedule;
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::{FaultSpan, Faults};

use crate::stage::{CAPACITY_BYTES, Stage, UNIT, by_tag};

/// A device that holds one of two tenants, and a window.
const TIGHT_BYTES: u64 = 10 * UNIT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Pause,
    Resume,
    Swap,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Whole,
    /// All, by its tags: the processes run on.
    Tagged,
    /// All that a pause by tag has left, of processes that stand still.
    Rest,
}

/// Its schedule is that of a pause. In a swap there is room for both tenants if all of it is saved first.
pub(crate) type Case = (Command, Memory, Schedule);

/// A tenant, and in a swap a second one, which is paused.
pub(crate) struct Scene {
    command: Command,
    memory: Memory,
    pub(crate) first: Stage,
    second: Option<Stage>,
}

impl Scene {
    pub(crate) fn new((command, memory, schedule): Case) -> Self {
        let is_tight = command == Command::Swap && schedule == Schedule::SaveMeanwhile;
        let capacity_bytes = if is_tight { TIGHT_BYTES } else { CAPACITY_BYTES };
        let place = Arc::new(Place::new(&[capacity_bytes; 2]).expect("a place"));
        let mut first = Stage::on(&place, "train");
        first.schedule = schedule;
        let second = (command == Command::Swap).then(|| {
            first.must(Action::Pause);
            let second = Stage::on(&place, "infer");
            second.must(Action::Pause);
            first.must(Action::Resume);
            second
        });
        Self { command, memory, first, second }
    }

    fn stages(&self) -> impl Iterator<Item = &Stage> {
        [&self.first].into_iter().chain(&self.second)
    }

    /// The driver's faults of each process.
    pub(crate) fn faults(&self) -> Vec<&Faults> {
        self.stages().flat_map(|stage| [stage.faults(0), stage.faults(1)]).collect()
    }

    pub(crate) fn states(&self) -> Vec<MemberState> {
        self.stages().flat_map(Stage::states).collect()
    }

    fn scope(&self) -> Scope {
        if self.memory == Memory::Tagged { by_tag() } else { Scope::Whole }
    }

    /// Brings all to where the command begins.
    pub(crate) fn make_ready(&self) {
        if self.memory == Memory::Rest {
            self.first.must_stand_without_blocks();
        } else if self.command == Command::Resume {
            let paused = self.first.act_on(Action::Pause, self.scope());
            assert!(paused.is_ok(), "{paused:?}");
            self.first.assert_gone("all memory has the tag");
        }
    }

    /// The outcomes, with these calls failing, each by the number of its process. Says if one of them was made.
    pub(crate) fn act(&self, failing: &[(usize, u64)]) -> (Result<Vec<Outcome>, Trouble>, bool) {
        let clear = || self.stages().map(Stage::clear_faults).sum::<u64>();
        let before = clear();
        for &(process, nth) in failing {
            self.faults()[process].fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        }
        let act = |action| self.first.act_on(action, self.scope()).map(|outcome| vec![outcome]);
        let outcomes = match (self.command, &self.second) {
            (Command::Resume, _) => act(Action::Resume),
            (Command::Swap, Some(second)) => change_places(&self.first, second),
            (Command::Pause | Command::Swap, _) => act(Action::Pause),
        };
        (outcomes, clear() > before)
    }

    /// Done, perhaps without memory that the driver keeps: that is counted.
    pub(crate) fn assert_done(&self, outcomes: &[Outcome], what: &str) {
        for outcome in outcomes {
            let Outcome::Completed(report) = outcome else { panic!("{what}: {outcome:?}") };
            assert!(report.losses.is_empty(), "{what}: {:?}", report.losses);
            if report.action == Action::Resume {
                continue;
            }
            let left = self.second.as_ref().map_or(&[0, 0][..], Stage::resident);
            let is_gone = self.first.used() == left;
            let is_named = !report.notes.is_empty() || !report.stays.is_empty();
            assert!(is_gone || is_named, "{what}: memory stays");
            if self.memory != Memory::Tagged {
                assert_eq!(report.stayed_bytes == 0, is_gone, "{what}: {:?}", report.stays);
                let already = Outcome::AlreadyPaused { stays: report.stays.clone() };
                let (again, _) = self.act(&[]);
                assert_eq!(
                    again.as_ref().ok().map(|all| &all[0]),
                    Some(&already),
                    "{what}: {again:?}"
                );
            }
        }
    }

    /// A call had failed, and all is as it was, with so much memory `held`.
    pub(crate) fn assert_refused(&self, error: &Trouble, held: &[u64], what: &str) {
        assert!(matches!(error.cause(), Trouble::Refused { .. }), "{what}: {error}");
        assert!(error.left_unchanged(), "{what}: {error}");
        assert!(error.to_string().contains("returned CUDA_ERROR_UNKNOWN"), "{what}: {error}");
        let (before, behind) = self.first_before_and_behind();
        assert_eq!(
            self.states(),
            [before, before, behind, behind][..self.faults().len()],
            "{what}"
        );
        if before == Active && self.command != Command::Resume {
            self.first.assert_contents_of(&[0, 1], what);
        }
        assert_eq!(self.first.used(), held, "{what}: the memory is where it was");
    }

    pub(crate) fn assert_behind(&self, what: &str) {
        let (before, behind) = self.first_before_and_behind();
        assert_eq!(
            self.states(),
            [behind, behind, before, before][..self.faults().len()],
            "{what}"
        );
        if let Some(second) = &self.second {
            second.assert_contents_of(&[0, 1], what);
        }
    }

    /// The states of the first tenant's processes. Those of the second have them the other way round.
    fn first_before_and_behind(&self) -> (MemberState, MemberState) {
        match (self.command, self.memory) {
            (_, Memory::Tagged) => (Active, Active),
            (_, Memory::Rest) => (Paused, Paused),
            (Command::Resume, Memory::Whole) => (Paused, Active),
            (Command::Pause | Command::Swap, Memory::Whole) => (Active, Paused),
        }
    }

    /// Without a fault, from wherever its command has left it: the first tenant runs again, with its contents.
    pub(crate) fn go_back(&self, what: &str) {
        if let Some(second) = &self.second {
            second.must_then(Action::Pause, what);
            // What the driver has kept of it goes with a step of its own.
            let is_short = |error: &Trouble| error.missing_device_bytes().is_some();
            if self.first.act(Action::Resume).is_err_and(|error| is_short(&error)) {
                second.must_then(Action::Resume, what);
                second.must_then(Action::Pause, what);
            }
        }
        let resumed = self.first.act_on(Action::Resume, self.scope());
        assert!(resumed.is_ok(), "{what}: {resumed:?}");
        self.first.assert_all(Active, what);
        self.first.assert_contents_of(&[0, 1], what);
    }

    /// All leaves once more without a fault, and comes back: what the driver has kept goes with that.
    pub(crate) fn move_once_more(&self, what: &str) {
        if let Some(second) = &self.second {
            let there = change_places(&self.first, second);
            assert!(there.is_ok(), "{what}: {there:?}");
            second.assert_intact(what);
            let back = change_places(second, &self.first);
            assert!(back.is_ok(), "{what}: {back:?}");
        } else {
            self.first.must_then(Action::Pause, what);
            self.first.assert_gone(what);
            self.first.must_then(Action::Resume, what);
        }
    }
}

/// By windows where there is no room for both.
fn change_places(from: &Stage, to: &Stage) -> Result<Vec<Outcome>, Trouble> {
    let [mut from, mut to] = [from, to].map(|stage| stage.coordinator(Options::default()));
    swap(&mut from, &mut to, Some(UNIT), &mut |_| {}).map(|swap| vec![swap.paused, swap.resumed])
}
