//! A pause or a resume of one tenant under its lock, and for what it, or a swap, is tried again.

use super::lending::{NamesWait, Patience};
use super::report::{Event, Outcome};
use super::session::Session;
use super::spilling::Room;
use super::{Coordinator, Options, Trouble};
use crate::run_dir::{CoordinatorLock, TenantDir};
use crate::wire::Action;

/// How often a pause begins again because processes have joined its tenant meanwhile.
const JOINED_TRIES_MAX: u32 = 8;

/// A tenant with its lock.
pub(super) struct Held<'a> {
    pub(super) coordinator: &'a Coordinator,
    pub(super) dir: TenantDir,
    lock: CoordinatorLock,
}

impl Coordinator {
    /// Takes the tenant's lock for `action`, unless that is called off.
    pub(super) fn hold(&self, action: Action) -> Result<Held<'_>, Trouble> {
        let dir = self.dir()?;
        let lock = self.lock(&dir, action)?;
        Ok(Held { coordinator: self, dir, lock })
    }
}

impl Held<'_> {
    /// Speaks to all its processes.
    pub(super) fn open<'s>(
        &'s self,
        options: &'s Options,
        action: Action,
        progress: &'s mut dyn FnMut(Event<'_>),
    ) -> Result<Session<'s>, Trouble> {
        Session::open(&self.dir, &self.lock, options, action, progress)
    }

    /// Pauses or resumes it, with nobody on the other leg.
    pub(super) fn act(
        &self,
        action: Action,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, Trouble> {
        let (mut outcome, notes) = attempt(&[self], progress, |patience, progress| {
            let mut session = self.open(&self.coordinator.options, action, progress)?;
            session.refuse_shallow()?;
            self.finish(session, patience)
        })?;
        outcome.note(notes);
        Ok(outcome)
    }

    /// Takes its leg to the end.
    pub(super) fn finish(
        &self,
        session: Session<'_>,
        patience: Patience,
    ) -> Result<Outcome, Trouble> {
        if session.members.is_empty() {
            return Ok(session.rest());
        }
        session.run(patience).map_err(|error| self.coordinator.with_holders(error, None))
    }
}

/// Tries `once` and again, as long as something helps the tenant that its error is about: one of `legs`. What came of it, and
/// notes about what was done for that.
pub(super) fn attempt<T>(
    legs: &[&Held<'_>],
    progress: &mut dyn FnMut(Event<'_>),
    mut once: impl FnMut(Patience, &mut dyn FnMut(Event<'_>)) -> Result<T, Trouble>,
) -> Result<(T, Vec<String>), Trouble> {
    let mut patience = Patience::new(&legs[0].coordinator.options);
    let (mut joined, mut room, mut names) = (1, Room::default(), NamesWait::default());
    loop {
        let error = match once(patience, progress) {
            Ok(done) => return Ok((done, room.notes())),
            Err(error) => error,
        };
        let about = |held: &&&Held<'_>| error.is_about(&held.coordinator.tenant);
        let Held { coordinator, dir, .. } = legs.iter().find(about).unwrap_or(&legs[0]);
        if matches!(error, Trouble::Joined { .. }) && joined < JOINED_TRIES_MAX {
            // With the newcomers, then.
            joined += 1;
            continue;
        }
        let helps = coordinator.makes_room(&mut room, &error, progress)
            || names.waits(&coordinator.options, dir, &error)
            || (error.is_lent() && patience.goes_on());
        if !helps {
            return Err(error);
        }
    }
}
