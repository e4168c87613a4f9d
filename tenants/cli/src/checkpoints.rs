//! The driver's calls about other processes, from `libcuda.so.1`. The first call loads the library: no other command needs it.
//!
//! Layouts are those of `cuda.h` of CUDA 12.8, the first with these calls (driver 570). No context is created.

#![expect(unsafe_code, reason = "calls the driver's functions")]

use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use sublet_deep as by_command;
use tenants::checkpoints::{Call, CheckpointError, Checkpointer, ProcessState, unavailable};
use vmm_pool::driver::DriverCode;

use crate::failure::{EXIT_UNCHANGED, Failure};

const LIBRARY: &str = "libcuda.so.1";
const STATE: &str = "cuCheckpointProcessGetState";

/// A [`Checkpointer`] by the driver's calls. See the documentation of this module.
#[derive(Debug, Default)]
pub(crate) struct CudaCheckpoints(OnceLock<Result<Functions, CheckpointError>>);

/// `CUcheckpointLockArgs`.
#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved_word: c_uint,
    reserved: [u64; 7],
}

/// Makes the calls that a process of a job requests on standard input ([`by_command`]), and answers on standard output.
pub(crate) fn serve() -> Result<ExitCode, Failure> {
    let driver = CudaCheckpoints::default();
    by_command::serve(io::stdin().lock(), io::stdout(), &driver).map_err(|error| {
        Failure::new(format!("standard input cannot be read: {error}"), EXIT_UNCHANGED)
    })?;
    Ok(ExitCode::SUCCESS)
}

type GetState = unsafe extern "C" fn(c_int, *mut c_uint) -> c_int;
type Act = unsafe extern "C" fn(c_int, *const c_void) -> c_int;

/// # Invariants
/// 1. Each is the function of that name of `library`, which stays open as long as this lives.
#[derive(Debug)]
struct Functions {
    get_state: GetState,
    lock: Act,
    checkpoint: Act,
    restore: Act,
    unlock: Act,
    _library: libloading::Library,
}

fn coded(call: &'static str, code: c_int) -> Result<(), CheckpointError> {
    match DriverCode(code) {
        DriverCode::SUCCESS => Ok(()),
        DriverCode::NOT_SUPPORTED => Err(unavailable(format!(
            "the driver does not support {call} here (a driver before 570, or a GPU that cannot)"
        ))),
        code => Err(CheckpointError::Driver { call, code }),
    }
}

impl Functions {
    fn load() -> Result<Self, CheckpointError> {
        // SAFETY: opening the driver runs NVIDIA's initialisers, which need nothing from us.
        let library = unsafe { libloading::Library::new(LIBRARY) }
            .map_err(|error| unavailable(format!("{LIBRARY} cannot be opened ({error})")))?;
        let missing = |name: &str| {
            unavailable(format!("{LIBRARY} has no {name}: the driver must be 570 or newer"))
        };
        let act = |call: Call| -> Result<Act, CheckpointError> {
            // SAFETY: the header declares it so; the arguments are a pointer to a structure, or null.
            let found = unsafe { library.get::<Act>(call.name().as_bytes()) };
            found.map(|found| *found).map_err(|_| missing(call.name()))
        };
        // SAFETY: the header declares it so.
        let get_state = unsafe { library.get::<GetState>(STATE.as_bytes()) };
        let get_state = *get_state.map_err(|_| missing(STATE))?;
        // SAFETY: the header declares it so.
        let init = unsafe { library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit") };
        let init = *init.map_err(|_| missing("cuInit"))?;
        // SAFETY: it may be called at any time, and takes 0.
        coded("cuInit", unsafe { init(0) })?;
        Ok(Self {
            get_state,
            lock: act(Call::Lock(Duration::ZERO))?,
            checkpoint: act(Call::Checkpoint)?,
            restore: act(Call::Restore)?,
            unlock: act(Call::Unlock)?,
            _library: library,
        })
    }
}

impl CudaCheckpoints {
    fn functions(&self) -> Result<&Functions, CheckpointError> {
        self.0.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
    }
}

impl Checkpointer for CudaCheckpoints {
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
        if pid == std::process::id() {
            return Err(unavailable("a process cannot freeze itself".to_owned()));
        }
        let get_state = self.functions()?.get_state;
        let mut state = 0;
        // SAFETY: it writes one number.
        let code = unsafe { get_state(pid.cast_signed(), &raw mut state) };
        coded(STATE, code)?;
        Ok(ProcessState::of(state))
    }

    fn make(&self, call: Call, pid: u32) -> Result<(), CheckpointError> {
        let functions = self.functions()?;
        let (function, lock) = match call {
            Call::Lock(timeout) => {
                // 0 stands for no limit.
                let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
                let args = LockArgs { timeout_ms, reserved_word: 0, reserved: [0; 7] };
                (functions.lock, Some(args))
            }
            Call::Checkpoint => (functions.checkpoint, None),
            Call::Restore => (functions.restore, None),
            Call::Unlock => (functions.unlock, None),
        };
        let args = lock.as_ref().map_or(std::ptr::null(), |args| (&raw const *args).cast());
        // SAFETY: the lock's structure is as the header has it, and read during the call. The others take null, and all take any number for a
        // process.
        coded(call.name(), unsafe { function(pid.cast_signed(), args) })
    }
}
