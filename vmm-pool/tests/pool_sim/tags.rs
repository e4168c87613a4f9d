//! Pauses and resumes by tag of a process that runs on.

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{
    Class, Contents, DeviceReport, ImportSource, PeerId, PoolError, SavedError, Selection, Tags,
    VirtualHandle, Whose,
};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, OWNER, SimPool, UNIT, UNLIMITED, WHOLE, create, free_bytes,
    holds, import_again, kept, map, names, node, pattern, pause, pause_selected, pause_tags, pool,
    reserve, resume, resume_selected, resume_tags, selected, share, write,
};

const RW: fn(vmm_pool::driver::DeviceOrdinal) -> AccessDesc = AccessDesc::read_write;

pub(crate) fn tagged(tag: &str, contents: Contents) -> Class {
    Class { library: "test", tag: tag.to_owned(), contents }
}

/// Memory of `units` under `class`, filled.
pub(crate) fn filled(pool: &SimPool, units: u64, class: Class, seed: u64) -> VaRange {
    let handle = create(pool, DEVICE, units, class);
    let range = map(pool, handle, units * UNIT, &[RW(DEVICE)]);
    write(pool, DEVICE, range, pattern(seed));
    range
}

#[test]
fn a_tag_leaves_and_comes_back_while_the_rest_stays() {
    let pool = pool(&node());
    let weights = filled(&pool, 3, tagged("weights", Contents::Keep), 1);
    let cache = filled(&pool, 4, tagged("kv", Contents::Discard), 2);
    let other = filled(&pool, 1, kept(), 3);
    for _ in 0..3 {
        pause_tags(&pool, &["kv"]);
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 4 * UNIT);
        pause_tags(&pool, &["weights"]);
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
        assert!(holds(&pool, DEVICE, other, pattern(3)), "the rest works on");
        resume_tags(&pool, &["weights"]);
        assert!(holds(&pool, DEVICE, weights, pattern(1)));
        resume_tags(&pool, &["kv"]);
        write(&pool, DEVICE, cache, pattern(2));
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 8 * UNIT);
    }
}

#[test]
fn what_is_set_aside_keeps_its_place_beside_later_pauses() {
    let pool = pool(&node());
    let [a, b, c] = ["a", "b", "c"].map(|tag| tagged(tag, Contents::Keep));
    let (a, b, c) = (filled(&pool, 2, a, 1), filled(&pool, 3, b, 2), filled(&pool, 1, c, 3));
    pause_tags(&pool, &["a"]);
    pause_tags(&pool, &["b"]);
    resume_tags(&pool, &["a"]);
    write(&pool, DEVICE, a, pattern(4));
    // Goes into the gap that `a` has left, and what does not fit behind `b`.
    pause_tags(&pool, &["a", "c"]);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    resume_tags(&pool, &["a", "b", "c"]);
    for (range, seed) in [(a, 4), (b, 2), (c, 3)] {
        assert!(holds(&pool, DEVICE, range, pattern(seed)), "{seed}");
    }
}

/// Where all of it goes is settled before the first part leaves.
#[test]
fn what_goes_in_any_number_of_stages_takes_no_host_memory_beside_the_gap_that_holds_it() {
    const CHUNK: u64 = 256 << 20;
    for stages in [0, 1, 3] {
        let pool = pool(&SimNode::private(&[4 * CHUNK]).expect("a node"));
        let [a, b] = [("a", 1), ("b", 2)].map(|(tag, seed)| {
            let parts = [CHUNK / UNIT - 5, 5].map(|units| {
                let handle = create(&pool, DEVICE, units, tagged(tag, Contents::Keep));
                let range = map(&pool, handle, units * UNIT, &[RW(DEVICE)]);
                let first = VaRange::new(range.start, UNIT);
                write(&pool, DEVICE, first, pattern(seed));
                first
            });
            (parts, seed)
        });
        pause_tags(&pool, &["a"]);
        pause_tags(&pool, &["b"]);
        resume_tags(&pool, &["a"]);
        assert_eq!(pool.report().host_arena_bytes, 2 * CHUNK);
        pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        for _ in 0..stages {
            pool.release_stage(&[(DEVICE, 5 * UNIT)].into()).expect("a stage");
        }
        pool.release_rest().expect("all");
        assert_eq!(pool.report().host_arena_bytes, 2 * CHUNK);
        assert_eq!(free_bytes(&pool, DEVICE), 4 * CHUNK);
        resume(&pool);
        resume_tags(&pool, &["b"]);
        for (parts, seed) in [a, b] {
            assert!(parts.iter().all(|part| holds(&pool, DEVICE, *part, pattern(seed))));
        }
    }
}

