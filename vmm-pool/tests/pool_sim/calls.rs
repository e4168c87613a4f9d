//! The application's calls: ranges, references and refusals.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::driver::sim::{FaultSpan, Hold, SimDriver, SimNode, SimOptions};

use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, Driver, DriverCode, DriverOp, Location, RawContext,
    VaRange,
};
use vmm_pool::{ImportSource, PeerId, PoolError, VirtualHandle, Waited};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, OWNER, SimPool, UNIT, WHOLE, create, free_addresses, free_bytes,
    holds, kept, map, node, pattern, pause, pool, reserve, resume, share, write,
};

#[test]
fn one_unmap_spans_many_mappings_and_gives_all_their_memory_back() {
    let pool = pool(&node());
    let whole = reserve(&pool, 8 * UNIT);
    for slot in [0, 2, 3, 7] {
        let handle = create(&pool, DEVICE, 1, kept());
        let place = VaRange::new(DeviceAddress(whole.start.0 + slot * UNIT), UNIT);
        pool.map(place, 0, handle).expect("mapping");
        pool.release(handle).expect("the mapping keeps it");
    }
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - 4 * UNIT);
    pool.unmap(whole).expect("four mappings and four holes");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    assert!(pool.report().devices.is_empty());
    free_addresses(&pool, whole);
}

#[test]
fn unmap_over_no_mapping_is_the_drivers_business_and_harms_nothing() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let range = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, range, pattern(1));
    let empty = reserve(&pool, 4 * UNIT);
    assert!(matches!(pool.unmap(empty), Err(PoolError::NotOurs)));
    assert!(holds(&pool, DEVICE, range, pattern(1)));
}

#[test]
fn unmap_that_cuts_a_mapping_is_refused_and_changes_nothing() {
    let pool = pool(&node());
    let whole = reserve(&pool, 4 * UNIT);
    let place =
        |slot, units| VaRange::new(DeviceAddress(whole.start.0 + slot * UNIT), units * UNIT);
    let (small, large) = (create(&pool, DEVICE, 1, kept()), create(&pool, DEVICE, 2, kept()));
    pool.map(place(0, 1), 0, small).expect("mapping");
    pool.map(place(1, 2), 0, large).expect("mapping");
    assert!(pool.unmap(place(0, 2)).is_err());
    pool.unmap(place(0, 3)).expect("both are still there");
}

#[test]
fn unmap_while_offloaded_spans_many_mappings_without_the_driver() {
    let pool = pool(&node());
    let whole = reserve(&pool, 3 * UNIT);
    for slot in [0, 2] {
        let handle = create(&pool, DEVICE, 1, kept());
        let place = VaRange::new(DeviceAddress(whole.start.0 + slot * UNIT), UNIT);
        pool.map(place, 0, handle).expect("mapping");
        pool.release(handle).expect("release");
    }
    pause(&pool);
    assert!(pool.address_free_is_refused(whole));
    let calls = pool.driver().faults().calls(DriverOp::Unmap);
    pool.unmap(whole).expect("from the table");
    assert_eq!(pool.driver().faults().calls(DriverOp::Unmap), calls);
    assert!(!pool.address_free_is_refused(whole));
    free_addresses(&pool, whole);
    resume(&pool);
    assert!(pool.report().devices.is_empty());
}

#[test]
fn a_released_handle_is_stale_and_a_strangers_is_not_ours() {
    let pool = pool(&node());
    let first = create(&pool, DEVICE, 1, kept());
    pool.release(first).expect("release");
    let second = create(&pool, DEVICE, 1, kept());
    assert_ne!(first, second, "the slot is used again under another value");
    for outcome in [pool.release(first), pool.map(reserve(&pool, UNIT), 0, first)] {
        assert!(matches!(outcome, Err(PoolError::StaleHandle { .. })));
    }
    assert_eq!(VirtualHandle::from_raw(0x7fff_1234_5678), None);
    pool.release(second).expect("unharmed");
}

#[test]
fn one_release_too_many_is_refused_while_a_mapping_keeps_the_memory() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let range = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    pool.release(handle).expect("the only reference");
    assert!(matches!(pool.release(handle), Err(PoolError::StaleHandle { .. })));
    assert_eq!(pool.retain_at(range.start).expect("retain"), handle);
    pool.release(handle).expect("that reference");
    pool.unmap(range).expect("the last use");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

