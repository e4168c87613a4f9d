//! A driver that does nothing, so that tests measure only the pool's own work.

#![expect(unsafe_code, reason = "stands in for a driver, and touches no memory")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceAttribute, DeviceOrdinal, DeviceUuid, Driver,
    DriverCode, DriverError, DriverOp, DriverResult, DriverVersion, Granularity, MemoryInfo,
    PieceSlot, PinnedFor, RawContext, RawEvent, RawHandle, RawStream, VaRange,
};

/// A driver without any effect: see the head of this module.
#[derive(Debug, Default)]
pub(crate) struct IdleDriver {
    handles: AtomicU64,
    addresses: AtomicU64,
}

/// Refuses a call that no test makes.
fn refused<T>() -> DriverResult<T> {
    Err(DriverError { op: DriverOp::Create, code: DriverCode::UNKNOWN })
}

impl Driver for IdleDriver {
    fn version(&self) -> DriverResult<DriverVersion> {
        refused()
    }

    fn device_count(&self) -> DriverResult<i32> {
        Ok(1)
    }

    fn device_attribute(&self, _: DeviceOrdinal, _: DeviceAttribute) -> DriverResult<i32> {
        refused()
    }

    fn device_uuid(&self, _: DeviceOrdinal) -> DriverResult<DeviceUuid> {
        refused()
    }

    fn make_current(&self, _: DeviceOrdinal) -> DriverResult<()> {
        Ok(())
    }

    fn has_primary_context(&self, _: DeviceOrdinal) -> DriverResult<bool> {
        Ok(true)
    }

    fn stand_beside_captures(&self) -> DriverResult<()> {
        Ok(())
    }

    fn make_own_context_current(&self, _: RawContext) -> DriverResult<()> {
        Ok(())
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        Ok(MemoryInfo { free_bytes: 1 << 50, total_bytes: 1 << 50 })
    }

    fn synchronize(&self) -> DriverResult<()> {
        Ok(())
    }

    fn allocation_granularity(&self, _: &AllocationProp) -> DriverResult<Granularity> {
        refused()
    }

    fn address_reserve(
        &self,
        size_bytes: u64,
        _: u64,
        _: DeviceAddress,
    ) -> DriverResult<DeviceAddress> {
        let start = self.addresses.fetch_add(size_bytes, Ordering::Relaxed);
        Ok(DeviceAddress((1 << 40) + start))
    }

    unsafe fn address_free(&self, _: VaRange) -> DriverResult<()> {
        Ok(())
    }

    fn create(&self, _: u64, _: &AllocationProp) -> DriverResult<RawHandle> {
        Ok(RawHandle(1 + self.handles.fetch_add(1, Ordering::Relaxed)))
    }

    unsafe fn release(&self, _: RawHandle) -> DriverResult<()> {
        Ok(())
    }

    fn properties(&self, _: RawHandle) -> DriverResult<AllocationProp> {
        refused()
    }

    fn map(&self, _: VaRange, _: RawHandle) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn unmap(&self, _: VaRange) -> DriverResult<()> {
        Ok(())
    }

    fn set_access(&self, _: VaRange, _: &[AccessDesc]) -> DriverResult<()> {
        Ok(())
    }

    fn export_fd(&self, _: RawHandle) -> DriverResult<OwnedFd> {
        refused()
    }

    fn import_fd(&self, _: BorrowedFd<'_>) -> DriverResult<RawHandle> {
        refused()
    }

    unsafe fn host_register(&self, _: NonNull<u8>, _: usize, _: PinnedFor) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn host_unregister(&self, _: NonNull<u8>) -> DriverResult<()> {
        Ok(())
    }

    fn stream_create(&self) -> DriverResult<RawStream> {
        Ok(RawStream(1))
    }

    unsafe fn stream_destroy(&self, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    fn stream_synchronize(&self, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    fn stream_is_capturing(&self, _: RawStream) -> DriverResult<bool> {
        Ok(false)
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        Ok(RawEvent(1))
    }

    unsafe fn event_destroy(&self, _: RawEvent) -> DriverResult<()> {
        Ok(())
    }

    fn event_record(&self, _: RawEvent, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    fn event_is_done(&self, _: RawEvent) -> DriverResult<bool> {
        Ok(true)
    }

    fn event_synchronize(&self, _: RawEvent) -> DriverResult<()> {
        Ok(())
    }

    fn stream_wait_event(&self, _: RawStream, _: RawEvent) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn copy_to_host(&self, _: NonNull<u8>, _: VaRange, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn copy_to_device(&self, _: VaRange, _: NonNull<u8>, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn copy_between(&self, _: DeviceAddress, _: VaRange, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn fill_with_zeros(&self, _: VaRange, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn fingerprint(
        &self,
        _: DeviceOrdinal,
        _: NonNull<[PieceSlot]>,
        _: RawStream,
    ) -> DriverResult<()> {
        refused()
    }

    fn trim_pools(&self, _: DeviceOrdinal) -> DriverResult<()> {
        Ok(())
    }
}
