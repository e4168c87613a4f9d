//! Host memory that is brought in before the pause that needs it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, DeviceOrdinal, Driver as _, DriverCode, DriverOp, PciAddress, VaRange,
};
use vmm_pool::{BroughtIn, Contents, HostBudget, HostStanding, NotFrozen, PoolError, StepLog};

use crate::stage::{
    DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, class, create, holds, kept, map, node, pattern,
    pause, pool, resume, write,
};

/// Host memory is taken in pieces of this size.
const CHUNK: u64 = 256 << 20;
/// For what comes immediately on a machine that is not busy.
const SOON: Duration = Duration::from_mins(1);

fn large_node() -> SimNode {
    SimNode::private(&[4 * CHUNK; 2]).expect("a node")
}

/// `size_bytes` of memory that is kept, with contents at its end.
fn filled(pool: &SimPool, device: DeviceOrdinal, size_bytes: u64, contents: Contents) -> VaRange {
    let handle = create(pool, device, size_bytes / UNIT, class(contents));
    let range = map(pool, handle, size_bytes, &[AccessDesc::read_write(device)]);
    write(pool, device, end_of(range), pattern(size_bytes));
    range
}

fn end_of(range: VaRange) -> VaRange {
    VaRange::new(vmm_pool::driver::DeviceAddress(range.end().0 - UNIT), UNIT)
}

fn is_whole(pool: &SimPool, device: DeviceOrdinal, range: VaRange) -> bool {
    holds(pool, device, end_of(range), pattern(range.size_bytes))
}

/// Brings in what is missing, up to `most_bytes` in all.
fn bring_in(pool: &SimPool, most_bytes: u64) -> Vec<StepLog> {
    let mut logs = Vec::new();
    loop {
        match pool.host_memory().bring_in(pool.gate(), most_bytes).expect("host memory") {
            BroughtIn::Chunk { log, .. } => logs.push(log),
            BroughtIn::Enough => return logs,
            BroughtIn::NotNow => panic!("nobody else is there"),
        }
    }
}

fn names(log: &StepLog) -> Vec<&'static str> {
    log.steps.iter().map(|step| step.name).collect()
}

fn held(pool: &SimPool) -> (u64, u64) {
    let HostStanding { held_bytes, wanted_bytes, .. } = pool.host_memory().standing();
    assert_eq!(pool.report().host_arena_bytes, held_bytes);
    (held_bytes, wanted_bytes)
}

#[test]
fn a_first_pause_takes_no_host_memory_that_was_brought_in_before() {
    let pool = pool(&large_node());
    let range = filled(&pool, DEVICE, CHUNK + 4 * UNIT, Contents::Keep);
    let scratch = filled(&pool, DEVICE, CHUNK, Contents::Discard);
    assert_eq!(held(&pool), (0, 2 * CHUNK), "what is discarded takes none");
    let logs = bring_in(&pool, u64::MAX);
    assert_eq!(logs.len(), 2);
    assert_eq!(names(&logs[0]), ["touch host memory", "pin host memory"]);
    assert_eq!(held(&pool), (2 * CHUNK, 2 * CHUNK));
    assert_eq!(pool.driver().census().host_ranges, 2);
    assert_eq!(pool.host_memory().demand(&WHOLE).grow_bytes, 0);
    let log = pool.save(&WHOLE, HostBudget(Some(0))).expect("nothing is to be taken");
    assert!(!names(&log).contains(&"wait for host memory"), "{log:?}");
    assert!(!names(&log).contains(&"pin host memory"), "{log:?}");
    pool.release_selected().expect("released");
    resume(&pool);
    assert!(is_whole(&pool, DEVICE, range));
    assert_eq!(scratch.size_bytes, CHUNK);
    assert_eq!(pool.driver().census().host_ranges, 2);
}

#[test]
fn no_more_is_held_than_the_bound() {
    let pool = pool(&large_node());
    filled(&pool, DEVICE, 2 * CHUNK + UNIT, Contents::Keep);
    filled(&pool, DEVICE, UNIT, Contents::File);
    assert_eq!(held(&pool), (0, 4 * CHUNK), "the ring is one more");
    for (most_bytes, chunks) in [(CHUNK - 1, 0), (CHUNK, 1), (3 * CHUNK - 1, 1), (0, 0)] {
        assert_eq!(bring_in(&pool, most_bytes).len(), chunks, "{most_bytes}");
    }
    assert_eq!(held(&pool).0, 2 * CHUNK);
    bring_in(&pool, u64::MAX);
    assert_eq!(held(&pool), (4 * CHUNK, 4 * CHUNK));
    let log = pool.save(&WHOLE, HostBudget(Some(0))).expect("saved");
    assert!(!names(&log).contains(&"pin host memory"), "the ring too: {log:?}");
    pool.release_selected().expect("released");
    assert_eq!(bring_in(&pool, u64::MAX).len(), 0, "while paused there is enough");
    resume(&pool);
}

