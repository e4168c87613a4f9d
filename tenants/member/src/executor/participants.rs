//! Features that may keep the gate open, in the order in which a pause asks them. A feature that the pause does not use
//! is not asked.

use vmm_pool::Unfreezable;
use vmm_pool::driver::Driver;

use crate::Member;
use crate::failures::{PID, in_capture, wrong_state};
use sublet_protocol::scope::Scope;
use sublet_protocol::wire::Failure;

/// The reason to refuse the pause.
type Veto<D> = fn(&Member<D>) -> Option<Failure>;

/// Asks all that a pause of `scope` uses. The first refusal says the name of its participant. One whose process `stands`
/// still afterwards may take NCCL's memory.
pub(super) fn may_close<D: Driver>(
    member: &Member<D>,
    scope: &Scope,
    (is_deep, stands): (bool, bool),
) -> Result<(), Failure> {
    let bytes = member.pool.holdings().resident_bytes(&scope.paused(member.presence.id()));
    let takes_memory = bytes.values().any(|bytes| *bytes > 0);
    let names_nccl = matches!(scope, Scope::Tags { tags, .. } if tags.names_nccl().0);
    // The look of `attach` comes before the pins: they need what it has found.
    let participants: [(bool, &str, Veto<D>); 5] = [
        (is_deep, "deep pause", unfreezable),
        (true, "attach", ungated),
        (takes_memory, "registrations", unseen_pins),
        (names_nccl && !stands, "NCCL", unseen_nccl),
        (true, "captures", captures),
    ];
    for (_, name, veto) in participants.into_iter().filter(|(is_used, ..)| *is_used) {
        if let Some(failure) = veto(member) {
            return Err(failure.kind.because(format!("{failure} (refused by: {name})")));
        }
    }
    Ok(())
}

/// Refuses a pause from outside where work can reach a device past the gate: only the process itself knows when it
/// launches none.
fn ungated<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().ungated)().filter(|_| !member.asking.is_for_pause())?;
    Some(wrong_state(format!(
        "process {PID} cannot be paused from outside: {why}; or pause it from inside, between its steps \
         (sublet_pause_tenant)"
    )))
}

/// Refuses to take memory away that a device may hold the pages of, unseen by us: it would go on reading and writing
/// there.
fn unseen_pins<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().unseen_pins)()?;
    Some(wrong_state(format!("process {PID} cannot be paused: {why}")))
}

/// Refuses to take NCCL's memory from a process that runs on, where work that we do not hold back may need it.
fn unseen_nccl<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().unseen_nccl)()?;
    Some(wrong_state(format!(
        "NCCL's memory of process {PID} cannot be paused alone: {why}; pause the whole tenant instead"
    )))
}

/// Refuses a pause while streams are captured.
pub(super) fn captures<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let count = member.captures().under_way();
    (count > 0).then(|| in_capture(count))
}

/// Refuses a deep pause where the driver could not bring the process's contexts back: that would cost the job.
pub(super) fn unfreezable<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let Unfreezable { host_bytes, imported_bytes, registered_bytes } = member.pool.unfreezable();
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
        Some(format!(
            "{registered_bytes} bytes are registered with a network card, or open in another tenant"
        ))
    } else {
        (member.config().unfreezable)()
    };
    Some(wrong_state(format!(
        "the driver could not bring process {PID} back from a deep pause: {why}; a pause without --deep \
         frees its memory",
        why = why?
    )))
}
