//! Tests of saved contents that are written to named files.

use std::fs::{File, read};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use sublet_disk::{WriteOut, Written};
use vmm_pool::driver::sim::SimNode;
use vmm_pool::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::{
    Class, Contents, HOST_CHUNK_BYTES, Holding, HoldingSource, PeerId, Selection, Stance, Tags,
    VirtualHandle, Whose,
};

use crate::stage::{
    DEVICE, OTHER, OWNER, SimPool, UNIT, UNLIMITED, WHOLE, class, create, holds, map, node,
    pattern, pause, pool, resume, share, write,
};

fn filled(
    pool: &SimPool,
    device: DeviceOrdinal,
    units: u64,
    class: Class,
    seed: u64,
) -> (VirtualHandle, VaRange) {
    let handle = create(pool, device, units, class);
    let range = map(pool, handle, units * UNIT, &[AccessDesc::read_write(device)]);
    write(pool, device, range, pattern(seed));
    (handle, range)
}

fn of_tag(tag: &str) -> Class {
    Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep }
}

/// Writes all saved contents of `holdings`, a piece at a time. Returns the file, and the number of calls that this
/// needed.
fn write_all(pool: &SimPool, holdings: &[Holding]) -> (Vec<u8>, Vec<Option<Written>>, usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("data");
    let file = File::create_new(&path).expect("a file");
    let mut out = WriteOut::new(holdings, file, dir.path().to_owned()).expect("laid out");
    let mut turns = 1;
    while !out.write_on(pool, Instant::now()).expect("written") {
        turns += 1;
        assert!(out.written_bytes() < out.total_bytes());
    }
    assert_eq!(out.written_bytes(), out.total_bytes());
    let written = (0..holdings.len()).map(|index| out.written(index)).collect();
    (read(path).expect("the file"), written, turns)
}

fn part<'a>(file: &'a [u8], written: &Written, at: u64, size_bytes: u64) -> &'a [u8] {
    let start = usize::try_from(written.offset_bytes + at).expect("small");
    &file[start..][..usize::try_from(size_bytes).expect("small")]
}

fn is_filled(bytes: &[u8], seed: u64) -> bool {
    bytes.chunks(16).all(|chunk| *chunk == pattern(seed)[..chunk.len()])
}

#[test]
fn what_is_saved_is_written_and_stays_saved() {
    let pool = pool(&node());
    let (_, kept) = filled(&pool, DEVICE, 9, class(Contents::Keep), 1);
    filled(&pool, DEVICE, 2, class(Contents::Discard), 2);
    let (_, filed) = filled(&pool, OTHER, 5, class(Contents::File), 3);
    let hole = VaRange::new(DeviceAddress(kept.start.0 + 2 * UNIT), 3 * UNIT);
    pool.mark_unused(&[hole]);
    pause(&pool);

    let holdings = pool.holdings().inventory(Stance::StandsStill);
    assert_eq!(holdings, pool.holdings().inventory(Stance::Runs), "all of it is away");
    let [first, scratch, second] = &holdings[..] else { panic!("{holdings:?}") };
    assert_eq!(first.saved_parts, [0..2 * UNIT, 5 * UNIT..9 * UNIT]);
    assert_eq!((first.ranges.as_slice(), first.device), (&[kept][..], Some(DEVICE)));
    assert_eq!((scratch.saved_bytes(), scratch.is_resident), (0, false));
    assert_eq!((second.saved_bytes(), second.device), (5 * UNIT, Some(OTHER)));
    assert_eq!(second.class.contents, Contents::File);

    let (file, written, turns) = write_all(&pool, &holdings);
    assert!(turns > 3, "each turn writes a piece, and looks at the time");
    let [Some(at), None, Some(behind)] = &written[..] else { panic!("{written:?}") };
    assert!(is_filled(part(&file, at, 0, 2 * UNIT), 1));
    assert!(part(&file, at, 2 * UNIT, 3 * UNIT).iter().all(|byte| *byte == 0), "a hole");
    assert!(is_filled(part(&file, at, 5 * UNIT, 4 * UNIT), 1));
    assert!(is_filled(part(&file, behind, 0, 5 * UNIT), 3));
    let mut sum = crc32fast::Hasher::new();
    sum.update(part(&file, at, 0, 2 * UNIT));
    sum.update(part(&file, at, 5 * UNIT, 4 * UNIT));
    assert_eq!(sum.finalize(), at.crc32);

    resume(&pool);
    assert!(holds(&pool, DEVICE, VaRange::new(kept.start, 2 * UNIT), pattern(1)));
    assert!(holds(&pool, OTHER, filed, pattern(3)));
    let saved = pool
        .holdings()
        .inventory(Stance::StandsStill)
        .iter()
        .map(Holding::saved_bytes)
        .sum::<u64>();
    assert_eq!(saved, 0, "contents on a device are no saved ones");
}

