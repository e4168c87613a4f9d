//! The dynamic loader's own functions, called without the hooks.

#![expect(unsafe_code, reason = "asks the dynamic loader for functions by name")]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// An argument that is only passed on.
pub type Pointer = *mut c_void;

/// The address of a function of ours. A function itself, because no constant may hold an address as a number.
pub type AddressOf = fn() -> usize;

/// The way in which the libraries of this process are bound to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// By the loader: we come before the provider and before all libraries whose functions we replace.
    ByLoader,
    /// By an attach: we came after the others, and may be in no library's search order.
    ByAttach,
}

pub(crate) static IS_ATTACHED: AtomicBool = AtomicBool::new(false);

impl Binding {
    /// Returns the way in which this process's libraries were bound to us.
    pub fn of_process() -> Self {
        if IS_ATTACHED.load(Ordering::Acquire) { Self::ByAttach } else { Self::ByLoader }
    }
}

/// Does the name of the file at `path` begin with `begin`?
pub(crate) fn is_file_of(path: &[u8], begin: &[u8]) -> bool {
    let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    file.starts_with(begin)
}

/// The type of `dlsym`.
pub type DlsymFn = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The beginnings of the file names of the loader, the C library and the kernel's part of a process.
pub(super) const FILES: [&str; 4] = ["ld-linux", "libc.so", "libdl.so", "linux-vdso"];

thread_local! {
    /// True while this thread looks up names for us: our own `dlsym` then passes calls on.
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

/// Address of the loader's `dlsym`; read by the assembly of our `dlsym`.
pub static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);

/// Address of the loader's `dlvsym`; read by the assembly of our `dlvsym`.
pub static REAL_DLVSYM: AtomicUsize = AtomicUsize::new(0);

/// Is this thread looking up a name for us?
pub(crate) fn is_looking() -> bool {
    LOOKING.try_with(Cell::get).unwrap_or(true)
}

/// Runs `work` while our own `dlsym` passes calls of this thread on.
pub(crate) fn past_hooks<T>(work: impl FnOnce() -> T) -> T {
    let before = LOOKING.try_with(|looking| looking.replace(true)).unwrap_or(true);
    let value = work();
    let _restored = LOOKING.try_with(|looking| looking.set(before));
    value
}

/// Finds the loader's `dlsym`. Takes no lock of ours: two threads may both look, and find the same.
pub fn find_dlsym() -> Option<DlsymFn> {
    let known = REAL_DLSYM.load(Ordering::Acquire);
    let address = if known == 0 {
        // glibc 2.34 moved `dlsym` into libc under a new version; before that it was in libdl.
        let versions = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
        let found = versions.iter().find_map(|version| {
            // SAFETY: both strings are terminated; `dlvsym` is the loader's own, which we do not hook.
            let found =
                unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            NonNull::new(found)
        })?;
        let address = found.as_ptr().expose_provenance();
        REAL_DLSYM.store(address, Ordering::Release);
        address
    } else {
        known
    };
    let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the address is that of the loader's `dlsym`, which has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, DlsymFn>(pointer) })
}

/// Returns the loader's answer for `name` in `handle`: an explicit handle, or `RTLD_NEXT`, which means after this library.
pub(crate) fn dlsym(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let find = find_dlsym()?;
    // SAFETY: the name is terminated; of the pseudo-handles, which ask who calls, only the one that means us
    // is used.
    past_hooks(|| NonNull::new(unsafe { find(handle, name.as_ptr()) }))
}

/// Returns the loader's answer for `version` of `name` in the explicit `handle`.
pub(crate) fn dlvsym(handle: *mut c_void, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: both strings are terminated, and the handle is the caller's own.
    past_hooks(|| NonNull::new(unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) }))
}

/// Clears the error that the loader would return in this thread's next `dlerror`, as any successful `dlsym` does.
pub(crate) fn forget_error() {
    // SAFETY: the call has no requirements; the text it returns is not looked at.
    let _forgotten = unsafe { libc::dlerror() };
}

/// Returns a handle of the program itself: names are looked up in it in the whole program's order.
pub(crate) fn program() -> Option<*mut c_void> {
    static PROGRAM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let known = PROGRAM.load(Ordering::Acquire);
    if !known.is_null() {
        return Some(known);
    }
    // SAFETY: a null name is the program's, which is loaded already.
    let opened = past_hooks(|| unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) });
    PROGRAM.store(opened, Ordering::Release);
    (!opened.is_null()).then_some(opened)
}

/// Returns the loader's facts about `address`.
fn info_of(address: usize) -> Option<libc::Dl_info> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let pointer = std::ptr::with_exposed_provenance::<c_void>(address);
    // SAFETY: `info` is a valid out-pointer; `dladdr` only compares the address.
    if unsafe { libc::dladdr(pointer, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: the call succeeded and filled it; zeroes are valid too.
    Some(unsafe { info.assume_init() })
}

/// Returns the address at which the file that holds `address` is mapped, and its path.
pub fn image_of(address: usize) -> Option<(usize, CString)> {
    let info = info_of(address)?;
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's file names are terminated and live as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some((info.dli_fbase.addr(), name.to_owned()))
}

/// Returns the exported function that contains `address`.
pub fn function_of(address: usize) -> Option<CString> {
    let info = info_of(address).filter(|info| !info.dli_sname.is_null())?;
    // SAFETY: the loader's names of symbols are terminated and live as long as the library.
    Some(unsafe { CStr::from_ptr(info.dli_sname) }.to_owned())
}

/// Is `address` in this library?
pub fn is_own(address: usize) -> bool {
    is_same_file(address, (is_own as *const ()).addr())
}

/// Are both addresses in one file?
pub(crate) fn is_same_file(one: usize, other: usize) -> bool {
    let base = |address| info_of(address).map(|info| info.dli_fbase.addr());
    base(one).is_some_and(|one| base(other) == Some(one))
}

/// Returns the file that contains `address`.
pub fn file_of(address: usize) -> Option<String> {
    image_of(address).map(|(_, path)| path.to_string_lossy().into_owned())
}

/// Returns a handle of a library that is loaded already. The caller closes it with [`close`].
pub(crate) fn open_loaded(path: &CStr) -> Option<*mut c_void> {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: the path is terminated; nothing is loaded.
    let handle = past_hooks(|| unsafe { libc::dlopen(path.as_ptr(), flags) });
    (!handle.is_null()).then_some(handle)
}

/// Calls `work` with the loader's answer for `name` in the loaded file at `path` and its dependencies. The file stays loaded
/// meanwhile.
pub fn with_function<T>(
    path: &CStr,
    name: &CStr,
    work: impl FnOnce(NonNull<c_void>) -> T,
) -> Option<T> {
    let handle = open_loaded(path)?;
    let done = dlsym(handle, name).map(work);
    close(handle);
    done
}

/// Closes a handle of [`open_loaded`].
pub(crate) fn close(handle: *mut c_void) {
    // SAFETY: the caller has the handle from `open_loaded`, which took the reference given back here.
    let _closed = unsafe { libc::dlclose(handle) };
}

/// Is a library of this name loaded?
pub fn is_loaded(name: &CStr) -> bool {
    open_loaded(name).map(close).is_some()
}
