//! A process that waits for its tenant to get its GPUs: its claim, its looks at the state, and its act when the decision is to
//! go.

use std::time::{Duration, Instant};

use super::acting::{SwitchOptions, busy, fits_nowhere};
use super::gather::{self, Displaced, Silent, gather, history_of};
use super::{Switched, signals};
use crate::claims::{Claim, Found, OwnClaim, Watch, pid_namespace};
use crate::clock::now_us;
use crate::decision::history::History;
use crate::decision::scene::{Scene, Wish};
use crate::decision::{Decision, Verdict, decide};
use crate::turn_files::{TurnDir, TurnLock};
use tenants::coordinator::{Event, Interrupt, Trouble};
use tenants::identity::TenantName;
use tenants::run_dir::{RunDir, RunDirError};
use tenants::time::millis;

/// The longest time between two looks while nothing changes, for the first process of the queue.
pub(super) const LOOK_MAX: Duration = Duration::from_millis(500);
/// The longest time between two looks for the others. They look less often, so that a long queue contacts tenants hardly more
/// often than a short one.
const LOOK_BEHIND_MAX: Duration = Duration::from_secs(5);
/// The time for which a process that may wait looks again before it reports that it fits nowhere. The driver needs seconds to
/// clean up after a large process.
pub(super) const NEVER_MAX: Duration = Duration::from_secs(10);
/// The longest wait for another process's switch, for a process that does not queue.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval at which a waiting process shows a sign of life, also while it waits for the lock. It also checks whether the
/// wait is called off.
const SIGN_EVERY: Duration = Duration::from_millis(250);
/// The wait for the lock after which the log names the lock's holder.
const LOCK_SAID_AFTER: Duration = Duration::from_secs(10);
/// The number of consecutive looks without its own claim after which a process gives up.
const UNSEEN_MAX: u32 = 5;
/// The time until the next try after a resume of its own tenant, an allocation or its switch has failed. It doubles each time:
/// memory of a killed process is not free immediately.
pub(super) const AGAIN_AFTER: Duration = Duration::from_millis(100);
pub(super) const AGAIN_AFTER_MAX: Duration = Duration::from_secs(5);

/// A process in the queue: it waits for its tenant to get its GPUs.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) run_dir: RunDir,
    pub(super) turns: TurnDir,
    pub(super) tenant: TenantName,
    pub(super) wish: Wish,
    claim: OwnClaim,
    /// See [`Claim::waits`].
    waits: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) has_told: bool,
    /// The time since which every decision said that the tenant fits nowhere.
    pub(super) never_since: Option<Instant>,
    pub(super) displaced: Displaced,
    /// See [`super::Turn::begin`].
    pub(super) is_paused: fn() -> bool,
    /// Did its resume fail for lack of memory, although the figures say that it fits?
    is_short: bool,
}

/// The conditions that call a wait off, before anything has been done.
#[derive(Clone, Copy)]
pub(super) struct CallsOff<'a> {
    /// Calls the wait off if it was raised.
    pub(super) interrupt: Option<&'a Interrupt>,
    /// Calls the wait off if it returns true.
    pub(super) asks: Option<fn() -> bool>,
    /// Calls the wait off if it returns true: the reason for the wait is over.
    pub(super) is_over: &'a dyn Fn() -> bool,
}

impl<'a> CallsOff<'a> {
    /// Returns conditions with `is_over` alone.
    pub(super) fn when(is_over: &'a dyn Fn() -> bool) -> Self {
        Self { interrupt: None, asks: None, is_over }
    }

    /// Returns the same conditions for a holder of the lock. It does not call `asks`, which might want the lock too.
    fn with_lock(self) -> Self {
        Self { asks: None, ..self }
    }

    fn check(self, tenant: &TenantName) -> Result<(), Trouble> {
        if self.interrupt.is_some_and(Interrupt::is_raised)
            || self.asks.is_some_and(|asks| asks())
            || (self.is_over)()
        {
            return Err(Trouble::NotSwitched { tenant: tenant.clone() });
        }
        Ok(())
    }
}

