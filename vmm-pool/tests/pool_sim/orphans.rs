//! Imports that their owner has no more: it has let them go, or it has ended.

use std::collections::BTreeSet;

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{
    AllocationId, Contents, LostImports, PeerId, PoolError, References, Selection, Stance,
    StayReason, Tags, VirtualHandle, Whose,
};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, OWNER, SimPool, UNIT, UNLIMITED, WHOLE, class, create,
    free_addresses, free_bytes, holds, import_again, kept, map, node, pattern, pause, pool,
    reserve, resume, share, write,
};

const RW: fn(vmm_pool::driver::DeviceOrdinal) -> AccessDesc = AccessDesc::read_write;

/// An owner that has let its memory go, an importer that holds it still, its handle, and where it maps it.
fn let_go() -> (SimPool, SimPool, VirtualHandle, VaRange) {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let place = map(&owner, shared, UNIT, &[RW(DEVICE)]);
    write(&owner, DEVICE, place, pattern(5));
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
    owner.unmap(place).expect("unmap");
    owner.release(shared).expect("release");
    assert_eq!(importer.holdings().import_owners(), [OWNER]);
    (owner, importer, imported, there)
}

/// What a pool says that holds still.
fn references(pool: &SimPool) -> References {
    pool.holdings().freeze();
    pool.holdings().references(&WHOLE)
}

fn ids_of_imports(importer: &SimPool) -> Vec<AllocationId> {
    let taken = references(importer).taken.into_values().flatten();
    taken.map(|held| held.id).collect()
}

fn paused(pool: &SimPool) {
    pool.save(&WHOLE, UNLIMITED).expect("saving");
    pool.release_selected().expect("release");
}

#[test]
fn what_stays_keeps_its_bytes_through_a_pause_and_is_named() {
    let (owner, importer, imported, there) = let_go();
    assert_eq!(references(&owner).given, [], "the owner has it no more");
    let ids = ids_of_imports(&importer);
    let stays: Vec<_> = ids.iter().map(|&id| (id, StayReason::LetGo)).collect();
    importer.leave(&stays);
    paused(&importer);
    assert!(holds(&importer, OTHER, there, pattern(5)), "nobody could bring it back");
    let rows = || importer.report().devices.into_iter().flat_map(|device| device.pinned);
    assert_eq!(rows().map(|row| row.bytes).sum::<u64>(), UNIT);
    assert!(
        rows().all(|row| row.reason.contains("let go by its owner")),
        "{:?}",
        importer.report()
    );
    resume(&importer);
    assert!(holds(&importer, OTHER, there, pattern(5)));
    assert_eq!(rows().count(), 0, "it is counted while it is in the way");
    importer.unmap(there).expect("unmap");
    importer.release(imported).expect("release");
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
}

#[test]
fn what_nobody_else_counts_is_never_taken_from_its_owner() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let id = pool.export(handle).expect("export").id;
    let place = map(&pool, handle, UNIT, &[RW(DEVICE)]);
    write(&pool, DEVICE, place, pattern(1));
    pool.leave(&[(id, StayReason::LetGo)]);
    let refused = pool.save(&WHOLE, UNLIMITED);
    assert!(matches!(refused, Err(PoolError::Disowned { id: named }) if named == id));
    pool.remount().expect("nothing was moved");
    // Others may have pinned it.
    pool.leave(&[(id, StayReason::Pinned)]);
    paused(&pool);
    assert!(holds(&pool, DEVICE, place, pattern(1)), "it stays");
}

#[test]
fn a_frozen_pool_gives_nothing_and_a_thawed_one_what_is_there() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let export = owner.export(shared).expect("export");
    let held = references(&owner);
    assert!(held.shares_selection);
    assert_eq!(held.given.len(), 1, "somebody may come with the ticket");
    let refused = owner.redeem(export.id, export.serial, PeerId(1));
    assert!(matches!(refused, Err(PoolError::Frozen)));
    paused(&owner);
    assert!(matches!(owner.redeem(export.id, export.serial, PeerId(1)), Err(PoolError::Frozen)));
    resume(&owner);
    drop(owner.redeem(export.id, export.serial, PeerId(1)).expect("it runs again"));
    drop(importer);
}

#[test]
fn a_ticket_is_used_up_by_its_own_redemption_only() {
    let owner = pool(&node());
    let shared = create(&owner, DEVICE, 1, kept());
    let (first, second) = (owner.export(shared).unwrap(), owner.export(shared).unwrap());
    owner.release(shared).expect("release");
    drop(owner.redeem(first.id, 0, PeerId(1)).expect("without a ticket, while it is there"));
    drop(owner.redeem(first.id, first.serial, PeerId(2)).expect("the first"));
    drop(owner.redeem(first.id, first.serial, PeerId(3)).expect("the same once more"));
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES - UNIT, "one is open");
    drop(owner.redeem(second.id, second.serial, PeerId(4)).expect("the second"));
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES);
}