#[test]
fn access_set_across_many_mappings_survives_a_pause() {
    let pool = pool(&node());
    let whole = reserve(&pool, 4 * UNIT);
    for slot in [0, 2] {
        let handle = create(&pool, DEVICE, 2, kept());
        let place = VaRange::new(DeviceAddress(whole.start.0 + slot * UNIT), 2 * UNIT);
        pool.map(place, 0, handle).expect("mapping");
        pool.release(handle).expect("release");
    }
    pool.set_access(whole, &[AccessDesc::read_write(DEVICE)]).expect("both in one call");
    pool.set_access(whole, &[AccessDesc::read_write(OTHER)]).expect("both in one call");
    write(&pool, OTHER, whole, pattern(5));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, OTHER, whole, pattern(5)));
    assert!(holds(&pool, DEVICE, whole, pattern(5)));
}

#[test]
fn a_failed_block_leaves_nothing_behind_whichever_call_failed() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let ops = [
        DriverOp::GetAllocationGranularity,
        DriverOp::Create,
        DriverOp::AddressReserve,
        DriverOp::Map,
        DriverOp::SetAccess,
    ];
    for op in ops {
        pool.driver().faults().fail(op, FaultSpan::Nth(1), DriverCode::UNKNOWN);
        let failed = pool.block_allocate(100, &prop, &[DEVICE], kept());
        let PoolError::Driver { source, .. } = failed.expect_err("it was made to fail") else {
            panic!("{op}: another error");
        };
        assert_eq!((source.op, source.code), (op, DriverCode::UNKNOWN));
        pool.driver().faults().clear();
        assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES, "{op}");
        assert!(pool.report().devices.is_empty(), "{op}");
    }
    let block = pool.block_allocate(100, &prop, &[DEVICE], kept()).expect("a block");
    assert_eq!(pool.range_of(block), Some(VaRange::new(block, 100)));
    pool.block_free(block).expect("free");
    assert!(pool.driver().reservation_at(block).is_none());
}

#[test]
fn a_block_larger_than_any_device_is_out_of_memory() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    for size_bytes in [CAPACITY_BYTES + 1, u64::MAX] {
        let refused = pool.block_allocate(size_bytes, &prop, &[DEVICE], kept());
        assert_eq!(refused.expect_err("too large").code(), Some(DriverCode::OUT_OF_MEMORY));
    }
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

#[test]
fn a_ticket_keeps_released_memory_until_it_is_redeemed() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let export = pool.export(handle).expect("export");
    pool.release(handle).expect("release");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
    let fd = pool.redeem(export.id, export.serial, PeerId(7)).expect("a descriptor");
    assert!(pool.report().devices.is_empty(), "the descriptor has it now");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT);
    drop(fd);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    assert!(pool.redeem(export.id, export.serial, PeerId(7)).is_err());
}

#[test]
fn properties_are_those_given_and_survive_a_pause() {
    let pool = pool(&node());
    let mut prop = AllocationProp::pinned_on(OTHER);
    prop.flags.gpu_direct_rdma_capable = 1;
    let handle = pool.create(UNIT, &prop, kept()).expect("memory");
    pause(&pool);
    assert_eq!(pool.properties(handle).expect("properties"), prop);
    resume(&pool);
    let range = map(&pool, handle, UNIT, &[AccessDesc::read_write(OTHER)]);
    let raw = pool.driver().retain_at(range.start).expect("the driver's handle");
    let again = pool.driver().properties(raw).expect("properties");
    assert_eq!(again.location, Location::device(OTHER));
    assert_eq!(again.flags, prop.flags);
    pool.driver().release_memory(raw).expect("release");
}

/// A block of `owner`'s, opened twice by `importer` on the same device; both at the address returned.
fn open_twice(owner: &SimPool, importer: &SimPool) -> (DeviceAddress, DeviceAddress) {
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = owner.block_allocate(UNIT + 1, &prop, &[DEVICE], kept()).expect("a block");
    let handle = owner.retain_at(block).expect("it has one");
    let first = importer.block_open(share(owner, handle, importer, 7), 0, DEVICE).expect("open");
    owner.release(handle).expect("the mapping keeps it");
    let held = importer.import_held(owner.block_identity(block).expect("a block").0, 0);
    let again = importer.block_open(held.expect("held"), 0, DEVICE).expect("open");
    assert_eq!(first, again);
    (block, first)
}