#[test]
fn a_whole_pause_and_resume_leave_what_was_set_aside_away() {
    let pool = pool(&node());
    let weights = filled(&pool, 2, tagged("weights", Contents::Keep), 1);
    let other = filled(&pool, 1, kept(), 2);
    pause_tags(&pool, &["weights"]);
    pause(&pool);
    resume(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT, "only the rest is back");
    assert!(holds(&pool, DEVICE, other, pattern(2)));
    resume_tags(&pool, &["weights"]);
    assert!(holds(&pool, DEVICE, weights, pattern(1)));
}

#[test]
fn a_paused_process_can_come_back_with_some_tags_only() {
    let pool = pool(&node());
    let weights = filled(&pool, 2, tagged("weights", Contents::Keep), 1);
    let cache = filled(&pool, 4, tagged("kv", Contents::Keep), 2);
    let other = filled(&pool, 1, kept(), 3);
    pause(&pool);
    resume_selected(&pool, &Selection::Staged(names(&["weights"])));
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 3 * UNIT);
    assert!(holds(&pool, DEVICE, weights, pattern(1)));
    assert!(holds(&pool, DEVICE, other, pattern(3)));
    resume_tags(&pool, &["kv"]);
    assert!(holds(&pool, DEVICE, cache, pattern(2)));
}

#[test]
fn a_librarys_memory_leaves_by_its_tag_and_comes_back_only_when_it_is_asked_for() {
    let pool = pool(&node());
    let buffers = filled(&pool, 2, tagged("nccl", Contents::Keep), 1);
    let weights = filled(&pool, 4, tagged("weights", Contents::Keep), 2);
    let other = filled(&pool, 1, kept(), 3);
    let everything = [buffers, weights, other];
    let there = |units: u64| {
        assert_eq!(CAPACITY_BYTES - free_bytes(&pool, DEVICE), units * UNIT);
    };
    // All regions are others.
    pause_selected(&pool, &Selection::Tagged(Tags::Regions, Whose::Everybody));
    assert!(!pool.holdings().is_set_aside("nccl") && pool.holdings().is_set_aside("weights"));
    there(2 + 1);
    pause_tags(&pool, &["nccl"]);
    assert!(pool.holdings().is_set_aside("nccl"));
    // A pause and resume of everything pass over it, and so does one by another tag.
    pause(&pool);
    resume_selected(&pool, &Selection::Staged(names(&["weights"])));
    there(4 + 1);
    pause(&pool);
    resume(&pool);
    there(4 + 1);
    // Taken by a pause of everything, it comes back with what belongs to no region.
    resume_selected(&pool, &Selection::SetAside(Tags::All, Whose::Everybody));
    assert!(!pool.holdings().is_set_aside("nccl"));
    pause(&pool);
    resume_selected(&pool, &Selection::Staged(names(&["kv"])));
    there(2 + 1);
    resume_selected(&pool, &Selection::SetAside(names(&["weights"]), Whose::Everybody));
    for (range, seed) in everything.into_iter().zip(1..) {
        assert!(holds(&pool, DEVICE, range, pattern(seed)));
    }
}

