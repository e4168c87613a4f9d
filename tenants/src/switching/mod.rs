//! Has a tenant get its GPUs: asks [`crate::turns`] what is to be done, and does it.
//!
//! There is no daemon. Whoever wants its tenant to have the GPUs makes a claim in the run directory (`run_dir/turn_files.rs`), and acts
//! for itself when the decision about its claim is to go; until then it looks again whenever claims change. All decide by the same rules
//! from the same claims, so all agree who is next, and one lock sees to it that one acts at a time. A claim ends with its process.
//!
//! Lock order: the lock of `.turns`, then those of tenants.

mod gather;
mod turn;

use std::time::{Duration, Instant};

use crate::coordinator::{
    Coordinator, CoordinatorError, Event, Interrupt, Options, Outcome, SwapError, SwapOptions, swap,
};
use crate::error_text::chain;
use crate::identity::TenantName;
use crate::run_dir::turn_files::{Claim, OwnClaim, TurnDir, TurnLock};
use crate::run_dir::{RunDir, RunDirError};
use crate::turns::history::History;
use crate::turns::scene::Scene;
use crate::turns::{Decision, Settings, Verdict, decide};

pub use gather::{Claimant, LoggedDecision, TurnsView, look};
use gather::{gather, now_us};
pub use turn::{Turn, TurnOptions};

/// How long one look lasts while nothing changes.
const LOOK_MAX: Duration = Duration::from_millis(500);
/// How often claims are glanced at meanwhile.
const GLANCE: Duration = Duration::from_millis(10);
/// How long somebody else may take to switch tenants, for one that does not wait.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// How a tenant is switched to.
#[derive(Clone, Debug, Default)]
pub struct SwitchOptions {
    /// How long to wait while somebody in the way is in a turn.
    pub wait: Duration,
    /// For each phase of pauses and resumes; none for the phases' own.
    pub timeout: Option<Duration>,
    /// Calls it off when it is raised before the first point of no return, or while it waits.
    pub interrupt: Option<Interrupt>,
    /// Say what would be done, and change nothing.
    pub is_dry: bool,
}

/// What was done, or would be.
#[derive(Clone, Debug)]
pub struct Switched {
    /// Did the tenant have its GPUs already?
    pub had_them: bool,
    /// Who was paused, or would be.
    pub victims: Vec<TenantName>,
    /// Why, one line each.
    pub reasons: Vec<String>,
    /// How each pause and the resume went, in order.
    pub changes: Vec<(TenantName, Outcome)>,
}

/// Why a tenant did not get its GPUs. Unless it says otherwise, all are as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchError {
    /// It could not be spoken to.
    #[error(transparent)]
    Tenant(#[from] CoordinatorError),
    /// The files of turns are of no use, or somebody else is switching.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// It does not fit, whoever makes way.
    #[error("{why}; nothing was changed")]
    Never {
        /// Why.
        why: String,
    },
    /// Somebody in the way is in a turn.
    #[error(
        "{why}; nothing was changed: wait for it (`sublet switch {tenant} --wait`), or pause what is in the way by name"
    )]
    Busy {
        /// Which.
        tenant: TenantName,
        /// Why.
        why: String,
    },
    /// It was called off while it waited.
    #[error("switching to tenant '{tenant}' was called off; nothing was changed")]
    CalledOff {
        /// Which.
        tenant: TenantName,
    },
    /// One that was to make way did not, or the tenant did not come; what had been paused is active again.
    #[error("{}; {}", chain(source), back(were_paused))]
    Undone {
        /// Who was paused meanwhile.
        were_paused: Vec<TenantName>,
        /// Why.
        source: Box<CoordinatorError>,
    },
    /// As [`SwitchError::Undone`], and some of those that had been paused did not come back.
    #[error("{}; {}", chain(source), stay(stay_paused))]
    NotUndone {
        /// Who is paused now, and why.
        stay_paused: Vec<(TenantName, CoordinatorError)>,
        /// Why the switch failed.
        source: Box<CoordinatorError>,
    },
}

fn back(were_paused: &[TenantName]) -> String {
    if were_paused.is_empty() {
        return "nothing was changed".to_owned();
    }
    let names: Vec<_> = were_paused.iter().map(|name| format!("'{name}'")).collect();
    format!("paused for it were {}, which are active again", names.join(", "))
}

