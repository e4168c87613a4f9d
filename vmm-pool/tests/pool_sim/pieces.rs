//! Zero and unchanged pieces: what a pause leaves out, and that a resume brings back every byte all the same.

mod at_random;

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{
    Class, Contents, Copies, HostBudget, KeptBytes, PieceBytes, SavedError, Selection, StepLog,
    Tags, Whose,
};

use crate::stage::{
    DEVICE, SimPool, UNIT, UNLIMITED, WHOLE, create, holds, map, pattern, pool, resume,
    resume_tags, write,
};

const CHUNK: u64 = 256 << 20;
const PIECE: u64 = 64 << 10;

fn a_pool() -> SimPool {
    let pool = pool(&SimNode::private(&[2 * CHUNK]).expect("a node"));
    pool.copies().detect_changes(true);
    pool
}

/// Memory that is zero.
fn memory(pool: &SimPool, tag: &str, contents: Contents, units: u64) -> VaRange {
    let class = Class { library: "test", tag: tag.to_owned(), contents };
    let handle = create(pool, DEVICE, units, class);
    let range = map(pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(pool, DEVICE, range, [0; 16]);
    range
}

/// So many pieces of it, from one on.
fn pieces(range: VaRange, first: u64, count: u64) -> VaRange {
    VaRange::new(DeviceAddress(range.start.0 + first * PIECE), count * PIECE)
}

fn fill(pool: &SimPool, range: VaRange, seed: u64) {
    write(pool, DEVICE, range, pattern(seed));
}

fn has(pool: &SimPool, range: VaRange, seed: u64) -> bool {
    holds(pool, DEVICE, range, pattern(seed))
}

fn is_zero(pool: &SimPool, range: VaRange) -> bool {
    holds(pool, DEVICE, range, [0; 16])
}

fn save(pool: &SimPool, selection: &Selection) -> StepLog {
    let log = pool.save(selection, UNLIMITED).expect("saved");
    pool.release_selected().expect("released");
    log
}

fn tagged(tag: &str) -> Selection {
    Selection::Tagged(Tags::Named([tag.to_owned()].into()), Whose::Everybody)
}

/// Zero, unchanged and copied, in pieces.
fn kept(log: &StepLog) -> (u64, u64, u64) {
    let KeptBytes { zero_bytes, unchanged_bytes, copied_bytes } = log.kept.expect("a save");
    assert_eq!(log.bytes, copied_bytes);
    (zero_bytes / PIECE, unchanged_bytes / PIECE, copied_bytes / PIECE)
}

fn copies(pool: &SimPool) -> u64 {
    pool.driver().faults().calls(DriverOp::CopyToHost)
}

#[test]
fn zeros_take_no_host_memory_and_come_back_as_zeros() {
    let pool = a_pool();
    let empty = memory(&pool, "", Contents::Keep, 100);
    let log = save(&pool, &WHOLE);
    assert_eq!((kept(&log), copies(&pool)), ((100 * 32, 0, 0), 0));
    assert_eq!(pool.report().host_arena_bytes, 0);
    resume(&pool);
    assert!(is_zero(&pool, empty));
    // The memory that came back held something else before.
    fill(&pool, empty, 1);
    pool.driver().core().fill_device(DEVICE, pieces(empty, 2, 30), &[0]).expect("mapped");
    let log = save(&pool, &WHOLE);
    assert_eq!(kept(&log), (30, 0, 100 * 32 - 30));
    resume(&pool);
    assert!(is_zero(&pool, pieces(empty, 2, 30)) && has(&pool, pieces(empty, 0, 2), 1));
    assert!(has(&pool, pieces(empty, 32, 99 * 32), 1));
}

#[test]
fn many_pieces_are_asked_about_in_turn_and_each_answer_is_its_own() {
    const SMALL: u64 = 16 << 10;
    /// Of those that a device is asked about in one turn: twice as many are more than it is asked in its first two turns.
    const AT_ONCE: u64 = 16 << 10;
    let pool = pool(&SimNode::private(&[4 * CHUNK]).expect("a node"));
    pool.copies().detect_changes(true);
    pool.copies().set_piece_bytes(PieceBytes::MIN);
    // The questions of a turn are about two allocations.
    let sizes = [3, 250, 3 * AT_ONCE * SMALL / UNIT - 200, 1];
    let ranges = sizes.map(|units| memory(&pool, "", Contents::Keep, units));
    let places: Vec<_> = ranges
        .iter()
        .flat_map(|range| {
            let last = range.size_bytes / SMALL - 1;
            let numbers = [0, 5, AT_ONCE - 385, AT_ONCE - 384, 2 * AT_ONCE, last];
            let known: std::collections::BTreeSet<_> =
                numbers.into_iter().filter(|number| *number <= last).collect();
            known
                .into_iter()
                .map(|number| VaRange::new(DeviceAddress(range.start.0 + number * SMALL), SMALL))
        })
        .collect();
    for (seed, place) in places.iter().enumerate() {
        fill(&pool, *place, seed as u64);
    }
    let are_right =
        || places.iter().enumerate().all(|(seed, place)| has(&pool, *place, seed as u64));
    let copied = places.len() as u64 * SMALL;
    let zeros = sizes.iter().sum::<u64>() * UNIT - copied;
    for (unchanged_bytes, copied_bytes) in [(0, copied), (copied, 0)] {
        let told = save(&pool, &WHOLE).kept.expect("a save");
        assert_eq!(told, KeptBytes { zero_bytes: zeros, unchanged_bytes, copied_bytes });
        resume(&pool);
        assert!(are_right());
    }
    fill(&pool, places[places.len() / 2], 77);
    let told = save(&pool, &WHOLE).kept.expect("a save");
    assert_eq!((told.unchanged_bytes, told.copied_bytes), (copied - SMALL, SMALL));
    resume(&pool);
    assert!(has(&pool, places[places.len() / 2], 77));
}

#[test]
fn what_all_has_changed_is_copied_as_one_piece() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 8);
    for seed in 1..4 {
        fill(&pool, range, seed);
        let before = copies(&pool);
        let log = save(&pool, &WHOLE);
        assert_eq!((kept(&log), copies(&pool) - before), ((0, 0, 8 * 32), 1));
        resume(&pool);
        assert!(has(&pool, range, seed));
    }
}

