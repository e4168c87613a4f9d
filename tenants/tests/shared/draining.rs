//! Pauses that wait for devices.

use std::time::Instant;

use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::DriverOp;

use crate::stage::{Stage, TIMEOUT, holds, written};

#[test]
fn a_wait_for_a_device_that_panics_refuses_the_pause_and_the_next_one_has_another_thread() {
    let stage = Stage::new();
    let process = stage.join();
    let (_, range) = written(&process, 2, "", 7);
    process.pool().driver().faults().panic_at(DriverOp::ContextSynchronize);
    let begin = Instant::now();
    let refused = stage.act(Action::Pause, Scope::Whole).err().map(|error| error.to_string());
    assert!(begin.elapsed() < TIMEOUT / 2, "it took {:?}", begin.elapsed());
    assert!(refused.as_ref().is_some_and(|text| text.contains("work on GPU 0")), "{refused:?}");
    assert_eq!(process.state(), MemberState::Active);
    assert_eq!(holds(&process, range, 7), Ok(true));
    stage.pause();
    stage.resume();
    assert_eq!(holds(&process, range, 7), Ok(true));
}
