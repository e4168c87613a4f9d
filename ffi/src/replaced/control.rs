//! Device attributes and stream capture.

#![expect(unsafe_code, reason = "exports functions under the driver's names and calls the driver")]

use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

use sublet_cuda_driver::vmm;
use sublet_cuda_graph::Target;
use vmm_pool::driver::DriverCode;
use vmm_pool::gate::Passage;

use super::{Handle, STREAM_PER_THREAD, SUCCESS, stream_value, write_out};
use crate::driver::call_driver;
use crate::{contexts, look, runtime};
use sublet_interpose::Pointer;

/// Returns an attribute of a device. Attributes of features that a pause could not undo are 0.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let code = call_driver!(cuDeviceGetAttribute(value, attribute, device));
    if code == SUCCESS && !value.is_null() && vmm::hidden_attribute(attribute) {
        write_out!(value, 0);
    }
    code
}

macro_rules! refused {
    ($(#[$doc:meta])* $symbol:ident ( $($arg:ident : $ty:ty),* ) because $note:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            if let Some(member) = runtime::join() {
                member.notes().add($note.to_owned());
            }
            DriverCode::NOT_SUPPORTED.0
        }
    };
}

refused! {
    /// Refuses: multicast objects cannot be paused yet. The device attribute says so already, and not all callers ask for
    /// it.
    cuMulticastCreate(_handle: *mut Handle, _prop: *const c_void)
    // A multicast object (NVLS) binds memory of several GPUs, and a pause cannot take it away. The library gets "not
    // supported", and most use another path. If the job fails, set NCCL_NVLS_ENABLE=0, or the like of your library.
    because "a library requested a multicast object, which cannot be paused yet; it was refused"
}

refused! {
    /// Refuses: a logical endpoint keeps what is bound to it by its pages, which a pause gives back.
    cuLogicalEndpointIdReserve(_base: *mut c_uint, _count: c_uint)
    // A pause cannot take memory away that such an endpoint holds. The library gets "not supported". If the job fails,
    // run it without Sublet.
    because "a library requested logical endpoints, which cannot be paused; they were refused"
}

refused! {
    /// Refuses, as reserving one.
    cuLogicalEndpointCreate(_endpoint: c_uint, _prop: *const c_void)
    // A pause cannot take memory away that such an endpoint holds. The library gets "not supported". If the job fails,
    // run it without Sublet.
    because "a library requested a logical endpoint, which cannot be paused; it was refused"
}

refused! {
    /// Refuses, as reserving one.
    cuLogicalEndpointImport(_endpoint: c_uint, _handle: *const c_void, _kind: c_int)
    // A pause cannot take memory away that such an endpoint holds. The library gets "not supported". If the job fails,
    // run it without Sublet.
    because "a library requested another process's logical endpoint, which cannot be paused; it was refused"
}

macro_rules! unload {
    ($symbol:ident) => {
        /// Unloads code, and with it the values of functions, which others may get immediately.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(code: Pointer) -> c_int {
            look::forget_functions();
            let done = call_driver!($symbol(code));
            look::forget_functions();
            done
        }
    };
}

unload!(cuModuleUnload);
unload!(cuLibraryUnload);

/// Returns the key of a stream's capture. The value of the per-thread stream means a different stream on each thread. Functions
/// of the per-thread kind (`symbol`) also use that stream for 0.
fn capture_key(stream: Pointer, symbol: &str) -> u64 {
    thread_local! {
        static OWN: u8 = const { 0 };
    }
    let stream = stream_value(stream, symbol);
    if stream == STREAM_PER_THREAD {
        // An odd number, made of an address of this thread. No stream's value is odd.
        return OWN.try_with(|own| (&raw const *own).addr() as u64).map_or(1, |at| at << 1 | 1);
    }
    stream as u64
}

/// The longest time for which a capture waits until waits for devices have ended: first waits that were left behind, and then
/// those of other threads. See [`vmm_pool::Waits::let_end`] and [`tenants::member::Captures::before`].
const WAITS_BEFORE_CAPTURE: Duration = Duration::from_secs(1);

macro_rules! begin_capture {
    ($symbol:ident ( $($arg:ident : $ty:ty),* ) into $target:ident) => {
        /// Begins a capture; no pause starts until it ends.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(stream: Pointer $(, $arg: $ty)*) -> c_int {
            let member = runtime::member();
            look::capture_begins();
            let _pass = member
                .map(|member| member.gate().pass_for(stringify!($symbol), Passage::Capture));
            if let Some(member) = member {
                member.pool().waits().let_end(WAITS_BEFORE_CAPTURE);
            }
            let captures = &runtime::CAPTURES;
            let _before = captures.counts().before(WAITS_BEFORE_CAPTURE);
            let code = call_driver!($symbol(stream $(, $arg)*));
            if code == SUCCESS {
                let (key, context) =
                    (capture_key(stream, stringify!($symbol)), contexts::current_context());
                captures.begun(key, context, Target::$target);
            }
            code
        }
    };
}

begin_capture!(cuStreamBeginCapture() into NewGraph);
begin_capture!(cuStreamBeginCapture_ptsz() into NewGraph);
begin_capture!(cuStreamBeginCapture_v2(mode: c_int) into NewGraph);
begin_capture!(cuStreamBeginCapture_v2_ptsz(mode: c_int) into NewGraph);
begin_capture!(cuStreamBeginRecaptureToGraph(
    mode: c_int, graph: Pointer, callback: Pointer, data: Pointer
) into NewGraph);
begin_capture!(cuStreamBeginRecaptureToGraph_ptsz(
    mode: c_int, graph: Pointer, callback: Pointer, data: Pointer
) into NewGraph);
begin_capture!(cuStreamBeginCaptureToGraph(
    graph: Pointer, dependencies: Pointer, data: Pointer, count: usize, mode: c_int
) into Existing);
begin_capture!(cuStreamBeginCaptureToGraph_ptsz(
    graph: Pointer, dependencies: Pointer, data: Pointer, count: usize, mode: c_int
) into Existing);

macro_rules! end_capture {
    ($symbol:ident, $is_capturing:ident) => {
        /// Ends a capture.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(stream: Pointer, graph: Pointer) -> c_int {
            let is_capturing = || {
                let mut status: c_int = 0;
                let code = call_driver!($is_capturing(
                    stream => Pointer, &raw mut status => *mut c_int
                ));
                code == SUCCESS && status != 0
            };
            let key = capture_key(stream, stringify!($symbol));
            let value = stream_value(stream, stringify!($symbol));
            super::graph::end_capture(value, key, graph, is_capturing, || {
                call_driver!($symbol(stream, graph))
            })
        }
    };
}

end_capture!(cuStreamEndCapture, cuStreamIsCapturing);
end_capture!(cuStreamEndCapture_ptsz, cuStreamIsCapturing_ptsz);

macro_rules! destroy_stream {
    ($symbol:ident) => {
        /// Ends a stream, and with it a capture that began on it.
        ///
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol(stream: Pointer) -> c_int {
            let mut code = SUCCESS;
            look::stream_ends(stream);
            runtime::CAPTURES.destroy(capture_key(stream, stringify!($symbol)), || {
                code = call_driver!($symbol(stream));
                code == SUCCESS
            });
            code
        }
    };
}

destroy_stream!(cuStreamDestroy);
destroy_stream!(cuStreamDestroy_v2);
