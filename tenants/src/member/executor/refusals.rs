//! Reasons to refuse a pause that a process's pool and settings know.

use vmm_pool::driver::Driver;
use vmm_pool::{Pool, Selection, Unfreezable};

use crate::member::failures::{PID, in_capture, wrong_state};
use crate::member::{Asking, MemberConfig};
use crate::scope::Scope;
use crate::wire::Failure;

/// Refuses a pause from outside where work can reach a device past the gate: only the process itself knows when it
/// launches none.
pub(super) fn ungated(config: &MemberConfig, asking: &Asking) -> Result<(), Failure> {
    match (config.ungated)() {
        Some(why) if !asking.is_for_pause() => Err(wrong_state(format!(
            "process {PID} cannot be paused from outside: {why}; or pause it from inside, between its steps \
             (sublet_pause_tenant)"
        ))),
        Some(_) | None => Ok(()),
    }
}

/// Refuses to take memory away that a device may hold the pages of, unseen by us: it would go on reading and writing
/// there.
pub(super) fn unseen_pins<D: Driver>(
    config: &MemberConfig,
    pool: &Pool<D>,
    leaving: &Selection,
) -> Result<(), Failure> {
    if pool.holdings().resident_bytes(leaving).values().all(|bytes| *bytes == 0) {
        return Ok(());
    }
    (config.unseen_pins)()
        .map_or(Ok(()), |why| Err(wrong_state(format!("process {PID} cannot be paused: {why}"))))
}

/// Refuses to take NCCL's memory from a process that runs on, where work that we do not hold back may need it.
pub(super) fn unseen_nccl(config: &MemberConfig, scope: &Scope) -> Result<(), Failure> {
    let Scope::Tags { tags, .. } = scope else { return Ok(()) };
    let (is_named, _) = tags.names_nccl();
    let Some(why) = (config.unseen_nccl)().filter(|_| is_named) else { return Ok(()) };
    Err(wrong_state(format!(
        "NCCL's memory of process {PID} cannot be paused alone: {why}; pause the whole tenant instead"
    )))
}

/// Refuses a pause while streams are captured.
pub(super) fn captures(config: &MemberConfig) -> Result<(), Failure> {
    match config.captures.under_way() {
        0 => Ok(()),
        count => Err(in_capture(count)),
    }
}

/// Refuses a deep pause where the driver could not bring the process's contexts back: that would cost the job.
pub(super) fn unfreezable<D: Driver>(config: &MemberConfig, pool: &Pool<D>) -> Result<(), Failure> {
    let Unfreezable { host_bytes, imported_bytes, registered_bytes } = pool.unfreezable();
    let why = if host_bytes > 0 {
        Some(format!(
            "it holds {host_bytes} bytes of host memory of the driver's allocator (NCCL does, unless NCCL_CUMEM_HOST_ENABLE=0 is \
             set when the job starts)"
        ))
    } else if imported_bytes > 0 {
        Some(format!(
            "it holds {imported_bytes} bytes that were imported from a process outside its tenant, or that their owner has let go"
        ))
    } else if registered_bytes > 0 {
        Some(format!("{registered_bytes} bytes are registered with a network card"))
    } else {
        (config.unfreezable)()
    };
    why.map_or(Ok(()), |why| {
        Err(wrong_state(format!(
            "the driver could not bring process {PID} back from a deep pause: {why}; a pause without --deep \
             frees its memory"
        )))
    })
}
