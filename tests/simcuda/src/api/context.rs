//! Contexts.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::SimContext;

use crate::abi::{Coded, In, Out, driver_api};
use crate::contexts;
use crate::sim::{self, Sim};

const API_VERSION: u32 = 3020;

/// Waits for the work of that context alone.
fn synchronize(sim: &Sim, context: SimContext) -> Coded<()> {
    sim.forbid_wait_for_context(context)?;
    sim.forbid_in_capture()?;
    sim.core.wait_context(context)
}

fn create(context: Out<u64>, device: i32) -> Coded<()> {
    let sim = sim::get()?;
    context.put(sim.create_context(sim.device(device)?)?)
}

driver_api! {
    fn cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain" since 7000
        (context: Out<u64>, device: i32)
    {
        let sim = sim::get()?;
        context.put(sim.retain_primary(sim.device(device)?)?)
    }

    fn cuDevicePrimaryCtxRelease_v2 = "cuDevicePrimaryCtxRelease" since 11000 (device: i32) {
        let sim = sim::get()?;
        sim.release_primary(sim.device(device)?)
    }

    fn cuDevicePrimaryCtxReset_v2 = "cuDevicePrimaryCtxReset" since 11000 (device: i32) {
        let sim = sim::get()?;
        sim.reset_primary(sim.device(device)?)
    }

    fn cuDevicePrimaryCtxSetFlags_v2 = "cuDevicePrimaryCtxSetFlags" since 11000
        (device: i32, flags: u32)
    {
        let sim = sim::get()?;
        sim.set_primary_flags(sim.device(device)?, flags);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState = "cuDevicePrimaryCtxGetState" since 7000
        (device: i32, flags: Out<u32>, active: Out<i32>)
    {
        let sim = sim::get()?;
        let (bits, is_active) = sim.primary_state(sim.device(device)?);
        flags.put(bits)?;
        active.put(i32::from(is_active))
    }

    fn cuCtxCreate = "cuCtxCreate" since 2000 (context: Out<u64>, _flags: u32, device: i32) {
        create(context, device)
    }

    fn cuCtxCreate_v2 = "cuCtxCreate" since 3020 (context: Out<u64>, _flags: u32, device: i32) {
        create(context, device)
    }

    fn cuCtxCreate_v4 = "cuCtxCreate" since 12050
        (context: Out<u64>, _params: In<u8>, _flags: u32, device: i32)
    {
        create(context, device)
    }

    fn cuCtxDestroy = "cuCtxDestroy" since 2000 (context: u64) {
        sim::get()?.destroy_context(context)
    }

    fn cuCtxDestroy_v2 = "cuCtxDestroy" since 4000 (context: u64) {
        sim::get()?.destroy_context(context)
    }

    fn cuCtxAttach = "cuCtxAttach" since 2000 (context: Out<u64>, flags: u32) {
        if flags != 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        context.put(sim::get()?.attach_context()?)
    }

    fn cuCtxDetach = "cuCtxDetach" since 2000 (context: u64) {
        sim::get()?.detach_context(context)
    }

    fn cuCtxPushCurrent_v2 = "cuCtxPushCurrent" since 4000 (context: u64) {
        sim::get()?.context_device(context)?;
        contexts::push(context);
        Ok(())
    }

    fn cuCtxPopCurrent_v2 = "cuCtxPopCurrent" since 4000 (context: Out<u64>) {
        sim::get()?;
        context.put_if_wanted(contexts::pop()?);
        Ok(())
    }

    fn cuCtxSetCurrent = "cuCtxSetCurrent" since 4000 (context: u64) {
        let sim = sim::get()?;
        if context != 0 {
            sim.context_device(context)?;
        }
        contexts::replace_current(context);
        Ok(())
    }

    fn cuCtxGetCurrent = "cuCtxGetCurrent" since 4000 (context: Out<u64>) {
        sim::get()?;
        context.put(contexts::current_or_none())
    }

    fn cuCtxGetDevice = "cuCtxGetDevice" since 2000 (device: Out<i32>) {
        device.put(sim::get()?.current_device()?.0)
    }

    fn cuCtxGetDevice_v2 = "cuCtxGetDevice" since 13000 (device: Out<i32>, context: u64) {
        let sim = sim::get()?;
        let found = match context {
            0 => sim.current_device()?,
            _ => sim.context_device(context)?,
        };
        device.put(found.0)
    }

    fn cuCtxGetFlags = "cuCtxGetFlags" since 7000 (flags: Out<u32>) {
        let sim = sim::get()?;
        flags.put(sim.primary_state(sim.current_device()?).0)
    }

    fn cuCtxGetApiVersion = "cuCtxGetApiVersion" since 3020 (context: u64, version: Out<u32>) {
        let sim = sim::get()?;
        if context != 0 {
            sim.context_device(context)?;
        }
        version.put(API_VERSION)
    }

    fn cuCtxSynchronize = "cuCtxSynchronize" since 2000 () {
        let sim = sim::get()?;
        synchronize(sim, sim.current_context()?)
    }

    fn cuCtxSynchronize_v2 = "cuCtxSynchronize" since 13000 (context: u64) {
        let sim = sim::get()?;
        let meant = match context {
            0 => sim.current_context()?,
            _ => sim.context(context)?,
        };
        synchronize(sim, meant)
    }

    fn cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange" since 5050
        (least: Out<i32>, greatest: Out<i32>)
    {
        sim::get()?.current_device()?;
        least.put_if_wanted(0);
        greatest.put_if_wanted(-5);
        Ok(())
    }

    fn cuCtxEnablePeerAccess = "cuCtxEnablePeerAccess" since 4000 (peer: u64, flags: u32) {
        if flags != 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        sim::get()?.enable_peer(peer)
    }

    fn cuCtxDisablePeerAccess = "cuCtxDisablePeerAccess" since 4000 (peer: u64) {
        sim::get()?.disable_peer(peer)
    }
}
