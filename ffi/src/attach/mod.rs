//! The attach to a process that was started without Sublet: `sublet_attach`.
//!
//! Under `LD_PRELOAD` the loader binds the `dlsym`, `cu...` and `nccl...` of all libraries to us. It asks no library that is
//! opened later, so at an attach the engine writes our addresses where the loader wrote others (`ffi/interpose/src/patch`). This module
//! handles the tenant: the choice of the tenant, the memory of devices before (`cuda_state`), and whether a pause from outside is
//! safe.
//!
//! The `Report` says, library by library, what an attach cannot reach; `docs/attach.md` lists the limits.

#![expect(unsafe_code, reason = "asks for a notice of forks")]

mod cuda_state;

use std::path::Path;
use std::sync::{Mutex, Once};

use cuda_state::Table;
use serde::Serialize;
use sublet_interpose::{Binding, Entry, Purpose, loader};
use sublet_registrations::device_files::{self, DeviceFile};
use tenants::identity::TenantName;
use vmm_pool::sync::lock;

use crate::driver::DRIVER;
use crate::interposed::INTERPOSED;
use crate::{contexts, environment, registrations, runtime};

/// The devices with a context before the first attach.
static DEVICES: Mutex<Option<Vec<Device>>> = Mutex::new(None);

/// The library that took the driver's functions before the first attach, and keeps them, as a sentence.
static LATE: Mutex<Option<String>> = Mutex::new(None);

/// Why a process was not attached. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another tenant has been joined. The text names it, and says what to do.
    OtherTenant(String),
    /// This process cannot be attached, for this reason.
    Impossible(&'static str),
}

/// Attaches this process to `tenant`, or to the one that the environment names.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn attach(tenant: Option<TenantName>) -> Result<(), Refusal> {
    if INTERPOSED.is_forked() {
        let why =
            "a child of an attached process runs on without Sublet: start another program in it";
        return Err(Refusal::Impossible(why));
    }
    // The jump of our `dlsym` needs the loader's own.
    if loader::find_dlsym().is_none() {
        let why = "the loader's own dlsym was not found: start the process with `sublet run`";
        return Err(Refusal::Impossible(why));
    }
    if let Some(tenant) = tenant {
        runtime::choose_tenant(tenant).map_err(Refusal::OtherTenant)?;
    }
    INTERPOSED.prepare();
    let driver_is_loaded = DRIVER.is_loaded();
    if driver_is_loaded {
        // The provider's addresses must be known before the walk, which must not call the loader.
        let _known = INTERPOSED.provider().exchange();
    }
    let is_first = lock(&DEVICES).is_none();
    let before = if driver_is_loaded && is_first { cuda_state::devices() } else { Vec::new() };
    if driver_is_loaded {
        let _listed = contexts::listed_current();
    }
    if INTERPOSED.is_bound_by_loader() {
        INTERPOSED.walk(Purpose::Patch);
        return Ok(());
    }
    watch_forks();
    INTERPOSED.bind_by_attach();
    INTERPOSED.walk(Purpose::Patch);
    // Meanwhile a thread may have bound a slot for the first time, and so overwritten our address.
    INTERPOSED.walk(Purpose::Patch);
    if is_first && !before.is_empty() {
        // From here on, hooks see each change of peer access.
        cuda_state::learn_peer_access();
    }
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
        format!(
            "launches from {} may pass Sublet by ({}): start it with `sublet run`",
            library.path, library.why
        )
    });
    if let Some(why) = &ungated {
        // Part of the process had looked up CUDA functions before Sublet was attached. Its launches may pass Sublet by.
        // `sublet pause` from another process is refused; the process can pause itself. Start it with `sublet run`.
        runtime::note_of_attach(format!("this process can only be paused from inside: {why}"));
    }
    *lock(&LATE) = ungated;
    Ok(())
}

fn earlier_memory(device: Device) -> String {
    format!(
        "GPU {} had a context before sublet_attach, and all processes use {} bytes: a pause leaves earlier memory of \
         this process on the device; attach before the first use of CUDA, or start the process with `sublet run`",
        device.device, device.used_bytes
    )
}

/// Returns why work of this process may reach a device past the gate: findings of the attach, and libraries loaded since. Called
/// at each pause.
pub(crate) fn ungated() -> Option<String> {
    // Always: the walk is for `unseen_pins` too.
    let escape = INTERPOSED.escape();
    lock(&LATE).clone().or(escape)
}

