//! Pauses and resumes in which every driver call succeeds.

use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverOp, Location, VaRange,
};
use vmm_pool::{Contents, CopiedBytes, HostBudget, PoolError};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, UNIT, UNLIMITED, WHOLE, class, create, end_streams, free_bytes,
    holds, import_again, kept, map, node, pattern, pause, pause_tags, pool, resume, resume_tags,
    share, write,
};
use crate::tags::{filled, tagged};

const RW: fn(vmm_pool::driver::DeviceOrdinal) -> AccessDesc = AccessDesc::read_write;

#[test]
fn kept_bytes_come_back_at_both_addresses_of_an_alias() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 3, kept());
    let first = map(&pool, handle, 3 * UNIT, &[RW(DEVICE)]);
    let second = map(&pool, handle, 3 * UNIT, &[RW(DEVICE), RW(OTHER)]);
    for round in 0..3 {
        write(&pool, DEVICE, first, pattern(round));
        pause(&pool);
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES, "every byte is free");
        assert_eq!(pool.range_of(first.start), Some(first));
        resume(&pool);
        assert!(holds(&pool, DEVICE, first, pattern(round)));
        assert!(holds(&pool, OTHER, second, pattern(round)), "the alias, with its own rights");
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 3 * UNIT, "one memory, not two");
    }
}

#[test]
fn what_is_copied_is_counted_until_the_pause_or_resume_is_over() {
    for contents in [Contents::Keep, Contents::File] {
        let pool = pool(&node());
        let handle = create(&pool, DEVICE, 3, class(contents));
        let range = map(&pool, handle, 3 * UNIT, &[RW(DEVICE)]);
        create(&pool, DEVICE, 2, class(Contents::Discard));
        write(&pool, DEVICE, range, pattern(1));
        let copied = |done_units: u64, of_units: u64| CopiedBytes {
            done_bytes: done_units * UNIT,
            of_bytes: of_units * UNIT,
        };
        let none = copied(0, 0);
        for is_early in [false, true] {
            assert_eq!(pool.copied_bytes(), none);
            pool.drain();
            assert_eq!(pool.copied_bytes(), none);
            if is_early {
                pool.reserve(&WHOLE, UNLIMITED).expect("room");
                assert_eq!(pool.copied_bytes(), copied(0, 3));
            } else {
                pool.save(&WHOLE, UNLIMITED).expect("a save");
                assert_eq!(pool.copied_bytes(), copied(3, 3));
            }
            pool.release_selected().expect("a release");
            assert_eq!(pool.copied_bytes(), none);
            pool.create_own(&WHOLE).expect("room");
            assert_eq!(pool.copied_bytes(), copied(0, 3));
            pool.restore_own(0).expect("contents");
            assert_eq!(pool.copied_bytes(), copied(3, 3));
            pool.map_imports().expect("no imports");
            drop(pool.commit_resume());
        }
        pool.drain();
        pool.save(&WHOLE, UNLIMITED).expect("a save");
        pool.drop_proof();
        assert_eq!(pool.copied_bytes(), none, "it came to nothing");
    }
}

#[test]
fn memory_that_is_mapped_nowhere_is_kept_through_a_view() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, kept());
    let range = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, range, pattern(9));
    pool.unmap(range).expect("the handle keeps it");
    pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    resume(&pool);
    pool.map(range, 0, handle).expect("the same address");
    pool.set_access(range, &[RW(DEVICE)]).expect("access");
    assert!(holds(&pool, DEVICE, range, pattern(9)));
}

#[test]
fn memory_that_its_own_device_may_not_write_is_kept_with_its_rights() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let range = map(&pool, handle, UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, range, pattern(4));
    let only_read = AccessDesc { location: Location::device(DEVICE), flags: 1 };
    pool.set_access(range, &[only_read]).expect("access");
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(4)));
    let rights = pool.driver().access_of(range.start, Location::device(DEVICE));
    assert_eq!(rights.expect("rights"), 1);
}

#[test]
fn a_mapping_nobody_may_touch_comes_back_so() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let range = map(&pool, handle, UNIT, &[]);
    pause(&pool);
    resume(&pool);
    let rights = pool.driver().access_of(range.start, Location::device(DEVICE));
    assert_eq!(rights.expect("rights"), 0);
    pool.set_access(range, &[RW(DEVICE)]).expect("it is mapped");
}

