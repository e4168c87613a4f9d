//! The door for a crate that counts what the processes of a tenant hold together.

use std::fmt::Debug;
use std::sync::Arc;

use vmm_pool::budget::Account;
use vmm_pool::driver::{DeviceOrdinal, DeviceUuid, Driver, PciAddress};

use super::{Member, Notes, Presence};
use sublet_protocol::wire::Reply;

/// The count that a process takes part in.
pub trait Counting: Debug + Send + Sync {
    /// Begins when the process has joined, where there is something to count for. Waits for others for moments.
    fn begin(&self, process: &dyn Counted);

    /// Is there a count that this process is to take part in, and does not? Does not block.
    fn is_due(&self, process: &dyn Counted) -> bool;

    /// See [`sublet_protocol::wire::Count`].
    fn run(&self, process: &dyn Counted) -> Reply;
}

/// The process whose memory is counted.
pub trait Counted {
    /// Its place among others.
    fn presence(&self) -> &Presence;

    /// Its notes for people.
    fn notes(&self) -> &Notes;

    /// Its devices, by their ordinals, as far as the driver says which they are.
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
