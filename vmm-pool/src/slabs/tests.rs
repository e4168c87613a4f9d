use super::*;
use crate::driver::DeviceOrdinal;

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

/// A table with one slab, in one window.
fn table() -> (Table, SlabKey) {
    let mut table = Table::default();
    table.set_on(true);
    let key = add_slab(&mut table, 0, Some((recipe(), UNIT)));
    (table, key)
}

fn add_slab(table: &mut Table, number: u64, recipe: Option<(Recipe, u64)>) -> SlabKey {
    let row = VirtualHandle::new(usize::try_from(number).unwrap(), 1);
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
fn placed(table: &mut Table, key: SlabKey, units: u64) -> (VirtualHandle, VaRange) {
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
    let (row, mapped) = ended.into_iter().next().unwrap().slab.unwrap();
    assert_eq!((rows, row.index(), mapped), (vec![], 0, vec![window(0)]));
    assert_eq!(table.place(range.start), Place::Nothing);
    assert_eq!(table.unmap(range).map(|_| ()), None, "nothing is mapped");
    assert_eq!(table.free_spot(range).unwrap().windows, [window(0)]);
    assert_eq!(table.place(range.start), Place::Elsewhere);
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
    assert_eq!((rows.len(), ended.len()), (0, 2));
}

#[test]
fn rights_of_a_device_are_set_once_a_window() {
    let (mut table, key) = table();
    let (_, range) = placed(&mut table, key, 1);
    let own = AccessDesc::read_write(DeviceOrdinal(0));
    let other = AccessDesc::read_write(DeviceOrdinal(1));
    assert_eq!(table.plan_access(range, &[own]), AccessPlan::Done);
    assert_eq!(table.plan_access(range, &[own, other]), AccessPlan::Grant(window(0)));
    table.granted(window(0), &[other]);
    let (_, range) = placed(&mut table, key, 1);
    assert_eq!(table.plan_access(range, &[other]), AccessPlan::Done);
    let less = AccessDesc { flags: 1, ..other };
    let refused = AccessPlan::Refused(DriverCode::NOT_SUPPORTED);
    assert_eq!(table.plan_access(range, &[less]), refused);
    let tail = VaRange::new(range.start, 2 * UNIT);
    let nothing = AccessPlan::Refused(DriverCode::INVALID_VALUE);
    assert_eq!(table.plan_access(tail, &[own]), nothing);
}

#[test]
fn a_fresh_cell_takes_the_place_of_one_that_is_gone_whose_addresses_are_kept() {
    let (mut table, key) = table();
    placed(&mut table, key, 1);
    let (gone, range) = placed(&mut table, key, 1);
    table.unmap(range).unwrap();
    let next = table.carve(key, UNIT).unwrap();
    assert_eq!(table.map(next, range), MapPlan::Refused, "the handle is held still");
    table.release(gone).unwrap();
    assert_eq!(table.map(next, range), MapPlan::TakeOver { range });
    assert!(table.take_over(next, range).unwrap().is_nothing());
    assert_eq!(table.place(range.start), Place::Cell { range, handle: next });
    assert_eq!(table.totals().dead_bytes, 0);
    let other = placed(&mut table, key, 1).0;
    table.shared(other);
    assert_eq!(table.map(other, range), MapPlan::Refused, "somebody is there");
}

#[test]
fn importers_hold_parts_that_do_not_overlap() {
    let mut table = Table::default();
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
    let mut table = Table::default();
    let wanted = |table: &Table, units: u64| table.wanted(units * UNIT, &recipe());
    assert_eq!(wanted(&table, 1), Wanted::Alone, "off");
    table.set_on(true);
    assert_eq!(wanted(&table, 1), Wanted::Cell { slab_bytes: SLAB_BYTES_MIN });
    assert_eq!(wanted(&table, 16), Wanted::Cell { slab_bytes: 32 << 20 });
    assert_eq!(wanted(&table, 17), Wanted::Alone);
    for number in 0..20 {
        let key = add_slab(&mut table, number, Some((recipe(), UNIT)));
        placed(&mut table, key, 4);
        let (handle, range) = placed(&mut table, key, 4);
        table.unmap(range).unwrap();
        table.release(handle).unwrap();
        // While the addresses are kept, they may come back.
        assert_ne!(wanted(&table, 1), Wanted::Alone);
        table.free_spot(range).unwrap();
    }
    // 160 MiB live, and as much is dead.
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
