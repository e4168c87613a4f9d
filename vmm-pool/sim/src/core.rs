//! The work of the simulated driver, without counting, faults or latency.
//!
//! Work of streams runs on this type. A C interface on top of the simulation calls this type directly for functions that the
//! trait lacks: contexts by device, access to memory from kernels, streams of any kind.
//!
//! Lock order: `submit` before `streams` before the queue of a stream; `events` and `memory` alone, with no other lock held.

mod bytes;
mod events;
mod kernels;
mod memory;
mod streams;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use sublet_sync::sync::lock;

use self::events::Events;
use self::streams::Streams;
use super::blocks::Block;
use super::last_words::LastWords;
use super::memory::{Census, Coded, Memory, io_code};
use super::node::SimNode;
use super::schedule::Schedule;
use super::{Faults, SimOptions};
use sublet_driver::{
    AllocationProp, DeviceAttribute, DeviceOrdinal, DeviceUuid, DriverCode, DriverVersion,
    MemoryInfo, RawStream,
};

pub use self::bytes::{AccessGuard, Touch};
pub use self::memory::PublishedName;

#[derive(Debug)]
struct Device {
    /// The index among the node's devices.
    index: usize,
    /// The code of the first work that failed; 0 if none has.
    failure: AtomicI32,
    /// The memory that the primary context costs, once there is one.
    context: Mutex<Context>,
    /// Are our own kernels loaded in that context?
    has_kernels: AtomicBool,
}

#[derive(Debug)]
enum Context {
    Absent,
    Present { _cost: ContextCost },
}

