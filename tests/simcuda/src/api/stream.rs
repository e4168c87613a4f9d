//! Streams and events.

#![expect(unsafe_code, reason = "exports C functions")]

use std::ffi::c_void;

use vmm_pool::driver::sim::{StreamKind, Work};
use vmm_pool::driver::{DriverCode, RawStream};

use crate::abi::{Coded, Exchange, In, Out, driver_api};
use crate::capture::{Capture, MODE_GLOBAL, exchange_thread_mode};
use crate::sim;
use crate::work::HostCall;

/// `CU_STREAM_NON_BLOCKING`.
const FLAG_NON_BLOCKING: u32 = 1;
/// `CUstreamCaptureStatus`.
const CAPTURE_NONE: i32 = 0;
const CAPTURE_ACTIVE: i32 = 1;
const CAPTURE_INVALIDATED: i32 = 2;

/// The function that `cuStreamAddCallback` takes.
type StreamCallback = extern "C" fn(u64, i32, *mut c_void);

fn status_of(capture: Option<&Capture>) -> i32 {
    match capture {
        None => CAPTURE_NONE,
        Some(capture) if capture.is_invalid() => CAPTURE_INVALIDATED,
        Some(_) => CAPTURE_ACTIVE,
    }
}

fn create(stream: Out<u64>, flags: u32) -> Coded<()> {
    let kind = match flags {
        0 => StreamKind::Blocking,
        FLAG_NON_BLOCKING => StreamKind::NonBlocking,
        _ => return Err(DriverCode::INVALID_VALUE),
    };
    let sim = sim::get()?;
    stream.put(sim.core.new_stream(sim.current_context()?, kind)?.0)
}

