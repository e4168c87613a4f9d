//! All process-wide state. The process joins its tenant at its first allocation, and leaves it at fork and exit.

#![expect(unsafe_code, reason = "registers handlers for fork and exit")]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use sublet_cuda_driver::paged::Windows;
use sublet_cuda_driver::vmm::Purpose;
use sublet_cuda_driver::{Accessors, Answer, caller};
use sublet_cuda_graph::{Captures, Graphs};
use sublet_deep::ByCommand;
use sublet_nccl::collectives::Collectives;
use sublet_registrations::Registrations;
use sublet_suballoc::Slabs;
use tenants::budget::{self, Counts};
use tenants::checkpoints::Checkpointer;
use tenants::error_text::chain;
use tenants::host_memory::HostLimit;
use tenants::identity::{FamilyName, TenantName};
use tenants::keep::{self, HostFigure};
use tenants::member::{FAMILY_WAIT, MemberConfig};
use tenants::numa;
use tenants::run_dir::{RunDir, RunDirError};
use tenants::settings::{REQUIRED_VARIABLE, Settings};
use tenants::transport::command_installed_with;
use vmm_pool::driver::{CudaDriver, DeviceOrdinal, DeviceUuid, Driver as _, DriverCode, VaRange};
use vmm_pool::sync::lock;

use crate::contexts;
use crate::driver::{DRIVER, call_driver};
use crate::environment::{self, Environment};
use sublet_interpose::loader;

/// The most threads that touch new host memory. More threads would only slow down the thread that pins it. With 4 processes
/// together on 64 cores, 4 threads each gave a first pause of 48 GB/s in all, and 16 threads each gave 40 GB/s. For one process
/// alone, 6 threads keep up with its pinning speed.
const TOUCHER_THREADS_MAX: usize = 6;

/// The exit code of a process that had to join its tenant and could not.
const EXIT_NOT_JOINED: c_int = 1;

/// This process's part in its tenant, over the real driver.
pub(crate) type Member = tenants::member::Member<CudaDriver>;

static MEMBER: OnceLock<Option<Arc<Member>>> = OnceLock::new();
/// The id of the process that joined. A different own id means a forked child.
static JOINED_PID: AtomicU32 = AtomicU32::new(0);
/// True when the process has begun to end, which frees all its memory.
static LEAVING: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
/// Slabs: small allocations of libraries are parts of these large ones.
pub(crate) static SLABS: LazyLock<Arc<Slabs>> = LazyLock::new(Arc::default);
/// All windows of paged memory.
pub(crate) static WINDOWS: Windows<CudaDriver> = Windows::new();
/// The devices that may reach plain memory, by the device that owns it.
pub(crate) static ACCESSORS: LazyLock<Accessors> = LazyLock::new(Accessors::default);
/// The streams that are being captured, also before the process joins.
pub(crate) static CAPTURES: LazyLock<Captures> = LazyLock::new(Captures::default);
/// The graphs that launch collectives.
pub(crate) static GRAPHS: LazyLock<Graphs> = LazyLock::new(Graphs::default);
/// NCCL's communicators.
pub(crate) static COLLECTIVES: LazyLock<Collectives> = LazyLock::new(Collectives::default);
/// The registrations with network cards and the like.
pub(crate) static REGISTRATIONS: LazyLock<Registrations> = LazyLock::new(Registrations::default);
/// The tenant that an attach chose.
static CHOSEN_TENANT: Mutex<Option<TenantName>> = Mutex::new(None);
/// The family that a call chose.
static CHOSEN_FAMILY: Mutex<Option<FamilyName>> = Mutex::new(None);
/// The directory that was set before the tenant was joined.
static CHOSEN_FILE_DIR: Mutex<Option<PathBuf>> = Mutex::new(None);
/// Notes of an attach that came before the tenant was joined.
static NOTES_OF_ATTACH: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The function that returns the memory that the application does not need.
static UNUSED_SOURCE: Mutex<fn() -> Vec<VaRange>> = Mutex::new(Vec::new);

