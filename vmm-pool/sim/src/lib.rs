//! The simulated driver: device memory as files on a shared directory, streams as threads.
//!
//! Bytes are real, and processes share a [`SimNode`]. The simulated driver refuses everything that the real driver refuses,
//! with the same code. Memory is free only when its last holder in any process is gone. Kernels are not scheduled. There is no
//! multicast and no fabric.
//!
//! Contexts work as in driver 580 (seen with a program on two H200). A stream may be used with any context current, or none.
//! The driver refuses a copy with `INVALID_VALUE` if the *current* context's device has no access to mapped memory that the
//! copy names, whatever its stream. With no context current, the stream's device counts.
//!
//! Unlike on a GPU, work that touches an unmapped address fails with `ILLEGAL_ADDRESS`. It never reads or writes anything else,
//! whatever other threads unmap meanwhile. Unmapping waits for no work: queued or running work there has failed, and the device
//! with it. For copies, fills and kernels of the trait, that holds until somebody has waited for them. They are fast here, and
//! would still be under way on a device. For the same reason, two of them on two streams have failed if they touch the same
//! bytes and one writes. A wait for an event that orders the two prevents that.
//!
//! Streams run as threads do, or in an order by a seed ([`Core::schedule`]).
//!
//! New memory has bytes other than zero in every 64 KiB: no document of NVIDIA's says that it is zero.
//!
//! Known differences:
//!
//! | what | here | on a device | why |
//! | --- | --- | --- | --- |
//! | unmapping a range with holes, or of two reservations | unmaps what is there | documented for whole mappings alone | driver 580 lets even an unmapping of nothing pass: a refusal would be a guess |
//! | rights on a part of a mapping | refused | allowed by granularity | a file is mapped with one protection; what follows is tested on the ledger |
//! | a copy of unmapped addresses | taken, and the context is lost when it runs | may be refused immediately, without harm | the harsher of the two |
//! | a module is loaded | takes no device memory | takes some | a device that is full is made so by a rule of [`Faults`] |

#![expect(unsafe_code, reason = "implements the unsafe methods of the driver trait")]

mod blocks;
pub mod conformance;
mod core;
mod faults;
mod last_words;
mod memory;
mod node;
mod processes;
mod schedule;
mod stream;
mod vm;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::blocks::SOIL;
pub use self::core::{AccessGuard, ContextCost, Core, PublishedName, Touch};
pub use self::faults::{FaultSpan, Faults, Hold, Latency};
pub use self::memory::{Census, GRANULARITY_BYTES, MappingInfo};
pub use self::node::SimNode;
pub use self::processes::{InCall, ProcessPage};
pub use self::stream::{StreamKind, Work};

use sublet_driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceAttribute, DeviceOrdinal, DeviceUuid, Driver,
    DriverCode, DriverError, DriverOp, DriverResult, DriverVersion, Granularity, Keys, MemoryInfo,
    PieceSlot, PinnedFor, RawContext, RawEvent, RawHandle, RawStream, VaRange,
};

/// A context of a device. Streams, and waits for them, belong to a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimContext {
    /// The device of the context.
    pub device: DeviceOrdinal,
    /// The number among the device's contexts: 0 is the primary one.
    pub number: u64,
}

impl From<DeviceOrdinal> for SimContext {
    /// The primary context.
    fn from(device: DeviceOrdinal) -> Self {
        Self { device, number: 0 }
    }
}

/// The behaviour of a simulated driver in one process.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// The devices of the node that this process sees, in its order; `None` for all.
    pub visible: Option<Vec<usize>>,
    /// Device memory that each context costs, in bytes.
    pub context_bytes: u64,
    /// Does the driver offer virtual memory management?
    pub virtual_memory: bool,
    /// May devices access each other's memory? If not, copies between them still work.
    pub peer_access: bool,
    /// The version to report; `None` for the node's.
    pub version: Option<DriverVersion>,
    /// The time that calls take.
    pub latency: Latency,
    /// Is the soft limit of open files raised when the driver is made? Every handle costs a descriptor, and jobs have
    /// thousands. A real driver does not change the limit.
    pub raises_descriptor_limit: bool,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            visible: None,
            context_bytes: 0,
            virtual_memory: true,
            peer_access: true,
            version: None,
            latency: Latency::default(),
            raises_descriptor_limit: true,
        }
    }
}

