//! Gives a tenant its GPUs: gets a decision from [`crate::decision`], and carries it out.
//!
//! There is no daemon. A process that wants the GPUs for its tenant makes a claim in the run directory (`claims.rs`). It decides
//! again whenever claims change, and acts itself when the decision is to go. All processes decide by the same rules from the same
//! claims, so they agree which is next. That process takes a lock, decides once more and acts, so one process acts at a time. A
//! waiting process holds no lock, so it blocks no other if it is stopped. A claim ends with its process.
//!
//! Lock order: the lock of turns, then those of tenants.

mod acting;
mod back;
mod claims;
mod clock;
pub mod decision;
#[cfg(test)]
mod files_tests;
mod gather;
mod going;
mod outcome;
mod queue;
mod reach;
mod room;
mod signals;
#[cfg(test)]
mod tests;
mod turn;
mod turn_files;

use std::time::Instant;

use crate::clock::now_us;
use crate::decision::scene::{Waiting, Wish};
use crate::decision::{Verdict, decide};
use tenants::coordinator::{Coordinator, Event, Options, Trouble};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

pub use acting::SwitchOptions;
use acting::{busy, fits_nowhere};
pub use back::come_back_by_itself;
pub use gather::{Claimant, LoggedDecision, TurnsView, look};
use gather::{Silent, gather, history_of};
pub use outcome::Switched;
use queue::{CallsOff, LOCK_TIMEOUT, Queue, never};
pub use reach::others_give;
pub use room::{Allocation, Newcomer, wait_for_room, with_room};
pub use turn::Turn;
use turn_files::TurnDir;

/// Pauses the tenants that hold memory that `tenant` needs, and resumes `tenant`. Blocks for a bounded time, in addition to
/// `wait`.
///
/// # Errors
/// [`Trouble`].
pub fn switch(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, Trouble> {
    lives(run_dir, tenant, options)?;
    if options.is_dry {
        return dry(run_dir, tenant);
    }
    queue_for(run_dir, tenant, Wish::Order, options, progress)
}

/// Resumes `tenant` in its place in the queue for the GPUs. As [`switch`], but class and order of arrival decide, and a running
/// tenant keeps its quantum. Blocks for a bounded time, in addition to `wait`.
///
/// # Errors
/// [`Trouble`].
pub fn resume_in_turn(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, Trouble> {
    lives(run_dir, tenant, options)?;
    let mut switched = queue_for(run_dir, tenant, Wish::Resume, options, progress)?;
    if switched.had_them {
        // Memory that was paused by tag is resumed too.
        let outcome = acting::coordinator(run_dir, tenant, options).resume(progress)?;
        switched.changes.push((tenant.clone(), outcome));
    }
    Ok(switched)
}

/// Waits in the queue until the wish is met, or has failed.
fn queue_for(
    run_dir: &RunDir,
    tenant: &TenantName,
    wish: Wish,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, Trouble> {
    let calls_off =
        CallsOff { interrupt: options.interrupt.as_ref(), asks: options.asks, is_over: &never };
    let mut queue = Queue::enter(run_dir, tenant, wish, options.wait, calls_off)?;
    queue.wait_and_go(options, &never, progress)
}

/// Calls `pause`, which pauses `tenant` by name: it is resumed only by an explicit request. If a switch pauses it before or
/// meanwhile, that counts as by name too.
///
/// # Errors
/// Those of `pause`.
pub fn by_name<T, E>(
    run_dir: &RunDir,
    tenant: &TenantName,
    pause: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    stays_away(run_dir, tenant);
    let paused = pause();
    if paused.is_ok() {
        stays_away(run_dir, tenant);
    }
    paused
}

/// Notes that `tenant` is to be paused by name, and so is resumed only by an explicit request. This also holds if it is already
/// paused for another.
fn stays_away(run_dir: &RunDir, tenant: &TenantName) {
    let Ok(Some(turns)) = TurnDir::existing(run_dir) else { return };
    if history_of(&turns).is_displaced(tenant) != Some(true) {
        return;
    }
    let kept = turns.lock(Instant::now() + LOCK_TIMEOUT).and_then(|lock| {
        let mut history = history_of(&turns);
        history.stays_away(tenant);
        turns.keep_history(&lock, &history)
    });
    if let Err(error) = kept {
        tracing::warn!(%tenant, %error, "it comes back when it wants to, though it is paused by name");
    }
}

/// Checks that the tenant has a process. If not, the error names the tenants that exist.
fn lives(run_dir: &RunDir, tenant: &TenantName, options: &SwitchOptions) -> Result<(), Trouble> {
    let options_of = Options { timeout: options.timeout, ..Options::default() };
    Coordinator::new(run_dir.clone(), tenant.clone(), options_of).stats().map(drop)
}

/// Returns what a switch would do now.
fn dry(run_dir: &RunDir, tenant: &TenantName) -> Result<Switched, Trouble> {
    let turns = TurnDir::existing(run_dir)?;
    let claims = turns.as_ref().map_or_else(|| Ok(Vec::new()), |turns| turns.claims(None))?;
    let history = turns.as_ref().map(history_of).unwrap_or_default();
    let mut scene = gather(run_dir, &claims, Some(tenant), &mut Silent::default());
    scene.waiting.push(Waiting { tenant: tenant.clone(), wish: Wish::Order });
    let index = scene.waiting.len() - 1;
    let decisions = decide(&scene, &history, now_us());
    let decision = decisions[index].clone();
    let had_them = scene.tenants.get(tenant).is_some_and(|standing| standing.is_active);
    let victims = match decision.verdict {
        Verdict::Go(victims) => victims,
        Verdict::Sink(sinks) => vec![sinks],
        Verdict::Wait(_) => return Err(busy(tenant, &decision.reasons)),
        Verdict::Never => return Err(fits_nowhere(tenant, &scene, &decision.reasons)),
    };
    Ok(Switched { had_them, victims, reasons: decision.reasons, changes: vec![], unrecorded: None })
}
