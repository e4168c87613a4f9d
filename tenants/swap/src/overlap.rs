//! Swaps two tenants stage by stage: carries out the decisions of [`Exchange`], over the connections to both.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use sublet_coordinator::{
    Answer, Event, MemberFailure, Options, Peers, Round, Session, StageSummary, Step, Stop, Wait,
    moving_time,
};
use vmm_pool::Schedule;

use super::exchange::{Exchange, Move};
use sublet_protocol::phase::Told;
use sublet_protocol::time::{micros, millis};
use sublet_protocol::wire::{Phase, PhaseReport, TakePhase, Window};

/// One of the two tenants. The exchange numbers its participating processes from 0.
struct Side<'s, 'a> {
    session: &'s mut Session<'a>,
    tallies: BTreeMap<Phase, Tally>,
}

/// One phase of one side, over all its members and stages.
struct Tally {
    began: Instant,
    ended: Instant,
    done: BTreeMap<usize, PhaseReport>,
}

impl<'s, 'a> Side<'s, 'a> {
    /// Returns a side whose members have no orders yet.
    fn new(session: &'s mut Session<'a>) -> Self {
        Self { session, tallies: BTreeMap::new() }
    }

    /// Sends an order to `member`. `bytes` is the total that moves, of both tenants.
    fn send(&mut self, member: usize, order: &Ordered, bytes: u64) -> Result<(), MemberFailure> {
        let index = self.session.members[member];
        let phase = order.phase;
        let timeout = timeout_of(self.session.cast.options, order, bytes);
        let now = Instant::now();
        if let Entry::Vacant(vacant) = self.tallies.entry(phase) {
            vacant.insert(Tally { began: now, ended: now, done: BTreeMap::new() });
            let (tenant, members) = (self.session.cast.tenant(), self.session.members.len());
            let step = Step::Phase(phase);
            self.session.cast.tell(Event::StepStarted { tenant: &tenant, step, members });
        }
        let question = order.question(&self.session.round, timeout);
        self.session.cast.peers.ask(index, &question, timeout.answer)
    }

    /// Adds the answer to an order to the account, and returns its result with the member.
    fn take(&mut self, answer: Answer, started: Instant) -> Option<Taken> {
        let Step::Phase(phase) = answer.step else { return None };
        let member = self.session.members.iter().position(|index| *index == answer.peer)?;
        let index = answer.peer;
        let question = Ordered { phase, window: None, rest: Schedule::default() };
        let question = question.question(&self.session.round, Timeout::default());
        let result = answer.to(&question);
        let now = Instant::now();
        if let (Ok(report), Some(tally)) = (&result, self.tallies.get_mut(&phase)) {
            tally.ended = now;
            let who = self.session.cast.peers.who(index);
            let ended_us = micros(now - started);
            self.session.report.stages.push(StageSummary {
                phase,
                who,
                began_us: ended_us.saturating_sub(report.elapsed_us),
                ended_us,
                bytes: report.bytes,
                copied_bytes: report.stage.as_ref().map_or(0, |stage| stage.copied_bytes),
            });
            tally.done.entry(index).or_default().add(report.clone());
            self.session.cast.tell(Event::MemberDone { who, step: Step::Phase(phase) });
        }
        Some(Taken { member, phase, result })
    }

    /// Adds the work of the stages to the report, in the order of the phases.
    fn account(&mut self) {
        self.session.report.stages.retain(|stage| stage.phase != Phase::Verify);
        for (phase, tally) in std::mem::take(&mut self.tallies) {
            let Tally { began, ended, done } = tally;
            let done: Vec<_> = done.into_iter().collect();
            let elapsed = ended - began;
            self.session.report.add(self.session.cast.summary(phase, elapsed, done));
            self.session.cast.tell(Event::StepDone { step: Step::Phase(phase), elapsed });
        }
    }
}

struct Taken {
    member: usize,
    phase: Phase,
    result: Result<PhaseReport, MemberFailure>,
}

/// An order of either side.
struct Ordered {
    phase: Phase,
    window: Option<Window>,
    /// The schedule of [`Phase::Release`].
    rest: Schedule,
}

/// The timeouts of one answer, and of a process that may wait for others between two orders.
#[derive(Clone, Copy, Default)]
struct Timeout {
    answer: Duration,
    silence: Duration,
}

impl Ordered {
    /// Returns the most bytes that the order moves, of `bytes` in total. A window that leaves has at least one allocation,
    /// whatever its size.
    fn moves_at_most(&self, bytes: u64) -> u64 {
        match &self.window {
            Some(Window { devices, .. }) if self.phase == Phase::Restore => {
                devices.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes)).min(bytes)
            }
            Some(_) | None if self.phase.moves_memory() => bytes,
            Some(_) | None => 0,
        }
    }

    fn question(&self, round: &Round<'_>, timeout: Timeout) -> TakePhase {
        let window = self.window.clone();
        let told = Told { window, rest: self.rest, ..round.told() };
        round.order(self.phase.order(&told), millis(timeout.silence))
    }
}

/// The reason why the coming tenant is not resumed.
pub(super) type Hindrance = Option<Stop>;