/// The `is_over` of a wait that has no end of its own.
pub(super) fn never() -> bool {
    false
}

/// The state of repeated tries after a failed resume.
struct Trying {
    again_after: Duration,
    failing_since: Option<Instant>,
}

/// The result of one look, and the decision that follows from it.
pub(super) struct Seen {
    pub(super) scene: Scene,
    pub(super) history: History,
    pub(super) decision: Decision,
    /// The number of processes before it in the queue.
    before: u32,
}

impl Queue {
    pub(super) fn enter(
        run_dir: &RunDir,
        tenant: &TenantName,
        wish: Wish,
        wait: Duration,
        calls_off: CallsOff<'_>,
    ) -> Result<Self, Trouble> {
        let turns = TurnDir::make(run_dir)?;
        let deadline = Instant::now().checked_add(wait);
        let deadline_of_lock = lock_deadline(&wish, deadline);
        let lock = lock_of(&turns, tenant, deadline_of_lock, || calls_off.check(tenant))?;
        let claim = turns.claim(&lock, &claim_of(tenant, &wish, true), None)?;
        let (run_dir, tenant) = (run_dir.clone(), tenant.clone());
        Ok(Self {
            run_dir,
            turns,
            tenant,
            wish,
            claim,
            waits: true,
            deadline,
            has_told: false,
            never_since: None,
            displaced: Displaced::default(),
            is_paused: never,
            is_short: false,
        })
    }

    pub(super) fn say(&mut self, waits: bool) -> Result<(), RunDirError> {
        self.waits = waits;
        self.claim.say(&claim_of(&self.tenant, &self.wish, waits))
    }

    /// Makes the claim again, with its number, if somebody has removed its file. Returns whether it did.
    pub(super) fn keep_claim(&mut self, calls_off: CallsOff<'_>) -> Result<bool, Trouble> {
        if self.claim.is_there() {
            return Ok(false);
        }
        self.turns = TurnDir::make(&self.run_dir)?;
        let lock = self.lock(calls_off)?;
        let claim = claim_of(&self.tenant, &self.wish, self.waits);
        self.claim = self.turns.claim(&lock, &claim, Some(self.claim.number))?;
        Ok(true)
    }

    /// Takes the lock. A holder may switch for a long time, so this process shows signs of life meanwhile.
    fn lock(&self, calls_off: CallsOff<'_>) -> Result<TurnLock, Trouble> {
        let deadline = lock_deadline(&self.wish, self.deadline);
        let locked = lock_of(&self.turns, &self.tenant, deadline, || self.beat(calls_off));
        self.claim.beat();
        locked
    }

    /// Returns the state of all tenants. Tenants that do not answer are recorded for all processes. If `asks_all`, resting
    /// tenants are contacted too.
    pub(super) fn gather(&self, claims: &[Found], asks_all: bool) -> Scene {
        let known: Silent = self.turns.silent();
        let mut silent = if asks_all { known.rested() } else { known.clone() };
        let scene = gather(&self.run_dir, claims, Some(&self.tenant), &mut silent);
        if silent != known {
            self.turns.keep_silent(&silent);
        }
        scene
    }

    /// Is the deadline of the wait over?
    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Shows a sign of life, unless the wait is called off.
    fn beat(&self, calls_off: CallsOff<'_>) -> Result<(), Trouble> {
        self.claim.beat();
        calls_off.check(&self.tenant)
    }

