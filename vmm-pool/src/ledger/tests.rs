mod sharing;

use proptest::prelude::*;

use super::*;
use crate::deferred::Physical;
use crate::driver::{AllocationProp, LocationKind};
use crate::ids::PeerId;
use crate::report::Contents;
use crate::scaling::assert_not_quadratic;
use crate::store::{Saved, Store};

const GPU: DeviceOrdinal = DeviceOrdinal(0);
const SIZE_BYTES: u64 = 2 << 20;
const PEER: PeerId = PeerId(5);

fn id(number: u8) -> AllocationId {
    AllocationId([number; 16])
}

/// Adds memory with the driver's handle `number`, and an identity of that number.
fn insert_of(ledger: &mut Ledger, number: u8, origin: Origin) -> VirtualHandle {
    let (prop, class) = (AllocationProp::pinned_on(GPU), Class::default());
    let new = NewRow { id: id(number), size_bytes: SIZE_BYTES, prop, origin, class };
    ledger.rows.insert(new, physical(u64::from(number)))
}

fn insert(ledger: &mut Ledger, number: u8) -> VirtualHandle {
    insert_of(ledger, number, Origin::Own)
}

fn physical(raw: u64) -> Physical {
    Physical::new(RawHandle(raw), SIZE_BYTES, Some(GPU))
}

fn raws(handles: &[Physical]) -> Vec<u64> {
    handles.iter().map(|handle| handle.raw().0).collect()
}

/// A range for a mapping of its own.
fn range(number: u64) -> VaRange {
    VaRange::new(DeviceAddress(number * SIZE_BYTES), SIZE_BYTES)
}

fn mapped(ledger: &mut Ledger, number: u64, handle: VirtualHandle) {
    ledger.begin_mapping(range(number), 0, handle).unwrap();
    assert!(ledger.mappings.made(range(number)));
}

/// Returns all rows that a pause of everything moves now.
fn whole(ledger: &Ledger) -> Rows {
    ledger.rows.choose(&Selection::Whole)
}

#[test]
fn a_handle_of_memory_that_is_gone_finds_nothing_in_its_place() {
    let mut ledger = Ledger::default();
    let gone = insert(&mut ledger, 1);
    assert!(ledger.drop_reference(gone).unwrap().is_some());
    let in_its_place = insert(&mut ledger, 2);
    assert_eq!(in_its_place.index(), gone.index(), "rows are used again");
    assert!(ledger.rows.get(gone).is_none());
    assert!(matches!(ledger.rows.find(gone), Err(PoolError::StaleHandle { .. })));
    assert!(ledger.rows.by_id(id(1)).is_none());
    // Nor does anything that changes a row.
    assert!(!ledger.rows.add_reference(gone));
    assert!(matches!(ledger.drop_reference(gone), Err(PoolError::StaleHandle { .. })));
    assert!(ledger.begin_mapping(range(1), 0, gone).is_err());
    assert!(ledger.begin_export(gone).is_err());
    assert!(ledger.become_block(gone, 1).is_none());
    let refused = ledger.rows.returned(gone, physical(9));
    assert_eq!(refused.map(|handle| handle.raw()), Some(RawHandle(9)));
    let saved = Saved::whole(Store::Host, 0, SIZE_BYTES);
    assert!(ledger.saved(gone, saved).is_empty());
    let row = ledger.rows.get(in_its_place).unwrap();
    assert_eq!((row.id(), row.saved(), row.block_size_bytes()), (id(2), None, None));
    assert!(ledger.drop_reference(in_its_place).unwrap().is_some(), "it has its one reference");
}

#[test]
fn only_what_is_nowhere_mapped_gives_its_handle_up() {
    let mut ledger = Ledger::default();
    let [unmapped, once, twice, unchosen] = [1, 2, 3, 4].map(|number| insert(&mut ledger, number));
    mapped(&mut ledger, 1, once);
    mapped(&mut ledger, 2, twice);
    mapped(&mut ledger, 3, twice);
    ledger.mappings.set_presence(range(3).start.0, Presence::Absent);
    let choose = |row: &Row| row.handle() != unchosen;
    assert_eq!(
        raws(&ledger.take_unmapped(&whole(&ledger), choose)),
        [1],
        "a part of the third is mapped"
    );
    assert!(!ledger.rows.get(unmapped).unwrap().is_resident());
    assert!(ledger.rows.get(unchosen).unwrap().is_resident());
    // A mapping whose rights are not set yet counts too.
    ledger.mappings.set_presence(range(1).start.0, Presence::Bare);
    ledger.mappings.set_presence(range(2).start.0, Presence::Absent);
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), choose)), [3]);
    ledger.mappings.set_presence(range(1).start.0, Presence::Absent);
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), choose)), [2]);
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), choose)), [0; 0], "each once");
}

