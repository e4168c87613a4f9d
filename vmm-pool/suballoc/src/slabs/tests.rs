use vmm_pool::driver::{AccessDesc, DeviceOrdinal};

use super::*;

/// The mark of rows, in generation 1.
const ROW_MARK: u64 = 0x5b1e << 48 | 1 << 24;
const UNIT: u64 = 2 << 20;
const START: DeviceAddress = DeviceAddress(1 << 40);
const SLAB_BYTES: u64 = SLAB_BYTES_MIN;

fn recipe() -> Recipe {
    let class = Class { library: "nccl", tag: "nccl".to_owned(), ..Class::default() };
    Recipe { prop: AllocationProp::pinned_on(DeviceOrdinal(0)), class }
}

fn window(number: u64) -> VaRange {
    VaRange::new(DeviceAddress(START.0 + number * 2 * SLAB_BYTES), SLAB_BYTES)
}

fn right_at(table: &SlabTable, address: DeviceAddress, place: Location) -> Option<i32> {
    let (.., access) = table.windows.seen_at(address)?.part?;
    Some(access.iter().find(|desc| desc.location == place).map_or(0, |desc| desc.flags))
}

impl Ended {
    /// Is there nothing to take down?
    fn is_nothing(&self) -> bool {
        self.mounted.is_empty() && self.row.is_none() && self.windows.is_empty()
    }
}

/// A table with one slab, in one window.
fn table() -> (SlabTable, SlabKey) {
    let mut table = SlabTable { is_on: true, ..SlabTable::default() };
    let key = add_slab(&mut table, 0, Some((recipe(), UNIT)));
    (table, key)
}

fn add_slab(table: &mut SlabTable, number: u64, recipe: Option<(Recipe, u64)>) -> SlabKey {
    let row = VirtualHandle::from_raw(ROW_MARK | number).unwrap();
    let id = AllocationId([u8::try_from(number).unwrap(); 16]);
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let rights = [AccessDesc::read_write(DeviceOrdinal(0))];
    let new = NewSlab { row, id, size_bytes: SLAB_BYTES, prop, recipe };
    table.insert(new, window(number), &rights)
}

fn this_thread() -> ThreadId {
    std::thread::current().id()
}

/// A cell that is mapped at its spot.
fn placed(table: &mut SlabTable, key: SlabKey, units: u64) -> (VirtualHandle, VaRange) {
    let handle = table.carve(key, units * UNIT).unwrap();
    table.aim(this_thread(), Some(handle));
    let start = table.take_spot(this_thread(), units * UNIT, 0).unwrap();
    let range = VaRange::new(start, units * UNIT);
    assert_eq!(table.map(handle, range), MapPlan::Done);
    (handle, range)
}

#[test]
fn cells_are_neighbours_until_the_slab_is_full() {
    let (mut table, key) = table();
    let (_, first) = placed(&mut table, key, 3);
    let (_, second) = placed(&mut table, key, 5);
    assert_eq!((first.start, second.start), (window(0).start, first.end()));
    assert_eq!(table.carve(key, UNIT), None);
    assert_eq!(table.with_room(UNIT, &recipe()), []);
    assert_eq!(table.totals().tail_bytes, 0);
}

#[test]
fn a_size_that_the_unit_does_not_divide_has_no_room() {
    let (mut table, key) = table();
    assert_eq!(table.carve(key, UNIT / 2), None);
    assert_eq!(table.with_room(UNIT + 1, &recipe()), []);
}

#[test]
fn bytes_that_somebody_may_have_written_are_not_given_out_again() {
    let (mut table, key) = table();
    let (kept, _) = placed(&mut table, key, 1);
    let (handle, range) = placed(&mut table, key, 1);
    table.unmap(range).unwrap();
    assert!(table.release(handle).unwrap().is_nothing());
    let (_, next) = placed(&mut table, key, 1);
    assert_eq!(next.start, range.end());
    assert_eq!(table.totals().dead_bytes, UNIT);
    assert!(table.release(kept).unwrap().is_nothing(), "its mapping keeps it");
}

#[test]
fn bytes_that_nobody_was_told_of_are_given_out_again() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let fresh = table.carve(key, UNIT).unwrap();
    table.release(fresh).unwrap();
    assert_eq!(table.release(fresh).map(|_| ()), None, "once");
    let (_, next) = placed(&mut table, key, 1);
    assert_eq!(next.start.0, window(0).start.0 + UNIT);
}

