//! Facts about addresses: from the driver, and from the ledger while memory is away.
//!
//! No query waits for memory. A process that has paused itself queries its host memory before each later copy. A thread that
//! queries memory that is away may be the one that would resume it. If neither the ledger nor the driver knows the answer then,
//! the answer is that for addresses without memory.

use tenants::member::Member;
use vmm_pool::driver::{
    AccessDesc, DeviceAddress, DeviceOrdinal, Driver, DriverCode, Location, VaRange,
};
use vmm_pool::gate::Passage;
use vmm_pool::{Facts, Known};

/// The most tries for a query whose memory comes or goes meanwhile. A pause and a resume during one call are rare. Two of them
/// are not expected.
const TRIES_MAX: usize = 4;

/// Attributes of pointers (`CUpointer_attribute`) that this module knows.
mod attribute {
    pub(super) const CONTEXT: i32 = 1;
    pub(super) const MEMORY_TYPE: i32 = 2;
    pub(super) const DEVICE_POINTER: i32 = 3;
    pub(super) const HOST_POINTER: i32 = 4;
    pub(super) const SYNC_MEMOPS: i32 = 6;
    pub(super) const BUFFER_ID: i32 = 7;
    pub(super) const IS_MANAGED: i32 = 8;
    pub(super) const DEVICE_ORDINAL: i32 = 9;
    pub(super) const IS_LEGACY_IPC_CAPABLE: i32 = 10;
    pub(super) const RANGE_START: i32 = 11;
    pub(super) const RANGE_SIZE: i32 = 12;
    pub(super) const MAPPED: i32 = 13;
    pub(super) const HANDLE_TYPES: i32 = 14;
    pub(super) const IS_RDMA_CAPABLE: i32 = 15;
    pub(super) const ACCESS_FLAGS: i32 = 16;
    pub(super) const MEMPOOL: i32 = 17;
    pub(super) const MAPPING_SIZE: i32 = 18;
    pub(super) const MAPPING_START: i32 = 19;
}

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;

/// The value of an attribute, as wide as the driver writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// One byte: a truth value.
    Byte(u8),
    /// Four bytes.
    Word(u32),
    /// Eight bytes: an address, a size, or a handle.
    Long(u64),
}

/// The ledger's answer about an attribute of memory that is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// This value, which the driver would give if the memory were there.
    Value(Value),
    /// Such memory has no such attribute. The driver refuses the query, and in a list of queries it writes zeros of this width.
    None(Value),
    /// The driver still knows the value, from the reservation; it is not 0.
    Reservation,
    /// Nothing: the driver answers as for addresses without memory.
    Unknown,
}

/// Returns the ledger's answer about `attribute` of `address`, whose memory is away. `current` is the device of the calling
/// thread's current context.
pub fn said(
    facts: &Facts,
    attribute: i32,
    address: DeviceAddress,
    current: impl FnOnce() -> Option<DeviceOrdinal>,
) -> Said {
    let device = facts.device();
    let is_block = facts.block_bytes.is_some();
    match attribute {
        attribute::CONTEXT => {
            Said::Value(Value::Long(facts.context.map_or(0, |context| context.0)))
        }
        attribute::MEMORY_TYPE => {
            Said::Value(Value::Word(if device.is_some() { TYPE_DEVICE } else { TYPE_HOST }))
        }
        attribute::HOST_POINTER if device.is_some() => Said::None(Value::Long(0)),
        attribute::DEVICE_POINTER | attribute::HOST_POINTER => Said::Value(Value::Long(address.0)),
        attribute::DEVICE_ORDINAL => {
            Said::Value(Value::Word(device.map_or(0, |device| device.0.unsigned_abs())))
        }
        // The attribute is unset in new memory, and a resume creates new memory.
        attribute::SYNC_MEMOPS | attribute::IS_MANAGED => Said::Value(Value::Byte(0)),
        attribute::IS_LEGACY_IPC_CAPABLE => Said::Value(Value::Byte(u8::from(is_block))),
        attribute::BUFFER_ID => Said::Value(Value::Long(facts.number)),
        attribute::ACCESS_FLAGS => current().map_or(Said::Unknown, |device| {
            let flags = rights(&facts.access, Location::device(device));
            Said::Value(Value::Word(u32::try_from(flags).unwrap_or(0)))
        }),
        attribute::RANGE_START | attribute::RANGE_SIZE => {
            let block = facts.block_bytes.map(|bytes| VaRange::new(facts.mapping.start, bytes));
            match facts.reserved.or(block) {
                Some(range) if attribute == attribute::RANGE_START => {
                    Said::Value(Value::Long(range.start.0))
                }
                Some(range) => Said::Value(Value::Long(range.size_bytes)),
                None => Said::Reservation,
            }
        }
        attribute::MAPPED => Said::Value(Value::Byte(1)),
        attribute::HANDLE_TYPES if is_block => Said::Value(Value::Word(0)),
        attribute::HANDLE_TYPES => {
            Said::Value(Value::Word(facts.prop.requested_handle_types.unsigned_abs()))
        }
        attribute::IS_RDMA_CAPABLE => {
            Said::Value(Value::Byte(facts.prop.flags.gpu_direct_rdma_capable))
        }
        attribute::MEMPOOL => Said::Value(Value::Long(0)),
        attribute::MAPPING_SIZE => Said::Value(Value::Long(facts.mapping.size_bytes)),
        attribute::MAPPING_START => Said::Value(Value::Long(facts.mapping.start.0)),
        _ => Said::Unknown,
    }
}

