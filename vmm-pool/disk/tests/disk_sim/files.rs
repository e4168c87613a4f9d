//! Tests of contents that a pause saves to a file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, setrlimit};
use sublet_disk::check_file_dir;
use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, HostBudget, PoolError, SavedError, Selection, Tags, Whose};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, class, create, free_bytes,
    holds, map, node, pattern, pause, pool, resume, write,
};

/// The size of all host memory that contents in files need.
const RING_BYTES: u64 = 256 << 20;
/// The size of the pieces that get one fingerprint each.
const PIECE: u64 = 64 << 10;

/// Makes a pool whose file is in a directory of its own.
fn filing_pool(node: &SimNode) -> (SimPool, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = pool(node);
    pool.host_memory().set_file_dir(dir.path().to_owned());
    (pool, dir)
}

/// Makes memory with contents of its own.
fn filled(pool: &SimPool, device: DeviceOrdinal, units: u64, class: Class, seed: u64) -> VaRange {
    let handle = create(pool, device, units, class);
    let range = map(pool, handle, units * UNIT, &[AccessDesc::read_write(device)]);
    write(pool, device, range, pattern(seed));
    range
}

fn tagged(tag: &str) -> Class {
    Class { library: "test", tag: tag.to_owned(), contents: Contents::File }
}

fn named(tags: &[&str]) -> Tags {
    Tags::Named(tags.iter().map(|&tag| tag.to_owned()).collect())
}

/// A descriptor of this process for each file that is, or was made, in `dir`.
fn open_files(dir: &Path) -> Vec<PathBuf> {
    let descriptors = fs::read_dir("/proc/self/fd").expect("descriptors");
    let paths = descriptors.map(|entry| entry.expect("an entry").path());
    let paths = paths.filter(|path| fs::read_link(path).is_ok_and(|to| to.starts_with(dir)));
    let by_inode = paths.filter_map(|path| Some((fs::metadata(&path).ok()?.ino(), path)));
    by_inode.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// Returns the disk space of the only open file in `dir`.
fn disk_bytes(dir: &Path) -> u64 {
    let files = open_files(dir);
    assert_eq!(files.len(), 1, "{files:?}");
    fs::metadata(&files[0]).expect("metadata").blocks() * 512
}

#[test]
fn one_pause_keeps_files_and_discards() {
    let (pool, dir) = filing_pool(&node());
    let kept = filled(&pool, DEVICE, 2, class(Contents::Keep), 1);
    let scratch = filled(&pool, DEVICE, 3, class(Contents::Discard), 2);
    let weights = filled(&pool, DEVICE, 40, class(Contents::File), 3);
    let elsewhere = filled(&pool, OTHER, 4, class(Contents::File), 4);
    for round in 10..12 {
        let demand = pool.host_memory().demand(&WHOLE);
        assert_eq!(demand.saved_bytes, 46 * UNIT);
        assert_eq!(
            demand.held_bytes + demand.grow_bytes,
            2 * UNIT + RING_BYTES,
            "and what is kept"
        );
        pause(&pool);
        assert_eq!([DEVICE, OTHER].map(|device| free_bytes(&pool, device)), [CAPACITY_BYTES; 2]);
        let report = pool.report();
        assert_eq!(
            (report.file_bytes, report.host_arena_bytes),
            (44 * UNIT, 2 * UNIT + RING_BYTES)
        );
        assert!(disk_bytes(dir.path()) >= 44 * UNIT);
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0, "it has no name");
        resume(&pool);
        assert_eq!((pool.report().file_bytes, open_files(dir.path()).len()), (0, 0));
        for (device, range, seed) in
            [(DEVICE, kept, 1), (DEVICE, weights, 3), (OTHER, elsewhere, 4)]
        {
            let seed = if round == 10 { seed } else { seed + 10 };
            assert!(holds(&pool, device, range, pattern(seed)), "{round}: {range:?}");
            write(&pool, device, range, pattern(seed + 10));
        }
        write(&pool, DEVICE, scratch, pattern(round));
    }
}

