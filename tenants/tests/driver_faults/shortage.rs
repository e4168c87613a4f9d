//! Device memory that somebody else has taken while the tenant was paused.

use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::{SimDriver, SimOptions};
use vmm_pool::driver::{AllocationProp, Driver as _, RawHandle};

use crate::stage::{CAPACITY_BYTES, Stage, UNIT, device_of};

/// A process that does not run under Sublet takes all but `left` of a device.
fn take_all_but(stage: &Stage, device: usize, left: u64) -> (SimDriver, RawHandle) {
    let node = stage.members[0].pool().driver().node().clone();
    let stranger = SimDriver::new(node, SimOptions::default());
    let prop = AllocationProp::pinned_on(device_of(device));
    let taken =
        stranger.create(CAPACITY_BYTES - left, &prop).expect("a paused tenant holds nothing");
    (stranger, taken)
}

#[test]
fn a_resume_that_does_not_fit_leaves_all_members_paused_and_says_what_is_missing_where() {
    let stage = Stage::new();
    for device in 0..2 {
        stage.must(Action::Pause);
        let (stranger, _taken) = take_all_but(&stage, device, 3 * UNIT);
        for _ in 0..2 {
            let error = stage.act(Action::Resume).expect_err("it does not fit");
            assert!(error.is_retryable() && error.left_unchanged(), "{error}");
            let [shortage] = error.shortages() else {
                panic!("{:?}", error.shortages());
            };
            assert_eq!(shortage.free_bytes, 3 * UNIT);
            assert_eq!(shortage.needed_bytes, stage.resident()[device]);
            assert_eq!(shortage.missing_bytes(), shortage.needed_bytes - 3 * UNIT);
            assert_eq!(error.missing_device_bytes(), Some(shortage.missing_bytes()));
            assert_eq!(shortage.outside_bytes, CAPACITY_BYTES - 3 * UNIT);
            assert!(shortage.holders.is_empty(), "{shortage}");
            stage.assert_all(MemberState::Paused, "refused");
        }
        drop(stranger);
        stage.assert_gone("refused, and the stranger is gone");
        stage.must(Action::Resume);
        stage.assert_intact("after it fits again");
    }
    stage.assert_ticket_is_good();
}
