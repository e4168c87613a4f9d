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
use super::needs::short_devices;
use super::overlap::{Side, exchange};
use super::report::{Event, MemberFailure, Outcome, PhaseSummary, Step, Swap};
use super::session::{Legs, Session, Stop};
use super::tries::Tries;
use super::{Coordinator, Depth, Options, Trouble};
use crate::identity::TenantName;
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
                        let losses = match paused {
                            Outcome::Completed(report) => report.losses,
                            Outcome::AlreadyPaused { .. } | Outcome::AlreadyActive => Vec::new(),
                        };
                        Err(Stranded { left, losses, source }.go_back(&from, &to, progress))
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

/// One of the two: its lock, and the session with those of its processes that take part.
struct Leg<'h> {
    held: &'h Held<'h>,
    session: Session<'h>,
    members: Vec<usize>,
}

impl<'h> Leg<'h> {
    fn open(
        held: &'h Held<'h>,
        action: Action,
        progress: &'h mut dyn FnMut(Event<'_>),
    ) -> Result<Self, Trouble> {
        let mut session = held.open(&held.coordinator.options, action, progress)?;
        let members = session.members_for()?;
        Ok(Self { held, session, members })
    }
}

/// Two tenants that change places, both of which have something to move.
struct Pair<'h> {
    out: Leg<'h>,
    back: Leg<'h>,
    /// The part of the first that leaves.
    left: Scope,
    /// Contexts of the second that were brought back for it.
    thawed: Option<PhaseSummary>,
    started: Instant,
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
    let out = Leg::open(from, Action::Pause, &mut tell_from)?;
    // If the second did not come, going back would have it run.
    if !out.members.is_empty() {
        out.session.refuse_standing()?;
    }
    let mut back = Leg::open(to, Action::Resume, &mut tell_to)?;
    if out.members.is_empty() {
        return Ok(Moving::OneThatComes { stays: out.session.stays() });
    }
    if back.members.is_empty() {
        return Ok(Moving::OneThatLeaves);
    }
    if out.session.is_deep() {
        out.session.refuse_shallow()?;
    }
    let left = out.session.resident_part(&out.members);
    let thawed = match back.session.thaw_for(&back.members) {
        Err(error) if error.missing_device_bytes().is_some() => {
            return Ok(Moving::OneAfterTheOther { left });
        }
        thawed => thawed?,
    };
    let mut pair = Pair { out, back, left, thawed, started };
    let moved = pair.change_places(patience, &mut tell_after);
    let has_not_come = |error: &Trouble| !matches!(error, Trouble::NotBack { .. });
    if moved.as_ref().is_err_and(has_not_come) {
        pair.back.session.freeze_again(pair.thawed);
    }
    Ok(Moving::Both(Box::new(moved?)))
}

