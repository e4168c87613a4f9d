//! Copies to a device that a kernel of ours makes, where the copy engine is slow.

#![expect(unsafe_code, reason = "ends a stream of the application's")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use vmm_pool::driver::sim::{FaultSpan, Latency, SimDriver, SimNode, SimOptions, Work};
use vmm_pool::driver::{AccessDesc, DeviceAddress, Driver, DriverCode, DriverOp, VaRange};
use vmm_pool::{ByDevice, Contents, KernelCopies, Pieces, StepLog};

use crate::stage::{
    DEVICE, SimPool, UNIT, UNLIMITED, WHOLE, class, create, holds, map, pattern, pause, resume,
    write,
};
use crate::tags::{pause_tags, selected, tagged};

const SMALL: KernelCopies = KernelCopies { least_bytes: UNIT, parcel_bytes: UNIT };
const UNITS: u64 = 24;

/// A process whose calls of `slow` take their time.
fn process(slow: Option<DriverOp>) -> SimPool {
    let node = SimNode::private(&[512 << 20]).expect("a node");
    let latency = slow.map_or_else(Latency::default, |op| Latency::default().with(op, 25_000));
    let driver = SimDriver::new(node, SimOptions { latency, ..SimOptions::default() });
    driver.make_current(DEVICE).expect("device 0");
    let pool = SimPool::new(Arc::new(driver), 0);
    pool.set_file_dir("/dev/shm".into());
    pool.use_kernels(Some(SMALL));
    pool
}

/// Memory of several sizes, some of it zero, some in a file.
fn filled(pool: &SimPool, units: u64) -> Vec<(VaRange, u64)> {
    let rights = [AccessDesc::read_write(DEVICE)];
    let mut all = Vec::new();
    for (seed, (units, contents)) in
        [(units, Contents::Keep), (1, Contents::Keep), (2, Contents::File)].into_iter().enumerate()
    {
        let size_bytes = units * UNIT;
        let place = map(pool, create(pool, DEVICE, units, class(contents)), size_bytes, &rights);
        write(pool, DEVICE, place, pattern(seed as u64));
        all.push((place, seed as u64));
    }
    all
}

fn assert_holds(pool: &SimPool, all: &[(VaRange, u64)]) {
    for (place, seed) in all {
        assert!(holds(pool, DEVICE, *place, pattern(*seed)), "{place:?}");
    }
    assert_eq!(pool.driver().census().streams, 0, "streams stay");
}

fn resumed(pool: &SimPool) -> StepLog {
    pool.create_own(&WHOLE).expect("memory");
    let log = pool.restore_own(usize::MAX).expect("contents");
    drop(pool.commit_resume());
    log
}

#[test]
fn while_the_engine_is_slow_a_kernel_copies_and_all_is_right() {
    let pool = process(Some(DriverOp::CopyToDevice));
    let all = filled(&pool, UNITS);
    for _ in 0..2 {
        pause(&pool);
        let log = resumed(&pool);
        // The engine's trial: one that does not count, four that do, and one that is under way then.
        assert!(log.kernel_bytes >= (UNITS - 6) * UNIT, "{log:?}");
        assert!(log.kernel_bytes < log.bytes, "the engine was tried first: {log:?}");
        assert_holds(&pool, &all);
    }
}

#[test]
fn an_engine_that_is_fast_copies_all_but_a_trial() {
    let pool = process(Some(DriverOp::LaunchKernel));
    let all = filled(&pool, UNITS);
    pause(&pool);
    let log = resumed(&pool);
    // One on a busy machine may seem slow now and then, and be tried again.
    assert!((UNIT..=UNITS / 2 * UNIT).contains(&log.kernel_bytes), "{log:?}");
    assert_holds(&pool, &all);
}

