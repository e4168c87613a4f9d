//! Why the pool did not do what it was asked.

use std::path::PathBuf;

use crate::driver::{DeviceAddress, DeviceOrdinal, DriverCode, DriverError};

/// An operation of the pool that was not carried out. Exhaustive on purpose: every layer above decides for
/// every variant what its caller can do.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The handle or address is not the pool's: the caller should ask the driver itself.
    #[error("not memory of the pool")]
    NotOurs,
    /// The handle was the pool's and has been released.
    #[error("the handle {handle:#x} has been released")]
    StaleHandle { handle: u64 },
    /// The process is being paused or is paused: its memory is given to nobody until it runs again.
    #[error(
        "the process that owns the memory is paused, or is being paused: ask again when it runs"
    )]
    Frozen,
    /// The memory has been given up by a pause of its tag, whose process runs on.
    #[error("the memory is away, because tag '{tag}' is paused: resume the tag first")]
    Offloaded { tag: String },
    /// The processes of a tenant disagree about who owns memory. Nothing was given up.
    #[error(
        "allocation {id:?} is this process's own, and the others take it for nobody's: nothing was given up; this is a \
         fault of Sublet, report it"
    )]
    Disowned { id: crate::ids::AllocationId },
    /// The driver refused.
    #[error("{source}: {object} ({size_bytes} bytes{})", on_device(*device))]
    Driver {
        object: String,
        size_bytes: u64,
        /// The device of the memory, for device memory.
        device: Option<DeviceOrdinal>,
        #[source]
        source: DriverError,
    },
    /// The device cannot hold the memory now; nothing was taken.
    #[error(
        "{device} has {free_bytes} bytes free and {needed_bytes} are needed: free {} more, or wait",
        needed_bytes.saturating_sub(*free_bytes)
    )]
    OutOfDeviceMemory { device: DeviceOrdinal, needed_bytes: u64, free_bytes: u64 },
    /// The tenant may not hold as much on the device; nothing was taken.
    #[error(
        "{asked_bytes} bytes on {device} do not fit the budget of {budget_bytes} bytes there, of which the tenant holds \
         {held_bytes}: free {} of them, or raise the budget (sublet budget)",
        held_bytes.saturating_add(*asked_bytes).saturating_sub(*budget_bytes)
    )]
    OverBudget {
        device: DeviceOrdinal,
        asked_bytes: u64,
        /// Bytes that all processes of the tenant hold there.
        held_bytes: u64,
        budget_bytes: u64,
    },
    /// The host cannot hold the contents; nothing was given up.
    #[error(
        "saving {needed_bytes} bytes needs {grow_bytes} more bytes of host memory, and {available_bytes} are \
         available: free host memory, or mark memory whose contents can go as discard"
    )]
    OutOfHostMemory {
        needed_bytes: u64,
        /// Bytes that the arena would have to grow by.
        grow_bytes: u64,
        available_bytes: u64,
    },
    /// The system gave no host memory, although by its own figures it has some; nothing was given up.
    #[error(
        "the system refused {size_bytes} bytes of host memory for saved contents ({source}): raise the limit \
         of the process (ulimit -v, or the container's), or mark memory whose contents can go as discard"
    )]
    HostMemoryRefused {
        size_bytes: u64,
        #[source]
        source: std::io::Error,
    },
    /// The disk cannot hold the contents of regions with the policy `file`; nothing was given up.
    #[error(
        "saving to a file in {} needs {needed_bytes} bytes, and {free_bytes} are free there: free {} more, name a \
         directory on another disk, or mark memory whose contents can go as discard",
        dir.display(), needed_bytes.saturating_sub(*free_bytes)
    )]
    OutOfDisk {
        dir: PathBuf,
        /// Bytes to save in addition to what it holds.
        needed_bytes: u64,
        /// Bytes that the filesystem has free.
        free_bytes: u64,
    },
    /// The system did not make, grow or write the file for saved contents; nothing was given up.
    #[error(
        "{operation} a file for saved contents in {} failed ({size_bytes} bytes at {offset_bytes}: {source}): free \
         disk there, raise its limits (quota, ulimit -f), or name another directory",
        dir.display()
    )]
    FileRefused {
        operation: &'static str,
        /// The directory in which the file is, or should be.
        dir: PathBuf,
        /// From where on in the file.
        offset_bytes: u64,
        size_bytes: u64,
        #[source]
        source: std::io::Error,
    },
    /// Saved contents could not be read back. The file stays as it is, and with it what it holds.
    #[error(
        "reading {size_bytes} bytes at {offset_bytes} of the file for saved contents in {} failed ({source}): see to \
         that disk, then resume again; the contents are nowhere else",
        dir.display()
    )]
    FileUnreadable {
        dir: PathBuf,
        /// From where on in the file.
        offset_bytes: u64,
        size_bytes: u64,
        #[source]
        source: std::io::Error,
    },
    /// Saved contents were read back, and are not what was written. The file stays as it is.
    #[error(
        "{size_bytes} bytes at {offset_bytes} of the file for saved contents in {} are not what was written there: that \
         disk has lost them, or somebody has changed them. The contents are nowhere else: nothing of them is given to \
         the application, which stays paused; end it, or write what else is saved to files first (sublet save)",
        dir.display()
    )]
    FileCorrupted {
        dir: PathBuf,
        /// From where on in the file.
        offset_bytes: u64,
        size_bytes: u64,
    },
    /// A peer's memory that this process maps did not arrive. The owner's own failure gives the reason.
    #[error("no descriptor arrived for the imported allocation at {address} ({size_bytes} bytes)")]
    MissingImport {
        /// First address it is mapped at.
        address: DeviceAddress,
        size_bytes: u64,
    },
}

