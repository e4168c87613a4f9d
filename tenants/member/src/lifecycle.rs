//! The state of a process, the events that change it by [`state::next`], and the threads that wait for a change.
//!
//! Lock order: `stand` is a leaf.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmm_pool::sync::lock;

use super::failures::{PID, faulted, wrong_state};
use super::signals::Waker;
use sublet_protocol::state::{self, Event, InvalidTransition, MemberState};
use sublet_protocol::wire::Failure;
use sublet_protocol::{identity::TenantName, scope::TagNames};

/// The state of a process: see the head of this module.
#[derive(Debug)]
pub struct Lifecycle {
    tenant: TenantName,
    waker: Waker,
    stand: Mutex<Stand>,
    changed: Condvar,
}

#[derive(Debug)]
struct Stand {
    state: MemberState,
    changes: u64,
    changed_at: Instant,
    /// The tags without which this process is stopped; none if it runs, or is paused as a whole.
    without: Option<TagNames>,
}

impl Lifecycle {
    /// Makes the state of a process that runs.
    pub(super) fn new(tenant: TenantName, waker: Waker) -> Self {
        let (state, changed_at) = (MemberState::Active, Instant::now());
        let stand = Mutex::new(Stand { state, changes: 0, changed_at, without: None });
        Self { tenant, waker, stand, changed: Condvar::new() }
    }

    /// The state now.
    pub fn state(&self) -> MemberState {
        lock(&self.stand).state
    }

    /// The state now, and the time since the last change.
    pub fn since(&self) -> (MemberState, Duration) {
        let stand = lock(&self.stand);
        (stand.state, stand.changed_at.elapsed())
    }

    /// The number of changes so far: each pause and resume, whole or by tag, makes two or more.
    pub fn changes(&self) -> u64 {
        lock(&self.stand).changes
    }

    /// Has a whole pause released all memory that can be released?
    pub fn is_paused_as_a_whole(&self) -> bool {
        let stand = lock(&self.stand);
        stand.state.is_away() && stand.without.is_none()
    }

    /// The tags without which the process is stopped, or was when the pause under way began.
    pub(crate) fn stands_without(&self) -> Option<TagNames> {
        lock(&self.stand).without.clone()
    }

    /// Sets the result of [`Lifecycle::stands_without`] from the next change on.
    pub(super) fn stand_without(&self, tags: Option<TagNames>) {
        lock(&self.stand).without = tags;
    }

    /// Refuses a step that is for a process in another state.
    pub(super) fn expect(&self, wanted: MemberState) -> Result<(), Failure> {
        let state = self.state();
        if state == wanted {
            return Ok(());
        }
        if state == MemberState::Faulted {
            return Err(faulted());
        }
        // An earlier failure left the process in another state than its tenant. No contents are lost. The next
        // `sublet pause` or `sublet resume` repairs the state.
        Err(wrong_state(format!("process {PID} is {state:?}, and this step needs it {wanted:?}")))
    }

    /// Changes the state by `event`, and wakes all waiting threads.
    pub(super) fn transition(&self, event: Event) -> Result<(), InvalidTransition> {
        let (from, to) = {
            let mut stand = lock(&self.stand);
            let from = stand.state;
            stand.state = state::next(from, event)?;
            stand.changes += 1;
            stand.changed_at = Instant::now();
            (from, stand.state)
        };
        self.changed.notify_all();
        self.waker.wake();
        tracing::info!(tenant = %self.tenant, ?from, ?to, "state");
        Ok(())
    }

    /// Waits while the process runs, for at most `rest`.
    pub fn wait_while_active(&self, rest: Duration) {
        let is_active = |stand: &mut Stand| stand.state == MemberState::Active;
        let waited = self.changed.wait_timeout_while(lock(&self.stand), rest, is_active);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for `rest`, or until the process changes its state.
    pub fn rest(&self, rest: Duration) {
        let woken = self.changed.wait_timeout(lock(&self.stand), rest);
        drop(woken.unwrap_or_else(PoisonError::into_inner));
    }
}