#[test]
fn small_pieces_between_large_ones_are_copied_by_the_engine_beside_the_kernel() {
    let pool = process(Some(DriverOp::CopyToDevice));
    pool.set_pieces(Pieces::BOTH);
    pool.use_kernels(Some(KernelCopies { parcel_bytes: 2 * UNIT, ..SMALL }));
    let all = filled(&pool, UNITS);
    let (range, seed) = all[0];
    let piece = 64 << 10;
    let place = |number| VaRange::new(DeviceAddress(range.start.0 + number * piece), piece);
    // Each third unit is zero but for every other piece.
    let zeros: Vec<_> =
        (0..UNITS * UNIT / piece).filter(|n| n / 32 % 3 == 0 && n % 2 == 0).collect();
    for number in &zeros {
        pool.driver().core().fill_device(DEVICE, place(*number), &[0]).expect("mapped");
    }
    pause(&pool);
    let log = resumed(&pool);
    assert!(log.kernel_bytes >= 4 * UNIT, "{log:?}");
    for number in 0..UNITS * UNIT / piece {
        let wanted = if zeros.contains(&number) { [0; 16] } else { pattern(seed) };
        assert!(holds(&pool, DEVICE, place(number), wanted), "piece {number}");
    }
    assert_holds(&pool, &all[1..]);
}

#[test]
fn a_piece_that_is_no_whole_word_is_for_the_engine_and_the_rest_for_the_kernel() {
    let pool = process(Some(DriverOp::CopyToDevice));
    let all = [filled(&pool, UNITS)[0], filled(&pool, UNITS)[0]];
    let odd_bytes = (UNITS - 1) * UNIT + UNIT / 2 + 8;
    for (range, _) in all {
        let unused = DeviceAddress(range.start.0 + odd_bytes);
        pool.mark_unused(&[VaRange::new(unused, range.end().0 - unused.0)]);
    }
    pause(&pool);
    let log = resumed(&pool);
    // But for the engine's trial.
    assert!(log.kernel_bytes >= (2 * UNITS - 9) * UNIT, "{log:?}");
    for (range, seed) in all {
        assert!(holds(&pool, DEVICE, VaRange::new(range.start, odd_bytes), pattern(seed)));
    }
}

#[test]
fn what_lanes_copy_lies_over_zeros_that_are_made_before() {
    let pool = process(Some(DriverOp::Fill));
    pool.set_pieces(Pieces::BOTH);
    pool.use_kernels(Some(KernelCopies { least_bytes: 1, parcel_bytes: 64 << 10 }));
    let rights = [AccessDesc::read_write(DEVICE)];
    let handle = create(&pool, DEVICE, 100, class(Contents::Keep));
    let range = map(&pool, handle, 100 * UNIT, &rights);
    write(&pool, DEVICE, range, [0; 16]);
    let places = [10, 50, 90, 98].map(|number| {
        let place = VaRange::new(DeviceAddress(range.start.0 + number * UNIT), UNIT);
        write(&pool, DEVICE, place, pattern(number));
        (place, number)
    });
    for _ in 0..2 {
        pause(&pool);
        resume(&pool);
        assert_holds(&pool, &places);
        let between = VaRange::new(DeviceAddress(range.start.0 + 11 * UNIT), 39 * UNIT);
        assert!(holds(&pool, DEVICE, between, [0; 16]));
    }
}

#[test]
fn little_is_for_the_engine_and_so_is_all_where_that_was_said() {
    let pool = process(Some(DriverOp::CopyToDevice));
    let all = filled(&pool, UNITS);
    for kernels in [Some(KernelCopies { least_bytes: 1 << 30, ..SMALL }), None] {
        pool.use_kernels(kernels);
        pause(&pool);
        assert_eq!(resumed(&pool).kernel_bytes, 0);
        assert_holds(&pool, &all);
    }
}

#[test]
fn a_driver_that_refuses_the_kernel_costs_nothing_but_time() {
    for op in [DriverOp::HostGetDevicePointer, DriverOp::LaunchKernel] {
        let pool = process(Some(DriverOp::CopyToDevice));
        let all = filled(&pool, UNITS);
        pause(&pool);
        pool.create_own(&WHOLE).expect("memory");
        let faults = pool.driver().faults();
        faults.fail(op, FaultSpan::From(1), DriverCode::NOT_SUPPORTED);
        let log = pool.restore_own(usize::MAX).expect("by the engine");
        assert_eq!(log.kernel_bytes, 0, "{op:?}");
        assert!(faults.fired() > 0, "{op:?} was not asked");
        faults.clear();
        drop(pool.commit_resume());
        assert_holds(&pool, &all);
    }
}

