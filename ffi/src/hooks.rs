//! Sublet's functions that replace the driver's, and among them those that only wait.
//!
//! | what we do | means | where |
//! | --- | --- | --- |
//! | wait | passes the gate as soon as what it touches is there, then calls the driver with the same arguments | `waiting!` below |
//! | ask | waits only while the process is frozen, then calls the driver with the same arguments | `asking!` below |
//! | replace | answered from the pool, or passed on when it is not about memory of ours | [`crate::replaced`] |
//! | pass | not hooked, for the reason given | `PASSED` in the completeness test |
//!
//! The only list of functions is `sublet_cuda_driver::driver_functions`, by action, name and version. Each row has one exported
//! function with the driver's name (for libraries that link the driver directly). `dlsym` and `cuGetProcAddress` return the same
//! function. The completeness test holds the table against every function that NVIDIA's header declares.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint, c_ulonglong};

use sublet_interpose::provider::Hook;
use vmm_pool::driver::{DeviceAddress, VaRange};
use vmm_pool::gate::Passage;

use crate::driver::call_driver;
use crate::look::{self, Names, StaysInUse};
use crate::records::{
    COPY_2D, COPY_3D, DECOMPRESSION, FABRIC_COPY, MEMORY_OPERATION, OPERATION_3D,
};
use crate::replaced::copies::{Refused, copy_in_place, is_copy, is_refused, opens_blocks};
use crate::replaced::refusals::{away_in, refuse};
use crate::replaced::stream_value;
use crate::{replaced, runtime};
use sublet_interpose::Pointer;

/// An address in one of the types of the driver's interface.
trait Place: Copy {
    fn address(self) -> u64;
}

impl Place for u64 {
    fn address(self) -> u64 {
        self
    }
}

impl Place for Pointer {
    fn address(self) -> u64 {
        self.addr() as u64
    }
}

/// Returns the range of `bytes` from `place` on, which a call touches.
fn touched(place: impl Place, bytes: usize) -> VaRange {
    VaRange::new(DeviceAddress(place.address()), bytes as u64)
}

/// Returns the bytes from the first to the last of `rows` rows of `width`, which begin `pitch` apart.
fn rows_bytes(pitch: usize, width: usize, rows: usize) -> usize {
    if width == 0 || rows == 0 {
        return 0;
    }
    pitch.saturating_mul(rows.saturating_sub(1)).saturating_add(width)
}

/// Tells a caller whose batch is refused that no single operation is the cause.
fn of_none_alone(index: Pointer) {
    if !index.is_null() {
        // SAFETY: the caller's place for an index.
        unsafe { index.cast::<usize>().write(usize::MAX) };
    }
}

/// The stream of calls that name none.
const NO_STREAM: Pointer = std::ptr::null_mut();

/// Makes the call in a separate frame. A cancelled thread unwinds through a function of the C interface only if that function has
/// nothing to drop; otherwise the process ends.
#[inline(never)]
fn apart(call: &impl Fn() -> c_int) -> c_int {
    call()
}

macro_rules! waiting_function {
    (
        $symbol:ident ( $($arg:ident : $ty:ty),* )
        [ $($touched:expr),* ] [ $($copy:tt)* ] [ $($look:tt)* ] $index:tt
    ) => {
        /// Waits until the memory that it touches is in place, then calls the driver.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            const IS_COPY: bool = is_copy(stringify!($symbol));
            let call = || {
                let seen = waiting_function!(@look $symbol [ $($look)* ] $index);
                let member = runtime::member();
                let pass =
                    member.map(|member| waiting_function!(@pass member, $symbol [ $($touched),* ]));
                waiting_function!(@aside member, pass, $symbol [ $($look)* ] $index);
                let code = call_driver!($symbol($($arg),*));
                drop(seen);
                drop(pass);
                code
            };
            // Panics are not caught here: a thread that is cancelled while it waits unwinds through this frame, and must not be
            // caught.
            let mut code = apart(&call);
            if IS_COPY && is_refused(code) {
                if opens_blocks() {
                    code = apart(&call);
                }
                waiting_function!(@copy $symbol, code, call [ $($copy)* ]);
            }
            code
        }
    };
    (@look $symbol:ident [] []) => { None::<StaysInUse> };
    (@look $symbol:ident [ $names:expr, $stream:expr ] [ $($index:ident)? ]) => {
        if look::is_on() {
            match replaced::look_at(stringify!($symbol), $names, $stream) {
                Ok(seen) => seen,
                Err(code) => {
                    $(of_none_alone($index);)?
                    return code;
                }
            }
        } else {
            None
        }
    };
    (@aside $member:ident, $pass:ident, $symbol:ident [] []) => {};
    (@aside $member:ident, $pass:ident, $symbol:ident [ $names:expr, $stream:expr ] [ $($index:ident)? ]) => {
        if let Some(member) = $member
            && member.pool().runs_without_some()
            && let Some(away) = away_in(member, $names, stream_value($stream, stringify!($symbol)))
        {
            drop($pass);
            $(of_none_alone($index);)?
            return refuse(member, stringify!($symbol), &away);
        }
    };
    (@copy $symbol:ident, $code:ident, $call:ident []) => {};
    (@copy $symbol:ident, $code:ident, $call:ident [ $target:ident $source:ident $bytes:ident $($stream:ident)? ]) => {
        if is_refused($code) {
            let stream: Option<Pointer> = None $(.or(Some($stream)))?;
            let symbol = stringify!($symbol);
            let is_per_thread = symbol.ends_with("_ptsz") || symbol.ends_with("_ptds");
            let (target, source) = ($target.address(), $source.address());
            let copy = Refused { target, source, bytes: $bytes, stream, is_per_thread };
            $code = copy_in_place(copy, $code, $call);
        }
    };
    (@pass $member:ident, $symbol:ident []) => {
        $member.gate().pass_for(stringify!($symbol), Passage::Use)
    };
    (@pass $member:ident, $symbol:ident [ $($touched:expr),+ ]) => {
        $member.pool().pass_touching(stringify!($symbol), &[$($touched),+])
    };
}

