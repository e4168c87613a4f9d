//! Devices.

#![expect(unsafe_code, reason = "exports C functions")]

use std::ffi::c_char;

use vmm_pool::driver::{DeviceAttribute, DeviceOrdinal, DriverCode};

use crate::abi::{Out, driver_api};
use crate::sim;

driver_api! {
    fn cuDeviceGet = "cuDeviceGet" since 2000 (device: Out<i32>, ordinal: i32) {
        device.put(sim::get()?.device(ordinal)?.0)
    }

    fn cuDeviceGetCount = "cuDeviceGetCount" since 2000 (count: Out<i32>) {
        let visible = sim::get()?.core.visible_count();
        count.put(i32::try_from(visible).map_err(|_| DriverCode::UNKNOWN)?)
    }

    fn cuDeviceGetName = "cuDeviceGetName" since 2000
        (name: Out<c_char>, capacity: i32, device: i32)
    {
        sim::get()?.device(device)?;
        name.put_text("Simulated GPU", capacity)
    }

    fn cuDeviceGetUuid = "cuDeviceGetUuid" since 9020 (uuid: Out<[u8; 16]>, device: i32) {
        uuid.put(sim::get()?.core.uuid(DeviceOrdinal(device))?.0)
    }

    fn cuDeviceGetUuid_v2 = "cuDeviceGetUuid" since 11040 (uuid: Out<[u8; 16]>, device: i32) {
        uuid.put(sim::get()?.core.uuid(DeviceOrdinal(device))?.0)
    }

    fn cuDeviceGetAttribute = "cuDeviceGetAttribute" since 2000
        (value: Out<i32>, attribute: i32, device: i32)
    {
        let device = DeviceOrdinal(device);
        value.put(sim::get()?.core.attribute(device, DeviceAttribute(attribute))?)
    }

    fn cuDeviceTotalMem_v2 = "cuDeviceTotalMem" since 3020 (bytes: Out<u64>, device: i32) {
        bytes.put(sim::get()?.core.total_bytes(DeviceOrdinal(device))?)
    }

    fn cuDeviceGetPCIBusId = "cuDeviceGetPCIBusId" since 4010
        (text: Out<c_char>, capacity: i32, device: i32)
    {
        let index = sim::get()?.core.node_index(DeviceOrdinal(device))?;
        text.put_text(&format!("0000:{:02X}:00.0", index + 1), capacity)
    }

    fn cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer" since 4000
        (can: Out<i32>, device: i32, peer: i32)
    {
        let sim = sim::get()?;
        let are_two = sim.device(device)? != sim.device(peer)?;
        can.put(i32::from(are_two && sim.core.options().peer_access))
    }
}