#[test]
fn contents_larger_than_the_ring_pass_through_it() {
    let node = SimNode::private(&[RING_BYTES + 64 * UNIT]).expect("a node");
    let (pool, _dir) = filing_pool(&node);
    let large = filled(&pool, DEVICE, RING_BYTES / UNIT + 40, tagged("weights"), 1);
    let small = filled(&pool, DEVICE, 1, tagged("weights"), 2);
    pause(&pool);
    assert_eq!(pool.report().host_arena_bytes, RING_BYTES);
    resume(&pool);
    assert!(holds(&pool, DEVICE, large, pattern(1)));
    assert!(holds(&pool, DEVICE, small, pattern(2)));
}

#[test]
fn what_comes_back_first_gives_its_disk_back_first() {
    let (pool, dir) = filing_pool(&node());
    let first = filled(&pool, DEVICE, 8, tagged("first"), 1);
    let second = filled(&pool, DEVICE, 8, tagged("second"), 2);
    let third = filled(&pool, DEVICE, 8, tagged("third"), 3);
    let whole = Selection::Tagged(Tags::All, Whose::Everybody);
    pool.save(&whole, UNLIMITED).expect("saved");
    pool.release_selected().expect("released");
    let all = disk_bytes(dir.path());
    let back = |tags: &[&str]| {
        let selection = Selection::SetAside(named(tags), Whose::Everybody);
        pool.create_own(&selection).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
        drop(pool.commit_resume());
    };
    back(&["first", "third"]);
    assert!(holds(&pool, DEVICE, first, pattern(1)) && holds(&pool, DEVICE, third, pattern(3)));
    assert_eq!(pool.report().file_bytes, 8 * UNIT);
    assert!(disk_bytes(dir.path()) <= all - 16 * UNIT, "a hole and a shorter file");
    // Memory that leaves with it gets the gap, and another directory counts only after the file is empty.
    let other = tempfile::tempdir().expect("a directory");
    pool.host_memory().set_file_dir(other.path().to_owned());
    pause(&pool);
    assert_eq!((open_files(dir.path()).len(), open_files(other.path()).len()), (1, 0));
    assert_eq!(pool.report().file_bytes, 24 * UNIT);
    resume(&pool);
    back(&["second"]);
    for (range, seed) in [(first, 1), (second, 2), (third, 3)] {
        assert!(holds(&pool, DEVICE, range, pattern(seed)), "{seed}");
    }
    assert_eq!(open_files(dir.path()).len(), 0);
    pause(&pool);
    assert_eq!(open_files(other.path()).len(), 1);
    resume(&pool);
    assert!(holds(&pool, DEVICE, second, pattern(2)));
}

#[test]
fn unused_parts_take_no_disk_and_saved_bytes_are_read_from_the_file() {
    let (pool, dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 8, tagged("weights"), 1);
    let hole = VaRange::new(DeviceAddress(range.start.0 + 2 * UNIT), 4 * UNIT);
    pool.mark_unused(&[hole]);
    let log = pool.save(&WHOLE, UNLIMITED).expect("saved");
    pool.release_selected().expect("released");
    assert_eq!((log.bytes, pool.report().file_bytes), (4 * UNIT, 4 * UNIT));
    assert!(disk_bytes(dir.path()) < 5 * UNIT);
    let last = DeviceAddress(range.start.0 + 7 * UNIT + 8);
    assert_eq!(pool.saved().at(VaRange::new(last, 16)), Err(SavedError::NotKept(last)));
    let mut bytes = [0; 24];
    pool.saved().read(last, &mut bytes).expect("saved");
    assert_eq!((&bytes[..8], &bytes[8..]), (&pattern(1)[8..], &pattern(1)[..]));
    resume(&pool);
    assert!(holds(&pool, DEVICE, VaRange::new(range.start, 2 * UNIT), pattern(1)));
    let end = VaRange::new(hole.end(), 2 * UNIT);
    assert!(holds(&pool, DEVICE, end, pattern(1)));
}