#[test]
fn of_memory_on_its_device_contents_are_saved_only_while_the_process_stands_still() {
    let pool = pool(&node());
    let (_, range) = filled(&pool, DEVICE, 2, class(Contents::Keep), 4);
    // A pause that ends before the release.
    pool.save(&WHOLE, UNLIMITED).expect("saving");
    let saved = |standing| pool.holdings().inventory(standing)[0].saved_bytes();
    assert_eq!((saved(Stance::StandsStill), saved(Stance::Runs)), (2 * UNIT, 0));
    let (file, written, _) = write_all(&pool, &pool.holdings().inventory(Stance::StandsStill));
    assert!(is_filled(part(&file, written[0].as_ref().expect("a place"), 0, 2 * UNIT), 4));
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
    assert!(holds(&pool, DEVICE, range, pattern(4)));

    // A resume that ends before its commit.
    pause(&pool);
    pool.create_own(&WHOLE).expect("memory");
    let (file, written, _) = write_all(&pool, &pool.holdings().inventory(Stance::StandsStill));
    assert!(is_filled(part(&file, written[0].as_ref().expect("a place"), 0, 2 * UNIT), 4));
}

#[test]
fn a_tag_that_is_set_aside_is_written_while_the_process_runs() {
    let pool = pool(&node());
    filled(&pool, DEVICE, 1, of_tag("weights"), 5);
    let (_, rest) = filled(&pool, DEVICE, 1, of_tag(""), 6);
    let tags = Tags::Named(["weights".to_owned()].into());
    let weights = Selection::Tagged(tags, Whose::Everybody);
    pool.save(&weights, UNLIMITED).expect("saving");
    pool.release_selected().expect("release");
    let holdings = pool.holdings().inventory(Stance::Runs);
    let (file, written, _) = write_all(&pool, &holdings);
    for (holding, written) in holdings.iter().zip(&written) {
        assert_eq!(holding.is_resident, holding.class.tag.is_empty());
        assert_eq!(written.is_some(), holding.class.tag == "weights");
    }
    assert_eq!(file.len() as u64, UNIT);
    assert!(is_filled(&file, 5));
    assert!(holds(&pool, DEVICE, rest, pattern(6)));
}

#[test]
fn imports_name_their_owner_and_owners_their_importers() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let (shared, _) = filled(&owner, DEVICE, 1, class(Contents::Keep), 7);
    let handle = share(&owner, shared, &importer, 42);
    let there = map(&importer, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    let own = &owner.holdings().inventory(Stance::Runs)[0];
    assert_eq!(own.source, HoldingSource::Own { importers: vec![PeerId(42)] });
    let imported = &importer.holdings().inventory(Stance::Runs)[0];
    assert_eq!(imported.source, HoldingSource::Imported { owner: OWNER });
    assert_eq!((imported.id, imported.ranges.as_slice()), (own.id, &[there][..]));
    assert!(own.is_own() && !imported.is_own());
}

/// The directory that a process of ours was given, when this is one.
fn given_dir() -> Option<std::path::PathBuf> {
    std::env::var_os("SUBLET_TEST_WRITEOUT_DIR").map(Into::into)
}

