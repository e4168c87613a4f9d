//! Errors of paging.

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
    /// Each paged byte has its place in host memory, and the host has too little. Nothing has moved. Free host
    /// memory, raise `SUBLET_HOST_BYTES_MAX` or the limit of the container, or page less.
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
        /// By how much host memory may grow, in bytes.
        available_bytes: u64,
    },
    /// One step uses more paged memory together than the frames on the GPU hold. Nothing has moved. The first figure
    /// of the message is the least that works: give that many bytes of frames.
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
    /// The address range of this window is used up. The memory was not allocated. Free paged memory that is not
    /// needed.
    #[error(
        "{asked_bytes} bytes do not fit the window of {window_bytes} bytes for paging: free what is not needed there"
    )]
    WindowFull {
        /// The bytes that were wanted.
        asked_bytes: u64,
        /// All of the window, in bytes.
        window_bytes: u64,
    },
    /// In C, `sublet_page_open` got a chunk size that the GPU cannot allocate. No window was opened. Give a multiple
    /// of the size in the message.
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
    /// In C, `sublet_page_alloc` got the size 0. Nothing was allocated. Give at least 1.
    #[error("0 bytes of paged memory have no address: ask for at least 1")]
    NoBytes,
    /// The program has already freed this paged memory, or never had it. Nothing was changed. Give an address that
    /// `sublet_page_alloc` returned.
    #[error(
        "{address} is the start of nothing that is paged: give an address that came from there"
    )]
    NotPaged {
        /// The address that was given.
        address: DeviceAddress,
    },
    /// The frames were still in use by the GPU at the deadline. The call failed, and no contents are lost. The time
    /// of a pause does not count. Look for a kernel that does not end.
    #[error("waiting for {what} took longer than {} s: is the GPU busy with work that does not end?", limit.as_secs())]
    Late {
        /// The event that was waited for.
        what: String,
        /// The deadline.
        limit: Duration,
    },
    /// The program uses a pager that it has closed. Nothing was changed. Make another pager.
    #[error("paging on {device} has ended: make it again")]
    Ended {
        /// The device.
        device: DeviceOrdinal,
    },
    /// The system gave no thread for paging. No pager was made. Raise the limit of threads (`ulimit -u`).
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
