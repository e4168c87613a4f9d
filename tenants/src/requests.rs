//! The requests of a process to its tenant: a pause or resume that all processes request together, one by tag of the process's
//! own memory, and one on behalf of all processes.

use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;

use crate::coordinator::{Coordinator, Options, Outcome, TakesPart, Trouble};
use crate::identity::TenantName;
use crate::keep;
use crate::member::{Member, Waited};
use crate::run_dir::{RunDir, RunDirError};
use crate::scope::{Scope, TagNames};
use crate::wire::{Action, MemberState};

/// The time between two looks for the coordinator's lock, and the longest wait of the last look. Between looks the
/// caller waits for the event itself, which usually comes first.
const LOOK: Duration = Duration::from_millis(50);

/// Pauses or resumes the caller's whole tenant once **every** process of it has called this. Returns when the action has
/// happened in all processes, and immediately if this process is already in that state. The returned account is that of the
/// process that coordinates.
///
/// One of the callers coordinates; the others wait for the action. None of them holds a lock while it waits. So a caller that
/// returns early may call for the opposite without harm.
///
/// # Errors
/// [`Trouble`] after `timeout`, with the tenant as it was.
pub fn act_together<D: Driver>(
    member: &Member<D>,
    action: Action,
    timeout: Duration,
) -> Result<Option<Outcome>, Trouble> {
    let has_happened = match action {
        Action::Pause => member.lifecycle().is_paused_as_a_whole(),
        Action::Resume => member.lifecycle().state() == MemberState::Active,
    };
    if has_happened {
        return Ok(None);
    }
    let deadline = Instant::now() + timeout;
    let count = member.asking().begin_consent(action);
    let outcome = coordinate_or_wait(member, action, count, deadline);
    member.asking().end_consent();
    outcome
}

fn coordinate_or_wait<D: Driver>(
    member: &Member<D>,
    action: Action,
    count: u64,
    deadline: Instant,
) -> Result<Option<Outcome>, Trouble> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let options = Options {
            lock_timeout: Duration::ZERO,
            consent: Some(left),
            timeout: Some(left.max(LOOK)),
            ..Options::default()
        };
        let outcome = act(member.presence().run_dir(), member.presence().tenant(), action, options);
        match outcome {
            Ok(outcome) => return Ok(Some(outcome)),
            Err(Trouble::RunDir(RunDirError::Locked { .. })) => {}
            Err(error) => {
                // Another caller may have done it in the meantime.
                return match member.asking().wait_for(action, count, Instant::now()) {
                    Waited::Done => Ok(None),
                    Waited::GivenUp(_) | Waited::NotYet => Err(error),
                };
            }
        }
        match member.asking().wait_for(action, count, Instant::now() + LOOK) {
            Waited::Done => return Ok(None),
            Waited::GivenUp(why) => {
                let tenant = member.presence().tenant().clone();
                return Err(Trouble::FailedTogether { tenant, action, why });
            }
            Waited::NotYet => {}
        }
        if Instant::now() >= deadline {
            // The action may just have been done. The others' consent is needed all the same.
            let (lock_timeout, consent, timeout) = (LOOK, Some(LOOK), Some(LOOK));
            let options = Options { timeout, lock_timeout, consent, ..Options::default() };
            return act(member.presence().run_dir(), member.presence().tenant(), action, options)
                .map(Some);
        }
    }
}

/// Pauses or resumes by tag the memory that the caller's process itself owns. The other processes of its tenant run on, unless
/// they hold some of that memory too. NCCL's own memory leaves and returns in all processes, since their ranks need each
/// other's. If that memory is named, the memory of the other tags does so too.
///
/// # Errors
/// [`Trouble`], with the process as it was.
pub fn act_for_own_tags<D: Driver>(
    member: &Member<D>,
    tags: TagNames,
    action: Action,
    timeout: Option<Duration>,
) -> Result<Outcome, Trouble> {
    if tags.names_nccl().0 {
        let scope = Scope::Tags { tags, owner: None };
        let (run_dir, tenant) = (member.presence().run_dir(), member.presence().tenant());
        return act(run_dir, tenant, action, Options { scope, ..Options::within(timeout) });
    }
    let scope = Scope::Tags { tags, owner: Some(member.presence().id()) };
    let options = Options { scope: scope.clone(), ..Options::within(timeout) };
    let _asking = member.asking().begin();
    let _turn = member.asking().take_turn(Instant::now() + options.lock_timeout);
    let act_with = |takes_part| {
        let options = Options { takes_part, ..options.clone() };
        act(member.presence().run_dir(), member.presence().tenant(), action, options)
    };
    // A process that is paused as a whole resumes with its tenant. It is certain that the process may act alone only when no
    // other can still fetch the memory. This look spares an attempt in vain.
    let is_shared = member.pool().holdings().is_shared(&scope.paused(member.presence().id()));
    if !is_shared && member.lifecycle().state() == MemberState::Active {
        match act_with(TakesPart::Alone(member.presence().id())) {
            Err(error) if error.is_shared() => {}
            outcome => return outcome,
        }
    }
    act_with(TakesPart::Everybody)
}

/// Pauses or resumes a tenant, the caller's own or another, from one process for all.
///
/// # Errors
/// [`Trouble`], with the tenant as it was.
pub fn act(
    run_dir: &RunDir,
    tenant: &TenantName,
    action: Action,
    options: Options,
) -> Result<Outcome, Trouble> {
    let options = Options { room: Some(keep::room), ..options };
    let mut coordinator = Coordinator::new(run_dir.clone(), tenant.clone(), options);
    match action {
        Action::Pause => coordinator.pause(&mut |_| {}),
        Action::Resume => coordinator.resume(&mut |_| {}),
    }
}
