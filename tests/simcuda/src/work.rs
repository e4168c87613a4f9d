//! Copies, fills and host callbacks as work of streams.

#![expect(
    unsafe_code,
    reason = "moves bytes at addresses, and calls functions, that C callers pass"
)]

use std::ffi::c_void;
use std::sync::Arc;

use vmm_pool::driver::sim::Work;
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, RawStream, VaRange};

use crate::abi::Coded;
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

fn copy_work(target: Side, source: Side, size_bytes: u64) -> Work {
    Arc::new(move |core| {
        let (to, from) = ((target.device, target.address), (source.device, source.address));
        // SAFETY: host addresses come from the C caller, who keeps them valid until the stream has passed
        // the copy, as the driver's documentation asks.
        unsafe { core.copy(to, from, size_bytes) }
    })
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
        // Whatever stream it goes to, the context counts that it is asked for in.
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
        let work: Work = Arc::new(move |core| {
            // SAFETY: as in `copy_work`.
            unsafe { core.fill(device, range, &pattern) }
        });
        self.submit(stream, work)
    }

    /// A call of host code in the order of `stream`.
    pub(crate) fn call_on(&self, stream: RawStream, call: HostCall) -> Coded<()> {
        let work: Work = Arc::new(move |_| {
            (call.function)(std::ptr::with_exposed_provenance_mut(call.data));
            Ok(())
        });
        self.submit(stream, work)
    }
}