#[test]
fn bytes_before_and_under_a_cell_that_came_to_an_old_spot_are_not_given_out() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let moved = table.add_cell(key, Part { offset_bytes: 3 * UNIT, size_bytes: UNIT }, false);
    assert_eq!(table.totals().dead_bytes, 2 * UNIT);
    let (_, next) = placed(&mut table, key, 1);
    assert_eq!(next.start.0, window(0).start.0 + 4 * UNIT);
    assert!(table.cell_at(moved.unwrap()).is_some());
}

#[test]
fn addresses_go_to_the_thread_that_asked_for_the_memory_and_to_that_size_alone() {
    let (mut table, key) = table();
    let handle = table.carve(key, UNIT).unwrap();
    table.aim(this_thread(), Some(handle));
    let other = std::thread::spawn(this_thread).join().unwrap();
    assert_eq!(table.take_spot(other, UNIT, 0), None);
    assert_eq!(table.take_spot(this_thread(), 2 * UNIT, 0), None);
    assert_eq!(table.take_spot(this_thread(), UNIT, 1 << 41), None, "not aligned so far");
    assert_eq!(table.take_spot(this_thread(), UNIT, UNIT), Some(window(0).start));
    assert_eq!(table.take_spot(this_thread(), UNIT, UNIT), None, "once");
}

#[test]
fn a_slab_ends_with_its_last_cell_and_its_window_with_the_last_spot() {
    let (mut table, key) = table();
    let (handle, range) = placed(&mut table, key, 1);
    assert_eq!(table.free_spot(range).map(|_| ()), None, "it is mapped");
    table.release(handle).unwrap();
    let (rows, ended) = table.unmap(range).unwrap();
    let mounted = vec![(window(0).start.0, window(0))];
    assert_eq!((rows, ended.row.unwrap().raw() & 0xff, ended.mounted), (vec![], 0, mounted));
    assert_eq!(table.windows.place(range.start), Occupant::Nothing);
    assert_eq!(table.windows.dismounted(window(0).start.0), None, "its addresses are kept");
    assert_eq!(table.unmap(range).map(|_| ()), None, "nothing is mapped");
    assert_eq!(table.free_spot(range).unwrap().windows, [window(0)]);
    assert_eq!(table.windows.place(range.start), Occupant::Elsewhere);
    assert_eq!(table.totals(), SlabTotals::default());
}

#[test]
fn a_range_that_cuts_a_cell_or_leaves_the_window_is_refused() {
    let (mut table, key) = table();
    let (_, first) = placed(&mut table, key, 2);
    let (_, second) = placed(&mut table, key, 1);
    for range in [
        VaRange::new(first.start, UNIT),
        VaRange::new(DeviceAddress(first.start.0 + UNIT), 2 * UNIT),
        VaRange::new(first.start, 2 * SLAB_BYTES),
        VaRange::new(second.end(), UNIT),
    ] {
        assert_eq!(table.unmap(range).map(|_| ()), None, "{range:?}");
    }
    let (rows, ended) = table.unmap(VaRange::new(first.start, 3 * UNIT)).unwrap();
    assert!(rows.is_empty() && ended.is_nothing(), "their handles keep them");
    assert_eq!(table.windows.place(second.start), Occupant::Nothing);
}

#[test]
fn rights_of_a_device_are_set_once_a_window() {
    let (mut table, key) = table();
    let (_, range) = placed(&mut table, key, 1);
    let own = AccessDesc::read_write(DeviceOrdinal(0));
    let other = AccessDesc::read_write(DeviceOrdinal(1));
    assert_eq!(right_at(&table, range.start, own.location), Some(0), "nobody has set any");
    assert_eq!(table.plan_access(range, &[own]), AccessPlan::Done);
    let grant = AccessPlan::Grant { window: window(0).start.0, mounted: window(0) };
    assert_eq!(table.plan_access(range, &[own, other]), grant);
    table.windows.granted(window(0).start.0, range, &[other]);
    assert_eq!(right_at(&table, range.start, other.location), Some(3));
    let (_, next) = placed(&mut table, key, 1);
    assert_eq!(right_at(&table, next.start, other.location), Some(0));
    assert_eq!(table.plan_access(next, &[other]), AccessPlan::Done);
    let less = AccessDesc { flags: 1, ..other };
    assert_eq!(table.plan_access(next, &[less]), AccessPlan::Done);
    assert_eq!(table.windows.wider(window(0).start.0, &[less])[0].flags, 3);
    assert_eq!(right_at(&table, next.start, other.location), Some(1), "it is what was set");
    assert_eq!(right_at(&table, range.start, other.location), Some(3));
    let refused = AccessPlan::Refused(DriverCode::INVALID_VALUE);
    let tail = VaRange::new(next.start, 2 * UNIT);
    let wrong = AccessDesc { flags: 2, ..own };
    assert_eq!(table.plan_access(tail, &[own]), refused);
    assert_eq!(table.plan_access(next, &[wrong]), refused);
}

