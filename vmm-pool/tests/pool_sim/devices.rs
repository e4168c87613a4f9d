//! One process with several devices: whose context is current matters to copies, pinning and waits.

use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AccessDesc, DeviceOrdinal, Driver, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, PoolResult, StepLog, VirtualHandle};

use crate::stage::{
    SimPool, UNIT, UNLIMITED, WHOLE, class, create, end_streams, free_bytes, holds, kept, map,
    node, pattern, pause, pause_tags, pool, resume, resume_tags, write,
};

const DEVICES: i32 = 4;
/// Memory of a device in these tests.
const DEVICE_BYTES: u64 = 64 * UNIT;

fn several() -> SimPool {
    let node = SimNode::private(&[DEVICE_BYTES; DEVICES as usize]).expect("a node");
    let driver = SimDriver::new(node, SimOptions::default());
    let pool = SimPool::new(std::sync::Arc::new(driver), 2);
    pool.host_memory().set_file_dir("/dev/shm".into());
    pool
}

fn devices() -> impl Iterator<Item = DeviceOrdinal> {
    (0..DEVICES).map(DeviceOrdinal)
}

/// What one process has on its devices, and what it holds.
struct Holdings {
    pool: SimPool,
    devices: i32,
    /// As which device, where, what.
    contents: Vec<(DeviceOrdinal, VaRange, u64)>,
    /// Kept memory that is mapped nowhere: device, handle, what.
    unmapped: Vec<(DeviceOrdinal, VirtualHandle, u64)>,
    device_bytes: u64,
}

impl Holdings {
    /// The same on all devices, by turns, so that neighbours in the table are of different devices.
    fn on(devices: i32, rounds: u64) -> Self {
        let mut all = Self {
            pool: several(),
            devices,
            contents: Vec::new(),
            unmapped: Vec::new(),
            device_bytes: rounds * 7 * UNIT,
        };
        for round in 0..rounds {
            for device in 0..devices {
                let seed = 100 * round + 10 * u64::try_from(device).expect("small");
                all.add_round(DeviceOrdinal(device), seed);
            }
        }
        all
    }

    fn add_round(&mut self, device: DeviceOrdinal, seed: u64) {
        let neighbour = DeviceOrdinal((device.0 + 1) % self.devices);
        let access = AccessDesc::read_write;
        // Kept, in the file, discarded, of another device's use alone, and mapped nowhere.
        let own = create(&self.pool, device, 2, kept());
        self.add(own, 2 * UNIT, device, seed);
        for (step, policy) in [(1, Contents::Keep), (2, Contents::File)] {
            let handle = create(&self.pool, device, 1, class(policy));
            self.add(handle, UNIT, neighbour, seed + step);
        }
        let filed = create(&self.pool, device, 1, class(Contents::File));
        self.add(filed, UNIT, device, seed + 3);
        let scratch = create(&self.pool, device, 1, class(Contents::Discard));
        map(&self.pool, scratch, UNIT, &[access(device)]);
        let hidden = create(&self.pool, device, 1, kept());
        let place = map(&self.pool, hidden, UNIT, &[access(device)]);
        write(&self.pool, device, place, pattern(seed + 4));
        self.pool.unmap(place).expect("unmap");
        self.unmapped.push((device, hidden, seed + 4));
    }

    fn add(&mut self, handle: VirtualHandle, size_bytes: u64, accessor: DeviceOrdinal, seed: u64) {
        let place = map(&self.pool, handle, size_bytes, &[AccessDesc::read_write(accessor)]);
        write(&self.pool, accessor, place, pattern(seed));
        self.contents.push((accessor, place, seed));
    }

    fn assert_intact(&self, when: &str) {
        for (device, place, seed) in &self.contents {
            assert!(holds(&self.pool, *device, *place, pattern(*seed)), "{when}: {place:?}");
        }
        for (device, handle, seed) in &self.unmapped {
            let place = map(&self.pool, *handle, UNIT, &[AccessDesc::read_write(*device)]);
            assert!(holds(&self.pool, *device, place, pattern(*seed)), "{when}: of {device}");
            self.pool.unmap(place).expect("unmap");
            crate::stage::free_addresses(&self.pool, place);
        }
    }

    fn assert_free(&self, held_bytes: u64, when: &str) {
        for device in (0..self.devices).map(DeviceOrdinal) {
            let free = free_bytes(&self.pool, device);
            assert_eq!(free, DEVICE_BYTES - held_bytes, "{when}: {device}");
        }
    }
}

#[test]
fn contents_of_all_devices_come_back_to_each() {
    let all = Holdings::on(DEVICES, 3);
    for round in 0..3 {
        pause(&all.pool);
        all.assert_free(0, "paused");
        resume(&all.pool);
        all.assert_intact(&format!("round {round}"));
        all.assert_free(all.device_bytes, "resumed");
    }
    assert_eq!(all.pool.driver().copies_pinned_for_others(), 0, "copies are slow");
    assert_eq!(end_streams(&all.pool), 0);
}

#[test]
fn whatever_context_a_step_begins_with_it_works() {
    let all = Holdings::on(DEVICES, 1);
    for device in devices() {
        all.pool.driver().make_current(device).expect("current");
        pause(&all.pool);
        // The steps of a resume may run on another thread, with no context yet.
        std::thread::scope(|scope| scope.spawn(|| resume(&all.pool)).join()).expect("resume");
        all.assert_intact(&format!("{device} was current"));
    }
}

