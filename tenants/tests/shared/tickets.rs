//! Tickets hold memory as the driver's descriptors do: for as long as they are open anywhere, redeemed or not.

use std::os::fd::OwnedFd;

use tenants::ticket::Ticket;
use vmm_pool::{Class, VirtualHandle};

use crate::stage::{
    Process, Stage, UNIT, assert_used, create, free, holds, map, redeem, tenant, written,
};

/// How many tickets a process watches.
const WATCHED_MAX: usize = 256;

fn exported(owner: &Process) -> (VirtualHandle, OwnedFd) {
    let handle = create(owner, 1, Class::default());
    (handle, owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket"))
}

#[test]
fn tickets_that_are_closed_and_never_redeemed_hold_no_memory() {
    let stage = Stage::new();
    let owner = stage.join();
    // Closed before its memory is freed, which then goes immediately.
    let (handle, ticket) = exported(&owner);
    drop(ticket);
    owner.pool().enter_giving_up().release(handle).expect("released");
    let info = owner.pool().driver().memory_of(crate::stage::DEVICE).expect("memory");
    assert_eq!(info.free_bytes, info.total_bytes);
    // And after it, more than are watched together, all in all.
    for _ in 0..2 * WATCHED_MAX {
        let (handle, ticket) = exported(&owner);
        owner.pool().enter_giving_up().release(handle).expect("released");
        drop(ticket);
    }
    assert_used(&owner, 0, "all tickets are closed");
}

#[test]
fn a_pause_saves_nothing_for_tickets_that_are_closed() {
    let stage = Stage::new();
    let owner = stage.join();
    let (handle, ticket) = exported(&owner);
    owner.pool().enter_giving_up().release(handle).expect("released");
    drop(ticket);
    stage.pause();
    assert!(owner.pool().report().devices.is_empty(), "{:?}", owner.pool().report());
    stage.resume();
}

#[test]
fn one_ticket_serves_two_importers_after_its_owner_let_go() {
    let stage = Stage::new();
    let [owner, first, second] = [(); 3].map(|()| stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let ticket = owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket");
    let one = redeem(&first, &ticket).expect("imported");
    free(&owner, handle, at_owner);
    let two = redeem(&second, &ticket).expect("the ticket is open");
    let place = map(&second, two, 2);
    assert_eq!(holds(&second, place, 7), Ok(true));
    stage.pause();
    stage.resume();
    assert_eq!(holds(&second, place, 7), Ok(true));
    first.pool().enter_giving_up().release(one).expect("released");
    free(&second, two, place);
    assert_used(&owner, 2 * UNIT, "the ticket is open");
    drop(ticket);
    assert_used(&owner, 0, "nothing holds it");
}

/// A ticket that lasts until it is redeemed: nobody watches whether it is open.
fn unwatched(owner: &Process, handle: VirtualHandle) -> Ticket {
    let export = owner.pool().enter().export(handle).expect("exported");
    Ticket {
        allocation: export.id,
        serial: export.serial,
        size_bytes: export.size_bytes,
        owner: owner.presence().id(),
        tenant: tenant(),
        part: None,
    }
}

fn redeem_words(importer: &Process, ticket: &Ticket) -> VirtualHandle {
    importer.sharing().redeem_ticket(&importer.pool().enter(), ticket, "test").expect("imported")
}

#[test]
fn a_second_ticket_redeemed_while_the_run_directory_is_gone_holds_no_memory_afterwards() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let [first, second] = [(); 2].map(|()| unwatched(&owner, handle));
    let first = redeem_words(&importer, &first);
    std::fs::remove_dir_all(stage.place.run_dir().path()).expect("removed");
    // The connection to the owner stands, and the owner does not find the importer.
    let second = redeem_words(&importer, &second);
    free(&owner, handle, at_owner);
    for imported in [first, second] {
        importer.pool().enter_giving_up().release(imported).expect("released");
    }
    assert_used(&owner, 0, "no ticket holds it any more");
}

#[test]
fn a_ticket_redeemed_while_the_run_directory_is_gone_waits_for_its_owners_name() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, _) = written(&owner, 2, "", 7);
    let ticket = unwatched(&owner, handle);
    std::fs::remove_dir_all(stage.place.run_dir().path()).expect("removed");
    let imported = redeem_words(&importer, &ticket);
    let at_importer = map(&importer, imported, 2);
    assert_eq!(holds(&importer, at_importer, 7), Ok(true));
}