#[test]
fn an_unchanged_second_pause_copies_nothing_and_a_change_only_its_piece() {
    let pool = a_pool();
    let (range, other) =
        (memory(&pool, "", Contents::Keep, 4), memory(&pool, "", Contents::Keep, 1));
    fill(&pool, pieces(range, 0, 100), 1);
    fill(&pool, other, 2);
    assert_eq!(kept(&save(&pool, &WHOLE)), (28, 0, 132));
    resume(&pool);
    let before = copies(&pool);
    assert_eq!(kept(&save(&pool, &WHOLE)), (28, 132, 0));
    assert_eq!(copies(&pool), before);
    resume(&pool);
    assert!(has(&pool, pieces(range, 0, 100), 1) && has(&pool, other, 2));

    // A byte of one piece, one that was zero, and one that is.
    let byte = VaRange::new(DeviceAddress(range.start.0 + 5 * PIECE + 77), 1);
    pool.driver().core().fill_device(DEVICE, byte, &[0xee]).expect("mapped");
    fill(&pool, pieces(range, 120, 1), 3);
    pool.driver().core().fill_device(DEVICE, pieces(range, 50, 1), &[0]).expect("mapped");
    assert_eq!(kept(&save(&pool, &WHOLE)), (28, 130, 2));
    assert_eq!(copies(&pool) - before, 2);
    resume(&pool);
    assert!(holds(&pool, DEVICE, byte, [0xee; 16]) && is_zero(&pool, pieces(range, 50, 1)));
    assert!(has(&pool, pieces(range, 120, 1), 3) && has(&pool, pieces(range, 6, 44), 1));
    assert!(is_zero(&pool, pieces(range, 100, 20)) && is_zero(&pool, pieces(range, 121, 7)));
    assert!(has(&pool, pieces(range, 0, 5), 1) && has(&pool, pieces(range, 51, 49), 1));
}

