//! What an address is.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::{DeviceAddress, DriverCode};

use crate::abi::{Coded, In, Out, driver_api};
use crate::sim::{self, Sim};

const MEMORY_TYPE_HOST: u32 = 1;
const MEMORY_TYPE_DEVICE: u32 = 2;

/// The value of an attribute, with the width that the driver gives it.
#[derive(Clone, Copy, Debug)]
enum Value {
    Byte(u8),
    Word(u32),
    Long(u64),
}

impl Value {
    fn put(self, place: Out<u8>) -> Coded<()> {
        match self {
            Self::Byte(value) => place.put(value),
            Self::Word(value) => place.cast().put(value),
            Self::Long(value) => place.cast().put(value),
        }
    }

    /// What an address that the driver does not know reads as.
    fn unknown(attribute: i32) -> Coded<Self> {
        Ok(match attribute {
            2 | 14 => Self::Word(0),
            9 => Self::Word(u32::MAX - 1),
            1 | 3..=5 | 7 | 11 | 12 | 16 | 17 => Self::Long(0),
            6 | 8 | 10 | 13 | 15 => Self::Byte(0),
            _ => return Err(DriverCode::INVALID_VALUE),
        })
    }
}

/// What is known of an address.
#[derive(Clone, Copy, Debug)]
struct Facts {
    memory_type: u32,
    device: i32,
    start: u64,
    size_bytes: u64,
    context: u64,
    ipc_capable: bool,
    mapped: bool,
    handle_types: u32,
}

fn facts(sim: &Sim, address: u64) -> Option<Facts> {
    if let Some(entry) = sim.allocation_at(address) {
        return Some(Facts {
            memory_type: MEMORY_TYPE_DEVICE,
            device: entry.device.0,
            start: entry.range.start.0,
            size_bytes: entry.asked_bytes,
            context: entry.context,
            ipc_capable: entry.origin == crate::allocations::Origin::Plain,
            mapped: true,
            handle_types: 0,
        });
    }
    let unknown = Facts {
        memory_type: MEMORY_TYPE_HOST,
        device: 0,
        start: 0,
        size_bytes: 0,
        context: 0,
        ipc_capable: false,
        mapped: true,
        handle_types: 0,
    };
    if let Some(reservation) = sim.core.reservation_at(DeviceAddress(address)) {
        let mapping = sim.core.mapping_at(DeviceAddress(address));
        let device = mapping.and_then(|entry| entry.prop.location.as_device());
        let types = mapping.map_or(0, |entry| entry.prop.requested_handle_types);
        let is_host = mapping.is_some() && device.is_none();
        return Some(Facts {
            memory_type: if is_host { MEMORY_TYPE_HOST } else { MEMORY_TYPE_DEVICE },
            device: device.map_or(0, |device| device.0),
            start: reservation.start.0,
            size_bytes: reservation.size_bytes,
            mapped: mapping.is_some(),
            handle_types: types.unsigned_abs(),
            ..unknown
        });
    }
    let range = sim.core.host_range_at(address)?;
    Some(Facts { start: range.start.0, size_bytes: range.size_bytes, ..unknown })
}

/// An attribute of memory that the driver knows.
fn value(facts: Facts, attribute: i32, address: u64) -> Coded<Value> {
    Ok(match attribute {
        1 => Value::Long(facts.context),
        2 => Value::Word(facts.memory_type),
        3 => Value::Long(address),
        4 if facts.memory_type == MEMORY_TYPE_HOST => Value::Long(address),
        7 => Value::Long(facts.start >> 12),
        9 => Value::Word(facts.device.unsigned_abs()),
        10 => Value::Byte(u8::from(facts.ipc_capable)),
        11 => Value::Long(facts.start),
        12 => Value::Long(facts.size_bytes),
        13 => Value::Byte(u8::from(facts.mapped)),
        14 => Value::Word(facts.handle_types),
        16 => Value::Long(3),
        6 | 8 | 15 => Value::Byte(0),
        17 => Value::Long(0),
        _ => return Err(DriverCode::INVALID_VALUE),
    })
}

driver_api! {
    fn cuPointerGetAttribute = "cuPointerGetAttribute" since 4000
        (data: Out<u8>, attribute: i32, address: u64)
    {
        let facts = facts(sim::get()?, address).ok_or(DriverCode::INVALID_VALUE)?;
        value(facts, attribute, address)?.put(data)
    }

    fn cuPointerGetAttributes = "cuPointerGetAttributes" since 7000
        (count: u32, attributes: In<i32>, data: In<Out<u8>>, address: u64)
    {
        let sim = sim::get()?;
        let facts = facts(sim, address);
        let places = data.list(u64::from(count))?;
        for (attribute, place) in attributes.list(u64::from(count))?.into_iter().zip(places) {
            let known = facts.and_then(|facts| value(facts, attribute, address).ok());
            known.map_or_else(|| Value::unknown(attribute), Ok)?.put(place)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute = "cuPointerSetAttribute" since 6000
        (_value: In<u8>, attribute: i32, address: u64)
    {
        // Only `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` can be set, and it changes nothing here.
        match facts(sim::get()?, address) {
            Some(_) if attribute == 6 => Ok(()),
            _ => Err(DriverCode::INVALID_VALUE),
        }
    }

    fn cuMemGetAddressRange_v2 = "cuMemGetAddressRange" since 3020
        (start: Out<u64>, bytes: Out<u64>, address: u64)
    {
        let range = sim::get()?.address_range(address)?;
        start.put_if_wanted(range.start.0);
        bytes.put_if_wanted(range.size_bytes);
        Ok(())
    }
}
