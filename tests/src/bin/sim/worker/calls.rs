//! Calls to the pool as an application makes them, where some are made to fail.

use sublet_tests::{Outcome, Trouble};
use vmm_pool::driver::sim::GRANULARITY_BYTES;
use vmm_pool::driver::{AccessDesc, DeviceAddress, DeviceOrdinal, DriverCode, VaRange};
use vmm_pool::{PoolError, VirtualHandle};

use super::{Sim, host};

/// A call that an injected fault made fail is made again so often at most.
const TRIES_MAX: usize = 8;

/// How many calls have been made to fail.
pub(super) fn fired(member: &Sim) -> u64 {
    member.pool().driver().faults().fired()
}

/// Has a call been made to fail since, or is there no descriptor to be had?
pub(super) fn is_explained(member: &Sim, fired_before: u64) -> bool {
    fired(member) > fired_before || host::lacks_descriptors()
}

/// What a call came to: `None` when a fault that was injected since, or a full device, explains the refusal.
pub(super) fn judged<T>(
    member: &Sim,
    fired_before: u64,
    result: Result<T, PoolError>,
) -> Outcome<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_explained(member, fired_before) || is_full(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Calls until it succeeds, which it must as soon as no fault is in the way.
pub(super) fn insist<T>(member: &Sim, call: impl Fn() -> Result<T, PoolError>) -> Outcome<T> {
    for _ in 0..TRIES_MAX {
        let before = fired(member);
        if let Some(value) = judged(member, before, call())? {
            return Ok(value);
        }
    }
    Err(Trouble::new("a call was refused again and again"))
}

/// Why memory could not be mapped.
pub(super) enum NotMapped {
    /// The pool refused, and no fault explains it.
    Refused(PoolError),
    /// What had been begun could not be taken back.
    Trouble(Trouble),
}

impl From<NotMapped> for Trouble {
    fn from(why: NotMapped) -> Self {
        match why {
            NotMapped::Refused(error) => error.into(),
            NotMapped::Trouble(trouble) => trouble,
        }
    }
}

/// Maps `handle` at a fresh place where all of `readers` reach it, or leaves nothing behind.
pub(super) fn map(
    member: &Sim,
    handle: VirtualHandle,
    units: u64,
    readers: &[DeviceOrdinal],
) -> Outcome<Option<VaRange>> {
    try_map(member, handle, units, readers).map_err(Trouble::from)
}

/// As [`map`], with the pool's reason.
pub(super) fn try_map(
    member: &Sim,
    handle: VirtualHandle,
    units: u64,
    readers: &[DeviceOrdinal],
) -> Result<Option<VaRange>, NotMapped> {
    let size_bytes = units * GRANULARITY_BYTES;
    let core = member.pool().driver().core();
    let refused = |code| NotMapped::Trouble(device_refused(code));
    let start = core.reserve(size_bytes, 0, DeviceAddress(0)).map_err(refused)?;
    let place = VaRange::new(start, size_bytes);
    let before = fired(member);
    if let Err(error) = member.pool().enter().map(place, 0, handle) {
        let outcome = explained(member, before, error);
        core.free_addresses(place).map_err(refused)?;
        return outcome;
    }
    let access: Vec<AccessDesc> =
        readers.iter().map(|device| AccessDesc::read_write(*device)).collect();
    if let Err(error) = member.pool().enter().set_access(place, &access) {
        let outcome = explained(member, before, error);
        unmap(member, place).map_err(NotMapped::Trouble)?;
        return outcome;
    }
    Ok(Some(place))
}

fn explained<T>(member: &Sim, before: u64, error: PoolError) -> Result<Option<T>, NotMapped> {
    if is_explained(member, before) || is_full(&error) {
        Ok(None)
    } else {
        Err(NotMapped::Refused(error))
    }
}

pub(super) fn unmap(member: &Sim, place: VaRange) -> Outcome {
    insist(member, || member.pool().enter_giving_up().unmap(place))?;
    member.pool().driver().core().free_addresses(place).map_err(device_refused)
}

pub(super) fn is_full(error: &PoolError) -> bool {
    error.code() == Some(DriverCode::OUT_OF_MEMORY)
}

pub(super) fn device_refused(code: DriverCode) -> Trouble {
    Trouble::new(format!("the simulated device refused with {code}"))
}
