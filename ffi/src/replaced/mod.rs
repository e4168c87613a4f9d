//! The functions that the pool answers, under the driver's names and signatures.
//!
//! Each takes C arguments apart, asks the adapter, and writes results back; a null out-pointer goes to the
//! driver, whose error it then is. Calls that make memory carry the caller's return address along, by
//! which the caller's library is known.
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

/// The value of a stream whose meaning does not depend on who asks: functions of the per-thread kind have a stream of the
/// calling thread's own for 0.
pub(crate) fn stream_value(stream: Pointer, symbol: &str) -> usize {
    let is_per_thread = symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
    if stream.is_null() && is_per_thread {
        return STREAM_PER_THREAD;
    }
    stream.expose_provenance()
}

/// Brings the paged memory that a call names to the device, and keeps it there until the result is dropped.
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

/// A range from C arguments.
fn range(start: Address, size: usize) -> VaRange {
    VaRange::new(DeviceAddress(start), size as u64)
}

/// `bytes` for a C `size_t`. Lossless: the crate builds for 64-bit Linux only.
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

/// A function instead of the driver's. The driver has it in no tenant, where `$is_odd`, and where the answer says so.
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
