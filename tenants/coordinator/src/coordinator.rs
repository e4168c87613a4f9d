//! The coordinator of one tenant: it reaches the processes, and holds the tenant's lock while it pauses or resumes them.

use std::time::{Duration, Instant};

use super::cast::Everybody;
use super::conversation::{Inquiry, Next};
use super::options::{Options, TakesPart};
use super::report::Step;
use super::trouble::Trouble;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{CoordinatorLock, RunDir, RunDirError, TenantDir};
use sublet_protocol::time::millis;
use sublet_protocol::wire::{Action, Hello};

/// The length of one wait for the lock, before the interrupt is checked.
const LOCK_LOOK: Duration = Duration::from_millis(100);

/// Pauses, resumes and questions one tenant.
#[derive(Debug)]
pub struct Coordinator {
    pub(super) run_dir: RunDir,
    pub(super) tenant: TenantName,
    pub(super) options: Options,
}

impl Coordinator {
    /// Makes a coordinator of `tenant`. Nothing is contacted yet.
    pub fn new(run_dir: RunDir, tenant: TenantName, options: Options) -> Self {
        Self { run_dir, tenant, options }
    }

    /// The tenant's name.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Makes a resume ask for the needed and the free memory before it creates anything ([`Options::look_first`]).
    pub fn look_first(&mut self) {
        self.options.look_first = true;
    }

    /// The coordinator's options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// All processes that answer the greeting, for questions outside of pauses and resumes.
    ///
    /// # Errors
    /// [`Trouble::NoProcess`], [`Trouble::RunDir`].
    pub fn greeted(&self, dir: &TenantDir) -> Result<Everybody, Trouble> {
        let mut all = self.connect_to(dir, Step::Hello)?;
        let members = all.peers.all();
        let Everybody { peers, failures } = &mut all;
        peers.converse(&members, self.inquiry(Hello), |peers, index, said| {
            failures.extend(said.and_then(|info| peers.introduce(index, info)).err());
            Next::Done
        });
        Ok(all)
    }

    /// All live processes, for `step` outside of pauses and resumes.
    ///
    /// # Errors
    /// [`Trouble::NoProcess`], [`Trouble::RunDir`].
    pub fn connect_to(&self, dir: &TenantDir, step: Step) -> Result<Everybody, Trouble> {
        Everybody::connect(dir, step, Instant::now() + self.options.contact_timeout)
    }

    /// Makes an inquiry of `question`, to be answered within the contact timeout of the options, or until the options'
    /// interrupt is raised.
    pub fn inquiry<Q>(&self, question: Q) -> Inquiry<'_, Q> {
        Inquiry::of(question, self.options.contact_timeout, self.options.interrupt.as_ref())
    }

    /// Takes the tenant's lock for `action`, as [`Coordinator::lock`].
    ///
    /// # Errors
    /// Those of [`Coordinator::dir`] and [`Coordinator::lock`].
    pub fn hold(&self, action: Action) -> Result<Held<'_>, Trouble> {
        let dir = self.dir()?;
        let lock = self.lock(&dir, action)?;
        Ok(Held { coordinator: self, dir, lock })
    }

    /// Takes the tenant's lock for `action`, unless that is called off. Blocks for the options' lock timeout at most.
    ///
    /// # Errors
    /// [`Trouble::CalledOff`], [`Trouble::RunDir`].
    pub fn lock(&self, dir: &TenantDir, action: Action) -> Result<CoordinatorLock, Trouble> {
        let started = Instant::now();
        let deadline = started + self.options.lock_timeout;
        let alone = self.options.takes_part != TakesPart::Everybody;
        // A process that wants the lock alone may be stopped.
        let let_pass_until = started + self.options.lock_timeout / 2;
        let take = |deadline| {
            if alone { dir.lock_shared(let_pass_until, deadline) } else { dir.lock(deadline) }
        };
        // The error of one look has only the time of that look.
        let since_started = |mut error| {
            if let RunDirError::Locked { waited_ms, .. } = &mut error {
                *waited_ms = millis(started.elapsed());
            }
            error
        };
        let Some(interrupt) = &self.options.interrupt else {
            return Ok(take(deadline).map_err(since_started)?);
        };
        // The wish holds between two looks, too.
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

    /// The tenant's directory.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::RunDir`].
    pub fn dir(&self) -> Result<TenantDir, Trouble> {
        if let Some(dir) = self.run_dir.existing_tenant(&self.tenant)? {
            return Ok(dir);
        }
        let (tenant, existing) = (self.tenant.clone(), self.run_dir.live_tenants()?);
        Err(Trouble::NoSuchTenant { tenant, existing })
    }
}

/// A tenant with its lock.
#[derive(Debug)]
pub struct Held<'a> {
    /// The tenant's coordinator.
    pub coordinator: &'a Coordinator,
    /// The tenant's directory.
    pub dir: TenantDir,
    pub(super) lock: CoordinatorLock,
}
