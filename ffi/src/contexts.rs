//! CUDA contexts of the process: the primary contexts of devices, and contexts that the application has created itself. A pause
//! must wait for the work of both.
//!
//! The application's own contexts are listed when they are created. A context that is older than an attach is listed when the
//! application allocates memory in it.

#![expect(unsafe_code, reason = "calls the driver")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

use vmm_pool::driver::{CudaDriver, DeviceOrdinal, Driver as _, DriverCode, RawContext};
use vmm_pool::sync::lock;

use crate::driver::call_driver;
use sublet_interpose::Pointer;

static LISTED: Mutex<Listed> = Mutex::new(Listed::new());
static PRIMARY_CONTEXTS: Mutex<BTreeMap<c_int, usize>> = Mutex::new(BTreeMap::new());
/// The number of times that the application retains each device's primary context. It can be negative if it did so before an
/// attach.
static RETAINED_PRIMARIES: Mutex<BTreeMap<c_int, i64>> = Mutex::new(BTreeMap::new());

/// The contexts that were seen, by the way in which a pause waits for their work.
#[derive(Debug)]
struct Listed {
    /// The application's own contexts, with their devices. A pause waits for each.
    own: BTreeMap<RawContext, DeviceOrdinal>,
    /// The own context of a device in which Sublet works, while it is listed. A change in the middle of a step would leave
    /// streams behind.
    chosen: BTreeMap<i32, RawContext>,
    /// Contexts for which a wait for the device's primary context suffices: that context itself, and green contexts.
    covered: BTreeSet<RawContext>,
}

impl Listed {
    const fn new() -> Self {
        Self { own: BTreeMap::new(), chosen: BTreeMap::new(), covered: BTreeSet::new() }
    }
}

/// Returns the contexts that the application has created itself.
pub(crate) fn own() -> Vec<RawContext> {
    lock(&LISTED).own.keys().copied().collect()
}

/// Returns one of them on `device`, always the same one as long as it exists.
pub(crate) fn own_of(device: DeviceOrdinal) -> Option<RawContext> {
    let mut listed = lock(&LISTED);
    let chosen = listed.chosen.get(&device.0).filter(|chosen| listed.own.contains_key(chosen));
    if let Some(chosen) = chosen {
        return Some(*chosen);
    }
    let mut of_device = listed.own.iter().filter(|(_, known)| **known == device);
    let first = of_device.next().map(|(context, _)| *context)?;
    listed.chosen.insert(device.0, first);
    Some(first)
}

/// Notes that the application has created a context.
pub(crate) fn own_was_made(context: RawContext, device: DeviceOrdinal) {
    let mut listed = lock(&LISTED);
    listed.covered.remove(&context);
    listed.own.insert(context, device);
}

/// Returns the context as an argument for the driver's functions.
pub(crate) fn pointer_of(context: RawContext) -> Pointer {
    std::ptr::with_exposed_provenance_mut(usize::try_from(context.0).unwrap_or(0))
}

/// Returns the context in which Sublet's own threads work on `device`.
pub(crate) fn of_our_threads(driver: &CudaDriver, device: DeviceOrdinal) -> Option<RawContext> {
    let before = current_context().map_or(std::ptr::null_mut(), pointer_of);
    let ours = driver.make_current(device).ok().and_then(|()| current_context());
    let code = call_driver!(cuCtxSetCurrent(before => Pointer));
    tracing::trace!(code, "the caller's context is current again");
    ours
}

/// Notes the calling thread's current context as one that the application has created.
pub(crate) fn own_is_current(context: RawContext) {
    // The driver has just reported this context, so it exists.
    own_was_made(context, current_device().unwrap_or(DeviceOrdinal(-1)));
}

/// Removes a context from the list. Returns its device, if it was listed.
pub(crate) fn take_own(context: RawContext) -> Option<DeviceOrdinal> {
    lock(&LISTED).own.remove(&context)
}

/// Returns the calling thread's current context. Lists it if a pause would not wait for its work otherwise.
pub(crate) fn listed_current() -> Option<RawContext> {
    let context = current_context()?;
    let is_known = || {
        let listed = lock(&LISTED);
        listed.own.contains_key(&context) || listed.covered.contains(&context)
    };
    if !is_known() {
        let is_covered = is_primary(context) || is_current_green();
        if is_covered {
            lock(&LISTED).covered.insert(context);
        } else {
            own_is_current(context);
        }
    }
    Some(context)
}

/// Is the current context the primary one of its device?
fn is_primary(current: RawContext) -> bool {
    let primary = current_device().ok().and_then(|device| existing_primary_context(device.0));
    primary.is_some_and(|primary| primary.addr() as u64 == current.0)
}

/// Is the current context a green context, of a part of a device? It can be current on one thread only, and must not be removed
/// from that thread.
#[doc(alias = "cuGreenCtxCreate")]
fn is_current_green() -> bool {
    let (stream, mut green): (Pointer, Pointer) = (std::ptr::null_mut(), std::ptr::null_mut());
    // The null stream stands for the current context. Drivers before 12.4 have neither the function nor such contexts.
    let code = call_driver!(cuStreamGetGreenCtx(
        stream => Pointer, &raw mut green => *mut Pointer
    ));
    DriverCode(code).ok().is_ok() && !green.is_null()
}

