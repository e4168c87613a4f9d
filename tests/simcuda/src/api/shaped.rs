//! Copies and fills of rows and boxes, and copies in batches. Of arrays, only bytes in a row: where the rest of one lies is
//! the driver's own business.

#![expect(unsafe_code, reason = "exports C functions")]

use vmm_pool::driver::{DriverCode, RawStream};

use crate::abi::{Coded, In, Out, driver_api};
use crate::sim;
use crate::work::{Rows, Shape, Side};

/// `CU_MEMORYTYPE_HOST`, `_DEVICE` and `_UNIFIED`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const UNIFIED: u32 = 4;
/// `CU_MEMCPY_OPERAND_TYPE_POINTER`.
const OPERAND_POINTER: u32 = 1;

/// One side of a `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Side2d {
    x_bytes: u64,
    y: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch_bytes: u64,
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Copy2d {
    source: Side2d,
    target: Side2d,
    width_bytes: u64,
    height: u64,
}

/// One side of a `CUDA_MEMCPY3D`, or of a `CUDA_MEMCPY3D_PEER`, which names a context too.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Side3d {
    x_bytes: u64,
    y: u64,
    z: u64,
    level: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    context: u64,
    pitch_bytes: u64,
    height: u64,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Copy3d {
    source: Side3d,
    target: Side3d,
    width_bytes: u64,
    height: u64,
    depth: u64,
}

/// A `CUmemcpy3DOperand` that is a pointer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Operand {
    kind: u32,
    address: u64,
    row_elements: u64,
    layer_rows: u64,
    hint: [i32; 2],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BatchCopy {
    source: Operand,
    target: Operand,
    extent: [u64; 3],
    order: i32,
    flags: u32,
}

fn address_of(kind: u32, host: u64, device: u64) -> Coded<u64> {
    match kind {
        HOST => Ok(host),
        DEVICE | UNIFIED => Ok(device),
        _ => Err(DriverCode::NOT_SUPPORTED),
    }
}