#[test]
fn zeros_of_contents_in_a_file_come_back_wherever_they_are() {
    let (pool, _dir) = filing_pool(&node());
    pool.copies().detect_changes(true);
    let piece = |range: VaRange, first: u64, count: u64| {
        VaRange::new(DeviceAddress(range.start.0 + first * PIECE), count * PIECE)
    };
    let mapped = filled(&pool, DEVICE, 4, tagged("weights"), 1);
    let handle = create(&pool, DEVICE, 4, tagged("weights"));
    let nowhere = map(&pool, handle, 4 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, nowhere, pattern(2));
    // At the beginning, in the middle, and at the end.
    let zeros = [(0, 3), (40, 2), (70, 1), (120, 8)];
    let others = [(3, 37), (42, 28), (71, 49)];
    for (first, count) in zeros {
        for range in [mapped, nowhere] {
            write(&pool, DEVICE, piece(range, first, count), [0; 16]);
        }
    }
    pool.unmap(nowhere).expect("unmapped");
    pause(&pool);
    resume(&pool);
    pool.map(nowhere, 0, handle).expect("mapped again");
    pool.set_access(nowhere, &[AccessDesc::read_write(DEVICE)]).expect("access");
    for (range, seed) in [(mapped, 1), (nowhere, 2)] {
        for (parts, bytes) in [(&zeros[..], [0; 16]), (&others[..], pattern(seed))] {
            for &(first, count) in parts {
                let part = piece(range, first, count);
                assert!(holds(&pool, DEVICE, part, bytes), "{seed}: {count} from {first} on");
            }
        }
    }
}

#[test]
fn a_place_made_for_contents_stays_until_its_zeros_are_made_too() {
    let (pool, _dir) = filing_pool(&node());
    pool.copies().detect_changes(true);
    let range = filled(&pool, DEVICE, 1, tagged("weights"), 1);
    let zeros = VaRange::new(range.start, UNIT - PIECE);
    write(&pool, DEVICE, zeros, [0; 16]);
    // A pause can read it, and a resume cannot write it there.
    let read_only = AccessDesc { flags: 1, ..AccessDesc::read_write(DEVICE) };
    pool.set_access(range, &[read_only]).expect("access");
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, zeros, [0; 16]));
    assert!(holds(&pool, DEVICE, VaRange::new(zeros.end(), PIECE), pattern(1)));
}

#[test]
fn a_directory_that_is_not_there_is_named_and_nothing_has_changed() {
    let (pool, dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 2, tagged("weights"), 7);
    let missing = dir.path().join("missing");
    pool.host_memory().set_file_dir(missing.clone());
    pool.drain();
    let (report, calls) = (pool.report(), pool.driver().faults().calls_total());
    let checked = check_file_dir(&missing).expect_err("not there").to_string();
    let error = pool.save(&WHOLE, UNLIMITED).expect_err("not there");
    assert_eq!(error.to_string(), checked);
    assert!(
        matches!(&error, PoolError::FileRefused { operation: "making", dir, .. } if *dir == missing)
    );
    assert!(error.to_string().contains("name another directory"), "{error}");
    assert_eq!(pool.driver().faults().calls_total(), calls, "the driver was not asked");
    assert_eq!(pool.report(), report);
    assert!(holds(&pool, DEVICE, range, pattern(7)));
    pool.remount().expect("nothing was moved");
    fs::create_dir(&missing).expect("a directory");
    check_file_dir(&missing).expect("there now");
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(7)));
}

#[test]
fn a_host_budget_counts_the_ring_alone() {
    let (pool, _dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 100, tagged("weights"), 7);
    let refused = pool.save(&WHOLE, HostBudget(Some(RING_BYTES - 1)));
    let error = refused.expect_err("not even the ring");
    assert!(matches!(error, PoolError::OutOfHostMemory { grow_bytes: RING_BYTES, .. }), "{error}");
    pool.save(&WHOLE, HostBudget(Some(RING_BYTES))).expect("the ring fits");
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
    assert_eq!((pool.report().host_arena_bytes, pool.report().file_bytes), (0, 0));
    assert!(holds(&pool, DEVICE, range, pattern(7)));
}

