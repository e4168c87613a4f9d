//! For what a refused try is tried again, with everybody as before.

use super::Trouble;
use super::lending::{NamesWait, Patience};
use super::spilling::Room;
use super::{Coordinator, Event, JOINED_TRIES_MAX, Options};
use crate::run_dir::TenantDir;

/// The tries of one pause, resume or swap.
#[derive(Debug)]
pub(super) struct Tries {
    count: u32,
    pub(super) patience: Patience,
    pub(super) room: Room,
    names: NamesWait,
}

impl Tries {
    pub(super) fn new(options: &Options) -> Self {
        let (room, names) = (Room::default(), NamesWait::default());
        Self { count: 1, patience: Patience::new(options), room, names }
    }

    /// Is it worth one more try after `error`, which is about the tenant of `coordinator`? Has done by then what helps: room was made, or
    /// names were waited for.
    pub(super) fn again(
        &mut self,
        coordinator: &Coordinator,
        dir: &TenantDir,
        error: &Trouble,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> bool {
        if matches!(error, Trouble::Joined { .. }) && self.count < JOINED_TRIES_MAX {
            // With the newcomers, then.
            self.count += 1;
            return true;
        }
        coordinator.makes_room(&mut self.room, error, progress)
            || self.names.waits(&coordinator.options, dir, error)
            || (error.is_lent() && self.patience.goes_on())
    }
}