#[test]
fn what_has_not_changed_is_left_out_also_by_stages() {
    let pool = a_pool();
    let (steady, restless) =
        (memory(&pool, "", Contents::Keep, 4), memory(&pool, "kv", Contents::Keep, 2));
    fill(&pool, steady, 1);
    fill(&pool, restless, 2);
    assert_eq!(kept(&save(&pool, &WHOLE)), (0, 0, 6 * 32));
    resume(&pool);
    fill(&pool, restless, 3);
    assert_eq!(kept(&save(&pool, &WHOLE)), (0, 4 * 32, 2 * 32));
    resume(&pool);
    fill(&pool, restless, 4);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let moved = pool.release_rest().expect("all");
    assert_eq!(moved.copied_bytes, 2 * UNIT, "what has not changed is there already");
    pool.restore_stage(&[(DEVICE, 6 * UNIT)].into()).expect("all");
    pool.restore_rest(usize::MAX).expect("the rest");
    drop(pool.commit_resume());
    assert!(has(&pool, steady, 1) && has(&pool, restless, 4));
}

#[test]
fn everything_is_copied_where_changes_are_not_detected() {
    let pool = a_pool();
    pool.copies().detect_changes(false);
    let range = memory(&pool, "", Contents::Keep, 1);
    fill(&pool, pieces(range, 3, 1), 1);
    for _ in 0..2 {
        assert_eq!(kept(&save(&pool, &WHOLE)), (0, 0, 32));
        resume(&pool);
        assert!(has(&pool, pieces(range, 3, 1), 1) && is_zero(&pool, pieces(range, 4, 28)));
    }
    assert_eq!(pool.driver().faults().calls(DriverOp::LaunchKernel), 0);
}

#[test]
fn saved_contents_are_read_with_their_zeros_from_memory_and_file() {
    for contents in [Contents::Keep, Contents::File] {
        let pool = a_pool();
        let range = memory(&pool, "", contents, 2);
        fill(&pool, pieces(range, 10, 2), 1);
        let log = save(&pool, &WHOLE);
        assert_eq!(kept(&log), (62, 0, 2));
        let mut bytes = vec![0xaa; 4 * 65_536];
        pool.saved().read(pieces(range, 9, 4).start, &mut bytes).expect("saved");
        assert!(bytes[..65_536].iter().chain(&bytes[3 * 65_536..]).all(|byte| *byte == 0));
        assert!(bytes[65_536..3 * 65_536].chunks(16).all(|part| part == pattern(1)));
        match contents {
            Contents::File => assert_eq!(pool.report().file_bytes, 2 * PIECE),
            Contents::Keep | Contents::Discard | Contents::DiscardByTag => {
                let place = pool.saved().at(pieces(range, 10, 2));
                assert!(place.is_ok(), "{place:?}");
                let across = pieces(range, 11, 2);
                assert_eq!(pool.saved().at(across), Err(SavedError::InPieces(across.start)));
            }
        }
        resume(&pool);
        assert!(has(&pool, pieces(range, 10, 2), 1) && is_zero(&pool, pieces(range, 12, 52)));
        assert!(is_zero(&pool, pieces(range, 0, 10)));
    }
}

#[test]
fn a_tags_copy_stays_beside_other_pauses_and_goes_where_there_is_no_room() {
    let pool = a_pool();
    let units = CHUNK / UNIT;
    let (one, other) = (
        memory(&pool, "one", Contents::Keep, units - 10),
        memory(&pool, "other", Contents::Keep, 20),
    );
    fill(&pool, one, 1);
    fill(&pool, other, 2);
    save(&pool, &tagged("one"));
    resume_tags(&pool, &["one"]);
    // Both fit in two chunks: the copy of the first stays.
    save(&pool, &tagged("other"));
    resume_tags(&pool, &["other"]);
    assert_eq!(pool.report().host_arena_bytes, 2 * CHUNK);
    assert_eq!(kept(&save(&pool, &tagged("one"))), (0, (units - 10) * 32, 0));
    resume_tags(&pool, &["one"]);
    assert!(has(&pool, one, 1) && has(&pool, other, 2));

    // Another pool with room for one chunk alone.
    let pool = a_pool();
    let (one, other) = (
        memory(&pool, "one", Contents::Keep, units - 10),
        memory(&pool, "other", Contents::Keep, 20),
    );
    fill(&pool, one, 1);
    fill(&pool, other, 2);
    save(&pool, &tagged("one"));
    resume_tags(&pool, &["one"]);
    let log = pool.save(&tagged("other"), HostBudget(Some(0))).expect("in the first's place");
    assert!(log.notes.iter().any(|note| note.contains("no room")), "{:?}", log.notes);
    pool.release_selected().expect("released");
    resume_tags(&pool, &["other"]);
    assert_eq!(pool.report().host_arena_bytes, CHUNK);
    let again = pool.save(&tagged("one"), HostBudget(Some(0))).expect("in its own again");
    assert!(again.notes.is_empty(), "said once: {:?}", again.notes);
    assert_eq!(kept(&again), (0, 0, (units - 10) * 32));
    pool.release_selected().expect("released");
    resume_tags(&pool, &["one"]);
    assert!(has(&pool, one, 1) && has(&pool, other, 2));
}

