//! Tests of saved contents that move to the file to make room in host memory, and are restored from there.

use std::cell::Cell;
use std::time::{Duration, Instant};

use sublet_pager::Pager;
use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimNode};
use vmm_pool::driver::{AccessDesc, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, PoolError, SavedError, Spilled, Stance};

use crate::paged::{pager, unlimited};
use crate::stage::{
    DEVICE, GateAt, SimPool, UNIT, class, create, gate_of, holds, map, pattern, pause, pause_tags,
    pool, resume, resume_tags, write,
};

const CHUNK: u64 = 256 << 20;
/// The size of an allocation. Two of this size do not fit into one chunk.
const LARGE: u64 = 65;
const SMALL: u64 = 2;

const WAIT: Duration = Duration::from_mins(1);

/// A time that no step needs.
fn later() -> Instant {
    Instant::now() + Duration::from_hours(1)
}

fn tagged(tag: &str, contents: Contents) -> Class {
    Class { library: "test", tag: tag.to_owned(), contents }
}

fn a_pool() -> (SimPool, tempfile::TempDir) {
    let pool = pool(&SimNode::private(&[2 * CHUNK]).expect("a node"));
    let dir = tempfile::tempdir().expect("a directory");
    pool.host_memory().set_file_dir(dir.path().to_owned());
    (pool, dir)
}

fn filled(pool: &SimPool, class: Class, units: u64, seed: u64) -> VaRange {
    let handle = create(pool, DEVICE, units, class);
    let range = map(pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(pool, DEVICE, range, pattern(seed));
    range
}

/// Two allocations.
fn two(pool: &SimPool, units: u64) -> [VaRange; 2] {
    [1, 2].map(|seed| filled(pool, class(Contents::Keep), units, seed))
}

fn assert_holds(pool: &SimPool, ranges: [VaRange; 2]) {
    for (seed, range) in (1..).zip(ranges) {
        assert!(holds(pool, DEVICE, range, pattern(seed)), "{seed}");
    }
}

#[test]
fn contents_go_to_the_file_step_by_step_and_come_back_from_there() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, LARGE);
    // The ring between the devices and the file needs a chunk, which stays.
    for ring_bytes in [0, CHUNK] {
        pause(&pool);
        assert_eq!(pool.report().host_arena_bytes, 2 * CHUNK + ring_bytes);
        assert_eq!(pool.host_memory().movable_bytes(), 2 * LARGE * UNIT);
        // The last contents in host memory move first, and one allocation at least.
        let first = pool.host_memory().spill(1, later(), &|| false).expect("room on the disk");
        let half = LARGE * UNIT;
        assert_eq!(first, Spilled { moved_bytes: half, given_back_bytes: CHUNK, left_bytes: half });
        let report = pool.report();
        assert_eq!((report.file_bytes, report.spilled_bytes), (half, half));
        let second =
            pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
        assert_eq!(second, Spilled { moved_bytes: half, given_back_bytes: CHUNK, left_bytes: 0 });
        assert_eq!(pool.report().host_arena_bytes, ring_bytes);
        assert_eq!(gate_of(&pool), GateAt::Offloaded);
        assert_eq!(
            pool.host_memory().spill(u64::MAX, later(), &|| false).expect("nothing"),
            Spilled::default()
        );
        let mut bytes = [0; 16];
        pool.saved().read(ranges[1].start, &mut bytes).expect("it reads the file");
        assert_eq!(bytes, pattern(2));
        assert_eq!(pool.saved().at(ranges[0]), Err(SavedError::NotKept(ranges[0].start)));
        resume(&pool);
        assert_holds(&pool, ranges);
        let report = pool.report();
        assert_eq!((report.file_bytes, report.spilled_bytes), (0, 0));
    }
}

#[test]
fn nothing_of_before_is_taken_for_unchanged_after_it() {
    let (pool, _dir) = a_pool();
    pool.copies().detect_changes(true);
    let ranges = two(&pool, SMALL);
    pause(&pool);
    resume(&pool);
    // Now all contents equal the copies.
    pause(&pool);
    pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
    resume(&pool);
    write(&pool, DEVICE, ranges[0], pattern(7));
    pause(&pool);
    assert_eq!(pool.host_memory().movable_bytes(), 4 * UNIT, "all of it was copied");
    resume(&pool);
    assert!(holds(&pool, DEVICE, ranges[0], pattern(7)));
    assert!(holds(&pool, DEVICE, ranges[1], pattern(2)));
}