macro_rules! asking {
    ($($symbol:ident $version:literal $(| $alike:ident $alike_version:literal)* ( $($args:tt)* );)*) => {
        /// Functions that query whether work is over, or wait for it: see [`vmm_pool::asking`].
        pub mod asks {
            use super::*;
            $(asking!(@each [ $symbol $($alike)* ] ( $($args)* ));)*
        }
        /// Their rows.
        pub(crate) const ASKING: &[Hook] = &[$(
            hook_row!(asks::$symbol, $symbol),
            $(hook_row!(asks::$alike, $alike),)*
        )*];
    };
    (@each [ $($symbol:ident)* ] $args:tt) => { $(asking!(@one $symbol $args);)* };
    (@one $symbol:ident ( $($arg:ident : $ty:ty),* )) => {
        /// Waits while the process is frozen, then calls the driver.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            // Panics are not caught, as above.
            apart(&|| {
                let _asking = runtime::member().map(|member| member.pool().door().pass());
                call_driver!($symbol($($arg => $ty),*))
            })
        }
    };
}

/// The hook of the driver's function `$symbol`, which `$path` replaces.
macro_rules! hook_row {
    ($path:path, $symbol:ident) => {
        ::sublet_interpose::provider::Hook {
            symbol: stringify!($symbol),
            ours: || ($path as *const ()).expose_provenance(),
        }
    };
}
pub(crate) use hook_row;

macro_rules! waiting {
    ($(
        $symbol:ident $version:literal $(| $alike:ident $alike_version:literal)* ( $($args:tt)* )
        $(touches [ $($touched:tt)* ] on $place:ident)? $(copies [ $($copy:tt)* ])? $(looks [ $($look:tt)* ])?
        $(tells $index:ident)?;
    )*) => {
        /// Functions that wait, then call the driver.
        pub mod waits {
            use super::*;
            $(
                waiting!(
                    @each [ $symbol $($alike)* ] ( $($args)* )
                    [ $($($touched)*)? ] [ $($($copy)*)? ]
                    [ $($($look)*)? $(Names::Ranges(&[$($touched)*]), $place)? ]
                    [ $($index)? ]
                );
            )*
        }
        /// Their rows.
        pub(crate) const WAITING: &[Hook] = &[$(
            hook_row!(waits::$symbol, $symbol),
            $(hook_row!(waits::$alike, $alike),)*
        )*];
    };
    (@each [ $($symbol:ident)* ] $args:tt $touched:tt $copy:tt $look:tt $index:tt) => {
        $(waiting_function!($symbol $args $touched $copy $look $index);)*
    };
}

macro_rules! replacing {
    ($($symbol:ident $version:literal;)*) => {
        /// Functions that the pool answers. They pass on calls that do not concern Sublet's memory.
        pub(crate) const REPLACING: &[Hook] = &[$(hook_row!(replaced::$symbol, $symbol),)*];
    };
}

macro_rules! hooks {
    (
        waiting { $($waiting:tt)* } asking { $($asking:tt)* } replaced { $($replaced:tt)* } lookup { $($lookup:tt)* }
    ) => {
        waiting! { $($waiting)* }
        asking! { $($asking)* }
        replacing! { $($replaced)* }
    };
}

sublet_cuda_driver::driver_functions!(hooks);