#[test]
fn any_call_of_restoring_with_kernels_may_fail() {
    let pool = process(None);
    let all = filled(&pool, 6);
    let (mut met, mut nth) = (0, 0);
    loop {
        nth += 1;
        pause(&pool);
        pool.create_own(&WHOLE).expect("memory");
        let faults = pool.driver().faults();
        let fired = faults.fired();
        faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let restored = pool.restore_own(usize::MAX);
        let has_fired = faults.fired() > fired;
        faults.clear();
        if restored.is_ok() {
            drop(pool.commit_resume());
        } else {
            pool.undo_resume().expect("released again");
            resume(&pool);
        }
        assert!(
            all.iter().all(|(place, seed)| holds(&pool, DEVICE, *place, pattern(*seed))),
            "{nth}"
        );
        if !has_fired {
            break;
        }
        met += 1;
    }
    assert!(met >= 40, "only {met} calls were met");
    assert_holds(&pool, &all);
}

#[test]
fn a_process_that_ran_meanwhile_is_asked_whether_its_device_is_idle() {
    let pool = process(Some(DriverOp::CopyToDevice));
    let rights = [AccessDesc::read_write(DEVICE)];
    let handle = create(&pool, DEVICE, UNITS, tagged("kv", Contents::Keep));
    let place = map(&pool, handle, UNITS * UNIT, &rights);
    write(&pool, DEVICE, place, pattern(5));
    let stream = pool.driver().stream_create().expect("a stream of the application's");
    // (may the device be asked, is it busy, does a kernel copy)
    for (may_ask, is_busy, copies) in
        [(true, false, true), (false, false, false), (true, true, false)]
    {
        pause_tags(&pool, &["kv"]);
        pool.create_own(&selected(&["kv"])).expect("memory");
        let (end, ends) = channel::<()>();
        if is_busy {
            let ends = std::sync::Mutex::new(ends);
            let work = Work::new(move |_| {
                let limit = Duration::from_secs(20);
                let _ended = ends.lock().map(|ends| ends.recv_timeout(limit));
                Ok(())
            });
            pool.driver().core().enqueue(stream, work).expect("work of the application's");
        }
        if may_ask {
            pool.ask_devices();
        }
        let log = pool.restore_own(usize::MAX).expect("contents");
        drop(end);
        assert_eq!(log.kernel_bytes > 0, copies, "asked {may_ask}, busy {is_busy}: {log:?}");
        drop(pool.commit_resume());
        assert!(holds(&pool, DEVICE, place, pattern(5)));
    }
    // SAFETY: nothing uses it any more.
    unsafe { pool.driver().stream_destroy(stream) }.expect("its end");
}

#[test]
fn what_comes_last_in_a_swap_may_be_copied_by_a_kernel_and_nothing_before_it() {
    let pool = process(Some(DriverOp::CopyToDevice));
    let rights = [AccessDesc::read_write(DEVICE)];
    let place = |seed| {
        let handle = create(&pool, DEVICE, UNITS, class(Contents::Keep));
        let place = map(&pool, handle, UNITS * UNIT, &rights);
        write(&pool, DEVICE, place, pattern(seed));
        (place, seed)
    };
    let all = [place(1), place(2)];
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_rest().expect("all of it");
    let one = ByDevice::from([(DEVICE, UNITS * UNIT)]);
    assert_eq!(pool.restore_stage(&one).expect("a stage").log.kernel_bytes, 0);
    assert!(pool.restore_stage(&one).expect("the last").log.kernel_bytes > 0);
    pool.restore_rest(usize::MAX).expect("nothing more");
    drop(pool.commit_resume());
    assert_holds(&pool, &all);
}