#[test]
fn tags_of_different_devices_come_and_go_one_by_one() {
    let pool = several();
    let mut contents = Vec::new();
    let tags = ["zero", "one", "two", "three"];
    for (device, tag) in devices().zip(tags) {
        let kept = Class { tag: tag.to_owned(), ..kept() };
        let handle = create(&pool, device, 2, kept);
        let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(device)]);
        write(&pool, device, place, pattern(contents.len() as u64));
        contents.push((device, place));
    }
    for away in [0, 2, 1] {
        pause_tags(&pool, &[tags[away]]);
        for next in (0..tags.len()).filter(|next| *next != away) {
            pause_tags(&pool, &[tags[next]]);
            resume_tags(&pool, &[tags[next]]);
        }
        resume_tags(&pool, &[tags[away]]);
        for (seed, (device, place)) in (0..).zip(&contents) {
            assert!(holds(&pool, *device, *place, pattern(seed)), "{place:?} of {device}");
        }
    }
    assert_eq!(pool.driver().copies_pinned_for_others(), 0, "copies are slow");
}

#[test]
fn host_memory_of_a_process_that_comes_to_use_another_device_is_pinned_for_it_too() {
    let pool = several();
    let driver = pool.driver();
    let mut contents = Vec::new();
    for device in devices() {
        let handle = create(&pool, device, 2, kept());
        let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(device)]);
        let seed = 7 + contents.len() as u64;
        write(&pool, device, place, pattern(seed));
        contents.push((device, place, seed));
        for _ in 0..2 {
            pause(&pool);
            resume(&pool);
        }
        for (device, place, seed) in &contents {
            assert!(holds(&pool, *device, *place, pattern(*seed)), "{place:?} of {device}");
        }
    }
    assert_eq!(driver.copies_pinned_for_others(), 0, "copies are slow");
    // Each chunk once, and that of the first device alone once more for all.
    let chunks = driver.census().host_ranges as u64;
    assert_eq!(driver.faults().calls(DriverOp::HostRegister), chunks + 1);
}

#[test]
fn host_memory_that_cannot_be_pinned_again_costs_no_contents() {
    let pool = pool(&node());
    let first = DeviceOrdinal(0);
    let handle = create(&pool, first, 2, kept());
    let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(first)]);
    write(&pool, first, place, pattern(1));
    pause(&pool);
    resume(&pool);
    let second = DeviceOrdinal(1);
    let handle = create(&pool, second, 2, kept());
    let other = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(second)]);
    write(&pool, second, other, pattern(2));
    let assert_intact = |when| {
        assert!(holds(&pool, first, place, pattern(1)), "{when}");
        assert!(holds(&pool, second, other, pattern(2)), "{when}");
    };
    for op in [DriverOp::HostUnregister, DriverOp::HostRegister, DriverOp::HostRegister] {
        pool.driver().faults().fail(op, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
        save(&pool).expect_err("the driver would not pin it");
        pool.driver().faults().clear();
        undo(&pool);
        assert_intact(op.symbol());
    }
    pause(&pool);
    resume(&pool);
    assert_intact("at last");
    assert_eq!(pool.driver().copies_pinned_for_others(), 0);
}

fn save(pool: &SimPool) -> PoolResult<StepLog> {
    pool.save(&WHOLE, UNLIMITED)
}

fn undo(pool: &SimPool) {
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
}

/// Has every driver call of `step` fail, one at a time; `after` undoes what that has left, and tries again.
fn each_fault(
    all: &Holdings,
    before: impl Fn(),
    step: impl Fn() -> PoolResult<StepLog>,
    after: impl Fn(),
) -> u64 {
    // What one pause has used of host memory stays; without it most of the time goes into bringing that in.
    pause(&all.pool);
    resume(&all.pool);
    let faults = all.pool.driver().faults();
    let mut met = 0;
    for &op in DriverOp::ALL {
        for nth in 1.. {
            before();
            assert_eq!(end_streams(&all.pool), 0, "streams stay before call {nth} of {op}");
            let fired = faults.fired();
            faults.fail(op, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
            let outcome = step();
            faults.clear();
            let is_met = faults.fired() > fired;
            after();
            all.assert_intact(&format!("call {nth} of {op}"));
            all.assert_free(all.device_bytes, &format!("call {nth} of {op}"));
            if !is_met {
                break;
            }
            // Streams that the driver keeps are offered to it again.
            assert!(outcome.is_err() || op == DriverOp::StreamDestroy, "{nth} of {op} was hidden");
            met += 1;
        }
    }
    assert_eq!(end_streams(&all.pool), 0, "streams stay");
    met
}

#[test]
fn any_call_of_saving_several_devices_may_fail_and_is_undone() {
    let all = Holdings::on(2, 1);
    let met = each_fault(&all, || all.pool.drain(), || save(&all.pool), || undo(&all.pool));
    assert!(met >= 50, "only {met} calls were met");
}

#[test]
fn any_call_of_restoring_several_devices_may_fail_and_be_tried_again() {
    let all = Holdings::on(2, 1);
    let before = || {
        pause(&all.pool);
        all.pool.create_own(&WHOLE).expect("memory");
    };
    let after = || {
        all.pool.undo_resume().expect("released again");
        all.assert_free(0, "undone");
        resume(&all.pool);
    };
    let met = each_fault(&all, before, || all.pool.restore_own(usize::MAX), after);
    assert!(met >= 50, "only {met} calls were met");
}