driver_api! {
    fn cuStreamCreate = "cuStreamCreate" since 2000 (stream: Out<u64>, flags: u32) {
        create(stream, flags)
    }

    fn cuStreamCreateWithPriority = "cuStreamCreateWithPriority" since 5050
        (stream: Out<u64>, flags: u32, _priority: i32)
    {
        create(stream, flags)
    }

    fn cuStreamDestroy = "cuStreamDestroy" since 2000 (stream: u64) {
        sim::get()?.end_stream(RawStream(stream))
    }

    fn cuStreamDestroy_v2 = "cuStreamDestroy" since 4000 (stream: u64) {
        sim::get()?.end_stream(RawStream(stream))
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz = "cuStreamSynchronize" since 2000
        (stream: u64)
    {
        let sim = sim::get()?;
        let stream = sim.stream(stream)?;
        sim.forbid_in_capture()?;
        sim.forbid_on_captured(stream)?;
        sim.core.wait_stream(stream)
    }

    fn cuStreamQuery / cuStreamQuery_ptsz = "cuStreamQuery" since 2000 (stream: u64) {
        let sim = sim::get()?;
        let stream = sim.stream(stream)?;
        sim.forbid_in_capture()?;
        sim.forbid_on_captured(stream)?;
        if sim.core.stream_idle(stream)? {
            Ok(())
        } else {
            Err(DriverCode::NOT_READY)
        }
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz = "cuStreamWaitEvent" since 3020
        (stream: u64, event: u64, _flags: u32)
    {
        let sim = sim::get()?;
        sim.wait_event(sim.stream(stream)?, event)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz = "cuStreamGetCtx" since 9020
        (stream: u64, context: Out<u64>)
    {
        let sim = sim::get()?;
        let of_stream = sim.core.stream_context(sim.stream(stream)?)?;
        context.put(sim.value_of(of_stream)?)
    }

    fn cuStreamGetDevice = "cuStreamGetDevice" since 12080 (stream: u64, device: Out<i32>) {
        let sim = sim::get()?;
        device.put(sim.core.stream_device(sim.stream(stream)?)?.0)
    }

    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz = "cuLaunchHostFunc" since 10000
        (stream: u64, function: Option<extern "C" fn(*mut c_void)>, data: usize)
    {
        let sim = sim::get()?;
        let function = function.ok_or(DriverCode::INVALID_VALUE)?;
        sim.call_on(sim.stream(stream)?, HostCall { function, data })
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz = "cuStreamAddCallback" since 5000
        (stream: u64, callback: Option<StreamCallback>, data: usize, _flags: u32)
    {
        let sim = sim::get()?;
        let callback = callback.ok_or(DriverCode::INVALID_VALUE)?;
        let target = sim.stream(stream)?;
        sim.forbid_on_captured(target)?;
        let work = Work::new(move |_| {
            callback(stream, 0, std::ptr::with_exposed_provenance_mut(data));
            Ok(())
        });
        sim.submit(target, work)
    }

    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz = "cuStreamBeginCapture" since 10000
        (stream: u64)
    {
        let sim = sim::get()?;
        sim.begin_capture(sim.stream(stream)?, MODE_GLOBAL, None)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz
        = "cuStreamBeginCapture" since 10010
        (stream: u64, mode: i32)
    {
        let sim = sim::get()?;
        sim.begin_capture(sim.stream(stream)?, mode, None)
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz
        = "cuStreamBeginCaptureToGraph" since 12_030
        (
            stream: u64,
            graph: u64,
            _dependencies: In<u64>,
            _data: In<u8>,
            _count: u64,
            mode: i32,
        )
    {
        let sim = sim::get()?;
        sim.begin_capture(sim.stream(stream)?, mode, Some(graph))
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz = "cuStreamEndCapture" since 10000
        (stream: u64, graph: Out<u64>)
    {
        let sim = sim::get()?;
        graph.put(sim.end_capture(sim.stream(stream)?)?)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz = "cuStreamIsCapturing" since 10000
        (stream: u64, status: Out<i32>)
    {
        let sim = sim::get()?;
        let capture = sim.capture_shown_of(sim.stream(stream)?)?;
        status.put(status_of(capture.as_deref()))
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz
        = "cuStreamGetCaptureInfo" since 11030
        (
            stream: u64,
            status: Out<i32>,
            id: Out<u64>,
            graph: Out<u64>,
            dependencies: Out<u64>,
            dependency_count: Out<u64>,
        )
    {
        let sim = sim::get()?;
        let capture = sim.capture_shown_of(sim.stream(stream)?)?;
        status.put(status_of(capture.as_deref()))?;
        id.put_if_wanted(capture.as_ref().map_or(0, |capture| capture.id));
        // A graph comes to be when its capture ends, and its nodes are not shown.
        graph.put_if_wanted(0);
        dependencies.put_if_wanted(0);
        dependency_count.put_if_wanted(0);
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode" since 10010
        (mode: Exchange<i32>)
    {
        sim::get()?;
        mode.replace(exchange_thread_mode)
    }

    fn cuEventCreate = "cuEventCreate" since 2000 (event: Out<u64>, _flags: u32) {
        event.put(sim::get()?.create_event()?)
    }

    fn cuEventRecord / cuEventRecord_ptsz = "cuEventRecord" since 2000
        (event: u64, stream: u64)
    {
        let sim = sim::get()?;
        sim.record_event(event, sim.stream(stream)?)
    }

    fn cuEventQuery = "cuEventQuery" since 2000 (event: u64) {
        sim::get()?.query_event(event)
    }

    fn cuEventSynchronize = "cuEventSynchronize" since 2000 (event: u64) {
        sim::get()?.synchronize_event(event)
    }

    fn cuEventDestroy = "cuEventDestroy" since 2000 (event: u64) {
        sim::get()?.destroy_event(event)
    }

    fn cuEventDestroy_v2 = "cuEventDestroy" since 4000 (event: u64) {
        sim::get()?.destroy_event(event)
    }

    fn cuEventElapsedTime = "cuEventElapsedTime" since 2000
        (milliseconds: Out<f32>, start: u64, end: u64)
    {
        milliseconds.put(sim::get()?.elapsed_ms(start, end)?)
    }

    fn cuEventElapsedTime_v2 = "cuEventElapsedTime" since 12080
        (milliseconds: Out<f32>, start: u64, end: u64)
    {
        milliseconds.put(sim::get()?.elapsed_ms(start, end)?)
    }
}
