//! The driver's own functions, past ours; and which address of the driver's is exchanged for which of ours.
//!
//! The driver is asked as the caller asked, and its answer is exchanged when it is the address of a function that
//! we stand in for: names, versions and flags stay the driver's own rules.

#![expect(unsafe_code, reason = "asks the driver for its functions by name")]

use std::ffi::{CStr, CString, c_char, c_int, c_ulonglong, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use sublet_cuda_driver::lookup::{Exchange, FLAG_LEGACY, FLAG_PER_THREAD, Hook};
use vmm_pool::driver::DriverCode;

use super::{Pointer, loader};

/// The file name under which the driver is found.
pub(super) const FILE: &CStr = c"libcuda.so.1";

/// The process's driver. It is never brought into the process from here: that is the application's to do, and libraries ask
/// whether somebody has.
fn handle() -> Option<Pointer> {
    static DRIVER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let known = DRIVER.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    let opened = loader::open_loaded(FILE)?;
    DRIVER.store(opened, Ordering::Release);
    Some(opened)
}

/// The driver's own function of this exact name; `None` while the driver is not in the process.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    loader::dlsym(handle()?, name)
}

/// Is the driver in the process? Opens nothing.
pub(crate) fn is_loaded() -> bool {
    loader::is_loaded(FILE)
}

/// A function of the driver's, looked up when it is first called.
#[derive(Debug)]
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicUsize,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    /// The function's address; `None` where the driver has none of that name, or there is no driver.
    #[inline]
    pub(crate) fn address(&self) -> Option<Pointer> {
        let known = self.address.load(Ordering::Relaxed);
        if known == 0 { self.look_up() } else { Some(std::ptr::with_exposed_provenance_mut(known)) }
    }

    #[cold]
    fn look_up(&self) -> Option<Pointer> {
        let found = symbol(self.name)?.as_ptr();
        self.address.store(found.expose_provenance(), Ordering::Relaxed);
        Some(found)
    }
}

/// A C string of an identifier.
macro_rules! c_name {
    ($symbol:ident) => {
        match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => c"",
        }
    };
}
pub(crate) use c_name;

/// Calls the driver's own function `$symbol`, or returns that the driver is not initialised. Without types of the arguments, they are those
/// of the function of this name in scope, which stands in for the driver's.
macro_rules! call_driver {
    ($symbol:ident ( $($value:expr),+ $(,)? )) => {{
        static REAL: $crate::interpose::driver::Real = $crate::interpose::driver::Real::new(
            $crate::interpose::driver::c_name!($symbol),
        );
        match REAL.address() {
            Some(address) => {
                let ours: unsafe extern "C" fn($($crate::interpose::any!($value)),+) -> ::std::ffi::c_int = $symbol;
                // SAFETY: the address is the driver's function of this name, whose signature ours has.
                let own = unsafe { $crate::interpose::alike(ours, address) };
                // SAFETY: the arguments are the caller's own, or ours under the rules of the function.
                unsafe { own($($value),+) }
            }
            None => ::vmm_pool::driver::DriverCode::NOT_INITIALIZED.0,
        }
    }};
    ($symbol:ident ( $($value:expr => $ty:ty),* $(,)? )) => {{
        static REAL: $crate::interpose::driver::Real = $crate::interpose::driver::Real::new(
            $crate::interpose::driver::c_name!($symbol),
        );
        match REAL.address() {
            Some(address) => {
                // SAFETY: the address is the driver's function of this name, whose signature is this.
                let function = unsafe {
                    ::std::mem::transmute::<
                        *mut ::std::ffi::c_void,
                        unsafe extern "C" fn($($ty),*) -> ::std::ffi::c_int,
                    >(address)
                };
                // SAFETY: the arguments are the caller's own, or ours under the rules of the function.
                unsafe { function($($value),*) }
            }
            None => ::vmm_pool::driver::DriverCode::NOT_INITIALIZED.0,
        }
    }};
}
pub(crate) use call_driver;

/// `cuGetProcAddress_v2`.
type GetProcAddressV2 =
    unsafe extern "C" fn(*const c_char, *mut Pointer, c_int, c_ulonglong, *mut c_int) -> c_int;

/// The driver's own `cuGetProcAddress_v2`, where it has one (12.0 and newer).
fn get_proc_address_v2() -> Option<GetProcAddressV2> {
    static REAL: Real = Real::new(c"cuGetProcAddress_v2");
    let address = REAL.address()?;
    // SAFETY: the address is the driver's function of this name, whose signature is this.
    Some(unsafe { std::mem::transmute::<Pointer, GetProcAddressV2>(address) })
}