static INSTANCES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The current device of this thread, by driver instance.
    static CURRENT: RefCell<BTreeMap<u64, DeviceOrdinal>> = const { RefCell::new(BTreeMap::new()) };
}

/// A driver on a simulated node. Dropping it ends its streams and releases all that it holds.
#[derive(Debug)]
pub struct SimDriver {
    core: Arc<Core>,
    instance: u64,
}

impl SimDriver {
    /// A driver on `node`.
    pub fn new(node: SimNode, options: SimOptions) -> Self {
        if options.raises_descriptor_limit {
            vm::raise_descriptor_limit();
        }
        Self {
            core: Arc::new(Core::new(node, options)),
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The parts below the trait: the simulation itself.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The device that [`Driver::make_current`] chose for this thread.
    fn current(&self) -> Result<DeviceOrdinal, DriverCode> {
        CURRENT
            .with_borrow(|map| map.get(&self.instance).copied())
            .ok_or(DriverCode::INVALID_CONTEXT)
    }

    fn call<T>(
        &self,
        op: DriverOp,
        body: impl FnOnce(&Arc<Core>) -> Result<T, DriverCode>,
    ) -> DriverResult<T> {
        self.core
            .enter(op.symbol())
            .and_then(|()| body(&self.core))
            .map_err(|code| DriverError { op, code })
    }

    /// As `call`, for calls that need a current context.
    fn call_on_device<T>(
        &self,
        op: DriverOp,
        body: impl FnOnce(&Arc<Core>, DeviceOrdinal) -> Result<T, DriverCode>,
    ) -> DriverResult<T> {
        self.call(op, |core| body(core, self.current()?))
    }
}

impl Deref for SimDriver {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drop for SimDriver {
    fn drop(&mut self) {
        self.core.close();
        CURRENT.with_borrow_mut(|map| map.remove(&self.instance));
    }
}

/// Converts a host pointer to the number that the simulation works with.
fn exposed(pointer: NonNull<u8>) -> u64 {
    pointer.as_ptr().expose_provenance() as u64
}

/// Marks `work` as a copy. Its caller knows no other order than that of a stream and of its waits for events.
fn copying(work: Work, target: VaRange, source: VaRange) -> Work {
    work.touching([(target, Touch::Write), (source, Touch::Read)]).until_seen()
}

impl SimDriver {
    /// Starts a kernel of ours, which reads or writes `host`. The calls of [`Driver`] that launch kernels make the same driver
    /// calls.
    fn launch(
        &self,
        device: DeviceOrdinal,
        host: VaRange,
        stream: RawStream,
        work: Work,
    ) -> DriverResult<()> {
        if !self.core.has_kernels(device) {
            self.call(DriverOp::ModuleLoad, |core| core.load_kernels(device))?;
        }
        self.call(DriverOp::HostGetDevicePointer, |core| core.check_registered(host))?;
        self.call(DriverOp::LaunchKernel, |core| {
            // As in the driver, function and stream must be of one context.
            if core.stream_device(stream)? != device {
                return Err(DriverCode::INVALID_HANDLE);
            }
            core.enqueue(stream, work)
        })
    }
}

impl Driver for SimDriver {
    fn version(&self) -> DriverResult<DriverVersion> {
        self.call(DriverOp::DriverGetVersion, |core| Ok(core.driver_version()))
    }

    fn device_count(&self) -> DriverResult<i32> {
        self.call(DriverOp::DeviceGetCount, |core| {
            i32::try_from(core.visible_count()).map_err(|_| DriverCode::UNKNOWN)
        })
    }

    fn device_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        self.call(DriverOp::DeviceGetAttribute, |core| core.attribute(device, attribute))
    }

    fn device_uuid(&self, device: DeviceOrdinal) -> DriverResult<DeviceUuid> {
        self.call(DriverOp::DeviceGetUuid, |core| core.uuid(device))
    }

    fn make_current(&self, device: DeviceOrdinal) -> DriverResult<()> {
        self.call(DriverOp::PrimaryContextRetain, |core| core.ensure_context(device))?;
        self.call(DriverOp::ContextSetCurrent, |_| {
            CURRENT.with_borrow_mut(|map| map.insert(self.instance, device));
            Ok(())
        })
    }

    fn has_primary_context(&self, device: DeviceOrdinal) -> DriverResult<bool> {
        self.call(DriverOp::PrimaryContextGetState, |core| core.has_context(device))
    }

    fn stand_beside_captures(&self) -> DriverResult<()> {
        // The simulation has no captures.
        self.call(DriverOp::ExchangeCaptureMode, |_| Ok(()))
    }

    /// The simulated driver has primary contexts only.
    fn make_own_context_current(&self, _context: RawContext) -> DriverResult<()> {
        self.call(DriverOp::ContextSetCurrent, |_| Err(DriverCode::INVALID_CONTEXT))
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.call_on_device(DriverOp::MemoryGetInfo, |core, device| core.memory_of(device))
    }

    fn synchronize(&self) -> DriverResult<()> {
        self.call_on_device(DriverOp::ContextSynchronize, |core, device| core.wait_context(device))
    }

    fn allocation_granularity(&self, prop: &AllocationProp) -> DriverResult<Granularity> {
        self.call(DriverOp::GetAllocationGranularity, |core| {
            core.check_prop(prop).map(|size_bytes| Granularity { size_bytes })
        })
    }

    fn address_reserve(
        &self,
        size_bytes: u64,
        alignment_bytes: u64,
        hint: DeviceAddress,
    ) -> DriverResult<DeviceAddress> {
        self.call(DriverOp::AddressReserve, |core| core.reserve(size_bytes, alignment_bytes, hint))
    }

    unsafe fn address_free(&self, range: VaRange) -> DriverResult<()> {
        self.call(DriverOp::AddressFree, |core| core.free_addresses(range))
    }

    fn create(&self, size_bytes: u64, prop: &AllocationProp) -> DriverResult<RawHandle> {
        self.call(DriverOp::Create, |core| core.create_memory(size_bytes, prop))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        self.call(DriverOp::Release, |core| core.release_memory(handle))
    }

    fn properties(&self, handle: RawHandle) -> DriverResult<AllocationProp> {
        self.call(DriverOp::GetProperties, |core| core.prop_of(handle))
    }

    fn map(&self, range: VaRange, handle: RawHandle) -> DriverResult<()> {
        self.call(DriverOp::Map, |core| core.map_memory(range, handle))
    }

    unsafe fn unmap(&self, range: VaRange) -> DriverResult<()> {
        self.call(DriverOp::Unmap, |core| core.unmap_memory(range))
    }

    fn set_access(&self, range: VaRange, access: &[AccessDesc]) -> DriverResult<()> {
        self.call(DriverOp::SetAccess, |core| core.grant(range, access))
    }

    fn export_fd(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        self.call(DriverOp::Export, |core| core.export_memory(handle))
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> DriverResult<RawHandle> {
        self.call(DriverOp::Import, |core| core.import_memory(fd))
    }

    unsafe fn host_register(
        &self,
        start: NonNull<u8>,
        size_bytes: usize,
        contexts: PinnedFor,
    ) -> DriverResult<()> {
        self.call_on_device(DriverOp::HostRegister, |core, device| {
            let pinned_for = match contexts {
                PinnedFor::CurrentContext => Some(device),
                PinnedFor::AllContexts => None,
            };
            core.register_host(exposed(start), size_bytes as u64, pinned_for)
        })
    }

    unsafe fn host_unregister(&self, start: NonNull<u8>) -> DriverResult<()> {
        self.call(DriverOp::HostUnregister, |core| core.unregister_host(exposed(start)))
    }

    fn stream_create(&self) -> DriverResult<RawStream> {
        self.call_on_device(DriverOp::StreamCreate, |core, device| {
            core.new_stream(device, StreamKind::NonBlocking)
        })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()> {
        self.call(DriverOp::StreamDestroy, |core| core.end_stream(stream))
    }

    fn stream_synchronize(&self, stream: RawStream) -> DriverResult<()> {
        self.call(DriverOp::StreamSynchronize, |core| core.wait_stream(stream))
    }

    /// The simulation has no captures.
    fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        self.call(DriverOp::StreamIsCapturing, |core| core.has_work(stream).map(|_| false))
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        self.call_on_device(DriverOp::EventCreate, Core::new_event)
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        self.call(DriverOp::EventDestroy, |core| core.end_event(event))
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        self.call(DriverOp::EventRecord, |core| core.record_event(event, stream))
    }

    fn event_is_done(&self, event: RawEvent) -> DriverResult<bool> {
        self.call(DriverOp::EventQuery, |core| core.event_idle(event))
    }

    fn event_synchronize(&self, event: RawEvent) -> DriverResult<()> {
        self.call(DriverOp::EventSynchronize, |core| core.wait_event(event))
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()> {
        self.call(DriverOp::StreamWaitEvent, |core| core.order_behind(stream, event))
    }

    unsafe fn copy_to_host(
        &self,
        target: NonNull<u8>,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()> {
        let target = exposed(target);
        self.call(DriverOp::CopyToHost, |core| {
            let device = core.stream_device(stream)?;
            core.check_copy(self.current().unwrap_or(device), &[source])?;
            core.note_host_side(device, target);
            let work = Work::new(move |core| {
                // SAFETY: the caller keeps `target` valid until the stream has passed this copy.
                unsafe { core.copy((device, target), (device, source.start.0), source.size_bytes) }
            });
            let host = VaRange::new(DeviceAddress(target), source.size_bytes);
            core.enqueue(stream, copying(work, host, source))
        })
    }

    unsafe fn copy_to_device(
        &self,
        target: VaRange,
        source: NonNull<u8>,
        stream: RawStream,
    ) -> DriverResult<()> {
        let source = exposed(source);
        self.call(DriverOp::CopyToDevice, |core| {
            let device = core.stream_device(stream)?;
            core.check_copy(self.current().unwrap_or(device), &[target])?;
            core.note_host_side(device, source);
            let work = Work::new(move |core| {
                // SAFETY: the caller keeps `source` valid until the stream has passed this copy.
                unsafe { core.copy((device, target.start.0), (device, source), target.size_bytes) }
            });
            let host = VaRange::new(DeviceAddress(source), target.size_bytes);
            core.enqueue(stream, copying(work, target, host))
        })
    }

    unsafe fn copy_between(
        &self,
        target: DeviceAddress,
        source: VaRange,
        stream: RawStream,
    ) -> DriverResult<()> {
        self.call(DriverOp::CopyBetween, |core| {
            let device = core.stream_device(stream)?;
            let ranges = [VaRange::new(target, source.size_bytes), source];
            core.check_copy(self.current().unwrap_or(device), &ranges)?;
            let work = Work::new(move |core| {
                // SAFETY: both are device memory, which is looked at again when it is copied.
                unsafe {
                    core.copy((device, target.0), (device, source.start.0), source.size_bytes)
                }
            });
            core.enqueue(stream, copying(work, ranges[0], source))
        })
    }

    unsafe fn fill_with_zeros(&self, target: VaRange, stream: RawStream) -> DriverResult<()> {
        self.call(DriverOp::Fill, |core| {
            let device = core.stream_device(stream)?;
            core.check_copy(device, &[target])?;
            let work = Work::new(move |core| core.fill_device(device, target, &[0]));
            core.enqueue(stream, work.touching([(target, Touch::Write)]).until_seen())
        })
    }

    unsafe fn fingerprint(
        &self,
        device: DeviceOrdinal,
        slots: NonNull<[PieceSlot]>,
        stream: RawStream,
    ) -> DriverResult<()> {
        let (first, count) = (exposed(slots.cast()), slots.len());
        let size_bytes = (count * size_of::<PieceSlot>()) as u64;
        let host = VaRange::new(DeviceAddress(first), size_bytes);
        let work = Work::new(move |core| {
            // SAFETY: the caller keeps the slots valid until the stream has passed.
            unsafe { core.fingerprint(device, (first, count), Keys::of_process()) }
        });
        // SAFETY: valid, and nobody else touches them.
        let pieces = unsafe { slots.as_ref() }.iter().map(|slot| (slot.piece(), Touch::Read));
        let work = work.touching(pieces.chain([(host, Touch::Write)])).until_seen();
        self.launch(device, host, stream, work)
    }

    fn trim_pools(&self, device: DeviceOrdinal) -> DriverResult<()> {
        // The simulation has no stream-ordered pools, so there is nothing to return.
        self.call(DriverOp::PoolTrim, |core| core.node_index(device).map(drop))
    }
}
