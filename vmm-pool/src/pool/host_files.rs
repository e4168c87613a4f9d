//! Turns NCCL's shared host memory into files of Sublet's, so that it survives a deep pause
//! (`driver/cuda/host_files.rs`).
//!
//! Such memory is the driver's when it is made. It becomes a file when addresses are reserved for it, before anybody
//! has mapped or shared it. If a step is refused, or if calls come in another order, it stays the driver's.

use super::Entered;
use crate::deferred::Physical;
use crate::driver::{DeviceAddress, Driver, VaRange};
use crate::ids::VirtualHandle;

const ADVICE: &str =
    "a peer's shared host memory has no place here; start the job with NCCL_CUMEM_HOST_ENABLE=0";

impl<D: Driver> Entered<'_, D> {
    /// Returns addresses for host memory that is shared by descriptors. The next call must map the whole `handle`
    /// there. The memory was made here and not used yet, or imported from a process that has a file. None if it is
    /// other memory or cannot be a file: then the driver reserves addresses.
    ///
    /// # Driver calls
    /// `cuDeviceGetAttribute`, `cuMemHostRegister`, `cuMemRelease`.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn reserve_for_host(
        &self,
        handle: VirtualHandle,
        size_bytes: u64,
        alignment_bytes: u64,
    ) -> Option<DeviceAddress> {
        let driver = &self.pool.driver;
        let (raw, prop) = {
            let ledger = self.pool.ledger();
            let row = ledger.rows.get(handle).filter(|row| row.size_bytes() == size_bytes)?;
            let may_be_file = row.is_of_host_file() || row.is_untouched_host();
            (row.raw().filter(|_| may_be_file)?, *row.prop())
        };
        if raw.is_of_host_file() {
            let reserved = driver.reserve_for_host_file(raw, alignment_bytes);
            return reserved
                .inspect_err(|error| tracing::error!(%error, size_bytes, "{ADVICE}"))
                .ok();
        }
        let made = driver.create_host_file(size_bytes, &prop);
        let file = made.inspect_err(|error| tracing::debug!(%error, "no host file")).ok()?;
        let physical = Physical::new(file, size_bytes, None);
        let reserved = driver.reserve_for_host_file(file, alignment_bytes);
        let reserved = reserved
            .inspect_err(|error| tracing::warn!(%error, "shared host memory stays the driver's"))
            .ok();
        let exchanged = match reserved {
            Some(_) => self.pool.ledger().rows.exchange_untouched(handle, physical),
            None => Err(physical),
        };
        let is_file = exchanged.is_ok();
        if let (Some(start), false) = (reserved, is_file) {
            let _freed = driver.free_of_host_file(VaRange::new(start, size_bytes));
        }
        if let Err(error) = self.pool.deferred.release(exchanged.unwrap_or_else(|file| file)) {
            tracing::error!(%error, "host memory stays until the next pause");
        }
        reserved.filter(|_| is_file)
    }
}