#[test]
fn what_goes_after_the_choice_is_passed_over_with_what_comes_in_its_place() {
    let mut ledger = Ledger::default();
    let [first, by_ticket, last] = [1, 2, 3].map(|number| insert(&mut ledger, number));
    let serial = ledger.begin_export(by_ticket).unwrap().0.serial;
    assert!(ledger.drop_reference(by_ticket).unwrap().is_none(), "its ticket keeps it");
    let chosen = whole(&ledger);
    let handles = |ledger: &Ledger| ledger.rows.among(&chosen).map(Row::handle).collect::<Vec<_>>();
    assert_eq!(handles(&ledger), [first, by_ticket, last]);
    // Another thread closes its last ticket.
    assert!(ledger.export_failed(id(2), serial).is_some(), "nobody holds it");
    assert_eq!(handles(&ledger), [first, last]);
    let in_its_place = insert(&mut ledger, 4);
    assert_eq!(in_its_place.index(), by_ticket.index(), "rows are used again");
    assert_eq!(handles(&ledger), [first, last]);
    assert!(!chosen.has(ledger.rows.get(in_its_place).unwrap()));
    assert_eq!(raws(&ledger.take_unmapped(&chosen, |_| true)), [1, 3]);
    assert!(ledger.rows.get(in_its_place).unwrap().is_resident());
    // Rows that have left by the same choice are not chosen again, but its last step still moves them.
    ledger.run_on();
    assert!(whole(&ledger).handles().eq([in_its_place]));
    assert_eq!(handles(&ledger), [first, last]);
}

#[test]
fn marks_of_before_are_void_and_memory_that_is_mapped_twice_has_none() {
    let mut ledger = Ledger::default();
    let [once, twice] = [1, 2].map(|number| insert(&mut ledger, number));
    mapped(&mut ledger, 1, once);
    mapped(&mut ledger, 2, twice);
    mapped(&mut ledger, 3, twice);
    let import = insert_of(&mut ledger, 4, Origin::Imported { owner: PEER });
    mapped(&mut ledger, 4, import);
    let whole = vec![Range { start: 0, end: SIZE_BYTES }];
    let half = |number: u64| VaRange::new(range(number).start, SIZE_BYTES / 2);
    let copied = |ledger: &Ledger, handle| ledger.rows.get(handle).unwrap().copied_parts();
    ledger.mark_unused(&[half(1), half(2), half(4)]);
    assert_eq!(copied(&ledger, once), vec![Range { start: SIZE_BYTES / 2, end: SIZE_BYTES }]);
    for unmarked in [twice, import] {
        assert_eq!(copied(&ledger, unmarked), whole);
    }
    ledger.mark_unused(&[]);
    assert_eq!(copied(&ledger, once), whole);
}

fn mappings(ranges: impl Iterator<Item = Range<u64>>) -> Mappings {
    let owner = VirtualHandle::new(0, 1);
    let range =
        |range: &Range<u64>| VaRange::new(DeviceAddress(range.start), range.end - range.start);
    let mut all = Mappings::default();
    ranges.for_each(|at| all.insert(Mapping::new(range(&at), owner)));
    all
}

proptest! {
    #[test]
    fn overlapping_mappings_are_found_as_by_a_look_at_each(
        sizes in prop::collection::vec((0u64..4, 1u64..6), 0..12),
        (start, size_bytes) in (0u64..60, 1u64..20),
    ) {
        let mut end = 0;
        let apart = sizes.iter().map(|(gap, size)| {
            let range = end + gap..end + gap + size;
            end = range.end;
            range
        });
        let mappings = mappings(apart);
        let range = VaRange::new(DeviceAddress(start), size_bytes);
        let found: Vec<_> = mappings.overlapping(range).map(Mapping::range).collect();
        let all: Vec<_> = mappings.all().map(Mapping::range).collect();
        let each = all.into_iter().rev().filter(|mapping| {
            mapping.start < range.end() && range.start < mapping.end()
        });
        prop_assert_eq!(found, each.collect::<Vec<_>>());
    }
}

