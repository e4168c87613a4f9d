//! Features that may refuse to close the gate, or must act before it closes, in the order in which a pause asks them. A feature
//! that the pause does not use is not asked.

use vmm_pool::Unfreezable;
use vmm_pool::driver::Driver;

use crate::Member;
use crate::failures::{PID, in_capture, wrong_state};
use sublet_protocol::scope::Scope;
use sublet_protocol::wire::{Failure, MemberState};

/// Returns the reason to refuse the pause, if there is one.
type Veto<D> = fn(&Member<D>) -> Option<Failure>;

/// Whether the pause uses the feature, the feature's name, and its check.
type Participant<D> = (bool, &'static str, Veto<D>);

/// Asks all features that a pause of `scope` uses. The first refusal names its participant. A process that `stands`
/// still afterwards may always release NCCL's memory.
pub(super) fn may_close<D: Driver>(
    member: &Member<D>,
    scope: &Scope,
    (is_deep, stands): (bool, bool),
) -> Result<(), Failure> {
    let bytes = member.pool.holdings().resident_bytes(&scope.paused(member.presence.id()));
    let takes_memory = bytes.values().any(|bytes| *bytes > 0);
    let names_nccl = matches!(scope, Scope::Tags { tags, .. } if tags.names_nccl().0);
    let all = participants(is_deep, takes_memory, names_nccl && !stands);
    for (_, name, veto) in all.into_iter().filter(|(is_used, ..)| *is_used) {
        if let Some(failure) = veto(member) {
            // A part of Sublet refuses the pause, and the job runs on. The brackets name the part: a deep pause,
            // `attach`, registrations, NCCL or captures. Look up the reason in front of the brackets.
            return Err(failure.kind.because(format!("{failure} (refused by: {name})")));
        }
    }
    Ok(())
}

/// All features, for a pause that takes contexts, releases memory, or releases NCCL's memory in a process that runs on.
fn participants<D: Driver>(contexts: bool, memory: bool, nccl: bool) -> [Participant<D>; 6] {
    // `attach` is asked before the pins, which need its findings.
    [
        (contexts, "deep pause", unfreezable),
        (true, "attach", ungated),
        (memory, "registrations", unseen_pins),
        (nccl, "NCCL", unseen_nccl),
        (true, "captures", captures),
        (true, "closed tickets", end_closed_tickets),
    ]
}

/// Refuses a pause from outside if work can reach a device past the gate: only the process itself knows when it launches none.
fn ungated<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().ungated)().filter(|_| !member.asking.is_for_pause())?;
    // A library that the message names starts GPU work without Sublet, so Sublet cannot stop that work. The job runs
    // on. Pause from inside the program, between its steps.
    Some(wrong_state(format!(
        "process {PID} cannot be paused from outside: {why}; or pause it from inside, between its steps \
         (sublet_pause_tenant)"
    )))
}

/// Refuses to release memory whose pages a device may have pinned, unseen by Sublet: the device would still read and write
/// there.
fn unseen_pins<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().unseen_pins)()?;
    // A device, such as a network card, may write into the memory, and Sublet cannot see whether it does. The job
    // runs on. If you know that it does not, name its device file in `SUBLET_WITHOUT_PINS`.
    Some(wrong_state(format!("process {PID} cannot be paused: {why}")))
}

/// Refuses to release NCCL's memory in a process that runs on, if work that Sublet does not hold back may need it.
fn unseen_nccl<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let why = (member.config().unseen_nccl)()?;
    // The process uses a second NCCL, or kernels that communicate without NCCL's calls. Sublet cannot stop this work
    // while the process runs. The job runs on. Pause the whole tenant instead.
    Some(wrong_state(format!(
        "NCCL's memory of process {PID} cannot be paused alone: {why}; pause the whole tenant instead"
    )))
}

/// Refuses a pause while streams are captured.
pub(super) fn captures<D: Driver>(member: &Member<D>) -> Option<Failure> {
    let count = member.captures().under_way();
    (count > 0).then(|| in_capture(count))
}

/// Releases memory that was held only by tickets, all closed by now. Only the worker calls this. The worker also closes the
/// gate, so the gate is open here.
pub(super) fn end_closed_tickets<D: Driver>(member: &Member<D>) -> Option<Failure> {
    if member.lifecycle.state() == MemberState::Active {
        member.pool.enter_giving_up().end_closed_tickets();
    }
    None
}

/// Refuses a deep pause if the driver could not restore the process's contexts: the job would be lost.
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
    // After a deep pause the driver could not restore this process, so Sublet refuses it. The job runs on. A pause
    // without `--deep` frees its memory.
    Some(wrong_state(format!(
        "the driver could not bring process {PID} back from a deep pause: {why}; a pause without --deep \
         frees its memory",
        why = why?
    )))
}

#[cfg(test)]
mod tests {
    use vmm_pool::driver::sim::SimDriver;

    use super::*;

    #[test]
    fn the_order_of_features_is_behaviour() {
        let names = |all: [Participant<SimDriver>; 6]| {
            let used = all.into_iter().filter(|(is_used, ..)| *is_used);
            used.map(|(_, name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(
            names(participants(true, true, true)),
            ["deep pause", "attach", "registrations", "NCCL", "captures", "closed tickets"]
        );
        assert_eq!(
            names(participants(false, false, false)),
            ["attach", "captures", "closed tickets"]
        );
    }
}