#[test]
fn a_failed_resume_of_a_tag_leaves_new_memory_of_it_alone() {
    let pool = pool(&node());
    let old = filled(&pool, 100, tagged("kv", Contents::Keep), 1);
    pause_tags(&pool, &["kv"]);
    let selection = Selection::SetAside(names(&["kv"]), Whose::Everybody);
    let fits = filled(&pool, 20, tagged("kv", Contents::Keep), 4);
    pool.create_own(&selection).expect("it fits next to the new");
    pool.restore_own(usize::MAX).expect("contents");
    pool.undo_resume().expect("given up again");
    assert!(holds(&pool, DEVICE, fits, pattern(4)));
    pool.unmap(fits).expect("the handle keeps it");
    let new = filled(&pool, 40, tagged("kv", Contents::Keep), 2);
    let error = pool.create_own(&selection).expect_err("it does not fit next to the new");
    assert!(error.to_string().contains("free"), "{error}");
    assert!(holds(&pool, DEVICE, new, pattern(2)));
    pool.unmap(new).expect("the handle keeps it");
    let handles: u64 = pool.report().devices.iter().map(DeviceReport::resident_bytes).sum();
    assert_eq!(handles, 60 * UNIT);
    pause_tags(&pool, &["kv"]);
    pause(&pool);
    resume_selected(&pool, &Selection::Staged(names(&[])));
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    assert!(old.size_bytes > new.size_bytes);
}

#[test]
fn saved_contents_outlive_memory_that_a_failed_resume_could_not_give_back() {
    let undone = |pool: &SimPool, tag| {
        pool.save(&Selection::Tagged(names(&[tag]), Whose::Everybody), UNLIMITED).expect("saved");
        pool.remount().expect("as before");
        drop(pool.commit_resume());
    };
    for what in ["nothing else", "a pause", "an undone pause", "an undone pause of other memory"] {
        let pool = pool(&node());
        let range = filled(&pool, 2, tagged("kv", Contents::Keep), 1);
        filled(&pool, 1, tagged("other", Contents::Keep), 2);
        pause_tags(&pool, &["kv"]);
        pool.create_own(&selected(&["kv"])).expect("memory");
        let faults = pool.driver().faults();
        faults.fail(DriverOp::CopyToDevice, FaultSpan::Nth(1), DriverCode::UNKNOWN);
        assert!(pool.restore_own(usize::MAX).is_err(), "it was made to fail");
        faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
        pool.undo_resume().expect("as far as the driver lets it go");
        faults.clear();
        assert!(pool.holdings().is_set_aside("kv"), "its process runs without it");
        match what {
            "a pause" => pause_tags(&pool, &["kv"]),
            "an undone pause" => undone(&pool, "kv"),
            "an undone pause of other memory" => undone(&pool, "other"),
            _ => {}
        }
        resume_tags(&pool, &["kv"]);
        assert!(holds(&pool, DEVICE, range, pattern(1)), "after {what}");
    }
}

#[test]
fn imports_follow_the_owner_that_is_named() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let handle = create(&owner, DEVICE, 2, tagged("kv", Contents::Keep));
    let at_owner = map(&owner, handle, 2 * UNIT, &[RW(DEVICE)]);
    write(&owner, DEVICE, at_owner, pattern(1));
    let imported = share(&owner, handle, &importer, 7);
    let there = map(&importer, imported, 2 * UNIT, &[RW(OTHER)]);
    // The import has no tag of its own here: a process that redeems a ticket learns the owner's.
    let all_of = |whose| Selection::Tagged(Tags::All, whose);
    importer.save(&all_of(Whose::Owner(PeerId(1))), UNLIMITED).expect("nothing");
    assert!(holds(&importer, OTHER, there, pattern(1)));
    assert!(owner.holdings().is_shared(&all_of(Whose::Own)));
    assert!(!importer.holdings().is_shared(&all_of(Whose::Own)));
}

#[test]
fn saved_contents_can_be_read_while_they_are_away() {
    let pool = pool(&node());
    let range = filled(&pool, 2, tagged("weights", Contents::Keep), 5);
    let cache = filled(&pool, 1, tagged("kv", Contents::Discard), 6);
    let part = VaRange::new(DeviceAddress(range.start.0 + UNIT), 64);
    assert_eq!(pool.saved().at(part), Err(SavedError::Resident(part.start)));
    pause_tags(&pool, &["weights", "kv"]);
    let mut bytes = [0; 64];
    pool.saved().read(part.start, &mut bytes).expect("saved");
    assert_eq!(bytes[..16], pattern(5));
    assert!(pool.saved().at(part).is_ok());
    assert_eq!(pool.saved().at(cache), Err(SavedError::NotKept(cache.start)));
    let beyond = VaRange::new(range.start, 3 * UNIT);
    assert_eq!(pool.saved().at(beyond), Err(SavedError::NotOurs(beyond.start, beyond.end())));
}

