//! What a wrapper decided about a call.

use vmm_pool::driver::DriverCode;
use vmm_pool::{PoolError, PoolResult};

/// The outcome of a hooked call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<T> {
    /// Carried out here.
    Done(T),
    /// Refused with this code.
    Refused(DriverCode),
    /// Not about memory of ours: the driver itself must be asked.
    AskDriver,
}

impl<T> Answer<T> {
    /// The answer for a pool's result. What a caller of the driver cannot be told goes to the log.
    pub fn of(result: PoolResult<T>) -> Self {
        match result {
            Ok(value) => Self::Done(value),
            Err(error) => match error.code() {
                None => Self::AskDriver,
                Some(code) => {
                    match &error {
                        // Callers try and fall back; the driver's own answer is passed on.
                        PoolError::Driver { .. } | PoolError::NotOurs => {
                            tracing::debug!(%error, "refused");
                        }
                        PoolError::StaleHandle { .. }
                        | PoolError::Frozen
                        | PoolError::Disowned { .. }
                        | PoolError::Offloaded { .. }
                        | PoolError::OutOfDeviceMemory { .. }
                        | PoolError::OutOfHostMemory { .. }
                        | PoolError::HostMemoryRefused { .. }
                        | PoolError::OutOfDisk { .. }
                        | PoolError::FileRefused { .. }
                        | PoolError::FileUnreadable { .. }
                        | PoolError::MissingImport { .. } => tracing::warn!(%error, "refused"),
                    }
                    Self::Refused(code)
                }
            },
        }
    }

    /// The same answer about another value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Answer<U> {
        match self {
            Self::Done(value) => Answer::Done(change(value)),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }
}

impl<T> Answer<T> {
    /// Refuses what is ours with `code`; leaves the rest to the driver.
    pub fn and_refuse<U>(self, code: DriverCode) -> Answer<U> {
        match self {
            Self::Done(_) => Answer::Refused(code),
            Self::Refused(code) => Answer::Refused(code),
            Self::AskDriver => Answer::AskDriver,
        }
    }
}
