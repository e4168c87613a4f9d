//! Copies of one device through two links: its own and a neighbour's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{FaultSpan, Latency, PeerReach, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, DeviceAddress, DeviceOrdinal, Driver, DriverCode, DriverOp, VaRange,
};
use vmm_pool::{Contents, Links, Pieces, PoolResult, StepLog, VirtualHandle};

use crate::stage::{
    DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, class, create, free_bytes, holds, kept, map,
    pattern, pause, resume, write,
};

const DEVICE_BYTES: u64 = 512 << 20;
const CONTEXT_BYTES: u64 = 4 * UNIT;

fn links() -> Links {
    Links { least_bytes: UNIT, parcel_bytes: UNIT, ..Links::default() }
}

fn options() -> SimOptions {
    SimOptions { context_bytes: CONTEXT_BYTES, ..SimOptions::default() }
}

/// A process whose neighbours nobody has memory on.
fn process(devices: usize, links: Links, options: SimOptions) -> SimPool {
    let node = SimNode::private(&vec![DEVICE_BYTES; devices]).expect("a node");
    on(&node, links, options)
}

fn on(node: &SimNode, links: Links, options: SimOptions) -> SimPool {
    let driver = SimDriver::new(node.clone(), options);
    driver.make_current(DEVICE).expect("device 0");
    let pool = SimPool::new(Arc::new(driver), 0);
    pool.set_file_dir("/dev/shm".into());
    pool.use_links(links);
    pool.set_held_elsewhere(Some(BTreeSet::new()));
    pool
}

/// Memory of all kinds on the first device, and what it must hold.
struct Holdings {
    pool: SimPool,
    contents: Vec<(VaRange, u64)>,
    unmapped: Vec<(VirtualHandle, u64)>,
    device_bytes: u64,
    seed: u64,
}

impl Holdings {
    /// So many units and some, in host memory.
    fn plain(pool: SimPool, units: u64) -> Self {
        let mut all =
            Self { pool, contents: Vec::new(), unmapped: Vec::new(), device_bytes: 0, seed: 1 };
        for size in [2, 1, units] {
            all.add(size, Contents::Keep);
        }
        all
    }

    /// With some in a file, and some that is mapped nowhere, which take one link.
    fn new(pool: SimPool, units: u64) -> Self {
        let mut all = Self::plain(pool, units);
        all.add(1, Contents::File);
        let hidden = create(&all.pool, DEVICE, 1, kept());
        let place = map(&all.pool, hidden, UNIT, &[AccessDesc::read_write(DEVICE)]);
        write(&all.pool, DEVICE, place, pattern(77));
        all.pool.unmap(place).expect("unmap");
        crate::stage::free_addresses(&all.pool, place);
        all.unmapped.push((hidden, 77));
        all.device_bytes += UNIT;
        all
    }

