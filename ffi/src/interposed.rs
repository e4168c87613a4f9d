//! The tables of the interposition engine in this process, and the functions that look names up: `dlsym` and `cuGetProcAddress`.
//!
//! The tables are the driver's ([`hooks`]), NCCL's and NCCL EP's ([`nccl`](crate::nccl)), and those of libraries that register
//! memory with devices (`registrations`), and NVML's (`nvml`). The engine ([`sublet_interpose`]) puts them into effect. A further
//! library needs a further entry in `INTERPOSED`.

#![expect(unsafe_code, reason = "interposes dlsym and cuGetProcAddress")]

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_ulonglong};

use sublet_cuda_driver::functions::{FUNCTIONS, PREFIX};
use sublet_interpose::provider::{Hook, Provider};
use sublet_interpose::{Decision, Interposition, LoaderFunction, Pointer, loader};
use vmm_pool::driver::DriverCode;

use crate::driver::{COMPANIONS, DRIVER, call_driver, given_out};
use crate::hooks::{self, hook_row};
use crate::nccl::NCCL;
use crate::nccl::experts::NCCL_EP;
use crate::nvml::NVML;
use crate::registrations::{GDRCOPY, MLX5, VERBS};

/// The tables of this process, one entry for each library.
pub(crate) static INTERPOSED: Interposition = Interposition::new(
    Provider::new(
        &DRIVER,
        PREFIX,
        COMPANIONS,
        &[hooks::REPLACING, hooks::WAITING, hooks::ASKING, LOOKUP],
        given_out,
    ),
    &[&NCCL, &NCCL_EP, &VERBS, &MLX5, &GDRCOPY, &NVML],
    &[
        LoaderFunction {
            name: c"dlsym",
            ours: || (dlsym as *const ()).expose_provenance(),
            is_exported: true,
        },
        // `dlvsym` is not exported, because Sublet itself finds the loader's `dlsym` through the loader's `dlvsym`.
        LoaderFunction {
            name: c"dlvsym",
            ours: || (versioned as *const ()).expose_provenance(),
            is_exported: false,
        },
    ],
);

/// The initialiser of this library. The loader runs it before the program's own initialisers.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = start;

extern "C" fn start() {
    INTERPOSED.start();
}

/// The driver's functions that look up other functions.
const LOOKUP: &[Hook] = &[
    hook_row!(cuGetProcAddress, cuGetProcAddress),
    hook_row!(cuGetProcAddress_v2, cuGetProcAddress_v2),
];

// Each row of the table has its function.
const _: () = assert!(
    hooks::REPLACING.len() + hooks::WAITING.len() + hooks::ASKING.len() + LOOKUP.len()
        == FUNCTIONS.len(),
    "a function of the table has none of ours in its place"
);

/// The `dlsym` that every library of the process calls. For a name in no table, it jumps to the loader's own. The loader reads
/// the return address to identify the caller (`RTLD_NEXT`, `RTLD_DEFAULT`), and after a jump that is still the caller's.
///
/// # Safety
/// As `dlsym(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: Pointer, name: *const c_char) -> Pointer {
    naked_asm!(
        "push rdi",
        "push rsi",
        "mov rdx, qword ptr [rsp + 16]",
        "sub rsp, 8",
        "call {decide}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jz 2f",
        "ret",
        "2:",
        "jmp qword ptr [rip + {real}]",
        decide = sym decide,
        real = sym loader::REAL_DLSYM,
    )
}

/// Decides the answer to `dlsym(handle, name)` from `caller`. Afterwards the address of the loader's own `dlsym` is known, which
/// the jump needs.
unsafe extern "C" fn decide(handle: Pointer, name: *const c_char, caller: usize) -> Decision {
    // SAFETY: `dlsym` requires a terminated string.
    unsafe { INTERPOSED.answer(handle, name, caller) }
}

/// The `dlvsym` of libraries whose slots lead to Sublet. It works as [`dlsym`], with a version. NCCL looks up libibverbs with it.
///
/// # Safety
/// As `dlvsym(3)`.
#[unsafe(naked)]
unsafe extern "C" fn versioned(
    handle: Pointer,
    name: *const c_char,
    version: *const c_char,
) -> Pointer {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {decide}",
        "mov r10, rdx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test r10, r10",
        "jz 2f",
        "ret",
        "2:",
        "jmp qword ptr [rip + {real}]",
        decide = sym decide_versioned,
        real = sym loader::REAL_DLVSYM,
    )
}

/// Decides the answer to `dlvsym(handle, name, version)`. Afterwards the address of the loader's own `dlvsym` is known.
unsafe extern "C" fn decide_versioned(
    handle: Pointer,
    name: *const c_char,
    version: *const c_char,
) -> Decision {
    // SAFETY: `dlvsym` requires terminated strings.
    unsafe { INTERPOSED.answer_versioned(handle, name, version) }
}

/// Replaces the address that `cuGetProcAddress` has returned, if `code` is a success.
///
/// # Safety
/// `answer` is the out-pointer of that call: null, or written by it where `code` is a success.
unsafe fn exchange_answer(code: c_int, answer: *mut Pointer) {
    if DriverCode(code) != DriverCode::SUCCESS || answer.is_null() {
        return;
    }
    // SAFETY: the caller's out-pointer, which the driver has just written.
    let real = unsafe { *answer };
    if !real.is_null() {
        // SAFETY: as above.
        unsafe { *answer = INTERPOSED.provider().exchanged(real) };
    }
}

/// Returns the driver's function for a name and version, or Sublet's replacement.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    answer: *mut Pointer,
    version: c_int,
    flags: c_ulonglong,
) -> c_int {
    let code = call_driver!(cuGetProcAddress(name, answer, version, flags));
    // SAFETY: the driver has just written the caller's out-pointer.
    unsafe { exchange_answer(code, answer) };
    code
}

/// As [`cuGetProcAddress`], and also reports why a name was not found.
///
/// # Safety
/// As the driver's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    answer: *mut Pointer,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_int,
) -> c_int {
    let code = call_driver!(cuGetProcAddress_v2(name, answer, version, flags, status));
    // SAFETY: the driver has just written the caller's out-pointer.
    unsafe { exchange_answer(code, answer) };
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn only_names_that_we_stand_in_for_are_ours() {
        INTERPOSED.prepare();
        let names = [
            c"dlsym",
            c"dlvsym",
            c"cuMemAlloc_v2",
            c"ncclAllReduce",
            c"cuGetProcAddress",
            c"ibv_reg_mr",
            c"nvmlDeviceGetMemoryInfo_v2",
        ];
        for name in names {
            assert!(INTERPOSED.import(name).is_some(), "{name:?}");
        }
        for name in
            [c"dlopen", c"cuInit", c"cudaMalloc", c"ncclGetVersion", c"nvmlInit_v2", c"malloc", c""]
        {
            assert_eq!(INTERPOSED.import(name), None, "{name:?}");
        }
    }
}
