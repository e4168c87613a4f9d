//! The possible events of a search, and their effects.

use std::collections::{BTreeMap, VecDeque};

use super::member::{At, Member};
use super::{Coordinator, Life, Line, State};
use crate::rounds::Rounds;

/// The limits on the events of a search.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Setting {
    pub(in super::super) members: usize,
    pub(in super::super) coordinators: usize,
    /// The number of coordinators that may die.
    pub(in super::super) deaths: u8,
    /// May the lock's file be removed, so that two coordinators lead at a time?
    pub(in super::super) lock_goes: bool,
    /// May coordinators call their rounds off?
    pub(in super::super) calls_off: bool,
    /// May coordinators be silent for so long that members close the connection?
    pub(in super::super) stands_still: bool,
    /// The number of times that a member may begin to pause and resume alone.
    pub(in super::super) own: u8,
    /// The number of times that a coordinator may repeat an order.
    pub(in super::super) repeats: u8,
    /// The number of times that a member may be stopped for longer than others wait for it.
    pub(in super::super) stops: u8,
}

/// An event that can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Event {
    LockGoes,
    Starts(usize),
    /// A coordinator sends its order to a member.
    Sends(usize, usize),
    Repeats(usize, usize),
    CallsOff(usize),
    /// A coordinator goes on after all answers.
    GoesOn(usize),
    Dies(usize),
    /// A member reads what a coordinator has sent.
    Reads(usize, usize),
    SeesItsEnd(usize, usize),
    /// A member closes the connection of a coordinator that was silent for too long.
    HangsUpOn(usize, usize),
    Asks(usize, usize),
    Decides(usize),
    ActsAlone(usize),
    Stops(usize),
    GoesOnAfterStop(usize),
}

impl Setting {
    pub(in super::super) fn start(&self) -> State {
        let member = Member {
            rounds: Rounds::default(),
            at: At::Rest,
            settling: None,
            asks_to_settle: None,
            ends: BTreeMap::new(),
            is_stopped: false,
            was_passed_by: false,
        };
        let line = Line { unread: VecDeque::new(), is_closed: false, answer: None };
        let coordinator = Coordinator {
            life: Life::Waits,
            lines: vec![line; self.members],
            takes: vec![false; self.members],
        };
        State {
            members: vec![member; self.members],
            coordinators: vec![coordinator; self.coordinators],
            own: 0,
            repeats: 0,
            stops: 0,
            deaths: 0,
            lock_is_gone: false,
            may_part: false,
            own_was_refused: false,
            own_was_taken: false,
            asked: None,
        }
    }

    /// All possible events.
    pub(in super::super) fn events(&self, state: &State) -> Vec<Event> {
        let (members, coordinators) = (0..self.members, 0..self.coordinators);
        let mut events = Vec::new();
        if self.lock_goes && !state.lock_is_gone {
            events.push(Event::LockGoes);
        }
        for c in coordinators {
            events.extend([Event::Starts(c), Event::GoesOn(c), Event::Dies(c), Event::CallsOff(c)]);
            for m in members.clone() {
                events.extend([
                    Event::Sends(c, m),
                    Event::Repeats(c, m),
                    Event::Reads(m, c),
                    Event::SeesItsEnd(m, c),
                    Event::HangsUpOn(m, c),
                ]);
            }
        }
        for m in members.clone() {
            events.extend([
                Event::Decides(m),
                Event::ActsAlone(m),
                Event::Stops(m),
                Event::GoesOnAfterStop(m),
            ]);
            events.extend(members.clone().map(|other| Event::Asks(m, other)));
        }
        events.retain(|event| self.after(state, *event).is_some());
        events
    }

    /// The state after `event`; none if it cannot happen.
    pub(in super::super) fn after(&self, state: &State, event: Event) -> Option<State> {
        let mut next = state.clone();
        let happens = match event {
            Event::LockGoes => next.lock_goes(),
            Event::Starts(c) => next.starts(c),
            Event::Sends(c, m) => next.sends(c, m),
            Event::Repeats(c, m) => state.repeats < self.repeats && next.repeats(c, m),
            Event::CallsOff(c) => self.calls_off && next.calls_off(c),
            Event::GoesOn(c) => next.goes_on(c),
            Event::Dies(c) => state.deaths < self.deaths && next.dies(c),
            Event::Reads(m, c) => next.reads(m, c),
            Event::SeesItsEnd(m, c) => next.sees_its_end(m, c),
            Event::HangsUpOn(m, c) => self.stands_still && next.hangs_up_on(m, c),
            Event::Asks(m, other) => next.asks(m, other),
            Event::Decides(m) => next.decides(m),
            Event::ActsAlone(m) => state.own < self.own && next.acts_alone(m),
            Event::Stops(m) => state.stops < self.stops && next.stops(m),
            Event::GoesOnAfterStop(m) => next.goes_on_after_stop(m),
        };
        happens.then_some(next)
    }
}
