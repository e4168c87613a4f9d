//! Memory is free when its last holder is gone, however it went.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use crate::stage::{CAPACITY_BYTES, Stage};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver, DriverCode};

const BLOCKS: u64 = 16;

/// A process that holds memory; killed when it goes out of scope.
struct Holder(Child);

impl Holder {
    fn start(stage: &Stage, mode: &str, blocks: u64) -> Self {
        let program = stage.compile("holder");
        let mut child = stage
            .command(&program)
            .args([mode, &blocks.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the holder starts");
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), GRANULARITY_BYTES.to_string());
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().expect("SIGKILL");
        self.0.wait().expect("the holder ends");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It may have been killed already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn free_bytes(driver: &SimDriver) -> u64 {
    driver.memory_info().expect("info").free_bytes
}

#[test]
fn a_killed_process_holds_nothing_whatever_held_it() {
    let stage = Stage::new();
    let observer = stage.observer();
    for mode in ["handle", "mapping", "descriptor", "plain"] {
        let mut holder = Holder::start(&stage, mode, BLOCKS);
        let held = CAPACITY_BYTES - BLOCKS * GRANULARITY_BYTES;
        assert_eq!(free_bytes(&observer), held, "{mode}: while it lives");
        holder.kill();
        assert_eq!(free_bytes(&observer), CAPACITY_BYTES, "{mode}: killed");
    }
}

#[test]
fn creation_finds_the_memory_of_the_killed_without_being_asked() {
    let stage = Stage::new();
    let observer = stage.observer();
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let mut holder = Holder::start(&stage, "mapping", CAPACITY_BYTES / GRANULARITY_BYTES);
    let refused = observer.create(GRANULARITY_BYTES, &prop);
    assert_eq!(
        refused.expect_err("full").code,
        DriverCode::OUT_OF_MEMORY,
        "while the holder lives"
    );
    holder.kill();
    observer.create(CAPACITY_BYTES, &prop).expect("all of it, once the holder is gone");
}

#[test]
fn two_holders_of_one_device_add_up() {
    let stage = Stage::new();
    let observer = stage.observer();
    let first = Holder::start(&stage, "handle", BLOCKS);
    let second = Holder::start(&stage, "mapping", BLOCKS);
    let both = CAPACITY_BYTES - 2 * BLOCKS * GRANULARITY_BYTES;
    assert_eq!(free_bytes(&observer), both);
    drop(first);
    assert_eq!(free_bytes(&observer), CAPACITY_BYTES - BLOCKS * GRANULARITY_BYTES);
    drop(second);
    assert_eq!(free_bytes(&observer), CAPACITY_BYTES);
}

#[test]
fn processes_killed_amid_creation_leave_an_exact_ledger() {
    let stage = Stage::new();
    let observer = stage.observer();
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    for _ in 0..5 {
        let holders: Vec<Holder> = (0..3).map(|_| Holder::start(&stage, "churn", 0)).collect();
        for _ in 0..200 {
            let handle = observer.create(GRANULARITY_BYTES, &prop).expect("memory");
            observer.release_memory(handle).expect("release");
        }
        drop(holders);
        assert_eq!(free_bytes(&observer), CAPACITY_BYTES);
    }
}
