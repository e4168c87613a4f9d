//! Older forms of functions about contexts, which programs of their time still ask for.

#![expect(unsafe_code, reason = "exports C functions")]

use crate::abi::{In, Out, driver_api};
use crate::sim;

driver_api! {
    fn cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease" since 7000 (device: i32) {
        let sim = sim::get()?;
        sim.release_primary(sim.device(device)?)
    }

    fn cuDevicePrimaryCtxReset = "cuDevicePrimaryCtxReset" since 7000 (device: i32) {
        let sim = sim::get()?;
        sim.reset_primary(sim.device(device)?)
    }

    fn cuCtxCreate_v3 = "cuCtxCreate" since 11_040
        (context: Out<u64>, _params: In<u8>, _count: i32, _flags: u32, device: i32)
    {
        let sim = sim::get()?;
        context.put(sim.create_context(sim.device(device)?)?)
    }
}
