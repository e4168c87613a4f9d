//! The search: every sequence of events after coordinators end.

use stateright::{Checker, Model, Property};

use super::model::{Event, Setting, State};

impl Model for Setting {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        vec![self.start()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Event>) {
        actions.extend(self.events(state));
    }

    fn next_state(&self, state: &State, event: Event) -> Option<State> {
        self.after(state, event)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("a round ends the same way in all", |_, state: &State| {
                state.is_agreed() || state.may_part
            }),
            Property::always("who leads a round is obeyed, and nobody else", |_, state: &State| {
                state.obeys_leaders_alone()
            }),
            Property::always("nobody stays half-way", |setting: &Setting, state: &State| {
                state.all_rest() || !setting.events(state).is_empty()
            }),
            Property::always("one that is in nobody's way acts alone", |_, state: &State| {
                !state.own_was_refused
            }),
            Property::sometimes("all that ask are told nothing", |_, state: &State| {
                state.asked.is_some()
            }),
            Property::sometimes("one has ended, and another asks", |_, state: &State| {
                state.is_one_to_ask()
            }),
            Property::sometimes("one acts alone", |setting: &Setting, state: &State| {
                setting.own == 0 || state.own_was_taken
            }),
            Property::sometimes(
                "one that is silent parts them",
                |setting: &Setting, state: &State| setting.stops == 0 || !state.is_agreed(),
            ),
        ]
    }
}

const QUIET: Setting = Setting {
    members: 2,
    coordinators: 1,
    deaths: 1,
    lock_goes: false,
    calls_off: true,
    stands_still: true,
    own: 0,
    repeats: 0,
    stops: 0,
};

fn holds_always(setting: Setting) {
    let checker = setting.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() > 50, "{}", checker.unique_state_count());
}

#[test]
fn members_whose_coordinator_ends_go_one_way() {
    holds_always(QUIET);
    holds_always(Setting { members: 3, stands_still: false, ..QUIET });
}

#[test]
fn one_that_acts_alone_meanwhile_forgets_nothing_that_others_ask() {
    holds_always(Setting { own: 1, ..QUIET });
    holds_always(Setting { members: 3, own: 1, calls_off: false, stands_still: false, ..QUIET });
}

#[test]
fn a_coordinator_that_follows_finds_all_settled() {
    holds_always(Setting { coordinators: 2, stands_still: false, ..QUIET });
}

#[test]
fn two_that_lead_at_a_time_are_not_both_obeyed() {
    holds_always(Setting {
        coordinators: 2,
        lock_goes: true,
        calls_off: false,
        stands_still: false,
        ..QUIET
    });
}

#[test]
fn orders_that_come_twice_change_nothing() {
    holds_always(Setting { repeats: 2, own: 1, ..QUIET });
}

#[test]
fn beside_a_process_that_is_stopped_all_go_one_way_unless_it_alone_was_told_to_commit() {
    holds_always(Setting { stands_still: false, stops: 1, ..QUIET });
    holds_always(Setting { members: 3, stands_still: false, stops: 1, ..QUIET });
}
