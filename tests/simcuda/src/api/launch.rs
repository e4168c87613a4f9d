//! Modules and kernel launches.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::{DeviceOrdinal, DriverCode};

use crate::abi::{Coded, In, Out, Text, driver_api};
use crate::{kernels, sim};

/// The one module that each device has: it holds all kernels of the simulation, whatever image was loaded.
const MODULE_FIRST: u64 = 0x6600_0000;
const MODULE_STEP: u64 = 0x100;

fn module_of(device: DeviceOrdinal) -> u64 {
    MODULE_FIRST + u64::from(device.0.unsigned_abs()) * MODULE_STEP
}

/// The device that a module was loaded on.
fn device_of_module(module: u64) -> Coded<DeviceOrdinal> {
    let offset =
        module.checked_sub(MODULE_FIRST).filter(|offset| offset.is_multiple_of(MODULE_STEP));
    let ordinal = offset.and_then(|offset| i32::try_from(offset / MODULE_STEP).ok());
    sim::get()?.device(ordinal.unwrap_or(-1)).map_err(|_| DriverCode::INVALID_HANDLE)
}

/// The part of `CUlaunchConfig` that matters here, at its place.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchConfig {
    sizes: [u32; 7],
    stream: u64,
    attributes: u64,
    attribute_count: u32,
}

fn check_sizes(sizes: &[u32]) -> Coded<()> {
    if sizes.iter().all(|size| *size > 0) { Ok(()) } else { Err(DriverCode::INVALID_VALUE) }
}

fn launch(function: u64, grid: [u32; 3], stream: u64, params: In<In<u8>>, extra: u64) -> Coded<()> {
    let sim = sim::get()?;
    if extra != 0 && !params.is_given() {
        return Err(DriverCode::NOT_SUPPORTED);
    }
    let stream = sim.stream(stream)?;
    let device = sim.core.stream_device(stream)?;
    sim.submit(stream, kernels::launch(function, device, grid, params)?)
}

driver_api! {
    fn cuModuleLoadData = "cuModuleLoadData" since 2000 (module: Out<u64>, image: In<u8>) {
        let sim = sim::get()?;
        let device = sim.current_device()?;
        if !image.is_given() {
            return Err(DriverCode::INVALID_VALUE);
        }
        module.put(module_of(device))
    }

    fn cuModuleUnload = "cuModuleUnload" since 2000 (module: u64) {
        device_of_module(module).map(drop)
    }

    fn cuModuleGetFunction = "cuModuleGetFunction" since 2000
        (function: Out<u64>, module: u64, name: Text)
    {
        let device = device_of_module(module)?;
        function.put(kernels::function_named(&name.get()?, device)?)
    }

    fn cuFuncGetParamInfo = "cuFuncGetParamInfo" since 12040
        (function: u64, index: u64, offset: Out<usize>, size: Out<usize>)
    {
        let (start, bytes) = kernels::parameter(function, index)?;
        offset.put(start)?;
        size.put_if_wanted(bytes);
        Ok(())
    }

    fn cuLaunchKernel / cuLaunchKernel_ptsz = "cuLaunchKernel" since 4000
        (
            function: u64,
            grid_x: u32,
            grid_y: u32,
            grid_z: u32,
            block_x: u32,
            block_y: u32,
            block_z: u32,
            _shared_bytes: u32,
            stream: u64,
            params: In<In<u8>>,
            extra: u64,
        )
    {
        check_sizes(&[grid_x, grid_y, grid_z, block_x, block_y, block_z])?;
        launch(function, [grid_x, grid_y, grid_z], stream, params, extra)
    }

    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz = "cuLaunchKernelEx" since 11060
        (config: In<LaunchConfig>, function: u64, params: In<In<u8>>, extra: u64)
    {
        let config = config.get()?;
        check_sizes(&config.sizes[..6])?;
        let [grid_x, grid_y, grid_z, ..] = config.sizes;
        launch(function, [grid_x, grid_y, grid_z], config.stream, params, extra)
    }

    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz
        = "cuLaunchCooperativeKernel" since 9000
        (
            function: u64,
            grid_x: u32,
            grid_y: u32,
            grid_z: u32,
            block_x: u32,
            block_y: u32,
            block_z: u32,
            _shared_bytes: u32,
            stream: u64,
            params: In<In<u8>>,
        )
    {
        check_sizes(&[grid_x, grid_y, grid_z, block_x, block_y, block_z])?;
        launch(function, [grid_x, grid_y, grid_z], stream, params, 0)
    }
}