#[test]
fn a_copy_of_pinned_memory_whose_place_another_takes_is_not_taken_for_unchanged() {
    let pool = a_pool();
    let [pinned, other] = [1, 2].map(|seed| {
        let range = memory(&pool, "", Contents::Keep, 60);
        fill(&pool, range, seed);
        range
    });
    save(&pool, &WHOLE);
    resume(&pool);
    let registered = pool.enter().register(pinned, "a network card holds it");
    let newer = memory(&pool, "", Contents::Keep, 20);
    fill(&pool, newer, 3);
    // In the place of the copy of what stays: there is no other.
    pool.save(&WHOLE, HostBudget(Some(0))).expect("saved");
    pool.release_selected().expect("released");
    resume(&pool);
    pool.enter_giving_up().unregister(&registered);
    for _ in 0..2 {
        save(&pool, &WHOLE);
        resume(&pool);
        assert!(has(&pool, other, 2) && has(&pool, newer, 3));
        assert!(has(&pool, pinned, 1), "each pause copied it");
    }
}

#[test]
fn demand_says_what_each_choice_of_copies_takes() {
    let pool = a_pool();
    let units = CHUNK / UNIT;
    let one = memory(&pool, "one", Contents::Keep, units - 10);
    fill(&pool, one, 1);
    save(&pool, &tagged("one"));
    resume_tags(&pool, &["one"]);
    fill(&pool, memory(&pool, "other", Contents::Keep, 20), 2);
    let demand = pool.host_memory().demand(&tagged("other"));
    let all = Copies::FEWER.map(|copies| demand.grow_bytes_with(copies));
    assert_eq!(all, [CHUNK, 0, 0]);
    assert_eq!((demand.held_bytes, demand.grow_bytes), (CHUNK, 0));
}

#[test]
fn what_lies_in_the_file_already_is_not_to_be_copied_there() {
    let pool = a_pool();
    pool.copies().detect_changes(false);
    let ranges = [memory(&pool, "one", Contents::File, 2), memory(&pool, "", Contents::Keep, 1)];
    for range in ranges {
        fill(&pool, range, 1);
    }
    assert_eq!(pool.host_memory().demand(&tagged("one")).copying.to_file_bytes, 2 * UNIT);
    // Host memory for the way there is refused at first, and does not count as held.
    pool.driver().faults().fail(DriverOp::HostRegister, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    pool.save(&tagged("one"), UNLIMITED).expect_err("it is not pinned");
    assert_eq!(pool.report().host_arena_bytes, 0);
    pool.remount().expect("undone");
    save(&pool, &tagged("one"));
    let copying = pool.host_memory().demand(&WHOLE).copying;
    assert_eq!((copying.to_memory_bytes, copying.to_file_bytes), (UNIT, 0));
    resume_tags(&pool, &["one"]);
    assert!(ranges.into_iter().all(|range| has(&pool, range, 1)));
}

#[test]
fn host_memory_that_is_wanted_back_takes_the_copies_with_it() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 1);
    fill(&pool, range, 1);
    pool.copies().give_back(true);
    for _ in 0..2 {
        assert_eq!(kept(&save(&pool, &WHOLE)), (0, 0, 32));
        resume(&pool);
        assert_eq!(pool.report().host_arena_bytes, 0);
    }
    assert!(has(&pool, range, 1));
}