#[test]
fn what_is_freed_while_it_is_away_comes_back_for_its_importers_and_is_theirs_then() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let place = map(&owner, shared, UNIT, &[RW(DEVICE)]);
    write(&owner, DEVICE, place, pattern(6));
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
    for pool in [&owner, &importer] {
        paused(pool);
    }
    owner.unmap(place).expect("frees are answered while it is away");
    owner.release(shared).expect("release");
    free_addresses(&owner, place);
    for pool in [&owner, &importer] {
        pool.create_own(&WHOLE).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
    }
    import_again(&owner, &importer, 1).expect("imports");
    drop((owner.commit_resume(), importer.commit_resume()));
    assert!(holds(&importer, OTHER, there, pattern(6)), "as if there had been no pause");
    assert!(owner.report().devices.is_empty(), "it is the importer's alone");
    importer.unmap(there).expect("unmap");
    importer.release(imported).expect("release");
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
}

/// The driver unmaps it in no pause, so that it stays on its device where its importers have let it go.
#[test]
fn what_the_driver_would_not_unmap_and_is_freed_then_comes_back_for_its_importers_too() {
    for contents in [Contents::Keep, Contents::Discard] {
        let node = node();
        let (owner, importer) = (pool(&node), pool(&node));
        let shared = create(&owner, DEVICE, 1, class(contents));
        let place = map(&owner, shared, UNIT, &[RW(DEVICE)]);
        write(&owner, DEVICE, place, pattern(6));
        let imported = share(&owner, shared, &importer, 1);
        let there = map(&importer, imported, UNIT, &[RW(OTHER)]);
        owner.save(&WHOLE, UNLIMITED).expect("saving");
        let faults = owner.driver().faults();
        faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
        let log = owner.release_selected().expect("there is no way back");
        faults.clear();
        let stays = contents == Contents::Discard;
        assert_eq!(log.notes.iter().any(|note| note.contains("stays mapped")), stays);
        paused(&importer);
        owner.unmap(place).expect("frees are answered while it is away");
        owner.release(shared).expect("release");
        for pool in [&owner, &importer] {
            pool.create_own(&WHOLE).expect("memory");
            pool.restore_own(usize::MAX).expect("contents");
        }
        import_again(&owner, &importer, 1).expect("imports");
        drop((owner.commit_resume(), importer.commit_resume()));
        let is_right = holds(&importer, OTHER, there, pattern(6));
        assert!(is_right || stays, "as if there had been no pause");
        assert!(owner.report().devices.is_empty(), "it is the importer's alone");
        importer.unmap(there).expect("unmap");
        importer.release(imported).expect("release");
        assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
    }
}

#[test]
fn descriptors_that_importers_have_fetched_come_out_when_the_resume_is_committed() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let offered = create(&owner, DEVICE, 1, kept());
    owner.export(offered).expect("export");
    let imported = share(&owner, shared, &importer, 1);
    for pool in [&owner, &importer] {
        paused(pool);
        pool.create_own(&WHOLE).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
    }
    import_again(&owner, &importer, 1).expect("imports");
    let spare = owner.commit_resume();
    assert_eq!(spare.len(), 1, "that of the ticket which nobody has redeemed is kept");
    drop(spare);
    drop(importer.commit_resume());
    for (pool, handle) in [(&owner, shared), (&importer, imported)] {
        pool.release(handle).expect("release");
    }
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES - UNIT);
}

#[test]
fn who_has_fetched_memory_again_holds_it_and_who_has_not_does_not() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    share(&owner, shared, &importer, 1);
    for fetches in [true, false] {
        assert!(owner.holdings().is_shared(&WHOLE));
        for pool in [&owner, &importer] {
            paused(pool);
            pool.create_own(&WHOLE).expect("memory");
            pool.restore_own(usize::MAX).expect("contents");
        }
        if fetches {
            import_again(&owner, &importer, 1).expect("imports");
        } else {
            importer.holdings().give_up_imports(OWNER);
        }
        drop((owner.commit_resume(), importer.commit_resume()));
        assert_eq!(owner.holdings().is_shared(&WHOLE), fetches);
    }
}