    /// Gathers the present state, and decides what this process is to do. None if its own claim is missing. `can_sink`: can this
    /// process remove the contexts of other tenants?
    fn look(
        &mut self,
        lock: Option<&TurnLock>,
        asks_all: bool,
        can_sink: bool,
    ) -> Result<Option<Seen>, RunDirError> {
        if lock.is_none() && !self.wish.is_order() {
            // Entries that the history has lost with its directory are written again.
            self.displaced.look_if_so(&self.run_dir, &self.tenant, (self.is_paused)());
        }
        let claims = self.turns.claims(lock)?;
        let mut history = history_of(&self.turns);
        let mut scene = self.gather(&claims, asks_all);
        history.note_back(&scene);
        if !can_sink {
            scene.tenants.values_mut().for_each(|standing| standing.contexts.may_leave = false);
        }
        if self.is_short {
            scene.short.insert(self.tenant.clone());
        }
        if matches!(self.wish, Wish::Turn | Wish::Context(_)) {
            let is_away = self.displaced.is_so() || (self.is_paused)();
            gather::complete(&mut scene, &self.tenant, is_away);
        }
        let mut numbers = gather::waiting(&claims).map(|found| found.number);
        let Some(before) = numbers.position(|number| number == self.claim.number) else {
            return Ok(None);
        };
        let mut decisions = decide(&scene, &history, now_us());
        let decision = decisions.swap_remove(before);
        let before = u32::try_from(before).unwrap_or(u32::MAX);
        Ok(Some(Seen { scene, history, decision, before }))
    }

    /// Waits until the decision is to go or never to go, or until the wait is called off. Then it goes, if it may.
    pub(super) fn wait_and_go(
        &mut self,
        options: &SwitchOptions,
        is_over: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, Trouble> {
        let calls_off =
            CallsOff { interrupt: options.interrupt.as_ref(), asks: options.asks, is_over };
        let (mut trying, mut unseen) =
            (Trying { again_after: AGAIN_AFTER, failing_since: None }, 0);
        let (mut watch, mut lock) = (self.turns.watch(), None);
        let (mut asks_all, mut has_asked_all) = (false, false);
        loop {
            self.beat(if lock.is_some() { calls_off.with_lock() } else { calls_off })?;
            if lock.is_none() && self.keep_claim(calls_off)? {
                watch = self.turns.watch();
            }
            let can_sink = options.checkpointer.is_some();
            let looked = self.look(lock.as_ref(), std::mem::take(&mut asks_all), can_sink);
            let Ok(Some(seen)) = looked else {
                // Its file was just removed, or the process has stood still for too long. Otherwise something is wrong with the
                // claim.
                unseen += 1;
                if unseen >= UNSEEN_MAX {
                    looked?;
                    return Err(self.claim_is_lost().into());
                }
                lock = None;
                continue;
            };
            unseen = 0;
            let Seen { scene, decision, before, .. } = &seen;
            match &decision.verdict {
                Verdict::Go(victims) => {
                    let Some(held) = lock.take() else {
                        // With the lock the decision is made once more: others may have acted since.
                        lock = self.lock_unless_gone(calls_off)?;
                        continue;
                    };
                    let own = scene.tenants.get(&self.tenant);
                    let had_no_contexts = own.is_some_and(|own| own.contexts.are_away);
                    let victims = victims.clone();
                    let went = self.go(&held, seen, &victims, options, progress);
                    drop(held);
                    if let Some(switched) =
                        self.came(went, had_no_contexts, &mut trying, calls_off)?
                    {
                        return Ok(switched);
                    }
                }
                Verdict::Sink(one) => {
                    let Some(held) = lock.take() else {
                        lock = self.lock_unless_gone(calls_off)?;
                        continue;
                    };
                    let one = one.clone();
                    let went = self.sink(&held, seen, &one, options, progress);
                    drop(held);
                    self.is_short = false;
                    match went {
                        // The caller finds out whether the memory suffices for the context.
                        Ok(switched) if self.wish.context().is_some() => return Ok(switched),
                        Ok(_) => {}
                        // The contexts of that tenant stay for a while. The next decision takes another tenant, or none.
                        Err(Trouble::Undone { .. }) if !self.is_late() => {}
                        Err(error) => return Err(error),
                    }
                }
                // The memory of a process that has just ended may not be free yet. It may also be held by a tenant that does not
                // answer.
                Verdict::Never => {
                    let unheard = !scene.unheard.is_empty();
                    if let Some(look) = self.looks_again(unheard) {
                        lock = None;
                        self.look_around(&watch, look, calls_off)?;
                    } else if unheard && !has_asked_all {
                        // Resting tenants may answer by now.
                        (lock, asks_all, has_asked_all) = (None, true, true);
                    } else {
                        self.tell(lock.as_ref(), &decision.reasons);
                        return Err(fits_nowhere(&self.tenant, scene, &decision.reasons));
                    }
                }
                Verdict::Wait(until_us) => {
                    lock = None;
                    self.never_since = None;
                    if !std::mem::replace(&mut self.has_told, true) {
                        self.tell(None, &decision.reasons);
                    }
                    let left = self
                        .deadline
                        .map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Err(busy(&self.tenant, &decision.reasons));
                    }
                    let until = until_us
                        .map(|until_us| Duration::from_micros(until_us.saturating_sub(now_us())));
                    let most = LOOK_MAX.saturating_mul(before.saturating_add(1));
                    let most = most.min(LOOK_BEHIND_MAX);
                    let look = [left, until].into_iter().flatten().fold(most, Duration::min);
                    self.look_around(&watch, look, calls_off)?;
                }
            }
        }
    }