#[test]
fn saved_contents_are_read_across_allocations_that_are_mapped_side_by_side() {
    let pool = pool(&node());
    let range = reserve(&pool, 3 * UNIT);
    let part = |begin: u64, units: u64| {
        VaRange::new(DeviceAddress(range.start.0 + begin * UNIT), units * UNIT)
    };
    for (at, seed) in [(part(0, 1), 1), (part(1, 2), 2)] {
        let handle = create(&pool, DEVICE, at.size_bytes / UNIT, tagged("kv", Contents::Keep));
        pool.map(at, 0, handle).expect("mapping");
        pool.set_access(at, &[RW(DEVICE)]).expect("access");
        write(&pool, DEVICE, at, pattern(seed));
    }
    pause_tags(&pool, &["kv"]);
    let across = VaRange::new(DeviceAddress(range.start.0 + UNIT - 16), 32);
    let mut bytes = [0; 32];
    pool.saved().read(across.start, &mut bytes).expect("saved");
    assert_eq!(bytes, [pattern(1), pattern(2)].concat()[..]);
    let place = pool.saved().at(across).expect("neighbours in the arena too");
    // Saved places follow each other as the allocations do.
    let second = pool.saved().at(part(1, 2)).expect("saved");
    assert_eq!(place.addr().get() + 16, second.addr().get());
}

#[test]
fn unused_parts_are_not_copied_and_what_lies_beside_them_is() {
    let pool = pool(&node());
    let range = filled(&pool, 4, kept(), 1);
    let whole = filled(&pool, 2, kept(), 2);
    let hole = VaRange::new(DeviceAddress(range.start.0 + UNIT), 2 * UNIT);
    // Two that touch, one of another size, and one of nobody's.
    let halves =
        [VaRange::new(hole.start, UNIT), VaRange::new(DeviceAddress(hole.start.0 + UNIT), UNIT)];
    pool.mark_unused(&[halves[1], whole, halves[0], VaRange::new(DeviceAddress(64), 8)]);
    let log = pool.save(&WHOLE, UNLIMITED).expect("saved");
    assert_eq!(log.bytes, 2 * UNIT, "the ends of the first, nothing of the second");
    pool.release_selected().expect("released");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    resume(&pool);
    let ends = [range.start.0, range.start.0 + 3 * UNIT].map(DeviceAddress);
    for start in ends {
        assert!(holds(&pool, DEVICE, VaRange::new(start, UNIT), pattern(1)));
    }
    // The marks are used up.
    write(&pool, DEVICE, range, pattern(3));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(3)));
}

#[test]
fn marks_of_unused_parts_are_void_after_a_pause_of_other_memory() {
    let pool = pool(&node());
    filled(&pool, 1, tagged("kv", Contents::Keep), 1);
    let other = filled(&pool, 2, kept(), 2);
    pool.mark_unused(&[other]);
    pause_tags(&pool, &["kv"]);
    // It runs on, and this is of worth now.
    write(&pool, DEVICE, other, pattern(3));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, other, pattern(3)));
}

#[test]
fn marks_of_unused_parts_are_void_after_a_pause_that_failed() {
    let pool = pool(&node());
    filled(&pool, 1, kept(), 1);
    let unused = filled(&pool, 2, kept(), 2);
    pool.mark_unused(&[unused]);
    let faults = pool.driver().faults();
    faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    assert!(pool.save(&WHOLE, UNLIMITED).is_err(), "it was made to fail");
    faults.clear();
    pool.remount().expect("mapped again");
    write(&pool, DEVICE, unused, pattern(3));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, unused, pattern(3)));
}

#[test]
fn memory_that_is_mapped_twice_is_never_unused() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, kept());
    let marked = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    let in_use = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, in_use, pattern(4));
    pool.mark_unused(&[marked]);
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, in_use, pattern(4)));
}

