//! NVIDIA's management library (`libnvidia-ml.so.1`): the functions that report the memory of a GPU and the processes that hold
//! it. In a tenant with a budget, their answers stay within the budget, as `cuMemGetInfo` does. Without a budget, NVML's answer
//! is unchanged.
//!
//! Programs open the library themselves: Python's `pynvml` by ctypes, PyTorch, vLLM and `nvidia-smi` by `dlopen`. `dlsym` finds
//! these functions like those of any other library; this is their table. A process need not have joined its tenant, and does not
//! join because of these calls.
//!
//! The `sublet` command sees the whole machine, even inside a tenant.

#![expect(unsafe_code, reason = "exports functions under NVML's names and calls NVML")]

pub(crate) mod outside;

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint};

use sublet_nvml::memory::Narrow;
use sublet_nvml::processes::{self, ProcessEntry};
use sublet_nvml::{Asker, Bound, Gpu, NvmlCode};

use crate::environment;
use crate::runtime;
use sublet_interpose::Pointer;
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// NVML, and its known copies in this process.
pub(crate) static NVML: Library = Library::new(Description {
    prefix: "nvml",
    landmark: c"nvmlInit_v2",
    file: c"libnvidia-ml.so.1",
    table: TABLE,
    found,
});

interpose_library! {
    NVML; missing = super::no_nvml;
    replaced in calls {
        nvmlDeviceGetComputeRunningProcesses;
        nvmlDeviceGetComputeRunningProcesses_v2;
        nvmlDeviceGetComputeRunningProcesses_v3;
        nvmlDeviceGetMemoryInfo;
        nvmlDeviceGetMemoryInfo_v2;
    }
}

/// Longest text of a GPU's identity, in bytes (`NVML_DEVICE_UUID_V2_BUFFER_SIZE`); that of a version is shorter.
const TEXT_BYTES: usize = 96;
/// The most tries to read a list that grows while it is read.
const TRIES_MAX: usize = 8;

const SUCCESS: c_int = NvmlCode::SUCCESS.0;

fn found(path: &CStr, is_watched: bool) {
    tracing::debug!(path = %path.to_string_lossy(), is_watched, "NVML");
}

/// The function for the case that no copy of NVML has it.
extern "C" fn no_nvml() -> c_int {
    NvmlCode::FUNCTION_NOT_FOUND.0
}

/// Returns the library's own function `name`, of the copy whose functions are replaced.
fn own_symbol(name: &CStr) -> Option<*const ()> {
    Some(NVML.watched()?.symbol(name)?.cast_const().cast())
}

/// Returns the GPU of an NVML handle, by NVML's own answer.
fn gpu_of(device: Pointer) -> Option<Gpu> {
    type GetUuid = unsafe extern "C" fn(Pointer, *mut c_char, c_uint) -> c_int;
    type GetIndex = unsafe extern "C" fn(Pointer, *mut c_uint) -> c_int;
    let get_uuid = own_symbol(c"nvmlDeviceGetUUID")?;
    // SAFETY: the address is NVML's function of this name, whose signature is this.
    let get_uuid = unsafe { std::mem::transmute::<*const (), GetUuid>(get_uuid) };
    let uuid = text_of(|text, length| {
        // SAFETY: the buffer has that length; NVML checks the handle.
        unsafe { get_uuid(device, text, length) }
    })?;
    let index = own_symbol(c"nvmlDeviceGetIndex").and_then(|get_index| {
        // SAFETY: the address is NVML's function of this name, whose signature is this.
        let get_index = unsafe { std::mem::transmute::<*const (), GetIndex>(get_index) };
        let mut index: c_uint = 0;
        // SAFETY: a place for one number; NVML checks the handle.
        let code = unsafe { get_index(device, &raw mut index) };
        // The index of a MIG instance counts within its GPU, so it is no number of a GPU.
        (code == SUCCESS && uuid.starts_with("GPU-")).then_some(index)
    });
    Gpu::named(&uuid, index)
}

/// Does this driver's third form of rows have the known layout?
fn are_rows_known() -> bool {
    type GetVersion = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
    let Some(get_version) = own_symbol(c"nvmlSystemGetDriverVersion") else {
        return true;
    };
    // SAFETY: the address is NVML's function of this name, whose signature is this.
    let get_version = unsafe { std::mem::transmute::<*const (), GetVersion>(get_version) };
    let text = text_of(|text, length| {
        // SAFETY: the buffer has that length.
        unsafe { get_version(text, length) }
    });
    text.is_none_or(|version| processes::are_rows_known(&version))
}

/// Returns the text that an NVML function writes.
fn text_of(write: impl FnOnce(*mut c_char, c_uint) -> c_int) -> Option<String> {
    let mut text: [c_char; TEXT_BYTES] = [0; TEXT_BYTES];
    if write(text.as_mut_ptr(), c_uint::try_from(TEXT_BYTES).ok()?) != SUCCESS {
        return None;
    }
    // `c_char` is signed on some processors.
    let bytes = text.map(|letter| letter.to_ne_bytes()[0]);
    CStr::from_bytes_until_nul(&bytes).ok()?.to_str().ok().map(str::to_owned)
}

