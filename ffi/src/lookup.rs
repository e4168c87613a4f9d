//! How callers find our functions in place of the driver's and NCCL's: `dlsym` and `cuGetProcAddress`.

#![expect(unsafe_code, reason = "interposes dlsym and cuGetProcAddress")]

use std::arch::naked_asm;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use sublet_cuda_driver::lookup::{Exchange, FLAG_LEGACY, FLAG_PER_THREAD, Hook};
use vmm_pool::driver::DriverCode;

use crate::attach;
use crate::hooks;
use crate::nccl::{self, libraries};
use crate::real;

static EXCHANGE: AtomicPtr<Exchange> = AtomicPtr::new(std::ptr::null_mut());

/// The addresses to exchange, when they are known already. Asks nobody.
pub(crate) fn known_exchange() -> Option<&'static Exchange> {
    // SAFETY: a non-null value was leaked from a box in `exchange` and is never freed or changed.
    unsafe { EXCHANGE.load(Ordering::Acquire).as_ref() }
}

/// The addresses to exchange. Built without a lock, since callers may hold the loader's: two threads may
/// both build it, and one copy is then dropped.
pub(crate) fn exchange() -> Option<&'static Exchange> {
    let known = known_exchange();
    if known.is_some() {
        return known;
    }
    let built = Box::into_raw(Box::new(build()?));
    let null = std::ptr::null_mut();
    match EXCHANGE.compare_exchange(null, built, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: the box was leaked for good.
        Ok(_) => unsafe { built.as_ref() },
        Err(first) => {
            // SAFETY: nobody else has seen this box.
            drop(unsafe { Box::from_raw(built) });
            // SAFETY: another thread leaked this one for good.
            unsafe { first.as_ref() }
        }
    }
}

fn build() -> Option<Exchange> {
    let ask = hooks::real_cu_get_proc_address_v2();
    let mut pairs = Vec::new();
    let mut found_any = false;
    for hook in hooks::all() {
        let Ok(symbol) = CString::new(hook.symbol) else {
            continue;
        };
        if let Some(address) = real::driver_symbol(&symbol) {
            pairs.push((address.as_ptr().expose_provenance(), (hook.wrapper)()));
            found_any = true;
        }
        if let Some(address) = ask.and_then(|ask| asked(ask, hook)) {
            pairs.push((address, (hook.wrapper)()));
        }
    }
    // Names that this driver lacks have left an error that the caller has not made.
    real::forget_error();
    found_any.then(|| Exchange::new(pairs))
}

/// What the driver's `cuGetProcAddress` gives for exactly this hook: on some drivers its addresses are not
/// those of the exported symbols.
fn asked(ask: hooks::GetProcAddressV2, hook: &Hook) -> Option<usize> {
    let base = CString::new(hook.base).ok()?;
    let mut address: *mut c_void = std::ptr::null_mut();
    let mut status: c_int = 0;
    let flags = if hook.per_thread { FLAG_PER_THREAD } else { FLAG_LEGACY };
    // SAFETY: the name is terminated and both out-pointers are valid.
    let code =
        unsafe { ask(base.as_ptr(), &raw mut address, hook.version, flags, &raw mut status) };
    (code == 0 && !address.is_null()).then(|| address.expose_provenance())
}

/// Our function for the driver's at `real`; `real` itself when we have none.
pub(crate) fn exchanged(real: *mut c_void) -> *mut c_void {
    let wrapper = exchange().and_then(|known| known.wrapper_of(real.expose_provenance()));
    wrapper.map_or(real, std::ptr::with_exposed_provenance_mut)
}

/// `dlsym`, as every library of the process calls it. Whatever is not about the driver or NCCL goes on to the
/// loader's own by a jump: the loader reads the return address to know who asks (`RTLD_NEXT`,
/// `RTLD_DEFAULT`), and it is still that of the caller.
///
/// # Safety
/// As `dlsym(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
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
        real = sym real::REAL_DLSYM,
    )
}

/// What becomes of a question, in the two registers that the assembly above looks at.
#[derive(Debug)]
#[repr(C)]
struct Decision {
    address: *mut c_void,
    /// 0 when the loader answers.
    is_ours: usize,
}

