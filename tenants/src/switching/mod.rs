//! Has a tenant get its GPUs: asks [`crate::turns`] what is to be done, and does it.
//!
//! There is no daemon. Whoever wants its tenant to have the GPUs makes a claim in the run directory (`run_dir/turn_files.rs`), and acts
//! for itself when the decision about its claim is to go; until then it looks again whenever claims change. All decide by the same rules
//! from the same claims, so all agree who is next, and one lock sees to it that one acts at a time. A claim ends with its process.
//!
//! Lock order: the lock of `.turns`, then those of tenants.

mod acting;
mod back;
mod gather;
mod room;
#[cfg(test)]
mod tests;
mod turn;

use std::time::{Duration, Instant};

use crate::coordinator::{
    Coordinator, CoordinatorError, Event, Interrupt, LostImports, Options, Outcome,
};
use crate::error_text::chain;
use crate::identity::TenantName;
use crate::run_dir::turn_files::{Claim, OwnClaim, TurnDir, TurnLock};
use crate::run_dir::{RunDir, RunDirError, pause_thread};
use crate::turns::history::History;
use crate::turns::scene::{Scene, Waiting, Wish};
use crate::turns::{Decision, Settings, Verdict, decide};

use acting::Acting;
pub use back::come_back_by_itself;
pub use gather::{Claimant, LoggedDecision, TurnsView, look};
use gather::{Silent, gather, now_us};
pub use room::{Allocation, with_room};
pub use turn::{Turn, TurnOptions};

/// How long one look lasts while nothing changes.
const LOOK_MAX: Duration = Duration::from_millis(500);
/// For how long one that may wait looks again before it believes that it fits nowhere: the driver takes seconds to clear up after a large process.
const NEVER_MAX: Duration = Duration::from_secs(10);
/// How often claims are glanced at meanwhile.
const GLANCE: Duration = Duration::from_millis(10);
/// How long somebody else may take to switch tenants, for one that does not wait.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// How often one that waits for the lock shows a sign of life, and looks whether that is called off.
const LOCK_LOOK: Duration = Duration::from_millis(250);
/// How long after its own tenant did not come, or an allocation or its switch failed, the next try is, doubled each time: memory of a process that was
/// killed is not free at once.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(5);