/// May a tenant's budget apply to this process? Costs the lookup of a file name.
fn may_be_bound() -> bool {
    let counts = || runtime::member().is_some_and(|member| member.pool().budget().counts());
    (environment::current().has_budgets() || counts() || runtime::others_count())
        && !environment::is_the_command()
}

/// Returns the tenant's limit on a GPU, and the result of `and` for the tenant. None without a budget there, or if Sublet's own
/// code fails.
fn bound<T>(
    device: Pointer,
    and: impl FnOnce(&tenants::run_dir::RunDir, &tenants::identity::TenantName) -> T,
) -> Option<(Bound, T)> {
    if !may_be_bound() {
        return None;
    }
    let find = || {
        let gpu = gpu_of(device)?;
        let (run_dir, tenant) = (runtime::run_dir().ok()?, runtime::tenant_name().ok()?);
        let environment = environment::current();
        let asker = Asker {
            member: runtime::member(),
            run_dir: &run_dir,
            tenant: &tenant,
            settings: environment.settings.budgets.as_ref(),
        };
        let bound = asker.bound(gpu)?;
        Some((bound, and(&run_dir, &tenant)))
    };
    runtime::netted(find).unwrap_or(None)
}

/// Calls NVML's `own` function, which writes figures to `place`, and limits them to the calling tenant's budget.
fn narrowed<M: Narrow + Copy>(device: Pointer, place: *mut M, own: impl Fn() -> c_int) -> c_int {
    let mut code = own();
    if code != SUCCESS || place.is_null() {
        return code;
    }
    let uuid = || gpu_of(device).map(|gpu| gpu.uuid);
    let others_bytes = runtime::others_give(uuid, || code = own());
    let bound = bound(device, |_, _| ()).map(|(bound, ())| bound);
    let bound = Bound { others_bytes, ..bound.unwrap_or(Bound::NONE) };
    if code == SUCCESS && bound != Bound::NONE {
        // SAFETY: the caller's out-pointer, which NVML has just written.
        let said = unsafe { place.read_unaligned() };
        // SAFETY: as above.
        unsafe { place.write_unaligned(said.within(bound)) };
    }
    code
}

/// Returns all processes on a GPU, as NVML's `own` function lists them.
fn all<R: ProcessEntry>(own: impl Fn(*mut c_uint, *mut R) -> c_int) -> Result<Vec<R>, c_int> {
    let mut found = 0;
    for _ in 0..TRIES_MAX {
        let room = processes::room_for(found);
        let mut rows = vec![R::default(); room];
        let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
        let code = own(&raw mut count, rows.as_mut_ptr());
        found = usize::try_from(count).unwrap_or(usize::MAX);
        match NvmlCode(code) {
            NvmlCode::SUCCESS => {
                rows.truncate(found.min(room));
                return Ok(rows);
            }
            NvmlCode::INSUFFICIENT_SIZE => {}
            NvmlCode(code) => return Err(code),
        }
    }
    Err(NvmlCode::INSUFFICIENT_SIZE.0)
}

/// Answers a query for the processes on a GPU: only with the tenant's, if the tenant has a budget there.
fn running<R: ProcessEntry>(
    device: Pointer,
    count: *mut c_uint,
    rows: *mut R,
    own: impl Fn(*mut c_uint, *mut R) -> c_int,
) -> c_int {
    if count.is_null() {
        return own(count, rows);
    }
    // SAFETY: the caller's place for a number, which says how long its buffer is.
    let room = unsafe { count.read_unaligned() };
    if room > 0 && rows.is_null() {
        return own(count, rows);
    }
    let pids = |run_dir: &_, tenant: &_| processes::of_tenant(run_dir, tenant, std::process::id());
    let Some((_, pids)) = bound(device, pids) else {
        return own(count, rows);
    };
    match all(&own) {
        Ok(found) => answer(&found, &pids, (count, rows, room)),
        Err(code) => code,
    }
}

/// Writes the tenant's processes among `found` to the caller's buffer, and their number to the caller's count.
fn answer<R: ProcessEntry>(
    found: &[R],
    pids: &BTreeSet<u32>,
    (count, rows, room): (*mut c_uint, *mut R, c_uint),
) -> c_int {
    let room = usize::try_from(room).unwrap_or(usize::MAX);
    let (code, own, number) = processes::answer(found, pids, room);
    for (index, row) in own.iter().enumerate() {
        // SAFETY: the caller's buffer has room for more rows than this one's number.
        let place = unsafe { rows.add(index) };
        // SAFETY: as above.
        unsafe { place.write_unaligned(*row) };
    }
    // SAFETY: the caller's place for a number.
    unsafe { count.write_unaligned(number) };
    code.0
}

/// The functions instead of NVML's.
#[expect(non_snake_case, reason = "named as NVML names them")]
mod calls {
    use std::ffi::{c_int, c_uint};

    use sublet_nvml::{Memory, MemoryV2, NvmlCode, Process, ProcessV1};