#[test]
fn who_has_fetched_memory_in_a_resume_that_was_undone_has_not_in_the_next() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    share(&owner, shared, &importer, 1);
    let id = owner.holdings().inventory(Stance::Runs)[0].id;
    paused(&owner);
    owner.create_own(&WHOLE).expect("memory");
    owner.restore_own(usize::MAX).expect("contents");
    drop(owner.hand_out(id, PeerId(1)).expect("it is owed"));
    owner.undo_resume().expect("given up again");
    assert!(owner.holdings().is_shared(&WHOLE), "it is owed still");
    resume(&owner);
    assert!(!owner.holdings().is_shared(&WHOLE), "nobody has come for it");
}

#[test]
fn an_import_that_the_driver_does_not_unmap_keeps_the_undo_of_a_resume_from_being_done() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let imported = share(&owner, shared, &importer, 1);
    map(&importer, imported, UNIT, &[RW(OTHER)]);
    for pool in [&owner, &importer] {
        paused(pool);
        pool.create_own(&WHOLE).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
    }
    import_again(&owner, &importer, 1).expect("imports");
    let faults = importer.driver().faults();
    faults.fail(DriverOp::Unmap, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    importer.undo_resume().expect_err("its owner could not give it up");
    importer.undo_resume().expect("another try");
    owner.undo_resume().expect("given up");
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES);
}

#[test]
fn what_is_freed_by_all_while_it_is_away_is_gone_after_the_resume() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, DEVICE, 1, kept());
    let imported = share(&owner, shared, &importer, 1);
    pause(&owner);
    paused(&importer);
    owner.release(shared).expect("release");
    importer.release(imported).expect("release");
    resume(&owner);
    resume(&importer);
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
    assert!(owner.report().devices.is_empty());
}

#[test]
fn memory_of_the_dead_is_kept_until_the_release_and_asked_for_until_it_is_given_up() {
    let (_, importer, imported, there) = let_go();
    importer.save(&WHOLE, UNLIMITED).expect("nothing to save");
    importer.remount().expect("mapped again");
    drop(importer.commit_resume());
    assert!(holds(&importer, OTHER, there, pattern(5)), "going back loses nothing");

    paused(&importer);
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES, "memory of the dead stays");
    assert_eq!(importer.holdings().imports_away(OWNER), LostImports { count: 1, bytes: UNIT });
    importer.create_own(&WHOLE).expect("it has none");
    importer.restore_own(0).expect("it has none");
    assert_eq!(importer.import_requests().len(), 1);
    let refused = importer.map_imports();
    assert!(matches!(refused, Err(PoolError::MissingImport { .. })));

    assert_eq!(importer.holdings().give_up_imports(OWNER).count, 1);
    assert!(importer.import_requests().is_empty());
    importer.map_imports().expect("nothing is missing");
    drop(importer.commit_resume());
    // It takes part in pauses no more, and its user can give it up.
    paused(&importer);
    resume(&importer);
    assert!(importer.address_free_is_refused(there));
    importer.unmap(there).expect("no driver call");
    importer.release(imported).expect("no driver call");
    free_addresses(&importer, there);
}

#[test]
fn a_range_with_a_lost_part_is_unmapped_as_a_whole() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = create(&owner, OTHER, 1, kept());
    let imported = share(&owner, shared, &importer, 1);
    let own = create(&importer, DEVICE, 1, kept());
    let both = reserve(&importer, 2 * UNIT);
    let second = VaRange::new(DeviceAddress(both.start.0 + UNIT), UNIT);
    importer.map(VaRange::new(both.start, UNIT), 0, imported).expect("mapping");
    importer.map(second, 0, own).expect("mapping");
    importer.set_access(both, &[RW(DEVICE)]).expect("access");
    importer.release(imported).expect("only the mapping is left");

    let missing: BTreeSet<_> = ids_of_imports(&importer).into_iter().collect();
    paused(&importer);
    assert_eq!(importer.holdings().give_up_missing(&missing).count, 1);
    resume(&importer);
    importer.unmap(both).expect("what is there is unmapped, and what is not is forgotten");
    importer.release(own).expect("release");
    free_addresses(&importer, both);
    drop(owner);
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
}

#[test]
fn nothing_is_mapped_over_what_is_away() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, class(Contents::Discard));
    let place = map(&pool, handle, 2 * UNIT, &[RW(DEVICE)]);
    let other = create(&pool, DEVICE, 1, kept());
    pool.save(&Selection::Tagged(Tags::All, Whose::Everybody), UNLIMITED).expect("nothing");
    pool.release_selected().expect("release");
    let inside = VaRange::new(DeviceAddress(place.start.0 + UNIT), UNIT);
    let refused = pool.map(inside, 0, other).expect_err("as while it is there");
    assert_eq!(refused.code(), Some(vmm_pool::driver::DriverCode::INVALID_VALUE));
}
