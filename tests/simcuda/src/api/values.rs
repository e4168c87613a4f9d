//! Waits for values in memory, and writes of them, in the order of a stream.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::DriverCode;

use crate::abi::{Coded, In, driver_api};
use crate::sim;
use crate::work::Comparison;

/// `CUstreamBatchMemOpType`.
const WAIT_32: u32 = 1;
const WRITE_32: u32 = 2;
const FLUSH: u32 = 3;
const WAIT_64: u32 = 4;
const WRITE_64: u32 = 5;
const BARRIER: u32 = 6;
/// Most of them in one call.
const BATCH_MAX: u32 = 256;

/// A `CUstreamBatchMemOpParams`, as far as all kinds have it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Operation {
    kind: u32,
    address: u64,
    value: u64,
    flags: u32,
    alias: u64,
    _rest: u64,
}

fn wait(stream: u64, address: u64, value: u64, flags: u32, bytes: u64) -> Coded<()> {
    let sim = sim::get()?;
    let comparison = match flags & 3 {
        0 => Comparison::AtLeast,
        1 => Comparison::Equal,
        2 => Comparison::And,
        _ => Comparison::Nor,
    };
    sim.wait_for_value_on(sim.stream(stream)?, address, (value, bytes), comparison)
}

fn write(stream: u64, address: u64, value: u64, bytes: usize) -> Coded<()> {
    let sim = sim::get()?;
    let stream = sim.stream(stream)?;
    if !address.is_multiple_of(bytes as u64) {
        return Err(DriverCode::INVALID_VALUE);
    }
    sim.fill_on(stream, address, bytes as u64, value.to_le_bytes()[..bytes].to_vec())
}

fn batch(stream: u64, count: u32, operations: In<Operation>, flags: u32) -> Coded<()> {
    if flags != 0 || count > BATCH_MAX {
        return Err(DriverCode::INVALID_VALUE);
    }
    for Operation { kind, address, value, flags, .. } in operations.list(u64::from(count))? {
        match kind {
            WAIT_32 => wait(stream, address, value & u64::from(u32::MAX), flags, 4)?,
            WAIT_64 => wait(stream, address, value, flags, 8)?,
            WRITE_32 => write(stream, address, value, 4)?,
            WRITE_64 => write(stream, address, value, 8)?,
            // What was written before is seen by all immediately here.
            FLUSH | BARRIER => {}
            _ => return Err(DriverCode::INVALID_VALUE),
        }
    }
    Ok(())
}

/// The first forms and the second ones take the same.
macro_rules! both {
    ($($first:ident / $first_twin:ident, $second:ident / $second_twin:ident = $name:literal since $since:literal
        ($($arg:ident: $ty:ty),*) $body:block)*) => {
        driver_api! {
            $(
                fn $first / $first_twin = $name since $since ($($arg: $ty),*) { $body }
                fn $second / $second_twin = $name since 11_070 ($($arg: $ty),*) { $body }
            )*
        }
    };
}

both! {
    cuStreamWaitValue32 / cuStreamWaitValue32_ptsz,
    cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz = "cuStreamWaitValue32" since 8000
        (stream: u64, address: u64, value: u32, flags: u32)
    {
        wait(stream, address, u64::from(value), flags, 4)
    }
    cuStreamWaitValue64 / cuStreamWaitValue64_ptsz,
    cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz = "cuStreamWaitValue64" since 9000
        (stream: u64, address: u64, value: u64, flags: u32)
    {
        wait(stream, address, value, flags, 8)
    }
    cuStreamWriteValue32 / cuStreamWriteValue32_ptsz,
    cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz = "cuStreamWriteValue32" since 8000
        (stream: u64, address: u64, value: u32, _flags: u32)
    {
        write(stream, address, u64::from(value), 4)
    }
    cuStreamWriteValue64 / cuStreamWriteValue64_ptsz,
    cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz = "cuStreamWriteValue64" since 9000
        (stream: u64, address: u64, value: u64, _flags: u32)
    {
        write(stream, address, value, 8)
    }
    cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz,
    cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz = "cuStreamBatchMemOp" since 8000
        (stream: u64, count: u32, operations: In<Operation>, flags: u32)
    {
        batch(stream, count, operations, flags)
    }
}