/// Returns the device's primary context, which torch and the CUDA runtime use. It is retained at the first need, and never
/// released: its memory must not end with a release by Sublet. Two threads may both retain it, once each.
pub(crate) fn primary_context(device: c_int) -> Option<Pointer> {
    known_primary(device).or_else(|| {
        let context = retained(device)?;
        lock(&PRIMARY_CONTEXTS).insert(device, context.expose_provenance());
        Some(context)
    })
}

/// Returns the device's primary context, if it was retained here.
fn known_primary(device: c_int) -> Option<Pointer> {
    let known = lock(&PRIMARY_CONTEXTS).get(&device).copied();
    known.map(std::ptr::with_exposed_provenance_mut)
}

fn retained(device: c_int) -> Option<Pointer> {
    let mut context: Pointer = std::ptr::null_mut();
    let place = &raw mut context;
    let code = call_driver!(cuDevicePrimaryCtxRetain(place => *mut Pointer, device => c_int));
    DriverCode(code).ok().ok().map(|()| context)
}

/// Runs `body` with `context` current, and restores the caller's context afterwards. `None` if `context` could not be made
/// current.
pub(crate) fn with_current<T>(context: Pointer, body: impl FnOnce() -> T) -> Option<T> {
    DriverCode(call_driver!(cuCtxPushCurrent_v2(context => Pointer))).ok().ok()?;
    let done = body();
    let mut popped: Pointer = std::ptr::null_mut();
    let code = DriverCode(call_driver!(cuCtxPopCurrent_v2(&raw mut popped => *mut Pointer)));
    if code != DriverCode::SUCCESS {
        tracing::error!(?code, "a context that was pushed could not be popped");
    }
    Some(done)
}

/// Returns this thread's current device of the driver.
pub(crate) fn current_device() -> Result<DeviceOrdinal, DriverCode> {
    let mut device: c_int = 0;
    let code = call_driver!(cuCtxGetDevice(&raw mut device => *mut c_int));
    DriverCode(code).ok().map(|()| DeviceOrdinal(device))
}

/// Returns this thread's current context of the driver.
pub(crate) fn current_context() -> Option<RawContext> {
    let mut context: Pointer = std::ptr::null_mut();
    let code = call_driver!(cuCtxGetCurrent(&raw mut context => *mut Pointer));
    let found = DriverCode(code).ok().ok().map(|()| context)?;
    (!found.is_null()).then(|| RawContext(found.expose_provenance() as u64))
}

/// Returns the device's primary context if it exists already. Creates none, and keeps no reference.
pub(crate) fn existing_primary_context(device: c_int) -> Option<Pointer> {
    if !has_primary_context(device) {
        return None;
    }
    known_primary(device).or_else(|| {
        let context = retained(device)?;
        // This is one of several references, so its release ends nothing.
        let _released = call_driver!(cuDevicePrimaryCtxRelease_v2(device => c_int));
        context.expose_provenance();
        Some(context)
    })
}

/// Notes that the application has retained the device's primary context.
pub(crate) fn primary_was_retained(device: c_int) {
    *lock(&RETAINED_PRIMARIES).entry(device).or_default() += 1;
}

/// May the application's next release of the primary context be its last? It counts the calls that Sublet has seen.
pub(crate) fn primary_may_be_released_last(device: c_int) -> bool {
    lock(&RETAINED_PRIMARIES).get(&device).is_none_or(|count| *count <= 1)
}

/// Releases Sublet's reference to the device's primary context, if there is one.
pub(crate) fn let_primary_context_go(device: c_int) {
    lock(&LISTED).covered.clear();
    let known = lock(&PRIMARY_CONTEXTS).remove(&device);
    if known.is_some() {
        let code = call_driver!(cuDevicePrimaryCtxRelease_v2(device => c_int));
        tracing::debug!(
            device,
            code,
            "a primary context is given back with the application's last"
        );
    }
}

/// Notes that the application has released the primary context once.
pub(crate) fn primary_was_released(device: c_int) {
    *lock(&RETAINED_PRIMARIES).entry(device).or_default() -= 1;
}

/// Notes that the application has reset the primary context: all references are gone.
pub(crate) fn primary_was_reset(device: c_int) {
    lock(&LISTED).covered.clear();
    lock(&RETAINED_PRIMARIES).remove(&device);
    lock(&PRIMARY_CONTEXTS).remove(&device);
}

/// Does the device's primary context exist in this process? Creates none.
pub(crate) fn has_primary_context(device: c_int) -> bool {
    let (mut flags, mut is_active): (c_uint, c_int) = (0, 0);
    let code = call_driver!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut is_active => *mut c_int
    ));
    code == DriverCode::SUCCESS.0 && is_active != 0
}