#[test]
fn a_file_cut_short_leaves_the_memory_paused_and_what_is_put_back_is_read() {
    let (pool, dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 3, tagged("weights"), 5);
    pause(&pool);
    let path = open_files(dir.path()).remove(0);
    let file = File::options().read(true).write(true).open(path).expect("the same file");
    let mut saved = vec![0; usize::try_from(3 * UNIT).expect("small")];
    file.read_exact_at(&mut saved, 0).expect("all of it");
    file.set_len(2 * UNIT + 100).expect("cut");

    pool.create_own(&WHOLE).expect("memory");
    let error = pool.restore_own(usize::MAX).expect_err("the end is missing");
    let PoolError::FileUnreadable { offset_bytes, size_bytes, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((offset_bytes, size_bytes), (0, 3 * UNIT));
    assert!(error.to_string().contains(&dir.path().display().to_string()), "{error}");
    pool.undo_resume().expect("given up again");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    let mut end = [0; 8];
    let unread = pool.saved().read(DeviceAddress(range.end().0 - 8), &mut end);
    assert!(matches!(unread, Err(SavedError::Unreadable(..))), "{unread:?}");

    file.write_all_at(&saved, 0).expect("put back");
    resume(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(5)));
}

#[test]
fn a_byte_that_has_changed_in_the_file_fails_the_resume_before_anything_is_handed_out() {
    let (pool, dir) = filing_pool(&node());
    let first = filled(&pool, DEVICE, 3, tagged("weights"), 5);
    let second = filled(&pool, OTHER, 20, tagged("weights"), 6);
    pause(&pool);
    let path = open_files(dir.path()).remove(0);
    let file = File::options().read(true).write(true).open(path).expect("the same file");
    let at = 5 * UNIT + 123;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("another");

    pool.create_own(&WHOLE).expect("memory");
    let error = pool.restore_own(usize::MAX).expect_err("not what was written");
    let PoolError::FileCorrupted { offset_bytes, size_bytes, .. } = error else {
        panic!("{error}")
    };
    assert!((offset_bytes..offset_bytes + size_bytes).contains(&at), "{error}");
    assert!(size_bytes <= 2 << 20, "{error}");
    let text = error.to_string();
    assert!(text.contains(&dir.path().display().to_string()), "{error}");
    assert!(text.contains("stays paused"), "{error}");
    pool.undo_resume().expect("given up again");
    for device in [DEVICE, OTHER] {
        assert_eq!(free_bytes(&pool, device), CAPACITY_BYTES);
    }
    // Readers of any part of the block get an error. Readers of other blocks succeed.
    let mut bytes = [0; 16];
    let wrong = DeviceAddress(second.start.0 + 2 * UNIT + 8);
    let unread = pool.saved().read(wrong, &mut bytes);
    assert!(matches!(unread, Err(SavedError::Unreadable(..))), "{unread:?}");
    pool.saved().read(first.start, &mut bytes).expect("saved");
    assert_eq!(bytes, pattern(5));

    file.write_all_at(&byte, at).expect("put back");
    resume(&pool);
    assert!(holds(&pool, DEVICE, first, pattern(5)));
    assert!(holds(&pool, OTHER, second, pattern(6)));
}

#[test]
fn pieces_that_begin_and_end_anywhere_come_back_beside_those_that_go_past_the_cache() {
    for dir in [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")] {
        let dir = dir.expect("a directory");
        let pool = pool(&node());
        pool.host_memory().set_file_dir(dir.path().to_owned());
        let odd = filled(&pool, DEVICE, 40, tagged("weights"), 1);
        let even = filled(&pool, DEVICE, 40, tagged("weights"), 2);
        for (begin, size_bytes) in [(4096 + 16, 5 * UNIT), (3 * UNIT, 16 * 1001)] {
            let hole = VaRange::new(DeviceAddress(odd.start.0 + begin), size_bytes);
            pool.mark_unused(&[hole]);
            pause(&pool);
            resume(&pool);
            let after = VaRange::new(hole.end(), odd.end().0 - hole.end().0);
            assert!(holds(&pool, DEVICE, after, pattern(1)), "{hole:?}");
            let before = VaRange::new(odd.start, begin);
            assert!(holds(&pool, DEVICE, before, pattern(1)), "{hole:?}");
            assert!(holds(&pool, DEVICE, even, pattern(2)), "{hole:?}");
            write(&pool, DEVICE, odd, pattern(1));
        }
    }
}