#[test]
fn discarded_memory_comes_back_without_a_copy() {
    let pool = pool(&node());
    let scratch = create(&pool, DEVICE, 4, class(Contents::Discard));
    let range = map(&pool, scratch, 4 * UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, range, pattern(1));
    assert_eq!(pool.host_memory().demand(&WHOLE).saved_bytes, 0);
    let saved = pool.save(&WHOLE, UNLIMITED).expect("saving");
    let released = pool.release_selected().expect("release");
    assert_eq!((saved.bytes, released.bytes), (0, 4 * UNIT));
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    resume(&pool);
    let faults = pool.driver().faults();
    assert_eq!(faults.calls(DriverOp::CopyToHost) + faults.calls(DriverOp::CopyToDevice), 0);
    assert_eq!(pool.report().host_arena_bytes, 0);
    write(&pool, DEVICE, range, pattern(2));
    assert!(holds(&pool, DEVICE, range, pattern(2)), "mapped and usable");
}

/// A program that says so for pauses of its own is in the middle of its work when somebody else pauses all of it.
#[test]
fn what_a_pause_by_tag_gives_up_a_pause_of_everything_saves() {
    let pool = pool(&node());
    let cache = filled(&pool, 4, tagged("kv", Contents::DiscardByTag), 2);
    let weights = filled(&pool, 2, tagged("weights", Contents::DiscardByTag), 1);
    for _ in 0..2 {
        pause(&pool);
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
        resume(&pool);
        assert!(
            holds(&pool, DEVICE, cache, pattern(2)) && holds(&pool, DEVICE, weights, pattern(1))
        );
    }
    let copies = || pool.driver().faults().calls(DriverOp::CopyToDevice);
    let before = copies();
    pause_tags(&pool, &["kv"]);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 2 * UNIT);
    resume_tags(&pool, &["kv"]);
    assert_eq!(copies(), before, "given up");
    assert!(!holds(&pool, DEVICE, cache, pattern(2)) && holds(&pool, DEVICE, weights, pattern(1)));
    write(&pool, DEVICE, cache, pattern(3));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, cache, pattern(3)) && holds(&pool, DEVICE, weights, pattern(1)));
}

#[test]
fn a_pause_undone_before_release_leaves_everything() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 2, kept());
    let scratch = create(&owner, DEVICE, 1, class(Contents::Discard));
    let place = map(&owner, shared, 2 * UNIT, &[RW(DEVICE)]);
    let scratch_place = map(&owner, scratch, UNIT, &[RW(DEVICE)]);
    write(&owner, DEVICE, place, pattern(3));
    write(&owner, DEVICE, scratch_place, pattern(4));
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, 2 * UNIT, &[RW(OTHER)]);
    importer.release(imported).expect("only the mapping is left, as NCCL does it");

    owner.save(&WHOLE, UNLIMITED).expect("saving");
    importer.save(&WHOLE, UNLIMITED).expect("nothing to save");
    owner.remount().expect("own memory");
    importer.remount().expect("imports");
    drop((owner.commit_resume(), importer.commit_resume()));

    assert!(holds(&owner, DEVICE, place, pattern(3)));
    assert!(holds(&owner, DEVICE, scratch_place, pattern(4)), "it was never given up");
    assert!(holds(&importer, OTHER, there, pattern(3)));
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES - 3 * UNIT);
}

#[test]
fn imports_show_the_owners_new_memory_after_a_resume() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let place = map(&owner, shared, UNIT, &[RW(DEVICE)]);
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
    let twice = map(&importer, imported, UNIT, &[RW(OTHER)]);
    for round in 0..2 {
        write(&importer, OTHER, there, pattern(round));
        owner.save(&WHOLE, UNLIMITED).expect("saving");
        importer.save(&WHOLE, UNLIMITED).expect("nothing to save");
        owner.release_selected().expect("release");
        importer.release_selected().expect("release");
        assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES);
        owner.create_own(&WHOLE).expect("memory");
        importer.create_own(&WHOLE).expect("nothing to make");
        owner.restore_own(usize::MAX).expect("contents");
        importer.restore_own(usize::MAX).expect("nothing to restore");
        import_again(&owner, &importer, 1).expect("imports");
        drop((owner.commit_resume(), importer.commit_resume()));
        assert!(holds(&importer, OTHER, twice, pattern(round)));
        write(&owner, DEVICE, place, pattern(round + 100));
        assert!(holds(&importer, OTHER, there, pattern(round + 100)), "the same memory");
    }
    importer.unmap(there).expect("unmap");
    importer.unmap(twice).expect("unmap");
    importer.release(imported).expect("release");
    owner.unmap(place).expect("unmap");
    owner.release(shared).expect("release");
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES);
}

