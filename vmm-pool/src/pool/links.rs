//! Whether copies take two links, whether kernels copy, and what is known for that.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Pool;
use crate::driver::{DeviceOrdinal, Driver};
use crate::links::{KernelCopies, Links};
use crate::store::Pins;

/// See the head of this module. Its lock is a leaf.
#[derive(Debug, Default)]
pub(crate) struct LinkPolicy {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    links: Option<Links>,
    kernels: Option<KernelCopies>,
    /// Devices that other processes have memory on, by name; none when nobody knows.
    held_elsewhere: Option<BTreeSet<String>>,
    /// Devices whose driver calls were refused in a way that will not change.
    refused: BTreeSet<DeviceOrdinal>,
    /// Where copies have made a context that stays.
    kept: Option<DeviceOrdinal>,
    /// What was said once.
    told: BTreeSet<String>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            links: None,
            kernels: Some(KernelCopies::default()),
            held_elsewhere: None,
            refused: BTreeSet::new(),
            kept: None,
            told: BTreeSet::new(),
        }
    }
}

impl LinkPolicy {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn links(&self) -> Option<Links> {
        self.state().links
    }

    pub(crate) fn kernels(&self) -> Option<KernelCopies> {
        self.state().kernels
    }

    /// Has another process memory on the device of this name? It may, where that is not known.
    pub(crate) fn is_held_elsewhere(&self, uuid: &str) -> bool {
        self.state().held_elsewhere.as_ref().is_none_or(|held| held.contains(uuid))
    }

    pub(crate) fn is_refused(&self, device: DeviceOrdinal) -> bool {
        self.state().refused.contains(&device)
    }

    pub(crate) fn refuse(&self, device: DeviceOrdinal) {
        self.state().refused.insert(device);
    }

    pub(crate) fn kept(&self) -> Option<DeviceOrdinal> {
        self.state().kept
    }

    pub(crate) fn set_kept(&self, kept: Option<DeviceOrdinal>) {
        self.state().kept = kept;
    }

    /// Is it the first time that this is said?
    pub(crate) fn tells(&self, what: &str) -> bool {
        self.state().told.insert(what.to_owned())
    }
}

impl<D: Driver> Pool<D> {
    /// Has copies of one device take a neighbour's link too, from the next pause on, where [`Pool::set_held_elsewhere`] is
    /// told that nobody has memory there. Host memory is pinned for all contexts from then on. Devices that have refused
    /// are asked again.
    pub fn use_links(&self, links: Links) {
        let mut state = self.links.state();
        state.links = Some(links);
        state.refused.clear();
    }

    /// When kernels of ours copy to a device that has one, from the next resume on; `None` leaves all copies to its engines.
    pub fn use_kernels(&self, kernels: Option<KernelCopies>) {
        self.links.state().kernels = kernels;
    }

    /// Are copies to take a neighbour's link?
    pub fn uses_links(&self) -> bool {
        self.links.links().is_some()
    }

    /// On which devices other processes have memory, by the names that all processes share, resident or away. It counts
    /// for the next pause or resume, which takes it that there is some everywhere where nothing is said (`None`).
    pub fn set_held_elsewhere(&self, uuids: Option<BTreeSet<String>>) {
        self.links.state().held_elsewhere = uuids;
    }

    /// Whose contexts host memory is pinned for, in a process that uses `devices`.
    pub(crate) fn pins_of(&self, devices: &[DeviceOrdinal]) -> Pins {
        if self.uses_links() { Pins::All } else { Pins::of(devices) }
    }
}
