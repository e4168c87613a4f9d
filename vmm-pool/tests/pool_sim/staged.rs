//! Pauses and resumes by stages: what each moves, and what is left when calls of the driver fail.

use std::time::Duration;

use vmm_pool::budget::Counted;
use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, DriverOp, VaRange};
use vmm_pool::{ByDevice, Contents, HostBudget, PoolError, PoolResult, Schedule};

use crate::faults::{Pair, each_fault, peer};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, GateAt, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, class, create,
    end_streams, free_bytes, gate_of, holds, map, native, node, pattern, pool, resume, write,
};

/// So much of both devices.
fn window(units: u64) -> ByDevice {
    [DEVICE, OTHER].map(|device| (device, units * UNIT)).into()
}

/// So many allocations of two units each, and one of scratch memory.
fn filled(pool: &SimPool, count: u64) -> Vec<(VaRange, u64)> {
    let rights = [AccessDesc::read_write(DEVICE)];
    let scratch = create(pool, DEVICE, 2, class(Contents::Discard));
    map(pool, scratch, 2 * UNIT, &rights);
    let one = |seed| {
        let contents = if seed % 3 == 0 { Contents::File } else { Contents::Keep };
        let place = map(pool, create(pool, DEVICE, 2, class(contents)), 2 * UNIT, &rights);
        write(pool, DEVICE, place, pattern(seed));
        (place, seed)
    };
    (0..count).map(one).collect()
}

fn assert_holds(pool: &SimPool, filled: &[(VaRange, u64)]) {
    for (place, seed) in filled {
        assert!(holds(pool, DEVICE, *place, pattern(*seed)), "{place:?}");
    }
}

fn used_units(pool: &SimPool) -> u64 {
    (CAPACITY_BYTES - free_bytes(pool, DEVICE)) / UNIT
}

#[test]
fn a_stage_saves_and_unmaps_what_leaves_with_it_and_nothing_else() {
    let pool = pool(&node());
    let contents = filled(&pool, 6);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let unmapped = || pool.driver().faults().calls(DriverOp::Unmap);
    let before = unmapped();
    let moved = pool.release_stage(&window(2)).expect("a stage");
    assert_eq!(moved.copied_bytes, 2 * UNIT);
    assert_eq!(unmapped() - before, 2, "with what holds nothing that is kept");
    let (first, others) = contents.split_first().expect("six");
    let at = |place: VaRange| pool.driver().core().device_holds(DEVICE, place, &[0]);
    assert!(at(first.0).is_err(), "it has left");
    assert_holds(&pool, others);
    pool.release_rest().expect("the rest");
    resume(&pool);
    assert_holds(&pool, &contents);
}

#[test]
fn a_stage_that_fails_is_saved_to_the_same_places_when_it_is_tried_again() {
    let pool = pool(&node());
    let contents: Vec<_> = [Contents::Keep, Contents::File, Contents::Keep, Contents::File]
        .into_iter()
        .enumerate()
        .map(|(index, contents)| {
            let handle = create(&pool, DEVICE, 2, class(contents));
            let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
            write(&pool, DEVICE, place, pattern(index as u64));
            (place, index as u64)
        })
        .collect();
    pool.reserve(&WHOLE, UNLIMITED).expect("room");
    let held = || (pool.report().host_arena_bytes, pool.report().file_bytes);
    let before = held();
    // What was saved before has gone.
    for copy in [3, 1] {
        let faults = pool.driver().faults();
        faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(copy), DriverCode::UNKNOWN);
        pool.release_stage(&window(8)).expect_err("a copy is refused");
        faults.clear();
        assert_eq!(held(), before, "nothing is taken for another try, or given back");
    }
    let moved = pool.release_rest().expect("all");
    assert!(moved.log.notes.is_empty(), "{:?}", moved.log.notes);
    assert_eq!(held(), (before.0, 4 * UNIT));
    resume(&pool);
    assert_holds(&pool, &contents);
}

