//! The functions that the pool answers, under the driver's names and signatures.
//!
//! Each converts C arguments, calls the adapter, and writes results back. A null out-pointer is passed to the driver, which
//! returns its error. Calls that create memory also pass the caller's return address, which identifies the caller's library.
//!
//! * [`vmm`]: virtual memory. [`plain`]: `cuMemAlloc` and what comes with it. `late_frees`: blocks that go
//!   when a stream comes there. [`native`]: memory that stays
//!   with the driver. [`mod@pointer`]: questions about addresses. [`context`]: contexts, peer access. [`control`]:
//!   device attributes, stream capture. [`graph`]: graphs. `copies`:
//!   copies that the driver refuses of ours. `refusals`: calls about memory that is away by tag. [`figures`]: how much memory there is.

pub mod context;
pub mod control;
pub(crate) mod copies;
pub mod figures;
pub mod graph;
pub(crate) mod late_frees;
pub mod native;
pub mod plain;
pub mod pointer;
pub(crate) mod refusals;
pub mod vmm;

use std::ffi::{c_int, c_ulonglong};

pub use context::*;
pub use control::*;
pub use figures::*;
pub use graph::*;
pub use native::*;
pub use plain::*;
pub(crate) use plain::{settle, unfreezable};
pub use pointer::*;
pub use vmm::*;

use vmm_pool::driver::{DeviceAddress, DriverCode, VaRange};

use crate::look::{self, Names, StaysInUse};
use sublet_interpose::Pointer;

type Handle = c_ulonglong;
type Address = u64;

const SUCCESS: c_int = DriverCode::SUCCESS.0;

/// `CU_STREAM_PER_THREAD`.
pub(crate) const STREAM_PER_THREAD: usize = 2;

/// Returns a value for the stream that does not depend on the function: for functions of the per-thread kind, 0 means the calling
/// thread's own stream.
pub(crate) fn stream_value(stream: Pointer, symbol: &str) -> usize {
    let is_per_thread = symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
    if stream.is_null() && is_per_thread {
        return STREAM_PER_THREAD;
    }
    stream.expose_provenance()
}

/// Moves the paged memory that a call names to the device, and keeps it there until the result is dropped.
pub(crate) fn look_at(
    symbol: &'static str,
    names: Names<'_>,
    stream: Pointer,
) -> Result<Option<StaysInUse>, c_int> {
    let found = look::found(names);
    if found.ranges().is_empty() {
        return Ok(None);
    }
    look::begin(symbol, &found, graph::place_of(stream_value(stream, symbol)))
}

/// Returns a range from C arguments.
fn range(start: Address, size: usize) -> VaRange {
    VaRange::new(DeviceAddress(start), size as u64)
}

/// Converts `bytes` to a C `size_t`, without loss: the crate builds for 64-bit Linux only.
fn size_t(bytes: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Writes a result through a caller's out-pointer that the caller of this function has checked.
macro_rules! write_out {
    ($pointer:expr, $value:expr) => {{
        let value = $value;
        // SAFETY: the caller's out-pointer for one value of this type, checked not to be null.
        unsafe { $pointer.write(value) }
    }};
}

/// A function that jumps to `$body` with the caller's return address as sixth argument. Functions with up
/// to five integer arguments keep theirs where they are.
macro_rules! with_caller {
    ($(#[$doc:meta])* $symbol:ident ( $($arg:ident : $ty:ty),* $(,)? ) => $body:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            ::std::arch::naked_asm!("mov r9, qword ptr [rsp]", "jmp {body}", body = sym $body)
        }
    };
}

/// A function that replaces the driver's. The driver gets the call if the process is in no tenant, if `$is_odd`, or if the answer
/// says so.
macro_rules! instead {
    (
        $(#[$doc:meta])* $symbol:ident ( $($arg:ident : $ty:ty),* $(,)? ) $(, unless $is_odd:expr)?,
        by |$member:ident| $answer:expr
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            let driver = || call_driver!($symbol($($arg),*));
            $(if $is_odd {
                return driver();
            })?
            answered(runtime::member, |$member| $answer, driver)
        }
    };
}

use {instead, with_caller, write_out};
