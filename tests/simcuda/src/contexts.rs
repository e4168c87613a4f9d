//! Contexts: one primary per device, any number of others, and a stack of current ones per thread.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use vmm_pool::driver::sim::{ContextCost, SimContext, StreamKind};
use vmm_pool::driver::{DeviceOrdinal, DriverCode, RawStream};

use crate::abi::{Coded, is_per_thread};
use crate::sim::{Sim, lock};

const PRIMARY_FIRST: u64 = 0x6000_0000;
const CREATED_FIRST: u64 = 0x6100_0000;
const STEP: u64 = 0x100;
const CONTEXT_IS_DESTROYED: DriverCode = DriverCode(709);
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const STREAM_LEGACY: u64 = 1;
const STREAM_PER_THREAD: u64 = 2;

#[derive(Debug, Default)]
pub(crate) struct Contexts {
    /// Live contexts by their values.
    live: BTreeMap<u64, Live>,
    /// How often created ones were attached to and not detached from, their creation not counted.
    attached: BTreeMap<u64, u64>,
    /// Values of created contexts that have ended, reused last in first out as the real driver does.
    ended: Vec<u64>,
    /// How many values of created contexts there have been.
    created: u64,
    /// Count of contexts so far. No number comes twice.
    made: u64,
    /// How often each primary context is retained, by device.
    primary: BTreeMap<i32, Primary>,
    /// Pairs of a context and a peer's context that it may reach.
    peers: BTreeSet<(u64, u64)>,
}

#[derive(Debug)]
struct Live {
    context: SimContext,
    /// Its number among all contexts that there have been, primary ones too.
    life: u64,
    /// None of a primary one, which the device has.
    _cost: Option<ContextCost>,
}

#[derive(Debug, Default)]
struct Primary {
    retained: u64,
    flags: u32,
}

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The thread's own default stream, by context.
    static OWN_STREAMS: RefCell<BTreeMap<SimContext, RawStream>> = const { RefCell::new(BTreeMap::new()) };
}