#[test]
fn memory_goes_and_comes_window_by_window() {
    let pool = pool(&node());
    let contents = filled(&pool, 6);
    for _ in 0..2 {
        pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        assert_eq!(used_units(&pool), 14);
        let held_bytes = pool.report().host_arena_bytes;
        // What nobody saves goes with the first; what does not fit any more waits for the next.
        let mut left = Vec::new();
        for units in [4, 5, 1] {
            pool.release_stage(&window(units)).expect("a stage");
            left.push(used_units(&pool));
        }
        assert_eq!(left, [8, 4, 2]);
        assert_eq!(gate_of(&pool), GateAt::Shut);
        let moved = pool.release_rest().expect("the rest");
        assert!(moved.log.notes.is_empty(), "{:?}", moved.log.notes);
        assert_eq!((moved.bytes[&DEVICE], moved.copied_bytes), (2 * UNIT, 2 * UNIT));
        assert_eq!((used_units(&pool), gate_of(&pool)), (0, GateAt::Offloaded));
        assert_eq!(pool.report().host_arena_bytes, held_bytes, "all was taken before");

        // Never more than is allowed, and what has contents first.
        let mut came = Vec::new();
        for units in [5, 1, 8] {
            let moved = pool.restore_stage(&window(units)).expect("a stage");
            came.push((used_units(&pool), moved.copied_bytes / UNIT));
        }
        assert_eq!(came, [(4, 4), (4, 0), (12, 8)]);
        let moved = pool.restore_rest(usize::MAX).expect("the rest");
        assert_eq!((moved.copied_bytes, used_units(&pool)), (0, 14));
        drop(pool.commit_resume());
        assert_holds(&pool, &contents);
    }
}

#[test]
fn a_device_that_a_window_does_not_name_keeps_its_memory() {
    let pool = pool(&node());
    let contents = filled(&pool, 3);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_stage(&[(OTHER, UNIT)].into()).expect("a stage");
    assert_eq!(used_units(&pool), 6, "only what nobody saves has gone");
    pool.release_rest().expect("the rest");
    assert_eq!(used_units(&pool), 0);
    resume(&pool);
    assert_holds(&pool, &contents);
}

#[test]
fn host_memory_that_cannot_be_had_is_found_out_before_anything_moves() {
    let pool = pool(&node());
    let contents = filled(&pool, 3);
    let error = pool.reserve(&WHOLE, HostBudget(Some(UNIT))).unwrap_err();
    assert!(matches!(error, PoolError::OutOfHostMemory { .. }), "{error}");
    pool.remount().expect("nothing was unmapped");
    drop(pool.commit_resume());
    assert_eq!((used_units(&pool), pool.report().host_arena_bytes), (8, 0));
    assert_holds(&pool, &contents);
}

#[test]
fn a_pause_by_stages_that_is_given_up_is_undone_before_the_first_stage_and_never_after() {
    let pool = pool(&node());
    let contents = filled(&pool, 3);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.drop_proof();
    assert_eq!(gate_of(&pool), GateAt::Open);
    assert_holds(&pool, &contents);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_stage(&window(2)).expect("a stage");
    pool.drop_proof();
    assert_eq!(gate_of(&pool), GateAt::Shut);
}

#[test]
fn a_resume_by_stages_that_is_given_up_gives_back_what_has_come() {
    let pool = pool(&node());
    let contents = filled(&pool, 5);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_rest().expect("all");
    pool.restore_stage(&window(4)).expect("a stage");
    assert_eq!(used_units(&pool), 4);
    pool.drop_proof();
    assert_eq!((used_units(&pool), gate_of(&pool)), (0, GateAt::Offloaded));
    resume(&pool);
    assert_holds(&pool, &contents);
}

#[test]
fn what_the_driver_will_not_copy_stays_with_its_contents_and_the_rest_leaves() {
    let pool = pool(&node());
    let contents = filled(&pool, 4);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_stage(&window(2)).expect("a stage");
    let faults = pool.driver().faults();
    faults.fail(DriverOp::CopyToHost, FaultSpan::From(1), DriverCode::UNKNOWN);
    pool.release_stage(&window(2)).unwrap_err();
    assert_eq!(used_units(&pool), 6, "it is all there");
    let moved = pool.release_rest().expect("no error: there is no way back");
    faults.clear();
    assert_eq!(moved.log.notes.len(), 1, "{:?}", moved.log.notes);
    let note = "3 allocations stay on their devices; the first: cuMemcpyDtoHAsync";
    assert!(moved.log.notes[0].starts_with(note), "{:?}", moved.log.notes);
    assert_eq!((used_units(&pool), gate_of(&pool)), (6, GateAt::Offloaded));
    resume(&pool);
    assert_holds(&pool, &contents);
    assert_eq!(used_units(&pool), 10);
}