#[test]
fn a_limit_on_files_that_comes_meanwhile_is_an_error_and_no_signal() {
    let Some(dir) = given_dir() else {
        let dir = tempfile::tempdir().expect("a directory");
        let test = "writeout::a_limit_on_files_that_comes_meanwhile_is_an_error_and_no_signal";
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env("SUBLET_TEST_WRITEOUT_DIR", dir.path())
            .output()
            .expect("a process");
        assert!(output.status.success(), "{output:?}");
        return;
    };
    let pool = pool(&node());
    filled(&pool, DEVICE, 20, class(Contents::Keep), 8);
    pause(&pool);
    let holdings = pool.holdings().inventory(Stance::StandsStill);
    let file = |name: &str| File::create_new(dir.join(name)).expect("a file");
    let mut out = WriteOut::new(&holdings, file("first"), dir.clone()).expect("no limit yet");
    assert!(!out.write_on(&pool, Instant::now()).expect("the first piece"));
    // For this process alone.
    setrlimit(Resource::RLIMIT_FSIZE, 6 * UNIT, 6 * UNIT).expect("a limit");
    let later = Instant::now() + Duration::from_mins(1);
    let error = out.write_on(&pool, later).expect_err("twenty units").to_string();
    assert!(error.contains("ulimit -f"), "{error}");
    let refused = WriteOut::new(&holdings, file("second"), dir.clone());
    assert!(refused.expect_err("twenty units").to_string().contains("ulimit -f"));
}

#[test]
fn what_is_freed_before_it_is_written_is_passed_over_though_its_host_memory_has_gone() {
    let pool = pool(&SimNode::private(&[1 << 30]).expect("a node"));
    filled(&pool, DEVICE, 9, class(Contents::Keep), 1);
    // The last one ends in another chunk of host memory.
    let freed = [90, HOST_CHUNK_BYTES / UNIT].map(|units| {
        let handle = create(&pool, DEVICE, units, class(Contents::Keep));
        let range = map(&pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
        pool.release(handle).expect("the mapping keeps it");
        range
    });
    pause(&pool);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("data");
    let file = File::create_new(&path).expect("a file");
    let holdings = pool.holdings().inventory(Stance::StandsStill);
    let mut out = WriteOut::new(&holdings, file, dir.path().to_owned()).expect("laid out");
    assert!(!out.write_on(&pool, Instant::now()).expect("a piece"));
    for range in freed {
        pool.unmap(range).expect("memory is given up while it is away");
    }
    assert_eq!(
        pool.host_memory().give_idle_chunk_back(pool.gate()).expect("an idle chunk"),
        HOST_CHUNK_BYTES
    );
    assert!(out.write_on(&pool, Instant::now() + Duration::from_mins(1)).expect("the rest"));
    assert_eq!([out.written_bytes(), out.total_bytes()], [9 * UNIT; 2]);
    let written: Vec<_> = (0..3).map(|index| out.written(index)).collect();
    assert_eq!([written[1], written[2]], [None, None]);
    let first = written[0].expect("it is there still");
    let bytes = read(path).expect("the file");
    let bytes = part(&bytes, &first, 0, 9 * UNIT);
    assert!(is_filled(bytes, 1));
    assert_eq!(first.crc32, crc32fast::hash(bytes));
}

#[test]
fn what_is_freed_half_written_counts_as_if_it_had_not_been_there() {
    let pool = pool(&node());
    let (handle, range) = filled(&pool, DEVICE, 10, class(Contents::Keep), 1);
    pool.release(handle).expect("the mapping keeps it");
    pause(&pool);
    let dir = tempfile::tempdir().expect("a directory");
    let file = File::create_new(dir.path().join("data")).expect("a file");
    let holdings = pool.holdings().inventory(Stance::StandsStill);
    let mut out = WriteOut::new(&holdings, file, dir.path().to_owned()).expect("laid out");
    assert!(!out.write_on(&pool, Instant::now()).expect("a piece"));
    assert!(out.written_bytes() > 0 && out.written(0).is_some());
    pool.unmap(range).expect("memory is given up while it is away");
    assert!(out.write_on(&pool, Instant::now()).expect("nothing is left"));
    assert_eq!((out.written_bytes(), out.total_bytes(), out.written(0)), (0, 0, None));
}
