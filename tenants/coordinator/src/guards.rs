//! Features that act around a pause or resume. For each moment there is a list of the features that it uses, in their order.
//!
//! | moment | features |
//! | --- | --- |
//! | before anything moves | [`BEFORE`]: consent, lending, room on the devices |
//! | behind closed gates | [`BEHIND_GATES`]: lending |
//! | on a refusal | [`ON_REFUSAL`]: newcomers, spilling, names, lending |
//! | around it | the way to contexts, if there is one: see [`Contexts`](super::Contexts) |

use std::time::Instant;

use super::coordinator::{Coordinator, Held};
use super::lending::{self, Patience};
use super::needs::refuse_shortage;
use super::options::MakesRoom;
use super::report::{Event, MemberFailure};
use super::session::Session;
use super::trouble::{Stop, Trouble};
use sublet_protocol::host_memory::LimitKind;
use sublet_protocol::run_dir::{NAMES_AGAIN_WITHIN, pause_thread};
use sublet_protocol::wire::{Action, FailureKind};

/// A feature at one moment: its name, whether the leg uses it, and its action.
type Guard =
    (&'static str, fn(&Session<'_>) -> bool, fn(&mut Session<'_>, &Tries) -> Result<(), Stop>);

/// The features that act while everything can still be undone, and no process is stopped yet.
pub(super) const BEFORE: [Guard; 3] = [
    ("consent", |leg| leg.cast.options.consent.is_some(), |leg, _| leg.await_consent()),
    ("lending", lends, |leg, tries| leg.loans().wait_while_all_run(tries.patience)),
    (
        "room on the devices",
        |leg| leg.round.action() == Action::Resume && leg.cast.options.look_first,
        |leg, _| Ok(refuse_shortage(&mut leg.cast, leg.round.scope(), &leg.members)?),
    ),
];

/// The features that act after the gates of a pause are closed, when no memory is lent any more.
pub(super) const BEHIND_GATES: [Guard; 1] =
    [("lending", lends, |leg, tries| leg.loans().wait_behind_gates(tries.patience))];

/// Runs the features of one moment, unless the action is called off.
pub(super) fn ask(guards: &[Guard], leg: &mut Session<'_>, tries: &Tries) -> Result<(), Stop> {
    let used = guards.iter().filter(|(_, is_used, _)| is_used(leg)).collect::<Vec<_>>();
    used.into_iter().try_for_each(|(_, _, act)| act(leg, tries))?;
    if leg.cast.options.is_called_off() { Err(Stop::CalledOff) } else { Ok(()) }
}

/// The tries of one pause or resume, and the remedies that were tried.
#[derive(Debug)]
pub struct Tries {
    patience: Patience,
    /// The number of tries that ended because processes had joined.
    joined: u32,
    /// Did the leg already wait for processes without a socket name?
    named: bool,
    pub(super) room: Option<Box<dyn MakesRoom>>,
}

impl Default for Tries {
    fn default() -> Self {
        let patience = Patience { began: Instant::now(), tries: 0 };
        Self { patience, joined: 0, named: false, room: None }
    }
}

/// A leg that was refused, and the reason. All its processes run again.
pub(super) struct Refused<'r> {
    pub(super) held: &'r Held<'r>,
    pub(super) error: &'r Trouble,
    pub(super) progress: &'r mut dyn FnMut(Event<'_>),
}

/// A feature that may help a refused leg: true if one more try is worthwhile.
type Help = fn(&mut Tries, &mut Refused<'_>) -> bool;

/// The features in their order; the first one that helps ends the search.
pub(super) const ON_REFUSAL: [(&str, Help); 4] = [
    ("newcomers", |tries, refused| {
        tries.joined += 1;
        matches!(refused.error, Trouble::Joined { .. }) && tries.joined < JOINED_TRIES_MAX
    }),
    ("spilling", makes_room),
    ("names", waits_for_names),
    ("lending", waits_for_borrowers),
];

/// The most tries of a pause whose tenant is joined by processes meanwhile.
const JOINED_TRIES_MAX: u32 = 8;

/// Does this leg ask which processes have memory of its members open?
fn lends(leg: &Session<'_>) -> bool {
    let asks = |index: &usize| leg.cast.shares(leg.round.scope(), *index);
    let waits = leg.cast.options.waits_for_borrowers();
    waits && leg.round.action() == Action::Pause && leg.members.iter().any(asks)
}

/// Do other tenants return host memory, if a pause lacks it, so that the same pause may succeed now?
fn makes_room(tries: &mut Tries, refused: &mut Refused<'_>) -> bool {
    let Coordinator { run_dir, tenant, options } = refused.held.coordinator;
    let short = refused.error.host_short().filter(|short| short.kind != LimitKind::Configured);
    // All processes run again, and other tenants may have room to give. Applications that wait in a call of their own were told
    // that it has failed.
    let may_help = refused.error.left_unchanged() && options.consent.is_none();
    let (Some(short), Some(room), true) = (short, options.room, may_help) else { return false };
    tries.room.get_or_insert_with(room).make(run_dir, tenant, options, short, refused.progress)
}

/// Is there time for one more try, if a pause was refused only because other tenants have memory open?
fn waits_for_borrowers(tries: &mut Tries, refused: &mut Refused<'_>) -> bool {
    let (options, error) = (&refused.held.coordinator.options, refused.error);
    let is_lent = |failure: &MemberFailure| failure.failure.kind == FailureKind::Lent;
    let failures = error.failures();
    let is_lent = !failures.is_empty() && failures.iter().all(is_lent) && error.left_unchanged();
    tries.patience.tries += 1;
    is_lent && options.consent.is_none() && Instant::now() < tries.patience.deadline(options)
}

/// Waits once, with no process stopped, until processes that were refused as nameless have names again or had the time to make
/// them, or until the action is called off.
fn waits_for_names(tries: &mut Tries, refused: &mut Refused<'_>) -> bool {
    let Refused { held, error, .. } = refused;
    let options = &held.coordinator.options;
    let is_nameless = |failure: &&MemberFailure| failure.failure.kind == FailureKind::Nameless;
    let nameless: Vec<_> = error.failures().iter().filter(is_nameless).collect();
    if tries.named || nameless.is_empty() || options.consent.is_some() || !error.left_unchanged() {
        return false;
    }
    tries.named = true;
    let deadline = Instant::now() + NAMES_AGAIN_WITHIN;
    let goes_on = || !options.is_called_off() && Instant::now() < deadline;
    while !nameless.iter().all(|failure| held.dir.has_member(failure.who.member)) && goes_on() {
        pause_thread(lending::REST_MAX);
    }
    true
}

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
