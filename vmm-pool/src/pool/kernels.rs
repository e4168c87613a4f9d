//! Whether kernels copy.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Pool;
use crate::driver::Driver;
use crate::links::KernelCopies;

/// See the head of this module. Its lock is a leaf.
#[derive(Debug)]
pub(crate) struct KernelPolicy {
    kernels: Mutex<Option<KernelCopies>>,
}

impl Default for KernelPolicy {
    fn default() -> Self {
        Self { kernels: Mutex::new(Some(KernelCopies::default())) }
    }
}

impl KernelPolicy {
    fn kernels(&self) -> MutexGuard<'_, Option<KernelCopies>> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> Option<KernelCopies> {
        *self.kernels()
    }
}

impl<D: Driver> Pool<D> {
    /// When kernels of ours copy to a device that has one, from the next resume on; `None` leaves all copies to its engines.
    pub fn use_kernels(&self, kernels: Option<KernelCopies>) {
        *self.kernels.kernels() = kernels;
    }
}