#[test]
fn a_cell_takes_the_place_of_one_that_is_gone_whose_addresses_are_kept() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let (gone, range) = placed(&mut table, key, 1);
    table.unmap(range).unwrap();
    let next = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(next, range), MapPlan::Odd, "the other is there still");
    table.release(gone).unwrap();
    assert_eq!(table.map(next, range), MapPlan::Clear);
    assert_eq!(table.windows.place(range.start), Occupant::Cell { range, handle: next });
    assert_eq!(table.totals().dead_bytes, 0);
    // A cell whose bytes could not be cleared is not mapped. They are to be cleared the next time.
    assert!(table.cleared((key, next), range, false).is_nothing());
    assert_eq!(table.windows.place(range.start), Occupant::Nothing);
    assert_eq!(table.map(next, range), MapPlan::Clear);
    assert!(table.cleared((key, next), range, true).is_nothing());
    let other = placed(&mut table, key, 1).0;
    table.share(other);
    assert_eq!(table.map(other, range), MapPlan::Wrong, "somebody is there");
    table.unmap(range).unwrap();
    assert_eq!(table.map(other, range), MapPlan::Odd, "others see where it is");
    assert_eq!(table.map(next, range), MapPlan::Done, "nobody else was there");
}

#[test]
fn bytes_whose_fill_is_late_are_nobodys_any_more() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let (gone, range) = placed(&mut table, key, 1);
    table.unmap(range).unwrap();
    table.release(gone).unwrap();
    let late = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(late, range), MapPlan::Clear);
    table.late(late);
    assert!(table.cleared((key, late), range, false).is_nothing());
    assert_eq!(table.windows.place(range.start), Occupant::Nothing);
    assert_eq!(table.map(late, range), MapPlan::Busy, "the fill may still come");
    assert!(table.release(late).unwrap().is_nothing());
    let next = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(next, range), MapPlan::Odd, "the fill would clear its contents");
    assert!(table.free_spot(range).unwrap().is_nothing(), "its addresses are given back");
}

#[test]
fn bytes_that_others_may_hold_take_nothing_new_until_all_give_them_up() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let (gone, range) = placed(&mut table, key, 1);
    table.share(gone);
    table.unmap(range).unwrap();
    table.release(gone).unwrap();
    let next = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(next, range), MapPlan::Odd, "a process that imported it would see it");
    table.is_home = true;
    assert_eq!(table.map(next, range), MapPlan::Clear);
}

/// Makes a room with a spot of `units` units.
fn room(table: &mut SlabTable, number: u64, units: u64) -> VaRange {
    let start = DeviceAddress(START.0 + number * (1 << 30));
    let room_bytes = table.room_bytes(units * UNIT, 0).unwrap();
    let spot = table.add_room(VaRange::new(start, room_bytes), units * UNIT);
    VaRange::new(spot, units * UNIT)
}

#[test]
fn a_room_takes_any_cell_that_is_in_use_and_its_slab_leaves_with_it() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let (handle, first) = placed(&mut table, key, 2);
    let spot = room(&mut table, 1, 2);
    let base = DeviceAddress(spot.start.0 - UNIT);
    let (window, mounted) = (spot.start.0 - ROOM_BYTES, VaRange::new(base, SLAB_BYTES));
    let MapPlan::Fill { window: filled, mounted: there, .. } = table.map(handle, spot) else {
        panic!("it has to be filled");
    };
    assert_eq!((filled, there), (window, mounted));
    assert_eq!(table.map(handle, spot), MapPlan::Wrong, "another thread fills it");
    assert!(table.filled(handle, spot, (window, mounted), true).is_nothing());
    assert_eq!(table.windows.place(spot.start), Occupant::Cell { range: spot, handle });
    assert_eq!(table.windows.spot_at(spot.start), Some(spot));
    table.unmap(first).unwrap();
    table.release(handle).unwrap();
    let (_, ended) = table.unmap(spot).unwrap();
    assert_eq!((ended.mounted, ended.row), (vec![(window, mounted)], None));
    assert!(table.free_spot(spot).unwrap().is_nothing(), "its slab is there still");
    let room = VaRange::new(DeviceAddress(window), 2 * ROOM_BYTES);
    assert_eq!(table.windows.dismounted(window), Some(room));
}