#[test]
fn a_mapping_among_many_is_found_as_fast_as_among_few() {
    assert_not_quadratic(|count| {
        let mappings = mappings((0..count as u64).map(|at| 4 * at..4 * at + 3));
        move || {
            for at in 0..count as u64 {
                let one = VaRange::new(DeviceAddress(4 * at), 4);
                assert_eq!(mappings.overlapping(one).count(), 1);
            }
        }
    });
}

#[test]
fn only_own_device_memory_and_imports_of_a_known_owner_leave() {
    let mut ledger = Ledger::default();
    let own = insert(&mut ledger, 1);
    let imported = insert_of(&mut ledger, 2, Origin::Imported { owner: PEER });
    let foreign = insert_of(&mut ledger, 3, Origin::Foreign);
    let mut prop = AllocationProp::pinned_on(GPU);
    prop.location.kind = LocationKind::HOST_NUMA;
    let (class, origin) = (Class::default(), Origin::Own);
    let host = NewRow { id: id(4), size_bytes: SIZE_BYTES, prop, origin, class };
    let host = ledger.rows.insert(host, physical(4));
    let row = |handle| ledger.rows.get(handle).unwrap();
    assert_eq!(
        [own, imported, foreign, host].map(|handle| row(handle).can_leave()),
        [true, true, false, false]
    );
    assert_eq!(
        [own, imported, foreign, host].map(|handle| row(handle).is_own()),
        [true, false, false, true]
    );
    assert_eq!(
        [own, imported, foreign, host].map(|handle| row(handle).owner()),
        [None, Some(PEER), None, None]
    );
    assert_eq!([own, host].map(|handle| row(handle).is_host()), [false, true]);
    assert_eq!([own, host].map(|handle| row(handle).is_saved_to(Store::Host)), [true, false]);
    assert_eq!([own, imported].map(|handle| row(handle).is_saved_to(Store::File)), [false, false]);
    assert!(!row(imported).is_saved_to(Store::Host), "its owner saves it");
    assert_eq!([own, host].map(|handle| row(handle).device()), [Some(GPU), None]);
    // Nobody leaves host memory in place.
    assert_eq!([own, imported].map(|handle| row(handle).is_shared()), [false, false]);
}

#[test]
fn parts_below_a_mebibyte_are_copied_with_the_rest() {
    const MIB: u64 = 1 << 20;
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 1, handle);
    let part = |from: u64, to: u64| VaRange::new(DeviceAddress(SIZE_BYTES + from), to - from);
    let copied = |ledger: &Ledger| ledger.rows.get(handle).unwrap().copied_parts();
    ledger.mark_unused(&[part(0, MIB - 1)]);
    assert_eq!(copied(&ledger), vec![Range { start: 0, end: SIZE_BYTES }]);
    ledger.mark_unused(&[part(4096, MIB + 4096)]);
    assert_eq!(copied(&ledger), [0..4096, MIB + 4096..SIZE_BYTES]);
    ledger.mark_unused(&[part(0, SIZE_BYTES)]);
    assert!(copied(&ledger).is_empty());
    assert!(!ledger.rows.get(handle).unwrap().is_saved_to(Store::Host), "there is nothing to save");
}

#[test]
fn what_is_lost_is_neither_held_again_nor_mapped_nor_asked_for() {
    let mut ledger = Ledger::default();
    let [kept, lost] = [1, 2].map(|number| {
        let handle = insert_of(&mut ledger, number, Origin::Imported { owner: PEER });
        mapped(&mut ledger, u64::from(number), handle);
        ledger.mappings.set_presence(range(u64::from(number)).start.0, Presence::Absent);
        handle
    });
    let choose = |theirs, owner| theirs == id(2) && owner == PEER;
    assert_eq!(ledger.rows.give_up(choose), LostImports::default(), "it is there");
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), |row| row.handle() == lost)), [2]);
    assert_eq!(ledger.rows.give_up(choose), LostImports { count: 1, bytes: SIZE_BYTES });
    assert_eq!(
        ledger.rows.give_up(|_, _| true),
        LostImports::default(),
        "a lost one is given up once"
    );
    assert_eq!(
        [kept, lost].map(|handle| ledger.rows.get(handle).unwrap().is_lost()),
        [false, true]
    );
    assert_eq!(ledger.rows.get(lost).unwrap().owner(), None);
    assert!(ledger.rows.hold_again(id(2), 0).is_none());
    assert_eq!(ledger.rows.hold_again(id(1), 0).map(|(handle, _)| handle), Some(kept));
    assert!(ledger.to_remount(range(2).start.0).is_err());
    let refused = ledger.begin_mapping(range(9), 0, lost).unwrap_err();
    assert_eq!(refused.code(), Some(DriverCode::NOT_READY));
}

