//! Contexts: the work that a pause waits for, the memory that ends with a context, and peer access.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint};
use std::time::Duration;

use sublet_cuda_driver::blocks::{self, Ending};
use sublet_turns::Newcomer;
use tenants::cut::Cut;
use vmm_pool::Waited;
use vmm_pool::driver::{CudaDriver, DeviceOrdinal, DriverCode, RawContext};
use vmm_pool::gate::Gate;

use super::SUCCESS;
use crate::contexts;
use crate::driver::call_driver;
use crate::look;
use crate::runtime::{self, Member};
use sublet_interpose::Pointer;

/// The longest time for which the end of a context waits until Sublet's waits there have ended.
const WAITS_BEFORE_END: Duration = Duration::from_secs(10);

/// Returns the device of a context.
pub(super) fn device_of(context: Pointer) -> Option<DeviceOrdinal> {
    contexts::with_current(context, || contexts::current_device().ok()).flatten()
}

/// Creates a context with `make`. If `device` is full and the process takes part in turns, waits until others have freed memory.
fn in_room(device: c_int, mut make: impl FnMut() -> c_int) -> c_int {
    let full = DriverCode::OUT_OF_MEMORY.0;
    let mut code = make();
    // A thread in one of these states must not wait: it would hold up others.
    if code != full
        || Gate::is_inside()
        || Cut::is_inside()
        || runtime::CAPTURES.counts().under_way() > 0
    {
        return code;
    }
    let Some((run_dir, tenant, gpu, wait)) = runtime::newcomer(DeviceOrdinal(device)) else {
        return code;
    };
    let checkpointer = runtime::checkpointer();
    let newcomer = Newcomer { run_dir: &run_dir, tenant: &tenant, gpu, wait, checkpointer };
    let made = newcomer.with_room(|| {
        code = make();
        code != full
    });
    if let Err(why) = made {
        tracing::warn!(%tenant, "a context was refused for lack of device memory: {why}");
    }
    code
}

macro_rules! create_context {
    ($symbol:ident ( $($arg:ident : $ty:ty),*; $device:ident )) => {
        /// Creates a context of the application's own. A pause must wait for its work too.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(
            context: *mut Pointer,
            $($arg: $ty,)*
            $device: c_int,
        ) -> c_int {
            let code = in_room($device, || {
                call_driver!($symbol(context, $($arg,)* $device))
            });
            if code == SUCCESS && !context.is_null() {
                // SAFETY: the caller's out-pointer, which the driver has just written.
                let made = RawContext(unsafe { context.read() }.expose_provenance() as u64);
                contexts::own_is_current(made);
            }
            code
        }
    };
}

create_context!(cuCtxCreate(flags: c_uint; device));
create_context!(cuCtxCreate_v2(flags: c_uint; device));
create_context!(cuCtxCreate_v3(affinity: Pointer, count: c_int, flags: c_uint; device));
create_context!(cuCtxCreate_v4(parameters: Pointer, flags: c_uint; device));

/// Takes the memory that ends with `context`. The context's value is forgotten before the driver ends it, because another context
/// may get the same value immediately. `prepare` is called once no pause can begin, with or without a tenant.
fn ending(
    context: RawContext,
    prepare: impl FnOnce(Option<&Member>),
) -> Option<Ending<'static, CudaDriver>> {
    let Some(member) = runtime::member().filter(|_| !runtime::is_leaving()) else {
        prepare(None);
        return None;
    };
    Some(blocks::ending(member, context, || prepare(Some(member))))
}

/// Notes that the driver has ended the context, with its code and its captures.
fn has_ended(ending: Ending<'static, CudaDriver>) {
    look::forget_functions();
    runtime::CAPTURES.context_ended(ending.context());
    ending.ended();
}

/// Waits until Sublet's waits in a context have ended. The driver ends a context even if it is used, which its documentation
/// forbids. A pause that was called off may have left a wait there.
fn let_waits_end(member: &Member, place: Waited) {
    if !member.pool().waits().let_place_end(place, WAITS_BEFORE_END) {
        let seconds = WAITS_BEFORE_END.as_secs();
        tracing::warn!(%place, seconds, "it is ended while its work is waited for: that work has not ended");
    }
}

/// Ends a context of the application's own with `end`. `is_over` says whether that call ends the context.
fn end_own(context: Pointer, end: impl FnOnce() -> c_int, is_over: impl FnOnce() -> bool) -> c_int {
    let raw = RawContext(context.addr() as u64);
    let mut was_own = None;
    let ending = ending(raw, |member| {
        was_own = contexts::take_own(raw);
        if let Some(member) = member.filter(|_| was_own.is_some()) {
            let_waits_end(member, Waited::OwnContext(raw));
        }
    });
    let code = end();
    if code == SUCCESS && is_over() {
        if let Some(member) = runtime::member() {
            member.pool().driver().own_context_ended(raw);
        }
        if let Some(ending) = ending {
            has_ended(ending);
        }
    } else if let Some(device) = was_own {
        contexts::own_was_made(raw, device);
    }
    code
}