#[test]
fn a_block_that_is_opened_twice_takes_two_closes() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let (block, opened) = open_twice(&owner, &importer);
    importer.block_close(opened).expect("one of two");
    let range = VaRange::new(opened, UNIT);
    write(&importer, DEVICE, range, pattern(5));
    assert!(holds(&owner, DEVICE, VaRange::new(block, UNIT), pattern(5)), "one memory");
    importer.block_close(opened).expect("the other");
    assert!(importer.report().devices.is_empty(), "nothing is left of it");
    assert!(matches!(importer.block_close(opened), Err(PoolError::NotOurs)));
}

#[test]
fn opened_blocks_are_closed_and_own_ones_freed_and_not_the_other_way_round() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let (block, opened) = open_twice(&owner, &importer);
    assert!(matches!(importer.block_free(opened), Err(PoolError::NotOurs)));
    assert!(matches!(owner.block_close(block), Err(PoolError::NotOurs)));
    assert_eq!(importer.block_identity(opened), None, "only its owner shares it");
    owner.block_free(block).expect("free");
}

#[test]
fn a_close_that_the_driver_refuses_can_be_tried_again() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let (_, opened) = open_twice(&owner, &importer);
    importer.block_close(opened).expect("one of two");
    importer.driver().faults().fail(DriverOp::Unmap, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    importer.block_close(opened).expect_err("the driver refused");
    importer.block_close(opened).expect("open still, and once");
    assert!(importer.report().devices.is_empty());
}

#[test]
fn a_block_is_shared_whole_by_any_address_of_what_was_asked_for() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = pool.block_allocate(UNIT + 9, &prop, &[DEVICE], kept()).expect("a block");
    let at = |offset| pool.block_identity(DeviceAddress(block.0 + offset));
    let whole = at(0).expect("its start");
    assert_eq!((whole.1, whole.2), (UNIT + 9, 2 * UNIT));
    assert_eq!(at(UNIT + 8), Some(whole));
    assert_eq!(at(UNIT + 9), None, "padding is nobody's");
    assert_eq!(at(2 * UNIT), None);
}

/// Memory with contents 5 and one reference, and a pool whose driver waits, before it does the next `op`, for the end of what comes out.
fn held(node: &SimNode, op: DriverOp) -> (SimPool, VirtualHandle, Hold) {
    let pool = pool(node);
    let handle = create(&pool, DEVICE, 1, kept());
    let place = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, place, pattern(5));
    pool.unmap(place).expect("the reference keeps it");
    let hold = pool.driver().faults().hold(op);
    (pool, handle, hold)
}

/// Lets the last reference go while another thread waits for the driver, and has other memory take its place.
fn release_meanwhile(pool: &SimPool, handle: VirtualHandle, hold: &Hold) -> VirtualHandle {
    assert!(hold.is_met(Duration::from_mins(1)));
    pool.release(handle).expect("released");
    create(pool, DEVICE, 1, kept())
}

#[test]
fn memory_released_by_another_thread_while_it_is_being_mapped_stays_with_its_mapping() {
    let (pool, handle, hold) = held(&node(), DriverOp::Map);
    let place = reserve(&pool, UNIT);
    std::thread::scope(|scope| {
        let mapping = scope.spawn(|| pool.map(place, 0, handle));
        let other = release_meanwhile(&pool, handle, &hold);
        drop(hold);
        mapping.join().expect("no panic").expect("mapped");
        pool.release(other).expect("its own");
    });
    assert_eq!(
        free_bytes(&pool, DEVICE),
        CAPACITY_BYTES - UNIT,
        "the mapping keeps it, and no more"
    );
    pool.set_access(place, &[AccessDesc::read_write(DEVICE)]).expect("access");
    assert!(holds(&pool, DEVICE, place, pattern(5)), "the memory that was meant");
    pool.unmap(place).expect("unmapped");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
    assert!(pool.report().devices.is_empty(), "{:?}", pool.report());
}

