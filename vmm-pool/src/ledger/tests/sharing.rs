//! Tests of the holds that other processes have on memory: tickets, descriptors and importers.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};

use super::*;
use crate::ledger::tickets::WATCHES_MAX;

const OTHER_PEER: PeerId = PeerId(6);

fn descriptor() -> (OwnedFd, RawFd) {
    let fd = OwnedFd::from(File::open("/dev/null").unwrap());
    let number = fd.as_raw_fd();
    (fd, number)
}

fn numbers(descriptors: &[OwnedFd]) -> Vec<RawFd> {
    descriptors.iter().map(OwnedFd::as_raw_fd).collect()
}

/// Memory that [`PEER`] has imported, its application's reference, and no mapping.
fn shared(ledger: &mut Ledger, number: u8) -> VirtualHandle {
    let handle = insert(ledger, number);
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    let (fd, row) = ledger.redeemed(id(number), serial, by_peer).unwrap();
    assert!(fd.is_none() && row.is_none());
    handle
}

#[test]
fn a_descriptor_is_kept_or_comes_out() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    let ((first, _), (second, kept), (third, refused)) = (descriptor(), descriptor(), descriptor());
    assert!(ledger.rows.keep_export(id(1), first).is_none());
    let replaced = ledger.rows.keep_export(id(1), second).expect("another thread's");
    assert_ne!(replaced.as_raw_fd(), kept);
    let nobodys = ledger.rows.keep_export(id(9), third).expect("there is no such memory");
    assert_eq!(nobodys.as_raw_fd(), refused);
    // It is released with the last ticket.
    let (other, other_raw) = ledger.begin_export(handle).unwrap();
    assert!(other_raw.is_none(), "one is kept already");
    assert!(ledger.redeemed(id(1), serial, by_peer).unwrap().0.is_none());
    let (last, row) = ledger.redeemed(id(1), other.serial, by_peer).unwrap();
    assert_eq!(last.map(|fd| fd.as_raw_fd()), Some(kept));
    assert!(row.is_none(), "its application holds it");
}

#[test]
fn a_pause_that_has_begun_meanwhile_knows_of_no_further_importer() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    ledger.freeze();
    assert!(matches!(ledger.redeemed(id(1), serial, by_peer), Err(PoolError::Frozen)));
    assert!(ledger.rows.get(handle).unwrap().sharing().importers().is_empty());
    assert!(
        ledger.rows.get(handle).unwrap().sharing().tickets.await_somebody(),
        "it is good still"
    );
    ledger.run_on();
    ledger.redeemed(id(1), serial, by_peer).unwrap();
    assert_eq!(ledger.rows.get(handle).unwrap().sharing().importers(), [PEER]);
}

#[test]
fn who_fetches_again_is_an_importer_and_nobody_else_is() {
    let mut ledger = Ledger::default();
    let [fetched, forgotten] = [1, 2].map(|number| shared(&mut ledger, number));
    ledger.rows.fetched(id(1), OTHER_PEER);
    let wanted = ledger.rows.begin_fetching(&whole(&ledger));
    assert_eq!(wanted.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [id(1), id(2)]);
    ledger.rows.fetched(id(1), OTHER_PEER);
    assert!(ledger.end_fetching(&whole(&ledger)).is_empty(), "its application holds both");
    assert_eq!(ledger.rows.get(fetched).unwrap().sharing().importers(), [OTHER_PEER]);
    assert!(ledger.rows.get(forgotten).unwrap().sharing().importers().is_empty());
    // From then on nobody is forgotten.
    ledger.rows.fetched(id(1), PEER);
    assert!(ledger.end_fetching(&whole(&ledger)).is_empty());
    assert_eq!(ledger.rows.get(fetched).unwrap().sharing().importers(), [PEER, OTHER_PEER]);
}

#[test]
fn what_has_a_descriptor_or_stays_or_is_nobody_elses_is_not_exported_again() {
    let mut ledger = Ledger::default();
    let [_, stays] = [1, 2].map(|number| shared(&mut ledger, number));
    insert(&mut ledger, 3);
    insert_of(&mut ledger, 4, Origin::Imported { owner: PEER });
    let (fd, _) = descriptor();
    assert!(ledger.rows.keep_export(id(1), fd).is_none());
    ledger.rows.set_stays(&[(id(2), StayReason::Pinned)]).unwrap();
    let wanted = ledger.rows.begin_fetching(&whole(&ledger));
    assert_eq!(wanted.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [id(2)]);
    // Nobody fetches memory that stays, and a process that has it keeps it.
    assert!(ledger.end_fetching(&whole(&ledger)).is_empty());
    assert_eq!(ledger.rows.get(stays).unwrap().sharing().importers(), [PEER]);
    assert_eq!(ledger.rows.get(stays).unwrap().reason_to_stay(), None, "the pause is over");
    // A selection without this memory does not look at it.
    let none = ledger.rows.choose(&Selection::Tagged(Tags::All, Whose::Everybody));
    assert!(ledger.rows.begin_fetching(&none).is_empty());
}

