//! The devices, as far as they concern the whole machine: their names, and where they are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::driver::{DeviceAttribute, DeviceOrdinal, Driver, PciAddress};
use crate::error::{Describe, PoolResult};
use crate::store::Pins;
use sublet_sync::sync::lock;

/// The NUMA node of a device.
type NodeOf = fn(PciAddress) -> Option<u32>;

/// See the head of this module. Each is asked of the driver when somebody wants to know it.
#[derive(Debug)]
pub struct Devices<D: Driver> {
    pub(crate) driver: Arc<D>,
    /// Machine-wide names of devices, as the driver gave them. A leaf.
    names: Mutex<BTreeMap<DeviceOrdinal, String>>,
    /// The function that tells the NUMA node of a device. A leaf.
    node_of: Mutex<Option<NodeOf>>,
}

impl<D: Driver> Devices<D> {
    pub(super) fn new(driver: Arc<D>) -> Self {
        Self { driver, names: Mutex::default(), node_of: Mutex::default() }
    }

    /// The machine-wide name of `device`, as [`DeviceUuid`](crate::driver::DeviceUuid) writes it, or a name by ordinal
    /// where the driver has none. Asked of the driver once a device.
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

    /// Does this process see the device of this name, as [`Devices::uuid`] says it?
    pub fn sees(&self, uuid: &str) -> bool {
        let count = self.driver.device_count().unwrap_or(0);
        (0..count).any(|ordinal| self.uuid(DeviceOrdinal(ordinal)) == uuid)
    }

    /// For whom this thread can pin `size_bytes` without making a context, one of which is current then.
    pub(crate) fn pins_beside_work(
        &self,
        devices: &[DeviceOrdinal],
        size_bytes: u64,
    ) -> PoolResult<Pins> {
        let about = || "pinning of host memory".to_owned();
        let has_context = |device: &DeviceOrdinal| self.driver.has_primary_context(*device);
        let with_context = devices.iter().find(|device| has_context(device).unwrap_or(false));
        let Some(&device) = with_context else { return Ok(Pins::Nobody) };
        // A call of this thread must not spoil a capture of another one's.
        self.driver.stand_beside_captures().about(about, size_bytes, Some(device))?;
        self.driver.make_current(device).about(about, size_bytes, Some(device))?;
        Ok(Pins::of(devices))
    }

    /// Says on which NUMA node a device is, for all host memory that is brought in from now on. None where the machine
    /// has only one, or does not say. Asked once a device.
    pub fn place_on_nodes(&self, node_of: NodeOf) {
        *lock(&self.node_of) = Some(node_of);
    }

    /// The nodes of all of `devices`, in order and once each: a chunk holds contents of any of them.
    pub(crate) fn nodes_of(&self, devices: &[DeviceOrdinal]) -> Vec<u32> {
        let Some(node_of) = *lock(&self.node_of) else { return Vec::new() };
        let node_of = |&device: &DeviceOrdinal| node_of(self.pci_address(device)?);
        let mut nodes: Vec<u32> = devices.iter().filter_map(node_of).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Returns the place of `device` on the machine's buses; none where the driver does not say.
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