fn stay(stay_paused: &[(TenantName, CoordinatorError)]) -> String {
    let one = |(name, error): &(TenantName, CoordinatorError)| {
        format!(
            "'{name}' was paused for it, with all its contents, and did not come back ({}): `sublet resume {name}` tries again",
            chain(error)
        )
    };
    stay_paused.iter().map(one).collect::<Vec<_>>().join("; ")
}

impl SwitchError {
    /// The error of the coordinator behind it.
    pub fn cause(&self) -> Option<&CoordinatorError> {
        match self {
            Self::Tenant(error) => Some(error),
            Self::Undone { source, .. } | Self::NotUndone { source, .. } => Some(source),
            Self::RunDir(_) | Self::Never { .. } | Self::Busy { .. } | Self::CalledOff { .. } => {
                None
            }
        }
    }

    /// Can the same call succeed later?
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Tenant(error) => error.is_retryable(),
            Self::RunDir(error) => matches!(error, RunDirError::Switching { .. }),
            Self::Undone { source, .. } => source.is_retryable(),
            Self::Busy { .. } | Self::CalledOff { .. } => true,
            Self::Never { .. } | Self::NotUndone { .. } => false,
        }
    }

    /// Are all tenants as they were before?
    pub fn left_unchanged(&self) -> bool {
        match self {
            Self::Tenant(error) => error.left_unchanged(),
            Self::Undone { source, .. } => source.left_unchanged(),
            Self::NotUndone { .. } => false,
            Self::RunDir(_) | Self::Never { .. } | Self::Busy { .. } | Self::CalledOff { .. } => {
                true
            }
        }
    }
}

