//! The driver's memory calls of all libraries, answered from the pool.
//!
//! * [`functions`]: the driver's functions that we stand in for.
//! * [`caller`]: the library that makes a call.
//! * [`vmm`]: the virtual memory calls (`cuMemCreate`, `cuMemMap` and the like).
//! * [`blocks`]: `cuMemAlloc`, `cuMemFree`, peer access.
//! * [`paged`]: `cuMemAlloc` in regions whose memory is paged.
//! * [`pointers`]: facts about addresses.
//! * [`ipc`]: `cudaIpc` handles of such memory, as tickets.
//!
//! Each call has an [`Answer`]. This crate has no table of allocations: the pool has the only one.

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
    /// The call was carried out here.
    Done(T),
    /// The call is about memory of ours, and is refused with this code.
    Refused(DriverCode),
    /// The call is not about memory of ours: call the driver itself.
    AskDriver,
}

impl<T> Answer<T> {
    /// Returns the answer for a result of the pool. Details that a caller of the driver cannot get go to the log.
    pub fn of(result: PoolResult<T>) -> Self {
        match result {
            Ok(value) => Self::Done(value),
            Err(PoolError::NotOurs) => Self::AskDriver,
            Err(error) => {
                if matches!(error, PoolError::Driver { .. }) {
                    // Callers try and fall back, so the driver's own answer is passed on.
                    tracing::debug!(%error, "refused");
                } else {
                    tracing::warn!(%error, "refused");
                }
                Self::Refused(error.code().unwrap_or(DriverCode::UNKNOWN))
            }
        }
    }

    /// Returns the answer for a result that other processes took part in.
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

    /// Returns the answer about something that may not be there. If it is not, the driver answers.
    pub fn of_found(found: Option<T>) -> Self {
        found.map_or(Self::AskDriver, Self::Done)
    }

    /// Replaces the value of the answer by `change`.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Answer<U> {
        match self {
            Self::Done(value) => Answer::Done(change(value)),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }

    /// Passes a value of ours to `next`; leaves other answers as they are.
    pub fn and_then<U>(self, next: impl FnOnce(T) -> Answer<U>) -> Answer<U> {
        match self {
            Self::Done(value) => next(value),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }

    /// Refuses a call about memory of ours with `code`; leaves the rest to the driver.
    pub fn and_refuse<U>(self, code: DriverCode) -> Answer<U> {
        match self {
            Self::Done(_) => Answer::Refused(code),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }
}
