//! Two tenants that change places: one is paused, the other is resumed, simultaneously if both have something to move. Each is
//! moved whole or by tag, as its coordinator's scope says.
//!
//! These are two transactions, a pause and a resume, each with its own decision, under one coordinator that holds both
//! tenants' locks, taken in the order of their names. The one that leaves has its point of no return at its first stage: before
//! it, all of it has prepared, and the other was found to fit into what is free and what leaves. The one that comes can be
//! undone until its gates open. Then the pause is finished, and the first is resumed as a third transaction; if that fails too,
//! both are paused with all contents. If the coordinator dies, both end paused: who was told to release finishes, who was to
//! come goes back.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vmm_pool::PinnedBytes;

use super::exchange::{Exchange, totals};
use super::lending::Patience;
use super::needs::{DeviceShortage, short_devices};
use super::overlap::{Side, exchange};
use super::report::{Event, MemberFailure, Outcome, PhaseSummary, Report, Step, Swap, Who};
use super::session::{Plan, Session, Stop};
use super::tries::Tries;
use super::{Coordinator, Depth, Options, Trouble};
use crate::identity::TenantName;
use crate::phase::Manner;
use crate::run_dir::{CoordinatorLock, TenantDir, pause_thread};
use crate::scope::Scope;
use crate::time::micros;
use crate::wire::{Action, DeviceDelta, Failure, FailureKind, Phase};

/// How long a first tenant that is to come back waits for room that the second has kept,
const KEPT_ROOM_WAIT: Duration = Duration::from_secs(2);
/// and how often it looks.
const KEPT_ROOM_LOOK: Duration = Duration::from_millis(200);

/// Why a tenant does not change places with itself.
pub fn swap_with_itself(tenant: &TenantName) -> String {
    format!(
        "tenant '{tenant}' cannot be swapped with itself: its processes are in one pause or resume at a time; pause and \
         resume its tags one after the other"
    )
}

/// A tenant with its lock.
struct Held<'a> {
    coordinator: &'a Coordinator,
    dir: TenantDir,
    lock: CoordinatorLock,
}

/// Pauses `from` and resumes `to`, both of all their processes, under the locks of both. Blocks for a bounded time.
///
/// # Errors
/// [`Trouble`], which says what state both are in.
pub fn swap(
    from: &mut Coordinator,
    to: &mut Coordinator,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Swap, Trouble> {
    let started = Instant::now();
    to.check_alive()?;
    let (from, to) = lock_both(from, to)?;
    let mut tries = Tries::new(&from.coordinator.options);
    loop {
        match overlapped(&from, &to, tries.patience, started, progress) {
            Err(error) => {
                let about = if error.is_about(&to.coordinator.tenant) { &to } else { &from };
                if !tries.again(about.coordinator, &about.dir, &error, progress) {
                    return Err(error);
                }
            }
            Ok(Moving::Both(mut swap)) => {
                if let Outcome::Completed(report) = &mut swap.paused {
                    report.notes.extend(tries.room.notes());
                }
                return Ok(*swap);
            }
            Ok(Moving::OneThatLeaves) => {
                let paused = from.act(Action::Pause, progress)?;
                let resumed = Outcome::AlreadyActive;
                return Ok(Swap { paused, resumed, wall_us: micros(started.elapsed()) });
            }
            // The contexts of both do not fit together.
            Ok(Moving::OneAfterTheOther { left }) => {
                let paused = from.act(Action::Pause, progress)?;
                return match to.act(Action::Resume, progress) {
                    Ok(resumed) => Ok(Swap { paused, resumed, wall_us: micros(started.elapsed()) }),
                    Err(source) => {
                        let paused = match paused {
                            Outcome::Completed(report) => *report,
                            Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => {
                                Report::new(&from.coordinator.tenant, Action::Pause)
                            }
                        };
                        Err(go_back((&from, &to), left, paused, source, progress))
                    }
                };
            }
            // What the first has made since then stays: if it left and the second did not come, the error would not say so.
            Ok(Moving::OneThatComes { stays }) => {
                let paused = if from.coordinator.options.depth == Depth::Contexts {
                    from.act(Action::Pause, progress)?
                } else {
                    Outcome::AlreadyPaused { stays }
                };
                let resumed = to.act(Action::Resume, progress)?;
                return Ok(Swap { paused, resumed, wall_us: micros(started.elapsed()) });
            }
        }
    }
}

/// Which of two tenants has something to move.
enum Moving {
    Both(Box<Swap>),
    OneThatLeaves,
    /// The contexts of the second do not fit next to the first, of which this would leave.
    OneAfterTheOther {
        left: Scope,
    },
    /// When it was greeted, the first had nothing that leaves but what its pause has left.
    OneThatComes {
        stays: Vec<PinnedBytes>,
    },
}

/// Takes both locks in the order of the names: two swaps the opposite way do not wait for each other.
fn lock_both<'a>(
    from: &'a Coordinator,
    to: &'a Coordinator,
) -> Result<(Held<'a>, Held<'a>), Trouble> {
    let hold_from = || from.hold(Action::Pause);
    let hold_to = || to.hold(Action::Resume);
    if from.tenant.as_str() <= to.tenant.as_str() {
        let from = hold_from()?;
        Ok((from, hold_to()?))
    } else {
        let to = hold_to()?;
        Ok((hold_from()?, to))
    }
}

