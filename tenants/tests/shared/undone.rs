//! Pauses by tag that come to nothing while an earlier one of the same tag stands, and pauses that an import has not
//! followed.

use tenants::coordinator::{Event, Interrupt, Options, Outcome, Step};
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState, Phase};
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{DriverCode, DriverOp, VaRange};

use crate::stage::{Process, Stage, assert_one_memory, holds, options, share, tags, written};

/// The tag `kv` is paused in two processes, one of which has imported it; both have made more of it.
struct Twice {
    stage: Stage,
    owner: Process,
    importer: Process,
    first: [VaRange; 2],
    second: [VaRange; 2],
}

impl Twice {
    fn new() -> Self {
        let stage = Stage::new();
        let (owner, importer) = (stage.join(), stage.join());
        let (handle, at_owner) = written(&owner, 2, "kv", 7);
        let (_, at_importer) = share(&owner, handle, &importer, 2);
        stage.must(Action::Pause, tags("kv"));
        let (_, new_at_owner) = written(&owner, 1, "kv", 11);
        let (_, new_at_importer) = written(&importer, 1, "kv", 9);
        let (first, second) = ([at_owner, at_importer], [new_at_owner, new_at_importer]);
        Self { stage, owner, importer, first, second }
    }

    fn check_undone_and_resume(&self) {
        let states = (self.owner.lifecycle().state(), self.importer.lifecycle().state());
        assert_eq!(states, (MemberState::Active, MemberState::Active));
        assert_eq!(holds(&self.owner, self.second[0], 11), Ok(true), "it is in use");
        assert_eq!(holds(&self.importer, self.second[1], 9), Ok(true), "it is in use");
        self.stage.must(Action::Resume, tags("kv"));
        assert_eq!(holds(&self.owner, self.first[0], 7), Ok(true));
        assert_eq!(holds(&self.importer, self.first[1], 7), Ok(true));
    }
}

#[test]
fn a_second_pause_of_a_tag_with_one_failing_call_is_undone() {
    for of_importer in [true, false] {
        let twice = Twice::new();
        let process = if of_importer { &twice.importer } else { &twice.owner };
        let faults = process.pool().driver().faults();
        faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(1), DriverCode::UNKNOWN);
        let refused = twice.stage.act(Action::Pause, tags("kv")).expect_err("one call fails");
        assert!(refused.left_unchanged(), "{refused}");
        twice.check_undone_and_resume();
    }
}

#[test]
fn a_second_pause_of_a_tag_that_is_called_off_is_undone() {
    let twice = Twice::new();
    let (interrupt, raise) = Interrupt::new().expect("a pipe");
    let options = Options { interrupt: Some(interrupt), ..options(tags("kv")) };
    let called_off = twice.stage.act_with(Action::Pause, options, &mut |event| {
        if let Event::StepDone { step: Step::Phase(Phase::Prepare), .. } = event {
            nix::unistd::write(&raise, &[1]).expect("raised");
        }
    });
    assert!(called_off.expect_err("it was called off").left_unchanged());
    twice.check_undone_and_resume();
}

/// The driver refuses to unmap an import for the whole last phase of a pause of `scope`, and in the first resume.
fn stuck_in_a_pause_of(scope: &Scope, before: MemberState) {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "kv", 7);
    let (_, at_importer) = share(&owner, handle, &importer, 2);
    let faults = importer.pool().driver().faults();
    let refuse = || faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
    let options = Options { releases_early: true, ..options(scope.clone()) };
    let paused = stage.act_with(Action::Pause, options, &mut |event| {
        if let Event::StepStarted { step: Step::Phase(Phase::Release), .. } = event {
            refuse();
        }
    });
    assert!(matches!(paused, Ok(Outcome::Completed(_))), "{paused:?}");
    assert_eq!(holds(&importer, at_importer, 7), Ok(true), "or it shows nothing: it is mapped");
    let refused = stage.act(Action::Resume, scope.clone()).err().map(|error| error.to_string());
    assert!(refused.as_ref().is_some_and(|text| text.contains("mapping at")), "{refused:?}");
    assert_eq!((owner.lifecycle().state(), importer.lifecycle().state()), (before, before));
    faults.clear();
    stage.must(Action::Resume, scope.clone());
    assert_eq!(holds(&importer, at_importer, 7), Ok(true));
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
    assert_one_memory((&importer, at_importer), (&owner, at_owner), 9);
}

#[test]
fn an_import_that_the_driver_would_not_unmap_is_its_owners_memory_again_after_a_resume() {
    stuck_in_a_pause_of(&Scope::Whole, MemberState::Paused);
}

#[test]
fn an_import_of_a_tag_that_the_driver_would_not_unmap_is_its_owners_memory_again_after_a_resume() {
    stuck_in_a_pause_of(&tags("kv"), MemberState::Active);
}