    /// Judges the result of the switch. Returns none if the process is to look again.
    fn came(
        &mut self,
        went: Result<Switched, Trouble>,
        had_no_contexts: bool,
        trying: &mut Trying,
        calls_off: CallsOff<'_>,
    ) -> Result<Option<Switched>, Trouble> {
        let lacks = |error: &Trouble| error.missing_device_bytes().is_some();
        let is_short = went.as_ref().is_err_and(lacks);
        let was_short = std::mem::replace(&mut self.is_short, is_short);
        match went {
            // Its contexts were restored first, and then its memory did not fit. Others are paused for both now.
            Err(Trouble::Undone { .. }) if had_no_contexts && is_short && !was_short => {}
            Err(error) if self.tries_others(&error) => {}
            Err(error) if self.tries_again(&error, trying) => {
                self.rest(trying.again_after, calls_off)?;
                trying.again_after = (trying.again_after * 2).min(AGAIN_AFTER_MAX);
            }
            went => return went.map(Some),
        }
        Ok(None)
    }

    /// Takes the lock. None if the claim was removed, perhaps with the whole directory.
    fn lock_unless_gone(&self, calls_off: CallsOff<'_>) -> Result<Option<TurnLock>, Trouble> {
        match self.lock(calls_off) {
            Err(Trouble::RunDir(RunDirError::Io { .. })) if !self.claim.is_there() => Ok(None),
            locked => locked.map(Some),
        }
    }

    fn claim_is_lost(&self) -> RunDirError {
        RunDirError::Io {
            operation: "reading back",
            path: self.claim.path().to_owned(),
            source: std::io::ErrorKind::NotFound.into(),
        }
    }

    /// Adds lines to the log. A failed write does not stop the turn.
    pub(super) fn tell(&self, lock: Option<&TurnLock>, lines: &[String]) {
        if let Err(error) = self.turns.log(lock, lines) {
            tracing::warn!(%error, ?lines, "decisions about turns are not in the log");
        }
    }

    /// Is there time to pause others instead of a tenant that could not be paused? A person's order is tried once.
    fn tries_others(&self, error: &Trouble) -> bool {
        let is_in_time = self.deadline.is_none_or(|deadline| Instant::now() < deadline);
        let is_refused = matches!(error, Trouble::Undone { refused_by: Some(_), .. });
        is_in_time && is_refused && !self.wish.is_order()
    }

    /// Is there time to try the resume of its own tenant again? An allocation tries again in its own way, and so does a turn that
    /// has begun, which has no deadline. Others are not paused in vain for long.
    fn tries_again(&self, error: &Trouble, trying: &mut Trying) -> bool {
        let after = trying.again_after;
        let since = *trying.failing_since.get_or_insert_with(Instant::now);
        let Trouble::Undone { were_paused, refused_by: None, .. } = error else { return false };
        if !were_paused.is_empty() && since.elapsed() >= NEVER_MAX {
            return false;
        }
        let is_in_time = self.deadline.is_some_and(|deadline| Instant::now() + after < deadline);
        let may_wait = matches!(self.wish, Wish::Turn | Wish::Resume);
        is_in_time && may_wait && error.is_retryable()
    }

