//! Copies and fills.

#![expect(unsafe_code, reason = "exports C functions")]

use crate::abi::{Coded, driver_api};
use crate::sim;
use crate::work::Side;

fn copy_now(target: u64, source: u64, bytes: u64) -> Coded<()> {
    sim::get()?.copy_now(target, source, bytes)
}

fn copy_later(target: u64, source: u64, bytes: u64, stream: u64) -> Coded<()> {
    let sim = sim::get()?;
    sim.copy_on(sim.stream(stream)?, target, source, bytes)
}

/// A copy between two contexts' devices, in the order of `stream`.
fn copy_peer(target: (u64, u64), source: (u64, u64), bytes: u64, stream: u64) -> Coded<()> {
    let sim = sim::get()?;
    let side = |(address, context)| {
        let device = sim.context_device(context)?;
        Ok(Side { device, address })
    };
    sim.copy_sides_on(sim.stream(stream)?, side(target)?, side(source)?, bytes)
}

fn fill(target: u64, count: u64, pattern: &[u8], stream: u64) -> Coded<()> {
    let sim = sim::get()?;
    let bytes = count
        .checked_mul(pattern.len() as u64)
        .ok_or(vmm_pool::driver::DriverCode::INVALID_VALUE)?;
    sim.fill_on(sim.stream(stream)?, target, bytes, pattern.to_vec())
}

/// Fills in the order of the default stream. The real call may return before it is done, too.
fn fill_now(target: u64, count: u64, pattern: &[u8]) -> Coded<()> {
    sim::get()?.forbid_in_capture()?;
    fill(target, count, pattern, 0)
}

driver_api! {
    fn cuMemcpy / cuMemcpy_ptds = "cuMemcpy" since 4000
        (target: u64, source: u64, bytes: u64)
    {
        copy_now(target, source, bytes)
    }

    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds = "cuMemcpyHtoD" since 3020
        (target: u64, source: u64, bytes: u64)
    {
        copy_now(target, source, bytes)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds = "cuMemcpyDtoH" since 3020
        (target: u64, source: u64, bytes: u64)
    {
        copy_now(target, source, bytes)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds = "cuMemcpyDtoD" since 3020
        (target: u64, source: u64, bytes: u64)
    {
        copy_now(target, source, bytes)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds = "cuMemcpyPeer" since 4000
        (target: u64, target_context: u64, source: u64, source_context: u64, bytes: u64)
    {
        let sim = sim::get()?;
        sim.forbid_in_capture()?;
        copy_peer((target, target_context), (source, source_context), bytes, 0)?;
        sim.core.wait_stream(sim.stream(0)?)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz = "cuMemcpyAsync" since 4000
        (target: u64, source: u64, bytes: u64, stream: u64)
    {
        copy_later(target, source, bytes, stream)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz = "cuMemcpyHtoDAsync" since 3020
        (target: u64, source: u64, bytes: u64, stream: u64)
    {
        copy_later(target, source, bytes, stream)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz = "cuMemcpyDtoHAsync" since 3020
        (target: u64, source: u64, bytes: u64, stream: u64)
    {
        copy_later(target, source, bytes, stream)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz = "cuMemcpyDtoDAsync" since 3020
        (target: u64, source: u64, bytes: u64, stream: u64)
    {
        copy_later(target, source, bytes, stream)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz = "cuMemcpyPeerAsync" since 4000
        (
            target: u64,
            target_context: u64,
            source: u64,
            source_context: u64,
            bytes: u64,
            stream: u64,
        )
    {
        copy_peer((target, target_context), (source, source_context), bytes, stream)
    }

    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds = "cuMemsetD8" since 3020
        (target: u64, value: u8, count: u64)
    {
        fill_now(target, count, &[value])
    }

    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds = "cuMemsetD16" since 3020
        (target: u64, value: u16, count: u64)
    {
        fill_now(target, count, &value.to_le_bytes())
    }

    fn cuMemsetD16Async / cuMemsetD16Async_ptsz = "cuMemsetD16Async" since 3020
        (target: u64, value: u16, count: u64, stream: u64)
    {
        fill(target, count, &value.to_le_bytes(), stream)
    }

    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds = "cuMemsetD32" since 3020
        (target: u64, value: u32, count: u64)
    {
        fill_now(target, count, &value.to_le_bytes())
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz = "cuMemsetD8Async" since 3020
        (target: u64, value: u8, count: u64, stream: u64)
    {
        fill(target, count, &[value], stream)
    }

    fn cuMemsetD32Async / cuMemsetD32Async_ptsz = "cuMemsetD32Async" since 3020
        (target: u64, value: u32, count: u64, stream: u64)
    {
        fill(target, count, &value.to_le_bytes(), stream)
    }
}
