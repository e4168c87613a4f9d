//! The simulated driver of this process, made by `cuInit` from the environment.

#![expect(unsafe_code, reason = "registers an exit handler and asks for the process id")]

use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vmm_pool::driver::sim::{Core, Latency, ProcessPage, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{DriverCode, DriverVersion};

use crate::abi::Coded;
use crate::allocations::Allocations;
use crate::capture::Captures;
use crate::contexts::Contexts;
use crate::events::Events;

const PRIVATE_NODE_CAPACITIES_BYTES: [u64; 2] = [1 << 30, 1 << 30];
const VERSION_DEFAULT: i32 = 13000;

/// Everything that this library knows.
#[derive(Debug)]
pub(crate) struct Sim {
    /// Never dropped: worker threads run until the process ends.
    _driver: SimDriver,
    pub(crate) core: Arc<Core>,
    /// By which other processes find this one.
    pub(crate) standing: ProcessPage,
    pub(crate) contexts: Mutex<Contexts>,
    pub(crate) allocations: Mutex<Allocations>,
    pub(crate) events: Mutex<Events>,
    pub(crate) captures: Mutex<Captures>,
    /// A forked child must not use it, as with the real driver.
    process_id: i32,
    private_dir: Option<PathBuf>,
}

static SIM: OnceLock<Sim> = OnceLock::new();
static INIT: Mutex<()> = Mutex::new(());

/// Locks a table; one that a panic left behind is as good as before, since calls change it in one step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process, which may be a forked child of the one that loaded the library.
pub(crate) fn process_id() -> i32 {
    std::process::id().cast_signed()
}

/// The driver, once `cuInit` has succeeded in this process.
pub(crate) fn get() -> Coded<&'static Sim> {
    SIM.get().filter(|sim| sim.process_id == process_id()).ok_or(DriverCode::NOT_INITIALIZED)
}

/// The version claimed, which programs may ask for before `cuInit`.
pub(crate) fn version() -> i32 {
    match get() {
        Ok(sim) => sim.core.driver_version().0,
        Err(_) => version_override().unwrap_or(VERSION_DEFAULT),
    }
}

fn version_override() -> Option<i32> {
    env::var("SIMCUDA_DRIVER_VERSION").ok()?.parse().ok()
}

/// Makes the driver, unless that was done.
pub(crate) fn init() -> Coded<()> {
    let _once = lock(&INIT);
    if SIM.get().is_some() {
        return get().map(drop);
    }
    let sim = Sim::from_environment()?;
    if sim.core.visible_count() == 0 {
        return Err(DriverCode::NO_DEVICE);
    }
    let is_private = sim.private_dir.is_some();
    if SIM.set(sim).is_err() {
        unreachable!("set only here, under INIT");
    }
    if is_private {
        // SAFETY: `at_exit` may run at any time, and the library is never unloaded. A failure leaves a
        // directory that the next private node sweeps.
        unsafe { libc::atexit(at_exit) };
    }
    get().map(drop)
}

extern "C" fn at_exit() {
    if let Some(dir) = get().ok().and_then(|sim| sim.private_dir.as_ref()) {
        // A leftover is swept by the next private node.
        fs::remove_dir_all(dir).ok();
    }
}

impl Sim {
    fn from_environment() -> Coded<Self> {
        let unusable = |_| DriverCode::NO_DEVICE;
        let (node, private_dir) = if let Some(dir) = env::var_os("SIMCUDA_NODE") {
            (SimNode::open(dir).map_err(unusable)?, None)
        } else {
            let node = SimNode::private(&PRIVATE_NODE_CAPACITIES_BYTES).map_err(unusable)?;
            let dir = node.dir().to_owned();
            (node, Some(dir))
        };
        let standing = node.stand().map_err(unusable)?;
        let driver = SimDriver::new(node, options()?);
        if let Ok(rules) = env::var("SIMCUDA_FAULTS") {
            driver.faults().parse(&rules).map_err(|_| DriverCode::INVALID_VALUE)?;
        }
        Ok(Self {
            core: driver.core().clone(),
            standing,
            _driver: driver,
            contexts: Mutex::default(),
            allocations: Mutex::default(),
            events: Mutex::default(),
            captures: Mutex::default(),
            process_id: process_id(),
            private_dir,
        })
    }
}

fn options() -> Coded<SimOptions> {
    let latency = env::var("SIMCUDA_LATENCY").unwrap_or_default();
    let context_bytes = env::var("SIMCUDA_CONTEXT_BYTES").ok();
    Ok(SimOptions {
        visible: env::var("CUDA_VISIBLE_DEVICES").ok().map(|list| visible(&list)),
        context_bytes: context_bytes.and_then(|n| n.parse().ok()).unwrap_or(0),
        virtual_memory: env::var("SIMCUDA_NO_VMM").as_deref() != Ok("1"),
        peer_access: env::var("SIMCUDA_NO_P2P").as_deref() != Ok("1"),
        version: version_override().map(DriverVersion),
        latency: Latency::parse(&latency).map_err(|_| DriverCode::INVALID_VALUE)?,
        raises_descriptor_limit: env::var("SIMCUDA_KEEP_DESCRIPTOR_LIMIT").as_deref() != Ok("1"),
    })
}

/// Devices up to the first entry that is no number, as the real driver reads the list.
fn visible(list: &str) -> Vec<usize> {
    list.split(',').map_while(|word| word.trim().parse().ok()).collect()
}
