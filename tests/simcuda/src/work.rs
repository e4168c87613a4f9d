//! Copies, fills and host callbacks as work of streams.

#![expect(
    unsafe_code,
    reason = "moves bytes at addresses, and calls functions, that C callers pass"
)]

use std::ffi::c_void;

use vmm_pool::driver::sim::{Touch, Work};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, DriverCode, RawStream, VaRange};

use crate::abi::Coded;
use crate::kernels;
use crate::sim::Sim;

/// A function of the caller's, with what it is to be called with. Both are only passed on.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct HostCall {
    pub(crate) function: extern "C" fn(*mut c_void),
    pub(crate) data: usize,
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    /// Who reaches it.
    pub(crate) device: DeviceOrdinal,
    pub(crate) address: u64,
}

/// Where the rows of a box lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) start: u64,
    pub(crate) pitch_bytes: u64,
    pub(crate) layer_bytes: u64,
}

/// How large a box is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) width_bytes: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
}

impl Rows {
    /// From the first byte to the last, what lies between rows too.
    fn whole(self, shape: Shape) -> Coded<VaRange> {
        let to_last = |count: u64, bytes: u64| count.saturating_sub(1).checked_mul(bytes);
        let (rows, layers) =
            (to_last(shape.height, self.pitch_bytes), to_last(shape.depth, self.layer_bytes));
        let size_bytes = rows.zip(layers).and_then(|(rows, layers)| rows.checked_add(layers));
        let size_bytes = size_bytes.and_then(|size| size.checked_add(shape.width_bytes));
        Ok(VaRange::new(DeviceAddress(self.start), size_bytes.ok_or(DriverCode::INVALID_VALUE)?))
    }
}

/// What a wait for a value in memory compares it by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Comparison {
    AtLeast,
    Equal,
    And,
    Nor,
}

impl Comparison {
    fn holds(self, found: u64, wanted: (u64, u64)) -> bool {
        let (value, bytes) = wanted;
        let bits = 64 - 8 * bytes;
        // At least as far, where numbers come round.
        let ahead = found.wrapping_sub(value) << bits;
        match self {
            Self::AtLeast => ahead >> 63 == 0,
            Self::Equal => ahead == 0,
            Self::And => found & value != 0,
            Self::Nor => !(found | value) << bits != 0,
        }
    }
}

fn copy_work(target: Side, source: Side, size_bytes: u64) -> Work {
    let work = Work::new(move |core| {
        let (to, from) = ((target.device, target.address), (source.device, source.address));
        // SAFETY: host addresses come from the C caller, who keeps them valid until the stream has passed
        // the copy, as the driver's documentation asks.
        unsafe { core.copy(to, from, size_bytes) }
    });
    let range = |side: Side| VaRange::new(DeviceAddress(side.address), size_bytes);
    work.touching([(range(target), Touch::Write), (range(source), Touch::Read)])
}

impl Sim {
    /// A copy in the order of `stream`.
    pub(crate) fn copy_on(
        &self,
        stream: RawStream,
        target: u64,
        source: u64,
        size_bytes: u64,
    ) -> Coded<()> {
        let device = self.core.stream_device(stream)?;
        let current = self.current_device().unwrap_or(device);
        let ranges = [target, source].map(|at| VaRange::new(DeviceAddress(at), size_bytes));
        self.core.check_copy(current, &ranges)?;
        // Whatever stream it goes to, the context counts in which it is launched.
        let side = |address| Side { device: current, address };
        self.copy_sides_on(stream, side(target), side(source), size_bytes)
    }

    /// A copy whose sides are reached by different devices.
    pub(crate) fn copy_sides_on(
        &self,
        stream: RawStream,
        target: Side,
        source: Side,
        size_bytes: u64,
    ) -> Coded<()> {
        self.submit(stream, copy_work(target, source, size_bytes))
    }

    /// A copy of the rows of a box.
    pub(crate) fn copy_shape_on(
        &self,
        stream: RawStream,
        target: Rows,
        source: Rows,
        shape: Shape,
    ) -> Coded<()> {
        let device = self.core.stream_device(stream)?;
        let current = self.current_device().unwrap_or(device);
        self.core.check_copy(current, &[target.whole(shape)?, source.whole(shape)?])?;
        let side = |rows: Rows| (Side { device: current, address: rows.start }, rows);
        self.copy_shape_sides_on(stream, side(target), side(source), shape)
    }

    /// The same, whose sides are reached by different devices.
    pub(crate) fn copy_shape_sides_on(
        &self,
        stream: RawStream,
        (target, to): (Side, Rows),
        (source, from): (Side, Rows),
        shape: Shape,
    ) -> Coded<()> {
        let touches = [(to.whole(shape)?, Touch::Write), (from.whole(shape)?, Touch::Read)];
        let work = Work::new(move |core| {
            for (layer, row) in
                (0..shape.depth).flat_map(|z| (0..shape.height).map(move |y| (z, y)))
            {
                let at =
                    |rows: Rows| rows.start + layer * rows.layer_bytes + row * rows.pitch_bytes;
                let (to, from) = ((target.device, at(to)), (source.device, at(from)));
                // SAFETY: as in `copy_work`.
                unsafe { core.copy(to, from, shape.width_bytes) }?;
            }
            Ok(())
        });
        self.submit(stream, work.touching(touches))
    }

    /// Later work of `stream` waits until what is at `address` compares so with a value of so many bytes.
    pub(crate) fn wait_for_value_on(
        &self,
        stream: RawStream,
        address: u64,
        wanted: (u64, u64),
        comparison: Comparison,
    ) -> Coded<()> {
        let device = self.core.stream_device(stream)?;
        let range = VaRange::new(DeviceAddress(address), wanted.1);
        if address == 0 || !address.is_multiple_of(wanted.1) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let work = Work::new(move |core| {
            kernels::wait_for(core, device, || {
                let mut found = 0_u64;
                let to = (&raw mut found).expose_provenance() as u64;
                // SAFETY: `found` has room for it; what is at the address, as in `copy_work`.
                unsafe { core.copy((device, to), (device, address), wanted.1) }?;
                Ok(comparison.holds(found, wanted))
            })
        });
        self.submit(stream, work.touching([(range, Touch::Read)]))
    }

    /// A copy that is done when the call returns.
    pub(crate) fn copy_now(&self, target: u64, source: u64, size_bytes: u64) -> Coded<()> {
        self.forbid_in_capture()?;
        let stream = self.stream(0)?;
        self.copy_on(stream, target, source, size_bytes)?;
        self.core.wait_stream(stream)
    }

    /// A fill in the order of `stream`.
    pub(crate) fn fill_on(
        &self,
        stream: RawStream,
        target: u64,
        size_bytes: u64,
        pattern: Vec<u8>,
    ) -> Coded<()> {
        let device = self.core.stream_device(stream)?;
        let range = VaRange::new(DeviceAddress(target), size_bytes);
        // Here the stream's context counts, whatever is current.
        self.core.check_copy(device, &[range])?;
        let work = Work::new(move |core| {
            // SAFETY: as in `copy_work`.
            unsafe { core.fill(device, range, &pattern) }
        });
        self.submit(stream, work.touching([(range, Touch::Write)]))
    }

    /// A call of host code in the order of `stream`.
    pub(crate) fn call_on(&self, stream: RawStream, call: HostCall) -> Coded<()> {
        let work = Work::new(move |_| {
            (call.function)(std::ptr::with_exposed_provenance_mut(call.data));
            Ok(())
        });
        self.submit(stream, work)
    }
}
