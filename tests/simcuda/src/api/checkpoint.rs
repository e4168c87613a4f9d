//! What one process does to another's by its id. See `vmm_pool::driver::sim`'s module `processes` for what is as on a device.

#![expect(unsafe_code, reason = "exports C functions")]

use std::time::Duration;

use vmm_pool::driver::DriverCode;

use crate::abi::{Coded, In, Out, driver_api};
use crate::sim;

/// `CUcheckpointLockArgs`, as CUDA 12.8 has it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LockArgs {
    timeout_ms: u32,
    reserved_word: u32,
    reserved: [u64; 7],
}

/// The arguments of the other three calls: nothing, so far.
type NoArgs = [u64; 8];

fn process(pid: i32) -> Coded<u32> {
    u32::try_from(pid).map_err(|_| DriverCode::INVALID_VALUE)
}

fn check(args: In<NoArgs>) -> Coded<()> {
    let words = args.get_if_given().unwrap_or_default();
    if words == NoArgs::default() { Ok(()) } else { Err(DriverCode::INVALID_VALUE) }
}

driver_api! {
    fn cuCheckpointProcessGetRestoreThreadId = "cuCheckpointProcessGetRestoreThreadId" since 12080
        (pid: i32, thread: Out<i32>)
    {
        // Nothing is done by a thread of the process here; its first one stands for the driver's.
        sim::get()?.core.node().process_state(process(pid)?)?;
        thread.put(pid)
    }

    fn cuCheckpointProcessGetState = "cuCheckpointProcessGetState" since 12080
        (pid: i32, state: Out<u32>)
    {
        state.put(sim::get()?.core.node().process_state(process(pid)?)?.number())
    }

    fn cuCheckpointProcessLock = "cuCheckpointProcessLock" since 12080
        (pid: i32, args: In<LockArgs>)
    {
        let zeros = LockArgs { timeout_ms: 0, reserved_word: 0, reserved: [0; 7] };
        let args = args.get_if_given().unwrap_or(zeros);
        if args.reserved_word != 0 || args.reserved != [0; 7] {
            return Err(DriverCode::INVALID_VALUE);
        }
        let timeout = u64::from(args.timeout_ms);
        let timeout = (timeout > 0).then(|| Duration::from_millis(timeout));
        sim::get()?.core.node().lock_process(process(pid)?, timeout)
    }

    fn cuCheckpointProcessCheckpoint = "cuCheckpointProcessCheckpoint" since 12080
        (pid: i32, args: In<NoArgs>)
    {
        check(args)?;
        sim::get()?.core.node().checkpoint_process(process(pid)?)
    }

    fn cuCheckpointProcessRestore = "cuCheckpointProcessRestore" since 12080
        (pid: i32, args: In<NoArgs>)
    {
        check(args)?;
        sim::get()?.core.node().restore_process(process(pid)?)
    }

    fn cuCheckpointProcessUnlock = "cuCheckpointProcessUnlock" since 12080
        (pid: i32, args: In<NoArgs>)
    {
        check(args)?;
        sim::get()?.core.node().unlock_process(process(pid)?)
    }
}