/// The driver's functions that we stand in for.
#[derive(Debug)]
pub(crate) struct Driver {
    hooks: &'static [&'static [Hook]],
    /// Made when it is first needed, and never freed or changed.
    exchange: AtomicPtr<Exchange>,
}

impl Driver {
    /// Those of all tables of `hooks`.
    pub(crate) const fn new(hooks: &'static [&'static [Hook]]) -> Self {
        Self { hooks, exchange: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Every function that we stand in for.
    pub(crate) fn hooks(&self) -> impl Iterator<Item = &'static Hook> {
        self.hooks.iter().copied().flatten()
    }

    /// The addresses to exchange, when they are known already. Calls neither the driver nor the loader.
    pub(crate) fn known_exchange(&self) -> Option<&'static Exchange> {
        // SAFETY: a non-null value was leaked from a box in `exchange` and is never freed or changed.
        unsafe { self.exchange.load(Ordering::Acquire).as_ref() }
    }

    /// The addresses to exchange. Built without a lock, since callers may hold the loader's: two threads may
    /// both build it, and one copy is then dropped.
    pub(crate) fn exchange(&self) -> Option<&'static Exchange> {
        let known = self.known_exchange();
        if known.is_some() {
            return known;
        }
        let built = Box::into_raw(Box::new(self.build()?));
        let null = std::ptr::null_mut();
        match self.exchange.compare_exchange(null, built, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the box was leaked for good.
            Ok(_) => unsafe { built.as_ref() },
            Err(first) => {
                // SAFETY: nobody else has seen this box.
                drop(unsafe { Box::from_raw(built) });
                // SAFETY: another thread leaked this one for good.
                unsafe { first.as_ref() }
            }
        }
    }

    fn build(&self) -> Option<Exchange> {
        let ask = get_proc_address_v2();
        let mut pairs = Vec::new();
        for hook in self.hooks() {
            let Ok(name) = CString::new(hook.function.symbol) else {
                continue;
            };
            // Names that this driver lacks are skipped: it writes down each question that it refuses, and driver 580 dies of
            // that in a child that was forked after NVML had started (`tests/tests/preload_object/forks.rs`).
            let Some(address) = symbol(&name) else {
                continue;
            };
            pairs.push((address.as_ptr().expose_provenance(), (hook.wrapper)()));
            if let Some(address) = ask.and_then(|ask| asked(ask, hook)) {
                pairs.push((address, (hook.wrapper)()));
            }
        }
        // Names that this driver lacks have left an error that the caller has not made.
        loader::forget_error();
        (!pairs.is_empty()).then(|| Exchange::new(pairs))
    }

    /// Our function for the driver's at `real`; `real` itself when we have none.
    pub(crate) fn exchanged(&self, real: Pointer) -> Pointer {
        let wrapper = self.exchange().and_then(|known| known.wrapper_of(real.expose_provenance()));
        wrapper.map_or(real, std::ptr::with_exposed_provenance_mut)
    }

    /// Exchanges what `cuGetProcAddress` has answered with `code`.
    ///
    /// # Safety
    /// `answer` is the out-pointer of that call: null, or written by it where `code` is a success.
    pub(crate) unsafe fn exchange_answer(&self, code: c_int, answer: *mut Pointer) {
        if DriverCode(code) != DriverCode::SUCCESS || answer.is_null() {
            return;
        }
        // SAFETY: the caller's out-pointer, which the driver has just written.
        let real = unsafe { *answer };
        if !real.is_null() {
            // SAFETY: as above.
            unsafe { *answer = self.exchanged(real) };
        }
    }
}

/// The address that the driver's `cuGetProcAddress` gives for exactly this hook: on some drivers its addresses are not
/// those of the exported symbols.
fn asked(ask: GetProcAddressV2, hook: &Hook) -> Option<usize> {
    let base = CString::new(hook.function.base).ok()?;
    let mut address: Pointer = std::ptr::null_mut();
    let mut status: c_int = 0;
    let flags = if hook.function.per_thread { FLAG_PER_THREAD } else { FLAG_LEGACY };
    // SAFETY: the name is terminated and both out-pointers are valid.
    let code = unsafe {
        ask(base.as_ptr(), &raw mut address, hook.function.version, flags, &raw mut status)
    };
    (code == 0 && !address.is_null()).then(|| address.expose_provenance())
}
