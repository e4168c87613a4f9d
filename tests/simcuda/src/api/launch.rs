//! Modules and kernel launches.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::{DeviceOrdinal, DriverCode};

use crate::abi::{Coded, In, Out, Text, driver_api};
use crate::{kernels, sim};

/// The one module that each context has: it holds all kernels of the simulation, whatever image was loaded.
const MODULE_FIRST: u64 = 0x6600_0000;
const MODULE_STEP: u64 = 0x100;
/// Modules and functions end with the context that they were loaded in, whose number is above this.
const LIFE_BITS: u32 = 32;

fn module_of(device: DeviceOrdinal, life: u64) -> u64 {
    (life << LIFE_BITS) + MODULE_FIRST + u64::from(device.0.unsigned_abs()) * MODULE_STEP
}

/// The value of a module or function without the context that it was loaded in, which must live.
fn loaded(value: u64) -> Coded<u64> {
    let lives = sim::get()?.has_life(value >> LIFE_BITS);
    let rest = lives.then_some(value & ((1 << LIFE_BITS) - 1));
    rest.ok_or(DriverCode::INVALID_HANDLE)
}

/// The device that a module was loaded on.
fn device_of_module(module: u64) -> Coded<DeviceOrdinal> {
    let offset = loaded(module)?.checked_sub(MODULE_FIRST);
    let offset = offset.filter(|offset| offset.is_multiple_of(MODULE_STEP));
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

/// Where each parameter lies that is given in one buffer: `extra` is a list of keys, each with its value, and ends with 0.
fn in_buffer(function: u64, extra: In<u64>) -> Coded<Vec<u64>> {
    let (mut buffer, mut size) = (0, None);
    for pair in 0.. {
        let pair = extra.list(2 * pair + 1)?;
        let Some(&key) = pair.last() else { break };
        if key == 0 {
            break;
        }
        let value = *extra.list(pair.len() as u64 + 1)?.last().ok_or(DriverCode::INVALID_VALUE)?;
        match key {
            1 => buffer = value,
            2 => size = Some(In::<u64>::at(value).get()?),
            _ => return Err(DriverCode::INVALID_VALUE),
        }
    }
    let size = size.filter(|_| buffer != 0).ok_or(DriverCode::INVALID_VALUE)?;
    let mut places = Vec::new();
    while let Ok((start, bytes)) = kernels::parameter(function, places.len() as u64) {
        if (start + bytes) as u64 > size {
            return Err(DriverCode::INVALID_VALUE);
        }
        places.push(buffer + start as u64);
    }
    Ok(places)
}

fn launch(
    function: u64,
    grid: [u32; 3],
    stream: u64,
    params: In<In<u8>>,
    extra: In<u64>,
) -> Coded<()> {
    let sim = sim::get()?;
    let function = loaded(function)?;
    let stream = sim.stream(stream)?;
    let device = sim.core.stream_device(stream)?;
    if extra.is_given() {
        if params.is_given() {
            return Err(DriverCode::INVALID_VALUE);
        }
        let places = in_buffer(function, extra)?;
        let params = In::of(&places).cast();
        return sim.submit(stream, kernels::launch(function, device, grid, params)?);
    }
    sim.submit(stream, kernels::launch(function, device, grid, params)?)
}

driver_api! {
    fn cuModuleLoadData = "cuModuleLoadData" since 2000 (module: Out<u64>, image: In<u8>) {
        let sim = sim::get()?;
        let device = sim.current_device()?;
        if !image.is_given() {
            return Err(DriverCode::INVALID_VALUE);
        }
        module.put(module_of(device, sim.current_life()?))
    }

    fn cuModuleUnload = "cuModuleUnload" since 2000 (module: u64) {
        device_of_module(module).map(drop)
    }

    fn cuModuleGetFunction = "cuModuleGetFunction" since 2000
        (function: Out<u64>, module: u64, name: Text)
    {
        let device = device_of_module(module)?;
        let of_device = kernels::function_named(&name.get()?, device)?;
        function.put((module >> LIFE_BITS << LIFE_BITS) + of_device)
    }

    fn cuFuncGetParamInfo = "cuFuncGetParamInfo" since 12040
        (function: u64, index: u64, offset: Out<usize>, size: Out<usize>)
    {
        let (start, bytes) = kernels::parameter(loaded(function)?, index)?;
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
            extra: In<u64>,
        )
    {
        check_sizes(&[grid_x, grid_y, grid_z, block_x, block_y, block_z])?;
        launch(function, [grid_x, grid_y, grid_z], stream, params, extra)
    }

    fn cuLaunchKernelEx / cuLaunchKernelEx_ptsz = "cuLaunchKernelEx" since 11060
        (config: In<LaunchConfig>, function: u64, params: In<In<u8>>, extra: In<u64>)
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
        launch(function, [grid_x, grid_y, grid_z], stream, params, In::at(0))
    }
}