/// The stack of this thread. Exit handlers run behind the end of a thread's own values, and may call the driver: they have one together.
fn with_stack<T>(work: impl FnOnce(&mut Vec<u64>) -> T) -> T {
    static BEHIND: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    if STACK.try_with(|_| ()).is_ok() {
        return STACK.with_borrow_mut(work);
    }
    work(&mut BEHIND.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The value of the primary context of `device`.
fn primary_of(device: DeviceOrdinal) -> u64 {
    PRIMARY_FIRST + u64::from(device.0.unsigned_abs()) * STEP
}

/// The current context of this thread; 0 for none.
pub(crate) fn current_or_none() -> u64 {
    with_stack(|stack| stack.last().copied().unwrap_or(0))
}

/// Replaces the top of the stack; 0 pops it.
pub(crate) fn replace_current(context: u64) {
    with_stack(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

pub(crate) fn push(context: u64) {
    with_stack(|stack| stack.push(context));
}

pub(crate) fn pop() -> Coded<u64> {
    with_stack(Vec::pop).ok_or(DriverCode::INVALID_CONTEXT)
}

impl Sim {
    /// `device`, if there is one by that number.
    pub(crate) fn device(&self, device: i32) -> Coded<DeviceOrdinal> {
        let device = DeviceOrdinal(device);
        self.core.node_index(device).map(|_| device)
    }

    /// The live context of that value.
    pub(crate) fn context(&self, value: u64) -> Coded<SimContext> {
        let contexts = lock(&self.contexts);
        let live = contexts.live.get(&value).ok_or(DriverCode::INVALID_CONTEXT)?;
        Ok(live.context)
    }

    /// The value of a live context.
    pub(crate) fn value_of(&self, context: SimContext) -> Coded<u64> {
        let contexts = lock(&self.contexts);
        let mut live = contexts.live.iter().filter(|(_, live)| live.context == context);
        live.next().map(|(value, _)| *value).ok_or(CONTEXT_IS_DESTROYED)
    }

    /// The device of a live context.
    pub(crate) fn context_device(&self, context: u64) -> Coded<DeviceOrdinal> {
        Ok(self.context(context)?.device)
    }

    /// The thread's current context.
    pub(crate) fn current_context(&self) -> Coded<SimContext> {
        match current_or_none() {
            0 => Err(DriverCode::INVALID_CONTEXT),
            context => self.context(context).map_err(|_| CONTEXT_IS_DESTROYED),
        }
    }

    /// The device of the thread's current context.
    pub(crate) fn current_device(&self) -> Coded<DeviceOrdinal> {
        Ok(self.current_context()?.device)
    }

    /// The number of the thread's current context, which no other has before or after it.
    pub(crate) fn current_life(&self) -> Coded<u64> {
        self.current_context()?;
        let contexts = lock(&self.contexts);
        let live = contexts.live.get(&current_or_none());
        live.map(|live| live.life).ok_or(CONTEXT_IS_DESTROYED)
    }

    /// Does the context of that number live?
    pub(crate) fn has_life(&self, life: u64) -> bool {
        lock(&self.contexts).live.values().any(|live| live.life == life)
    }

    pub(crate) fn retain_primary(&self, device: DeviceOrdinal) -> Coded<u64> {
        self.core.ensure_context(device)?;
        let mut contexts = lock(&self.contexts);
        let context = primary_of(device);
        contexts.primary.entry(device.0).or_default().retained += 1;
        if !contexts.live.contains_key(&context) {
            contexts.made += 1;
            let life = contexts.made;
            contexts.live.insert(context, Live { context: device.into(), life, _cost: None });
        }
        Ok(context)
    }

    pub(crate) fn release_primary(&self, device: DeviceOrdinal) -> Coded<()> {
        let last = {
            let mut contexts = lock(&self.contexts);
            let primary = contexts
                .primary
                .get_mut(&device.0)
                .filter(|primary| primary.retained > 0)
                .ok_or(DriverCode::INVALID_CONTEXT)?;
            primary.retained -= 1;
            primary.retained == 0
        };
        if last {
            return self.end_context(primary_of(device));
        }
        Ok(())
    }

    /// Ends the primary context even if others retain it; those have to retain it again.
    pub(crate) fn reset_primary(&self, device: DeviceOrdinal) -> Coded<()> {
        lock(&self.contexts).primary.remove(&device.0);
        match self.end_context(primary_of(device)) {
            Err(DriverCode::INVALID_CONTEXT) => Ok(()),
            other => other,
        }
    }

    /// Flags and whether the primary context of `device` is retained by anybody.
    pub(crate) fn primary_state(&self, device: DeviceOrdinal) -> (u32, bool) {
        lock(&self.contexts)
            .primary
            .get(&device.0)
            .map_or((0, false), |primary| (primary.flags, primary.retained > 0))
    }

    pub(crate) fn set_primary_flags(&self, device: DeviceOrdinal, flags: u32) {
        lock(&self.contexts).primary.entry(device.0).or_default().flags = flags;
    }

    /// Makes a context and makes it current.
    pub(crate) fn create_context(&self, device: DeviceOrdinal) -> Coded<u64> {
        let cost = self.core.charge_context(device)?;
        let mut contexts = lock(&self.contexts);
        let reused = contexts.ended.pop();
        let value = reused.unwrap_or(CREATED_FIRST + contexts.created * STEP);
        contexts.created += u64::from(reused.is_none());
        contexts.made += 1;
        let context = SimContext { device, number: contexts.made };
        let life = contexts.made;
        contexts.live.insert(value, Live { context, life, _cost: Some(cost) });
        push(value);
        Ok(value)
    }

    pub(crate) fn destroy_context(&self, context: u64) -> Coded<()> {
        let device = self.context_device(context)?;
        if context == primary_of(device) {
            return Err(DriverCode::INVALID_CONTEXT);
        }
        if current_or_none() == context {
            replace_current(0);
        }
        self.end_context(context)?;
        let mut contexts = lock(&self.contexts);
        contexts.attached.remove(&context);
        contexts.ended.push(context);
        Ok(())
    }

    /// One reference more to the current context.
    pub(crate) fn attach_context(&self) -> Coded<u64> {
        self.current_device()?;
        let context = current_or_none();
        *lock(&self.contexts).attached.entry(context).or_default() += 1;
        Ok(context)
    }

    /// One reference less to `context`, which must be current; it ends with the last.
    pub(crate) fn detach_context(&self, context: u64) -> Coded<()> {
        self.context_device(context)?;
        if context != current_or_none() {
            return Err(DriverCode::INVALID_CONTEXT);
        }
        let is_last = {
            let mut contexts = lock(&self.contexts);
            let attached = contexts.attached.entry(context).or_default();
            let is_last = *attached == 0;
            *attached = attached.saturating_sub(1);
            is_last
        };
        if is_last { self.destroy_context(context) } else { Ok(()) }
    }

    fn end_context(&self, value: u64) -> Coded<()> {
        let context = self.context(value)?;
        let device = context.device;
        // A failure of earlier work ends with the context.
        self.core.wait_context(context).ok();
        self.free_all_of(value)?;
        let mut contexts = lock(&self.contexts);
        contexts.live.remove(&value);
        contexts.peers.retain(|(one, other)| *one != value && *other != value);
        if context == device.into() {
            self.core.end_primary_context(device)?;
        } else {
            self.core.end_streams_of(context);
        }
        if !contexts.live.values().any(|other| other.context.device == device) {
            self.core.drop_context(device)?;
        }
        Ok(())
    }

    /// Notes that the current context may reach `peer`.
    pub(crate) fn enable_peer(&self, peer: u64) -> Coded<()> {
        let own = self.current_device()?;
        if self.context_device(peer)? == own {
            return Err(DriverCode::INVALID_DEVICE);
        }
        if !self.core.options().peer_access {
            return Err(DriverCode::PEER_ACCESS_UNSUPPORTED);
        }
        if lock(&self.contexts).peers.insert((current_or_none(), peer)) {
            Ok(())
        } else {
            Err(DriverCode::PEER_ACCESS_ALREADY_ENABLED)
        }
    }

    /// Takes back what [`Self::enable_peer`] noted.
    pub(crate) fn disable_peer(&self, peer: u64) -> Coded<()> {
        self.context_device(peer)?;
        if lock(&self.contexts).peers.remove(&(current_or_none(), peer)) {
            Ok(())
        } else {
            Err(DriverCode::PEER_ACCESS_NOT_ENABLED)
        }
    }

    /// The stream that a caller's value means. Only a default one depends on the current context.
    pub(crate) fn stream(&self, value: u64) -> Coded<RawStream> {
        match value {
            STREAM_PER_THREAD => self.own_stream(self.current_context()?),
            0 if is_per_thread() => self.own_stream(self.current_context()?),
            0 | STREAM_LEGACY => self.core.default_stream(self.current_context()?),
            other => {
                let stream = RawStream(other);
                self.core.stream_device(stream).map(|_| stream)
            }
        }
    }

    fn own_stream(&self, context: SimContext) -> Coded<RawStream> {
        let known =
            OWN_STREAMS.try_with(|streams| streams.borrow().get(&context).copied()).ok().flatten();
        if let Some(stream) = known {
            return Ok(stream);
        }
        let stream = self.core.new_stream(context, StreamKind::Blocking)?;
        // Behind the thread's end it is made again each time.
        let _kept = OWN_STREAMS.try_with(|streams| streams.borrow_mut().insert(context, stream));
        Ok(stream)
    }
}
