//! Memory that another tenant's process has open: for how long it counts, and what a pool does meanwhile.

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};

use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{AccessDesc, DriverCode, DriverOp};
use vmm_pool::{
    Borrowed, Export, ImportSource, Lease, LentTotals, PeerId, PoolError, Selection, TicketWatch,
    VirtualHandle, Whose,
};

use crate::stage::{
    DEVICE, OWNER, SimPool, UNIT, WHOLE, class, create, is_frozen, kept, map, node, pause, pool,
    resume,
};

const BORROWER: PeerId = PeerId(5);

fn is_closed(watch: BorrowedFd<'_>) -> bool {
    File::from(watch.try_clone_to_owned().expect("a duplicate")).try_lock().is_ok()
}

/// A lease, and its lender's end.
fn lease() -> (OwnedFd, Lease) {
    let held = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    let watch = File::open(held.path()).expect("a second opening");
    let held = held.into_file();
    held.try_lock_shared().expect("a lock");
    let watch = TicketWatch { fd: OwnedFd::from(watch).into(), is_closed };
    (held.into(), Lease { borrower: BORROWER, watch })
}

/// `export` as a borrower gets it.
fn lent(lender: &SimPool, export: &Export) -> Borrowed {
    let (held, lease) = lease();
    let fd = lender.lend(export.id, export.serial, lease).expect("lent");
    Borrowed { fd, lease: Some(held) }
}

fn borrow(lender: &SimPool, handle: VirtualHandle, borrower: &SimPool) -> VirtualHandle {
    let export = lender.export(handle).expect("export");
    let lent = lent(lender, &export);
    let source = ImportSource { id: export.id, size_bytes: export.size_bytes, owner: OWNER };
    borrower.enter().import(source, lent, kept()).expect("borrowed")
}

/// A borrower that was paused resumes, and borrows `export` again.
fn comes_back(lender: &SimPool, export: &Export, borrower: &SimPool) {
    borrower.create_own(&WHOLE).expect("nothing");
    borrower.restore_own(0).expect("nothing");
    let again = lent(lender, &Export { serial: 0, ..*export });
    borrower.returning_import([(export.id, again)].into()).expect("imported");
    borrower.map_imports().expect("mapped");
    drop(borrower.commit_resume());
}

fn lent_of(lender: &SimPool) -> LentTotals {
    lender.holdings().lent(&WHOLE).get(&BORROWER).copied().unwrap_or_default()
}

#[test]
fn what_is_borrowed_counts_until_its_last_use_is_over() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 2, kept());
    let borrowed = borrow(&lender, owned, &borrower);
    let one = LentTotals { handles: 0, tickets: 1, bytes: 2 * UNIT };
    assert_eq!(lent_of(&lender), one);
    let range = map(&borrower, borrowed, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    borrower.release(borrowed).expect("released");
    assert_eq!(lent_of(&lender), one, "a mapping is a use");
    borrower.unmap(range).expect("unmapped");
    assert_eq!(lent_of(&lender), LentTotals::default());
}

#[test]
fn what_its_borrower_gives_up_in_a_pause_is_lent_anew() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 1, kept());
    let export = lender.export(owned).expect("export");
    let borrowed = borrow(&lender, owned, &borrower);
    map(&borrower, borrowed, UNIT, &[AccessDesc::read_write(DEVICE)]);
    pause(&borrower);
    assert_eq!(lent_of(&lender), LentTotals::default());
    // Its lender moves meanwhile: nobody waits for the borrower.
    pause(&lender);
    resume(&lender);
    comes_back(&lender, &export, &borrower);
    assert_eq!(lent_of(&lender), LentTotals { handles: 1, tickets: 0, bytes: UNIT });
}