fn on_device(device: Option<DeviceOrdinal>) -> String {
    device.map_or_else(String::new, |device| format!(" on {device}"))
}

impl PoolError {
    /// Is a CUDA context beyond use, and with it all device memory of the process that was not saved?
    pub fn poisons_context(&self) -> bool {
        matches!(self, Self::Driver { source, .. } if source.poisons_context())
    }

    /// The code to hand to a caller of the driver interface; `None` for memory that is not ours.
    pub fn code(&self) -> Option<DriverCode> {
        match self {
            Self::NotOurs => None,
            Self::StaleHandle { .. } | Self::Offloaded { .. } | Self::MissingImport { .. } => {
                Some(DriverCode::INVALID_VALUE)
            }
            Self::Frozen => Some(DriverCode::NOT_READY),
            Self::Driver { source, .. } => Some(source.code),
            Self::OutOfDeviceMemory { .. }
            | Self::OverBudget { .. }
            | Self::OutOfHostMemory { .. }
            | Self::HostMemoryRefused { .. }
            | Self::OutOfDisk { .. }
            | Self::FileRefused { .. } => Some(DriverCode::OUT_OF_MEMORY),
            Self::Disowned { .. } | Self::FileUnreadable { .. } | Self::FileCorrupted { .. } => {
                Some(DriverCode::UNKNOWN)
            }
        }
    }
}

/// Result of a pool operation.
pub type PoolResult<T> = Result<T, PoolError>;

/// Adds what a driver error was about.
pub trait Describe<T> {
    /// The error is about `object`, of this size and device.
    ///
    /// # Errors
    /// [`PoolError::Driver`].
    fn about(
        self,
        object: impl FnOnce() -> String,
        size_bytes: u64,
        device: Option<DeviceOrdinal>,
    ) -> PoolResult<T>;
}

impl<T> Describe<T> for Result<T, DriverError> {
    fn about(
        self,
        object: impl FnOnce() -> String,
        size_bytes: u64,
        device: Option<DeviceOrdinal>,
    ) -> PoolResult<T> {
        self.map_err(|source| PoolError::Driver { object: object(), size_bytes, device, source })
    }
}
