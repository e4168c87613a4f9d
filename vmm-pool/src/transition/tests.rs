use std::sync::Arc;
use std::time::Instant;

use super::ByDevice;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver as _, VaRange,
};
use crate::ledger::Selection;
use crate::pool::Pool;
use crate::scaling::{IdleDriver, assert_not_quadratic};
use crate::store::{Copies, HostBudget, Schedule};
use crate::{Away, Class, FromOffloaded, Keeper};

const GPU: DeviceOrdinal = DeviceOrdinal(0);
const SIZE_BYTES: u64 = 4096;
const SOON: std::time::Duration = std::time::Duration::from_mins(5);

/// `count` allocations, which leave and come 16 at a time.
fn swapped(count: usize) -> impl FnMut() {
    let (pool, keeper) = Pool::new(Arc::new(IdleDriver::default()), 0, Vec::new);
    let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
    for _ in 0..count {
        let handle = entered.create(SIZE_BYTES, &prop, Class::default()).unwrap();
        let start = pool.driver().address_reserve(SIZE_BYTES, 0, DeviceAddress(0)).unwrap();
        let range = VaRange::new(start, SIZE_BYTES);
        entered.map(range, 0, handle).unwrap();
        entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
    }
    drop(entered);
    let window: ByDevice = [(GPU, 16 * SIZE_BYTES)].into();
    let mut keeper = Some(keeper);
    move || {
        let away = leave(keeper.take().unwrap(), &window);
        keeper = Some(come(away, &window));
    }
}

fn leave(keeper: Keeper<IdleDriver>, window: &ByDevice) -> Keeper<IdleDriver> {
    let drained = keeper.close().unwrap().drain(Instant::now() + SOON, &crossbeam_channel::never());
    let (quiesced, _) = drained.unwrap();
    let (whole, budget) = (Selection::Whole, |_| HostBudget(None));
    let prepared = quiesced.prepare(whole, &[], Copies::All, budget, Schedule::SaveMeanwhile);
    let mut departing = prepared.unwrap().0.depart();
    while !departing.left().is_empty() {
        departing.release_stage(window).unwrap();
    }
    departing.release(Schedule::SaveMeanwhile).unwrap().0.end()
}

fn come(keeper: Keeper<IdleDriver>, window: &ByDevice) -> Keeper<IdleDriver> {
    let shut = keeper.shut::<FromOffloaded>(Instant::now() + SOON, || false).unwrap();
    let mut arriving = shut.arrive(Away::Whole);
    while !arriving.left().is_empty() {
        arriving.restore_stage(window).unwrap();
    }
    let (returning, _) = arriving.restore_rest(0).unwrap();
    let (restored, _) = returning.map_imports().unwrap();
    restored.commit().0.end()
}

#[test]
fn a_stage_costs_what_it_moves_and_not_what_there_is() {
    assert_not_quadratic(swapped);
}
