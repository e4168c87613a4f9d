//! Machine-wide facts about the devices: their names and their places.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::driver::{DeviceAttribute, DeviceOrdinal, Driver, PciAddress};
use crate::error::{Describe, PoolResult};
use crate::store::Pins;
use sublet_sync::sync::lock;

/// A function that returns the NUMA node of a device.
type NodeOf = fn(PciAddress) -> Option<u32>;

/// The devices of one process. Each fact is read from the driver when somebody needs it.
#[derive(Debug)]
pub struct Devices<D: Driver> {
    pub(crate) driver: Arc<D>,
    /// The machine-wide names of devices, as the driver returned them. Its lock is a leaf.
    names: Mutex<BTreeMap<DeviceOrdinal, String>>,
    /// The function that returns the NUMA node of a device. Its lock is a leaf.
    node_of: Mutex<Option<NodeOf>>,
}

impl<D: Driver> Devices<D> {
    pub(super) fn new(driver: Arc<D>) -> Self {
        Self { driver, names: Mutex::default(), node_of: Mutex::default() }
    }

    /// Returns the machine-wide name of `device`, as [`DeviceUuid`](crate::driver::DeviceUuid) writes it. If the driver
    /// has none, returns a name by ordinal. Calls the driver once for each device.
    pub fn uuid(&self, device: DeviceOrdinal) -> String {
        let known = || lock(&self.names);
        if let Some(name) = known().get(&device) {
            return name.clone();
        }
        let Ok(uuid) = self.driver.device_uuid(device) else {
            return format!("ordinal-{}", device.0);
        };
        let name = uuid.to_string();
        known().insert(device, name.clone());
        name
    }

    /// Does this process see the device with this name, as [`Devices::uuid`] returns it?
    pub fn sees(&self, uuid: &str) -> bool {
        let count = self.driver.device_count().unwrap_or(0);
        (0..count).any(|ordinal| self.uuid(DeviceOrdinal(ordinal)) == uuid)
    }

    /// Returns the contexts for which this thread can pin `size_bytes` without making a context. One of them is current
    /// then.
    pub(crate) fn pins_beside_work(
        &self,
        devices: &[DeviceOrdinal],
        size_bytes: u64,
    ) -> PoolResult<Pins> {
        let about = || "pinning of host memory".to_owned();
        let has_context = |device: &DeviceOrdinal| self.driver.has_primary_context(*device);
        let with_context = devices.iter().find(|device| has_context(device).unwrap_or(false));
        let Some(&device) = with_context else { return Ok(Pins::Nobody) };
        // A call of this thread must not invalidate a stream capture of another thread.
        self.driver.stand_beside_captures().about(about, size_bytes, Some(device))?;
        self.driver.make_current(device).about(about, size_bytes, Some(device))?;
        Ok(Pins::of(devices))
    }

    /// Sets the function that returns the NUMA node of a device. It counts for all host memory that is populated from
    /// now on. The function returns none if the machine has only one node, or does not report it. It is called once for
    /// each device.
    pub fn place_on_nodes(&self, node_of: NodeOf) {
        *lock(&self.node_of) = Some(node_of);
    }

    /// Returns the nodes of all of `devices`, in order and once each: a chunk holds contents of any of them.
    pub(crate) fn nodes_of(&self, devices: &[DeviceOrdinal]) -> Vec<u32> {
        let Some(node_of) = *lock(&self.node_of) else { return Vec::new() };
        let node_of = |&device: &DeviceOrdinal| node_of(self.pci_address(device)?);
        let mut nodes: Vec<u32> = devices.iter().filter_map(node_of).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Returns the PCI address of `device`; none if the driver does not report it.
    pub fn pci_address(&self, device: DeviceOrdinal) -> Option<PciAddress> {
        let part = |attribute| {
            let value = self.driver.device_attribute(device, attribute).ok()?;
            u32::try_from(value).ok()
        };
        Some(PciAddress {
            domain: part(DeviceAttribute::PCI_DOMAIN_ID)?,
            bus: part(DeviceAttribute::PCI_BUS_ID)?,
            device: part(DeviceAttribute::PCI_DEVICE_ID)?,
        })
    }
}
