//! The errors of the pool.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::driver::{DeviceAddress, DeviceOrdinal, DriverCode, DriverError};

/// An operation of the pool that was not carried out. Exhaustive on purpose: every layer above decides for
/// every variant what its caller can do.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The handle or address is not of memory that Sublet keeps. Sublet passes the call on to the driver.
    #[error("not memory of the pool")]
    NotOurs,
    /// The program uses a handle after it has released it. The call failed; nothing was changed.
    #[error("the handle {handle:#x} has been released")]
    StaleHandle { handle: u64 },
    /// The process that owns the memory is being paused, or is paused. No memory was given. Try again when that
    /// process runs.
    #[error(
        "the process that owns the memory is paused, or is being paused: ask again when it runs"
    )]
    Frozen,
    /// A call names memory that a pause of its tag has freed. The call failed; nothing was changed. Resume the tag
    /// first: `sublet resume TENANT --tag TAG`.
    #[error("the memory is away, because tag '{tag}' is paused: resume the tag first")]
    Offloaded { tag: String },
    /// The processes of a tenant disagree about which of them owns this memory. The pause was refused, and nothing
    /// was freed. This is a fault of Sublet.
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
    /// The GPU has too little free memory. Nothing was taken: a paused tenant stays paused, with its contents. Pause
    /// or end what holds the rest; `sublet ps` names it.
    #[error(
        "{device} has {free_bytes} bytes free and {needed_bytes} are needed: free {} more, or wait",
        needed_bytes.saturating_sub(*free_bytes)
    )]
    OutOfDeviceMemory { device: DeviceOrdinal, needed_bytes: u64, free_bytes: u64 },
    /// The tenant would hold more than its budget on this GPU. The allocation failed; nothing was taken. Free memory,
    /// or raise the budget (`sublet budget TENANT 0=SIZE`).
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
    /// The host has too little memory for the contents of this process. The job runs on, and nothing was freed. Free
    /// host memory, or mark contents that may be lost as `discard`.
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
    /// The kernel refused host memory that it had called available. The job runs on, and nothing was freed. Raise the
    /// limit of the process (`ulimit -v`) or of its container.
    #[error(
        "the system refused {size_bytes} bytes of host memory for saved contents ({source}): raise the limit \
         of the process (ulimit -v, or the container's), or mark memory whose contents can go as discard"
    )]
    HostMemoryRefused {
        size_bytes: u64,
        #[source]
        source: std::io::Error,
    },
    /// A region has the policy `file`, and the disk is too small for its contents. The job runs on, and nothing was
    /// freed. Free the bytes in the message, or name another directory.
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
    /// A region has the policy `file`, and the system did not make, grow or write that file. The job runs on, and
    /// nothing was freed. Free disk space, or raise the limits (quota, `ulimit -f`).
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
    /// The disk could not read the saved contents. The tenant stays paused, and the file stays unchanged. The
    /// contents are nowhere else. Repair the disk, then run `sublet resume TENANT`.
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
    /// The disk returned other bytes than Sublet had written. The tenant stays paused, and the file stays unchanged.
    /// The contents are nowhere else. `sublet save TENANT DIR` writes the rest to files. Then end the job.
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
    /// The process that owns the shared memory did not send it. This tenant stays paused. The owner's own failure
    /// gives the reason: look at its log.
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
    /// Makes the error for an operation `op` that failed at `place` of a file for saved contents in `dir`.
    pub fn file_refused(dir: &Path, op: &'static str, place: &Range<u64>, why: io::Error) -> Self {
        let (dir, size_bytes) = (dir.to_owned(), place.end - place.start);
        Self::FileRefused { operation: op, dir, offset_bytes: place.start, size_bytes, source: why }
    }

    /// Makes the error for a failed read of `place` of a file for saved contents in `dir`.
    pub fn file_unreadable(dir: &Path, place: &Range<u64>, source: io::Error) -> Self {
        let (dir, size_bytes) = (dir.to_owned(), place.end - place.start);
        Self::FileUnreadable { dir, offset_bytes: place.start, size_bytes, source }
    }

    /// Is a CUDA context unusable, and with it all device memory of the process that was not saved?
    pub fn poisons_context(&self) -> bool {
        matches!(self, Self::Driver { source, .. } if source.poisons_context())
    }

    /// Returns the code for a caller of the driver interface. `None` for memory that is not the pool's.
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

/// The result of a pool operation.
pub type PoolResult<T> = Result<T, PoolError>;

/// Adds the object, the size and the device to a driver error.
pub trait Describe<T> {
    /// Turns the driver error into one about `object`, of this size and on this device.
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
