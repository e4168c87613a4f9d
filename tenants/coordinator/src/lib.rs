//! Pauses and resumes a tenant: takes all its processes through the phases together.
//!
//! There is no daemon: the process that wants a tenant paused (the command, one of its own processes, another
//! tenant's policy) is its coordinator for that time, under a lock. All members finish a phase before any
//! starts the next. A failure before the point of no return ([`Phase::Release`] of a pause,
//! [`Phase::Activate`] of a resume) is undone in all of them; after it the members that are left are taken
//! to the end, and those that were lost are reported.
//!
//! A step is sent to all members, then one poll waits for all answers. Threads are started for calls of the driver's about other processes
//! alone (`freezing.rs`). Every call blocks, for a bounded time.

#![forbid(unsafe_code)]

mod agreement;
mod budgets;
mod cast;
mod conversation;
mod cutting;
mod exchange;
mod freezing;
mod guards;
mod interrupt;
mod lending;
mod needs;
mod overlap;
mod peers;
mod prepare;
mod report;
mod round;
mod saving;
mod session;
mod spilling;
mod stepping;
mod swap;
#[cfg(test)]
mod tests;
mod trouble;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use budgets::{BudgetReport, GpuBudget};
pub use interrupt::Interrupt;
pub use prepare::{PrepareReport, PreparedProcess};
pub use report::{
    CutSummary, DeviceTotal, DrainSummary, Event, MemberFailure, MemberPhase, Outcome,
    PhaseSummary, Report, StageSummary, Step, Swap, TenantStats, Who, staying,
};

pub use needs::{DeviceNeed, DeviceShortage, Holder, Holdings};
use needs::{Gives, name_holders};
pub use saving::{SaveReport, SaveState};
pub use swap::{swap, swap_with_itself};
pub use trouble::Trouble;

use cast::Everybody;
use guards::{ON_REFUSAL, Refused, Tries};
use session::Session;

use sublet_protocol::checkpoints::Checkpointer;
use sublet_protocol::identity::{MemberId, TenantName};
use sublet_protocol::run_dir::{CoordinatorLock, RunDir, RunDirError, TenantDir};
use sublet_protocol::wire::{Action, Phase};
use sublet_protocol::{phase::Stage, scope::Scope, time::millis};

/// The options of a coordinator: how long it waits and for what, and how it acts.
#[derive(Clone, Debug)]
pub struct Options {
    /// For each phase that prepares, and at least that for the greeting; none for their own defaults
    /// ([`Options::phase_timeout`]).
    pub timeout: Option<Duration>,
    /// At least, for phases that finish or undo what was begun: one that is slow there is not lost.
    pub finish_timeout: Duration,
    /// For the ranks to come to a common cut before a pause, when there is no `timeout`.
    pub cut_timeout: Duration,
    /// Beyond a phase's timeout, for the answer to arrive.
    pub reply_margin: Duration,
    /// For a connection and for the answer to a plain question.
    pub contact_timeout: Duration,
    /// For another coordinator of the tenant to finish.
    pub lock_timeout: Duration,
    /// When given, do nothing until every member's application has requested the action too, for at most
    /// this long.
    pub consent: Option<Duration>,
    /// Before a resume creates anything, ask every member what is needed and free. For trying again and
    /// again: one that cannot succeed then takes no memory from others even for a moment.
    pub look_first: bool,
    /// The rule of a resume for memory that was imported from processes that have ended.
    pub lost_imports: LostImports,
    /// Calls the action off when it is raised before the point of no return.
    pub interrupt: Option<Interrupt>,
    /// Does a pause give a tenant up, of which a process that others wait for waits for device memory itself? Else it waits for that too, for as
    /// long as for the cut.
    pub passes_by_memory_waits: bool,
    /// Does a pause give memory back while the rest is still saved, also where that does not pay? Its point of no return is before
    /// it saves, then. A pause for which it pays does so anyway.
    pub releases_early: bool,
    /// Of a swap, which takes those of its first tenant: how much of a device one stage moves, and how much more than the larger
    /// of the two it may hold for that. If both and a window have room on it, it holds both. None for the usual, which fits
    /// tenants of many gigabytes.
    pub window_bytes: Option<u64>,
    /// The things that a pause takes off the devices.
    pub depth: Depth,
    /// The interface to the driver's calls about other processes, for a pause that takes contexts and for the way back.
    /// Without it both are refused.
    pub checkpointer: Option<Arc<dyn Checkpointer>>,
    /// The memory that the action is about.
    pub scope: Scope,
    /// The members that take part.
    pub takes_part: TakesPart,
    /// The conduct of processes while a pause by tag lasts.
    pub meanwhile: Meanwhile,
}

/// The conduct of a tenant's processes while memory of theirs is away by tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Meanwhile {
    /// They run on: the pause is their own wish.
    #[default]
    RunOn,
    /// They run on where each of them has agreed to run without these tags. Else all stand still, as in a whole pause.
    AsAgreed,
}

