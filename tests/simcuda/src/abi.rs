//! The C boundary: arguments as types, and the macro that turns functions into driver symbols.
//!
//! # Invariants
//! [`Out`], [`In`] and [`Text`] have no constructor in Rust: each comes from a C caller, who promises by
//! the driver's documentation that it is null or valid for what the function does with it during the call.

#![expect(unsafe_code, reason = "reads and writes through pointers that C callers pass")]

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use vmm_pool::driver::DriverCode;

use crate::sim;

/// Result of a call before it crosses to C.
pub(crate) type Coded<T> = Result<T, DriverCode>;

/// A place for the callee to write to.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes `value`; a null pointer is an invalid argument.
    pub(crate) fn put(self, value: T) -> Coded<()> {
        if self.0.is_null() {
            return Err(DriverCode::INVALID_VALUE);
        }
        // SAFETY: not null, and so valid for a write (invariant at the head); callers may pass places of
        // lower alignment inside packed buffers.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes `value` where the caller wants it at all.
    pub(crate) fn put_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as in `put`.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// The place of another type, as the caller and an attribute agree.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes `text` and its end, cut to `capacity` bytes in all.
    pub(crate) fn put_text(self, text: &str, capacity: i32) -> Coded<()> {
        let room = usize::try_from(capacity).unwrap_or(0);
        if self.0.is_null() || room == 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        let length = text.len().min(room - 1);
        // SAFETY: the caller's buffer has `capacity` bytes (invariant at the head), and `length` is less.
        unsafe {
            self.0.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
        };
        // SAFETY: as above.
        let end = unsafe { self.0.add(length) };
        // SAFETY: as above.
        unsafe { end.write(0) };
        Ok(())
    }
}

/// A value of the caller's that the callee reads and replaces.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Exchange<T>(Out<T>);

impl<T: Copy> Exchange<T> {
    /// Replaces the value by what `by` makes of it.
    pub(crate) fn replace(self, by: impl FnOnce(T) -> Coded<T>) -> Coded<()> {
        let before = In(self.0.0.cast_const()).get()?;
        self.0.put(by(before)?)
    }
}

/// A value, or an array of them, for the callee to read.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads the value; a null pointer is an invalid argument.
    pub(crate) fn get(self) -> Coded<T> {
        self.get_if_given().ok_or(DriverCode::INVALID_VALUE)
    }

    /// Reads the value where the caller gives one.
    pub(crate) fn get_if_given(self) -> Option<T> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, and so valid for a read (invariant at the head).
        Some(unsafe { self.0.read_unaligned() })
    }

    /// Reads `count` values.
    pub(crate) fn list(self, count: u64) -> Coded<Vec<T>> {
        let count = usize::try_from(count).map_err(|_| DriverCode::INVALID_VALUE)?;
        (0..count).map(|index| In(self.0.wrapping_add(index)).get()).collect()
    }

    /// These values.
    pub(crate) fn of(values: &[T]) -> Self {
        Self(values.as_ptr())
    }

    /// What is at an address that the caller gives as a number.
    pub(crate) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(usize::try_from(address).unwrap_or(0)))
    }

    /// Is there anything to read?
    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// The value of another type, as the caller and a table agree.
    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }
}

/// A string of the caller's.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Reads the string.
    pub(crate) fn get(self) -> Coded<String> {
        if self.0.is_null() {
            return Err(DriverCode::INVALID_VALUE);
        }
        // SAFETY: not null, and so a terminated string (invariant at the head).
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| DriverCode::INVALID_VALUE)
    }
}

