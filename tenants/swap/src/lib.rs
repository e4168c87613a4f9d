//! Swaps two tenants: pauses one and resumes the other, simultaneously if both have memory to move. Each is moved whole or by
//! tag, as its coordinator's scope says.
//!
//! A swap is two transactions, a pause and a resume, each with its own decision. One coordinator holds the locks of both tenants,
//! taken in the order of their names. The leaving tenant has its point of no return at its first stage. Before that, all its
//! processes have prepared, and the other tenant was found to fit into the free and the leaving memory. The resume of the coming
//! tenant can be undone until its gates open. After an undo the pause is finished, and the first tenant is resumed in a third
//! transaction. If that fails too, both are paused with all contents. If the coordinator dies, both end paused: a process that
//! was ordered to release finishes, and a coming one is undone.

#![forbid(unsafe_code)]

mod exchange;
mod overlap;
mod wants;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;
use sublet_coordinator::{
    Coordinator, Event, Held, MemberFailure, Options, Outcome, Session, Step, Stop, Tries, Trouble,
    attempt, refuse_standing, short_devices,
};
use sublet_protocol::identity::TenantName;
use sublet_protocol::wire::{Action, DeviceDelta, FailureKind, Phase};
use sublet_protocol::{run_dir::pause_thread, scope::Scope, time::micros};

use exchange::{Exchange, totals};
use overlap::exchange;
use wants::{needs_of_each, resident_bytes, wanted_of};

/// The time for which the first tenant's second resume waits for memory that the other tenant still holds.
const KEPT_ROOM_WAIT: Duration = Duration::from_secs(2);
/// The time between two tries to get that memory.
const KEPT_ROOM_LOOK: Duration = Duration::from_millis(200);

/// Returns the reason why a tenant cannot be swapped with itself.
pub fn swap_with_itself(tenant: &TenantName) -> String {
    format!(
        "tenant '{tenant}' cannot be swapped with itself: its processes are in one pause or resume at a time; pause and \
         resume its tags one after the other"
    )
}

/// Both halves of a swap.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Swap {
    /// The outcome for the tenant that released its memory.
    pub paused: Outcome,
    /// The outcome for the tenant that got the memory.
    pub resumed: Outcome,
    /// From the first message to the last answer of both, in microseconds.
    pub wall_us: u64,
}