/// Returns the member, if this process has joined. Every hook calls this, and it costs two loads.
pub(crate) fn member() -> Option<&'static Member> {
    if FORKED.load(Ordering::Relaxed) {
        return None;
    }
    MEMBER.get()?.as_deref()
}

/// Has the process begun to end? Libraries then free their objects, and no call needs to wait.
pub(crate) fn is_leaving() -> bool {
    LEAVING.load(Ordering::Relaxed)
}

/// Is this a forked child of a process that had joined? Such a child never joins.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Returns the member; the first call joins the tenant. `None` if that failed, which is reported once. The process then runs as
/// if it were not under Sublet.
pub(crate) fn join() -> Option<&'static Member> {
    if FORKED.load(Ordering::Relaxed) {
        return None;
    }
    let joined = MEMBER.get_or_init(|| {
        start_log();
        match try_join() {
            Ok(member) => {
                JOINED_PID.store(std::process::id(), Ordering::Relaxed);
                watch_exit();
                let notes = environment::at_joining().notes();
                for note in notes.into_iter().chain(std::mem::take(&mut *lock(&NOTES_OF_ATTACH))) {
                    member.notes().add(note);
                }
                Some(member)
            }
            Err(reason) => {
                if environment::at_joining().settings.is_required {
                    end_process(&reason);
                }
                tracing::error!(%reason, "this process is not under Sublet: its memory stays as it is");
                None
            }
        }
    });
    joined.as_deref()
}

/// Ends a process that must be under Sublet and is not. The program's exit handlers do not run: they might wait for locks that
/// this thread holds.
fn end_process(reason: &str) -> ! {
    let said = format!(
        "sublet: this process cannot join its tenant, and {REQUIRED_VARIABLE}=1 ends it: {reason}\n"
    );
    let _closed = std::io::stderr().write_all(said.as_bytes());
    // SAFETY: the call takes a number and does not return.
    unsafe { libc::_exit(EXIT_NOT_JOINED) }
}

/// Sets the tenant that this process joins, whatever the environment says.
///
/// # Errors
/// The process has joined another tenant.
pub(crate) fn choose_tenant(tenant: TenantName) -> Result<(), String> {
    let mut chosen = lock(&CHOSEN_TENANT);
    if let Some(joined) =
        member().map(|member| member.presence().tenant()).filter(|joined| **joined != tenant)
    {
        return Err(format!(
            "this process is in tenant {joined} since its first device memory and cannot join {tenant}: \
             attach before the first use of CUDA, or name {joined}"
        ));
    }
    *chosen = Some(tenant);
    Ok(())
}

/// Sets the family of this process, whatever the environment says.
///
/// # Errors
/// The process has joined its tenant already, with another family or none.
pub(crate) fn choose_family(family: FamilyName) -> Result<(), String> {
    let mut chosen = lock(&CHOSEN_FAMILY);
    if let Some(presence) = member().map(Member::presence)
        && presence.family() != Some(&family)
    {
        let named =
            presence.family().map_or("no family".to_owned(), |named| format!("family {named}"));
        return Err(format!(
            "this process names {named} since its first device memory and cannot name {family}: choose it before the \
             first use of CUDA, or start the process with `sublet run --family {family}`"
        ));
    }
    *chosen = Some(family);
    Ok(())
}

/// Adds a note of an attach, for the tenant that is or will be joined.
pub(crate) fn note_of_attach(text: String) {
    match member() {
        Some(member) => member.notes().add(text),
        None => lock(&NOTES_OF_ATTACH).push(text),
    }
}

/// Sets the function that returns, in each pause, the memory that the application does not need. It is called on a thread of
/// Sublet's, which holds no lock of this crate.
pub(crate) fn set_unused_source(source: fn() -> Vec<VaRange>) {
    *lock(&UNUSED_SOURCE) = source;
}

fn unused() -> Vec<VaRange> {
    let source = *lock(&UNUSED_SOURCE);
    source()
}