impl Side2d {
    fn rows(&self, width_bytes: u64) -> Coded<Rows> {
        let start = address_of(self.kind, self.host, self.device)?;
        let pitch_bytes = if self.pitch_bytes == 0 { width_bytes } else { self.pitch_bytes };
        let offset = self.y.checked_mul(pitch_bytes).and_then(|at| at.checked_add(self.x_bytes));
        let start = offset.and_then(|offset| start.checked_add(offset));
        if pitch_bytes < width_bytes {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(Rows { start: start.ok_or(DriverCode::INVALID_VALUE)?, pitch_bytes, layer_bytes: 0 })
    }
}

impl Side3d {
    fn rows(&self, copy: &Copy3d) -> Coded<Rows> {
        let Self { x_bytes, y, kind, host, device, array, pitch_bytes, .. } = *self;
        let side = Side2d { x_bytes, y, kind, host, device, array, pitch_bytes };
        let rows = side.rows(copy.width_bytes)?;
        let height = if self.height == 0 { copy.height } else { self.height };
        let layer_bytes = rows.pitch_bytes.checked_mul(height);
        let layer_bytes = layer_bytes.ok_or(DriverCode::INVALID_VALUE)?;
        let start = self.z.checked_mul(layer_bytes).and_then(|at| rows.start.checked_add(at));
        Ok(Rows { start: start.ok_or(DriverCode::INVALID_VALUE)?, layer_bytes, ..rows })
    }
}

impl Operand {
    fn rows(&self, extent: [u64; 3]) -> Coded<Rows> {
        if self.kind != OPERAND_POINTER {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let pitch_bytes = if self.row_elements == 0 { extent[0] } else { self.row_elements };
        let rows = if self.layer_rows == 0 { extent[1] } else { self.layer_rows };
        let layer_bytes = pitch_bytes.checked_mul(rows).ok_or(DriverCode::INVALID_VALUE)?;
        Ok(Rows { start: self.address, pitch_bytes, layer_bytes })
    }
}

fn copy_2d(copy: In<Copy2d>, stream: u64) -> Coded<RawStream> {
    let (sim, copy) = (sim::get()?, copy.get()?);
    let stream = sim.stream(stream)?;
    let shape = Shape { width_bytes: copy.width_bytes, height: copy.height, depth: 1 };
    let (target, source) =
        (copy.target.rows(shape.width_bytes)?, copy.source.rows(shape.width_bytes)?);
    sim.copy_shape_on(stream, target, source, shape)?;
    Ok(stream)
}

fn copy_3d(copy: In<Copy3d>, stream: u64) -> Coded<RawStream> {
    let (sim, copy) = (sim::get()?, copy.get()?);
    let stream = sim.stream(stream)?;
    let Copy3d { width_bytes, height, depth, .. } = copy;
    let (target, source) = (copy.target.rows(&copy)?, copy.source.rows(&copy)?);
    sim.copy_shape_on(stream, target, source, Shape { width_bytes, height, depth })?;
    Ok(stream)
}

/// As [`copy_3d`], each side reached by its context's device.
fn copy_3d_peer(copy: In<Copy3d>, stream: u64) -> Coded<RawStream> {
    let (sim, copy) = (sim::get()?, copy.get()?);
    let stream = sim.stream(stream)?;
    let shape = Shape { width_bytes: copy.width_bytes, height: copy.height, depth: copy.depth };
    let side = |side: &Side3d| {
        let rows = side.rows(&copy)?;
        Ok((Side { device: sim.context_device(side.context)?, address: rows.start }, rows))
    };
    sim.copy_shape_sides_on(stream, side(&copy.target)?, side(&copy.source)?, shape)?;
    Ok(stream)
}

/// The copy that `begin` queues on the default stream is done when the call returns.
fn now(begin: impl FnOnce() -> Coded<RawStream>) -> Coded<()> {
    let sim = sim::get()?;
    sim.forbid_in_capture()?;
    sim.core.wait_stream(begin()?)
}

fn fill_rows(
    target: u64,
    pitch_bytes: u64,
    pattern: &[u8],
    (width, height): (u64, u64),
    stream: u64,
) -> Coded<()> {
    let sim = sim::get()?;
    let width_bytes = width.checked_mul(pattern.len() as u64).ok_or(DriverCode::INVALID_VALUE)?;
    if height > 1 && pitch_bytes < width_bytes {
        return Err(DriverCode::INVALID_VALUE);
    }
    let stream = sim.stream(stream)?;
    for row in 0..height {
        let start = row.checked_mul(pitch_bytes).and_then(|at| target.checked_add(at));
        let start = start.ok_or(DriverCode::INVALID_VALUE)?;
        sim.fill_on(stream, start, width_bytes, pattern.to_vec())?;
    }
    Ok(())
}

fn fill_rows_now(target: u64, pitch: u64, pattern: &[u8], size: (u64, u64)) -> Coded<()> {
    sim::get()?.forbid_in_capture()?;
    fill_rows(target, pitch, pattern, size, 0)
}

fn copy_batch(
    targets: In<u64>,
    sources: In<u64>,
    sizes: In<u64>,
    count: u64,
    (attributes, attribute_count): (In<u8>, u64),
    stream: u64,
) -> Coded<()> {
    let sim = sim::get()?;
    // Neither the legacy stream nor a batch without attributes is taken.
    if count == 0 || attribute_count == 0 || attribute_count > count || !attributes.is_given() {
        return Err(DriverCode::INVALID_VALUE);
    }
    let stream = sim.stream(stream)?;
    let sides = targets.list(count)?.into_iter().zip(sources.list(count)?);
    for ((target, source), bytes) in sides.zip(sizes.list(count)?) {
        sim.copy_on(stream, target, source, bytes)?;
    }
    Ok(())
}

fn copy_3d_batch(count: u64, copies: In<BatchCopy>, flags: u64, stream: u64) -> Coded<()> {
    let sim = sim::get()?;
    if count == 0 || flags != 0 {
        return Err(DriverCode::INVALID_VALUE);
    }
    let stream = sim.stream(stream)?;
    for copy in copies.list(count)? {
        let [width_bytes, height, depth] = copy.extent;
        let (target, source) = (copy.target.rows(copy.extent)?, copy.source.rows(copy.extent)?);
        sim.copy_shape_on(stream, target, source, Shape { width_bytes, height, depth })?;
    }
    Ok(())
}

driver_api! {
    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds = "cuMemcpy2D" since 3020 (copy: In<Copy2d>) {
        now(|| copy_2d(copy, 0))
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds = "cuMemcpy2DUnaligned" since 3020
        (copy: In<Copy2d>)
    {
        now(|| copy_2d(copy, 0))
    }

    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds = "cuMemcpy3D" since 3020 (copy: In<Copy3d>) {
        now(|| copy_3d(copy, 0))
    }

    fn cuMemcpy3DPeer / cuMemcpy3DPeer_ptds = "cuMemcpy3DPeer" since 4000 (copy: In<Copy3d>) {
        now(|| copy_3d_peer(copy, 0))
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz = "cuMemcpy2DAsync" since 3020
        (copy: In<Copy2d>, stream: u64)
    {
        copy_2d(copy, stream).map(drop)
    }

    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz = "cuMemcpy3DAsync" since 3020
        (copy: In<Copy3d>, stream: u64)
    {
        copy_3d(copy, stream).map(drop)
    }

    fn cuMemcpy3DPeerAsync / cuMemcpy3DPeerAsync_ptsz = "cuMemcpy3DPeerAsync" since 4000
        (copy: In<Copy3d>, stream: u64)
    {
        copy_3d_peer(copy, stream).map(drop)
    }

    fn cuMemcpyDtoA_v2 / cuMemcpyDtoA_v2_ptds = "cuMemcpyDtoA" since 3020
        (array: u64, offset: u64, source: u64, bytes: u64)
    {
        sim::get()?.copy_now(array.checked_add(offset).ok_or(DriverCode::INVALID_VALUE)?, source, bytes)
    }

    fn cuMemcpyAtoD_v2 / cuMemcpyAtoD_v2_ptds = "cuMemcpyAtoD" since 3020
        (target: u64, array: u64, offset: u64, bytes: u64)
    {
        sim::get()?.copy_now(target, array.checked_add(offset).ok_or(DriverCode::INVALID_VALUE)?, bytes)
    }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds = "cuMemsetD2D8" since 3020
        (target: u64, pitch: u64, value: u8, width: u64, height: u64)
    {
        fill_rows_now(target, pitch, &[value], (width, height))
    }

    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds = "cuMemsetD2D16" since 3020
        (target: u64, pitch: u64, value: u16, width: u64, height: u64)
    {
        fill_rows_now(target, pitch, &value.to_le_bytes(), (width, height))
    }

    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds = "cuMemsetD2D32" since 3020
        (target: u64, pitch: u64, value: u32, width: u64, height: u64)
    {
        fill_rows_now(target, pitch, &value.to_le_bytes(), (width, height))
    }

    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz = "cuMemsetD2D8Async" since 3020
        (target: u64, pitch: u64, value: u8, width: u64, height: u64, stream: u64)
    {
        fill_rows(target, pitch, &[value], (width, height), stream)
    }

    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz = "cuMemsetD2D16Async" since 3020
        (target: u64, pitch: u64, value: u16, width: u64, height: u64, stream: u64)
    {
        fill_rows(target, pitch, &value.to_le_bytes(), (width, height), stream)
    }

    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz = "cuMemsetD2D32Async" since 3020
        (target: u64, pitch: u64, value: u32, width: u64, height: u64, stream: u64)
    {
        fill_rows(target, pitch, &value.to_le_bytes(), (width, height), stream)
    }

    fn cuMemcpyBatchAsync / cuMemcpyBatchAsync_ptsz = "cuMemcpyBatchAsync" since 12_080
        (
            targets: In<u64>,
            sources: In<u64>,
            sizes: In<u64>,
            count: u64,
            attributes: In<u8>,
            _indices: In<u64>,
            attribute_count: u64,
            _failed: Out<u64>,
            stream: u64,
        )
    {
        copy_batch(targets, sources, sizes, count, (attributes, attribute_count), stream)
    }

    fn cuMemcpyBatchAsync_v2 / cuMemcpyBatchAsync_v2_ptsz = "cuMemcpyBatchAsync" since 13_000
        (
            targets: In<u64>,
            sources: In<u64>,
            sizes: In<u64>,
            count: u64,
            attributes: In<u8>,
            _indices: In<u64>,
            attribute_count: u64,
            stream: u64,
        )
    {
        copy_batch(targets, sources, sizes, count, (attributes, attribute_count), stream)
    }

    fn cuMemcpy3DBatchAsync / cuMemcpy3DBatchAsync_ptsz = "cuMemcpy3DBatchAsync" since 12_080
        (count: u64, copies: In<BatchCopy>, _failed: Out<u64>, flags: u64, stream: u64)
    {
        copy_3d_batch(count, copies, flags, stream)
    }

    fn cuMemcpy3DBatchAsync_v2 / cuMemcpy3DBatchAsync_v2_ptsz
        = "cuMemcpy3DBatchAsync" since 13_000
        (count: u64, copies: In<BatchCopy>, flags: u64, stream: u64)
    {
        copy_3d_batch(count, copies, flags, stream)
    }
}