#[test]
fn a_directory_on_a_disk_that_is_read_only_is_named_and_nothing_moves() {
    let (pool, _dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 2, tagged("weights"), 7);
    // Nobody can write the kernel's own files in this way.
    pool.host_memory().set_file_dir("/proc".into());
    pool.drain();
    let calls = pool.driver().faults().calls_total();
    let error = pool.save(&WHOLE, UNLIMITED).expect_err("read-only");
    assert!(matches!(error, PoolError::FileRefused { operation: "making", .. }), "{error}");
    assert_eq!(pool.driver().faults().calls_total(), calls, "the driver was not asked");
    pool.remount().expect("nothing was moved");
    assert!(holds(&pool, DEVICE, range, pattern(7)));
}

#[test]
fn copies_that_fail_give_disk_and_ring_back() {
    let (pool, dir) = filing_pool(&node());
    let range = filled(&pool, DEVICE, 3, tagged("weights"), 5);
    let faults = pool.driver().faults();
    for op in [DriverOp::HostRegister, DriverOp::CopyToHost, DriverOp::Unmap] {
        faults.fail(op, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
        assert!(pool.save(&WHOLE, UNLIMITED).is_err(), "{op}");
        faults.clear();
        pool.remount().expect("mapped again");
        drop(pool.commit_resume());
        let report = pool.report();
        assert_eq!((report.file_bytes, report.host_arena_bytes), (0, 0), "{op}");
        assert_eq!(open_files(dir.path()).len(), 0, "{op}");
        assert!(holds(&pool, DEVICE, range, pattern(5)), "{op}");
    }
}

/// The directory that this test's own child process was given, if this is that process.
fn given_dir() -> Option<PathBuf> {
    std::env::var_os("SUBLET_TEST_FILE_DIR").map(PathBuf::from)
}

/// Starts this program again, for one test, in a process of its own.
fn again(test: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env("SUBLET_TEST_FILE_DIR", dir);
    command
}

#[test]
fn a_limit_on_files_is_an_error_and_no_signal() {
    let Some(dir) = given_dir() else {
        let dir = tempfile::tempdir().expect("a directory");
        let output = again("files::a_limit_on_files_is_an_error_and_no_signal", dir.path())
            .output()
            .expect("a process");
        assert!(output.status.success(), "{output:?}");
        return;
    };
    let pool = pool(&node());
    pool.host_memory().set_file_dir(dir);
    let range = filled(&pool, DEVICE, 3, tagged("weights"), 5);
    // For this process alone.
    setrlimit(Resource::RLIMIT_FSIZE, UNIT, UNIT).expect("a limit");
    let error = pool.save(&WHOLE, UNLIMITED).expect_err("three units");
    assert!(error.to_string().contains("ulimit -f"), "{error}");
    assert!(matches!(error, PoolError::FileRefused { operation: "reserving", .. }), "{error}");
    assert!(holds(&pool, DEVICE, range, pattern(5)));
}

#[test]
fn nothing_is_left_of_a_process_that_was_killed_while_paused() {
    if let Some(dir) = given_dir() {
        let pool = pool(&node());
        pool.host_memory().set_file_dir(dir);
        filled(&pool, DEVICE, 3, tagged("weights"), 5);
        pause(&pool);
        let mut output = std::io::stdout();
        output.write_all(b"paused\n").and_then(|()| output.flush()).expect("the other end");
        // Blocks until this process is killed, or the other end is closed.
        let _end = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut child =
        again("files::nothing_is_left_of_a_process_that_was_killed_while_paused", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let said = output.lines().map_while(Result::ok).any(|line| line.ends_with("paused"));
    assert!(said, "the process paused");
    child.kill().expect("SIGKILL");
    let status = child.wait().expect("its end");
    assert_eq!(status.signal(), Some(9));
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
}
