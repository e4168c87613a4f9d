//! Imports whose owner has ended.

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{LostImports, PoolError};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, create, free_addresses,
    free_bytes, holds, kept, map, node, pattern, pool, reserve, resume, share, write,
};

/// An importer whose owner has ended, its handle, and where it maps it.
fn orphaned() -> (SimPool, u64, VaRange) {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let access = AccessDesc::read_write(DEVICE);
    let shared = create(&owner, DEVICE, 1, kept());
    let place = map(&owner, shared, UNIT, &[access]);
    write(&owner, DEVICE, place, pattern(5));
    let imported = share(&owner, shared, &importer, 1);
    let there = map(&importer, imported, UNIT, &[AccessDesc::read_write(OTHER)]);
    owner.unmap(place).expect("unmap");
    owner.release(shared).expect("release");
    assert_eq!(importer.import_owners(), [b"owner"]);
    let lost = importer.orphan_imports(b"owner");
    assert_eq!(lost, LostImports { count: 1, bytes: UNIT });
    (importer, imported, there)
}

#[test]
fn an_orphan_is_kept_until_the_release() {
    let (importer, _, there) = orphaned();
    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("dropping");
    assert!(holds(&importer, OTHER, there, pattern(5)), "nobody could hand it out again");
    importer.remount_own(&WHOLE).expect("nothing of its own");
    importer.import_again(&WHOLE, std::collections::HashMap::new()).expect("nothing is missing");
    assert!(holds(&importer, OTHER, there, pattern(5)));

    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("dropping");
    importer.release_own(&WHOLE).expect("release");
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES, "memory of the dead stays");
}

#[test]
fn an_orphan_that_the_driver_will_not_unmap_is_counted_and_goes_with_the_next_pause() {
    let (importer, _, there) = orphaned();
    let counted = || {
        let rows = importer.report().devices.into_iter().flat_map(|device| device.pinned);
        rows.map(|row| row.bytes).sum::<u64>()
    };
    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("nothing to save");
    importer.driver().faults().fail(DriverOp::Unmap, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    importer.release_own(&WHOLE).expect("the others are gone all the same");
    assert_eq!(counted(), UNIT);
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES - UNIT);
    resume(&importer);
    assert!(holds(&importer, OTHER, there, pattern(5)), "it was never unmapped");

    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("nothing to save");
    importer.release_own(&WHOLE).expect("release");
    assert_eq!((counted(), free_bytes(&importer, DEVICE)), (0, CAPACITY_BYTES));
}

#[test]
fn an_orphan_is_asked_for_until_it_is_given_up() {
    let (importer, imported, there) = orphaned();
    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("dropping");
    importer.release_own(&WHOLE).expect("release");
    assert_eq!(importer.import_requests(&WHOLE).len(), 1);
    let refused = importer.import_again(&WHOLE, std::collections::HashMap::new());
    assert!(matches!(refused, Err(PoolError::MissingImport { .. })));

    assert_eq!(importer.give_up_imports(b"owner").count, 1);
    assert!(importer.import_requests(&WHOLE).is_empty());
    importer.import_again(&WHOLE, std::collections::HashMap::new()).expect("nothing is missing");
    resume(&importer);
    // It takes part in pauses no more, and its user can give it up.
    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("nothing to save");
    importer.release_own(&WHOLE).expect("nothing to release");
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
    importer.set_access(both, &[AccessDesc::read_write(DEVICE)]).expect("access");
    importer.release(imported).expect("only the mapping is left");

    importer.orphan_imports(b"owner");
    importer.save_and_drop_imports(&WHOLE, UNLIMITED).expect("dropping");
    importer.release_own(&WHOLE).expect("release");
    importer.give_up_imports(b"owner");
    resume(&importer);
    importer.unmap(both).expect("what is there is unmapped, and what is not is forgotten");
    importer.release(own).expect("release");
    free_addresses(&importer, both);
    assert_eq!(free_bytes(&importer, DEVICE), CAPACITY_BYTES);
}