/// Starts the log on standard error, at the level that the environment sets.
pub(crate) fn start_log() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        let filter =
            environment::current().settings.log.clone().unwrap_or_else(|| "warn".to_owned());
        let started = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(false)
            .try_init();
        if let Err(error) = started {
            // Another copy of this library logs already.
            tracing::debug!(%error, "log was started before");
        }
    });
}

/// Returns the run directory that the environment names.
pub(crate) fn run_dir() -> Result<RunDir, RunDirError> {
    // Every thread that takes a lock calls this first, even before this process has joined.
    watch_forks();
    let Environment { settings, session_dir, .. } = environment::current().into_owned();
    RunDir::open(settings.run_dir, session_dir)
}

/// Returns the tenant that an attach chose, or that the environment names.
pub(crate) fn tenant_name() -> Result<TenantName, String> {
    if let Some(chosen) = lock(&CHOSEN_TENANT).clone() {
        return Ok(chosen);
    }
    environment::current().tenant()
}

fn try_join() -> Result<Arc<Member>, String> {
    let environment = environment::at_joining();
    let Environment { settings, wrong, .. } = environment;
    if settings.is_required && !wrong.is_empty() {
        return Err(wrong.iter().map(|wrong| &*wrong.text).collect::<Vec<_>>().join("; "));
    }
    let driver = CudaDriver::from_symbols(&|name| DRIVER.symbol(name))
        .map_err(|error| error.to_string())?
        .with_own_contexts(contexts::own_of);
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let chosen_family = lock(&CHOSEN_FAMILY).clone();
    let budgets = settings.budgets.clone();
    let config = MemberConfig {
        run_dir: run_dir().map_err(|error| chain(&error))?,
        tenant: tenant_name()?,
        family: chosen_family.or_else(|| settings.family.clone()),
        family_wait: settings.wait.unwrap_or(FAMILY_WAIT),
        turns: settings.turns,
        command: command_line(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host_limits,
        node_of: |address| numa::node_of(Path::new("/sys"), address),
        own_contexts: contexts::own,
        captures: Arc::clone(CAPTURES.counts()),
        unused: if settings.detects_changes { unused } else { Vec::new },
        ungated: crate::UNGATED,
        unseen_pins: crate::UNSEEN_PINS,
        unseen_nccl: crate::UNSEEN_NCCL,
        unfreezable: crate::UNFREEZABLE,
        checkpointer,
        toucher_threads: cores.clamp(1, TOUCHER_THREADS_MAX),
        counting: Some(Counts::of(budgets, environment::gpu_index, device_bytes)),
    };
    let keeps = keep::Settings {
        host_figures: Some(host_figures),
        prepares_up_to: settings.prepares_up_to,
        spills: settings.spills.then_some(|dir| !keep::is_in_memory(dir)),
    };
    let member = keep::join(config, keeps, Arc::new(driver)).map_err(|error| chain(&error))?;
    set_up(&member, settings);
    Ok(member)
}

/// Applies the settings to `member`.
fn set_up(member: &Arc<Member>, settings: &Settings) {
    let pool = member.pool();
    pool.copies().detect_changes(settings.detects_changes);
    SLABS.use_slabs(settings.uses_slabs);
    pool.set_front(Arc::clone(&*SLABS) as _);
    if settings.fails_without_nccl {
        member.cut().fail_while_away();
    }
    if settings.turns.queues || settings.turns.deep.is_some() {
        sublet_turns::come_back_by_itself(member);
    }
    let chosen = lock(&CHOSEN_FILE_DIR).take();
    if let Some(dir) = chosen.or_else(|| settings.file_dir.clone()) {
        pool.host_memory().set_file_dir(dir);
    }
    if settings.spills
        && let Some(note) = environment::no_room_in(&pool.host_memory().file_dir())
    {
        member.notes().add(note);
    }
}

/// Sets the directory for saved contents of the policy "file", from the next pause on. It may be set before this process joins.
pub(crate) fn set_file_dir(dir: PathBuf) {
    match member() {
        Some(member) => member.pool().host_memory().set_file_dir(dir),
        None => *lock(&CHOSEN_FILE_DIR) = Some(dir),
    }
}

/// Returns the `sublet` command as the interface to the driver's calls about processes of tenants. The command must be next to
/// this library or in `../bin`.
pub(crate) fn checkpointer() -> Option<Arc<dyn Checkpointer>> {
    let (_, library) = loader::image_of((checkpointer as *const ()).addr())?;
    let library = PathBuf::from(std::ffi::OsStr::from_bytes(library.as_bytes()));
    let installer = library.metadata().ok()?.uid();
    Some(Arc::new(ByCommand::new(command_installed_with(&library)?, installer)))
}

/// Returns this process's data as a newcomer that lacks a context on `device`, if its environment makes it queue for room.
pub(crate) fn newcomer(device: DeviceOrdinal) -> Option<(RunDir, TenantName, String, Duration)> {
    let turns = environment::current().settings.turns;
    if !turns.queues || is_leaving() || is_forked() {
        return None;
    }
    start_log();
    let driver = CudaDriver::from_symbols(&|name| DRIVER.symbol(name)).ok()?;
    let gpu = driver.device_uuid(device).ok()?.to_string();
    Some((run_dir().ok()?, tenant_name().ok()?, gpu, turns.wait))
}

/// Returns the bytes that others in turns would free for this process, on the GPU that `uuid` returns: see
/// [`sublet_turns::others_give`]. If the process takes no turns, or Sublet's code fails, neither function is called, and the
/// result is 0.
pub(crate) fn others_give(
    uuid: impl FnOnce() -> Option<DeviceUuid>,
    look_free: impl FnMut(),
) -> u64 {
    let takes_turns = environment::current().settings.turns.queues;
    if !takes_turns || environment::is_the_command() || is_leaving() || is_forked() {
        return 0;
    }
    let ask = || {
        let (uuid, run_dir, tenant) = (uuid()?.to_string(), run_dir().ok()?, tenant_name().ok()?);
        Some(sublet_turns::others_give(&run_dir, &tenant, &uuid, look_free))
    };
    netted(ask).ok().flatten().unwrap_or(0)
}

/// Returns the total memory of a device, in bytes; 0 if the driver does not report it. Needs no context.
fn device_bytes(device: DeviceOrdinal) -> u64 {
    let mut bytes = 0_usize;
    let place = &raw mut bytes;
    let code = call_driver!(cuDeviceTotalMem_v2(place => *mut usize, device.0 => c_int));
    if code == DriverCode::SUCCESS.0 { bytes as u64 } else { 0 }
}

/// May other processes of this tenant count their memory against a budget? Called before this process has joined.
pub(crate) fn others_count() -> bool {
    let Environment { settings, session_dir, .. } = environment::current().into_owned();
    let run_dir = RunDir::choose(settings.run_dir, session_dir);
    tenant_name().is_ok_and(|tenant| budget::may_count(&run_dir, &tenant))
}

fn host_limits() -> Vec<HostLimit> {
    keep::limits(environment::current().settings.host_bytes_max)
}

fn host_figures() -> Vec<HostFigure> {
    keep::figures(environment::current().settings.host_bytes_max)
}

fn command_line() -> String {
    const SHOWN_MAX: usize = 120;
    let raw = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let words: Vec<_> = raw
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    words.join(" ").chars().take(SHOWN_MAX).collect()
}

/// Registers the handler for the exit.
fn watch_exit() {
    // SAFETY: the handler is a plain function that lives as long as this library, which is never unloaded
    // once it has threads.
    let exit = unsafe { libc::atexit(at_exit) };
    if exit != 0 {
        tracing::warn!(exit, "no notice of exit");
    }
}

/// Registers the handlers for a fork, once.
fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: as for the exit.
        let fork = unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        if fork != 0 {
            tracing::warn!(fork, "no notice of fork");
        }
    });
}