/// Returns the value that plain memory would have, if the driver gives another for the block that stands for it. A block is
/// larger than was requested. The driver knows no context of virtual memory, and cannot share any of it by `cuIpcGetMemHandle`.
/// The values of a cell are corrected too: the driver sees only its slab. So are those of addresses that are a part of a
/// reservation for slabs.
pub fn correction<D: Driver>(
    member: &Member<D>,
    attribute: i32,
    address: DeviceAddress,
) -> Option<Value> {
    let pool = member.pool();
    let seen = || pool.front().seen_at(address);
    match attribute {
        attribute::RANGE_SIZE => {
            let reserved = seen().and_then(|seen| seen.reserved);
            let range = reserved.or_else(|| pool.range_seen(address))?;
            Some(Value::Long(range.size_bytes))
        }
        attribute::RANGE_START => Some(Value::Long(seen()?.reserved?.start.0)),
        attribute::MAPPING_START => Some(Value::Long(seen()?.part?.0.start.0)),
        attribute::MAPPING_SIZE => Some(Value::Long(seen()?.part?.0.size_bytes)),
        // The driver's own number changes with each resume. A caller that stores things by that number would take the memory
        // for another.
        attribute::BUFFER_ID => Some(Value::Long(pool.memory_number(address)?)),
        attribute::IS_LEGACY_IPC_CAPABLE => {
            pool.holdings().block_place(address).map(|_| Value::Byte(1))
        }
        attribute::HANDLE_TYPES => pool.holdings().block_place(address).map(|_| Value::Word(0)),
        attribute::CONTEXT => {
            pool.holdings().block_context(address).map(|context| Value::Long(context.0))
        }
        _ => None,
    }
}

/// Returns the value that the driver would give for memory of a paged region, `range`, as a whole. The driver itself sees
/// chunks.
pub fn of_paged(range: VaRange, attribute: i32) -> Option<Value> {
    match attribute {
        attribute::RANGE_START | attribute::MAPPING_START => Some(Value::Long(range.start.0)),
        attribute::RANGE_SIZE | attribute::MAPPING_SIZE => Some(Value::Long(range.size_bytes)),
        _ => None,
    }
}

/// An address that nobody has.
const NOWHERE: DeviceAddress = DeviceAddress(1);

/// Answers a query about `address`. `driver` answers if it knows the address. `ledger` answers if the memory is away, and
/// `driver` again if `ledger` has no answer. If the caller has nothing there, but we have, `driver` gets an address that nobody
/// has.
#[doc(alias = "cuPointerGetAttribute")]
pub fn ask<D: Driver>(
    member: &Member<D>,
    address: DeviceAddress,
    driver: impl Fn(DeviceAddress) -> DriverCode,
    ledger: impl Fn(&Facts) -> Option<DriverCode>,
) -> DriverCode {
    let pool = member.pool();
    for _ in 0..TRIES_MAX {
        match pool.who_answers(address) {
            Known::Elsewhere => return driver(address),
            Known::Nobody => return driver(NOWHERE),
            Known::Here(sight) => {
                let code = driver(address);
                if pool.holdings().is_as_seen(address, sight) {
                    return code;
                }
            }
            Known::Away(facts) => {
                return ledger(&facts).unwrap_or_else(|| driver(address));
            }
        }
    }
    let _pass = member.gate().pass(Passage::Use);
    driver(address)
}