/// The driver refuses the second of three calls: what the first call unmapped is gone, and the rest stays.
#[test]
fn an_unmapping_that_fails_half_way_can_be_tried_again_and_the_process_be_paused() {
    let pool = pool(&node());
    let range = reserve(&pool, 3 * UNIT);
    let part = |index: u64| VaRange::new(DeviceAddress(range.start.0 + index * UNIT), UNIT);
    for (index, tag) in [(0, "kv"), (1, ""), (2, "")] {
        let handle = create(&pool, DEVICE, 1, tagged(tag, Contents::Keep));
        pool.map(part(index), 0, handle).expect("mapped");
        pool.set_access(part(index), &[RW(DEVICE)]).expect("access");
        write(&pool, DEVICE, part(index), pattern(index));
        pool.release(handle).expect("the mapping keeps it");
    }
    pause_tags(&pool, &["kv"]);
    pool.driver().faults().fail(DriverOp::Unmap, FaultSpan::Nth(2), DriverCode::UNKNOWN);
    pool.unmap(range).expect_err("the driver refuses");
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, part(2), pattern(2)), "it was never unmapped");
    pool.unmap(range).expect("unmapped at the second try");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

/// Memory of tag `kv` that an owner has shared, and memory of tag `other` of the owner's own.
struct SharedTag {
    owner: SimPool,
    importer: SimPool,
    handle: VirtualHandle,
    contents: Contents,
    place: VaRange,
    /// Where the importer has it.
    there: VaRange,
}

impl SharedTag {
    fn new(contents: Contents) -> Self {
        let node = node();
        let (owner, importer) = (pool(&node), pool(&node));
        let class = tagged("kv", contents);
        let handle = create(&owner, DEVICE, 1, class.clone());
        let place = map(&owner, handle, UNIT, &[RW(DEVICE)]);
        write(&owner, DEVICE, place, pattern(6));
        let export = owner.export(handle).expect("export");
        let fd = owner.redeem(export.id, export.serial, PeerId(1)).expect("a descriptor");
        let source = ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
        let imported = importer.import(source, fd.into(), class).expect("import");
        let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
        filled(&owner, 1, tagged("other", Contents::Keep), 7);
        Self { owner, importer, handle, contents, place, there }
    }

    fn pause(&self) {
        pause_tags(&self.importer, &["kv"]);
        pause_tags(&self.owner, &["kv"]);
    }

    /// All of a resume but its end.
    fn bring_back(&self) {
        for pool in [&self.owner, &self.importer] {
            pool.create_own(&selected(&["kv"])).expect("memory");
            pool.restore_own(usize::MAX).expect("contents");
        }
        import_again(&self.owner, &self.importer, 1).expect("the owner has it for its importer");
    }

    /// A resume by tag that comes to nothing.
    fn try_to_resume(&self) {
        self.bring_back();
        self.importer.undo_resume().expect("given up");
        self.owner.undo_resume().expect("given up");
    }

    /// Other pauses of the owner, and its application frees the memory.
    fn owner_runs_on_and_frees(&self) {
        for _ in 0..2 {
            pause_tags(&self.owner, &["other"]);
            resume_tags(&self.owner, &["other"]);
        }
        pause(&self.owner);
        resume(&self.owner);
        self.owner.unmap(self.place).expect("unmap");
        self.owner.release(self.handle).expect("release");
    }

    /// Its importer has it all the same, and alone.
    fn comes_back(&self) {
        self.bring_back();
        drop((self.owner.commit_resume(), self.importer.commit_resume()));
        let is_right = holds(&self.importer, OTHER, self.there, pattern(6));
        assert!(is_right || self.contents == Contents::Discard);
        assert!(
            !self.owner.holdings().tag_bytes().contains_key("kv"),
            "it is the importer's alone"
        );
    }
}

/// A pause of `pool` in which the driver unmaps nothing at the end.
fn pause_without_unmapping(pool: &SimPool, selection: &Selection) {
    pool.save(selection, UNLIMITED).expect("nothing is saved");
    let faults = pool.driver().faults();
    faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
    let log = pool.release_selected().expect("there is no way back");
    faults.clear();
    assert!(log.notes.iter().any(|note| note.contains("stays mapped")), "{:?}", log.notes);
}

