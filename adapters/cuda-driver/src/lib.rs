//! The driver's memory calls, answered from the pool, whichever library makes them.
//!
//! * [`functions`]: the driver's functions that we stand in for.
//! * [`caller`]: which library a call comes from.
//! * [`vmm`]: the virtual memory calls (`cuMemCreate`, `cuMemMap` and theirs).
//! * [`blocks`]: `cuMemAlloc`, `cuMemFree`, peer access.
//! * [`paged`]: `cuMemAlloc` in regions whose memory is paged.
//! * [`pointers`]: facts about addresses.
//! * [`ipc`]: `cudaIpc` handles of such memory, as tickets.
//!
//! Each call has an [`Answer`]. No table of allocations lives here: the pool has the only one.

pub mod blocks;
pub mod caller;
pub mod functions;
pub mod ipc;
pub mod paged;
pub mod pointers;
pub mod vmm;

pub use blocks::{Accessors, BLOCK_BYTES_MIN};

use tenants::member::ImportError;
use vmm_pool::driver::DriverCode;
use vmm_pool::{PoolError, PoolResult};

/// The outcome of a call that we stand in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Answer<T> {
    /// Carried out here.
    Done(T),
    /// About memory of ours, and refused with this code.
    Refused(DriverCode),
    /// Not about memory of ours: the driver itself must be asked.
    AskDriver,
}

impl<T> Answer<T> {
    /// The answer for a pool's result. What a caller of the driver cannot be told goes to the log.
    pub fn of(result: PoolResult<T>) -> Self {
        match result {
            Ok(value) => Self::Done(value),
            Err(PoolError::NotOurs) => Self::AskDriver,
            Err(error) => {
                if matches!(error, PoolError::Driver { .. }) {
                    // Callers try and fall back; the driver's own answer is passed on.
                    tracing::debug!(%error, "refused");
                } else {
                    tracing::warn!(%error, "refused");
                }
                Self::Refused(error.code().unwrap_or(DriverCode::UNKNOWN))
            }
        }
    }

    /// The answer for something that other processes took part in.
    pub fn of_import(result: Result<T, ImportError>) -> Self {
        match result {
            Ok(value) => Self::Done(value),
            Err(ImportError::Pool(error)) => Self::of(Err(error)),
            Err(error) => {
                tracing::warn!(%error, "sharing of device memory refused");
                Self::Refused(DriverCode::INVALID_VALUE)
            }
        }
    }

    /// The answer about something that may not be there: the driver's, where it is not.
    pub fn of_found(found: Option<T>) -> Self {
        found.map_or(Self::AskDriver, Self::Done)
    }

    /// The same answer about another value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Answer<U> {
        match self {
            Self::Done(value) => Answer::Done(change(value)),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }

    /// Answers about what is ours by `next`; leaves other answers as they are.
    pub fn and_then<U>(self, next: impl FnOnce(T) -> Answer<U>) -> Answer<U> {
        match self {
            Self::Done(value) => next(value),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }

    /// Refuses what is ours with `code`; leaves the rest to the driver.
    pub fn and_refuse<U>(self, code: DriverCode) -> Answer<U> {
        match self {
            Self::Done(_) => Answer::Refused(code),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }
}