#[test]
fn a_missing_descriptor_is_named_and_the_import_can_be_tried_again() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
    importer.save(&WHOLE, UNLIMITED).expect("nothing to save");
    importer.release_selected().expect("release");
    importer.create_own(&WHOLE).expect("it has none");
    importer.restore_own(0).expect("it has none");
    let error = importer.map_imports().expect_err("nothing was fetched");
    let PoolError::MissingImport { address, size_bytes } = error else { panic!("{error}") };
    assert_eq!((address, size_bytes), (there.start, UNIT));
    import_again(&owner, &importer, 1).expect("the second try");
    write(&importer, OTHER, there, pattern(8));
}

#[test]
fn too_little_device_memory_is_named_and_nothing_is_taken() {
    let node = node();
    let (tenant, other) = (pool(&node), pool(&node));
    let handle = create(&tenant, DEVICE, 8, kept());
    let range = map(&tenant, handle, 8 * UNIT, &[RW(DEVICE)]);
    write(&tenant, DEVICE, range, pattern(6));
    pause(&tenant);
    let hog = create(&other, DEVICE, CAPACITY_BYTES / UNIT - 5, kept());
    let error = tenant.create_own(&WHOLE).expect_err("three units are missing");
    let PoolError::OutOfDeviceMemory { device, needed_bytes, free_bytes: found_bytes } = error
    else {
        panic!("{error}")
    };
    assert_eq!((device, needed_bytes, found_bytes), (DEVICE, 8 * UNIT, 5 * UNIT));
    assert_eq!(free_bytes(&other, DEVICE), 5 * UNIT);
    other.release(hog).expect("release");
    resume(&tenant);
    assert!(holds(&tenant, DEVICE, range, pattern(6)));
}

#[test]
fn a_host_budget_that_is_too_small_changes_nothing() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, kept());
    let range = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, range, pattern(7));
    pool.drain();
    let (report, calls) = (pool.report(), pool.driver().faults().calls_total());
    let refused = pool.save(&WHOLE, HostBudget(Some(UNIT)));
    let error = refused.expect_err("two units do not fit into one");
    let PoolError::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes } = error else {
        panic!("{error}")
    };
    assert_eq!((needed_bytes, available_bytes), (2 * UNIT, UNIT));
    assert!(grow_bytes >= needed_bytes);
    assert_eq!(pool.driver().faults().calls_total(), calls, "the driver was not asked");
    assert_eq!(pool.report(), report);
    assert!(holds(&pool, DEVICE, range, pattern(7)));
}

#[test]
fn pinned_memory_stays_and_is_reported_with_its_reason() {
    let pool = pool(&node());
    let (stays, goes) = (create(&pool, DEVICE, 1, kept()), create(&pool, DEVICE, 2, kept()));
    let place = map(&pool, stays, UNIT, &[RW(DEVICE)]);
    let other = map(&pool, goes, 2 * UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, place, pattern(1));
    write(&pool, DEVICE, other, pattern(2));
    assert_eq!(pool.pin(place, "a network card holds it"), UNIT);
    assert_eq!(pool.pin(place, "again"), 0, "once is enough");
    pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
    assert!(holds(&pool, DEVICE, place, pattern(1)), "in place all the time");
    let row = &pool.report().devices[0];
    assert_eq!(row.pinned[0].reason, "a network card holds it");
    assert_eq!(row.pinned[0].bytes, UNIT);
    resume(&pool);
    assert!(holds(&pool, DEVICE, other, pattern(2)));
}

#[test]
fn registered_memory_stays_until_its_last_registration_ends() {
    let pool = pool(&node());
    let place = map(&pool, create(&pool, DEVICE, 1, kept()), UNIT, &[RW(DEVICE)]);
    let parts = [place, VaRange::new(place.start, UNIT / 2)];
    let [whole, half] = parts.map(|part| pool.enter().register(part, "a network card holds it"));
    let nothing = pool.enter().register(VaRange::new(place.end(), UNIT), "nothing is there");
    assert!(nothing.is_empty() && !whole.is_empty());
    assert!(
        pool.holdings().has_mapping_in(place)
            && !pool.holdings().has_mapping_in(VaRange::new(place.end(), UNIT))
    );
    pool.enter_giving_up().unregister(&half);
    write(&pool, DEVICE, place, pattern(1));
    pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
    // Also while the rest is away.
    pool.enter_giving_up().unregister(&whole);
    assert_eq!(pool.report().devices[0].pinned, []);
    // Nobody has saved it: it is no part of what a resume that is given up takes back.
    pool.create_own(&WHOLE).expect("room");
    pool.restore_own(usize::MAX).expect("contents");
    pool.undo_resume().expect("an undo");
    resume(&pool);
    assert!(holds(&pool, DEVICE, place, pattern(1)));
    pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES, "it leaves as any other");
    resume(&pool);
    assert!(holds(&pool, DEVICE, place, pattern(1)));
}

