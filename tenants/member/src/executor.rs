//! The worker thread of a member: one job at a time, in the order in which the agent gives them. Only this thread drives
//! devices.

mod freezing;
mod participants;
mod phases;
mod reports;
mod resuming;
mod selection;
mod stepping;
mod termination;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmm_pool::driver::Driver;
use vmm_pool::threads::text_of;
use vmm_pool::{Keeper, Pool, UninheritedFd};

use super::failures::{PID, failed_inside, frozen};
use super::keeping::{Desk, not_kept};
use super::progress::Progress;
use super::{Member, lifecycle::Lifecycle};
use participants::end_closed_tickets;
use sublet_protocol::phase::{Action, Stage};
use sublet_protocol::scope::Scope;
use sublet_protocol::wire::{
    FailureKind, Hold, MemberState, Order, Phase, Reply, SaveStep, SpillStep, StepOn,
};

/// The connection number that stands for none.
pub(super) const NOBODY: u64 = 0;

/// A job of the worker thread.
pub(super) struct Job {
    /// The connection that asked; [`NOBODY`] for a step that this process begins itself.
    pub(super) connection: u64,
    pub(super) work: Work,
    pub(super) deadline: Instant,
}

pub(super) enum Work {
    /// An order of this round, or the order to settle it.
    Phase(Option<u64>, Order),
    Needs(Scope, bool),
    Cut {
        hold: Hold,
        /// The number that [`sublet_protocol::cut::Cut::claim`] gave.
        asked: u64,
    },
    Step {
        step: StepOn,
        /// The number that [`sublet_protocol::cut::Cut::claim`] gave.
        asked: u64,
    },
    Save(SaveStep),
    /// A spill step, and whether the asking process has ended: the next leader waits until the step ends.
    Spill(SpillStep, Arc<AtomicBool>),
    /// See [`sublet_protocol::wire::Count`].
    Count,
    /// See [`sublet_protocol::wire::LookIdle`].
    Idle(u64),
    /// A known answer, to be given after earlier answers of the worker.
    Say(Reply),
    /// Releases memory that only closed tickets hold.
    EndTickets,
    /// Ends [`Work::Save`] of this connection, which is closed.
    EndSave(u64),
    /// Reports that the agent's thread has ended in this panic.
    Fail(String),
}

/// The outcome of a job.
pub(super) struct Done {
    pub(super) connection: u64,
    /// The phase. None for a look at the cut, which leaves nothing to undo but the hold.
    pub(super) phase: Option<Phase>,
    pub(super) reply: Reply,
}

/// The worker's part of a member. Only the worker thread has it.
pub(super) struct Executor<D: Driver> {
    member: Arc<Member<D>>,
    pool: Arc<Pool<D>>,
    lifecycle: Arc<Lifecycle>,
    /// The pause or resume under way.
    progress: Progress<D>,
    desk: Option<Box<dyn Desk>>,
    /// Descriptors of a finished resume, to be closed when there is time.
    spare: Vec<UninheritedFd>,
    /// Is this process paused, while others may still be releasing?
    is_pausing: bool,
    /// Was the last request about NCCL's memory a pause, and not a resume?
    nccl_is_asked_away: bool,
}

/// Starts the thread, which gets `keeper`. Jobs are sent in, and the outcome of each is sent out.
pub(super) fn spawn<D: Driver>(
    member: &Arc<Member<D>>,
    keeper: Keeper<D>,
) -> io::Result<(Sender<Job>, Receiver<Done>)> {
    let (jobs, queue) = crossbeam_channel::unbounded();
    let (report, done) = crossbeam_channel::unbounded();
    let executor = Executor::new(Arc::clone(member), Progress::Rest(keeper));
    let after_panic = Arc::clone(member);
    vmm_pool::threads::spawn(
        "sublet-worker",
        move || executor.run(&queue, &report),
        move |text| drop(Executor::new(after_panic, Progress::Taken).fail_inside(None, text)),
    )?;
    Ok((jobs, done))
}

impl<D: Driver> Executor<D> {
    pub(super) fn new(member: Arc<Member<D>>, progress: Progress<D>) -> Self {
        Self {
            pool: Arc::clone(&member.pool),
            lifecycle: Arc::clone(&member.lifecycle),
            desk: member.keeping.as_ref().map(|keeping| keeping.desk(&member)),
            member,
            progress,
            spare: Vec::new(),
            is_pausing: false,
            nccl_is_asked_away: false,
        }
    }

