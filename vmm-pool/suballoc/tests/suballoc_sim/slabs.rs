//! Cells of slabs: the view of a library that requests memory as NCCL does, and the view of the driver.

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DriverCode, DriverOp, Location, VaRange,
};
use vmm_pool::{Export, ImportSource, Known, PeerId, VirtualHandle};

use crate::slabbed::*;
use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, OWNER, SimPool, UNIT, UNLIMITED, WHOLE, class, free_addresses,
    free_bytes, holds, node, pattern, pause, reserve, resume, write,
};

#[test]
fn neighbours_are_one_object_of_the_driver_and_take_no_call_of_it() {
    let pool = slabbed(&node());
    let (_, first) = allocate(&pool, 1);
    let before = pool.driver().faults().calls_total();
    let rest: Vec<_> = (0..7).map(|_| allocate(&pool, 1).1).collect();
    assert_eq!(pool.driver().faults().calls_total(), before);
    assert_eq!(objects(&pool), [1, 1, 1]);
    assert!(
        rest.iter().zip(1..).all(|(range, index)| range.start.0 == first.start.0 + index * UNIT)
    );
    let (_, next) = allocate(&pool, 1);
    assert_eq!(objects(&pool), [2, 2, 2]);
    for range in rest.into_iter().chain([first, next]) {
        free(&pool, range);
    }
    assert_nothing_left(&pool);
}

#[test]
fn contents_and_addresses_survive_a_pause_that_moves_one_object() {
    let pool = slabbed(&node());
    let ranges: Vec<_> = (0..8).map(|_| allocate(&pool, 1).1).collect();
    for (range, seed) in ranges.iter().zip(1..) {
        write(&pool, DEVICE, *range, pattern(seed));
    }
    let calls = |op| pool.driver().faults().calls(op);
    let before = [DriverOp::Unmap, DriverOp::Create, DriverOp::Map, DriverOp::SetAccess].map(calls);
    pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    resume(&pool);
    let after = [DriverOp::Unmap, DriverOp::Create, DriverOp::Map, DriverOp::SetAccess].map(calls);
    assert_eq!(after, before.map(|count| count + 1));
    for (range, seed) in ranges.iter().zip(1..) {
        assert!(holds(&pool, DEVICE, *range, pattern(seed)), "{range:?}");
        free(&pool, *range);
    }
    assert_nothing_left(&pool);
}

#[test]
fn what_is_freed_while_it_is_away_is_gone_after_the_resume() {
    let pool = slabbed(&node());
    let ranges: Vec<_> = (0..4).map(|_| allocate(&pool, 1).1).collect();
    write(&pool, DEVICE, ranges[3], pattern(3));
    pause(&pool);
    let before = pool.driver().faults().calls_total();
    for range in &ranges[..3] {
        free(&pool, *range);
    }
    assert_eq!(pool.driver().faults().calls_total(), before);
    resume(&pool);
    assert!(holds(&pool, DEVICE, ranges[3], pattern(3)));
    pause(&pool);
    free(&pool, ranges[3]);
    resume(&pool);
    assert_nothing_left(&pool);
}

#[test]
fn only_small_memory_of_a_library_itself_that_can_be_shared_by_descriptor_is_of_slabs() {
    let pool = slabbed(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let other = AllocationProp { requested_handle_types: 0, ..prop };
    let all = [
        (UNIT, prop, class(vmm_pool::Contents::Keep)),
        (UNIT, other, nccl()),
        ((32 << 20) + UNIT, prop, nccl()),
    ];
    for (size_bytes, prop, class) in all {
        let entered = pool.enter();
        let handle = entered
            .pool()
            .front()
            .create(&entered, new_memory(size_bytes, prop, class))
            .expect("memory");
        assert_eq!(entered.pool().front().take_addresses(&entered, size_bytes, 0, "test"), None);
        entered.pool().front().release(&entered, handle).expect("released");
        drop(entered);
        assert_eq!(pool.report().slabs.slabs, 0);
    }
    pool.slabs().use_slabs(false);
    create(&pool, 1).expect("memory");
    assert_eq!(pool.report().slabs.slabs, 0);
}

#[test]
fn a_cell_that_is_mapped_or_exported_before_it_has_addresses_stands_alone() {
    let pool = slabbed(&node());
    let (_, kept) = allocate(&pool, 1);
    let elsewhere = reserve(&pool, UNIT);
    let mapped = create(&pool, 1).expect("memory");
    let entered = pool.enter();
    entered.pool().front().map(&entered, elsewhere, 0, mapped).expect("mapped");
    entered
        .pool()
        .front()
        .set_access(&entered, elsewhere, &[AccessDesc::read_write(DEVICE)])
        .expect("access");
    assert_eq!(pool.report().slabs.cells, 1);
    assert_eq!(pool.report().slabs.dead_bytes, 0, "its bytes are given out again");
    let exported = create(&pool, 1).expect("memory");
    let export = entered.pool().front().export(&entered, exported).expect("export");
    assert_eq!((export.size_bytes, export.part), (UNIT, None));
    entered.take_ticket_back(&export);
    drop(entered);
    write(&pool, DEVICE, elsewhere, pattern(1));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, elsewhere, pattern(1)));
    let entered = pool.enter_giving_up();
    entered.pool().front().release(&entered, exported).expect("released");
    entered.pool().front().release(&entered, exported).expect_err("once");
    entered.pool().front().release(&entered, mapped).expect("released");
    drop(entered);
    let entered = pool.enter_giving_up();
    entered.pool().front().unmap(&entered, elsewhere).expect("unmapped");
    entered.pool().front().properties(&entered, mapped).expect_err("gone");
    drop(entered);
    free_range(&pool, elsewhere);
    free(&pool, kept);
    assert_nothing_left(&pool);
}