#[test]
fn a_mapping_is_refused_as_the_driver_would_refuse_it() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 3, handle);
    let code = |ledger: &mut Ledger, at: VaRange, offset_bytes| {
        ledger.begin_mapping(at, offset_bytes, handle).unwrap_err().code()
    };
    let overlapping = VaRange::new(DeviceAddress(range(3).end().0 - 1), SIZE_BYTES);
    assert_eq!(code(&mut ledger, overlapping, 0), Some(DriverCode::INVALID_VALUE));
    assert_eq!(code(&mut ledger, range(5), 1), Some(DriverCode::NOT_SUPPORTED));
    // While its process runs without it.
    ledger.mappings.set_presence(range(3).start.0, Presence::Absent);
    assert_eq!(raws(&ledger.take_unmapped(&whole(&ledger), |_| true)), [1]);
    assert_eq!(code(&mut ledger, range(5), 0), Some(DriverCode::NOT_READY));
    ledger.run_on();
    let refused = ledger.begin_mapping(range(5), 0, handle);
    assert!(matches!(refused, Err(PoolError::Offloaded { .. })));
    assert!(matches!(ledger.begin_export(handle), Err(PoolError::Offloaded { .. })));
}

#[test]
fn a_row_is_what_it_was_made_as() {
    let mut ledger = Ledger::default();
    let prop = AllocationProp::pinned_on(GPU);
    let class = Class { library: "test", tag: "kv".to_owned(), contents: Contents::Discard };
    let new = NewRow {
        id: id(1),
        size_bytes: SIZE_BYTES,
        prop,
        origin: Origin::Own,
        class: class.clone(),
    };
    let handle = ledger.rows.insert(new, physical(1));
    let row = ledger.rows.get(handle).unwrap();
    assert_eq!((row.id(), row.size_bytes(), row.prop()), (id(1), SIZE_BYTES, &prop));
    assert_eq!((row.class(), row.origin(), row.device()), (&class, &Origin::Own, Some(GPU)));
    assert_eq!((row.raw(), row.handle()), (Some(RawHandle(1)), handle));
    assert!(
        row.is_resident() && !row.is_shared() && !row.is_pinned() && !row.sharing().is_exported()
    );
    assert_eq!(row.describe(), "test allocation of tag kv");
    mapped(&mut ledger, 1, handle);
    let row = ledger.rows.get(handle).unwrap();
    assert_eq!(row.describe(), "test allocation at 0x200000 of tag kv");
    assert!(!row.is_saved_to(Store::Host) && !row.is_saved_to(Store::File), "nobody saves it");
}

#[test]
fn what_is_pinned_stays_and_is_counted_once() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 1, handle);
    mapped(&mut ledger, 2, handle);
    let both = VaRange::new(range(1).start, 2 * SIZE_BYTES);
    assert_eq!(ledger.pin(range(5), "a card holds it"), 0);
    assert_eq!(ledger.pin(both, "a card holds it"), SIZE_BYTES);
    assert_eq!(ledger.pin(both, "another"), 0);
    let row = ledger.rows.get(handle).unwrap();
    assert!(row.is_pinned() && !row.can_leave());
    assert_eq!(row.reason_to_stay(), Some("a card holds it"));
}

#[test]
fn a_row_lives_as_long_as_something_holds_it() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 1, handle);
    assert!(ledger.drop_reference(handle).unwrap().is_none(), "a mapping");
    assert!(ledger.drop_reference(handle).is_err(), "there was one reference");
    assert!(ledger.rows.add_reference(handle));
    assert!(ledger.forget_mappings(&[range(1).start.0]).is_empty(), "a reference");
    let serial = ledger.begin_export(handle).unwrap().0.serial;
    assert!(ledger.drop_reference(handle).unwrap().is_none(), "a ticket");
    assert!(ledger.export_failed(id(1), serial).is_some());
    assert!(ledger.rows.get(handle).is_none() && ledger.rows.by_id(id(1)).is_none());
}