thread_local! {
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Does stream 0 mean the default stream of this thread in the present call?
pub(crate) fn is_per_thread() -> bool {
    PER_THREAD.get()
}

/// Runs a call in which stream 0 means the default stream of this thread.
pub(crate) fn with_per_thread(call: impl FnOnce() -> i32) -> i32 {
    let before = PER_THREAD.replace(true);
    let code = call();
    PER_THREAD.set(before);
    code
}

/// Calls after which this process may hold more or less of others' memory.
const OF_SHARING: [&str; 5] = [
    "cuIpcCloseMemHandle",
    "cuIpcOpenMemHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRelease",
    "cuMemUnmap",
];

/// Calls that the lock of another process does not hold back. The driver has them read what is mapped of the device.
const ASKING: [&str; 6] = [
    "cuCtxSynchronize",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// Runs the body of a call: waits while another process has locked this one, counts it, fails it when a rule says so, and keeps
/// panics from C.
pub(crate) fn enter(symbol: &'static str, body: impl FnOnce() -> Coded<()>) -> i32 {
    let call = AssertUnwindSafe(|| {
        let Ok(sim) = sim::get() else { return body() };
        // Those are about other processes, and the driver takes them at any time.
        let is_about_others = symbol.starts_with("cuCheckpoint");
        let is_asking = ASKING.contains(&symbol);
        let _inside = (!is_about_others && !is_asking).then(|| sim.standing.enter());
        sim.core.enter(symbol)?;
        if is_asking {
            sim.standing.end_if_off_device(symbol);
        }
        let done = body();
        if is_asking {
            sim.standing.end_if_off_device(symbol);
        }
        if OF_SHARING.contains(&symbol) {
            let (imports, opened) = sim.core.foreign();
            sim.standing.note_foreign(imports, opened);
        }
        done
    });
    match catch_unwind(call) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => {
            crate::errors::note(symbol, code);
            code.0
        }
        Err(_) => DriverCode::UNKNOWN.0,
    }
}

/// One entry of the table behind `cuGetProcAddress`.
#[derive(Debug)]
pub(crate) struct Symbol {
    /// Name without suffix.
    pub(crate) name: &'static str,
    /// First version of the interface with this form of the function.
    pub(crate) since: i32,
    /// The function.
    pub(crate) address: usize,
    /// The form in which stream 0 is the thread's, where there is one.
    pub(crate) per_thread: Option<usize>,
}

/// Turns functions into exported driver symbols and a table of them.
///
/// Each reads `fn exported [/ per_thread_twin] = "name" since version (arguments) { body }`, with a body
/// of type [`Coded<()>`].
macro_rules! driver_api {
    ($(
        fn $exported:ident $(/ $twin:ident)? = $name:literal since $since:literal
            $args:tt $body:block
    )*) => {
        $(
            $crate::abi::driver_function! { $exported [$($twin)?] $name $args $body }
        )*

        /// The functions of this module.
        pub(crate) fn symbols() -> Vec<$crate::abi::Symbol> {
            vec![$(
                $crate::abi::Symbol {
                    name: $name,
                    since: $since,
                    address: $exported as *const () as usize,
                    per_thread: None $(.or(Some($twin as *const () as usize)))?,
                },
            )*]
        }
    };
}
pub(crate) use driver_api;

/// One function of [`driver_api`], and its twin if it has one.
macro_rules! driver_function {
    ($exported:ident [] $name:literal ($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $exported($($arg: $ty),*) -> i32 {
            $crate::abi::enter($name, move || $body)
        }
    };
    ($exported:ident [$twin:ident] $name:literal ($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        #[allow(
            clippy::too_many_arguments,
            reason = "the driver's interface gives the arguments"
        )]
        pub(crate) extern "C" fn $exported($($arg: $ty),*) -> i32 {
            $crate::abi::enter($name, move || $body)
        }

        #[doc = concat!("[`", stringify!($exported), "`] on the default stream of the thread.")]
        #[unsafe(no_mangle)]
        #[allow(
            clippy::too_many_arguments,
            clippy::used_underscore_binding,
            reason = "the driver's interface gives the arguments"
        )]
        pub(crate) extern "C" fn $twin($($arg: $ty),*) -> i32 {
            $crate::abi::with_per_thread(|| $exported($($arg),*))
        }
    };
}
pub(crate) use driver_function;