/// Returns why device memory of this process may be pinned unseen by Sublet. Each pause calls this after [`ungated`], which has
/// walked the libraries.
pub(crate) fn unseen_pins() -> Option<String> {
    let seen = |kind| {
        let file = match kind {
            DeviceFile::Verbs => registrations::VERBS_FILE,
            DeviceFile::GdrCopy => registrations::GDRCOPY_FILE,
            DeviceFile::Storage => return Err("cuFile's registrations are not seen".to_owned()),
        };
        INTERPOSED.sees_calls_of(file)
    };
    device_files::unseen_pins(
        Path::new(device_files::OWN_DESCRIPTORS),
        &environment::current().without_pins(),
        seen,
    )
}

/// Registers a handler for forks: a forked child must not wait for locks of the loader that another thread held at the fork.
fn watch_forks() {
    unsafe extern "C" fn in_child() {
        INTERPOSED.set_forked();
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

/// Returns the findings of the attach, with the libraries that were loaded since.
pub(crate) fn report() -> Report {
    let is_attached = Binding::of_process() == Binding::ByAttach;
    let is_preloaded = !is_attached && INTERPOSED.is_bound_by_loader();
    if !INTERPOSED.is_child() {
        // This walk removes unloaded libraries from the list.
        INTERPOSED.walk(Purpose::Patch);
    }
    let is_up = DRIVER.is_loaded() && cuda_state::driver_is_up();
    let libraries: Vec<LibraryHooks> = INTERPOSED
        .walked()
        .into_iter()
        .map(|(path, entry)| library(path, &entry, is_preloaded, is_up))
        .collect();
    let tenant = runtime::member().map_or_else(
        || runtime::tenant_name().ok().map(|name| name.to_string()),
        |member| Some(member.presence().tenant().to_string()),
    );
    let is_hooked = |library: &LibraryHooks| library.state == State::Hooked;
    Report {
        tenant,
        launches_are_held: libraries.iter().all(is_hooked),
        libraries,
        devices: lock(&DEVICES).clone().unwrap_or_default(),
    }
}

fn library(path: String, entry: &Entry, is_preloaded: bool, driver_is_up: bool) -> LibraryHooks {
    let table = if driver_is_up { cuda_state::table_of(&path) } else { Table::NoRuntime };
    let (state, why) = match (&entry.problem, table) {
        (Some(problem), _) => (State::Unknown, problem.clone()),
        (None, Table::Drivers) => {
            (State::Late, "its CUDA runtime still returns the driver's own functions".to_owned())
        }
        (None, Table::Silent(code)) => (
            State::Unknown,
            format!("its CUDA runtime failed with {code} at the lookup of a driver function"),
        ),
        (None, Table::Ours) => {
            (State::Hooked, "its CUDA runtime gives our functions out".to_owned())
        }
        (None, Table::NoRuntime) => (State::Hooked, hooked_how(entry, is_preloaded).to_owned()),
    };
    let path = if path.is_empty() { program_path() } else { path };
    LibraryHooks { path, slots: entry.slots, exchanged: entry.exchanged, state, why }
}

fn hooked_how(entry: &Entry, is_preloaded: bool) -> &'static str {
    if entry.was_turned && is_preloaded {
        "it was opened with RTLD_DEEPBIND, and its imports were redirected to Sublet"
    } else if is_preloaded {
        "libsublet.so is preloaded"
    } else if entry.exchanged > 0 {
        "the driver's functions that it had looked up before were exchanged"
    } else {
        "its imports lead to Sublet"
    }
}

fn program_path() -> String {
    std::env::current_exe()
        .map_or_else(|_| "(program)".to_owned(), |path| path.display().to_string())
}

/// The report of an attach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// The tenant; null when none can be named.
    pub(crate) tenant: Option<String>,
    /// Libraries that reach, or may reach, the driver or NCCL.
    pub(crate) libraries: Vec<LibraryHooks>,
    /// Devices that had a context before the attach.
    pub(crate) devices: Vec<Device>,
    /// True when every library is hooked, so that every kernel launch passes our gate.
    pub(crate) launches_are_held: bool,
}

/// One library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LibraryHooks {
    /// Its file.
    pub(crate) path: String,
    /// The number of its imports that lead to Sublet.
    pub(crate) slots: usize,
    /// The number of addresses of driver functions that it kept, and that were exchanged for Sublet's.
    pub(crate) exchanged: usize,
    /// Whether its calls are seen.
    pub(crate) state: State,
    /// The evidence for that state, or the reason for it.
    pub(crate) why: String,
}

/// Whether a library's calls are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Yes.
    Hooked,
    /// No: it looked up the driver's functions before the attach, and keeps them at places that were not found.
    Late,
    /// Not known: the library could not be read or written.
    Unknown,
}

/// A device that had a context before the attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// The ordinal in this process.
    pub(crate) device: i32,
    /// Its bytes in use at that time, by all processes. They include earlier allocations of this process, which a pause leaves in
    /// place.
    pub(crate) used_bytes: u64,
}