#[test]
fn a_device_that_will_not_tell_has_all_copied_and_is_asked_no_more() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 1);
    fill(&pool, pieces(range, 0, 1), 1);
    let faults = pool.driver().faults();
    // Memory for the kernel may be there the next time.
    faults.fail(DriverOp::ModuleLoad, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    let log = save(&pool, &WHOLE);
    assert_eq!(kept(&log), (0, 0, 32));
    assert!(log.notes[0].contains("GPU 0 does not tell"), "{:?}", log.notes);
    resume(&pool);
    faults.fail(DriverOp::ModuleLoad, FaultSpan::Nth(1), DriverCode::NOT_SUPPORTED);
    let log = save(&pool, &WHOLE);
    assert!(log.notes[0].contains("cuModuleLoadData returned"), "{:?}", log.notes);
    resume(&pool);
    let asked = faults.calls(DriverOp::ModuleLoad);
    let log = save(&pool, &WHOLE);
    assert_eq!((kept(&log), log.notes.len()), ((0, 0, 32), 0), "said once");
    assert_eq!(faults.calls(DriverOp::ModuleLoad), asked);
    resume(&pool);
    assert!(has(&pool, pieces(range, 0, 1), 1) && is_zero(&pool, pieces(range, 1, 31)));
}

#[test]
fn a_copy_whose_place_was_lent_is_not_taken_for_unchanged() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 1);
    fill(&pool, range, 1);
    pool.copies().retain(true);
    for is_resumed in [false, true] {
        save(&pool, &WHOLE);
        let away = (!is_resumed).then(|| pool.saved().at(range).expect("saved"));
        resume(&pool);
        let copy =
            away.unwrap_or_else(|| pool.saved_or_retained().at(range).expect("kept for readers"));
        rot(copy);
        assert_eq!(kept(&save(&pool, &WHOLE)), (0, 0, 32));
        resume(&pool);
        assert!(has(&pool, range, 1));
    }
    assert_eq!(kept(&save(&pool, &WHOLE)), (0, 32, 0), "made again");
    resume(&pool);
}

/// Changes the eighth byte there.
#[expect(unsafe_code, reason = "writes into host memory that the pool has lent")]
fn rot(copy: std::ptr::NonNull<u8>) {
    // SAFETY: inside a piece of the pool's host memory, which nothing copies to or from now.
    let byte = unsafe { copy.add(7) };
    // SAFETY: as above.
    let held = unsafe { byte.read() };
    // SAFETY: as above.
    unsafe { byte.write(!held) };
}

#[test]
fn what_a_pause_that_was_undone_has_written_over_is_no_copy_of_what_was_there() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 1);
    fill(&pool, range, 1);
    save(&pool, &WHOLE);
    resume(&pool);
    fill(&pool, range, 2);
    pool.save(&WHOLE, UNLIMITED).expect("saved");
    pool.remount().expect("undone");
    drop(pool.commit_resume());
    // As at the pause before that one.
    fill(&pool, range, 1);
    save(&pool, &WHOLE);
    resume(&pool);
    assert!(has(&pool, range, 1));
}

#[test]
fn pieces_of_each_size_are_told_apart() {
    for kib in [16, 256, 2048] {
        let pool = a_pool();
        let piece_bytes = PieceBytes::new(kib << 10).expect("a size");
        pool.copies().set_piece_bytes(piece_bytes);
        let range = memory(&pool, "", Contents::Keep, 3);
        fill(&pool, VaRange::new(DeviceAddress(range.start.0 + UNIT + 16), 16), 1);
        let log = save(&pool, &WHOLE);
        let kept = log.kept.expect("a save");
        assert_eq!((kept.copied_bytes, kept.zero_bytes), (kib << 10, 3 * UNIT - (kib << 10)));
        resume(&pool);
        assert!(has(&pool, VaRange::new(DeviceAddress(range.start.0 + UNIT + 16), 16), 1));
        assert!(is_zero(&pool, VaRange::new(range.start, UNIT)));
    }
}

#[test]
fn memory_with_rights_to_a_part_alone_is_read_by_no_kernel() {
    let pool = a_pool();
    let range = memory(&pool, "", Contents::Keep, 2);
    fill(&pool, range, 1);
    let part = VaRange::new(range.start, UNIT);
    // The simulated driver keeps rights by mapping, and refuses.
    pool.set_access(part, &[AccessDesc::read_write(DEVICE)]).expect_err("cuts a mapping");
    let log = save(&pool, &WHOLE);
    assert_eq!(kept(&log), (0, 0, 64));
    assert_eq!(pool.driver().faults().calls(DriverOp::LaunchKernel), 0);
    resume(&pool);
    assert!(has(&pool, range, 1));
}