#[test]
fn a_cell_in_use_cannot_be_mapped_in_addresses_of_the_drivers_and_the_refusal_names_the_switch() {
    let pool = slabbed(&node());
    let (handle, range) = allocate(&pool, 1);
    let elsewhere = reserve(&pool, UNIT);
    for (range, offset, code) in [
        (range, 0, DriverCode::INVALID_VALUE),
        (elsewhere, UNIT, DriverCode::NOT_SUPPORTED),
        (VaRange::new(elsewhere.start, 2 * UNIT), 0, DriverCode::INVALID_VALUE),
        (VaRange::new(elsewhere.start, UNIT / 2), 0, DriverCode::NOT_SUPPORTED),
    ] {
        let error = pool.front().map(&pool.enter(), range, offset, handle).expect_err("refused");
        assert_eq!(error.code(), Some(code), "as the driver does");
    }
    let error = pool.front().map(&pool.enter(), elsewhere, 0, handle).expect_err("refused");
    assert!(error.to_string().contains("SUBLET_SLABS"), "{error}");
    assert_eq!(error.code(), Some(DriverCode::NOT_SUPPORTED));
    // The cell has contents, which do not move with it. No allocation of its own is mapped where a slab is.
    let (_, kept) = allocate(&pool, 1);
    pool.front().unmap(&pool.enter(), range).expect("unmapped");
    let alone = pool.create(UNIT, &AllocationProp::pinned_on(DEVICE), nccl()).expect("memory");
    for (range, handle) in [(elsewhere, handle), (range, alone)] {
        let error = pool.front().map(&pool.enter(), range, 0, handle).expect_err("refused");
        assert!(error.to_string().contains("SUBLET_SLABS"), "{error}");
    }
    pool.front().map(&pool.enter(), range, 0, handle).expect("where it was");
    pool.front().release(&pool.enter_giving_up(), alone).expect("released");
    pool.front().release(&pool.enter_giving_up(), handle).expect("released");
    pool.front().unmap(&pool.enter_giving_up(), range).expect("unmapped");
    free_range(&pool, range);
    free(&pool, kept);
    free_addresses(&pool, elsewhere);
    assert_nothing_left(&pool);
}

#[test]
fn a_cell_in_use_is_mapped_a_second_time_at_further_addresses() {
    let pool = slabbed(&node());
    let (handle, first) = allocate(&pool, 2);
    let (_, third) = allocate(&pool, 1);
    let second = place(&pool, handle, 2, OTHER);
    assert_ne!(first, second);
    write(&pool, DEVICE, first, pattern(7));
    assert!(holds(&pool, OTHER, second, pattern(7)));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, OTHER, second, pattern(7)));
    let entered = pool.enter_giving_up();
    entered.pool().front().release(&entered, handle).expect("released");
    entered.pool().front().unmap(&entered, first).expect("unmapped");
    drop(entered);
    free_range(&pool, first);
    assert!(holds(&pool, OTHER, second, pattern(7)), "the other mapping keeps it");
    pool.front().unmap(&pool.enter_giving_up(), second).expect("unmapped");
    free_range(&pool, second);
    free(&pool, third);
    assert_nothing_left(&pool);
}

