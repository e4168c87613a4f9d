//! Addresses whose contents are on the device for a part of the time.

#![expect(unsafe_code, reason = "exports the C interface")]

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::time::Duration;

use sublet_pager::{PageError, PageResult, Pager, WindowSize};
use tenants::error_text::chain;
use vmm_pool::PoolError;
use vmm_pool::driver::{CudaDriver, DeviceAddress, DeviceOrdinal, DriverCode};

use super::regions::tag_of;
use super::stats::answer;
use crate::last_call::{
    ARGUMENT, OK, OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY, REFUSED, RETRY, answered, fail,
    guarded, not_joined,
};
use crate::{contexts, environment, look, runtime};

fn code_of(error: &PageError) -> c_int {
    match error {
        PageError::TooFewFrames { .. }
        | PageError::WindowFull { .. }
        | PageError::UnfitChunk { .. }
        | PageError::NoBytes
        | PageError::NotPaged { .. } => ARGUMENT,
        PageError::Late { .. } | PageError::NoThread(_) => RETRY,
        PageError::Shared(error) => code_of(error),
        PageError::Pool(PoolError::OverBudget { .. } | PoolError::OutOfDeviceMemory { .. }) => {
            OUT_OF_DEVICE_MEMORY
        }
        PageError::OutOfHostMemory { .. }
        | PageError::Pool(PoolError::HostMemoryRefused { .. }) => OUT_OF_HOST_MEMORY,
        PageError::Pool(PoolError::Driver { source, .. })
            if source.code == DriverCode::OUT_OF_MEMORY =>
        {
            OUT_OF_DEVICE_MEMORY
        }
        PageError::Ended { .. } | PageError::Pool(_) => REFUSED,
    }
}

fn done(result: PageResult<()>) -> c_int {
    match result {
        Ok(()) => OK,
        Err(error) => fail(code_of(&error), &chain(&error)),
    }
}

fn pager_of(number: u64) -> Result<Arc<Pager<CudaDriver>>, c_int> {
    runtime::WINDOWS
        .pager(number)
        .ok_or_else(|| fail(ARGUMENT, &format!("{number} is no pager: open one first")))
}

/// Calls `work` with the pager of this number.
fn with(number: u64, work: impl FnOnce(Arc<Pager<CudaDriver>>) -> c_int) -> c_int {
    guarded(|| match runtime::member() {
        Some(_) => pager_of(number).map_or_else(|code| code, work),
        None => not_joined(),
    })
}

/// Calls `work` with the pager of this number and `count` spans.
///
/// # Safety
/// `spans` is valid for reads of `count` addresses, or `count` is 0.
unsafe fn with_spans(
    number: u64,
    spans: *const u64,
    count: usize,
    work: impl FnOnce(&Pager<CudaDriver>, &[DeviceAddress]) -> PageResult<()>,
) -> c_int {
    with(number, |pager| {
        let mut given = Vec::new();
        if !spans.is_null() && count > 0 {
            // SAFETY: as this function's caller promises.
            let spans = unsafe { std::slice::from_raw_parts(spans, count) };
            given.extend(spans.iter().copied().map(DeviceAddress));
        }
        done(work(&pager, &given))
    })
}

/// Opens a window on a device.
///
/// # Safety
/// `pager` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_open(
    device: c_int,
    window_bytes: u64,
    chunk_bytes: u64,
    frames_bytes: u64,
    pager: *mut u64,
) -> c_int {
    guarded(|| {
        let Some(member) = runtime::join() else { return not_joined() };
        if pager.is_null() || device < 0 {
            return fail(ARGUMENT, "paging needs a device, and a place for the pager's number");
        }
        if !look::is_possible() {
            return fail(
                REFUSED,
                "this driver does not describe the parameters of kernels, which paging needs: install one for CUDA 12.4 or \
                 newer",
            );
        }
        let size = WindowSize { window_bytes, chunk_bytes, frames_bytes };
        let pool = Arc::clone(member.pool());
        let made = Pager::new(pool, DeviceOrdinal(device), size, member.host_budget());
        done(made.map(|made| {
            if environment::at_joining().settings.checks_paging {
                made.check_writes();
            }
            let context = contexts::of_our_threads(member.pool().driver(), made.device());
            let number = runtime::WINDOWS.open(made, context, look::at);
            // SAFETY: checked not to be null; the caller's for one number.
            unsafe { pager.write(number) };
        }))
    })
}