#[test]
fn memory_released_by_another_thread_while_it_is_being_exported_stays_with_its_ticket() {
    let node = node();
    let (owner, handle, hold) = held(&node, DriverOp::Export);
    let export = std::thread::scope(|scope| {
        let exporting = scope.spawn(|| owner.export(handle));
        let other = release_meanwhile(&owner, handle, &hold);
        drop(hold);
        let export = exporting.join().expect("no panic").expect("exported");
        owner.release(other).expect("its own");
        export
    });
    assert_eq!(
        free_bytes(&owner, DEVICE),
        CAPACITY_BYTES - UNIT,
        "the ticket keeps it, and no more"
    );
    let fd = owner.redeem(export.id, export.serial, PeerId(7)).expect("it is there");
    let importer = pool(&node);
    let source = ImportSource { id: export.id, size_bytes: UNIT, owner: OWNER };
    let imported = importer.import(source, fd.into(), kept()).expect("imported");
    let there = map(&importer, imported, UNIT, &[AccessDesc::read_write(DEVICE)]);
    assert!(holds(&importer, DEVICE, there, pattern(5)), "the memory that was meant");
}

#[test]
fn a_mapping_or_export_that_the_driver_refuses_leaves_no_record() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let place = reserve(&pool, UNIT);
    for op in [DriverOp::Map, DriverOp::Export] {
        pool.driver().faults().fail(op, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    }
    assert!(pool.map(place, 0, handle).is_err());
    assert_eq!(pool.range_of(place.start), None);
    assert!(pool.export(handle).is_err());
    assert!(!pool.holdings().is_shared(&WHOLE));
    pool.release(handle).expect("released");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES, "nothing else holds it");
}

#[test]
fn a_capture_lets_a_wait_end_that_was_left_behind_before_it_had_begun() {
    let (pool, _, hold) = held(&node(), DriverOp::ContextSetCurrent);
    assert!(pool.waits().let_end(Duration::ZERO), "nothing was asked");
    let faults = pool.driver().faults();
    let begun = faults.calls(DriverOp::PrimaryContextRetain);
    let mut draining = pool.keeper().close().expect("it runs");
    let seen = draining.look(|| 0).expect("asked");
    assert!(!seen.is_idle);
    // Its thread has not come to the driver's wait yet, and will.
    assert!(hold.is_met(Duration::from_mins(1)));
    assert!(faults.calls(DriverOp::PrimaryContextRetain) > begun);
    drop(draining.reopen());
    let calls = || faults.calls(DriverOp::ContextSynchronize);
    assert_eq!(calls(), 0);
    drop(hold);
    assert!(pool.waits().let_end(Duration::from_mins(1)));
    assert_eq!(calls(), 1);
    assert!(pool.waits().let_end(Duration::ZERO));
    assert_eq!(calls(), 1, "nobody wants to know any more");
}

#[test]
fn the_end_of_a_context_lets_a_wait_end_that_was_left_behind_in_it() {
    // There is no such context: that is what its thread will hear, in its time.
    let driver = SimDriver::new(node(), SimOptions::default());
    let pool = SimPool::with_contexts(Arc::new(driver), 1, || vec![RawContext(77)]);
    create(&pool, DEVICE, 1, kept());
    let hold = pool.driver().faults().hold(DriverOp::ContextSetCurrent);
    // The device's own context is waited for too.
    let holds = [hold, pool.driver().faults().hold(DriverOp::ContextSetCurrent)];
    let place = Waited::OwnContext(RawContext(77));
    assert!(pool.waits().let_place_end(place, Duration::ZERO), "nothing was asked");
    let mut draining = pool.keeper().close().expect("it runs");
    let seen = draining.look(|| 0).expect("asked");
    assert!(!seen.is_idle);
    assert!(holds.iter().all(|hold| hold.is_met(Duration::from_mins(1))));
    assert!(!pool.waits().let_place_end(place, Duration::ZERO));
    drop(draining.reopen());
    drop(holds);
    assert!(pool.waits().let_place_end(place, Duration::from_mins(1)));
    assert!(pool.waits().let_place_end(place, Duration::ZERO));
}