#[test]
fn addresses_that_are_kept_take_new_memory() {
    let pool = slabbed(&node());
    let (_, kept) = allocate(&pool, 1);
    let (mut handle, range) = allocate(&pool, 1);
    for seed in 1..4 {
        write(&pool, DEVICE, range, pattern(seed));
        let entered = pool.enter_giving_up();
        entered.pool().front().unmap(&entered, range).expect("unmapped");
        entered.pool().front().release(&entered, handle).expect("released");
        drop(entered);
        handle = create(&pool, 1).expect("memory");
        let entered = pool.enter();
        entered.pool().front().map(&entered, range, 0, handle).expect("mapped again");
        entered
            .pool()
            .front()
            .set_access(&entered, range, &[AccessDesc::read_write(DEVICE)])
            .expect("access");
        drop(entered);
        assert!(holds(&pool, DEVICE, range, [0; 16]), "new memory holds nothing of the old");
        assert_eq!(pool.report().slabs.cells, 2);
    }
    // The slab ends with its last cell, and the addresses stay.
    free(&pool, kept);
    let entered = pool.enter_giving_up();
    entered.pool().front().unmap(&entered, range).expect("unmapped");
    entered.pool().front().release(&entered, handle).expect("released");
    drop(entered);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    handle = create(&pool, 1).expect("memory");
    pool.front().map(&pool.enter(), range, 0, handle).expect("mapped again");
    pool.front()
        .set_access(&pool.enter(), range, &[AccessDesc::read_write(DEVICE)])
        .expect("access");
    write(&pool, DEVICE, range, pattern(9));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, range, pattern(9)));
    free(&pool, range);
    pool.front().release(&pool.enter_giving_up(), handle).expect_err("gone");
    assert_nothing_left(&pool);
}

#[test]
fn importers_map_a_slab_once_and_see_its_cells() {
    let node = node();
    let (owner, importer) = (slabbed(&node), pool(&node));
    let cells: Vec<_> = (0..6).map(|_| allocate(&owner, 1)).collect();
    let mut seen = Vec::new();
    for (index, (handle, range)) in cells.iter().enumerate() {
        write(&owner, DEVICE, *range, pattern(index as u64 + 1));
        let imported = import(&owner, *handle, &importer).expect("imported");
        let place = place(&importer, imported, 1, OTHER);
        // NCCL keeps no handle of an import that is mapped in the same process.
        importer
            .front()
            .release(&importer.enter_giving_up(), imported)
            .expect("the mapping keeps it");
        seen.push(place);
    }
    assert_eq!(objects(&importer), [1, 1, 1]);
    assert_eq!(importer.driver().faults().calls(DriverOp::SetAccess), 1);
    let all_hold =
        || seen.iter().zip(1..).all(|(place, seed)| holds(&importer, OTHER, *place, pattern(seed)));
    assert!(all_hold());
    for pool in [&importer, &owner] {
        pool.save(&WHOLE, UNLIMITED).expect("saved");
    }
    for pool in [&importer, &owner] {
        pool.release_selected().expect("released");
    }
    assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES);
    for pool in [&owner, &importer] {
        pool.create_own(&WHOLE).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
    }
    crate::stage::import_again(&owner, &importer, 1).expect("imported");
    drop((owner.commit_resume(), importer.commit_resume()));
    assert!(all_hold());
    for (_, range) in cells {
        free(&owner, range);
    }
    assert!(all_hold(), "imports keep the memory");
    for place in &seen {
        importer.front().unmap(&importer.enter_giving_up(), *place).expect("unmapped");
        free_range(&importer, *place);
    }
    assert_nothing_left(&importer);
    assert_nothing_left(&owner);
}

#[test]
fn one_cell_is_imported_twice_at_two_addresses() {
    let node = node();
    let (owner, importer) = (slabbed(&node), pool(&node));
    let (handle, range) = allocate(&owner, 1);
    write(&owner, DEVICE, range, pattern(1));
    let places = [(); 2].map(|()| {
        let imported = import(&owner, handle, &importer).expect("imported");
        place(&importer, imported, 1, OTHER)
    });
    assert_ne!(places[0], places[1]);
    for place in places {
        assert!(holds(&importer, OTHER, place, pattern(1)));
        free(&importer, place);
    }
    assert_eq!(objects(&importer), [0; 3]);
}