#[test]
fn what_is_opened_is_closed_as_often() {
    let mut ledger = Ledger::default();
    let handle = insert_of(&mut ledger, 1, Origin::Imported { owner: PEER });
    mapped(&mut ledger, 1, handle);
    let start = range(1).start.0;
    assert_eq!(ledger.mappings.change_opened(start, 1), None, "it is not open");
    ledger.become_opened(handle, start, 100);
    assert_eq!(ledger.rows.get(handle).unwrap().block_size_bytes(), Some(100));
    assert_eq!(
        [1, -1, -1].map(|by| ledger.mappings.change_opened(start, by)),
        [Some(2), Some(1), Some(0)]
    );
    assert_eq!(ledger.mappings.change_opened(start, -1), None);
    ledger.mappings.open_once(start);
    assert_eq!(ledger.mappings.change_opened(start, -1), Some(0));
}

#[test]
fn rights_on_a_part_of_a_mapping_count_for_it_and_are_known_as_a_part() {
    let mut ledger = Ledger::default();
    for number in 1..=3 {
        let handle = insert(&mut ledger, number);
        mapped(&mut ledger, number.into(), handle);
    }
    // The whole of one, and half of the next.
    let part = VaRange::new(range(2).start, SIZE_BYTES / 2);
    let both = VaRange::new(range(1).start, SIZE_BYTES + SIZE_BYTES / 2);
    let touched = ledger.mappings.begin_access(both);
    let starts = [1, 2].map(|number| range(number).start.0);
    assert_eq!(touched, [(starts[0], Some(range(1))), (starts[1], Some(part))]);
    ledger.mappings.add_access(&starts, &[AccessDesc::read_write(GPU)]);
    let seen = [1, 2, 3].map(|number| {
        let mapping = ledger.mappings.get(range(number).start.0).unwrap();
        (mapping.access_list().len(), mapping.is_uneven)
    });
    assert_eq!(seen, [(1, false), (1, true), (0, false)]);
    assert!(ledger.mappings.begin_access(range(9)).is_empty());
}

#[test]
fn addresses_inside_a_mapping_find_it() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 2, handle);
    let at = |address: u64| ledger.mapped_at(DeviceAddress(address)).map(|(_, row)| row.id());
    let (start, end) = (range(2).start.0, range(2).end().0);
    assert_eq!([start - 1, start, end - 1, end].map(at), [None, Some(id(1)), Some(id(1)), None]);
    assert_eq!(ledger.mappings.inside(range(2)).count(), 1);
    let short = VaRange::new(range(2).start, SIZE_BYTES - 1);
    assert_eq!(ledger.mappings.inside(short).count(), 0, "not wholly");
}

#[test]
fn ranges_that_touch_are_one() {
    let range = |start, end| Range { start, end };
    let apart = merged(vec![range(6, 8), range(2, 4), range(5, 5), range(0, 2), range(7, 9)]);
    assert_eq!(apart, [0..4, 6..9]);
}

#[test]
fn a_mapping_is_made_again_with_the_rights_it_had() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 1, handle);
    let rights = AccessDesc::read_write(GPU);
    ledger.mappings.add_access(&[range(1).start.0], &[rights]);
    ledger.mappings.set_presence(range(1).start.0, Presence::Bare);
    let again = ledger.to_remount(range(1).start.0).unwrap().unwrap();
    assert_eq!((again.range, again.raw, again.access), (range(1), RawHandle(1), vec![rights]));
    assert_eq!((again.device, again.presence), (Some(GPU), Presence::Bare));
    assert!(ledger.to_remount(range(2).start.0).unwrap().is_none());
}

#[test]
fn saved_contents_have_a_place_in_one_store() {
    let mut ledger = Ledger::default();
    let handle = insert(&mut ledger, 1);
    mapped(&mut ledger, 1, handle);
    let saved = Saved::whole(Store::File, 100, SIZE_BYTES);
    assert_eq!(ledger.saved(handle, saved), [range(1)], "it is mapped there still");
    let row = ledger.rows.get(handle).unwrap();
    let held_in = |store| row.backing().held_in(store);
    assert!(held_in(Store::File).is_some() && held_in(Store::Host).is_none());
    assert_eq!(ledger.places_in(Store::File), vec![Range { start: 100, end: 100 + SIZE_BYTES }]);
    ledger.rows.void_copies();
    assert!(ledger.places_in(Store::File).is_empty());
}