/// The members of a tenant that take part in a pause or resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TakesPart {
    /// All.
    #[default]
    Everybody,
    /// This one alone, while others do the same. For memory that no other holds, of a process whose
    /// peers run on: nobody is brought to a cut, so what it has launched must be able to end without more
    /// launches of its own.
    Alone(MemberId),
}

/// The depth of a pause: what it takes off the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// The processes' memory.
    #[default]
    Memory,
    /// And then their contexts, with all that the driver keeps of them there.
    Contexts,
}

/// The fate of memory that was imported from a process that ended while its tenant was paused. Such memory cannot come
/// back: its contents were that process's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LostImports {
    /// The resume is refused, and the tenant stays paused.
    #[default]
    Refuse,
    /// The resume goes on without it. Its addresses stay reserved and unmapped: a kernel that touches
    /// them fails with an illegal address, which ends the use of its context.
    LeaveOut,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: None,
            finish_timeout: Duration::from_mins(1),
            cut_timeout: Duration::from_secs(30),
            reply_margin: Duration::from_secs(2),
            contact_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(10),
            consent: None,
            look_first: false,
            lost_imports: LostImports::default(),
            interrupt: None,
            passes_by_memory_waits: false,
            releases_early: false,
            window_bytes: None,
            depth: Depth::Memory,
            checkpointer: None,
            scope: Scope::Whole,
            takes_part: TakesPart::Everybody,
            meanwhile: Meanwhile::RunOn,
        }
    }
}

impl Options {
    /// The usual ones, but that a phase, and the wait for the tenant's lock, may take so long.
    pub fn within(timeout: Option<Duration>) -> Self {
        let usual = Self::default();
        Self { timeout, lock_timeout: timeout.unwrap_or(usual.lock_timeout), ..usual }
    }

    /// Returns the time that the ranks may take to come to a common cut.
    pub fn cut_timeout(&self) -> Duration {
        self.timeout.unwrap_or(self.cut_timeout)
    }

    /// Returns the time that members may take for `phase`.
    pub fn phase_timeout(&self, phase: Phase) -> Duration {
        let timeout = self.timeout.unwrap_or_else(|| phase.timeout());
        match phase.stage() {
            Stage::Prepare => timeout,
            Stage::Commit | Stage::Abort | Stage::Settle | Stage::AtRest => {
                timeout.max(self.finish_timeout)
            }
        }
    }

    /// Does somebody want it called off?
    fn is_called_off(&self) -> bool {
        self.interrupt.as_ref().is_some_and(Interrupt::is_raised)
    }

    /// Returns the time that members may take to say who they are.
    fn greeting_timeout(&self) -> Duration {
        self.timeout.unwrap_or_default().max(self.contact_timeout)
    }
}

/// The length of one wait for the lock, before the interrupt is looked at.
const LOCK_LOOK: Duration = Duration::from_millis(100);

/// Pauses, resumes and questions one tenant.
#[derive(Debug)]
pub struct Coordinator {
    run_dir: RunDir,
    tenant: TenantName,
    options: Options,
}

impl Coordinator {
    /// A coordinator of `tenant`. Nothing is contacted yet.
    pub fn new(run_dir: RunDir, tenant: TenantName, options: Options) -> Self {
        Self { run_dir, tenant, options }
    }

    /// The tenant's name.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// From now on, a resume asks what is needed and free before it creates anything
    /// ([`Options::look_first`]).
    pub fn look_first(&mut self) {
        self.options.look_first = true;
    }

    /// Has all active processes of the tenant give their device memory back.
    ///
    /// Processes that are paused already stay so. Returns when the memory can be used by others.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then active as before, unless the error says otherwise.
    pub fn pause(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        self.act(Action::Pause, progress)
    }

    /// Has the contexts of a tenant leave that stands paused, if that is the depth of the options. One that runs is left alone.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then paused as before.
    pub fn deepen(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        let held = self.hold(Action::Pause)?;
        let mut session = Session::open(&held, &self.options, Action::Pause, progress)?;
        if !session.members.is_empty() {
            return Ok(Outcome::AlreadyActive);
        }
        session.refuse_shallow()?;
        Ok(session.rest())
    }

    /// Has all paused processes of the tenant take their device memory back, at the addresses it had.
    ///
    /// # Errors
    /// [`Trouble`]; the tenant is then paused as before, contents kept, unless the error says
    /// otherwise. [`Trouble::missing_device_bytes`] tells when memory was short.
    pub fn resume(&mut self, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        self.act(Action::Resume, progress)
    }

    /// Returns what every process of the tenant holds. Takes no lock and changes nothing but that dead processes'
    /// sockets are removed. Members that do not answer are listed, not an error.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::NoProcess`], [`Trouble::RunDir`].
    pub fn stats(&self) -> Result<TenantStats, Trouble> {
        Holdings::of_all(&[self]).remove(0).stats
    }