/// The memory that one context costs, for as long as this lives.
#[derive(Debug)]
pub struct ContextCost(#[expect(dead_code, reason = "held, not read")] Option<Block>);

/// The simulated driver of one process. See the head of this module.
#[derive(Debug)]
pub struct Core {
    node: SimNode,
    options: SimOptions,
    devices: Vec<Device>,
    memory: RwLock<Memory>,
    streams: Mutex<Streams>,
    events: Mutex<Events>,
    /// Held while work is submitted to a stream that is ordered against another.
    submit: Mutex<()>,
    closing: AtomicBool,
    /// Counts copies of host memory that is pinned, but not for the device that copies.
    foreign_pins: AtomicU64,
    faults: Faults,
    /// The order of streams by a seed, if a test wants one.
    schedule: OnceLock<Schedule>,
    pub(super) last_words: LastWords,
}

impl Core {
    pub(super) fn new(node: SimNode, options: SimOptions) -> Self {
        let all = 0..node.device_count();
        let indices: Vec<usize> = match &options.visible {
            Some(list) => list.iter().copied().filter(|i| all.contains(i)).collect(),
            None => all.collect(),
        };
        let devices = indices
            .into_iter()
            .map(|index| Device {
                index,
                failure: AtomicI32::new(0),
                context: Mutex::new(Context::Absent),
                has_kernels: AtomicBool::new(false),
            })
            .collect();
        Self {
            node,
            options,
            devices,
            memory: RwLock::new(Memory::new(std::process::id())),
            streams: Mutex::new(Streams::new()),
            events: Mutex::default(),
            submit: Mutex::new(()),
            closing: AtomicBool::new(false),
            foreign_pins: AtomicU64::new(0),
            faults: Faults::default(),
            schedule: OnceLock::new(),
            last_words: LastWords::default(),
        }
    }

    /// The node that this process works on.
    pub fn node(&self) -> &SimNode {
        &self.node
    }

    /// The options of this driver.
    pub fn options(&self) -> &SimOptions {
        &self.options
    }

    /// Lets this seed choose which stream's work runs next, from now on. Work that waits for other work then never ends, unless
    /// it waits for an event or as default streams do. The first seed stays.
    pub fn schedule(&self, seed: u64) {
        self.schedule.get_or_init(|| Schedule::new(seed));
    }

    /// Counts the streams with work that waits for its turn, if a seed decides the order. For tests: a stream's thread may not
    /// have reached that wait yet.
    pub fn held_up(&self) -> usize {
        self.schedule.get().map_or(0, Schedule::held_up)
    }

    /// Records that the driver was called.
    pub(super) fn called(&self) {
        if let Some(schedule) = self.schedule.get() {
            schedule.called();
        }
    }

    /// Runs `wait`, which waits for work.
    pub(super) fn while_waiting(&self, wait: impl FnOnce()) {
        match self.schedule.get() {
            Some(schedule) => schedule.while_waiting(wait),
            None => wait(),
        }
    }

    /// Runs the first work of a stream when its turn has come.
    pub(super) fn in_turn<T>(&self, stream: RawStream, run: impl FnOnce() -> T) -> T {
        let Some(schedule) = self.schedule.get() else { return run() };
        schedule.begin(stream);
        let done = run();
        schedule.end();
        done
    }

    /// The rules that make calls fail, and the counters of calls.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Counts a call by its driver name, waits for its latency, and fails it if a rule says so. The methods of the trait call
    /// this themselves. The methods of this type do not.
    ///
    /// # Errors
    /// The code of the rule.
    pub fn enter(&self, symbol: &'static str) -> Coded<()> {
        self.options.latency.wait(symbol);
        self.faults.check(symbol)
    }

    /// Is the driver ending? Work that waits for something must check this now and then.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn read(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the driver objects that this process holds now. For tests of leaks.
    pub fn census(&self) -> Census {
        let (streams, events) = (self.stream_count(), self.event_count());
        Census { streams, events, ..self.read().census() }
    }

    // Devices.

    /// The CUDA version that this driver claims.
    pub fn driver_version(&self) -> DriverVersion {
        self.options.version.unwrap_or(self.node.version())
    }

    /// Counts the devices that this process sees.
    pub fn visible_count(&self) -> usize {
        self.devices.len()
    }

    fn device(&self, device: DeviceOrdinal) -> Coded<&Device> {
        usize::try_from(device.0)
            .ok()
            .and_then(|ordinal| self.devices.get(ordinal))
            .ok_or(DriverCode::INVALID_DEVICE)
    }

    /// Returns the machine-wide name of a device.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn uuid(&self, device: DeviceOrdinal) -> Coded<DeviceUuid> {
        Ok(self.node.device_uuid(self.device(device)?.index))
    }

    /// Returns the index of `device` among the devices of the node, the same in all processes.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn node_index(&self, device: DeviceOrdinal) -> Coded<usize> {
        Ok(self.device(device)?.index)
    }

    /// Returns a device attribute. Numbers that the simulation does not know read as 0, as most do on real devices that lack a
    /// feature.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `INVALID_VALUE` for a number that no attribute has.
    pub fn attribute(&self, device: DeviceOrdinal, attribute: DeviceAttribute) -> Coded<i32> {
        let index = self.device(device)?.index;
        let vmm = i32::from(self.options.virtual_memory);
        Ok(match attribute.0 {
            1 | 2 | 3 | 5 | 6 => 1024,
            4 => 64,
            8 => 48 << 10,
            10 => 32,
            12 => 65_536,
            13 => 1_980_000,
            16 => 132,
            33 => i32::try_from(index).unwrap_or(i32::MAX) + 1,
            39 => 2048,
            40 => 3,
            // Features that every current device has, such as mapping host memory.
            15 | 19 | 31 | 41 | 78 | 91 | 115 | 124 => 1,
            75 => 9,
            81 => 101_376,
            97 => 232_448,
            102 | 103 => vmm,
            ..=0 | 160.. => return Err(DriverCode::INVALID_VALUE),
            _ => 0,
        })
    }

    /// Counts the memory of `device`, exactly, over all processes.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `UNKNOWN` when the node's files cannot be read.
    pub fn memory_of(&self, device: DeviceOrdinal) -> Coded<MemoryInfo> {
        let account =
            self.node.device(self.device(device)?.index).ok_or(DriverCode::INVALID_DEVICE)?;
        let used = account.used_bytes().map_err(|e| io_code(&e))?;
        let total_bytes = account.capacity_bytes();
        Ok(MemoryInfo { free_bytes: total_bytes.saturating_sub(used), total_bytes })
    }

    /// Returns the size of the memory of `device`, in bytes.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn total_bytes(&self, device: DeviceOrdinal) -> Coded<u64> {
        self.node
            .device(self.device(device)?.index)
            .map(|account| account.capacity_bytes())
            .ok_or(DriverCode::INVALID_DEVICE)
    }

    /// Charges the memory of the primary context of `device`, unless that was done before.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `OUT_OF_MEMORY`.
    pub fn ensure_context(&self, device: DeviceOrdinal) -> Coded<()> {
        let mut context = lock(&self.device(device)?.context);
        if matches!(*context, Context::Absent) {
            *context = Context::Present { _cost: self.charge_context(device)? };
        }
        Ok(())
    }

    /// Charges the memory of one more context on `device`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`; `OUT_OF_MEMORY`.
    pub fn charge_context(&self, device: DeviceOrdinal) -> Coded<ContextCost> {
        Ok(ContextCost(match self.options.context_bytes {
            0 => None,
            bytes => Some(self.make_block(bytes, &AllocationProp::pinned_on(device))?),
        }))
    }

    /// Is there a primary context of `device`?
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn has_context(&self, device: DeviceOrdinal) -> Coded<bool> {
        Ok(matches!(*lock(&self.device(device)?.context), Context::Present { .. }))
    }

    /// Gives back the memory of the primary context of `device`, and unloads its kernels.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn end_primary_context(&self, device: DeviceOrdinal) -> Coded<()> {
        let entry = self.device(device)?;
        *lock(&entry.context) = Context::Absent;
        entry.has_kernels.store(false, Ordering::Release);
        Ok(())
    }

    /// Ends the last context of `device`: forgets its failed work, and the host memory that was registered for that context.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    pub fn drop_context(&self, device: DeviceOrdinal) -> Coded<()> {
        self.end_primary_context(device)?;
        let entry = self.device(device)?;
        entry.failure.store(0, Ordering::Release);
        self.write().host_unregister_all_of(device);
        Ok(())
    }

    /// Returns the failure of earlier work on `device`, if any.
    ///
    /// # Errors
    /// That failure, or `INVALID_DEVICE`.
    pub fn device_failure(&self, device: DeviceOrdinal) -> Coded<()> {
        DriverCode(self.device(device)?.failure.load(Ordering::Acquire)).ok()
    }

    /// Describes the cause of the first failure of a context in this process, and the last calls that changed the mappings
    /// there. For tests.
    pub fn last_words(&self) -> Option<String> {
        self.last_words.told()
    }

    pub(super) fn fail_device(&self, device: DeviceOrdinal, code: DriverCode) {
        if let Ok(entry) = self.device(device) {
            // Only the first failure is kept. A later one finds the first.
            entry.failure.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire).ok();
        }
    }

    /// Ends all workers, and releases everything.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let (live, threads) = {
            let mut streams = lock(&self.streams);
            streams.defaults.clear();
            (std::mem::take(&mut streams.live), std::mem::take(&mut streams.threads))
        };
        for stream in live.values() {
            stream.abort();
        }
        if let Some(schedule) = self.schedule.get() {
            schedule.finish();
        }
        for thread in threads {
            // Panics of work were caught in the worker, so there is nothing left to report.
            thread.join().ok();
        }
        self.write().clear();
        for device in &self.devices {
            *lock(&device.context) = Context::Absent;
        }
    }
}