#[test]
fn memory_freed_while_paused_does_not_come_back() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = pool.block_allocate(3 * UNIT, &prop, &[DEVICE], kept()).expect("a block");
    let stays = pool.block_allocate(UNIT, &prop, &[DEVICE], kept()).expect("a block");
    pause(&pool);
    pool.block_free(block).expect("from the table");
    resume(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
    pool.block_free(stays).expect("free");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

#[test]
fn a_descriptor_without_a_known_owner_is_counted_and_never_given_up() {
    let node = node();
    let stranger = SimDriver::new(node.clone(), SimOptions::default());
    let raw = stranger.create(UNIT, &AllocationProp::pinned_on(DEVICE)).expect("memory");
    let fd = stranger.export_fd(raw).expect("a descriptor");
    let pool = pool(&node);
    let handle = pool.import_foreign(std::os::fd::AsFd::as_fd(&fd), kept()).expect("import");
    let range = map(&pool, handle, UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, range, pattern(1));
    pause(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(1)));
    assert_eq!(pool.report().devices[0].pinned[0].count, 1);
    resume(&pool);
    pool.unmap(range).expect("unmap");
    pool.release(handle).expect("release");
}

#[test]
fn a_call_that_maps_waits_while_the_memory_is_away() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    pause(&pool);
    let range = crate::stage::reserve(&pool, UNIT);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| pool.map(range, 0, handle));
        while pool.gate().waits() == 0 {
            std::thread::yield_now();
        }
        assert!(!mapping.is_finished());
        resume(&pool);
        mapping.join().expect("no panic").expect("now there is memory");
    });
}

#[test]
fn nothing_is_unmapped_before_its_copy_is_done_however_many_groups_there_are() {
    /// Memory of this size is a group of its own here. It takes longer to copy than to queue the next two.
    const GROUP: u64 = 64 << 20;
    /// What is written of each: its end.
    const USED: u64 = 8 << 20;
    let node = SimNode::private(&[4 * GROUP]).expect("a node");
    let pool = pool(&node);
    pool.copies().set_group_bytes(GROUP);
    let places: Vec<_> = (0..3)
        .map(|_| {
            let handle = create(&pool, DEVICE, GROUP / UNIT, kept());
            map(&pool, handle, GROUP, &[RW(DEVICE)])
        })
        .collect();
    let used = |place: &VaRange| VaRange::new(DeviceAddress(place.end().0 - USED), USED);
    // In the first pause host memory is brought in between; in the second the groups follow immediately.
    for round in 0..2 {
        for (place, seed) in places.iter().zip(10 * round..) {
            write(&pool, DEVICE, used(place), pattern(seed));
        }
        pause(&pool);
        assert_eq!(free_bytes(&pool, DEVICE), 4 * GROUP);
        resume(&pool);
        for (place, seed) in places.iter().zip(10 * round..) {
            assert!(holds(&pool, DEVICE, used(place), pattern(seed)), "{round}: {seed}");
        }
    }
}

#[test]
fn streams_for_copies_are_made_once_and_end_with_a_context_and_with_the_pool() {
    let pool = pool(&node());
    let driver = std::sync::Arc::clone(pool.driver());
    let faults = driver.faults();
    let made = || faults.calls(DriverOp::StreamCreate);
    let handle = create(&pool, DEVICE, 2, kept());
    let range = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    let round = |seed| {
        write(&pool, DEVICE, range, pattern(seed));
        pause(&pool);
        resume(&pool);
        assert!(holds(&pool, DEVICE, range, pattern(seed)));
    };
    round(1);
    let (first, live) = (made(), driver.census().streams);
    assert_eq!((first, live), (2, 2), "one device, and steps that follow each other");
    round(2);
    assert_eq!((made(), driver.census().streams), (first, live));
    // Those of a context that ends may be another's streams afterwards.
    assert_eq!(end_streams(&pool), 0);
    round(3);
    assert_eq!((made(), driver.census().streams), (2 * first, live));
    // Those that the driver has refused a copy on are not taken again.
    faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(1), DriverCode::INVALID_HANDLE);
    assert!(pool.save(&WHOLE, UNLIMITED).is_err(), "it was made to fail");
    pool.remount().expect("as before");
    drop(pool.commit_resume());
    assert_eq!(driver.census().streams, 0);
    round(4);
    assert_eq!((made(), driver.census().streams), (3 * first, live));
    drop(pool);
    assert_eq!(driver.census().streams, 0);
}