/// Cleans up in a forked child, which has none of its parent's locks. If the parent had joined, the child has neither Sublet's
/// threads nor a usable driver. It runs on as if it were not under Sublet.
unsafe extern "C" fn after_fork_in_child() {
    vmm_pool::close_descriptors_in_child();
    if let Some(member) = member() {
        member.let_go_in_child();
        FORKED.store(true, Ordering::Relaxed);
    }
}

extern "C" fn at_exit() {
    LEAVING.store(true, Ordering::Relaxed);
    if JOINED_PID.load(Ordering::Relaxed) == std::process::id()
        && let Some(member) = member()
    {
        member.leave();
    }
}

unsafe extern "C" {
    safe fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}
/// `PTHREAD_CANCEL_DISABLE` of `pthread.h`.
const NOT_CANCELLED: c_int = 1;

/// Catches panics of `work`. glibc ends a cancelled thread by unwinding it, and ends the process if that is caught. So a thread
/// is not cancelled during `work`, but at its next cancellation point (`tests/programs/preload_cancel.c`).
pub(crate) fn netted<T>(work: impl FnOnce() -> T) -> std::thread::Result<T> {
    let mut before = 0;
    pthread_setcancelstate(NOT_CANCELLED, &raw mut before);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    pthread_setcancelstate(before, &raw mut before);
    outcome
}

