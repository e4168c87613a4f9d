//! The functions that query addresses.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use sublet_cuda_driver::Answer;
use sublet_cuda_driver::pointers::{self, Said, Value};
use vmm_pool::Facts;
use vmm_pool::driver::{DeviceAddress, DriverCode, Location};

use super::{Address, SUCCESS, size_t, write_out};
use crate::contexts;
use crate::driver::call_driver;
use crate::runtime::{self, Member, answered};

/// Writes the value of an attribute to the caller's place.
fn write(data: *mut c_void, value: Value) {
    match value {
        // SAFETY: the caller's place for a value of this attribute, checked not to be null.
        Value::Byte(value) => unsafe { data.cast::<u8>().write_unaligned(value) },
        // SAFETY: as above.
        Value::Word(value) => unsafe { data.cast::<u32>().write_unaligned(value) },
        // SAFETY: as above.
        Value::Long(value) => unsafe { data.cast::<u64>().write_unaligned(value) },
    }
}

/// Returns the value of an attribute for memory of a paged region as a whole.
fn of_paged(attribute: c_int, address: DeviceAddress) -> Option<Value> {
    let range = runtime::WINDOWS.range_of(address)?;
    pointers::of_paged(range, attribute)
}

/// Returns the answer about paused memory: for a paged region as a whole, or else from the ledger.
fn said(facts: &Facts, attribute: c_int, address: Address) -> Said {
    if let Some(value) = of_paged(attribute, DeviceAddress(address)) {
        return Said::Value(value);
    }
    pointers::said(facts, attribute, DeviceAddress(address), || contexts::current_device().ok())
}

/// Returns an attribute of a pointer.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    address: Address,
) -> c_int {
    let at = |address: Address| call_driver!(cuPointerGetAttribute(data, attribute, address));
    let driver = || at(address);
    if data.is_null() {
        return driver();
    }
    let asked = |member: &Member| {
        let here = |asked: DeviceAddress| {
            let code = at(asked.0);
            if code == SUCCESS {
                correct(member, data, attribute, asked);
            }
            DriverCode(code)
        };
        let away = |facts: &Facts| match said(facts, attribute, address) {
            Said::Value(value) => {
                write(data, value);
                Some(DriverCode::SUCCESS)
            }
            Said::None(_) => Some(DriverCode::INVALID_VALUE),
            Said::Reservation => {
                DriverCode(driver()).ok().ok()?;
                // SAFETY: the driver has just written an address or a size there.
                let value = unsafe { data.cast::<u64>().read_unaligned() };
                (value != 0).then_some(DriverCode::SUCCESS)
            }
            Said::Unknown => None,
        };
        pointers::ask(member, DeviceAddress(address), here, away)
    };
    answered(runtime::member, |member| answer(asked(member)), driver)
}

/// Returns several attributes of a pointer.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut c_int,
    data: *mut *mut c_void,
    address: Address,
) -> c_int {
    let at =
        |address: Address| call_driver!(cuPointerGetAttributes(count, attributes, data, address));
    let driver = || at(address);
    if attributes.is_null() || data.is_null() || count == 0 {
        return driver();
    }
    // SAFETY: the caller's list of this many attributes.
    let wanted = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    // SAFETY: and of as many places for their values.
    let places = unsafe { std::slice::from_raw_parts(data, count as usize) };
    let asked = |member: &Member| {
        let here = |asked: DeviceAddress| {
            let code = at(asked.0);
            if code == SUCCESS {
                for (place, attribute) in places.iter().zip(wanted) {
                    correct(member, *place, *attribute, asked);
                }
            }
            DriverCode(code)
        };
        let away = |facts: &Facts| {
            if places.iter().any(|place| place.is_null()) {
                return None;
            }
            // For an address without memory, the driver writes what it knows, and zeros.
            DriverCode(driver()).ok().ok()?;
            for (place, attribute) in places.iter().zip(wanted) {
                match said(facts, *attribute, address) {
                    Said::Value(value) | Said::None(value) => write(*place, value),
                    // SAFETY: the driver has just written an address or a size there.
                    Said::Reservation if unsafe { place.cast::<u64>().read_unaligned() } == 0 => {
                        return None;
                    }
                    Said::Reservation | Said::Unknown => {}
                }
            }
            Some(DriverCode::SUCCESS)
        };
        pointers::ask(member, DeviceAddress(address), here, away)
    };
    answered(runtime::member, |member| answer(asked(member)), driver)
}

/// Returns the access rights to an address.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAccess(
    flags: *mut c_ulonglong,
    location: *const Location,
    address: Address,
) -> c_int {
    let at = |address: Address| call_driver!(cuMemGetAccess(flags, location, address));
    let driver = || at(address);
    // SAFETY: the caller's pointer to a structure of this layout, or null.
    let Some(place) = (unsafe { location.as_ref() }).filter(|_| !flags.is_null()) else {
        return driver();
    };
    let asked = |member: &Member| {
        let away = |facts: &Facts| {
            write_out!(flags, pointers::rights(&facts.access, *place));
            Some(DriverCode::SUCCESS)
        };
        // The driver knows the rights of the whole slab.
        let here = |asked: DeviceAddress| {
            let code = at(asked.0);
            let part = member.pool().front().seen_at(asked).and_then(|seen| seen.part);
            if let Some((.., access)) = part.filter(|_| code == SUCCESS) {
                write_out!(flags, pointers::rights(&access, *place));
            }
            DriverCode(code)
        };
        pointers::ask(member, DeviceAddress(address), here, away)
    };
    answered(runtime::member, |member| answer(asked(member)), driver)
}

/// Returns the base and the size of the allocation at an address.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut Address,
    size: *mut usize,
    address: Address,
) -> c_int {
    let at = |address: Address| call_driver!(cuMemGetAddressRange_v2(base, size, address));
    let driver = || at(address);
    let asked = |member: &Member| {
        let known = |asked: DeviceAddress| {
            let paged = runtime::WINDOWS.range_of(asked);
            let found = paged.or_else(|| member.pool().range_seen(asked))?;
            if !base.is_null() {
                write_out!(base, found.start.0);
            }
            if !size.is_null() {
                write_out!(size, size_t(found.size_bytes));
            }
            Some(DriverCode::SUCCESS)
        };
        let here = |asked: DeviceAddress| known(asked).unwrap_or_else(|| DriverCode(at(asked.0)));
        pointers::ask(member, DeviceAddress(address), here, |_| known(DeviceAddress(address)))
    };
    answered(runtime::member, |member| answer(asked(member)), driver)
}

fn answer(code: DriverCode) -> Answer<()> {
    match code {
        DriverCode::SUCCESS => Answer::Done(()),
        code => Answer::Refused(code),
    }
}

/// Corrects the answer about a block or paged memory to the driver's answer about plain memory.
fn correct(member: &Member, data: *mut c_void, attribute: c_int, address: DeviceAddress) {
    let paged = of_paged(attribute, address);
    if let Some(value) = paged.or_else(|| pointers::correction(member, attribute, address))
        && !data.is_null()
    {
        write(data, value);
    }
}