#[test]
fn a_process_imports_its_own_cell_and_one_that_only_a_ticket_holds() {
    let pool = slabbed(&node());
    let (handle, range) = allocate(&pool, 1);
    write(&pool, DEVICE, range, pattern(1));
    let export = pool.front().export(&pool.enter(), handle).expect("export");
    let again = pool.front().import_held(&pool.enter(), &export);
    assert_eq!(again.expect("held"), Some(handle));
    pool.front().release(&pool.enter_giving_up(), handle).expect("once more");
    let export = pool.front().export(&pool.enter(), handle).expect("export");
    free(&pool, range);
    assert_eq!(pool.report().slabs.slabs, 0);
    let back = pool.front().import_held(&pool.enter(), &export).expect("held");
    let place = place(&pool, back.expect("the ticket keeps it"), 1, DEVICE);
    assert!(holds(&pool, DEVICE, place, pattern(1)));
    free(&pool, place);
    assert_nothing_left(&pool);
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let node = node();
    let (owner, importer) = (slabbed(&node), pool(&node));
    let (handle, _) = allocate(&owner, 2);
    let export = owner.front().export(&owner.enter(), handle).expect("export");
    let part = export.part.expect("a part");
    let source = ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
    for (offset_bytes, size_bytes) in [(0, 0), (SLAB_BYTES, UNIT), (0, u64::MAX), (u64::MAX, 2)] {
        let fd = owner.redeem(export.id, 0, PeerId(1)).expect("a descriptor");
        let bad = vmm_pool::Part { offset_bytes, size_bytes };
        let refused =
            importer.front().import(&importer.enter(), source, fd.into(), nccl(), Some(bad));
        assert_eq!(refused.expect_err("refused").code(), Some(DriverCode::INVALID_VALUE));
    }
    assert_eq!(objects(&importer), [0; 3]);
    let fd = owner.redeem(export.id, 0, PeerId(1)).expect("a descriptor");
    importer
        .front()
        .import(&importer.enter(), source, fd.into(), nccl(), Some(part))
        .expect("imported");
    let overlapping = vmm_pool::Part { offset_bytes: part.offset_bytes + UNIT, size_bytes: UNIT };
    importer
        .front()
        .import_held(&importer.enter(), &Export { serial: 0, part: Some(overlapping), ..export })
        .expect_err("refused");
}

#[test]
fn without_room_for_a_slab_memory_stands_alone() {
    let pool = slabbed(&node());
    let hog = pool
        .create(CAPACITY_BYTES - SLAB_BYTES / 2, &AllocationProp::pinned_on(DEVICE), nccl())
        .expect("memory");
    let (_, range) = allocate(&pool, 1);
    assert_eq!(pool.report().slabs.slabs, 0);
    free(&pool, range);
    pool.release(hog).expect("released");
    assert_nothing_left(&pool);
}

#[test]
fn dead_cells_hold_no_more_than_they_may() {
    let pool = slabbed(&node());
    let mut kept = Vec::new();
    // One cell of each slab lives, and the rest end.
    for _ in 0..200 {
        let (_, first) = allocate(&pool, 1);
        kept.push(first);
        let rest: Vec<_> = (0..7).map(|_| allocate(&pool, 1).1).collect();
        for range in rest {
            free(&pool, range);
        }
        let totals = pool.report().slabs;
        assert!(
            totals.dead_bytes <= totals.live_bytes / 4 + (128 << 20) + SLAB_BYTES,
            "{totals:?}"
        );
        if free_bytes(&pool, DEVICE) < SLAB_BYTES {
            break;
        }
    }
    assert!(pool.report().devices[0].classes[0].own_count > pool.report().slabs.slabs);
    for range in kept {
        free(&pool, range);
    }
    assert_nothing_left(&pool);
}

#[test]
fn addresses_answer_for_the_cell_and_not_for_the_slab() {
    let pool = slabbed(&node());
    let (_, first) = allocate(&pool, 1);
    let (_, second) = allocate(&pool, 2);
    let inside = DeviceAddress(second.start.0 + 5);
    assert_eq!(pool.range_seen(inside), Some(second));
    let tail = DeviceAddress(second.end().0);
    assert_eq!(pool.who_answers(tail), Known::Nobody);
    assert_eq!(pool.range_seen(tail).map(|_| ()), None);
    pool.front().retain_at(&pool.enter_giving_up(), tail).expect_err("nothing is there");
    pause(&pool);
    let Known::Away(facts) = pool.who_answers(inside) else { panic!("it is away") };
    assert_eq!((facts.mapping, facts.reserved), (second, Some(second)));
    assert_eq!(facts.prop, AllocationProp::pinned_on(DEVICE));
    resume(&pool);
    assert!(matches!(pool.who_answers(inside), Known::Here(_)));
    let rights =
        |range: VaRange| pool.driver().core().access_of(range.start, Location::device(OTHER));
    pool.front()
        .set_access(&pool.enter(), second, &[AccessDesc::read_write(OTHER)])
        .expect("wider");
    assert_eq!((rights(first), rights(second)), (Ok(3), Ok(3)));
    let none = AccessDesc { flags: 0, ..AccessDesc::read_write(OTHER) };
    pool.front().set_access(&pool.enter(), second, &[none]).expect("narrower");
    let told = |range: VaRange| right_at(&pool, range.start, Location::device(OTHER));
    assert_eq!((told(first), told(second), told(VaRange::new(tail, 1))), (Some(0), Some(0), None));
    assert_eq!((rights(first), rights(second)), (Ok(3), Ok(3)), "the slab keeps its own");
    assert_eq!(reserved_range(&pool, inside), Some(second));
    let half = VaRange::new(second.start, UNIT);
    pool.front().unmap(&pool.enter_giving_up(), half).expect_err("half of it");
    pool.front().free_addresses(&pool.enter_giving_up(), second).expect_err("it is mapped");
    pool.front()
        .set_access(&pool.enter(), VaRange::new(tail, UNIT), &[none])
        .expect_err("nothing is there");
}