    use super::{Function, NVML, are_rows_known, may_be_bound, narrowed, running};
    use sublet_interpose::{Pointer, call_own, instead_of};

    const MISSING: c_int = NvmlCode::FUNCTION_NOT_FOUND.0;

    /// Calls the library's own function `$symbol` about a device, for the processes on it.
    macro_rules! running_by {
        ($symbol:ident, $device:ident) => {
            |count, rows| call_own!(NVML, $symbol($device, count, rows)).unwrap_or(MISSING)
        };
    }

    instead_of! {
        NVML, missing = MISSING;
        nvmlDeviceGetMemoryInfo(device: Pointer, memory: *mut Memory) -> c_int,
            |own| narrowed(device, memory, own);
        nvmlDeviceGetMemoryInfo_v2(device: Pointer, memory: *mut MemoryV2) -> c_int,
            |own| narrowed(device, memory, own);
        nvmlDeviceGetComputeRunningProcesses(
            device: Pointer, count: *mut c_uint, rows: *mut ProcessV1
        ) -> c_int,
            |_own| running(device, count, rows, running_by!(nvmlDeviceGetComputeRunningProcesses, device));
        nvmlDeviceGetComputeRunningProcesses_v2(
            device: Pointer, count: *mut c_uint, rows: *mut Process
        ) -> c_int,
            |_own| running(device, count, rows, running_by!(nvmlDeviceGetComputeRunningProcesses_v2, device));
        nvmlDeviceGetComputeRunningProcesses_v3(
            device: Pointer, count: *mut c_uint, rows: *mut Process
        ) -> c_int, |own| {
            if may_be_bound() && !are_rows_known() {
                return own();
            }
            running(device, count, rows, running_by!(nvmlDeviceGetComputeRunningProcesses_v3, device))
        };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sublet_nvml::Process;

    use super::*;

    /// As NVML lists so many processes, of which some may have begun since it was last asked.
    fn listed(found: &Cell<u32>, more: u32, count: *mut c_uint, rows: *mut Process) -> c_int {
        // SAFETY: the tests give a place for a number.
        let room = unsafe { count.read() };
        let number = found.replace(found.get() + more);
        // SAFETY: as above.
        unsafe { count.write(number) };
        if number > room {
            return NvmlCode::INSUFFICIENT_SIZE.0;
        }
        for index in 0..number {
            let row = Process { pid: 100 + index, ..Process::default() };
            // SAFETY: the buffer has room for so many.
            let place = unsafe { rows.add(index as usize) };
            // SAFETY: as above.
            unsafe { place.write(row) };
        }
        SUCCESS
    }

    #[test]
    fn a_list_that_grows_is_asked_for_again_and_not_for_ever() {
        let found = Cell::new(40);
        let rows = all::<Process>(|count, rows| listed(&found, 5, count, rows)).unwrap();
        assert_eq!(rows.len(), 45);
        assert!((100..145).eq(rows.iter().map(|row| row.pid)));
        let always = Cell::new(100);
        let refused = all::<Process>(|count, rows| listed(&always, 1000, count, rows));
        assert_eq!(refused.unwrap_err(), NvmlCode::INSUFFICIENT_SIZE.0);
        let unknown = all::<Process>(|_, _| 999);
        assert_eq!(unknown.unwrap_err(), 999);
    }

    #[test]
    fn a_callers_buffer_is_filled_as_far_as_it_goes() {
        let found: Vec<_> = (1..4).map(|pid| Process { pid, ..Process::default() }).collect();
        let pids = BTreeSet::from([1, 3]);
        let mut rows = [Process::default(); 3];
        let mut count: c_uint = 2;
        assert_eq!(answer(&found, &pids, (&raw mut count, rows.as_mut_ptr(), 2)), SUCCESS);
        assert_eq!((count, rows.map(|row| row.pid)), (2, [1, 3, 0]));
        let code = answer(&found, &pids, (&raw mut count, rows.as_mut_ptr(), 1));
        assert_eq!((code, count), (NvmlCode::INSUFFICIENT_SIZE.0, 2));
        let none: *mut Process = std::ptr::null_mut();
        assert_eq!(answer(&found, &BTreeSet::new(), (&raw mut count, none, 0)), SUCCESS);
        assert_eq!(count, 0);
    }

    #[test]
    fn without_a_budget_and_without_a_library_nothing_is_done() {
        let mut count: c_uint = 7;
        let place = &raw mut count;
        let none: *mut Process = std::ptr::null_mut();
        let code = running(std::ptr::null_mut(), place, none, |_, _| 42);
        assert_eq!((code, count), (42, 7));
        assert_eq!(running(std::ptr::null_mut(), std::ptr::null_mut(), none, |_, _| 2), 2);
        assert_eq!(gpu_of(std::ptr::null_mut()), None);
        let nowhere = std::ptr::null_mut::<sublet_nvml::Memory>();
        assert_eq!(narrowed(std::ptr::null_mut(), nowhere, || SUCCESS), SUCCESS);
    }
}
