//! The driver's own functions, called without Sublet's hooks.

#![expect(unsafe_code, reason = "asks the driver for its functions by name")]

use std::ffi::{CString, c_char, c_int, c_ulonglong};

use sublet_cuda_driver::functions::{FUNCTIONS, Function};
use sublet_interpose::Pointer;
use sublet_interpose::provider::{Real, Resident};

/// The process's driver.
pub(crate) static DRIVER: Resident = Resident::new(c"libcuda.so.1");

/// Beginnings of the file names of libraries that the driver brings along.
pub(crate) const COMPANIONS: &[&str] = &["libnvidia-"];

/// Calls the driver's own function `$symbol`, or returns the code that the driver is not initialised. If no argument types are
/// given, they are those of Sublet's function of this name in scope.
macro_rules! call_driver {
    ($symbol:ident ( $($value:expr),+ $(,)? )) => {
        $crate::driver::call_driver!(@at $symbol, address {
            let ours: unsafe extern "C" fn($(::sublet_interpose::any!($value)),+) -> ::std::ffi::c_int = $symbol;
            // SAFETY: the address is the driver's function of this name, whose signature ours has.
            let own = unsafe { ::sublet_interpose::alike(ours, address) };
            // SAFETY: the arguments are the caller's own, or ours under the rules of the function.
            unsafe { own($($value),+) }
        })
    };
    ($symbol:ident ( $($value:expr => $ty:ty),* $(,)? )) => {
        $crate::driver::call_driver!(@at $symbol, address {
            type Own = unsafe extern "C" fn($($ty),*) -> ::std::ffi::c_int;
            // SAFETY: the address is the driver's function of this name, whose signature is this.
            let own = unsafe { ::std::mem::transmute::<::sublet_interpose::Pointer, Own>(address) };
            // SAFETY: the arguments are the caller's own, or ours under the rules of the function.
            unsafe { own($($value),*) }
        })
    };
    (@at $symbol:ident, $address:ident $call:block) => {{
        static REAL: ::sublet_interpose::provider::Real =
            ::sublet_interpose::provider::Real::new(&$crate::driver::DRIVER, ::sublet_interpose::c_name!($symbol));
        match REAL.address() {
            Some($address) => $call,
            None => ::vmm_pool::driver::DriverCode::NOT_INITIALIZED.0,
        }
    }};
}
pub(crate) use call_driver;

/// `cuGetProcAddress_v2`.
type GetProcAddressV2 =
    unsafe extern "C" fn(*const c_char, *mut Pointer, c_int, c_ulonglong, *mut c_int) -> c_int;

/// Returns the addresses that the driver's `cuGetProcAddress` gives for exactly the function `symbol`. On some drivers they
/// differ from the exported symbols. Empty if the driver has no `cuGetProcAddress_v2` (before 12.0).
pub(crate) fn given_out(symbol: &'static str) -> Vec<usize> {
    static REAL: Real = Real::new(&DRIVER, c"cuGetProcAddress_v2");
    let Some(address) = REAL.address() else { return Vec::new() };
    // SAFETY: the address is the driver's function of this name, whose signature is this.
    let ask = unsafe { std::mem::transmute::<Pointer, GetProcAddressV2>(address) };
    let exact = FUNCTIONS.iter().copied().filter(|known| known.symbol == symbol);
    // From 12.0 on, the name of the oldest form means the form with flags.
    let renamed = exact.clone().filter(|known| known.symbol == "cuGraphInstantiateWithFlags");
    let renamed =
        renamed.map(|known| Function { base: "cuGraphInstantiate", version: 12_000, ..known });
    let asked = |wanted: Function| {
        let base = CString::new(wanted.base).ok()?;
        let (mut found, mut status): (Pointer, c_int) = (std::ptr::null_mut(), 0);
        let (version, flag) = (wanted.version, wanted.stream_flag());
        // SAFETY: the name is terminated and both out-pointers are valid.
        let code = unsafe { ask(base.as_ptr(), &raw mut found, version, flag, &raw mut status) };
        (code == 0 && !found.is_null()).then(|| found.expose_provenance())
    };
    exact.chain(renamed).filter_map(asked).collect()
}
