//! CUDA contexts of the process: devices' primary ones, and those that the application has made for itself, whose work a pause
//! must wait for too.
//!
//! Own ones are listed where they are made, and where the application asks for memory in one that nobody saw the making of: it is
//! older than an attach.

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
/// The number of times that the application retains each device's primary context. Can be negative where it did so
/// before an attach.
static RETAINED_PRIMARIES: Mutex<BTreeMap<c_int, i64>> = Mutex::new(BTreeMap::new());

/// Contexts that were seen, by what a pause does about their work.
#[derive(Debug)]
struct Listed {
    /// It waits for each. With their devices.
    own: BTreeMap<RawContext, DeviceOrdinal>,
    /// The one of a device that ours works in, while it is listed: a change in the middle of a step would leave streams behind.
    chosen: BTreeMap<i32, RawContext>,
    /// A wait for the device's primary context is one for these: that itself, and green contexts.
    covered: BTreeSet<RawContext>,
}

impl Listed {
    const fn new() -> Self {
        Self { own: BTreeMap::new(), chosen: BTreeMap::new(), covered: BTreeSet::new() }
    }
}

/// Contexts that the application has made for itself.
pub(crate) fn own() -> Vec<RawContext> {
    lock(&LISTED).own.keys().copied().collect()
}

/// One of them that is of `device`, the same as long as it lives.
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

/// The application has made a context for itself.
pub(crate) fn own_was_made(context: RawContext, device: DeviceOrdinal) {
    let mut listed = lock(&LISTED);
    listed.covered.remove(&context);
    listed.own.insert(context, device);
}

/// The context as the driver's functions take it.
pub(crate) fn pointer_of(context: RawContext) -> Pointer {
    std::ptr::with_exposed_provenance_mut(usize::try_from(context.0).unwrap_or(0))
}

/// The context that our own threads work in on `device`.
pub(crate) fn of_our_threads(driver: &CudaDriver, device: DeviceOrdinal) -> Option<RawContext> {
    let before = current_context().map_or(std::ptr::null_mut(), pointer_of);
    let ours = driver.make_current(device).ok().and_then(|()| current_context());
    let code = call_driver!(cuCtxSetCurrent(before => Pointer));
    tracing::trace!(code, "the caller's context is current again");
    ours
}

/// The same of the calling thread's current context.
pub(crate) fn own_is_current(context: RawContext) {
    // The driver has just said that it is there.
    own_was_made(context, current_device().unwrap_or(DeviceOrdinal(-1)));
}

/// Takes a context off the list. Its device, if it was there.
pub(crate) fn take_own(context: RawContext) -> Option<DeviceOrdinal> {
    lock(&LISTED).own.remove(&context)
}

/// The calling thread's current context, which is listed where a pause would not wait for its work otherwise.
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

/// Is the current context one of a part of a device? It can be current to one thread only, and must not be taken from it.
#[doc(alias = "cuGreenCtxCreate")]
fn is_current_green() -> bool {
    let (stream, mut green): (Pointer, Pointer) = (std::ptr::null_mut(), std::ptr::null_mut());
    // The null stream stands for the current context. Drivers before 12.4 have neither.
    let code = call_driver!(cuStreamGetGreenCtx(
        stream => Pointer, &raw mut green => *mut Pointer
    ));
    DriverCode(code).ok().is_ok() && !green.is_null()
}

/// The device's primary context, which torch and the CUDA runtime use. Retained at the first need, and never
/// released: memory in it must not end with a release of Sublet's. Two threads may both retain it, once.
pub(crate) fn primary_context(device: c_int) -> Option<Pointer> {
    known_primary(device).or_else(|| {
        let context = retained(device)?;
        lock(&PRIMARY_CONTEXTS).insert(device, context.expose_provenance());
        Some(context)
    })
}

/// The device's primary context, if it was retained here.
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

/// Does `body` with `context` current, and the caller's again afterwards. `None` when it could not be made so.
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

/// The driver's current device of this thread.
pub(crate) fn current_device() -> Result<DeviceOrdinal, DriverCode> {
    let mut device: c_int = 0;
    let code = call_driver!(cuCtxGetDevice(&raw mut device => *mut c_int));
    DriverCode(code).ok().map(|()| DeviceOrdinal(device))
}

/// The driver's current context of this thread.
pub(crate) fn current_context() -> Option<RawContext> {
    let mut context: Pointer = std::ptr::null_mut();
    let code = call_driver!(cuCtxGetCurrent(&raw mut context => *mut Pointer));
    let found = DriverCode(code).ok().ok().map(|()| context)?;
    (!found.is_null()).then(|| RawContext(found.expose_provenance() as u64))
}

/// The device's primary context where it exists already. Makes none, and retains none for good.
pub(crate) fn existing_primary_context(device: c_int) -> Option<Pointer> {
    if !has_primary_context(device) {
        return None;
    }
    known_primary(device).or_else(|| {
        let context = retained(device)?;
        // One of several references, so that this ends nothing.
        let _released = call_driver!(cuDevicePrimaryCtxRelease_v2(device => c_int));
        context.expose_provenance();
        Some(context)
    })
}

/// The application has retained the device's primary context.
pub(crate) fn primary_was_retained(device: c_int) {
    *lock(&RETAINED_PRIMARIES).entry(device).or_default() += 1;
}

/// May the application's next release of it be its last? It is asked where its calls have come by us.
pub(crate) fn primary_may_be_released_last(device: c_int) -> bool {
    lock(&RETAINED_PRIMARIES).get(&device).is_none_or(|count| *count <= 1)
}

/// Gives back our reference to the device's primary context, if there is one.
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

/// The application has released it once.
pub(crate) fn primary_was_released(device: c_int) {
    *lock(&RETAINED_PRIMARIES).entry(device).or_default() -= 1;
}

/// The application has reset it: nobody retains it.
pub(crate) fn primary_was_reset(device: c_int) {
    lock(&LISTED).covered.clear();
    lock(&RETAINED_PRIMARIES).remove(&device);
    lock(&PRIMARY_CONTEXTS).remove(&device);
}

/// True when the device's primary context exists in this process. Makes none.
pub(crate) fn has_primary_context(device: c_int) -> bool {
    let (mut flags, mut is_active): (c_uint, c_int) = (0, 0);
    let code = call_driver!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut is_active => *mut c_int
    ));
    code == DriverCode::SUCCESS.0 && is_active != 0
}
