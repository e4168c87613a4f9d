//! Copies of plain memory that the driver refuses because Sublet's plain memory is virtual.
//!
//! The driver copies memory of `cuMemAlloc` between any two devices, whatever context is current. Sublet's memory is mapped. The
//! driver copies mapped memory only if the current context's device may reach it (driver 580). So devices are first given access
//! to each other's memory. If the machine does not connect them, the copy is made in the contexts of the memory.

#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_int, c_uint, c_void};

use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode, VaRange};

use super::refusals::{away_in, refuse};
use super::{Address, STREAM_PER_THREAD, SUCCESS, look_at};
use crate::contexts::{self, pointer_of, with_current};
use crate::driver::call_driver;
use crate::look::Names;
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL` and `CU_MEMORYTYPE_DEVICE`.
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const TYPE_DEVICE: c_uint = 2;

/// A copy from one address to another that the driver has refused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) target: u64,
    pub(crate) source: u64,
    pub(crate) bytes: usize,
    /// The stream, if the copy is asynchronous.
    pub(crate) stream: Option<Pointer>,
    /// Is 0 the thread's own stream?
    pub(crate) is_per_thread: bool,
}

/// Is the driver's function `symbol` a copy?
pub(crate) const fn is_copy(symbol: &str) -> bool {
    matches!(symbol.as_bytes(), [b'c', b'u', b'M', b'e', b'm', b'c', b'p', b'y', ..])
}

/// Is `code` the driver's refusal of a copy of memory that the current context cannot reach?
pub(crate) fn is_refused(code: c_int) -> bool {
    DriverCode(code) == DriverCode::INVALID_VALUE
}

/// Gives devices access to each other's plain memory, which copies rely on. Returns true if a device had less access before.
pub(crate) fn opens_blocks() -> bool {
    runtime::member().is_some_and(|member| {
        runtime::ACCESSORS.open_for_copies(member, contexts::current_device().ok())
    })
}

/// Returns the device of memory, and a context of that device; none for host memory.
fn place_of(member: &Member, address: u64) -> Option<(DeviceOrdinal, Pointer)> {
    let block = member.pool().holdings().block_place(DeviceAddress(address));
    let (device, context) = match block {
        Some((device, context)) => (device, context.map(pointer_of)),
        None => (device_of_native(address)?, None),
    };
    Some((device, context.or_else(|| contexts::primary_context(device.0))?))
}

fn device_of_native(address: Address) -> Option<DeviceOrdinal> {
    let mut kind: c_uint = 0;
    let mut device: c_int = 0;
    let asked = [
        (MEMORY_TYPE, (&raw mut kind).cast::<c_void>()),
        (DEVICE_ORDINAL, (&raw mut device).cast::<c_void>()),
    ];
    let is_known = asked.iter().all(|(attribute, place)| {
        let code = call_driver!(cuPointerGetAttribute(
            *place => *mut c_void, *attribute => c_int, address => Address
        ));
        code == SUCCESS
    });
    (is_known && kind == TYPE_DEVICE).then_some(DeviceOrdinal(device))
}

/// Makes a copy that was refused with the code `refused`, in the contexts of the memory; `again` repeats the original call. A
/// copy of other memory than Sublet's plain memory stays refused.
pub(crate) fn copy_in_place(copy: Refused, refused: c_int, again: impl Fn() -> c_int) -> c_int {
    let Some(member) = runtime::member() else {
        return refused;
    };
    let sides = [copy.target, copy.source];
    let is_ours = |address: &u64| {
        let address = DeviceAddress(*address);
        let is_paged = runtime::WINDOWS.range_of(address).is_some();
        is_paged || member.pool().holdings().block_place(address).is_some()
    };
    if !sides.iter().any(is_ours) {
        return refused;
    }
    let ranges = sides.map(|start| VaRange::new(DeviceAddress(start), copy.bytes as u64));
    // Paged memory stays on the device until the driver has this copy.
    let stream = match copy.stream.unwrap_or_default() {
        null if null.is_null() && copy.is_per_thread => {
            std::ptr::with_exposed_provenance_mut(STREAM_PER_THREAD)
        }
        stream => stream,
    };
    let _seen = match look_at("a copy between devices", Names::Ranges(&ranges), stream) {
        Ok(seen) => seen,
        Err(code) => return code,
    };
    let pass = member.pool().pass_touching("a copy between devices", &ranges);
    if let Some(away) = away_in(member, Names::Ranges(&ranges), stream.addr()) {
        drop(pass);
        return refuse(member, "a copy between devices", &away);
    }
    match sides.map(|address| place_of(member, address)) {
        [Some((to, to_context)), Some((from, from_context))] if to != from => {
            copy_between(copy, to_context, from_context)
        }
        [Some((_, context)), _] | [None, Some((_, context))] => {
            with_current(context, again).unwrap_or(refused)
        }
        [None, None] => refused,
    }
}

/// Copies from the memory of one context to that of another. The driver copies through the host if it must.
fn copy_between(copy: Refused, to: Pointer, from: Pointer) -> c_int {
    let Refused { target, source, bytes, stream, is_per_thread } = copy;
    match (stream, is_per_thread) {
        (None, false) => call_driver!(cuMemcpyPeer(
            target => u64, to => Pointer, source => u64, from => Pointer, bytes => usize
        )),
        (None, true) => call_driver!(cuMemcpyPeer_ptds(
            target => u64, to => Pointer, source => u64, from => Pointer, bytes => usize
        )),
        (Some(stream), false) => call_driver!(cuMemcpyPeerAsync(
            target => u64, to => Pointer, source => u64, from => Pointer, bytes => usize,
            stream => Pointer
        )),
        (Some(stream), true) => call_driver!(cuMemcpyPeerAsync_ptsz(
            target => u64, to => Pointer, source => u64, from => Pointer, bytes => usize,
            stream => Pointer
        )),
    }
}
