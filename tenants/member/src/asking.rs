//! Requests of the application itself: a pause or resume of its own process, by a thread that waits for its turn, or a call
//! that waits until all processes have made it.
//!
//! Lock order: `consent` is a leaf.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmm_pool::sync::lock;

use super::signals::Waker;
use sublet_protocol::wire::Action;

/// The result of [`Asking::wait_for`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The action has happened.
    Done,
    /// The action failed for all processes, for this reason.
    GivenUp(String),
    /// Neither has happened so far.
    NotYet,
}

/// The requests of the application: see the head of this module.
#[derive(Debug)]
pub struct Asking {
    /// The number of threads of this process that request a pause or resume now.
    threads: AtomicUsize,
    /// The turn of a thread that pauses or resumes this process alone. It is one token, taken and returned, and works as a lock
    /// with a deadline.
    turns: (Sender<()>, Receiver<()>),
    consent: Mutex<Consent>,
    changed: Condvar,
    waker: Waker,
}

/// The pause or resume that the application has requested and waits for, and those that have happened.
#[derive(Debug, Default)]
struct Consent {
    to: Option<Action>,
    /// The reason why the action that the application waits for will not happen.
    given_up: Option<String>,
    /// The numbers of pauses and of resumes of the whole process.
    done: BTreeMap<Action, u64>,
}

impl Consent {
    fn count(&self, action: Action) -> u64 {
        self.done.get(&action).copied().unwrap_or(0)
    }
}

/// A guard: while it lives, this process itself requests a pause.
#[derive(Debug)]
pub struct AskingThread<'a>(&'a AtomicUsize);

impl Drop for AskingThread<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The turn of one thread; dropping it passes it on.
#[derive(Debug)]
pub struct Turn<'a>(&'a Sender<()>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // There is room, since this is the only token.
        let _put_back = self.0.try_send(());
    }
}

impl Asking {
    pub(super) fn new(waker: Waker) -> Self {
        let (threads, turns) = (AtomicUsize::new(0), crossbeam_channel::bounded(1));
        let _first = turns.0.try_send(());
        Self { threads, turns, consent: Mutex::default(), changed: Condvar::new(), waker }
    }

    /// Waits for this thread's turn to pause or resume the process alone; none at `deadline`. In that case later steps find
    /// that another thread works on the process.
    pub fn take_turn(&self, deadline: Instant) -> Option<Turn<'_>> {
        self.turns.1.recv_deadline(deadline).ok().map(|()| Turn(&self.turns.0))
    }

    /// Records that the calling thread requests a pause of memory of this process. The thread guarantees that nothing is
    /// launched meanwhile.
    pub fn begin(&self) -> AskingThread<'_> {
        self.threads.fetch_add(1, Ordering::SeqCst);
        AskingThread(&self.threads)
    }

    /// Does the application itself request a pause now?
    pub(crate) fn is_for_pause(&self) -> bool {
        self.threads.load(Ordering::SeqCst) > 0 || self.consent_to() == Some(Action::Pause)
    }

    /// Records that the application itself requests `action` and waits until it has happened, and tells the coordinator so.
    /// Returns how often the action has happened so far.
    pub fn begin_consent(&self, action: Action) -> u64 {
        let count = {
            let mut consent = lock(&self.consent);
            consent.to = Some(action);
            consent.given_up = None;
            consent.count(action)
        };
        self.waker.wake();
        count
    }

    /// Records that the application no longer waits in [`Asking::begin_consent`].
    pub fn end_consent(&self) {
        lock(&self.consent).to = None;
    }

    /// The action that the application waits for.
    pub(super) fn consent_to(&self) -> Option<Action> {
        lock(&self.consent).to
    }

    /// Records that the `action` that the application waits for will not happen.
    pub(super) fn give_up(&self, action: Action, why: String) {
        {
            let mut consent = lock(&self.consent);
            if consent.to != Some(action) {
                return;
            }
            consent.given_up = Some(why);
        }
        self.changed.notify_all();
    }

    /// Records a pause or resume of the whole process.
    pub(super) fn note_done(&self, action: Action) {
        *lock(&self.consent).done.entry(action).or_default() += 1;
        self.changed.notify_all();
    }

    /// The number of pauses, or of resumes, so far.
    pub(super) fn done(&self, action: Action) -> u64 {
        lock(&self.consent).count(action)
    }

    /// Waits until `action` has happened more often than `count`, until it is known that it will not, or
    /// until `deadline`.
    pub fn wait_for(&self, action: Action, count: u64, deadline: Instant) -> Waited {
        let mut consent = lock(&self.consent);
        loop {
            if consent.count(action) > count {
                return Waited::Done;
            }
            if let Some(why) = consent.given_up.take() {
                return Waited::GivenUp(why);
            }
            let now = Instant::now();
            if now >= deadline {
                return Waited::NotYet;
            }
            let waited = self.changed.wait_timeout(consent, deadline - now);
            consent = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
