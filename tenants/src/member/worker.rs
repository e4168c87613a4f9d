//! The thread of a member that works: one job at a time, in the order in which the agent gives them. It alone drives devices.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmm_pool::driver::Driver;
use vmm_pool::threads::text_of;

use super::Member;
use super::failures::{failed_inside, frozen};
use super::saving::Saving;
use crate::phase::{Action, Stage};
use crate::scope::Scope;
use crate::wire::{Hold, MemberState, Order, Phase, Reply, SaveStep, SpillStep, StepOn};

/// No connection has this number.
pub(super) const NOBODY: u64 = 0;

/// What the worker is to do.
pub(super) struct Job {
    /// Who asked; [`NOBODY`] for a step of our own.
    pub(super) connection: u64,
    pub(super) work: Work,
    pub(super) deadline: Instant,
}

pub(super) enum Work {
    /// An order of this round, or to settle it.
    Phase(Option<u64>, Order),
    Needs(Scope, bool),
    Cut {
        hold: Hold,
        /// What [`crate::cut::Cut::claim`] gave.
        asked: u64,
    },
    Step {
        step: StepOn,
        /// What [`crate::cut::Cut::claim`] gave.
        asked: u64,
    },
    Save(SaveStep),
    /// And whether the process that asked has gone: the next to lead waits behind it.
    Spill(SpillStep, Arc<AtomicBool>),
    /// See [`crate::wire::Count`].
    Count,
    /// See [`crate::wire::LookIdle`].
    Idle(u64),
    /// An answer that is known, to be given behind those that the worker gives.
    Say(Reply),
    /// Memory that nothing but closed tickets holds is given back.
    EndTickets,
    /// This connection, which had requested [`Work::Save`], is closed.
    EndSave(u64),
}

/// What has come of a job.
pub(super) struct Done {
    pub(super) connection: u64,
    /// None for a look at the cut, which leaves nothing to undo but the hold.
    pub(super) phase: Option<Phase>,
    pub(super) reply: Reply,
}

/// Starts the thread. Jobs go in, and what has come of each comes out.
pub(super) fn spawn<D: Driver>(
    member: &Arc<Member<D>>,
) -> io::Result<(Sender<Job>, Receiver<Done>)> {
    let (jobs, queue) = crossbeam_channel::unbounded();
    let (report, done) = crossbeam_channel::unbounded();
    let (for_thread, after_panic) = (Arc::clone(member), Arc::clone(member));
    vmm_pool::threads::spawn(
        "sublet-worker",
        move || work(&for_thread, &queue, &report),
        move |text| drop(after_panic.fail_inside(None, text)),
    )?;
    Ok((jobs, done))
}

fn work<D: Driver>(member: &Member<D>, jobs: &Receiver<Job>, report: &Sender<Done>) {
    let mut saving = None;
    for job in jobs {
        let (connection, phase) = (job.connection, job.work.phase());
        // What only reads saved contents harms nothing when it fails.
        let only_reads = matches!(job.work, Work::Save(_));
        // A defect in one phase must not end the thread: every later phase would wait for it in vain, and the
        // application at the gate.
        let done = || do_job(member, &mut saving, job);
        let reply = catch_unwind(AssertUnwindSafe(done)).unwrap_or_else(|panic| {
            let text = text_of(&*panic);
            Some(if only_reads {
                Reply::Failed(failed_inside(None, text))
            } else {
                member.fail_inside(phase, text)
            })
        });
        let Some(reply) = reply else { continue };
        if report.send(Done { connection, phase, reply }).is_err() {
            return;
        }
        member.waker.wake();
        member.close_spare(phase);
        if member.lifecycle.state() != MemberState::Restoring {
            member.descriptor_limit.put_back();
        }
    }
}

/// Does a job; none when nobody waits for an answer.
fn do_job<D: Driver>(member: &Member<D>, saving: &mut Option<Saving>, job: Job) -> Option<Reply> {
    let Job { connection, work, deadline } = job;
    if member.lifecycle.state() == MemberState::Deep && work.needs_driver() {
        return Some(Reply::Failed(frozen(member.presence.tenant())));
    }
    Some(match work {
        Work::Phase(round, order) => {
            // It moves what is being written.
            *saving = None;
            if order.phase().ends_early() {
                member.calling_off.lower();
            }
            // It opens a descriptor for each allocation that is shared, and must not need those of the application.
            if order.phase().action() == Some(Action::Resume) {
                member.descriptor_limit.raise();
            }
            member.run_phase(round, &order, deadline)
        }
        Work::Needs(scope, all_devices) => member.run_needs(&scope, all_devices),
        Work::Cut { hold: Hold { limits, seen, .. }, asked } => {
            member.run_cut(connection, limits, seen, asked, deadline)
        }
        Work::Step { step: StepOn { step, seen, .. }, asked } => {
            member.run_step(connection, step, seen, asked, deadline)
        }
        Work::Spill(step, is_called_off) => {
            // It moves what is being written. A question moves nothing.
            if step.most_bytes > 0 {
                *saving = None;
            }
            member.run_spill(step, &is_called_off)
        }
        Work::Count => member.counting.run(),
        Work::Idle(quiet_us) => member.run_idle(quiet_us),
        Work::Say(reply) => reply,
        Work::Save(step) => member.run_save(saving, connection, step),
        Work::EndTickets => {
            member.end_closed_tickets();
            return None;
        }
        Work::EndSave(closed) => {
            *saving = saving.take().filter(|saving| saving.connection() != closed);
            return None;
        }
    })
}

/// Ends a wait inside a phase early. Raised by the agent, seen by the worker, which alone lowers it.
#[derive(Debug)]
pub(super) struct CallingOff {
    raise: Sender<()>,
    raised: Receiver<()>,
}

impl Default for CallingOff {
    fn default() -> Self {
        let (raise, raised) = crossbeam_channel::unbounded();
        Self { raise, raised }
    }
}

impl CallingOff {
    pub(super) fn raise(&self) {
        // Both ends live as long as this does.
        let _sent = self.raise.send(());
    }

    pub(super) fn lower(&self) {
        while self.raised.try_recv().is_ok() {}
    }

    pub(super) fn is_raised(&self) -> bool {
        !self.raised.is_empty()
    }

    /// For waiting on it together with something else, without taking what is in it.
    pub(super) fn receiver(&self) -> &Receiver<()> {
        &self.raised
    }
}

impl<D: Driver> Member<D> {
    /// Closes what [`Member::close_later`] was given. Behind the last step of a round it offers the driver once more what that
    /// would not take back: the next step that does may be a pause in some hours.
    fn close_spare(&self, done: Option<Phase>) {
        let spare = std::mem::take(&mut *self.spare.lock().unwrap_or_else(PoisonError::into_inner));
        drop(spare);
        if done.is_some_and(Phase::is_last) && self.lifecycle.state() == MemberState::Active {
            self.pool.release_deferred();
        }
    }
}

impl Work {
    /// Could it call the driver? Asked of a process whose contexts are away.
    fn needs_driver(&self) -> bool {
        if let Some(phase) = self.phase() {
            return phase.stage() != Stage::AtRest && !phase.ends_early();
        }
        // The others look at the state first, or at host memory alone.
        matches!(self, Self::Needs(..) | Self::Cut { .. } | Self::Step { .. } | Self::Count)
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        if let Self::Phase(_, order) = self { Some(order.phase()) } else { None }
    }
}