/// Answers a hooked call. `decide` answers for Sublet's memory. `driver` answers for everything else, for processes that have not
/// joined, and if Sublet's code fails, which is reported once.
pub(crate) fn answered(
    find: fn() -> Option<&'static Member>,
    decide: impl FnOnce(&'static Member) -> Answer<()>,
    driver: impl FnOnce() -> c_int,
) -> c_int {
    let Some(member) = find() else {
        return driver();
    };
    match netted(|| decide(member)) {
        Ok(Answer::Done(())) => DriverCode::SUCCESS.0,
        Ok(Answer::Refused(code)) => code.0,
        Ok(Answer::AskDriver) => driver(),
        Err(_) => failed_inside(),
    }
}

/// Runs a hook that calls the driver itself. Nothing unwinds into the caller. If Sublet's code fails, the call is refused, and a
/// note says so.
pub(crate) fn caught(hook: impl FnOnce() -> c_int) -> c_int {
    netted(hook).unwrap_or_else(|_| failed_inside())
}

fn failed_inside() -> c_int {
    if let Some(member) = member() {
        // A fault of Sublet. The call was refused with an unknown error of the driver.
        member.notes().add("a hook failed inside; the call was refused; report this".to_owned());
    }
    DriverCode::UNKNOWN.0
}

/// Both names of NCCL's function whose memory NCCL registers as windows. NCCL also calls it itself.
const FOR_WINDOWS: [&CStr; 2] = [c"ncclMemAlloc", c"pncclMemAlloc"];

/// Returns the label of the library that contains the return address `caller`, and the purpose of its function's memory.
pub(crate) fn maker_of(caller: usize) -> (&'static str, Purpose) {
    type Makers = HashMap<usize, (&'static str, Purpose)>;
    static KNOWN: LazyLock<RwLock<Makers>> = LazyLock::new(RwLock::default);
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner).get(&caller).copied();
    if let Some(known) = known {
        return known;
    }
    let torch = loader::is_loaded(c"libc10_cuda.so");
    let label = loader::file_of(caller).map_or("other", |path| caller::label(&path, torch));
    let is_for_windows = |name: CString| FOR_WINDOWS.contains(&name.as_c_str());
    let is_window =
        label == caller::NCCL && loader::function_of(caller).is_some_and(is_for_windows);
    let maker = (label, if is_window { Purpose::Window } else { Purpose::Any });
    KNOWN.write().unwrap_or_else(PoisonError::into_inner).insert(caller, maker);
    maker
}

/// Returns the label of the library that contains the return address `caller`.
pub(crate) fn class_of_caller(caller: usize) -> &'static str {
    maker_of(caller).0
}
