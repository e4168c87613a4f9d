//! Features that stand around a pause or resume: for each moment the list of those that it uses, in their order.
//!
//! | moment | features |
//! | --- | --- |
//! | before anything moves | [`BEFORE`]: consent, lending, room on the devices |
//! | behind shut gates | [`BEHIND_GATES`]: lending |
//! | on a refusal | [`ON_REFUSAL`]: newcomers, spilling, names, lending |
//! | around it | a deep pause refuses what would not come to its end, and takes the contexts at the end (`freezing.rs`) |

use std::time::Instant;

use super::lending;
use super::needs::refuse_shortage;
use super::report::Event;
use super::session::{Session, Stop};
use super::spilling::Room;
use super::{Held, Trouble};
use sublet_protocol::wire::Action;

/// A feature at one moment: its name, whether the leg uses it, and what it does.
type Guard =
    (&'static str, fn(&Session<'_>) -> bool, fn(&mut Session<'_>, &Tries) -> Result<(), Stop>);

/// All can still be undone, and nobody is stopped yet.
pub(super) const BEFORE: [Guard; 3] = [
    ("consent", |leg| leg.cast.options.consent.is_some(), |leg, _| leg.await_consent()),
    ("lending", lending::is_used, |leg, tries| leg.loans().wait_while_all_run(tries)),
    (
        "room on the devices",
        |leg| leg.round.action() == Action::Resume && leg.cast.options.look_first,
        |leg, _| Ok(refuse_shortage(&mut leg.cast, leg.round.scope(), &leg.members)?),
    ),
];

/// The gates of a pause are shut, and nothing is lent any more.
pub(super) const BEHIND_GATES: [Guard; 1] =
    [("lending", lending::is_used, |leg, tries| leg.loans().wait_behind_gates(tries))];

/// Has the features of one moment do their part, unless all is called off.
pub(super) fn ask(guards: &[Guard], leg: &mut Session<'_>, tries: &Tries) -> Result<(), Stop> {
    let used = guards.iter().filter(|(_, is_used, _)| is_used(leg)).collect::<Vec<_>>();
    used.into_iter().try_for_each(|(_, _, act)| act(leg, tries))?;
    if leg.cast.options.is_called_off() { Err(Stop::CalledOff) } else { Ok(()) }
}

/// The tries of one pause or resume, and what was done for them.
#[derive(Debug)]
pub(super) struct Tries {
    pub(super) began: Instant,
    /// The tries that ended since processes had joined, and those that ended since memory was lent.
    joined: u32,
    pub(super) lent: u32,
    /// Were nameless processes waited for?
    pub(super) named: bool,
    pub(super) room: Room,
}

impl Default for Tries {
    fn default() -> Self {
        Self { began: Instant::now(), joined: 0, lent: 0, named: false, room: Room::default() }
    }
}

/// A leg that has come to nothing, and why. All run again.
pub(super) struct Refused<'r> {
    pub(super) held: &'r Held<'r>,
    pub(super) error: &'r Trouble,
    pub(super) progress: &'r mut dyn FnMut(Event<'_>),
}

/// A feature that may help such a leg: true when it is worth one more try.
type Help = fn(&mut Tries, &mut Refused<'_>) -> bool;

/// The first that helps ends it.
pub(super) const ON_REFUSAL: [(&str, Help); 4] = [
    ("newcomers", |tries, refused| {
        tries.joined += 1;
        matches!(refused.error, Trouble::Joined { .. }) && tries.joined < JOINED_TRIES_MAX
    }),
    ("spilling", |tries, refused| {
        refused.held.coordinator.makes_room(&mut tries.room, refused.error, refused.progress)
    }),
    ("names", lending::waits_for_names),
    ("lending", lending::goes_on),
];

/// The number of times that a pause begins, since processes have joined its tenant meanwhile.
const JOINED_TRIES_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_features_is_behaviour() {
        let names = |guards: &[Guard]| guards.iter().map(|guard| guard.0).collect::<Vec<_>>();
        assert_eq!(names(&BEFORE), ["consent", "lending", "room on the devices"]);
        assert_eq!(names(&BEHIND_GATES), ["lending"]);
        assert_eq!(ON_REFUSAL.map(|help| help.0), ["newcomers", "spilling", "names", "lending"]);
    }
}
