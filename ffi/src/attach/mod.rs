//! Attaching to a process that was started without us: `sublet_attach`.
//!
//! Under `LD_PRELOAD` the loader binds everybody's `dlsym`, `cu...` and `nccl...` to us. A library that is
//! opened later is asked by nobody, so an attach writes our addresses where the loader wrote others:
//!
//! 1. into the import slots of all libraries (`slots`, found by `object`);
//! 2. into tables of the driver's functions that libraries have filled before (`stored`);
//! 3. and again for what is loaded later: whoever opens a library asks it for a symbol next, and our `dlsym`
//!    then looks first whether the loader has loaded anything since the last walk (`walk`).
//!
//! What it cannot reach is in the report (`report`), library by library; `docs/attach.md` lists the limits.

#![expect(unsafe_code, reason = "asks for a notice of forks")]

mod before;
mod object;
mod protections;
pub(crate) mod report;
mod slots;
mod stored;
mod walk;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use tenants::identity::TenantName;

use crate::{lookup, real, runtime};
use before::Table;
use report::{Device, Library, Report, State};
use walk::{Entry, Purpose};

/// Our `dlsym` was written into others' slots.
static ATTACHED: AtomicBool = AtomicBool::new(false);
/// We are a forked child, which runs on without us.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The devices with a context before the first attach.
static DEVICES: Mutex<Option<Vec<Device>>> = Mutex::new(None);

/// Why launches may pass our gate by, as the last attach found it.
static UNGATED: Mutex<Option<String>> = Mutex::new(None);

/// Why launches of this process may pass our gate by.
pub(crate) fn ungated() -> Option<String> {
    lock(&UNGATED).clone()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Were this process's libraries bound to us by an attach, and not by the loader?
pub(crate) fn is_attached() -> bool {
    ATTACHED.load(Ordering::Acquire)
}

/// Patches what was loaded since the last time. Blocks on no lock but the loader's of its list, which nobody
/// holds while waiting for us.
pub(crate) fn look_again() {
    if is_attached() && !FORKED.load(Ordering::Relaxed) {
        walk::walk(Purpose::PatchWhatIsNew);
    }
}

/// Does the loader bind everybody's `dlsym` to us?
fn is_preloaded() -> bool {
    let found = real::program().and_then(|program| real::dlsym(program, c"dlsym"));
    found.is_some_and(|found| real::is_own(found.as_ptr().expose_provenance()))
}

/// Why a process was not attached. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another tenant has been joined; the text says which, and what to do.
    OtherTenant(String),
    /// This process cannot be attached, for this reason.
    Impossible(&'static str),
}

/// Attaches this process to `tenant`, or to the one that the environment names.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn attach(tenant: Option<TenantName>) -> Result<(), Refusal> {
    if FORKED.load(Ordering::Relaxed) {
        let why =
            "a child of an attached process runs on without Sublet: start another program in it";
        return Err(Refusal::Impossible(why));
    }
    // The jump of our `dlsym` needs the loader's own.
    if real::find_dlsym().is_none() {
        let why = "the loader's own dlsym was not found: start the process with `sublet run`";
        return Err(Refusal::Impossible(why));
    }
    if let Some(tenant) = tenant {
        runtime::choose_tenant(tenant).map_err(Refusal::OtherTenant)?;
    }
    walk::prepare();
    let driver_is_loaded = walk::driver_is_loaded();
    if driver_is_loaded {
        // Its addresses must be known before the walk, which may not ask the loader.
        let _known = lookup::exchange();
    }
    let is_first = lock(&DEVICES).is_none();
    let before = if driver_is_loaded && is_first { before::devices() } else { Vec::new() };
    if is_preloaded() {
        walk::walk(Purpose::Look);
        return Ok(());
    }
    watch_forks();
    ATTACHED.store(true, Ordering::Release);
    walk::walk(Purpose::Patch);
    // A thread that was binding a slot for the first time meanwhile has written over ours.
    walk::walk(Purpose::Patch);
    let mut devices = lock(&DEVICES);
    if devices.is_none() {
        for &device in &before {
            runtime::note_of_attach(earlier_memory(device));
        }
        *devices = Some(before);
    }
    drop(devices);
    let ungated = report().libraries.into_iter().find(|library| library.state != State::Hooked);
    let ungated = ungated.map(|library| {
        format!("launches from {} may pass Sublet by ({})", library.path, library.why)
    });
    if let Some(why) = &ungated {
        runtime::note_of_attach(format!("this process can only be paused from inside: {why}"));
    }
    *lock(&UNGATED) = ungated;
    Ok(())
}

fn earlier_memory(device: Device) -> String {
    format!(
        "GPU {} had a context before sublet_attach, and {} bytes in use by all processes: what this process \
         had asked for by then stays on the device at a pause; attach before the first use of CUDA, or start \
         the process with `sublet run`",
        device.device, device.used_bytes
    )
}

/// A forked child must not wait for locks of the loader's that another thread held at the fork.
fn watch_forks() {
    unsafe extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler is a plain function that lives as long as this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::warn!(failed, "no notice of forks");
        }
    });
}

/// What the attach found and did, with what was loaded since.
pub(crate) fn report() -> Report {
    let is_preloaded = !is_attached() && is_preloaded();
    if !FORKED.load(Ordering::Relaxed) {
        // What has been unloaded since is not listed any more.
        walk::walk(if is_attached() { Purpose::Patch } else { Purpose::Look });
    }
    let is_up = walk::driver_is_loaded() && before::driver_is_up();
    let libraries: Vec<Library> = walk::entries()
        .into_iter()
        .map(|(path, entry)| library(path, &entry, is_preloaded, is_up))
        .collect();
    let tenant = runtime::member().map_or_else(
        || runtime::tenant_name().ok().map(|name| name.to_string()),
        |member| Some(member.tenant().to_string()),
    );
    let is_hooked = |library: &Library| library.state == State::Hooked;
    Report {
        tenant,
        launches_are_held: libraries.iter().all(is_hooked),
        libraries,
        devices: lock(&DEVICES).clone().unwrap_or_default(),
    }
}

fn library(path: String, entry: &Entry, is_preloaded: bool, driver_is_up: bool) -> Library {
    let table = if driver_is_up { before::table_of(&path) } else { Table::NoRuntime };
    let (state, why) = match (&entry.problem, table) {
        (Some(problem), _) => (State::Unknown, problem.clone()),
        (None, Table::Drivers) => {
            (State::Late, "its CUDA runtime still gives the driver's own functions out".to_owned())
        }
        (None, Table::Silent(code)) => (
            State::Unknown,
            format!(
                "its CUDA runtime failed with {code} when asked for a function of the driver's"
            ),
        ),
        (None, Table::Ours) => {
            (State::Hooked, "its CUDA runtime gives our functions out".to_owned())
        }
        (None, Table::NoRuntime) => (State::Hooked, hooked_how(entry, is_preloaded).to_owned()),
    };
    let path = if path.is_empty() { program_path() } else { path };
    Library { path, slots: entry.slots, exchanged: entry.exchanged, state, why }
}

fn hooked_how(entry: &Entry, is_preloaded: bool) -> &'static str {
    if is_preloaded {
        "libsublet.so is preloaded"
    } else if entry.exchanged > 0 {
        "the driver's functions that it had looked up before were exchanged"
    } else {
        "its imports lead to us"
    }
}

fn program_path() -> String {
    std::env::current_exe()
        .map_or_else(|_| "(program)".to_owned(), |path| path.display().to_string())
}