#[test]
fn a_resume_that_is_called_off_keeps_the_importers_of_before() {
    let mut ledger = Ledger::default();
    let [called_off, goes_on] = [1, 2].map(|number| shared(&mut ledger, number));
    ledger.rows.begin_fetching(&whole(&ledger));
    let kept = [1, 2].map(|number| {
        let (fd, kept) = descriptor();
        assert!(ledger.rows.keep_export(id(number), fd).is_none());
        kept
    });
    let out = ledger.rows.call_off_fetching(&whole(&ledger), |row| row.handle() == called_off);
    assert_eq!(numbers(&out), [kept[0]], "no descriptor is kept for those who would fetch it");
    assert!(ledger.end_fetching(&whole(&ledger)).is_empty());
    assert_eq!(ledger.rows.get(called_off).unwrap().sharing().importers(), [PEER]);
    assert!(
        ledger.rows.get(goes_on).unwrap().sharing().importers().is_empty(),
        "nobody has fetched it"
    );
    assert_eq!(numbers(&ledger.rows.take_spare_exports()), [kept[1]]);
}

#[test]
fn what_its_application_freed_while_it_was_away_goes_when_its_importers_have_it() {
    let mut ledger = Ledger::default();
    let handle = shared(&mut ledger, 1);
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), |_| true)), [1]);
    assert!(ledger.drop_reference(handle).unwrap().is_none(), "an importer may want it");
    assert!(ledger.rows.returned(handle, physical(2)).is_none());
    ledger.rows.begin_fetching(&whole(&ledger));
    ledger.rows.fetched(id(1), PEER);
    // In the order of a resume's end.
    ledger.rows.arrived(&whole(&ledger));
    ledger.run_on();
    let gone = ledger.end_fetching(&whole(&ledger));
    assert_eq!(
        gone.into_iter()
            .filter_map(|mut row| row.take_physical())
            .map(|handle| handle.raw().0)
            .collect::<Vec<_>>(),
        [2]
    );
    assert!(ledger.rows.by_id(id(1)).is_none());
}

#[test]
fn a_descriptor_that_a_ticket_needs_is_not_spare() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    let (fd, number) = descriptor();
    assert!(ledger.rows.keep_export(id(1), fd).is_none());
    assert!(ledger.rows.take_spare_exports().is_empty());
    assert!(ledger.export_failed(id(1), serial).is_none(), "its application holds it");
    assert_eq!(numbers(&ledger.rows.take_spare_exports()), [number]);
}

thread_local! {
    /// The number of checks whether a ticket is closed.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

fn open_ticket(null: &File) -> TicketWatch {
    TicketWatch {
        fd: OwnedFd::from(null.try_clone().unwrap()).into(),
        is_closed: |_| {
            ASKED.set(ASKED.get() + 1);
            false
        },
    }
}

/// Memory with identities of their own.
fn insert_many(ledger: &mut Ledger, count: u64) -> Vec<AllocationId> {
    let one = |number: u64| {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        let (id, prop) = (AllocationId(bytes), AllocationProp::pinned_on(GPU));
        let (class, origin) = (Class::default(), Origin::Own);
        let new = NewRow { id, size_bytes: SIZE_BYTES, prop, origin, class };
        ledger.rows.insert(new, physical(number));
        id
    };
    (0..count).map(one).collect()
}

fn issue(ledger: &mut Ledger, id: AllocationId, null: &File) {
    let handle = ledger.rows.by_id(id).unwrap().handle();
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    drop(ledger.watch_ticket(id, serial, open_ticket(null)));
}

#[test]
fn a_ticket_beyond_those_that_are_watched_asks_little_of_the_others() {
    let null = File::open("/dev/null").unwrap();
    let mut ledger = Ledger::default();
    let ids = insert_many(&mut ledger, 2000);
    for id in &ids {
        issue(&mut ledger, *id, &null);
    }
    assert_eq!(ledger.watches.count, WATCHES_MAX);
    let asked = ASKED.get();
    assert!(asked > 0 && asked < 6 * ids.len() as u64, "{asked}");
}

#[test]
fn a_ticket_among_much_memory_takes_no_longer_than_among_little() {
    let null = File::open("/dev/null").unwrap();
    assert_not_quadratic(|count| {
        let mut ledger = Ledger::default();
        let ids = insert_many(&mut ledger, count as u64);
        let null = &null;
        move || {
            for id in &ids {
                issue(&mut ledger, *id, null);
            }
        }
    });
}

fn by_peer(sharing: &mut Sharing) {
    sharing.add_importer(PEER);
}
