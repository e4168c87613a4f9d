//! Functions about contents of offloaded memory, and about contents that the application does not need.

#![expect(unsafe_code, reason = "exports the C interface, and calls back into the application")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vmm_pool::driver::{DeviceAddress, VaRange};
use vmm_pool::sync::lock;

use crate::last_call::{ARGUMENT, OK, answered, fail, guarded, not_joined};
use crate::runtime;

/// The longest time that a pause waits for the application's answer. The application may wait for a lock whose holder
/// waits at our gate: then everything is saved.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(250);
/// The most ranges in one answer.
const RANGES_MAX: usize = 1 << 20;

/// Writes to `host` the host address of the saved contents of a range.
///
/// # Safety
/// `host` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_host_copy(
    address: u64,
    size_bytes: u64,
    host: *mut *const c_void,
) -> c_int {
    guarded(|| {
        let Some(member) = runtime::member() else {
            return not_joined();
        };
        if host.is_null() || size_bytes == 0 {
            return fail(ARGUMENT, "a host copy needs a size, and somewhere to write");
        }
        let found = member.pool().saved().at(VaRange::new(DeviceAddress(address), size_bytes));
        answered(found.map(|pointer| {
            // SAFETY: checked not to be null; the caller's for one pointer.
            unsafe { host.write(pointer.as_ptr().cast_const().cast()) };
        }))
    })
}

/// Copies the saved contents of a range to `target`.
///
/// # Safety
/// `target` is null or valid for writes of `size_bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_host_copy_out(
    address: u64,
    size_bytes: u64,
    target: *mut c_void,
) -> c_int {
    guarded(|| {
        let Some(member) = runtime::member() else {
            return not_joined();
        };
        let Ok(length) = usize::try_from(size_bytes) else {
            return fail(ARGUMENT, &format!("{size_bytes} bytes are too many"));
        };
        if target.is_null() || length == 0 {
            return fail(ARGUMENT, "a host copy needs a size, and somewhere to write");
        }
        // SAFETY: the caller's buffer has this many bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(target.cast::<u8>(), length) };
        answered(member.pool().saved().read(DeviceAddress(address), target))
    })
}

/// Sets the directory for saved contents of `SUBLET_CONTENTS_FILE`.
///
/// # Safety
/// `path` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_set_file_dir(path: *const c_char) -> c_int {
    guarded(|| {
        if path.is_null() {
            return fail(ARGUMENT, "contents in files need a directory");
        }
        // SAFETY: checked not to be null; the caller's terminated string.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
        // The process may change its own directory before the next pause.
        let dir = match std::path::absolute(path) {
            Ok(dir) => dir,
            Err(error) => {
                return fail(ARGUMENT, &format!("{} is no directory: {error}", path.display()));
            }
        };
        answered(tenants::keep::check_file_dir(&dir).map(|()| runtime::set_file_dir(dir)))
    })
}

/// A function of the application, and its context argument.
#[derive(Clone, Copy, Debug)]
struct ContentsFunction {
    function: unsafe extern "C" fn(*mut c_void, u64),
    context: *mut c_void,
}

// SAFETY: the context is the application's, which is told that it is used on another thread.
unsafe impl Send for ContentsFunction {}

/// The application's function, and the open query.
#[derive(Debug)]
struct Questions {
    source: Option<ContentsFunction>,
    /// The token of the open query, and the channel for its answer.
    open: Option<(u64, crossbeam_channel::Sender<Vec<VaRange>>)>,
}

static QUESTIONS: Mutex<Questions> = Mutex::new(Questions { source: None, open: None });
static LAST_TOKEN: AtomicU64 = AtomicU64::new(0);

/// Sets the function that each pause calls to learn which memory the application does not need.
///
/// # Safety
/// `source` may be called with `context`, from any thread, until another is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_set_unused_source(
    source: Option<unsafe extern "C" fn(*mut c_void, u64)>,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        lock(&QUESTIONS).source = source.map(|function| ContentsFunction { function, context });
        runtime::set_unused_source(ask_unused);
        OK
    })
}

/// Answers a call of [`sublet_set_unused_source`]'s function.
///
/// # Safety
/// Both arrays are valid for `count` reads, or `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sublet_unused(
    token: u64,
    starts: *const u64,
    sizes: *const u64,
    count: usize,
) -> c_int {
    guarded(|| {
        if count > RANGES_MAX || (count > 0 && (starts.is_null() || sizes.is_null())) {
            return fail(
                ARGUMENT,
                &format!("{count} ranges: give up to {RANGES_MAX}, and both arrays"),
            );
        }
        let ranges = if count == 0 {
            Vec::new()
        } else {
            // SAFETY: not null, and the caller promises this many.
            let starts = unsafe { std::slice::from_raw_parts(starts, count) };
            // SAFETY: as above.
            let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
            let range = |(&start, &size): (&u64, &u64)| VaRange::new(DeviceAddress(start), size);
            starts.iter().zip(sizes).map(range).collect()
        };
        let open = lock(&QUESTIONS).open.take_if(|(open, _)| *open == token);
        let sent = open.is_some_and(|(_, answer)| answer.send(ranges).is_ok());
        if sent {
            OK
        } else {
            fail(ARGUMENT, "the answer came too late: the pause went on without it")
        }
    })
}

/// Returns the memory that the application does not need, by its answer. Empty if it has no source or does not answer in time.
fn ask_unused() -> Vec<VaRange> {
    let (send, answer) = crossbeam_channel::bounded(1);
    let token = LAST_TOKEN.fetch_add(1, Ordering::Relaxed) + 1;
    let source = {
        let mut questions = lock(&QUESTIONS);
        let Some(source) = questions.source else {
            return Vec::new();
        };
        questions.open = Some((token, send));
        source
    };
    let ask = move || {
        let source = source;
        // SAFETY: the caller that set the source allows calls with its context from any thread.
        unsafe { (source.function)(source.context, token) };
    };
    let thread = vmm_pool::threads::spawn("sublet-unused", ask, |_| {});
    let answered = thread.ok().and_then(|()| answer.recv_timeout(ANSWER_TIMEOUT).ok());
    lock(&QUESTIONS).open.take_if(|(open, _)| *open == token);
    if answered.is_none() {
        tracing::debug!("the application did not say in time what it does not need: all is saved");
    }
    answered.unwrap_or_default()
}