#[test]
fn no_context_is_made_and_the_pause_pins_what_is_not_pinned() {
    let node = large_node();
    let driver = SimDriver::new(node, SimOptions::default());
    let pool = SimPool::new(Arc::new(driver), 2);
    let handle = create(&pool, OTHER, 2, kept());
    let range = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(OTHER)]);
    let logs = bring_in(&pool, u64::MAX);
    assert_eq!(names(&logs[0]), ["touch host memory"]);
    for device in [DEVICE, OTHER] {
        assert!(!pool.driver().has_context(device).expect("a device"), "{device}");
    }
    assert_eq!(pool.driver().census().host_ranges, 0);
    write(&pool, OTHER, range, pattern(1));
    let log = pool.save(&WHOLE, HostBudget(Some(0))).expect("saved");
    assert!(names(&log).contains(&"pin host memory"), "{log:?}");
    pool.release_selected().expect("released");
    resume(&pool);
    assert!(holds(&pool, OTHER, range, pattern(1)));
    assert_eq!(pool.driver().census().host_ranges, 1);
}

#[test]
fn refused_pinning_leaves_nothing_behind_and_names_the_call() {
    let pool = pool(&large_node());
    let range = filled(&pool, DEVICE, UNIT, Contents::Keep);
    let faults = pool.driver().faults();
    for op in
        [DriverOp::HostRegister, DriverOp::ExchangeCaptureMode, DriverOp::PrimaryContextRetain]
    {
        faults.fail(op, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
        let error = pool.host_memory().bring_in(pool.gate(), u64::MAX).expect_err("refused");
        assert!(matches!(error, PoolError::Driver { size_bytes: UNIT, .. }), "{error}");
        assert!(error.to_string().contains("pinning of host memory"), "{error}");
        faults.clear();
        assert_eq!((held(&pool).0, pool.driver().census().host_ranges), (0, 0), "{op}");
    }
    bring_in(&pool, u64::MAX);
    pause(&pool);
    resume(&pool);
    assert!(is_whole(&pool, DEVICE, range));
}

#[test]
fn what_was_brought_in_stays_over_a_pause_that_comes_to_nothing_and_goes_with_the_pool() {
    let node = large_node();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let pool = SimPool::new(Arc::clone(&driver), 2);
    pool.host_memory().set_file_dir("/dev/shm".into());
    let range = filled(&pool, DEVICE, CHUNK + UNIT, Contents::Keep);
    filled(&pool, DEVICE, UNIT, Contents::File);
    bring_in(&pool, u64::MAX);
    pool.save(&WHOLE, UNLIMITED).expect("saved");
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
    assert_eq!(held(&pool), (3 * CHUNK, 3 * CHUNK));
    assert!(is_whole(&pool, DEVICE, range));
    drop(pool);
    assert_eq!(driver.census().host_ranges, 0);
}

#[test]
fn after_a_pause_what_it_used_and_what_has_come_is_wanted() {
    let pool = pool(&large_node());
    let large = filled(&pool, DEVICE, 2 * CHUNK, Contents::Keep);
    // All but the last bytes are nothing that anybody needs.
    pool.mark_unused(&[VaRange::new(large.start, 2 * CHUNK)]);
    filled(&pool, DEVICE, UNIT, Contents::Keep);
    assert_eq!(held(&pool), (0, 3 * CHUNK));
    pause(&pool);
    resume(&pool);
    let (held_bytes, wanted_bytes) = held(&pool);
    assert_eq!((held_bytes, wanted_bytes), (UNIT, UNIT), "as much as the pause used");
    filled(&pool, DEVICE, CHUNK, Contents::Keep);
    assert_eq!(held(&pool), (UNIT, UNIT + CHUNK));
    assert_eq!(bring_in(&pool, u64::MAX).len(), 1);
}

#[test]
fn pauses_beside_it_take_what_is_on_its_way_and_never_more_than_they_need() {
    let pool = pool(&large_node());
    let range = filled(&pool, DEVICE, CHUNK + UNIT, Contents::Keep);
    let is_over = AtomicBool::new(false);
    let brought_in = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                match pool.host_memory().bring_in(pool.gate(), u64::MAX).expect("host memory") {
                    BroughtIn::Chunk { .. } => drop(brought_in.fetch_add(1, Ordering::Relaxed)),
                    BroughtIn::Enough | BroughtIn::NotNow => std::thread::yield_now(),
                }
            }
        });
        for round in 0..4 {
            let seen = brought_in.load(Ordering::Relaxed);
            while round == 0 && brought_in.load(Ordering::Relaxed) == seen {
                std::thread::yield_now();
            }
            pause(&pool);
            assert_eq!(held(&pool).0, 2 * CHUNK, "{round}");
            resume(&pool);
            assert!(is_whole(&pool, DEVICE, range), "{round}");
            pool.copies().give_back(true);
            pause(&pool);
            resume(&pool);
            pool.copies().give_back(false);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(u64::from(brought_in.load(Ordering::Relaxed) > 0), 1);
    assert!(held(&pool).0 <= 2 * CHUNK);
}