/// Pauses what is in the way of `tenant` on its GPUs, and resumes it. Blocks for a bounded time, besides `wait`.
///
/// # Errors
/// [`SwitchError`].
pub fn switch(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, SwitchError> {
    let options_of = Options { timeout: options.timeout, ..Options::default() };
    // A tenant without a process has its own error, which names those that there are.
    let _lives = Coordinator::new(run_dir.clone(), tenant.clone(), options_of).stats()?;
    if options.is_dry {
        return dry(run_dir, tenant);
    }
    let mut queue = Queue::enter(run_dir, tenant, true, options.wait)?;
    queue.wait_and_go(options, &|| false, progress)
}

/// What a switch would do now.
fn dry(run_dir: &RunDir, tenant: &TenantName) -> Result<Switched, SwitchError> {
    let turns = run_dir.existing_turns()?;
    let claims = turns.as_ref().map_or_else(|| Ok(Vec::new()), |turns| turns.claims(None))?;
    let history: History = turns.map(|turns| turns.history()).unwrap_or_default();
    let mut scene = gather(run_dir, &claims, Some(tenant));
    let own = gather::order_of(tenant);
    scene.waiting.push(own);
    let index = scene.waiting.len() - 1;
    let decisions = decide(&scene, &history, &Settings::default(), now_us());
    let decision = decisions[index].clone();
    let had_them = scene.tenants.get(tenant).is_some_and(|standing| standing.is_active);
    match decision.verdict {
        Verdict::Go(victims) => {
            Ok(Switched { had_them, victims, reasons: decision.reasons, changes: Vec::new() })
        }
        Verdict::Wait(_) => Err(busy(tenant, &decision.reasons)),
        Verdict::Never => Err(SwitchError::Never { why: decision.reasons.join("; ") }),
    }
}

fn busy(tenant: &TenantName, reasons: &[String]) -> SwitchError {
    SwitchError::Busy { tenant: tenant.clone(), why: reasons.join("; ") }
}

/// One that waits for its tenant to have its GPUs, with its place among the others.
#[derive(Debug)]
struct Queue {
    run_dir: RunDir,
    turns: TurnDir,
    tenant: TenantName,
    is_order: bool,
    claim: OwnClaim,
    deadline: Option<Instant>,
    has_told: bool,
}

impl Queue {
    fn enter(
        run_dir: &RunDir,
        tenant: &TenantName,
        is_order: bool,
        wait: Duration,
    ) -> Result<Self, SwitchError> {
        let turns = run_dir.turns()?;
        let deadline = Instant::now().checked_add(wait);
        let lock = turns.lock(lock_deadline(deadline))?;
        let claim = Claim {
            tenant: tenant.to_string(),
            pid: std::process::id(),
            waits: true,
            is_order,
            since_us: now_us(),
        };
        let claim = turns.claim(&lock, &claim)?;
        let (run_dir, tenant) = (run_dir.clone(), tenant.clone());
        Ok(Self { run_dir, turns, tenant, is_order, claim, deadline, has_told: false })
    }

    fn say(&self, waits: bool) -> Result<(), RunDirError> {
        self.claim.say(&Claim {
            tenant: self.tenant.to_string(),
            pid: std::process::id(),
            waits,
            is_order: self.is_order,
            since_us: now_us(),
        })
    }

    /// Waits until the decision is to go, or never to, or it is called off; and goes.
    fn wait_and_go(
        &mut self,
        options: &SwitchOptions,
        is_over: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, SwitchError> {
        loop {
            let seen = self.turns.glance();
            let lock = self.turns.lock(lock_deadline(self.deadline))?;
            let claims = self.turns.claims(Some(&lock))?;
            let mut history: History = self.turns.history();
            if history.changed_us > now_us() {
                // Of before the machine was started.
                history = History::default();
            }
            let mut scene = gather(&self.run_dir, &claims, Some(&self.tenant));
            if !self.is_order {
                // A process that has no device memory yet is of no tenant that anybody can ask, and needs nothing.
                scene.tenants.entry(self.tenant.clone()).or_insert_with(gather::newcomer);
            }
            let numbers: Vec<u64> = gather::waiting(&claims).map(|found| found.number).collect();
            let decisions = decide(&scene, &history, &Settings::default(), now_us());
            let own = numbers.iter().position(|number| *number == self.claim.number);
            let Some(decision) = own.and_then(|own| decisions.get(own)) else {
                return Err(RunDirError::Io {
                    operation: "reading back",
                    path: self.claim.path().to_owned(),
                    source: std::io::ErrorKind::NotFound.into(),
                }
                .into());
            };
            match &decision.verdict {
                Verdict::Go(victims) => {
                    return self.go(&lock, &scene, history, victims, decision, options, progress);
                }
                Verdict::Never => {
                    self.turns.log(&lock, &decision.reasons)?;
                    return Err(SwitchError::Never { why: decision.reasons.join("; ") });
                }
                Verdict::Wait(until_us) => {
                    if !std::mem::replace(&mut self.has_told, true) {
                        self.turns.log(&lock, &decision.reasons)?;
                    }
                    drop(lock);
                    let left = self
                        .deadline
                        .map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Err(busy(&self.tenant, &decision.reasons));
                    }
                    let until = until_us
                        .map(|until_us| Duration::from_micros(until_us.saturating_sub(now_us())));
                    let look = [left, until].into_iter().flatten().fold(LOOK_MAX, Duration::min);
                    self.look_around(&seen, look, options.interrupt.as_ref(), is_over)?;
                }
            }
        }
    }

    /// Waits until claims are others than `seen`, for at most `look`.
    fn look_around(
        &self,
        seen: &[(u64, bool, bool)],
        look: Duration,
        interrupt: Option<&Interrupt>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), SwitchError> {
        self.claim.beat();
        let end = Instant::now() + look;
        loop {
            let is_called_off = interrupt.is_some_and(Interrupt::is_raised) || is_over();
            if is_called_off {
                return Err(SwitchError::CalledOff { tenant: self.tenant.clone() });
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.turns.glance() != seen {
                return Ok(());
            }
            doze(GLANCE.min(left));
        }
    }

    /// Pauses `victims` and resumes the own tenant, and writes down what has been.
    #[expect(clippy::too_many_arguments, reason = "one decision, and all that it was made of")]
    fn go(
        &self,
        lock: &TurnLock,
        scene: &Scene,
        mut history: History,
        victims: &[TenantName],
        decision: &Decision,
        options: &SwitchOptions,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, SwitchError> {
        let had_them = scene.tenants.get(&self.tenant).is_some_and(|standing| standing.is_active);
        let mut changes = Vec::new();
        if !had_them {
            let acting = Acting { run_dir: &self.run_dir, tenant: &self.tenant, options };
            match acting.carry_out(victims, progress) {
                Ok(done) => changes = done,
                Err(error) => {
                    self.turns.log(lock, &[format!("'{}' did not come: {error}", self.tenant)])?;
                    return Err(error);
                }
            }
        }
        let mut lines = decision.reasons.clone();
        let now_us = now_us();
        for victim in victims {
            lines.extend(history.left(victim, scene, &Settings::default(), now_us));
        }
        if !had_them {
            history.came(&self.tenant, now_us);
        }
        if !self.is_order {
            let has_turn = scene.tenants.get(&self.tenant).is_some_and(|own| own.has_turn);
            history.began_turn(&self.tenant, has_turn, now_us);
            self.say(false)?;
        }
        history.keep_only(scene);
        self.turns.keep_history(lock, &history)?;
        if !had_them || !victims.is_empty() {
            self.turns.log(lock, &lines)?;
        }
        let victims = victims.to_vec();
        Ok(Switched { had_them, victims, reasons: lines, changes })
    }
}

/// One that waits has the time that it waits for, and one that does not a bounded one.
fn lock_deadline(deadline: Option<Instant>) -> Instant {
    let least = Instant::now() + LOCK_TIMEOUT;
    deadline.map_or(least, |deadline| deadline.max(least))
}

/// The pauses and the resume of one decision.
struct Acting<'a> {
    run_dir: &'a RunDir,
    tenant: &'a TenantName,
    options: &'a SwitchOptions,
}

impl Acting<'_> {
    fn coordinator(&self, tenant: &TenantName, interrupt: Option<&Interrupt>) -> Coordinator {
        let options = Options {
            timeout: self.options.timeout,
            interrupt: interrupt.cloned(),
            ..Options::default()
        };
        Coordinator::new(self.run_dir.clone(), tenant.clone(), options)
    }

    fn carry_out(
        &self,
        victims: &[TenantName],
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<(TenantName, Outcome)>, SwitchError> {
        let interrupt = self.options.interrupt.as_ref();
        let mut to = self.coordinator(self.tenant, interrupt);
        if let [only] = victims {
            let mut from = self.coordinator(only, interrupt);
            return match swap(&mut from, &mut to, SwapOptions::default(), progress) {
                Ok(swap) => {
                    Ok(vec![(only.clone(), swap.paused), (self.tenant.clone(), swap.resumed)])
                }
                Err(SwapError::Pause(error)) if is_gone(&error) => {
                    self.resume(to, Vec::new(), progress)
                }
                Err(SwapError::NoTarget(error) | SwapError::Pause(error)) => {
                    Err(self.undo(Vec::new(), error, progress))
                }
                Err(SwapError::WentBack { tenant, source, .. }) => {
                    Err(SwitchError::Undone { were_paused: vec![tenant], source })
                }
                Err(SwapError::NotBack { tenant, resume, source }) => {
                    Err(SwitchError::NotUndone { stay_paused: vec![(tenant, *resume)], source })
                }
                Err(SwapError::Resume { paused_tenant, source, .. }) => {
                    Err(self.undo(vec![paused_tenant], *source, progress))
                }
            };
        }
        let mut done = Vec::new();
        for victim in victims {
            match self.coordinator(victim, interrupt).pause(progress) {
                Ok(outcome) => done.push((victim.clone(), outcome)),
                // It made way in its own manner.
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    let paused = done.into_iter().map(|(victim, _)| victim).collect();
                    return Err(self.undo(paused, error, progress));
                }
            }
        }
        self.resume(to, done, progress)
    }

    fn resume(
        &self,
        mut to: Coordinator,
        mut done: Vec<(TenantName, Outcome)>,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<(TenantName, Outcome)>, SwitchError> {
        match to.resume(progress) {
            Ok(outcome) => {
                done.push((self.tenant.clone(), outcome));
                Ok(done)
            }
            Err(error) => {
                let paused = done.into_iter().map(|(victim, _)| victim).collect();
                Err(self.undo(paused, error, progress))
            }
        }
    }

    /// Brings those back that were paused, the last first. Nobody may call that off.
    fn undo(
        &self,
        paused: Vec<TenantName>,
        error: CoordinatorError,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> SwitchError {
        let mut stay_paused = Vec::new();
        for victim in paused.iter().rev() {
            if let Err(error) = self.coordinator(victim, None).resume(progress) {
                stay_paused.push((victim.clone(), error));
            }
        }
        let source = Box::new(error);
        if stay_paused.is_empty() {
            SwitchError::Undone { were_paused: paused, source }
        } else {
            SwitchError::NotUndone { stay_paused, source }
        }
    }
}

/// Has the tenant ended, which makes room too?
fn is_gone(error: &CoordinatorError) -> bool {
    matches!(error, CoordinatorError::NoSuchTenant { .. } | CoordinatorError::NoProcess { .. })
}

#[expect(
    clippy::disallowed_methods,
    reason = "the kernel offers no wait with a deadline for a file lock to be given up"
)]
fn doze(duration: Duration) {
    std::thread::sleep(duration);
}