#[test]
fn two_handles_of_what_is_borrowed_are_lent_until_both_are_gone_through_a_pause_too() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 1, kept());
    let export = lender.export(owned).expect("export");
    // As by two threads that open the same ticket.
    let borrowed = [(); 2].map(|()| borrow(&lender, owned, &borrower));
    let ranges = borrowed.map(|it| map(&borrower, it, UNIT, &[AccessDesc::read_write(DEVICE)]));
    pause(&borrower);
    assert_eq!(lent_of(&lender), LentTotals::default());
    comes_back(&lender, &export, &borrower);
    for (left, (handle, range)) in [1, 0].into_iter().zip(borrowed.into_iter().zip(ranges)) {
        assert_eq!(lent_of(&lender).bytes, UNIT, "{left} is left after this one");
        borrower.release(handle).expect("released");
        borrower.unmap(range).expect("unmapped");
    }
    assert_eq!(lent_of(&lender), LentTotals::default());
}

#[test]
fn nothing_is_lent_by_a_frozen_pool_and_what_is_lent_is_among_its_references() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 1, kept());
    let borrowed = borrow(&lender, owned, &borrower);
    lender.holdings().freeze();
    assert!(is_frozen(&lender));
    let id = lender.holdings().references(&WHOLE).lent;
    assert_eq!(id.keys().copied().collect::<Vec<_>>(), [BORROWER]);
    let export = Export {
        id: vmm_pool::AllocationId([1; 16]),
        size_bytes: UNIT,
        serial: 0,
        owner: None,
        part: None,
    };
    let refused = lender.lend(export.id, 0, lease().1);
    assert!(matches!(refused, Err(PoolError::Frozen)), "{refused:?}");
    lender.holdings().thaw();
    borrower.release(borrowed).expect("released");
    assert!(lender.holdings().references(&WHOLE).lent.is_empty());
}

#[test]
fn only_memory_of_the_selection_counts() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let tagged = class(vmm_pool::Contents::Discard);
    let owned = create(&lender, DEVICE, 1, tagged.clone());
    let _borrowed = borrow(&lender, owned, &borrower);
    let of = |tag: &str| {
        let tags = vmm_pool::Tags::Named([tag.to_owned()].into());
        lender.holdings().lent(&Selection::Tagged(tags, Whose::Everybody)).len()
    };
    assert_eq!((of(&tagged.tag), of("another")), (1, 0));
}

#[test]
fn an_import_that_the_driver_refuses_leaves_nothing_lent() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 1, kept());
    let export = lender.export(owned).expect("export");
    for op in [DriverOp::Import, DriverOp::GetProperties] {
        let lent = lent(&lender, &export);
        assert_eq!(lent_of(&lender).bytes, UNIT);
        borrower.driver().faults().fail(op, FaultSpan::Nth(1), DriverCode::UNKNOWN);
        let source = ImportSource { id: export.id, size_bytes: UNIT, owner: OWNER };
        borrower.enter().import(source, lent, kept()).expect_err("refused");
        borrower.driver().faults().clear();
        assert_eq!(lent_of(&lender), LentTotals::default(), "{op:?}");
    }
}

#[test]
fn borrowed_memory_that_the_driver_does_not_take_back_counts_until_it_does() {
    let node = node();
    let (lender, borrower) = (pool(&node), pool(&node));
    let owned = create(&lender, DEVICE, 1, kept());
    let borrowed = borrow(&lender, owned, &borrower);
    borrower.driver().faults().fail(DriverOp::Release, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    borrower.release(borrowed).expect_err("refused");
    borrower.driver().faults().clear();
    assert_eq!(lent_of(&lender).bytes, UNIT);
    pause(&borrower);
    assert_eq!(lent_of(&lender), LentTotals::default());
}

#[test]
fn what_is_opened_twice_at_once_by_one_process_counts_once() {
    let node = node();
    let lender = pool(&node);
    let owned = create(&lender, DEVICE, 1, kept());
    let export = lender.export(owned).expect("export");
    let (first, second) = (lent(&lender, &export), lent(&lender, &export));
    assert_eq!(lent_of(&lender), LentTotals { handles: 0, tickets: 1, bytes: UNIT });
    drop(first);
    assert_eq!(lent_of(&lender).bytes, UNIT);
    drop(second);
    assert_eq!(lent_of(&lender), LentTotals::default());
}