    fn add(&mut self, units: u64, contents: Contents) {
        let handle = create(&self.pool, DEVICE, units, class(contents));
        let place = map(&self.pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
        write(&self.pool, DEVICE, place, pattern(self.seed));
        self.contents.push((place, self.seed));
        self.seed += 1;
        self.device_bytes += units * UNIT;
    }

    fn assert_intact(&self, when: &str) {
        for (place, seed) in &self.contents {
            assert!(holds(&self.pool, DEVICE, *place, pattern(*seed)), "{when}: {place:?}");
        }
        for (handle, seed) in &self.unmapped {
            let place = map(&self.pool, *handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
            assert!(holds(&self.pool, DEVICE, place, pattern(*seed)), "{when}");
            self.pool.unmap(place).expect("unmap");
            crate::stage::free_addresses(&self.pool, place);
        }
    }

    fn assert_used(&self, own: u64, neighbour: u64, when: &str) {
        let used = |device| DEVICE_BYTES - free_bytes(&self.pool, device);
        assert_eq!(used(DEVICE), own + CONTEXT_BYTES, "{when}");
        assert_eq!(used(OTHER), neighbour, "{when}: on the neighbour");
    }
}

/// A pause that gives everything back, with what it did.
fn paused(pool: &SimPool) -> StepLog {
    let mut log = pool.save(&WHOLE, UNLIMITED).expect("saving");
    log.add(pool.release_selected().expect("release"));
    log
}

/// A resume, with what it did.
fn resumed(pool: &SimPool) -> StepLog {
    pool.create_own(&WHOLE).expect("memory");
    let log = pool.restore_own(usize::MAX).expect("contents");
    drop(pool.commit_resume());
    log
}

/// Pauses and resumes until copies have taken the neighbour's link both ways, which threads that come late do not.
fn cycle_until_relayed(all: &Holdings) -> [StepLog; 2] {
    let end = Instant::now() + Duration::from_mins(2);
    loop {
        let out = paused(&all.pool);
        let back = resumed(&all.pool);
        assert_eq!((&out.notes, &back.notes), (&Vec::new(), &Vec::new()));
        all.assert_intact("after a cycle");
        if out.neighbour_bytes > 0 && back.neighbour_bytes > 0 {
            return [out, back];
        }
        assert!(Instant::now() < end, "nothing takes the neighbour's link: {out:?} {back:?}");
    }
}

#[test]
fn copies_take_both_links_and_nothing_stays_on_the_neighbour() {
    let all = Holdings::new(process(2, links(), options()), 16);
    let driver = Arc::clone(all.pool.driver());
    let before = driver.host_copied_bytes(OTHER);
    let out = paused(&all.pool);
    all.assert_used(0, 0, "paused");
    assert_eq!(driver.host_copied_bytes(OTHER) - before, out.neighbour_bytes, "as the devices say");
    resumed(&all.pool);
    all.assert_used(all.device_bytes, 0, "resumed");
    let [out, back] = cycle_until_relayed(&all);
    for log in [out, back] {
        assert!(log.neighbour_bytes < log.bytes, "{log:?}");
    }
    all.assert_used(all.device_bytes, 0, "resumed");
    assert_eq!(driver.has_primary_context(OTHER), Ok(false));
    assert_eq!((driver.census().streams, driver.copies_pinned_for_others()), (0, 0));
}

#[test]
fn a_context_that_is_kept_serves_the_next_step_and_goes_when_the_neighbour_is_taken() {
    let all = Holdings::new(process(2, Links { keeps_context: true, ..links() }, options()), 16);
    let driver = Arc::clone(all.pool.driver());
    cycle_until_relayed(&all);
    all.assert_used(all.device_bytes, CONTEXT_BYTES, "resumed");
    paused(&all.pool);
    all.assert_used(0, CONTEXT_BYTES, "paused");
    resumed(&all.pool);
    all.pool.set_held_elsewhere(Some(BTreeSet::from([all.pool.uuid(OTHER)])));
    let log = paused(&all.pool);
    assert_eq!(log.neighbour_bytes, 0);
    let [note] = log.notes.as_slice() else { panic!("{:?}", log.notes) };
    assert!(note.contains("GPU 1") && note.contains("another process"), "{note}");
    all.assert_used(0, 0, "paused, with the neighbour taken");
    assert_eq!(driver.has_primary_context(OTHER), Ok(false));
    assert_eq!(resumed(&all.pool).notes, Vec::<String>::new(), "said once");
    all.assert_intact("by one link");
}

#[test]
fn without_a_fitting_neighbour_one_link_is_used_and_the_reason_said_once() {
    let no_peers = SimOptions { peers: PeerReach::Nothing, ..options() };
    let by_bus = SimOptions { peers: PeerReach::Bus, ..options() };
    let together = Links { shares_link: |_, _| true, ..links() };
    for (pool, why) in [
        (process(1, links(), options()), "no other GPU"),
        (process(2, links(), no_peers), "out of its reach"),
        (process(2, links(), by_bus), "over the bus"),
        (process(2, together, options()), "same part of the bus"),
        (
            {
                let pool = process(2, links(), options());
                pool.set_held_elsewhere(None);
                pool
            },
            "could not be asked",
        ),
        (
            {
                let pool = process(2, links(), options());
                pool.driver().make_current(OTHER).expect("the application's own context");
                pool.driver().make_current(DEVICE).expect("device 0");
                pool
            },
            "is used by this process",
        ),
        (
            {
                let node = SimNode::private(&[DEVICE_BYTES; 2]).expect("a node");
                let other = crate::stage::pool(&node);
                create(&other, OTHER, 40, kept());
                let pool = on(&node, links(), options());
                // Its memory goes with it.
                Box::leak(Box::new(other));
                pool
            },
            "other processes use it",
        ),
    ] {
        let all = Holdings::new(pool, 16);
        for cycle in 0..2 {
            let (out, back) = (paused(&all.pool), resumed(&all.pool));
            assert_eq!(out.neighbour_bytes + back.neighbour_bytes, 0, "{why}");
            assert_eq!(out.notes.len(), usize::from(cycle == 0), "{why}: {:?}", out.notes);
            assert!(out.notes.iter().all(|note| note.contains(why)), "{why}: {:?}", out.notes);
            assert_eq!(back.notes, Vec::<String>::new(), "{why}");
            all.assert_intact(why);
        }
        assert_eq!(all.pool.driver().census().streams, 0, "{why}");
    }
}

#[test]
fn little_is_copied_by_one_link_and_of_two_devices_each_takes_its_own() {
    let few = Holdings::new(process(2, Links { least_bytes: 1 << 30, ..links() }, options()), 16);
    let log = paused(&few.pool);
    assert_eq!((log.neighbour_bytes, log.notes), (0, Vec::new()));
    resumed(&few.pool);
    few.assert_intact("by one link");

    let two = Holdings::new(process(3, links(), options()), 16);
    let handle = create(&two.pool, OTHER, 4, kept());
    let place = map(&two.pool, handle, 4 * UNIT, &[AccessDesc::read_write(OTHER)]);
    write(&two.pool, OTHER, place, pattern(9));
    let log = paused(&two.pool);
    assert_eq!(log.neighbour_bytes, 0);
    resumed(&two.pool);
    two.assert_intact("of two devices");
    assert!(holds(&two.pool, OTHER, place, pattern(9)));
}

#[test]
fn memory_of_the_process_on_one_neighbour_leaves_the_next() {
    let all = Holdings::new(process(3, links(), options()), 16);
    let handle = create(&all.pool, OTHER, 4, class(Contents::Discard));
    map(&all.pool, handle, 4 * UNIT, &[AccessDesc::read_write(OTHER)]);
    let third = DeviceOrdinal(2);
    let end = Instant::now() + Duration::from_mins(2);
    while all.pool.driver().host_copied_bytes(third) == 0 {
        assert!(Instant::now() < end, "the third device is not used");
        pause(&all.pool);
        resume(&all.pool);
        all.assert_intact("with memory on the second");
    }
    assert_eq!(all.pool.driver().host_copied_bytes(OTHER), 0);
    assert_eq!(free_bytes(&all.pool, third), DEVICE_BYTES);
}

#[test]
fn zeros_and_what_has_not_changed_are_left_out_on_both_links() {
    let all = Holdings::plain(process(2, links(), options()), 16);
    all.pool.set_pieces(Pieces::BOTH);
    let handle = create(&all.pool, DEVICE, 16, kept());
    let mixed = map(&all.pool, handle, 16 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&all.pool, DEVICE, mixed, [0; 16]);
    let part = |index: u64| {
        let start = mixed.start.0 + index * (128 << 10);
        VaRange::new(DeviceAddress(start), 64 << 10)
    };
    for round in 0..4 {
        for index in 0..100 {
            write(&all.pool, DEVICE, part(index), pattern(1000 * (round + 1) + index));
        }
        let log = paused(&all.pool);
        let kept = log.kept.expect("a save");
        assert!(log.neighbour_bytes <= kept.copied_bytes);
        if round > 0 {
            assert_eq!(kept.copied_bytes, (100 * 64) << 10, "{kept:?}");
        }
        resumed(&all.pool);
        for index in 0..100 {
            assert!(holds(&all.pool, DEVICE, part(index), pattern(1000 * (round + 1) + index)));
            let between = VaRange::new(part(index).end(), 64 << 10);
            assert!(holds(&all.pool, DEVICE, between, [0; 16]), "zeros behind {index}");
        }
        all.assert_intact("in pieces");
    }
}

/// Has every driver call of `step` fail, one at a time, once or from then on.
fn each_fault(
    all: &Holdings,
    before: impl Fn(),
    step: impl Fn() -> PoolResult<StepLog>,
    after: impl Fn(bool),
) -> (u64, u64) {
    let faults = all.pool.driver().faults();
    let (mut met, mut hidden) = (0, 0);
    for &op in DriverOp::ALL {
        for nth in 1.. {
            before();
            let fired = faults.fired();
            faults.fail(op, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
            let outcome = step();
            faults.clear();
            let is_met = faults.fired() > fired;
            after(outcome.is_ok());
            let when = format!("call {nth} of {op}: {outcome:?}");
            all.assert_intact(&when);
            let used = DEVICE_BYTES - free_bytes(&all.pool, DEVICE);
            assert_eq!(used, all.device_bytes + CONTEXT_BYTES, "{when}");
            // Which calls the lanes make, and so how many, depends on who is faster.
            if !is_met || nth > 7 {
                break;
            }
            met += 1;
            hidden += u64::from(outcome.is_ok());
        }
    }
    // What the driver kept is offered to it again.
    pause(&all.pool);
    resume(&all.pool);
    all.assert_used(all.device_bytes, 0, "in the end");
    let census = all.pool.driver().census();
    assert_eq!(census.streams, 0, "streams stay");
    (met, hidden)
}

/// Bytes on `device` that the report has as not taken back.
fn deferred_on(pool: &SimPool, device: DeviceOrdinal) -> u64 {
    let report = pool.report();
    let rows = report.devices.iter().filter(|row| row.device == device);
    rows.flat_map(|row| &row.pinned).map(|row| row.bytes).sum()
}

fn forgiving(units: u64) -> Holdings {
    let all = Holdings::new(process(2, links(), options()), units);
    pause(&all.pool);
    resume(&all.pool);
    all
}

#[test]
fn any_call_of_saving_by_two_links_may_fail() {
    let all = forgiving(3);
    let save = || all.pool.save(&WHOLE, UNLIMITED);
    let undo = |_| {
        all.pool.remount().expect("mapped again");
        drop(all.pool.commit_resume());
        all.pool.use_links(links());
    };
    let (met, hidden) = each_fault(&all, || all.pool.drain(), save, undo);
    assert!(met >= 40, "only {met} calls were met");
    assert!(hidden >= 5, "only {hidden} refusals of the neighbour cost nothing but time");
}

#[test]
fn any_call_of_restoring_by_two_links_may_fail() {
    let all = forgiving(3);
    let before = || {
        pause(&all.pool);
        all.pool.create_own(&WHOLE).expect("memory");
    };
    let after = |is_restored| {
        if is_restored {
            drop(all.pool.commit_resume());
        } else {
            all.pool.undo_resume().expect("released again");
            resume(&all.pool);
        }
        all.pool.use_links(links());
    };
    let (met, hidden) = each_fault(&all, before, || all.pool.restore_own(usize::MAX), after);
    assert!(met >= 40, "only {met} calls were met");
    assert!(hidden >= 5, "only {hidden} refusals of the neighbour cost nothing but time");
}

#[test]
fn staging_that_the_driver_will_not_unmap_is_counted_until_it_is_gone() {
    let kept = Links { keeps_context: true, ..links() };
    let all = Holdings::plain(process(2, kept, options()), 16);
    let faults = all.pool.driver().faults();
    let there = || DEVICE_BYTES - free_bytes(&all.pool, OTHER);
    let end = Instant::now() + Duration::from_mins(2);
    // Which call it is depends on when the lanes end; that of a mapping of the process itself fails the pause.
    for nth in (1..8).cycle() {
        all.pool.drain();
        faults.fail(DriverOp::Unmap, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let saved = all.pool.save(&WHOLE, UNLIMITED);
        faults.clear();
        match saved {
            Ok(_) if there() > CONTEXT_BYTES => break,
            Ok(_) => {
                all.pool.release_selected().expect("release");
                resumed(&all.pool);
            }
            Err(_) => {
                all.pool.remount().expect("mapped again");
                drop(all.pool.commit_resume());
            }
        }
        assert!(Instant::now() < end, "no staging is unmapped");
    }
    assert_eq!(deferred_on(&all.pool, OTHER), there() - CONTEXT_BYTES);
    all.pool.release_selected().expect("release");
    resumed(&all.pool);
    assert_eq!((there(), deferred_on(&all.pool, OTHER)), (CONTEXT_BYTES, 0));
    all.assert_intact("in the end");
}

#[test]
fn a_neighbour_that_refuses_is_said_once_and_asked_no_more() {
    for op in
        [DriverOp::Create, DriverOp::AddressReserve, DriverOp::SetAccess, DriverOp::CopyBetween]
    {
        let all = Holdings::plain(process(2, links(), options()), 16);
        let faults = all.pool.driver().faults();
        let end = Instant::now() + Duration::from_mins(2);
        // With nothing to carry left, a lane that comes late makes no copy.
        loop {
            all.pool.drain();
            let fired = faults.fired();
            faults.fail(op, FaultSpan::From(1), DriverCode::NOT_SUPPORTED);
            let log = all.pool.save(&WHOLE, UNLIMITED).expect("by one link");
            faults.clear();
            all.pool.release_selected().expect("release");
            assert_eq!(log.neighbour_bytes, 0);
            if faults.fired() > fired {
                let [note] = log.notes.as_slice() else { panic!("{:?}", log.notes) };
                assert!(note.contains(op.symbol()) && note.contains("GPU 1"), "{note}");
                break;
            }
            assert!(Instant::now() < end, "{op} is never called");
            resumed(&all.pool);
        }
        let calls = faults.calls(DriverOp::PrimaryContextRelease);
        let back = resumed(&all.pool);
        let out = paused(&all.pool);
        let said = [&back.notes, &out.notes].map(Vec::len);
        assert!(said == [1, 0] || said == [0, 0], "{said:?} {:?}", back.notes);
        assert_eq!(faults.calls(DriverOp::PrimaryContextRelease), calls, "asked again");
        all.assert_used(0, 0, "paused");
        resumed(&all.pool);
        all.assert_intact(op.symbol());
    }
}

/// Has `step` meet a neighbour whose work fails with `code` once it carries something, and whose context does not go.
fn with_failing_neighbour<T>(pool: &SimPool, code: DriverCode, step: impl FnOnce() -> T) -> T {
    let driver = Arc::clone(pool.driver());
    let calls = || driver.faults().calls(DriverOp::CopyBetween);
    let before = calls();
    driver.faults().fail(DriverOp::PrimaryContextRelease, FaultSpan::From(1), code);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while calls() == before && !is_over.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            driver.set_failure(OTHER, Some(code)).expect("it is there");
        });
        let done = step();
        is_over.store(true, Ordering::Release);
        done
    })
}