#[test]
fn nothing_is_brought_in_once_the_process_ends() {
    let pool = pool(&large_node());
    filled(&pool, DEVICE, UNIT, Contents::Keep);
    pool.host_memory().stop(Duration::from_secs(1));
    assert_eq!(
        pool.host_memory().bring_in(pool.gate(), u64::MAX).expect("no call"),
        BroughtIn::NotNow
    );
    assert_eq!(held(&pool).0, 0);
    pause(&pool);
    resume(&pool);
    assert_eq!(held(&pool).0, UNIT, "a pause takes what it needs");
}

#[test]
fn host_memory_is_brought_in_again_behind_a_freeze() {
    let pool = pool(&large_node());
    filled(&pool, DEVICE, CHUNK, Contents::Keep);
    pause(&pool);
    let (frozen, _) = pool.keeper().freeze(SOON).expect("away");
    drop(frozen.thaw());
    resume(&pool);
    filled(&pool, DEVICE, CHUNK, Contents::Keep);
    assert_eq!(bring_in(&pool, u64::MAX).len(), 1);
}

#[test]
fn host_memory_is_brought_in_again_behind_a_freeze_that_did_not_wait_for_it() {
    let pool = pool(&large_node());
    let range = filled(&pool, DEVICE, CHUNK, Contents::Keep);
    // The pause itself needs none.
    pool.mark_unused(&[range]);
    std::thread::scope(|scope| {
        let pinning = pool.driver().faults().hold(DriverOp::HostRegister);
        let bringing = scope.spawn(|| {
            pool.driver().make_current(DEVICE).expect("device 0");
            pool.host_memory()
                .bring_in(pool.gate(), u64::MAX)
                .map(|came| matches!(came, BroughtIn::Chunk { .. }))
        });
        assert!(pinning.is_met(SOON), "it is on its way");
        pause(&pool);
        let refused = pool.keeper().freeze(Duration::ZERO).map(drop);
        let refused = refused.map_err(|failed| failed.error);
        assert_eq!(refused.expect_err("it is being pinned"), NotFrozen::Pinning);
        drop(pinning);
        assert!(bringing.join().expect("no panic").expect("host memory"));
    });
    resume(&pool);
    filled(&pool, DEVICE, 2 * CHUNK, Contents::Keep);
    assert_eq!(bring_in(&pool, u64::MAX).len(), 1);
}

#[test]
fn what_comes_when_a_pause_has_taken_as_much_is_not_kept() {
    let pool = pool(&large_node());
    let range = filled(&pool, DEVICE, CHUNK, Contents::Keep);
    std::thread::scope(|scope| {
        let pinning = pool.driver().faults().hold(DriverOp::HostRegister);
        let bringing = scope.spawn(|| {
            pool.driver().make_current(DEVICE).expect("device 0");
            pool.host_memory().bring_in(pool.gate(), u64::MAX).expect("host memory")
        });
        assert!(pinning.is_met(SOON), "it is on its way");
        // It waits for a while, and no longer.
        pause(&pool);
        drop(pinning);
        assert_eq!(bringing.join().expect("no panic"), BroughtIn::NotNow);
    });
    assert_eq!((held(&pool).0, pool.driver().census().host_ranges), (CHUNK, 1));
    resume(&pool);
    assert!(is_whole(&pool, DEVICE, range));
}

static ASKED: AtomicU32 = AtomicU32::new(0);

#[test]
fn the_node_of_each_device_is_asked_by_its_pci_address() {
    #[expect(clippy::unnecessary_wraps, reason = "the pool asks for it")]
    fn node_of(address: PciAddress) -> Option<u32> {
        assert_eq!((address.domain, address.device), (0, 0));
        assert_eq!(address.to_string(), format!("0000:{:02x}:00.0", address.bus));
        ASKED.fetch_or(1 << address.bus, Ordering::Relaxed);
        Some(0)
    }
    let pool = pool(&large_node());
    pool.devices().place_on_nodes(node_of);
    let here = filled(&pool, DEVICE, UNIT, Contents::Keep);
    let there = filled(&pool, OTHER, UNIT, Contents::Keep);
    bring_in(&pool, u64::MAX);
    assert_eq!(ASKED.load(Ordering::Relaxed), 0b110);
    pause(&pool);
    resume(&pool);
    assert!(is_whole(&pool, DEVICE, here) && is_whole(&pool, OTHER, there));
}

#[test]
fn what_a_pause_has_taken_for_its_contents_is_not_idle() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let place = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, place, pattern(3));
    pause(&pool);
    resume(&pool);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let held_bytes = pool.report().host_arena_bytes;
    assert_eq!(pool.host_memory().give_idle_chunk_back(pool.gate()).expect("not now"), 0);
    assert_eq!(pool.report().host_arena_bytes, held_bytes);
    pool.remount().expect("undone");
    drop(pool.commit_resume());
    assert_eq!(
        pool.host_memory().give_idle_chunk_back(pool.gate()).expect("idle again"),
        held_bytes
    );
}