/// Closes a window.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_page_close(pager: u64) -> c_int {
    with(pager, |found| {
        drop(found);
        answered(runtime::WINDOWS.close(pager, look::at).map(drop))
    })
}

/// Allocates a span of addresses.
///
/// # Safety
/// `span` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_alloc(pager: u64, size_bytes: u64, span: *mut u64) -> c_int {
    with(pager, |pager| {
        if span.is_null() {
            return fail(ARGUMENT, "sublet_page_alloc needs a place for the address");
        }
        done(pager.alloc(size_bytes).map(|start| {
            // SAFETY: checked not to be null; the caller's for one address.
            unsafe { span.write(start.0) };
        }))
    })
}

/// Pages the memory of a region.
///
/// # Safety
/// `tag` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_region(pager: u64, tag: *const c_char) -> c_int {
    with(pager, |_| {
        // SAFETY: as this function's caller promises.
        let tag = unsafe { tag_of(tag) };
        tag.map_or_else(|code| code, |tag| answered(runtime::WINDOWS.page(pager, tag)))
    })
}

/// Frees a span of addresses.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_page_free(pager: u64, span: u64) -> c_int {
    with(pager, |pager| done(pager.free(DeviceAddress(span))))
}

/// Maps spans, and keeps them mapped.
///
/// # Safety
/// `spans` is valid for reads of `count` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_acquire(
    pager: u64,
    spans: *const u64,
    count: usize,
    timeout_ms: u32,
) -> c_int {
    let limit = Duration::from_millis(timeout_ms.into());
    // SAFETY: as this function's caller promises.
    unsafe {
        with_spans(pager, spans, count, |it, spans| {
            let ranges: Vec<_> = spans.iter().filter_map(|span| it.span_at(*span)).collect();
            look::with_room(it, &ranges, || it.acquire(spans, limit))
        })
    }
}

/// Releases spans: they may leave the device again.
///
/// # Safety
/// `spans` is valid for reads of `count` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_release(pager: u64, spans: *const u64, count: usize) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { with_spans(pager, spans, count, Pager::release) }
}

/// Announces the spans that are used next.
///
/// # Safety
/// `spans` is valid for reads of `count` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_announce(
    pager: u64,
    spans: *const u64,
    count: usize,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { with_spans(pager, spans, count, Pager::announce) }
}

/// Waits until the host has all written contents.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_page_flush(pager: u64, timeout_ms: u32) -> c_int {
    with(pager, |pager| done(pager.flush(Duration::from_millis(timeout_ms.into()))))
}

/// Sets how many bytes may be on the device.
#[unsafe(no_mangle)]
pub extern "C" fn sublet_page_set_frames(pager: u64, frames_bytes: u64, timeout_ms: u32) -> c_int {
    let limit = Duration::from_millis(timeout_ms.into());
    with(pager, |pager| done(pager.set_frames(frames_bytes, limit)))
}

/// Writes the transfers of a step with other frames, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_plan_json(
    pager: u64,
    buffer: *mut c_char,
    size: usize,
) -> i64 {
    // SAFETY: as this function's caller promises.
    unsafe { answer(|| pager_of(pager).map(|found| found.plan()), buffer, size) }
}

/// Writes the state and the figures of a pager, as JSON.
///
/// # Safety
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_page_json(pager: u64, buffer: *mut c_char, size: usize) -> i64 {
    // SAFETY: as this function's caller promises.
    unsafe { answer(|| pager_of(pager).map(|found| found.report()), buffer, size) }
}