/// Pauses all processes of `from` and resumes all of `to`, under the locks of both. Blocks for a bounded time.
///
/// One stage moves `window_bytes` of a device. The device holds that much more than the larger of the two tenants. If both
/// tenants and a window have room on it, it holds both. None: the usual window, which suits tenants of many gigabytes.
///
/// # Errors
/// [`Trouble`], which has the state of both tenants.
pub fn swap(
    from: &mut Coordinator,
    to: &mut Coordinator,
    window_bytes: Option<u64>,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Swap, Trouble> {
    let started = Instant::now();
    // The tenant must have a live process.
    let dir = to.dir()?;
    let dead = dir.remove_stale()?;
    if dir.members()?.is_empty() {
        return Err(Trouble::NoProcess { tenant: to.tenant().clone(), dead });
    }
    let (from, to) = lock_both(from, to)?;
    let (moved, notes) = attempt(&[&from, &to], progress, |tries, progress| {
        move_both((&from, &to), window_bytes, tries, started, progress)
    })?;
    let (mut paused, resumed) = match moved {
        Moved::Both { paused, resumed } => (paused, resumed),
        Moved::Neither { left } => one_after_the_other(&from, &to, left, progress)?,
    };
    paused.note(notes);
    Ok(Swap { paused, resumed, wall_us: micros(started.elapsed()) })
}

/// The outcome of one try.
enum Moved {
    Both {
        paused: Outcome,
        resumed: Outcome,
    },
    /// The contexts of the second tenant do not fit next to the first. `left` is the part of the first that would leave.
    Neither {
        left: Scope,
    },
}

/// Moves both tenants at the same time, if both have memory to move.
fn move_both(
    (from, to): (&Held<'_>, &Held<'_>),
    window_bytes: Option<u64>,
    tries: &Tries,
    started: Instant,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Moved, Trouble> {
    let shared = RefCell::new(progress);
    let tell = |event: Event<'_>| (*shared.borrow_mut())(event);
    let (mut tell_from, mut tell_to, mut tell_after) = (tell, tell, tell);
    let mut out = Session::open(from, from.coordinator.options(), Action::Pause, &mut tell_from)?;
    // If the resume of the second failed, the undo would make the first run.
    if !out.members.is_empty() {
        refuse_standing(&out.cast)?;
    }
    let mut back = Session::open(to, to.coordinator.options(), Action::Resume, &mut tell_to)?;
    out.check_contexts()?;
    if out.members.is_empty() || back.members.is_empty() {
        let paused = from.finish(out, tries)?;
        return Ok(Moved::Both { paused, resumed: to.finish(back, tries)? });
    }
    let left = out.round.resident_part(&out.cast.peers, &out.members);
    match back.bring_contexts_back() {
        Err(error) if error.missing_device_bytes().is_some() => {
            return Ok(Moved::Neither { left });
        }
        brought => brought?,
    }
    Pair { from, to, window_bytes, out, back, left, started }.change_places(tries, &mut tell_after)
}

/// Moves the first tenant, then the second, because the contexts of both do not fit together. `left` is the part of the first
/// that leaves.
fn one_after_the_other(
    from: &Held<'_>,
    to: &Held<'_>,
    left: Scope,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<(Outcome, Outcome), Trouble> {
    let paused = from.act(Action::Pause, progress)?;
    match to.act(Action::Resume, progress) {
        Ok(resumed) => Ok((paused, resumed)),
        Err(source) => {
            let losses = paused.into_losses();
            Err(Stranded { left, losses, source }.go_back(from, to, progress))
        }
    }
}

/// Takes both locks in the order of the names, so two swaps in opposite directions cannot deadlock.
fn lock_both<'a>(
    from: &'a Coordinator,
    to: &'a Coordinator,
) -> Result<(Held<'a>, Held<'a>), Trouble> {
    let hold_from = || from.hold(Action::Pause);
    let hold_to = || to.hold(Action::Resume);
    if from.tenant().as_str() <= to.tenant().as_str() {
        let from = hold_from()?;
        Ok((from, hold_to()?))
    } else {
        let to = hold_to()?;
        Ok((hold_from()?, to))
    }
}

/// Two tenants in a swap, both of which have memory to move.
struct Pair<'h> {
    from: &'h Held<'h>,
    to: &'h Held<'h>,
    window_bytes: Option<u64>,
    out: Session<'h>,
    back: Session<'h>,
    /// The part of the first that leaves.
    left: Scope,
    started: Instant,
}

impl Pair<'_> {
    /// Moves both simultaneously. The contexts of the second are restored already.
    fn change_places(
        mut self,
        tries: &Tries,
        tell_after: &mut dyn FnMut(Event<'_>),
    ) -> Result<Moved, Trouble> {
        self.out.round.overlap();
        self.back.round.overlap();
        let plan = match self.prepare(tries) {
            Ok(plan) => plan,
            Err(error) => {
                self.back.take_contexts_again();
                return Err(error);
            }
        };

        // The point of no return of the first.
        let Self { from, to, mut out, mut back, left, started, .. } = self;
        out.report.window_bytes = Some(plan.window_bytes);
        back.report.window_bytes = out.report.window_bytes;
        let hindrance = exchange(&mut out, &mut back, plan, started);
        out.account(started);
        let came = match hindrance {
            Some(stop) => Err(stop),
            None => back.take_all(tries),
        };
        if let Err(stop) = came {
            let source = to.coordinator.with_holders(back.undo(stop), None);
            let stranded = Stranded { left, losses: out.report.losses, source };
            // As long as this session leads a process that has not finished its part, that process obeys no other.
            drop(out.cast);
            let error = stranded.go_back(from, to, tell_after);
            if !matches!(error, Trouble::NotBack { .. }) {
                back.take_contexts_again();
            }
            return Err(error);
        }
        back.commit();
        // The contexts of the first are removed after the second runs.
        out.take_contexts(started);
        back.account(started);
        Ok(Moved::Both { paused: out.into_outcome(), resumed: back.into_outcome() })
    }

    /// Prepares all processes of the first tenant, if the second fits into the free and the leaving memory.
    fn prepare(&mut self, tries: &Tries) -> Result<Exchange, Trouble> {
        self.refuse_wanted()?;
        let needed = needs_of_each(&mut self.back).map_err(|failures| self.refused(failures))?;
        let needs: Vec<_> = needed.iter().flat_map(|needed| needed.devices.clone()).collect();
        if !short_devices(&needs).is_empty() {
            let held = resident_bytes(&mut self.out);
            self.check_room(&needs, &held)?;
        }
        // From here on processes of the first are stopped.
        if let Err(stop) = self.out.prepare(tries) {
            return Err(self.out.undo(stop));
        }
        let gives = last_said(&self.out);
        if let Err(error) = self.look_again(&needs, &totals(gives.iter().flatten())) {
            let undone = self.out.undo(Stop::Failed(error.failures().to_vec()));
            return Err(if undone.left_unchanged() { error } else { undone });
        }
        Ok(Exchange::new(self.window_bytes, &gives, &needed))
    }

    /// Refuses if the second tenant needs memory of the first, which it can get only while the first runs.
    fn refuse_wanted(&mut self) -> Result<(), Trouble> {
        if *self.out.round.scope() != Scope::Whole {
            return Ok(());
        }
        let wanted = wanted_of(&mut self.back, self.from.dir.tenant());
        match wanted.unwrap_or_else(|failures| failures) {
            none if none.is_empty() => Ok(()),
            wanted => Err(self.refused(wanted)),
        }
    }

    /// Checks once more before the first tenant's point of no return, when the bytes that each of its processes gives are known.
    fn look_again(
        &mut self,
        needs: &[DeviceDelta],
        gives: &BTreeMap<String, u64>,
    ) -> Result<(), Trouble> {
        self.check_room(needs, gives)?;
        self.back.check_lock()?;
        let alive = self.back.check_alive(Step::Phase(Phase::Restore));
        alive.map_err(|dead| self.refused(dead))
    }

    /// Returns the error that the second tenant cannot be resumed, and nothing was changed.
    fn refused(&self, failures: Vec<MemberFailure>) -> Trouble {
        let runs = self.back.cast.peers.runs(self.back.members[0]);
        Trouble::refused(self.back.cast.tenant(), (Action::Resume, runs), failures)
    }

    /// Refuses if, on a device, the second tenant does not fit into the free memory and the memory of the first.
    fn check_room(
        &self,
        needs: &[DeviceDelta],
        gives: &BTreeMap<String, u64>,
    ) -> Result<(), Trouble> {
        let with_room = |need: &DeviceDelta| {
            let given = gives.get(&need.uuid).copied().unwrap_or(0);
            DeviceDelta { free_bytes: need.free_bytes.saturating_add(given), ..need.clone() }
        };
        let with_room: Vec<_> = needs.iter().map(with_room).collect();
        let short = short_devices(&with_room);
        let Some(shortage) = short.first() else { return Ok(()) };
        let kind = FailureKind::DoesNotFit { missing_bytes: shortage.missing_bytes() };
        let from = self.from.coordinator;
        let message = format!(
            "its tenant does not fit, not even without {}",
            from.options().scope.subject(from.tenant())
        );
        let who = self.back.cast.peers.who(self.back.members[0]);
        let step = Step::Phase(Phase::Restore);
        let mut error = self.refused(vec![MemberFailure::new(who, step, kind, message)]);
        if let Trouble::Refused { shortages, .. } = &mut error {
            *shortages = short;
        }
        Err(self.to.coordinator.with_holders(error, Some((from.tenant(), gives))))
    }
}

/// Returns the devices of each member of a session by its last answer, in the order of the members.
fn last_said(session: &Session<'_>) -> Vec<Vec<DeviceDelta>> {
    let said = session.report.phases.last().map_or(&[][..], |phase| &phase.members);
    let of = |index: &usize| {
        let who = session.cast.peers.who(*index);
        let found = said.iter().find(|member| member.who == who);
        found.map(|member| member.report.devices.clone()).unwrap_or_default()
    };
    session.members.iter().map(of).collect()
}

/// A first tenant that was paused for a second one whose resume failed.
struct Stranded {
    /// The part of it that is paused.
    left: Scope,
    losses: Vec<MemberFailure>,
    /// The reason why the second was not resumed.
    source: Trouble,
}

impl Stranded {
    /// Resumes the first tenant. If the second still holds memory that this needs, because its undo was incomplete, the undo is
    /// repeated for a moment.
    fn go_back(
        self,
        from: &Held<'_>,
        to: &Held<'_>,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Trouble {
        let Self { left, mut losses, source } = self;
        // This cannot be called off. Its steps, greetings too, have at least the time of any undo.
        let Options { timeout, finish_timeout, .. } = *from.coordinator.options();
        let options = Options {
            timeout: timeout.map(|timeout| timeout.max(finish_timeout)),
            interrupt: None,
            look_first: false,
            scope: left.clone(),
            ..from.coordinator.options().clone()
        };
        let until = Instant::now() + KEPT_ROOM_WAIT;
        let resumed = loop {
            let session = Session::open(from, &options, Action::Resume, progress);
            let resumed = session.and_then(|session| session.run(&Tries::default()));
            let is_short =
                |error: &Trouble| error.missing_device_bytes().is_some() && error.left_unchanged();
            if !resumed.as_ref().is_err_and(is_short) || Instant::now() >= until {
                break resumed;
            }
            // Opening the session finishes an incomplete undo.
            let quiet =
                Options { interrupt: None, timeout: None, ..to.coordinator.options().clone() };
            drop(Session::open(to, &quiet, Action::Resume, progress).map(drop));
            pause_thread(KEPT_ROOM_LOOK);
        };
        let (tenant, source) = (from.coordinator.tenant().clone(), Box::new(source));
        match resumed {
            Ok(resumed) => {
                losses.extend(resumed.into_losses());
                Trouble::WentBack { tenant, left, losses, source }
            }
            Err(error) => {
                let resume = Box::new(from.coordinator.with_holders(error, None));
                Trouble::NotBack { tenant, left, losses, resume, source }
            }
        }
    }
}