macro_rules! destroy_context {
    ($symbol:ident) => {
        /// Ends a context of the application's own, with its plain memory.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(context: Pointer) -> c_int {
            end_own(context, || call_driver!($symbol(context)), || true)
        }
    };
}

destroy_context!(cuCtxDestroy);
destroy_context!(cuCtxDestroy_v2);

/// Releases one reference of a context. The context ends with the last reference.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDetach(context: Pointer) -> c_int {
    let is_over = || {
        let mut version: c_uint = 0;
        let place = &raw mut version;
        call_driver!(cuCtxGetApiVersion(context => Pointer, place => *mut c_uint)) != SUCCESS
    };
    end_own(context, || call_driver!(cuCtxDetach(context)), is_over)
}

/// Retains a device's primary context.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: c_int) -> c_int {
    let code = in_room(device, || call_driver!(cuDevicePrimaryCtxRetain(context, device)));
    if code == SUCCESS {
        contexts::primary_was_retained(device);
    }
    code
}

/// Takes the plain memory of the primary context of `device`, if the context exists.
fn ending_primary(device: c_int) -> Option<Ending<'static, CudaDriver>> {
    let context = runtime::member().and_then(|_| contexts::existing_primary_context(device))?;
    ending(RawContext(context.addr() as u64), |member| {
        if let Some(member) = member {
            let_waits_end(member, Waited::Device(DeviceOrdinal(device)));
        }
    })
}

macro_rules! release_primary {
    ($symbol:ident) => {
        /// Releases one reference of a device's primary context. With the last reference, the context and its plain memory end.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(device: c_int) -> c_int {
            let may_be_last = contexts::primary_may_be_released_last(device);
            let ending = may_be_last.then(|| ending_primary(device)).flatten();
            let code = call_driver!($symbol(device));
            if code == SUCCESS {
                contexts::primary_was_released(device);
                if let Some(ending) = ending
                    && is_over_without_us(device)
                {
                    has_ended(ending);
                }
            }
            code
        }
    };
}

release_primary!(cuDevicePrimaryCtxRelease);
release_primary!(cuDevicePrimaryCtxRelease_v2);

/// Releases Sublet's own references to the primary context of `device`. Returns whether they were the last. Otherwise Sublet
/// retains the context again at its next need.
fn is_over_without_us(device: c_int) -> bool {
    if let Some(member) = runtime::member() {
        let given_back = member.pool().driver().let_primary_context_go(DeviceOrdinal(device));
        if let Err(error) = given_back {
            tracing::warn!(%error, device, "a primary context that the application gave back stays");
        }
    }
    contexts::let_primary_context_go(device);
    !contexts::has_primary_context(device)
}

macro_rules! reset_primary {
    ($symbol:ident) => {
        /// Ends a device's primary context, with its plain memory, even if others retain it.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(device: c_int) -> c_int {
            let ending = ending_primary(device);
            let code = call_driver!($symbol(device));
            if code == SUCCESS {
                contexts::primary_was_reset(device);
                if let Some(member) = runtime::member() {
                    member.pool().driver().primary_context_was_reset(DeviceOrdinal(device));
                }
                if let Some(ending) = ending {
                    has_ended(ending);
                }
            }
            code
        }
    };
}

reset_primary!(cuDevicePrimaryCtxReset);
reset_primary!(cuDevicePrimaryCtxReset_v2);

/// Notes that `accessor` may reach plain memory of `owner`, and opens the existing memory for it.
pub(crate) fn may_reach(owner: DeviceOrdinal, accessor: DeviceOrdinal) {
    runtime::ACCESSORS.record(owner, accessor);
    let opened =
        runtime::member().map_or(Ok(()), |member| runtime::ACCESSORS.open(member, owner, accessor));
    if let Err(error) = opened {
        tracing::error!(%error, %owner, %accessor, "peer access is incomplete");
    }
}

/// Gives the current context access to another's plain memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(peer: Pointer, flags: c_uint) -> c_int {
    let code = call_driver!(cuCtxEnablePeerAccess(peer, flags));
    if code == SUCCESS
        && let (Ok(accessor), Some(owner)) = (contexts::current_device(), device_of(peer))
    {
        may_reach(owner, accessor);
    }
    code
}

/// Removes the current context's access to another's plain memory.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDisablePeerAccess(peer: Pointer) -> c_int {
    let code = call_driver!(cuCtxDisablePeerAccess(peer));
    if code == SUCCESS
        && let (Ok(accessor), Some(owner)) = (contexts::current_device(), device_of(peer))
    {
        runtime::ACCESSORS.disable(owner, accessor);
    }
    code
}