/// How a tenant is switched to.
#[derive(Clone, Debug, Default)]
pub struct SwitchOptions {
    /// How long to wait while somebody in the way is in a turn.
    pub wait: Duration,
    /// For each phase of pauses and resumes; none for the phases' own.
    pub timeout: Option<Duration>,
    /// Calls it off when it is raised before the first point of no return, or while it waits.
    pub interrupt: Option<Interrupt>,
    /// Does it come without memory that it had imported from processes that have ended since?
    pub lost_imports: LostImports,
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
        "{why}; nothing was changed: wait for it (--wait), or pause what is in the way of '{tenant}' by name"
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
        /// Who could not be paused, where that is why.
        refused_by: Option<TenantName>,
        /// Why.
        source: Box<CoordinatorError>,
    },
    /// As [`SwitchError::Undone`], and some of those that had been paused did not come back.
    #[error("{}; {}", chain(source), stay(stay_paused))]
    NotUndone {
        /// Who is paused now, and why.
        stay_paused: Vec<(TenantName, CoordinatorError)>,
        /// Who could not be paused, where that is why the switch failed.
        refused_by: Option<TenantName>,
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

    /// Who could not be paused, and why, where that is what it failed for.
    fn refusal(&self) -> Option<(&TenantName, &CoordinatorError)> {
        match self {
            Self::Undone { refused_by, source, .. }
            | Self::NotUndone { refused_by, source, .. } => Some((refused_by.as_ref()?, source)),
            Self::Tenant(_)
            | Self::RunDir(_)
            | Self::Never { .. }
            | Self::Busy { .. }
            | Self::CalledOff { .. } => None,
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
    lives(run_dir, tenant, options)?;
    if options.is_dry {
        return dry(run_dir, tenant);
    }
    queue_for(run_dir, tenant, Wish::Order, options, progress)
}

/// Resumes `tenant` in its place among those that wait for the GPUs: as [`switch`], but by class and in the order in which they came, and who has its
/// quantum keeps it. Blocks for a bounded time, besides `wait`.
///
/// # Errors
/// [`SwitchError`].
pub fn resume_in_turn(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, SwitchError> {
    lives(run_dir, tenant, options)?;
    let mut switched = queue_for(run_dir, tenant, Wish::Resume, options, progress)?;
    if switched.had_them {
        // What it runs without, by tag, comes back all the same.
        let outcome = acting::coordinator(run_dir, tenant, options).resume(progress)?;
        switched.changes.push((tenant.clone(), outcome));
    }
    Ok(switched)
}

/// Has its place among those that wait until it has got what it came for, or did not.
fn queue_for(
    run_dir: &RunDir,
    tenant: &TenantName,
    wish: Wish,
    options: &SwitchOptions,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Switched, SwitchError> {
    let calls_off = (options.interrupt.as_ref(), &never as &dyn Fn() -> bool);
    let mut queue = Queue::enter(run_dir, tenant, wish, options.wait, calls_off)?;
    queue.wait_and_go(options, &never, progress)
}

/// Nothing but an interrupt calls it off.
fn never() -> bool {
    false
}

/// `tenant` is to be paused by name, and so nobody brings it back but who says so: also where it is away for another already.
pub fn stays_away(run_dir: &RunDir, tenant: &TenantName) {
    let Ok(Some(turns)) = run_dir.existing_turns() else { return };
    if !turns.history::<History>().of(tenant).is_displaced {
        return;
    }
    let kept = turns.lock(Instant::now() + LOCK_TIMEOUT).and_then(|lock| {
        let mut history: History = turns.history();
        history.stays_away(tenant);
        turns.keep_history(&lock, &history)
    });
    if let Err(error) = kept {
        tracing::warn!(%tenant, %error, "it comes back when it wants to, though it is paused by name");
    }
}

/// A tenant without a process has its own error, which names those that there are.
fn lives(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
) -> Result<(), CoordinatorError> {
    let options_of = Options { timeout: options.timeout, ..Options::default() };
    Coordinator::new(run_dir.clone(), tenant.clone(), options_of).stats().map(drop)
}

/// What a switch would do now.
fn dry(run_dir: &RunDir, tenant: &TenantName) -> Result<Switched, SwitchError> {
    let turns = run_dir.existing_turns()?;
    let claims = turns.as_ref().map_or_else(|| Ok(Vec::new()), |turns| turns.claims(None))?;
    let history: History = turns.map(|turns| turns.history()).unwrap_or_default();
    let mut scene = gather(run_dir, &claims, Some(tenant), &mut Silent::default());
    scene.waiting.push(Waiting { tenant: tenant.clone(), wish: Wish::Order });
    let index = scene.waiting.len() - 1;
    let decisions = decide(&scene, &history, &Settings::default(), now_us());
    let decision = decisions[index].clone();
    let had_them = scene.tenants.get(tenant).is_some_and(|standing| standing.is_active);
    match decision.verdict {
        Verdict::Go(victims) => {
            Ok(Switched { had_them, victims, reasons: decision.reasons, changes: Vec::new() })
        }
        Verdict::Wait(_) => Err(busy(tenant, &decision.reasons)),
        Verdict::Never if !scene.unheard.is_empty() => Err(busy(tenant, &decision.reasons)),
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
    wish: Wish,
    claim: OwnClaim,
    deadline: Option<Instant>,
    has_told: bool,
    /// Since when it was found, one time after the other, that it fits nowhere.
    never_since: Option<Instant>,
    silent: Silent,
}

impl Queue {
    fn enter(
        run_dir: &RunDir,
        tenant: &TenantName,
        wish: Wish,
        wait: Duration,
        (interrupt, is_over): (Option<&Interrupt>, &dyn Fn() -> bool),
    ) -> Result<Self, SwitchError> {
        let turns = run_dir.turns()?;
        let deadline = Instant::now().checked_add(wait);
        let lock = lock_of(&turns, lock_deadline(&wish, deadline), || {
            check_called_off(tenant, interrupt, is_over)
        })?;
        let claim = Claim {
            tenant: tenant.to_string(),
            pid: std::process::id(),
            waits: true,
            wish: wish.clone(),
            since_us: now_us(),
        };
        let claim = turns.claim(&lock, &claim)?;
        let (run_dir, tenant) = (run_dir.clone(), tenant.clone());
        Ok(Self {
            run_dir,
            turns,
            tenant,
            wish,
            claim,
            deadline,
            has_told: false,
            never_since: None,
            silent: Silent::default(),
        })
    }

    fn say(&self, waits: bool) -> Result<(), RunDirError> {
        self.claim.say(&Claim {
            tenant: self.tenant.to_string(),
            pid: std::process::id(),
            waits,
            wish: self.wish.clone(),
            since_us: now_us(),
        })
    }

    /// Takes the lock. Whoever has it may be switching for long, and this one is no less alive for that.
    fn lock(
        &self,
        interrupt: Option<&Interrupt>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<TurnLock, SwitchError> {
        let locked = lock_of(&self.turns, lock_deadline(&self.wish, self.deadline), || {
            self.claim.beat();
            self.check_called_off(interrupt, is_over)
        });
        self.claim.beat();
        locked
    }

    fn check_called_off(
        &self,
        interrupt: Option<&Interrupt>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), SwitchError> {
        check_called_off(&self.tenant, interrupt, is_over)
    }

    /// Waits until the decision is to go, or never to, or it is called off; and goes.
    fn wait_and_go(
        &mut self,
        options: &SwitchOptions,
        is_over: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, SwitchError> {
        let (mut again_after, mut failing_since) = (AGAIN_AFTER, None);
        loop {
            let seen = self.turns.glance();
            let lock = self.lock(options.interrupt.as_ref(), is_over)?;
            let claims = self.turns.claims(Some(&lock))?;
            let mut history: History = self.turns.history();
            if history.changed_us > now_us() {
                // Of before the machine was started.
                history = History::default();
            }
            let mut scene = gather(&self.run_dir, &claims, Some(&self.tenant), &mut self.silent);
            history.note_back(&scene);
            if self.wish == Wish::Turn {
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
                    let went =
                        self.go(&lock, &scene, history, victims, decision, options, progress);
                    match went {
                        Err(error) if self.tries_others(&error) => {}
                        Err(error) if self.tries_again(&error, again_after, &mut failing_since) => {
                            drop(lock);
                            self.rest(again_after, options.interrupt.as_ref(), is_over)?;
                            again_after = (again_after * 2).min(AGAIN_AFTER_MAX);
                        }
                        went => return went,
                    }
                }
                // What has just ended may not be free yet, and is nobody's that could give it. Nor may it be of whoever does not answer.
                Verdict::Never if self.looks_again(!scene.unheard.is_empty()) => {
                    drop(lock);
                    self.look_around(&seen, LOOK_MAX, options.interrupt.as_ref(), is_over)?;
                }
                Verdict::Never => {
                    self.turns.log(&lock, &decision.reasons)?;
                    if !scene.unheard.is_empty() {
                        return Err(busy(&self.tenant, &decision.reasons));
                    }
                    return Err(SwitchError::Never { why: decision.reasons.join("; ") });
                }
                Verdict::Wait(until_us) => {
                    self.never_since = None;
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

    /// Is there time for others to make way in place of one that could not be paused? What a person has asked for is tried once.
    fn tries_others(&self, error: &SwitchError) -> bool {
        let is_in_time = self.deadline.is_none_or(|deadline| Instant::now() < deadline);
        let is_undone = matches!(error, SwitchError::Undone { .. });
        is_in_time && is_undone && error.refusal().is_some() && !self.wish.is_order()
    }

    /// Is there time until its own tenant may come? An allocation has its own way of trying again, and so has a turn that lasts already, which has
    /// no deadline. Others are not paused for it in vain for long.
    fn tries_again(
        &self,
        error: &SwitchError,
        after: Duration,
        failing_since: &mut Option<Instant>,
    ) -> bool {
        let since = *failing_since.get_or_insert_with(Instant::now);
        let others =
            matches!(error, SwitchError::Undone { were_paused, .. } if !were_paused.is_empty());
        if others && since.elapsed() >= NEVER_MAX {
            return false;
        }
        let is_in_time = self.deadline.is_some_and(|deadline| Instant::now() + after < deadline);
        let is_own = matches!(error, SwitchError::Undone { .. } | SwitchError::Tenant(_));
        let may_wait = matches!(self.wish, Wish::Turn | Wish::Resume);
        is_in_time && is_own && may_wait && error.refusal().is_none() && error.is_retryable()
    }

    /// Does nothing for so long, unless it is called off.
    fn rest(
        &self,
        time: Duration,
        interrupt: Option<&Interrupt>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), SwitchError> {
        let end = Instant::now() + time;
        loop {
            self.claim.beat();
            self.check_called_off(interrupt, is_over)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            pause_thread(LOCK_LOOK.min(left));
        }
    }

    /// Its time begins anew, and it has not been told anything.
    fn wait_anew(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
        self.never_since = None;
    }

    /// May what is found to fit nowhere fit in a moment? An allocation that nobody was in the way of is refused at once: its library may have caches to free.
    /// Where somebody is `unheard`, that is not known.
    fn looks_again(&mut self, unheard: bool) -> bool {
        if !unheard && !self.has_told && matches!(self.wish, Wish::Memory(_)) {
            return false;
        }
        let since = *self.never_since.get_or_insert_with(Instant::now);
        let is_in_time = self.deadline.is_none_or(|deadline| Instant::now() < deadline);
        is_in_time && since.elapsed() < NEVER_MAX
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
            self.check_called_off(interrupt, is_over)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.turns.glance() != seen {
                return Ok(());
            }
            pause_thread(GLANCE.min(left));
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
        if !victims.is_empty() {
            let mut leaving = history.clone();
            for victim in victims {
                leaving.is_leaving(victim);
            }
            self.turns.keep_history(lock, &leaving)?;
        }
        let acting = Acting { run_dir: &self.run_dir, tenant: &self.tenant, options };
        let began_us = now_us();
        let done = if had_them {
            acting.make_room(victims, progress)
        } else {
            acting.carry_out(victims, progress)
        };
        let changes = match done {
            Ok(changes) => changes,
            Err(error) => {
                let mut lines = vec![format!("'{}' did not come: {error}", self.tenant)];
                if let SwitchError::NotUndone { stay_paused, .. } = &error {
                    // It comes back by itself, where it does that.
                    for (victim, _) in stay_paused {
                        history.is_leaving(victim);
                    }
                }
                if let Some((victim, why)) = error.refusal() {
                    let now_us = now_us();
                    let took_us = now_us.saturating_sub(began_us);
                    lines.push(history.refused(victim, &chain(why), took_us, now_us));
                }
                self.turns.log(lock, &lines)?;
                self.turns.keep_history(lock, &history)?;
                return Err(error);
            }
        };
        let mut lines = decision.reasons.clone();
        let now_us = now_us();
        let has_left = |victim: &&TenantName| changes.iter().any(|(name, _)| name == *victim);
        for victim in victims.iter().filter(has_left) {
            lines.extend(history.left(victim, scene, &Settings::default(), now_us));
        }
        if !had_them {
            history.came(&self.tenant, now_us);
        } else if !victims.is_empty() {
            history.got_more(&self.tenant, scene, now_us);
        }
        if self.wish == Wish::Turn {
            let has_turn = scene.tenants.get(&self.tenant).is_some_and(|own| own.has_turn);
            history.began_turn(&self.tenant, has_turn, now_us);
            self.say(false)?;
        }
        // One that does not answer now may be away for another.
        if let Ok(live) = self.run_dir.live_tenants() {
            history.keep_only(&live);
        }
        self.turns.keep_history(lock, &history)?;
        if !had_them || !victims.is_empty() {
            self.turns.log(lock, &lines)?;
        }
        let victims = victims.to_vec();
        Ok(Switched { had_them, victims, reasons: lines, changes })
    }
}

/// Takes the lock, waiting for its holder until `deadline`, with a look at `goes_on` every now and then.
fn lock_of(
    turns: &TurnDir,
    deadline: Instant,
    goes_on: impl Fn() -> Result<(), SwitchError>,
) -> Result<TurnLock, SwitchError> {
    let began = Instant::now();
    loop {
        let locked = turns.lock(deadline.min(Instant::now() + LOCK_LOOK));
        match locked {
            Err(RunDirError::Switching { holder_pids, .. }) => {
                goes_on()?;
                if Instant::now() >= deadline {
                    let waited_ms = u64::try_from(began.elapsed().as_millis());
                    let waited_ms = waited_ms.unwrap_or(u64::MAX);
                    return Err(RunDirError::Switching { holder_pids, waited_ms }.into());
                }
            }
            locked => return Ok(locked?),
        }
    }
}

fn check_called_off(
    tenant: &TenantName,
    interrupt: Option<&Interrupt>,
    is_over: &dyn Fn() -> bool,
) -> Result<(), SwitchError> {
    if interrupt.is_some_and(Interrupt::is_raised) || is_over() {
        return Err(SwitchError::CalledOff { tenant: tenant.clone() });
    }
    Ok(())
}

/// One that waits has the time that it waits for, and one that does not a bounded one. An allocation is refused at its deadline.
fn lock_deadline(wish: &Wish, deadline: Option<Instant>) -> Instant {
    let least = Instant::now() + LOCK_TIMEOUT;
    match (wish, deadline) {
        (Wish::Memory(_), Some(deadline)) => deadline,
        (_, deadline) => deadline.map_or(least, |deadline| deadline.max(least)),
    }
}