fn pause_by_stages(pair: &Pair) -> PoolResult<()> {
    pair.each(|pool| pool.reserve(&WHOLE, UNLIMITED))?;
    for pool in &pair.pools {
        pool.release_stage(&window(2))?;
        pool.release_rest()?;
    }
    Ok(())
}

fn resume_by_stages(pair: &Pair) -> PoolResult<()> {
    for pool in &pair.pools {
        pool.restore_stage(&window(2))?;
        pool.restore_rest(usize::MAX)?;
    }
    pair.finish_resume()
}

#[test]
fn any_call_of_reserving_may_fail_and_the_pause_is_undone() {
    let met = each_fault(|pair, fault| {
        let pool = &pair.pools[fault.process];
        pair.pools[peer(fault.process)].reserve(&WHOLE, UNLIMITED).expect("no fault here");
        pool.drain();
        let outcome = fault.during(pair, || pool.reserve(&WHOLE, UNLIMITED));
        pair.undo_pause().unwrap_or_else(|error| panic!("{fault:?}: undo: {error}"));
        pair.assert_intact(&format!("{fault:?} undone"));
        pair.assert_balance(true, &format!("{fault:?} undone"));
        outcome.is_some()
    });
    assert!(met >= 2, "only {met} calls were met");
}

#[test]
fn any_call_of_a_stage_may_fail_and_the_pause_goes_on_to_its_end() {
    let met = each_fault(|pair, fault| {
        pair.each(|pool| pool.reserve(&WHOLE, UNLIMITED)).expect("host memory");
        let pool = &pair.pools[fault.process];
        let outcome = fault.during(pair, || pool.release_stage(&window(3)));
        for pool in &pair.pools {
            pool.release_rest().unwrap_or_else(|error| panic!("{fault:?}: the rest: {error}"));
        }
        if !fault.is_put_off() {
            pair.assert_balance(false, &format!("{fault:?} paused"));
        }
        resume_by_stages(pair).unwrap_or_else(|error| panic!("{fault:?}: resume: {error}"));
        outcome.is_some()
    });
    assert!(met >= 20, "only {met} calls were met");
}

#[test]
fn any_call_of_the_last_release_may_fail_and_nothing_is_lost() {
    any_call_of_the_last_release_may_fail(Schedule::SaveMeanwhile);
}

#[test]
fn any_call_of_a_last_release_that_saves_first_may_fail_and_nothing_is_lost() {
    any_call_of_the_last_release_may_fail(Schedule::SaveFirst);
}

fn any_call_of_the_last_release_may_fail(schedule: Schedule) {
    let met = each_fault(|pair, fault| {
        pair.each(|pool| pool.reserve(&WHOLE, UNLIMITED)).expect("host memory");
        let pool = &pair.pools[fault.process];
        let outcome = fault.during(pair, || pool.release_rest_by(schedule));
        if matches!(outcome, Some(Err(_))) {
            // As the next command has it done.
            pool.release_rest().unwrap_or_else(|error| panic!("{fault:?}: again: {error}"));
        }
        pair.pools[peer(fault.process)].release_rest().expect("no fault here");
        resume_by_stages(pair).unwrap_or_else(|error| panic!("{fault:?}: resume: {error}"));
        pair.assert_intact(&format!("{fault:?} resumed"));
        // What has stayed behind goes next time.
        pause_by_stages(pair).unwrap_or_else(|error| panic!("{fault:?}: second pause: {error}"));
        pair.assert_balance(false, &format!("{fault:?} paused"));
        resume_by_stages(pair).unwrap_or_else(|error| panic!("{fault:?}: resume: {error}"));
        outcome.is_some()
    });
    assert!(met >= 30, "only {met} calls were met");
}

#[test]
fn any_call_of_coming_back_by_stages_may_fail_and_the_tenant_stays_paused() {
    let met = each_fault(|pair, fault| {
        pause_by_stages(pair).expect("pause");
        let pool = &pair.pools[fault.process];
        let outcome = fault.during(pair, || {
            pool.restore_stage(&window(3))?;
            pool.restore_rest(usize::MAX)
        });
        pair.undo_resume();
        if !fault.is_put_off() {
            pair.assert_balance(false, &format!("{fault:?} undone"));
        }
        resume_by_stages(pair).unwrap_or_else(|error| panic!("{fault:?}: second try: {error}"));
        outcome.is_some()
    });
    assert!(met >= 40, "only {met} calls were met");
}