    fn run(mut self, jobs: &Receiver<Job>, report: &Sender<Done>) {
        for job in jobs {
            let (connection, phase) = (job.connection, job.work.phase());
            // A job that only reads saved contents does no harm when it fails.
            let only_reads = matches!(job.work, Work::Save(_));
            // A defect in one phase must not end the thread. Otherwise every later phase would wait for it in vain, and so
            // would the application at the gate.
            let done = catch_unwind(AssertUnwindSafe(|| self.work(job)));
            let reply = done.unwrap_or_else(|panic| {
                let text = text_of(&*panic);
                Some(if only_reads {
                    Reply::Failed(failed_inside(None, text))
                } else {
                    self.fail_inside(phase, text)
                })
            });
            let Some(reply) = reply else { continue };
            if report.send(Done { connection, phase, reply }).is_err() {
                return;
            }
            self.member.waker.wake();
            // After the answer is sent: nobody waits for this.
            self.spare.clear();
            // The driver gets once more the handles that it refused to release: the next step that does so may be a pause in
            // some hours.
            let is_active = self.lifecycle.state() == MemberState::Active;
            if is_active && phase.is_some_and(Phase::is_last) {
                self.pool.release_deferred();
            }
            if self.lifecycle.state() != MemberState::Restoring {
                self.member.descriptor_limit.put_back();
            }
        }
    }

    /// Does a job; none if no process waits for an answer.
    fn work(&mut self, job: Job) -> Option<Reply> {
        let Job { connection, work, deadline } = job;
        if self.lifecycle.state() == MemberState::Deep && work.needs_driver() {
            return Some(Reply::Failed(frozen(self.member.presence.tenant())));
        }
        Some(match work {
            Work::Phase(round, order) => {
                self.desk.iter_mut().for_each(|desk| desk.stop());
                if order.phase().ends_early() {
                    self.member.calling_off.lower();
                }
                // The resume opens a descriptor for each shared allocation, and must not need the application's descriptors.
                if order.phase().action() == Some(Action::Resume) {
                    self.member.descriptor_limit.raise();
                }
                self.run_phase(round, &order, deadline)
            }
            Work::Needs(scope, all_devices) => self.run_needs(&scope, all_devices),
            Work::Cut { hold, asked } => self.run_cut(connection, hold, asked, deadline),
            Work::Step { step, asked } => self.run_step(connection, step, asked, deadline),
            Work::Spill(step, is_called_off) => {
                let desk = self.desk.as_mut().ok_or_else(not_kept);
                let spilled = desk.and_then(|desk| desk.spill(step, &is_called_off));
                spilled.unwrap_or_else(|failure| self.refuse(failure))
            }
            Work::Count => match &self.member.config().counting {
                Some(counting) => counting.run(&*self.member),
                // It joined by the Rust crate `sublet-member` alone: give its settings `tenants::budget::Counts`.
                None => Reply::Failed(
                    FailureKind::Unknown.because(format!("process {PID} counts for no budget")),
                ),
            },
            Work::Idle(quiet_us) => self.run_idle(quiet_us),
            Work::Say(reply) => reply,
            Work::Save(step) => match &mut self.desk {
                Some(desk) => desk.save(connection, step),
                None => Reply::Failed(not_kept()),
            },
            Work::EndTickets => {
                end_closed_tickets(&self.member);
                return None;
            }
            Work::EndSave(closed) => {
                self.desk.iter_mut().for_each(|desk| desk.close(closed));
                return None;
            }
            Work::Fail(panic) => {
                self.fail_inside(None, &panic);
                return None;
            }
        })
    }
}

impl Work {
    /// Could the job call the driver? Used for a process whose contexts are off the devices.
    fn needs_driver(&self) -> bool {
        if let Some(phase) = self.phase() {
            return phase.stage() != Stage::AtRest && !phase.ends_early();
        }
        // The other jobs check the state first, or use only host memory.
        matches!(self, Self::Needs(..) | Self::Cut { .. } | Self::Step { .. } | Self::Count)
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        if let Self::Phase(_, order) = self { Some(order.phase()) } else { None }
    }
}
