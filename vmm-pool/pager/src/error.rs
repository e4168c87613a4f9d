//! Why paging did not do what it was asked.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::PoolError;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal};

/// Why paging did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The pool or the driver refused.
    #[error(transparent)]
    Pool(PoolError),
    /// The host cannot hold the contents. Nothing has moved.
    #[error(
        "copies of memory that is paged need {grow_bytes} more bytes of host memory ({needed_bytes} with what else is \
         saved there), and {available_bytes} are available: free some (sublet ps shows who holds how much), raise \
         the limit (SUBLET_HOST_BYTES_MAX, or the container's), or page less"
    )]
    OutOfHostMemory {
        /// The end of the last contents, in bytes.
        needed_bytes: u64,
        /// By how much host memory would have to grow, in bytes.
        grow_bytes: u64,
        /// By how much it may, in bytes.
        available_bytes: u64,
    },
    /// The memory that is used together does not fit. The first figure is the least that works.
    #[error(
        "{needed_bytes} bytes are used together and the frames for paging have {frames_bytes}: give at least \
         {needed_bytes} bytes of frames, or use less together"
    )]
    TooFewFrames {
        /// The bytes that are wanted now.
        needed_bytes: u64,
        /// The bytes that the frames hold.
        frames_bytes: u64,
    },
    /// The window has no room for more.
    #[error(
        "{asked_bytes} bytes do not fit the window of {window_bytes} bytes for paging: free what is not needed there"
    )]
    WindowFull {
        /// The bytes that were wanted.
        asked_bytes: u64,
        /// All of the window, in bytes.
        window_bytes: u64,
    },
    /// The device allocates memory in other sizes.
    #[error(
        "{device} allocates memory by {granularity_bytes} bytes, of which {chunk_bytes} is no multiple: give chunks of a \
         multiple of that"
    )]
    UnfitChunk {
        /// The size that was requested, in bytes.
        chunk_bytes: u64,
        /// The bytes that it must be a multiple of.
        granularity_bytes: u64,
        /// The device.
        device: DeviceOrdinal,
    },
    /// No bytes were requested.
    #[error("0 bytes of paged memory have no address: ask for at least 1")]
    NoBytes,
    /// There is no such span.
    #[error(
        "{address} is the start of nothing that is paged: give an address that came from there"
    )]
    NotPaged {
        /// The address that was given.
        address: DeviceAddress,
    },
    /// Frames were not free in time. The time of a pause does not count.
    #[error("waiting for {what} took longer than {} s: is the GPU busy with work that does not end?", limit.as_secs())]
    Late {
        /// The event that was waited for.
        what: String,
        /// The deadline.
        limit: Duration,
    },
    /// The pager has ended.
    #[error("paging on {device} has ended: make it again")]
    Ended {
        /// The device.
        device: DeviceOrdinal,
    },
    /// The thread could not be started. Look at `ulimit -u`.
    #[error("no thread for paging could be had: {0}")]
    NoThread(#[source] std::io::Error),
    /// The same as another caller was told.
    #[error(transparent)]
    Shared(Arc<PageError>),
}

impl From<PoolError> for PageError {
    fn from(error: PoolError) -> Self {
        if let PoolError::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes } = error {
            // A pause gives other advice.
            Self::OutOfHostMemory { needed_bytes, grow_bytes, available_bytes }
        } else {
            Self::Pool(error)
        }
    }
}

/// Result of a call about paging.
pub type PageResult<T> = Result<T, PageError>;