/// Its only bytes are those on the device.
#[test]
fn what_stayed_with_its_contents_stays_when_a_resume_is_given_up() {
    for (op, by_stages) in [(DriverOp::CopyToHost, true), (DriverOp::StreamCreate, false)] {
        let pool = pool(&node());
        let contents = filled(&pool, 4);
        pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        pool.release_stage(&window(2)).expect("a stage");
        end_streams(&pool);
        let faults = pool.driver().faults();
        faults.fail(op, FaultSpan::From(1), DriverCode::UNKNOWN);
        pool.release_rest().expect("no error: there is no way back");
        faults.clear();
        let stayed = used_units(&pool);
        assert!(stayed > 0, "{op:?}");
        for _ in 0..2 {
            if by_stages {
                pool.restore_stage(&window(8)).expect("a stage");
            } else {
                pool.create_own(&WHOLE).expect("room");
                pool.restore_own(usize::MAX).expect("contents");
            }
            pool.undo_resume().expect("an undo");
            assert_eq!((used_units(&pool), gate_of(&pool)), (stayed, GateAt::Offloaded), "{op:?}");
        }
        resume(&pool);
        assert_holds(&pool, &contents);
        assert_eq!(used_units(&pool), 10);
    }
}

#[test]
fn what_was_saved_in_a_stage_that_failed_is_saved_again_and_stays_till_then() {
    let pool = pool(&node());
    let contents = filled(&pool, 4);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let faults = pool.driver().faults();
    faults.fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
    pool.release_stage(&window(2)).unwrap_err();
    faults.clear();
    faults.fail(DriverOp::CopyToHost, FaultSpan::From(1), DriverCode::UNKNOWN);
    pool.release_rest().expect("no error: there is no way back");
    faults.clear();
    let stayed = used_units(&pool);
    pool.restore_stage(&window(8)).expect("a stage");
    pool.undo_resume().expect("an undo");
    assert_eq!(used_units(&pool), stayed);
    resume(&pool);
    assert_holds(&pool, &contents);
}

/// A device that nothing is on is no reason to fail.
#[test]
fn a_process_without_memory_goes_by_stages_too() {
    let pool = pool(&node());
    pool.reserve(&WHOLE, UNLIMITED).expect("nothing to reserve");
    pool.release_stage(&window(1)).expect("nothing to release");
    pool.release_rest().expect("nothing to release");
    pool.restore_stage(&ByDevice::new()).expect("nothing to restore");
    pool.restore_rest(usize::MAX).expect("nothing to restore");
    drop(pool.commit_resume());
    assert_eq!(gate_of(&pool), GateAt::Open);
    assert_eq!(free_bytes(&pool, DeviceOrdinal(0)), CAPACITY_BYTES);
}

/// Memory of this size is copied by itself here.
const GROUP: u64 = 8 << 20;
/// What is written of each: its end.
const WRITTEN: u64 = 2 * UNIT;

/// Five allocations that are copied one after the other, scratch memory, and memory that nobody uses.
fn large() -> (SimPool, Vec<(VaRange, u64)>) {
    let pool = pool(&SimNode::private(&[6 * GROUP]).expect("a node"));
    pool.copies().set_group_bytes(GROUP);
    let rights = [AccessDesc::read_write(DEVICE)];
    map(&pool, create(&pool, DEVICE, 2, class(Contents::Discard)), 2 * UNIT, &rights);
    let one = |seed| {
        let handle = create(&pool, DEVICE, GROUP / UNIT, class(Contents::Keep));
        let place = map(&pool, handle, GROUP, &rights);
        let end = VaRange::new(DeviceAddress(place.end().0 - WRITTEN), WRITTEN);
        write(&pool, DEVICE, end, pattern(seed));
        (end, seed)
    };
    let contents = (0..5).map(one).collect();
    let cached = create(&pool, DEVICE, 2, class(Contents::Keep));
    pool.mark_unused(&[map(&pool, cached, 2 * UNIT, &rights)]);
    (pool, contents)
}

#[test]
fn memory_is_given_back_while_the_rest_is_still_copied_or_behind_all_of_it() {
    for schedule in [Schedule::SaveMeanwhile, Schedule::SaveFirst] {
        given_back_behind_copies(schedule);
    }
}