impl Pair<'_> {
    fn change_places(
        &mut self,
        patience: Patience,
        tell_after: &mut dyn FnMut(Event<'_>),
    ) -> Result<Swap, Trouble> {
        self.refuse_wanted()?;
        let comers = &self.back.members;
        let needed = self.back.session.needs_of_each(comers);
        let needed = needed.map_err(|failures| self.refused(failures))?;
        let needs: Vec<_> = needed.iter().map(|needed| needed.devices.clone()).collect();
        if !short_devices(needs.iter().flatten()).is_empty() {
            let held = self.out.session.resident_bytes(&self.out.members);
            self.check_room(&needs, &held)?;
        }

        // From here on processes of the first are stopped.
        let leaving = &mut self.out.session;
        let mut report = leaving.new_report();
        let prepared = leaving.prepare(Legs::Both, &self.out.members, patience, &mut report);
        if let Err(stop) = prepared {
            return Err(leaving.roll_back(&self.out.members, stop));
        }
        let gives = leaving.last_said(&report, &self.out.members);
        if let Err(error) = self.look_again(&needs, &totals(gives.iter().flatten())) {
            let why = Stop::Failed(error.failures().to_vec());
            let undone = self.out.session.roll_back(&self.out.members, why);
            return Err(if undone.left_unchanged() { error } else { undone });
        }

        // The point of no return of the first.
        let (from, to) = (self.out.held, self.back.held);
        let stages = Exchange::new(from.coordinator.options.window_bytes, &gives, &needed);
        let mut resumed = self.back.session.new_report();
        if let Some(thawed) = self.thawed.clone() {
            resumed.add(thawed);
        }
        report.window_bytes = Some(stages.window_bytes());
        resumed.window_bytes = report.window_bytes;
        let mut leaving = Side::new(&mut self.out.session, self.out.members.clone(), report);
        let mut coming = Side::new(&mut self.back.session, self.back.members.clone(), resumed);
        let hindrance = exchange(&mut leaving, &mut coming, stages, self.started);
        let Side { session: leaving, report: mut paused, .. } = leaving;
        let Side { session: coming, members: comers, report: mut resumed, .. } = coming;
        paused.wall_us = micros(self.started.elapsed());
        leaving.note_latecomers(&mut paused);
        leaving.note_nothing_of_nccl(&mut paused);
        let came = match hindrance {
            Some(stop) => Err(stop),
            None => coming.come(&comers, &mut resumed),
        };
        if let Err(stop) = came {
            let source = to.coordinator.with_holders(coming.roll_back(&comers, stop), None);
            // One that has not finished its part obeys nobody else as long as this leads it.
            leaving.peers.list.clear();
            let stranded = Stranded { left: self.left.clone(), losses: paused.losses, source };
            return Err(stranded.go_back(from, to, tell_after));
        }
        // Behind the second, which runs by then.
        if leaving.is_deep() {
            leaving.freeze_all(&mut paused);
            paused.wall_us = micros(self.started.elapsed());
        }
        resumed.wall_us = micros(self.started.elapsed());
        coming.note_latecomers(&mut resumed);
        Ok(Swap {
            paused: Outcome::Completed(Box::new(paused)),
            resumed: Outcome::Completed(Box::new(resumed)),
            wall_us: micros(self.started.elapsed()),
        })
    }

    /// Refuses if the second wants memory of the first, which it can have while the first runs.
    fn refuse_wanted(&mut self) -> Result<(), Trouble> {
        if self.out.session.scope != Scope::Whole {
            return Ok(());
        }
        let lender = self.out.held.dir.tenant();
        let wanted = self.back.session.wanted_of(&self.back.members, lender);
        match wanted.unwrap_or_else(|failures| failures) {
            none if none.is_empty() => Ok(()),
            wanted => Err(self.refused(wanted)),
        }
    }

    /// The last look before the point of no return of the first, when it is known what each of its processes gives.
    fn look_again(
        &mut self,
        needs: &[Vec<DeviceDelta>],
        gives: &BTreeMap<String, u64>,
    ) -> Result<(), Trouble> {
        self.check_room(needs, gives)?;
        self.back.session.check_lock()?;
        let next = Step::Phase(Phase::Restore);
        let alive = self.back.session.check_alive(&self.back.members, next);
        alive.map_err(|dead| self.refused(dead))
    }

    /// The second cannot come, and nothing was changed.
    fn refused(&self, failures: Vec<MemberFailure>) -> Trouble {
        let runs = self.back.session.runs(self.back.members[0]);
        let tenant = self.back.held.coordinator.tenant.clone();
        Trouble::refused(tenant, (Action::Resume, runs), failures)
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
        let short = short_devices(&with_room);
        let Some(shortage) = short.first() else { return Ok(()) };
        let kind = FailureKind::DoesNotFit { missing_bytes: shortage.missing_bytes() };
        let from = self.out.held.coordinator;
        let message = format!(
            "its tenant does not fit, not even without {}",
            from.options.scope.subject(&from.tenant)
        );
        let who = self.back.session.peers.list[self.back.members[0]].who;
        let failure = Failure { kind, message };
        let step = Step::Phase(Phase::Restore);
        let mut error = self.refused(vec![MemberFailure { who, step, failure }]);
        if let Trouble::Refused { shortages, .. } = &mut error {
            *shortages = short;
        }
        Err(self.back.held.coordinator.with_holders(error, Some((&from.tenant, gives))))
    }
}

/// A first tenant that has left for a second that did not come.
struct Stranded {
    /// The part of it that is away.
    left: Scope,
    losses: Vec<MemberFailure>,
    /// Why the second did not come.
    source: Trouble,
}

impl Stranded {
    /// Brings it back. Where the second keeps some of the room for that, because it could not be taken back wholly, it is told to again for a moment.
    fn go_back(
        self,
        from: &Held<'_>,
        to: &Held<'_>,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Trouble {
        let Self { left, mut losses, source } = self;
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
                let members = session.members_for()?;
                session.run(members, Patience::new(&options))
            });
            let is_short =
                |error: &Trouble| error.missing_device_bytes().is_some() && error.left_unchanged();
            if !resumed.as_ref().is_err_and(is_short) || Instant::now() >= until {
                break resumed;
            }
            // Opening it finishes what an undo has left.
            let quiet =
                Options { interrupt: None, timeout: None, ..to.coordinator.options.clone() };
            drop(to.open(&quiet, Action::Resume, progress).map(drop));
            pause_thread(KEPT_ROOM_LOOK);
        };
        let (tenant, source) = (from.coordinator.tenant.clone(), Box::new(source));
        match resumed {
            Ok(resumed) => {
                losses.extend(resumed.losses);
                Trouble::WentBack { tenant, left, losses, source }
            }
            Err(error) => {
                let resume = Box::new(from.coordinator.with_holders(error, None));
                Trouble::NotBack { tenant, left, losses, resume, source }
            }
        }
    }
}