/// Returns the access right of `place` among those that were set, as `cuMemGetAccess` reports it.
#[doc(alias = "cuMemGetAccess")]
pub fn rights(access: &[AccessDesc], place: Location) -> u64 {
    let given = access.iter().find(|desc| desc.location == place);
    given.map_or(0, |desc| u64::from(desc.flags.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use vmm_pool::driver::{AllocationProp, RawContext};

    use super::*;

    const START: DeviceAddress = DeviceAddress(1 << 21);
    const INSIDE: DeviceAddress = DeviceAddress((1 << 21) + 8);
    const DEVICE: DeviceOrdinal = DeviceOrdinal(3);

    fn facts(block_bytes: Option<u64>) -> Facts {
        Facts {
            mapping: VaRange::new(START, 1 << 21),
            number: 77,
            block_bytes,
            reserved: None,
            prop: AllocationProp::pinned_on(DEVICE),
            access: vec![AccessDesc::read_write(DEVICE)],
            context: block_bytes.map(|_| RawContext(9)),
        }
    }

    #[test]
    fn a_block_that_is_away_is_what_its_caller_asked_for() {
        let said = |attribute| said(&facts(Some(100)), attribute, INSIDE, || Some(DEVICE));
        assert_eq!(said(attribute::CONTEXT), Said::Value(Value::Long(9)));
        assert_eq!(said(attribute::MEMORY_TYPE), Said::Value(Value::Word(TYPE_DEVICE)));
        assert_eq!(said(attribute::DEVICE_POINTER), Said::Value(Value::Long(INSIDE.0)));
        assert_eq!(said(attribute::HOST_POINTER), Said::None(Value::Long(0)));
        assert_eq!(said(attribute::DEVICE_ORDINAL), Said::Value(Value::Word(3)));
        assert_eq!(said(attribute::RANGE_START), Said::Value(Value::Long(START.0)));
        assert_eq!(said(attribute::RANGE_SIZE), Said::Value(Value::Long(100)));
        assert_eq!(said(attribute::IS_LEGACY_IPC_CAPABLE), Said::Value(Value::Byte(1)));
        assert_eq!(said(attribute::HANDLE_TYPES), Said::Value(Value::Word(0)));
        assert_eq!(said(attribute::BUFFER_ID), Said::Value(Value::Long(77)));
        assert_eq!(said(attribute::SYNC_MEMOPS), Said::Value(Value::Byte(0)));
        assert_eq!(said(attribute::ACCESS_FLAGS), Said::Value(Value::Word(3)));
    }

    #[test]
    fn what_only_the_driver_knows_is_not_made_up() {
        let said = |attribute| said(&facts(None), attribute, INSIDE, || None);
        // These attributes are tokens, rights of no device, a number of the driver's own, and an ability of the device.
        for attribute in [5, attribute::ACCESS_FLAGS, 20, 21, 99] {
            assert_eq!(said(attribute), Said::Unknown, "{attribute}");
        }
        for attribute in [attribute::RANGE_START, attribute::RANGE_SIZE] {
            assert_eq!(said(attribute), Said::Reservation, "{attribute}");
        }
    }

    #[test]
    fn memory_that_is_away_in_a_room_lies_in_what_its_caller_was_given() {
        let reserved = Some(VaRange::new(DeviceAddress(1 << 20), 1 << 22));
        let facts = Facts { reserved, ..facts(None) };
        let said = |attribute| said(&facts, attribute, INSIDE, || None);
        assert_eq!(said(attribute::RANGE_START), Said::Value(Value::Long(1 << 20)));
        assert_eq!(said(attribute::RANGE_SIZE), Said::Value(Value::Long(1 << 22)));
        assert_eq!(said(attribute::MAPPING_START), Said::Value(Value::Long(START.0)));
    }

    #[test]
    fn rights_are_those_that_were_set() {
        assert_eq!(rights(&facts(None).access, Location::device(DEVICE)), 3);
        assert_eq!(rights(&facts(None).access, Location::device(DeviceOrdinal(0))), 0);
    }
}