fn given_back_behind_copies(schedule: Schedule) {
    let (pool, contents) = large();
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let faults = pool.driver().faults();
    let mut free = vec![free_bytes(&pool, DEVICE)];
    std::thread::scope(|threads| {
        let mut hold = faults.hold(DriverOp::CopyToHost);
        let released = threads.spawn(|| pool.release_rest_by(schedule));
        // Each copy waits until it was looked.
        while !released.is_finished() {
            if hold.is_met(Duration::from_millis(20)) {
                free.push(free_bytes(&pool, DEVICE));
                let next = faults.hold(DriverOp::CopyToHost);
                drop(hold);
                hold = next;
            }
        }
        drop(hold);
        let moved = released.join().expect("no panic").expect("all of it");
        assert!(moved.log.notes.is_empty(), "{:?}", moved.log.notes);
        let all_bytes = 5 * GROUP + 4 * UNIT;
        assert_eq!((moved.bytes[&DEVICE], moved.copied_bytes), (all_bytes, 5 * GROUP));
        assert_eq!(moved.log.bytes, all_bytes);
    });
    match schedule {
        // Two are copied while a third waits.
        Schedule::SaveMeanwhile => assert!(free.last() >= Some(&(3 * GROUP)), "{free:?}"),
        Schedule::SaveFirst => assert_eq!(free.last(), free.first(), "{free:?}"),
    }
    assert_eq!((free_bytes(&pool, DEVICE), gate_of(&pool)), (6 * GROUP, GateAt::Offloaded));
    resume(&pool);
    assert_holds(&pool, &contents);
}

#[test]
fn a_stage_without_room_creates_nothing_and_the_next_brings_all() {
    let pool = pool(&node());
    let contents = filled(&pool, 6);
    pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    pool.release_rest().expect("all");
    let faults = pool.driver().faults();
    for nth in [1, 3] {
        faults.fail(DriverOp::Create, FaultSpan::Nth(nth), DriverCode::OUT_OF_MEMORY);
        let error = pool.restore_stage(&window(14)).expect_err("others have it");
        faults.clear();
        assert!(matches!(error, PoolError::OutOfDeviceMemory { .. }), "{error:?}");
        assert_eq!(used_units(&pool), 0, "{nth}");
    }
    pool.restore_stage(&window(4)).expect("a stage");
    assert_eq!(used_units(&pool), 4);
    pool.restore_rest(usize::MAX).expect("the rest");
    assert_eq!(used_units(&pool), 14);
    drop(pool.commit_resume());
    assert_holds(&pool, &contents);
}

#[test]
fn what_fails_after_some_was_given_back_loses_nothing() {
    for schedule in [Schedule::SaveMeanwhile, Schedule::SaveFirst] {
        what_fails_after_some_was_saved_loses_nothing(schedule);
    }
}

fn what_fails_after_some_was_saved_loses_nothing(schedule: Schedule) {
    for (op, nth) in [
        (DriverOp::CopyToHost, 4),
        (DriverOp::Unmap, 2),
        (DriverOp::Unmap, 5),
        (DriverOp::Release, 2),
    ] {
        let (pool, contents) = large();
        pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        let faults = pool.driver().faults();
        faults.fail(op, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let moved = pool.release_rest_by(schedule).expect("there is no way back");
        faults.clear();
        assert_eq!(faults.fired(), 1, "{op:?} {nth}");
        assert_eq!(gate_of(&pool), GateAt::Offloaded, "{op:?} {nth}");
        let gone: u64 = moved.bytes.values().sum();
        assert!(gone >= 4 * GROUP, "{op:?} {nth}: {moved:?}");
        assert!(
            moved.copied_bytes >= 5 * GROUP,
            "{op:?} {nth}: what failed copied, too: {moved:?}"
        );
        if op != DriverOp::Release {
            assert_eq!(free_bytes(&pool, DEVICE), 6 * GROUP, "{op:?} {nth}: all went in the end");
        }
        resume(&pool);
        assert_holds(&pool, &contents);
    }
}

#[test]
fn the_drivers_pools_are_trimmed_also_where_nothing_of_ours_leaves() {
    let pool = pool(&node());
    pool.natives().allocated(DeviceAddress(8192), native(512, DEVICE, None, Counted::No));
    let trims = || pool.driver().faults().calls(DriverOp::PoolTrim);
    let before = trims();
    pool.reserve(&WHOLE, UNLIMITED).expect("room");
    pool.release_rest().expect("released");
    assert_eq!(trims() - before, 1);
    resume(&pool);
}