#[test]
fn what_a_pause_by_tag_left_on_its_device_is_owed_to_importers_that_gave_it_up() {
    let shared = SharedTag::new(Contents::Discard);
    pause_tags(&shared.importer, &["kv"]);
    let selection = Selection::Tagged(names(&["kv"]), Whose::Everybody);
    pause_without_unmapping(&shared.owner, &selection);
    // It is away as far as others can tell.
    assert_eq!(shared.owner.holdings().tag_bytes()["kv"].away_bytes, UNIT);
    let export = shared.owner.export(shared.handle).expect("a ticket");
    let refused = shared.owner.redeem(export.id, export.serial, PeerId(2));
    assert!(matches!(refused, Err(PoolError::Offloaded { tag }) if tag == "kv"));
    shared.owner.pool().enter().take_ticket_back(&export);
    shared.owner_runs_on_and_frees();
    shared.comes_back();
}

#[test]
fn what_a_whole_pause_left_on_its_device_is_owed_to_importers_that_run_on_without_its_tag() {
    let shared = SharedTag::new(Contents::Discard);
    pause(&shared.importer);
    pause_without_unmapping(&shared.owner, &WHOLE);
    for pool in [&shared.owner, &shared.importer] {
        resume_selected(pool, &Selection::Staged(names(&["other"])));
    }
    shared.owner_runs_on_and_frees();
    shared.comes_back();
}

#[test]
fn what_an_undone_resume_by_tag_left_on_its_device_is_owed_to_its_importers() {
    for contents in [Contents::Keep, Contents::Discard] {
        let shared = SharedTag::new(contents);
        shared.pause();
        shared.bring_back();
        shared.importer.undo_resume().expect("given up");
        let faults = shared.owner.driver().faults();
        faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
        shared.owner.undo_resume().expect("what is left is noted");
        faults.clear();
        shared.owner_runs_on_and_frees();
        shared.comes_back();
    }
}

#[test]
fn what_is_registered_while_it_is_away_is_owed_to_its_importers_still() {
    let shared = SharedTag::new(Contents::Keep);
    shared.pause();
    shared.owner.pin(shared.place, "registered with a network card");
    shared.try_to_resume();
    shared.owner_runs_on_and_frees();
    shared.comes_back();
}

#[test]
fn what_is_registered_while_it_is_away_goes_again_when_its_resume_is_undone() {
    for is_filled in [false, true] {
        let pool = pool(&node());
        let weights = filled(&pool, 3, tagged("weights", Contents::Keep), 1);
        pause_tags(&pool, &["weights"]);
        pool.pin(weights, "registered with a network card");
        pool.create_own(&selected(&["weights"])).expect("memory");
        if is_filled {
            pool.restore_own(usize::MAX).expect("contents");
        }
        pool.undo_resume().expect("given up");
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES, "nobody has seen it, {is_filled}");
        resume_tags(&pool, &["weights"]);
        assert!(holds(&pool, DEVICE, weights, pattern(1)), "{is_filled}");
    }
}

#[test]
fn what_an_importer_registers_while_it_is_away_goes_again_when_its_resume_is_undone() {
    let shared = SharedTag::new(Contents::Keep);
    shared.pause();
    shared.importer.pin(shared.there, "registered with a network card");
    shared.try_to_resume();
    let there = shared.importer.driver().core().mapping_at(shared.there.start);
    assert!(there.is_none(), "its owner's memory is away: {there:?}");
    assert_eq!(free_bytes(&shared.owner, DEVICE), CAPACITY_BYTES - UNIT, "but for the other tag's");
    shared.owner_runs_on_and_frees();
    shared.comes_back();
}

#[test]
fn what_comes_back_to_nothing_and_is_freed_then_is_owed_to_its_importers() {
    let shared = SharedTag::new(Contents::Keep);
    shared.pause();
    shared.try_to_resume();
    shared.owner_runs_on_and_frees();
    shared.try_to_resume();
    shared.comes_back();
}