/// Releases all memory of `leaving`, which is prepared, and restores meanwhile as much of `coming` as has room; the rest is left
/// to the caller. Times are counted from `started`. If a coming process is hindered, the coming processes get no more orders, and
/// the others leave without stages.
pub(super) fn exchange(
    leaving: &mut Session<'_>,
    coming: &mut Session<'_>,
    mut plan: Exchange,
    started: Instant,
) -> Hindrance {
    let (mut leaving, mut coming) = (Side::new(leaving), Side::new(coming));
    let (leaving, coming) = (&mut leaving, &mut coming);
    let mut hindrance: Hindrance = None;
    // The longest time for all moves, and as long again for a process that moves in small parts.
    let usual = leaving.session.cast.options.phase_timeout(Phase::Release);
    let usual = usual.max(Phase::Release.timeout()) + moving_time(plan.total_bytes());
    let until = Instant::now() + 2 * usual;
    loop {
        if Instant::now() >= until {
            plan.hurry();
        }
        while let Some(next) = plan.next() {
            send(leaving, coming, &mut plan, next, &mut hindrance);
            if hindrance.is_some() {
                plan.end_coming();
            }
        }
        if plan.is_over() {
            break;
        }
        let interrupt = match hindrance {
            None => coming.session.cast.options.interrupt.as_ref(),
            Some(_) => None,
        };
        let mut both = [&mut leaving.session.cast.peers, &mut coming.session.cast.peers];
        match Peers::next_of(&mut both, Wait::Others, interrupt) {
            Some((0, answer)) => {
                if let Some(taken) = leaving.take(answer, started) {
                    has_left(leaving, &mut plan, taken);
                }
            }
            Some((_, answer)) => {
                // After a hindrance all of it is undone, whatever the later answers are.
                if let Some(Taken { member, result, .. }) = coming.take(answer, started)
                    && hindrance.is_none()
                {
                    match result {
                        Ok(report) => plan.restored(member, &report),
                        Err(failure) => hindrance = Some(Stop::Failed(vec![failure])),
                    }
                }
            }
            None if hindrance.is_none() && coming.session.cast.options.is_called_off() => {
                hindrance = Some(Stop::CalledOff);
            }
            // No answer is open, and still the work is not complete: an answer did not match its order.
            None => {
                tracing::error!("a swap came to a halt");
                for member in 0..leaving.session.members.len() {
                    plan.left_for_good(member);
                }
                if hindrance.is_none() {
                    hindrance = Some(Stop::Failed(Vec::new()));
                }
            }
        }
        if hindrance.is_some() {
            plan.end_coming();
        }
    }
    leaving.account();
    coming.account();
    hindrance
}

fn send(
    leaving: &mut Side<'_, '_>,
    coming: &mut Side<'_, '_>,
    plan: &mut Exchange,
    next: Move,
    hindrance: &mut Hindrance,
) {
    let (bytes, rest) = (plan.total_bytes(), plan.rest());
    let (member, phase, window) = match next {
        Move::Restore(member, window) => {
            let order = Ordered { phase: Phase::Restore, window: Some(window), rest };
            if let Err(failure) = coming.send(member, &order, bytes) {
                hindrance.get_or_insert(Stop::Failed(vec![failure]));
            }
            return;
        }
        Move::Release(member, window) => (member, Phase::Release, window),
        Move::Verify(member) => (member, Phase::Verify, None),
    };
    if let Err(failure) = leaving.send(member, &Ordered { phase, window, rest }, bytes) {
        lose(leaving, plan, member, failure);
    }
}

/// Returns the timeouts by the `bytes` of all moves. A process with less to move waits for others between its orders, for as long
/// as any of them may take. A requested deadline is added to the time of the order's own moves, because a process that moves
/// memory is not silent.
fn timeout_of(options: &Options, order: &Ordered, bytes: u64) -> Timeout {
    let usual = order.phase.timeout() + moving_time(bytes);
    let requested =
        |_| options.phase_timeout(order.phase) + moving_time(order.moves_at_most(bytes));
    let answer = options.timeout.map_or(usual, requested);
    let longest = options.phase_timeout(Phase::Release) + moving_time(bytes);
    Timeout { answer: answer + options.reply_margin, silence: answer.max(usual).max(longest) }
}

fn has_left(leaving: &mut Side<'_, '_>, plan: &mut Exchange, taken: Taken) {
    let Taken { member, phase, result } = taken;
    match (phase, result) {
        (Phase::Release, Ok(report)) => plan.released(member, &report),
        (Phase::Verify, Ok(_)) => plan.left_for_good(member),
        (Phase::Release, Err(failure))
            if !plan.owes_all_alone(member) && is_refused(leaving, member) =>
        {
            let note = format!("a stage was not released at first: {failure}");
            leaving.session.report.notes.push(note);
            plan.stage_failed(member);
        }
        (_, Ok(_)) => {}
        (_, Err(failure)) => lose(leaving, plan, member, failure),
    }
}

/// Is this member alive, and not overdue?
fn is_refused(side: &Side<'_, '_>, member: usize) -> bool {
    let (index, peers) = (side.session.members[member], &side.session.cast.peers);
    peers.is_up(index) && !peers.is_overdue(index)
}

/// Ends the orders for this member, and notes its failure.
fn lose(leaving: &mut Side<'_, '_>, plan: &mut Exchange, member: usize, failure: MemberFailure) {
    if !plan.has_left_for_good(member) {
        plan.left_for_good(member);
        leaving.session.report.losses.push(failure);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_given_up_by_one_that_waits_for_it() {
        let bytes = 100 << 30;
        let order = |phase| Ordered { phase, window: None, rest: Schedule::default() };
        for timeout in [None, Some(1), Some(600)] {
            let options =
                Options { timeout: timeout.map(Duration::from_secs), ..Options::default() };
            let Timeout { silence, .. } = timeout_of(&options, &order(Phase::Restore), bytes);
            for phase in [Phase::Release, Phase::Verify] {
                let Timeout { answer, .. } = timeout_of(&options, &order(phase), bytes);
                assert!(silence + options.reply_margin >= answer, "{timeout:?} {phase:?}");
            }
        }
    }
}
