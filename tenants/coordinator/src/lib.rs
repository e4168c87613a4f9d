//! Pauses and resumes a tenant: takes all its processes through the phases together.
//!
//! There is no daemon: the process that wants a tenant paused (the command, one of its own processes, another
//! tenant's policy) is its coordinator for that time, under a lock. All members finish a phase before any
//! starts the next. A failure before the point of no return ([`Release`](sublet_protocol::wire::Phase::Release) of a pause,
//! [`Activate`](sublet_protocol::wire::Phase::Activate) of a resume) is undone in all of them; after it the members that are left are taken
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
mod figures;
mod freezing;
mod guards;
mod interrupt;
mod lending;
mod needs;
mod options;
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

use std::time::{Duration, Instant};

pub use budgets::BudgetReport;
pub use figures::{DeviceShortage, GpuBudget, Holder, ProcessBytes, end_some};
pub use interrupt::Interrupt;
pub use prepare::{PrepareReport, PreparedProcess};
pub use report::{
    CutSummary, DeviceTotal, DrainSummary, Event, MemberFailure, MemberPhase, Outcome,
    PhaseSummary, Report, StageSummary, Step, Swap, TenantStats, Who, staying,
};

pub use needs::{DeviceNeed, Holdings, by_process};
use needs::{Gives, name_holders};
pub use options::{Depth, LentMemory, LostImports, Meanwhile, Options, TakesPart};
pub use saving::{SaveReport, SaveState};
pub use swap::{swap, swap_with_itself};
pub use trouble::Trouble;

use cast::Everybody;
use conversation::Inquiry;
use guards::{ON_REFUSAL, Refused, Tries};
use session::Session;
use spilling::Room;

use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{CoordinatorLock, RunDir, RunDirError, TenantDir};
use sublet_protocol::time::millis;
use sublet_protocol::wire::Action;

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

    /// `question`, to be answered within the time that the options give for a contact, or until they call it off.
    fn inquiry<Q>(&self, question: Q) -> Inquiry<'_, Q> {
        Inquiry::of(question, self.options.contact_timeout, self.options.interrupt.as_ref())
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
            name_holders(shortages, &self.tenant, &self.run_dir, gives);
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
            Ok(done) => return Ok((done, tries.room.as_ref().map_or_else(Vec::new, Room::notes))),
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