impl Coordinator {
    fn hold(&self, action: Action) -> Result<Held<'_>, Trouble> {
        let dir = self.dir()?;
        let lock = self.lock(&dir, action)?;
        Ok(Held { coordinator: self, dir, lock })
    }
}

impl Held<'_> {
    fn act(&self, action: Action, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, Trouble> {
        self.coordinator.act_holding(&self.dir, &self.lock, action, progress)
    }

    fn open<'s>(
        &'s self,
        options: &'s Options,
        action: Action,
        progress: &'s mut dyn FnMut(Event<'_>),
    ) -> Result<Session<'s>, Trouble> {
        let mut session = Session::open(&self.dir, &self.lock, options, action, progress)?;
        session.recover()?;
        Ok(session)
    }
}

/// Both simultaneously, if both have something to move.
fn overlapped(
    from: &Held<'_>,
    to: &Held<'_>,
    patience: Patience,
    started: Instant,
    progress: &mut dyn FnMut(Event<'_>),
) -> Result<Moving, Trouble> {
    let shared = RefCell::new(progress);
    let tell = |event: Event<'_>| (*shared.borrow_mut())(event);
    let (mut tell_from, mut tell_to, mut tell_after) = (tell, tell, tell);
    let mut leaving = from.open(&from.coordinator.options, Action::Pause, &mut tell_from)?;
    let leavers = leaving.members_for(Action::Pause)?;
    // If the second did not come, going back would have it run.
    if !leavers.is_empty() {
        leaving.refuse_standing()?;
    }
    let mut coming = to.open(&to.coordinator.options, Action::Resume, &mut tell_to)?;
    let comers = coming.members_for(Action::Resume)?;
    if leavers.is_empty() {
        return Ok(Moving::OneThatComes { stays: leaving.stays() });
    }
    if comers.is_empty() {
        return Ok(Moving::OneThatLeaves);
    }
    if leaving.is_deep() {
        leaving.refuse_shallow()?;
    }
    let left = leaving.resident_part(&leavers);
    let thawed = match coming.thaw_for(Action::Resume, &comers) {
        Err(error) if error.missing_device_bytes().is_some() => {
            return Ok(Moving::OneAfterTheOther { left });
        }
        thawed => thawed?,
    };
    let moved = change_places(
        (from, to),
        (&mut leaving, leavers, left, patience),
        (&mut coming, comers, thawed.clone()),
        started,
        &mut tell_after,
    );
    let has_not_come = |error: &Trouble| !matches!(error, Trouble::NotBack { .. });
    if moved.as_ref().is_err_and(has_not_come) {
        coming.freeze_again(thawed);
    }
    moved
}

/// Both have something to move, and all that does is asked.
fn change_places<'s>(
    (from, to): (&Held<'_>, &Held<'_>),
    (leaving, leavers, left, patience): (&mut Session<'s>, Vec<usize>, Scope, Patience),
    (coming, comers, thawed): (&mut Session<'s>, Vec<usize>, Option<PhaseSummary>),
    started: Instant,
    tell_after: &mut dyn FnMut(Event<'_>),
) -> Result<Moving, Trouble> {
    let runs = coming.runs(comers[0]);
    let target = Target { from, to, who: coming.peers.list[comers[0]].who, runs };
    // What it wants of a tenant that runs on it can have.
    if leaving.scope == Scope::Whole {
        let wanted = coming.wanted_of(&comers, from.dir.tenant());
        let wanted = wanted.map_err(|failures| target.refused(failures))?;
        if !wanted.is_empty() {
            return Err(target.refused(wanted));
        }
    }
    let needed = coming.needs_of_each(&comers).map_err(|failures| target.refused(failures))?;
    let needs: Vec<_> = needed.iter().map(|needed| needed.devices.clone()).collect();
    if !short_devices(needs.iter().flatten()).is_empty() {
        let held = leaving.resident_bytes(&leavers);
        target.check_room(&needs, &held)?;
    }

    // From here on processes of the first are stopped.
    let mut report = leaving.new_report(Action::Pause);
    let plan = Plan::new(Action::Pause, Manner { without_lost: false, by_stages: true });
    if let Err(stop) = leaving.prepare(&plan, &leavers, patience, &mut report) {
        return Err(leaving.roll_back(Action::Pause, &leavers, stop));
    }
    let gives = leaving.last_said(&report, &leavers);
    let checked = target
        .check_room(&needs, &totals(gives.iter().flatten()))
        .and_then(|()| coming.check_lock())
        .and_then(|()| {
            let next = Step::Phase(Phase::RestoreStage);
            coming.check_alive(&comers, next).map_err(|dead| target.refused(dead))
        });
    if let Err(error) = checked {
        let why = Stop::Failed(error.failures().to_vec());
        let undone = leaving.roll_back(Action::Pause, &leavers, why);
        return Err(if undone.left_unchanged() { error } else { undone });
    }

    // The point of no return of the first.
    let stages = Exchange::new(from.coordinator.options.window_bytes, &gives, &needed);
    let mut resumed = coming.new_report(Action::Resume);
    if let Some(thawed) = thawed {
        resumed.add(thawed);
    }
    report.window_bytes = Some(stages.window_bytes());
    resumed.window_bytes = report.window_bytes;
    let mut leaving = Side::new(leaving, leavers, report);
    let mut coming = Side::new(coming, comers, resumed);
    let hindrance = exchange(&mut leaving, &mut coming, stages, started);
    let mut paused = leaving.report;
    paused.wall_us = micros(started.elapsed());
    leaving.session.note_latecomers(&mut paused);
    leaving.session.note_nothing_of_nccl(&mut paused);
    let Side { session: coming, members: comers, report: mut resumed, .. } = coming;
    let came = match hindrance {
        Some(stop) => Err(stop),
        None => coming.come(&comers, &mut resumed),
    };
    if let Err(stop) = came {
        let error = coming.roll_back(Action::Resume, &comers, stop);
        let source = to.coordinator.with_holders(error, None);
        // One that has not finished its part obeys nobody else as long as this leads it.
        leaving.session.peers.list.clear();
        return Err(go_back((from, to), left, paused, source, tell_after));
    }
    // Behind the second, which runs by then.
    if leaving.session.is_deep() {
        leaving.session.freeze_all(&mut paused);
        paused.wall_us = micros(started.elapsed());
    }
    resumed.wall_us = micros(started.elapsed());
    coming.note_latecomers(&mut resumed);
    Ok(Moving::Both(Box::new(Swap {
        paused: Outcome::Completed(Box::new(paused)),
        resumed: Outcome::Completed(Box::new(resumed)),
        wall_us: micros(started.elapsed()),
    })))
}

/// The tenant that is to come, for errors before anything was changed.
struct Target<'a> {
    from: &'a Held<'a>,
    to: &'a Held<'a>,
    who: Who,
    /// Do its processes run, and memory of theirs comes by tag?
    runs: bool,
}

impl Target<'_> {
    fn refused(&self, failures: Vec<MemberFailure>) -> Trouble {
        self.error(failures, Vec::new())
    }

    fn error(&self, failures: Vec<MemberFailure>, shortages: Vec<DeviceShortage>) -> Trouble {
        Trouble::Refused {
            tenant: self.to.coordinator.tenant.clone(),
            action: Action::Resume,
            runs: self.runs,
            failures,
            undo_failures: Vec::new(),
            shortages,
            host_short: None,
        }
    }

    /// Refuses when the second does not fit into what is free and what the first gives, by device.
    fn check_room(
        &self,
        needs: &[Vec<DeviceDelta>],
        gives: &BTreeMap<String, u64>,
    ) -> Result<(), Trouble> {
        let with_room: Vec<DeviceDelta> = needs
            .iter()
            .flatten()
            .map(|need| {
                let given = gives.get(&need.uuid).copied().unwrap_or(0);
                let free_bytes = need.free_bytes.saturating_add(given);
                DeviceDelta { free_bytes, ..need.clone() }
            })
            .collect();
        let shortages = short_devices(&with_room);
        let Some(shortage) = shortages.first() else { return Ok(()) };
        let kind = FailureKind::DoesNotFit { missing_bytes: shortage.missing_bytes() };
        let message = format!(
            "its tenant does not fit, not even without {}",
            self.from.coordinator.options.scope.subject(&self.from.coordinator.tenant)
        );
        let failure = Failure { kind, message };
        let step = Step::Phase(Phase::RestoreStage);
        let error = self.error(vec![MemberFailure { who: self.who, step, failure }], shortages);
        let leaver = Some((&self.from.coordinator.tenant, gives));
        Err(self.to.coordinator.with_holders(error, leaver))
    }
}

/// The second did not come, and the first takes back what has `left` of it. Where the second keeps some of the room for that, because it could not be taken
/// back wholly, it is told to again for a moment.
fn go_back(
    (from, to): (&Held<'_>, &Held<'_>),
    left: Scope,
    paused: Report,
    source: Trouble,
    progress: &mut dyn FnMut(Event<'_>),
) -> Trouble {
    // Nobody may call that off, and its steps, greetings too, have no less time than those of any undo.
    let Options { timeout, finish_timeout, .. } = from.coordinator.options;
    let options = Options {
        timeout: timeout.map(|timeout| timeout.max(finish_timeout)),
        interrupt: None,
        look_first: false,
        scope: left.clone(),
        ..from.coordinator.options.clone()
    };
    let until = Instant::now() + KEPT_ROOM_WAIT;
    let resumed = loop {
        let resumed = from.open(&options, Action::Resume, progress).and_then(|mut session| {
            let members = session.members_for(Action::Resume)?;
            session.run(Action::Resume, members, Patience::new(&options))
        });
        let is_short =
            |error: &Trouble| error.missing_device_bytes().is_some() && error.left_unchanged();
        if !resumed.as_ref().is_err_and(is_short) || Instant::now() >= until {
            break resumed;
        }
        // Opening it finishes what an undo has left.
        let quiet = Options { interrupt: None, timeout: None, ..to.coordinator.options.clone() };
        drop(to.open(&quiet, Action::Resume, progress).map(drop));
        pause_thread(KEPT_ROOM_LOOK);
    };
    let (tenant, source) = (from.coordinator.tenant.clone(), Box::new(source));
    match resumed {
        Ok(resumed) => {
            let losses = paused.losses.into_iter().chain(resumed.losses).collect();
            Trouble::WentBack { tenant, left, losses, source }
        }
        Err(error) => {
            let resume = Box::new(from.coordinator.with_holders(error, None));
            Trouble::NotBack { tenant, left, losses: paused.losses, resume, source }
        }
    }
}