    /// Everybody, for a question outside of pauses and resumes.
    fn connect_all(&self, dir: &TenantDir) -> Result<Everybody, Trouble> {
        Everybody::connect(dir, Step::Stats, Instant::now() + self.options.contact_timeout)
    }

    fn act(
        &mut self,
        action: Action,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Trouble> {
        let span = tracing::info_span!("tenant.act", tenant = %self.tenant, ?action);
        let _entered = span.enter();
        self.hold(action)?.act(action, progress)
    }

    /// Takes the tenant's lock for `action`, unless that is called off.
    fn hold(&self, action: Action) -> Result<Held<'_>, Trouble> {
        let dir = self.dir()?;
        let lock = self.lock(&dir, action)?;
        Ok(Held { coordinator: self, dir, lock })
    }

    /// `error` with the tenants that hold the devices that are too full for this tenant, but for what is given to it.
    fn with_holders(&self, mut error: Trouble, gives: Option<Gives<'_>>) -> Trouble {
        if let Trouble::Refused { shortages, .. } = &mut error {
            name_holders(shortages, &self.run_dir, gives);
        }
        error
    }

    /// Takes the tenant's lock, unless that is called off.
    fn lock(&self, dir: &TenantDir, action: Action) -> Result<CoordinatorLock, Trouble> {
        let started = Instant::now();
        let deadline = started + self.options.lock_timeout;
        let alone = self.options.takes_part != TakesPart::Everybody;
        // One that wants it alone may be stopped.
        let let_pass_until = started + self.options.lock_timeout / 2;
        let take = |deadline| {
            if alone { dir.lock_shared(let_pass_until, deadline) } else { dir.lock(deadline) }
        };
        // The error of one look knows the time of that look alone.
        let since_started = |mut error| {
            if let RunDirError::Locked { waited_ms, .. } = &mut error {
                *waited_ms = millis(started.elapsed());
            }
            error
        };
        let Some(interrupt) = &self.options.interrupt else {
            return Ok(take(deadline).map_err(since_started)?);
        };
        // From one look to the next, too.
        let _wish = (!alone).then(|| dir.want_alone());
        loop {
            if interrupt.is_raised() {
                return Err(Trouble::called_off_before(self.tenant.clone(), action));
            }
            match take(deadline.min(Instant::now() + LOCK_LOOK)) {
                Err(RunDirError::Locked { .. }) if Instant::now() < deadline => {}
                lock => return Ok(lock.map_err(since_started)?),
            }
        }
    }

    /// Is there a process to speak to? Takes no lock.
    fn check_alive(&self) -> Result<(), Trouble> {
        let dir = self.dir()?;
        let dead = dir.remove_stale()?;
        if dir.members()?.is_empty() {
            return Err(Trouble::NoProcess { tenant: self.tenant.clone(), dead });
        }
        Ok(())
    }

    fn dir(&self) -> Result<TenantDir, Trouble> {
        match self.run_dir.existing_tenant(&self.tenant)? {
            Some(dir) => Ok(dir),
            None => Err(Trouble::NoSuchTenant {
                tenant: self.tenant.clone(),
                existing: self.run_dir.live_tenants()?,
            }),
        }
    }
}

/// A tenant with its lock.
struct Held<'a> {
    coordinator: &'a Coordinator,
    dir: TenantDir,
    lock: CoordinatorLock,
}

impl Held<'_> {
    /// Pauses or resumes it, with nobody on the other leg.
    fn act(&self, action: Action, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        let (mut outcome, notes) = attempt(&[self], progress, |tries, progress| {
            let mut session = Session::open(self, &self.coordinator.options, action, progress)?;
            session.refuse_shallow()?;
            self.finish(session, tries)
        })?;
        outcome.note(notes);
        Ok(outcome)
    }

    /// Takes its leg to the end.
    fn finish(&self, session: Session<'_>, tries: &Tries) -> Result<Outcome, Trouble> {
        if session.members.is_empty() {
            return Ok(session.rest());
        }
        session.run(tries).map_err(|error| self.coordinator.with_holders(error, None))
    }
}

/// Tries `once` and again, as long as something helps the tenant that its error is about: one of `legs`. What came of it, and
/// notes about what was done for that.
fn attempt<T>(
    legs: &[&Held<'_>],
    progress: &mut dyn FnMut(Event<'_>),
    mut once: impl FnMut(&Tries, &mut dyn FnMut(Event<'_>)) -> Result<T, Trouble>,
) -> Result<(T, Vec<String>), Trouble> {
    let mut tries = Tries::default();
    loop {
        let error = match once(&tries, progress) {
            Ok(done) => return Ok((done, tries.room.notes())),
            Err(error) => error,
        };
        let about = |held: &&&Held<'_>| error.is_about(&held.coordinator.tenant);
        let held = legs.iter().find(about).unwrap_or(&legs[0]);
        let mut refused = Refused { held, error: &error, progress };
        if !ON_REFUSAL.iter().any(|(_, helps)| helps(&mut tries, &mut refused)) {
            return Err(error);
        }
    }
}