#[test]
fn what_has_no_room_on_the_disk_stays_in_host_memory() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, SMALL);
    pause(&pool);
    pool.host_memory().set_file_dir("/nowhere".into());
    let error = pool.host_memory().spill(u64::MAX, later(), &|| false).unwrap_err();
    assert!(matches!(error, PoolError::FileRefused { operation: "making", .. }), "{error}");
    let report = pool.report();
    assert_eq!((report.file_bytes, report.host_arena_bytes), (0, 2 * SMALL * UNIT));
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn what_somebody_reads_in_place_stays_there_and_what_nothing_is_given_back_for() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, SMALL);
    pause(&pool);
    let first = VaRange::new(ranges[1].start, 16);
    let place = pool.saved().at(first).expect("in host memory");
    // The chunk with both allocations stays.
    assert_eq!(pool.host_memory().movable_bytes(), 0);
    let spilled = pool.host_memory().spill(u64::MAX, later(), &|| false).expect("nothing");
    assert_eq!(spilled, Spilled::default());
    assert_eq!(pool.saved().at(first), Ok(place));
    resume(&pool);
    assert_holds(&pool, ranges);
    // The next time it may move.
    pause(&pool);
    let spilled = pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room");
    assert_eq!(spilled.moved_bytes, 2 * SMALL * UNIT);
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn what_somebody_is_given_the_place_of_while_it_is_written_stays() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, LARGE);
    pause(&pool);
    let first = VaRange::new(ranges[1].start, 16);
    let place = Cell::new(None);
    // Asked while contents are on their way to the disk.
    let lend = || {
        place.set(Some(pool.saved().at(first).expect("in host memory")));
        false
    };
    let half = LARGE * UNIT;
    let spilled = pool.host_memory().spill(u64::MAX, later(), &lend).expect("room on the disk");
    assert_eq!(spilled, Spilled { moved_bytes: half, given_back_bytes: 0, left_bytes: half });
    assert_eq!(pool.saved().at(first).ok(), place.get());
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn what_is_freed_while_it_is_written_lies_where_it_was_until_then() {
    let (pool, _dir) = a_pool();
    let _stays = create(&pool, DEVICE, SMALL, class(Contents::Keep));
    let handle = create(&pool, DEVICE, LARGE, tagged("cache", Contents::Keep));
    let range = map(&pool, handle, LARGE * UNIT, &[AccessDesc::read_write(DEVICE)]);
    pause_tags(&pool, &["cache"]);
    let held_bytes = pool.report().host_arena_bytes;
    let is_freed = Cell::new(false);
    // Asked while contents are on their way to the disk. The process runs on meanwhile.
    let free = || {
        if !is_freed.replace(true) {
            pool.unmap(range).expect("unmap");
            pool.release(handle).expect("release");
            assert_eq!(
                pool.host_memory().give_idle_chunk_back(pool.gate()).expect("it is in use"),
                0
            );
        }
        false
    };
    let spilled = pool.host_memory().spill(u64::MAX, later(), &free).expect("room on the disk");
    assert_eq!((spilled.moved_bytes, spilled.given_back_bytes), (0, held_bytes));
    assert_eq!(pool.report().file_bytes, 0);
}

#[test]
fn only_what_lies_behind_what_stays_is_moved() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, LARGE);
    for (lent, moved_bytes) in [(0, LARGE * UNIT), (1, 0)] {
        pause(&pool);
        let first = VaRange::new(ranges[lent].start, 16);
        let place = pool.saved().at(first).expect("in host memory");
        assert_eq!(pool.host_memory().movable_bytes(), moved_bytes);
        let spilled =
            pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
        let given_back_bytes = if moved_bytes > 0 { CHUNK } else { 0 };
        assert_eq!(spilled, Spilled { moved_bytes, given_back_bytes, left_bytes: 0 });
        assert_eq!(pool.saved().at(first), Ok(place));
        resume(&pool);
        assert_holds(&pool, ranges);
    }
}

#[test]
fn an_allocation_that_is_not_written_in_time_stays_and_is_named() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, LARGE);
    pause(&pool);
    let error =
        pool.host_memory().spill(u64::MAX, Instant::now(), &|| false).unwrap_err().to_string();
    let bytes = LARGE * UNIT;
    assert!(
        error.contains(&format!("({bytes} bytes at 0: one allocation moves as a whole")),
        "{error}"
    );
    let report = pool.report();
    assert_eq!((report.file_bytes, report.host_arena_bytes), (0, 2 * CHUNK));
    let spilled = pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
    assert_eq!(spilled.moved_bytes, 2 * bytes);
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn what_is_called_off_ends_between_two_allocations_and_all_contents_are_somewhere() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, LARGE);
    pause(&pool);
    let bytes = LARGE * UNIT;
    // Called once before each 64 MiB, and once if an allocation was not written.
    for (asked_max, moved_bytes) in [(0, 0), (bytes.div_ceil(64 << 20), bytes)] {
        let asked = Cell::new(0_u64);
        let is_called_off = || asked.replace(asked.get() + 1) >= asked_max;
        let spilled = pool.host_memory().spill(u64::MAX, later(), &is_called_off);
        assert_eq!(spilled.expect("it is no failure").moved_bytes, moved_bytes, "{asked_max}");
        assert_eq!(pool.report().spilled_bytes, moved_bytes);
    }
    let spilled = pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
    assert_eq!((spilled.moved_bytes, spilled.left_bytes), (bytes, 0));
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn host_memory_that_the_driver_will_not_unpin_stays_and_contents_are_safe() {
    let (pool, _dir) = a_pool();
    let ranges = two(&pool, SMALL);
    pause(&pool);
    let faults = pool.driver().faults();
    faults.fail(DriverOp::HostUnregister, FaultSpan::From(1), DriverCode::UNKNOWN);
    pool.host_memory().spill(u64::MAX, later(), &|| false).unwrap_err();
    faults.clear();
    assert_eq!(pool.report().spilled_bytes, 2 * SMALL * UNIT);
    resume(&pool);
    assert_holds(&pool, ranges);
}