impl Decision {
    const LOADER: Self = Self { address: std::ptr::null_mut(), is_ours: 0 };

    fn answer(address: usize) -> Self {
        Self { address: std::ptr::with_exposed_provenance_mut(address), is_ours: 1 }
    }
}

/// Our answer to `dlsym(handle, name)` asked from `caller`. Also makes sure that the loader's own `dlsym` is
/// known, which the jump needs.
unsafe extern "C" fn decide(handle: *mut c_void, name: *const c_char, caller: usize) -> Decision {
    if real::find_dlsym().is_none() || name.is_null() || real::is_looking() {
        return Decision::LOADER;
    }
    // Whoever opens a library asks it for a symbol next, before the library itself asks anybody.
    attach::look_again();
    // SAFETY: `dlsym` requires a terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    match name.to_bytes() {
        [b'c', b'u', ..] => decide_driver(handle, name, caller),
        [b'n', b'c', b'c', b'l', ..] => match nccl::number_of(name) {
            Some(number) => decide_nccl(handle, name, number, caller),
            None => Decision::LOADER,
        },
        _ => Decision::LOADER,
    }
}

fn decide_driver(handle: *mut c_void, name: &CStr, caller: usize) -> Decision {
    if !hooks::all().any(|hook| hook.symbol.as_bytes() == name.to_bytes()) {
        return Decision::LOADER;
    }
    let found = if handle == libc::RTLD_NEXT {
        None
    } else if handle != libc::RTLD_DEFAULT {
        real::dlsym(handle, name)
    } else if attach::is_attached() {
        // The driver may come before us in the caller's order.
        real::program()
            .and_then(|program| real::dlsym(program, name))
            .or_else(|| real::dlsym_of_file(caller, name))
    } else {
        // Whatever the caller would bind to, which is our export already.
        None
    };
    let Some(found) = found else {
        return Decision::LOADER;
    };
    let ours = exchanged(found.as_ptr());
    if ours == found.as_ptr() {
        Decision::LOADER
    } else {
        Decision::answer(ours.expose_provenance())
    }
}

/// Unlike the driver, NCCL may be missing, or there twice: our exports must be found only where NCCL's own
/// would have been.
fn decide_nccl(handle: *mut c_void, name: &CStr, number: usize, caller: usize) -> Decision {
    let library = if handle == libc::RTLD_NEXT {
        if attach::is_attached() {
            // The caller came before us, and its order need not have us in it.
            return Decision::LOADER;
        }
        // Behind the caller is less than behind us: with nothing here the loader could only find us.
        return match real::dlsym(libc::RTLD_NEXT, name) {
            Some(_) => Decision::LOADER,
            None => Decision::answer(0),
        };
    } else if handle == libc::RTLD_DEFAULT {
        libraries::behind_us().or_else(|| libraries::of_dependencies(caller))
    } else {
        let Some(found) = real::dlsym(handle, name) else {
            return Decision::LOADER;
        };
        if real::is_own(found.as_ptr().expose_provenance()) {
            // The handle of the program itself, whose order we are in, or of a library that needs us and NCCL.
            libraries::of_handle(handle).or_else(libraries::behind_us)
        } else {
            match libraries::of_handle(handle) {
                Some(library) if library.is_watched() => Some(library),
                _ => return Decision::LOADER,
            }
        }
    };
    let found = library.and_then(|library| {
        if library.is_watched() { nccl::answer(library, number) } else { library.function(number) }
    });
    // Asked last, so that a name that is nowhere leaves the caller the loader's error.
    let found = found.or_else(|| {
        real::dlsym(libc::RTLD_NEXT, name).map(|found| found.as_ptr().expose_provenance())
    });
    Decision::answer(found.unwrap_or(0))
}

/// Answers `cuGetProcAddress`: the driver's answer, exchanged.
pub(crate) unsafe fn exchange_answer(code: c_int, answer: *mut *mut c_void) {
    if DriverCode(code) != DriverCode::SUCCESS || answer.is_null() {
        return;
    }
    // SAFETY: the caller's out-pointer, which the driver has just written.
    let real = unsafe { *answer };
    if !real.is_null() {
        // SAFETY: as above.
        unsafe { *answer = exchanged(real) };
    }
}
