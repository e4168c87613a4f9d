//! Programs outside Sublet that use a GPU of this machine, by NVML's answers.
//!
//! NVML is called only if the process has loaded it already, as NCCL does. A process of another user, or of a PID namespace that
//! is not visible here, does not count: the driver shares no memory with it by CUDA IPC.

#![expect(unsafe_code, reason = "calls NVML")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::fs;
use std::sync::{Mutex, PoisonError};

use sublet_nvml::Process;
use sublet_nvml::processes::ProcessEntry as _;

use super::{NVML, SUCCESS, all, own_symbol};
use sublet_interpose::Pointer;

/// The file name of the preload object, in the maps of each process that has it.
const OUR_FILE: &str = "libsublet";

/// Processes known to be under Sublet, with their start times, because ids are reused.
static INSIDE: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// Returns the id of a process that uses a GPU and is not under Sublet. Blocks for some NVML calls.
pub(crate) fn process() -> Option<u32> {
    type GetCount = unsafe extern "C" fn(*mut c_uint) -> c_int;
    type GetHandle = unsafe extern "C" fn(c_uint, *mut Pointer) -> c_int;
    type GetProcesses = unsafe extern "C" fn(Pointer, *mut c_uint, *mut Process) -> c_int;
    let _found = NVML.anywhere()?;
    let get_count = own_symbol(c"nvmlDeviceGetCount_v2")?;
    // SAFETY: the address is NVML's function of this name, whose signature is this.
    let get_count = unsafe { std::mem::transmute::<*const (), GetCount>(get_count) };
    let get_handle = own_symbol(c"nvmlDeviceGetHandleByIndex_v2")?;
    // SAFETY: as above.
    let get_handle = unsafe { std::mem::transmute::<*const (), GetHandle>(get_handle) };
    let get_processes = own_symbol(c"nvmlDeviceGetComputeRunningProcesses_v3")?;
    // SAFETY: as above.
    let get_processes = unsafe { std::mem::transmute::<*const (), GetProcesses>(get_processes) };
    let mut count: c_uint = 0;
    // SAFETY: a place for a number.
    if unsafe { get_count(&raw mut count) } != SUCCESS {
        return None;
    }
    (0..count).find_map(|index| {
        let mut device: Pointer = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        if unsafe { get_handle(index, &raw mut device) } != SUCCESS {
            return None;
        }
        // SAFETY: a handle of NVML's, and a buffer with as much room as it says.
        let listed = all(|count, rows| unsafe { get_processes(device, count, rows) });
        listed.ok()?.iter().map(Process::pid).find(|&pid| is_outside(pid))
    })
}

/// Is `pid` a process of this user without Sublet?
fn is_outside(pid: u32) -> bool {
    if pid == std::process::id() {
        return false;
    }
    let Some(start) = start_of(pid) else { return false };
    let inside = || INSIDE.lock().unwrap_or_else(PoisonError::into_inner);
    if inside().get(&pid) == Some(&start) {
        return false;
    }
    let Ok(maps) = fs::read_to_string(format!("/proc/{pid}/maps")) else {
        return false;
    };
    if maps.contains(OUR_FILE) {
        inside().insert(pid, start);
        return false;
    }
    // A process that is ending maps nothing.
    !maps.is_empty()
}

/// Returns the start time of process `pid`, in the kernel's unit.
fn start_of(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain spaces and brackets.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19).map(str::to_owned)
}