#[test]
fn any_driver_call_that_fails_leaves_memory_or_a_refusal_and_nothing_else() {
    let ops = [
        DriverOp::GetAllocationGranularity,
        DriverOp::Create,
        DriverOp::AddressReserve,
        DriverOp::Map,
        DriverOp::SetAccess,
        DriverOp::Unmap,
        DriverOp::Release,
        DriverOp::AddressFree,
        DriverOp::Export,
        DriverOp::Import,
        DriverOp::GetProperties,
    ];
    for op in ops {
        for skip in 0..4 {
            let node = node();
            let (owner, importer) = (slabbed(&node), pool(&node));
            for pool in [&owner, &importer] {
                pool.driver().faults().fail(op, FaultSpan::Nth(skip + 1), DriverCode::UNKNOWN);
            }
            try_all(&owner, &importer);
            for pool in [&owner, &importer] {
                pool.driver().faults().clear();
                // The calls that were refused are made again.
                let (_, range) = allocate(pool, 1);
                free(pool, range);
                pause(pool);
                resume(pool);
                assert_eq!(objects(pool), [0; 3], "{op:?} after {skip}");
            }
            assert_eq!(free_bytes(&owner, DEVICE), CAPACITY_BYTES, "{op:?} after {skip}");
        }
    }
}

/// Makes two cells, one of which another process imports. Gives up all that was made.
fn try_all(owner: &SimPool, importer: &SimPool) {
    for _ in 0..2 {
        let Ok(handle) = create(owner, 1) else { continue };
        let Some(range) = try_place(owner, handle) else { continue };
        if let Ok(export) = owner.front().export(&owner.enter(), handle) {
            let source =
                ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
            if let Ok(fd) = owner.redeem(export.id, export.serial, PeerId(1)) {
                let entered = importer.enter();
                let imported =
                    entered.pool().front().import(&entered, source, fd.into(), nccl(), export.part);
                drop(entered);
                if let Ok(imported) = imported
                    && let Some(place) = try_place(importer, imported)
                {
                    give_up(importer, imported, place);
                }
            } else {
                owner.enter().take_ticket_back(&export);
            }
        }
        give_up(owner, handle, range);
    }
}

fn try_place(pool: &SimPool, handle: VirtualHandle) -> Option<VaRange> {
    let taken = pool.front().take_addresses(&pool.enter(), UNIT, 0, "nccl");
    let reserved = taken.map_or_else(|| reserve(pool, UNIT), |start| VaRange::new(start, UNIT));
    let range = reserved;
    let entered = pool.enter();
    let mapped = entered.pool().front().map(&entered, range, 0, handle);
    let allowed =
        entered.pool().front().set_access(&entered, range, &[AccessDesc::read_write(DEVICE)]);
    drop(entered);
    if mapped.is_ok() && allowed.is_ok() {
        return Some(range);
    }
    give_up(pool, handle, range);
    None
}

/// Gives memory up: each call is made until it succeeds.
fn give_up(pool: &SimPool, handle: VirtualHandle, range: VaRange) {
    let entered = pool.enter_giving_up();
    if entered.pool().front().unmap(&entered, range).is_err() {
        let _nothing_there = entered.pool().front().unmap(&entered, range);
    }
    let _refused = entered.pool().front().release(&entered, handle);
    let is_freed = entered.pool().front().free_addresses(&entered, range).is_ok()
        || pool.driver().free_addresses(range).is_ok();
    assert!(is_freed, "addresses are not the driver's: {range:?}");
}