#[test]
fn contents_that_are_set_aside_and_those_of_the_policy_file_keep_apart() {
    let (pool, _dir) = a_pool();
    let tagged = |tag: &str| Class { tag: tag.to_owned(), ..class(Contents::Keep) };
    let kv = filled(&pool, tagged("kv"), 3, 1);
    let rest = filled(&pool, tagged("rest"), 2, 2);
    let filed = filled(&pool, class(Contents::File), 4, 3);
    pause_tags(&pool, &["kv"]);
    pause(&pool);
    assert_eq!(pool.report().file_bytes, 4 * UNIT);
    pool.host_memory().spill(u64::MAX, later(), &|| false).expect("room on the disk");
    let report = pool.report();
    assert_eq!((report.file_bytes, report.spilled_bytes), (9 * UNIT, 5 * UNIT));
    resume(&pool);
    assert!(holds(&pool, DEVICE, rest, pattern(2)) && holds(&pool, DEVICE, filed, pattern(3)));
    assert_eq!(pool.report().spilled_bytes, 3 * UNIT);
    resume_tags(&pool, &["kv"]);
    assert!(holds(&pool, DEVICE, kv, pattern(1)));
    assert_eq!(pool.report().file_bytes, 0);
}

#[test]
fn what_is_freed_while_it_is_written_keeps_its_place_until_then() {
    let (pool, _dir) = a_pool();
    let pager = pager(&pool, 1, unlimited);
    let handle = create(&pool, DEVICE, 1, tagged("weights", Contents::Keep));
    let range = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, range, pattern(1));
    pool.release(handle).expect("the mapping keeps it");
    pause_tags(&pool, &["weights"]);
    assert_eq!(pool.report().host_arena_bytes, UNIT);
    let written = Cell::new(false);
    let is_called_off = || {
        if !written.replace(true) {
            // Another thread of the application, while this is written.
            pool.unmap(range).expect("memory is given up while it is away");
            page_out(&pool, &pager, 2);
            assert_eq!(pool.report().host_arena_bytes, 2 * UNIT, "it has a place of its own");
        }
        false
    };
    let spilled =
        pool.host_memory().spill(u64::MAX, later(), &is_called_off).expect("room on the disk");
    assert_eq!((written.get(), spilled.moved_bytes), (true, 0), "it is gone");
    page_out(&pool, &pager, 3);
    assert_eq!(pool.report().host_arena_bytes, 2 * UNIT, "the first place is free now");
}

/// A span more that is written, and copied to host memory.
fn page_out(pool: &SimPool, pager: &Pager<SimDriver>, seed: u64) {
    let span = pager.alloc(UNIT).expect("room");
    pager.acquire(&[span], WAIT).expect("its turn");
    write(pool, DEVICE, VaRange::new(span, UNIT), pattern(seed));
    pager.release(&[span]).expect("released");
    pager.flush(WAIT).expect("copied");
}

#[test]
fn what_is_paged_is_no_saved_contents_of_a_process_that_runs() {
    let (pool, _dir) = a_pool();
    let pager = pager(&pool, 1, unlimited);
    (1..=2).for_each(|seed| page_out(&pool, &pager, seed));
    let saved = |standing| {
        let holdings = pool.holdings().inventory(standing);
        assert_eq!(holdings.len(), 2);
        let saved = holdings.into_iter().filter(|holding| holding.saved_bytes() > 0);
        saved.map(|holding| holding.is_resident).collect::<Vec<_>>()
    };
    // The pager may write to that place at any moment.
    assert_eq!(saved(Stance::Runs), [true; 0]);
    assert_eq!(saved(Stance::StandsStill), [false]);
    pause(&pool);
    assert_eq!(saved(Stance::StandsStill), [false; 2]);
    resume(&pool);
}
