//! The interface for a crate that counts the memory that the processes of a tenant hold together.

use std::fmt::Debug;
use std::sync::Arc;

use vmm_pool::budget::Account;
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid, Driver, PciAddress};

use super::{Member, Notes, Presence};
use sublet_protocol::wire::Reply;

/// The count in which a process takes part.
pub trait Counting: Debug + Send + Sync {
    /// Begins the count after the process has joined, if there is a budget to count for. Waits for others for moments.
    fn begin(&self, process: &dyn Counted);

    /// Should this process take part in a count in which it does not yet? Does not block.
    fn is_due(&self, process: &dyn Counted) -> bool;

    /// See [`sublet_protocol::wire::Count`].
    fn run(&self, process: &dyn Counted) -> Reply;
}

/// The process whose memory is counted.
pub trait Counted {
    /// The process's identity and place in the run directory.
    fn presence(&self) -> &Presence;

    /// The process's notes for people.
    fn notes(&self) -> &Notes;

    /// The process's devices, by their ordinals, as far as the driver identifies them.
    fn gpus(&self) -> Vec<Option<(DeviceUuid, Option<PciAddress>)>>;

    /// As [`vmm_pool::Pool::count_against`].
    fn count_against(&self, account: Arc<dyn Account>) -> bool;
}

impl<D: Driver> Counted for Member<D> {
    fn presence(&self) -> &Presence {
        &self.presence
    }

    fn notes(&self) -> &Notes {
        &self.notes
    }

    fn gpus(&self) -> Vec<Option<(DeviceUuid, Option<PciAddress>)>> {
        let driver = self.pool.driver();
        let gpu = |device| {
            let uuid = driver.device_uuid(device).ok()?;
            Some((uuid, self.pool.devices().pci_address(device)))
        };
        (0..driver.device_count().unwrap_or(0)).map(DeviceOrdinal).map(gpu).collect()
    }

    fn count_against(&self, account: Arc<dyn Account>) -> bool {
        self.pool.count_against(account)
    }
}