#[test]
fn a_part_of_a_room_takes_no_slab_for_the_rest_would_lie_outside_it() {
    let (mut table, key) = table();
    let (handle, range) = placed(&mut table, key, 1);
    let spot = room(&mut table, 1, 5);
    let inside = VaRange::new(DeviceAddress(spot.start.0 + 2 * UNIT), UNIT);
    assert_eq!(table.map(handle, inside), MapPlan::Odd);
    table.unmap(range).unwrap();
    assert_eq!(table.map(handle, inside), MapPlan::Odd, "it has bytes");
}

#[test]
fn a_room_takes_what_stands_alone_in_parts_and_cells_that_fit_nowhere_else_stand_alone() {
    let (mut table, key) = table();
    let spot = room(&mut table, 1, 2);
    let half = VaRange::new(spot.start, UNIT);
    assert_eq!(table.map_alone(half), MapPlan::Done);
    assert_eq!(table.windows.place(half.start), Occupant::Alone);
    assert_eq!(table.map_alone(half), MapPlan::Wrong, "it is taken");
    assert_eq!(table.map_alone(VaRange::new(START, UNIT)), MapPlan::Wrong, "no spot");
    let outside = VaRange::new(DeviceAddress(START.0 / 2), UNIT);
    assert_eq!(table.map_alone(outside), MapPlan::StandAlone);
    let rest = VaRange::new(half.end(), UNIT);
    let fresh = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(fresh, rest), MapPlan::StandAlone);
    let (used, range) = placed(&mut table, key, 1);
    assert_eq!(table.map(used, rest), MapPlan::Odd, "no room for its slab next to the other");
    table.unmap(range).unwrap();
    assert_eq!(table.map(used, rest), MapPlan::Odd, "it has bytes");
    let beyond = VaRange::new(rest.start, 2 * UNIT);
    assert_eq!(table.map_alone(beyond), MapPlan::Wrong);
    assert_eq!(table.map_alone(range), MapPlan::Odd, "a slab is there");
    table.not_mapped_alone(half);
    assert_eq!(table.windows.place(half.start), Occupant::Nothing);
}

#[test]
fn importers_hold_parts_that_do_not_overlap() {
    let mut table = SlabTable::default();
    let key = add_slab(&mut table, 0, None);
    let part =
        |offset: u64, units: u64| Part { offset_bytes: offset * UNIT, size_bytes: units * UNIT };
    let held = table.hold_part(key, part(2, 2)).unwrap();
    assert_eq!(table.hold_part(key, part(2, 2)), Some(held));
    for wrong in [part(2, 1), part(1, 2), part(3, 1), part(7, 2), part(0, 0)] {
        assert_eq!(table.hold_part(key, wrong), None, "{wrong:?}");
    }
    assert!(table.hold_part(key, part(4, 4)).is_some());
    assert_eq!(table.totals().imported_cells, 2);
}

#[test]
fn slabs_grow_with_what_lives_and_the_dead_are_bounded() {
    let mut table = SlabTable::default();
    let wanted = |table: &SlabTable, units: u64| table.wanted(units * UNIT, &recipe());
    assert_eq!(wanted(&table, 1), Wanted::Alone, "off");
    table.is_on = true;
    assert_eq!(wanted(&table, 1), Wanted::Cell { slab_bytes: SLAB_BYTES_MIN });
    assert_eq!(wanted(&table, 16), Wanted::Cell { slab_bytes: 32 << 20 });
    assert_eq!(wanted(&table, 17), Wanted::Alone);
    for number in 0..20 {
        let key = add_slab(&mut table, number, Some((recipe(), UNIT)));
        placed(&mut table, key, 4);
        let (handle, range) = placed(&mut table, key, 4);
        table.unmap(range).unwrap();
        table.release(handle).unwrap();
        // While a caller keeps the addresses, it may use them again.
        assert_ne!(wanted(&table, 1), Wanted::Alone);
        table.free_spot(range).unwrap();
    }
    // 160 MiB are live, and as many bytes are dead.
    assert_ne!(wanted(&table, 1), Wanted::Cell { slab_bytes: SLAB_BYTES_MIN });
    for number in 20..24 {
        let key = add_slab(&mut table, number, Some((recipe(), UNIT)));
        placed(&mut table, key, 1);
        let (handle, range) = placed(&mut table, key, 7);
        table.unmap(range).unwrap();
        table.release(handle).unwrap();
        table.free_spot(range).unwrap();
    }
    assert_eq!(wanted(&table, 1), Wanted::Alone);
}