/// A process whose neighbour is slow enough for a failure in the middle of a copy.
fn with_slow_neighbour() -> Holdings {
    let latency = Latency::default().with(DriverOp::CopyBetween, 20_000);
    Holdings::plain(process(2, links(), SimOptions { latency, ..options() }), 24)
}

#[test]
fn a_neighbour_that_dies_while_it_carries_costs_no_byte_and_is_asked_no_more() {
    for dies_in_pause in [true, false] {
        let end = Instant::now() + Duration::from_mins(2);
        loop {
            assert!(Instant::now() < end, "the neighbour carries nothing");
            let all = with_slow_neighbour();
            let pool = &all.pool;
            let code = DriverCode::ECC_UNCORRECTABLE;
            let (out, back) = if dies_in_pause {
                let out = with_failing_neighbour(pool, code, || pool.save(&WHOLE, UNLIMITED));
                let mut out = out.expect("by one link");
                out.add(pool.release_selected().expect("nothing is under way"));
                (out, resumed(pool))
            } else {
                let out = paused(pool);
                pool.create_own(&WHOLE).expect("memory");
                let back = with_failing_neighbour(pool, code, || pool.restore_own(usize::MAX));
                drop(pool.commit_resume());
                (out, back.expect("by one link"))
            };
            all.assert_intact("after it");
            let notes: Vec<_> = out.notes.iter().chain(&back.notes).collect();
            let about = |note: &&&String| note.contains("not that of GPU 1");
            if notes.iter().filter(about).count() == 0 {
                continue;
            }
            assert_eq!(notes.iter().filter(about).count(), 1, "{notes:?}");
            let (out, back) = (paused(pool), resumed(pool));
            assert_eq!(out.neighbour_bytes + back.neighbour_bytes, 0);
            all.assert_intact("without it");
            break;
        }
    }
}

#[test]
fn copies_of_a_neighbour_that_nobody_saw_end_keep_no_memory_away_and_hold_the_next_pause_up() {
    let end = Instant::now() + Duration::from_mins(2);
    loop {
        assert!(Instant::now() < end, "the neighbour carries nothing");
        let all = with_slow_neighbour();
        let pool = &all.pool;
        let saved =
            with_failing_neighbour(pool, DriverCode::UNKNOWN, || pool.save(&WHOLE, UNLIMITED));
        let log = saved.expect("by one link");
        pool.release_selected().expect("no memory of the application's is in use");
        resumed(pool);
        all.assert_intact("back");
        if log.notes.is_empty() {
            continue;
        }
        // Its place in host memory is given to nothing else until it is known to be over.
        pool.drain();
        let refused = pool.save(&WHOLE, UNLIMITED).expect_err("copies may come yet");
        assert!(refused.to_string().contains("through a neighbour"), "{refused}");
        pool.remount().expect("as before");
        drop(pool.commit_resume());
        all.assert_intact("refused");
        pool.driver().set_failure(OTHER, None).expect("it is there");
        pause(pool);
        resume(pool);
        all.assert_intact("settled");
        break;
    }
}