    /// Waits for this time, unless the wait is called off.
    fn rest(&self, time: Duration, calls_off: CallsOff<'_>) -> Result<(), Trouble> {
        self.wait_for(time, calls_off, |left| signals::wait(&mut [], left))
    }

    /// Waits until claims change, for at most `look`.
    fn look_around(
        &self,
        watch: &Watch,
        look: Duration,
        calls_off: CallsOff<'_>,
    ) -> Result<(), Trouble> {
        self.wait_for(look, calls_off, |left| watch.wait(left))
    }

    /// Shows signs of life until `ends` returns true or the time is over. `ends` waits for a part of the time.
    fn wait_for(
        &self,
        time: Duration,
        calls_off: CallsOff<'_>,
        ends: impl Fn(Duration) -> bool,
    ) -> Result<(), Trouble> {
        let end = Instant::now() + time;
        loop {
            self.beat(calls_off)?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || ends(SIGN_EVERY.min(left)) {
                return Ok(());
            }
        }
    }

    /// Begins the wait again, with this deadline and nothing logged.
    pub(super) fn wait_anew(&mut self, deadline: Instant) {
        self.deadline = Some(deadline);
        self.never_since = None;
    }

    /// Returns the time until the next look after a decision that the tenant fits nowhere; none if there is no next look. An
    /// allocation that no tenant blocks is refused soon: its library may have caches to free. One look is not enough for that:
    /// tenants answer one after the other, and one may get memory after its answer. If a tenant is `unheard`, it is not known
    /// which tenants block the allocation.
    pub(super) fn looks_again(&mut self, unheard: bool) -> Option<Duration> {
        let nobody_was_in_the_way =
            !unheard && !self.has_told && matches!(self.wish, Wish::Memory(_));
        let is_first = self.never_since.is_none();
        let since = *self.never_since.get_or_insert_with(Instant::now);
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return None;
        }
        if nobody_was_in_the_way {
            return is_first.then_some(AGAIN_AFTER);
        }
        (since.elapsed() < NEVER_MAX).then_some(LOOK_MAX)
    }
}

/// Returns the claim of a process that waits, or is in its turn.
fn claim_of(tenant: &TenantName, wish: &Wish, waits: bool) -> Claim {
    Claim {
        tenant: tenant.to_string(),
        pid: std::process::id(),
        pid_namespace: pid_namespace(),
        waits,
        wish: wish.clone(),
        since_us: now_us(),
    }
}

/// Takes the lock. Waits for its holder until `deadline`, and calls `goes_on` at intervals.
fn lock_of(
    turns: &TurnDir,
    tenant: &TenantName,
    deadline: Instant,
    goes_on: impl Fn() -> Result<(), Trouble>,
) -> Result<TurnLock, Trouble> {
    let (began, mut has_said) = (Instant::now(), false);
    loop {
        let locked = turns.lock(deadline.min(Instant::now() + SIGN_EVERY));
        match locked {
            Err(RunDirError::Switching { holder_pids, .. }) => {
                goes_on()?;
                let waited_ms = millis(began.elapsed());
                let error = RunDirError::Switching { holder_pids, waited_ms };
                if Instant::now() >= deadline {
                    return Err(error.into());
                }
                if began.elapsed() >= LOCK_SAID_AFTER && !std::mem::replace(&mut has_said, true) {
                    let line = format!("'{tenant}' still waits: {error}");
                    if let Err(error) = turns.log(None, &[line]) {
                        tracing::debug!(%error, "a line of the log of turns was not written");
                    }
                }
            }
            locked => return Ok(locked?),
        }
    }
}

/// Returns the deadline for the lock: that of the wait, or a bounded one for a process that does not wait. An allocation is
/// refused at its deadline.
fn lock_deadline(wish: &Wish, deadline: Option<Instant>) -> Instant {
    let least = Instant::now() + LOCK_TIMEOUT;
    match (wish, deadline) {
        (Wish::Memory(_) | Wish::Context(_), Some(deadline)) => deadline,
        (_, deadline) => deadline.map_or(least, |deadline| deadline.max(least)),
    }
}
