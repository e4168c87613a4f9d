//! The application itself asks: for a pause or resume of its own process, by a thread that waits for its turn, or by a call
//! that waits until all processes have made it.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmm_pool::driver::Driver;

use super::{Member, Status};
use crate::wire::Action;

/// What came of [`Member::wait_for`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// It has happened.
    Done,
    /// It failed for everybody, and this is why.
    GivenUp(String),
    /// Neither, so far.
    NotYet,
}

/// One token, taken and put back: a lock that can be waited for with a deadline.
#[derive(Debug)]
pub(super) struct Turns(Sender<()>, Receiver<()>);

/// While it lives, this process itself asks for a pause.
#[derive(Debug)]
pub struct Asking<'a>(&'a AtomicUsize);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The turn of one thread; dropping it passes it on.
#[derive(Debug)]
pub struct Turn<'a>(&'a Sender<()>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // There is room: this is the one token.
        let _put_back = self.0.try_send(());
    }
}

impl<D: Driver> Member<D> {
    /// Waits for this thread's turn to pause or resume the process alone; none at `deadline`, and then what
    /// follows finds the process in the other's hands.
    pub fn take_turn(&self, deadline: Instant) -> Option<Turn<'_>> {
        self.turns.1.recv_deadline(deadline).ok().map(|()| Turn(&self.turns.0))
    }

    /// The calling thread asks for a pause that takes part of this process too, and answers for it that nothing
    /// is launched meanwhile.
    pub fn asks_itself(&self) -> Asking<'_> {
        self.asking.fetch_add(1, Ordering::SeqCst);
        Asking(&self.asking)
    }

    /// Does the application itself ask for a pause now?
    pub(crate) fn is_asking(&self) -> bool {
        self.asking.load(Ordering::SeqCst) > 0 || self.status().consent == Some(Action::Pause)
    }

    /// The application itself asks for `action` and stands still until it has happened: says so to
    /// the coordinator. Returns how often the action has happened so far.
    pub fn consent(&self, action: Action) -> u64 {
        let count = {
            let mut status = self.status();
            status.consent = Some(action);
            status.given_up = None;
            status.count(action)
        };
        self.waker.wake();
        count
    }

    /// The application stands in [`Member::consent`] no more.
    pub fn withdraw_consent(&self) {
        self.status().consent = None;
    }

    /// The `action` that the application waits in will not happen.
    pub(crate) fn give_up(&self, action: Action, why: String) {
        {
            let mut status = self.status();
            if status.consent != Some(action) {
                return;
            }
            status.given_up = Some(why);
        }
        self.changed.notify_all();
    }

    /// Waits until `action` has happened more often than `count`, until it is known that it will not, or
    /// until `deadline`.
    pub fn wait_for(&self, action: Action, count: u64, deadline: Instant) -> Waited {
        let mut status = self.status();
        loop {
            if status.count(action) > count {
                return Waited::Done;
            }
            if let Some(why) = status.given_up.take() {
                return Waited::GivenUp(why);
            }
            let now = Instant::now();
            if now >= deadline {
                return Waited::NotYet;
            }
            status = self
                .changed
                .wait_timeout(status, deadline - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Default for Turns {
    fn default() -> Self {
        let (put, take) = crossbeam_channel::bounded(1);
        let _first = put.try_send(());
        Self(put, take)
    }
}

impl Status {
    fn count(&self, action: Action) -> u64 {
        match action {
            Action::Pause => self.pauses,
            Action::Resume => self.resumes,
        }
    }
}
