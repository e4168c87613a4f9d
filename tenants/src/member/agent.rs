//! The two threads of a member: one that speaks, one that works.

mod leading;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signal::SigSet;
use vmm_pool::driver::Driver;

use super::clients::{CONNECTIONS_MAX, Clients, OPEN_REQUESTS_MAX, REQUESTS_PER_TURN_MAX};
use super::failures::failed_inside;
use super::lending::HandedOut;
use super::saving::Saving;
use super::sockets::Noted;
use super::{AGENT_TIMEOUT, Member};
use crate::host_memory::Pressure;
use crate::phase::Stage;
use crate::run_dir::NAME_LOOK_EVERY;
use crate::scope::Scope;
use crate::transport::{Listener, TransportError, poll_until};
use crate::wire::{
    Action, AskLent, AwaitConsent, Failure, FailureKind, GiveUp, Hold, HostStage, HostStep,
    LookIdle, MemberState, Needs, Order, Phase, Reply, Request, SaveStep, SpillStep, StepOn,
    TakePhase, Withdraw,
};

/// No request waits longer than this, whatever it says.
const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// How long the agent looks away from its listening socket when the system gives it no connection, as
/// when the process has too many open files: the socket would wake it again immediately.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// How long a coordinator may ask for nothing after all members had to be done with its last request. It waits
/// for none of them longer than its margin for answers, which is two seconds.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// By when every process has its name again, after one has: busy machines take longer.
pub(super) const NAMES_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Wakes the agent from any thread.
#[derive(Debug)]
pub(super) struct Waker(OwnedFd);

/// The agent's end.
#[derive(Debug)]
pub(super) struct Wakeups(OwnedFd);

pub(super) fn wake_pair() -> io::Result<(Waker, Wakeups)> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    Ok((Waker(write), Wakeups(read)))
}

impl Waker {
    pub(super) fn wake(&self) {
        // A full pipe wakes as well as one byte more would.
        let _woken = nix::unistd::write(&self.0, &[1]);
    }
}

impl Wakeups {
    fn clear(&self) {
        let mut bytes = [0; 64];
        while let Ok(1..) | Err(Errno::EINTR) = nix::unistd::read(&self.0, &mut bytes) {}
    }
}

/// No connection has this number.
const NOBODY: u64 = 0;

struct Job {
    /// Who asked; [`NOBODY`] for a step of our own.
    connection: u64,
    work: Work,
    deadline: Instant,
}

enum Work {
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

struct Done {
    connection: u64,
    /// None for a look at the cut, which leaves nothing to undo but the hold.
    phase: Option<Phase>,
    reply: Reply,
}

struct Waiter {
    connection: u64,
    action: Action,
    deadline: Instant,
}

/// Somebody who watches host memory come in.
struct Watcher {
    connection: u64,
    seen_bytes: u64,
    deadline: Instant,
}

struct Agent<D: Driver> {
    member: Arc<Member<D>>,
    /// Goes before the listener does.
    noted: Noted,
    listener: Listener,
    /// When it looks next whether the listener still has its name.
    look_at: Instant,
    wakeups: Wakeups,
    clients: Clients,
    /// No connection is accepted before.
    accept_after: Option<Instant>,
    waiters: VecDeque<Waiter>,
    watchers: Vec<Watcher>,
    pressure: Pressure,
    jobs: Sender<Job>,
    done: Receiver<Done>,
    /// When the next request of the leader is due. When that one goes, the process settles what it led alone.
    due: Instant,
    /// Who has requested contents in files.
    savers: BTreeSet<u64>,
    /// Who has requested room, and what tells the steps of it that they have gone.
    spillers: BTreeMap<u64, Arc<AtomicBool>>,
}

/// Starts both threads. They take no signals: those are the application's.
pub(super) fn spawn<D: Driver>(
    member: &Arc<Member<D>>,
    listener: Listener,
    wakeups: Wakeups,
) -> io::Result<()> {
    let (jobs, job_queue) = crossbeam_channel::unbounded();
    let (report, done) = crossbeam_channel::unbounded();
    let worker = Arc::clone(member);
    std::thread::Builder::new().name("sublet-worker".to_owned()).spawn(move || {
        block_signals();
        work(&worker, &job_queue, &report);
    })?;
    let agent = Agent {
        member: Arc::clone(member),
        noted: member.sockets.note(&listener),
        listener,
        look_at: Instant::now() + NAME_LOOK_EVERY,
        wakeups,
        clients: Clients::new(Arc::clone(&member.sockets)),
        accept_after: None,
        waiters: VecDeque::new(),
        watchers: Vec::new(),
        pressure: Pressure::default(),
        jobs,
        done,
        due: Instant::now(),
        savers: BTreeSet::new(),
        spillers: BTreeMap::new(),
    };
    std::thread::Builder::new().name("sublet-agent".to_owned()).spawn(move || {
        block_signals();
        agent.run();
    })?;
    Ok(())
}

pub(crate) fn block_signals() {
    if let Err(error) = SigSet::all().thread_block() {
        tracing::debug!(%error, "signals stay open on a thread of ours");
    }
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
        if member.state() != MemberState::Restoring {
            member.descriptor_limit.put_back();
        }
    }
}

/// Does a job; none when nobody waits for an answer.
fn do_job<D: Driver>(member: &Member<D>, saving: &mut Option<Saving>, job: Job) -> Option<Reply> {
    let Job { connection, work, deadline } = job;
    if member.state() == MemberState::Deep && work.needs_driver() {
        return Some(Reply::Failed(member.frozen()));
    }
    Some(match work {
        Work::Phase(round, order) => {
            // It moves what is being written.
            *saving = None;
            if order.phase().ends_early() {
                member.calling_off.lower();
            }
            if order.phase().opens_descriptors() {
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
        Work::Count => member.run_count(),
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

/// What a panic said.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

impl Work {
    /// Could it call the driver? Asked of a process whose contexts are away.
    fn needs_driver(&self) -> bool {
        match self {
            Self::Phase(_, order) => {
                let phase = order.phase();
                phase.stage() != Stage::AtRest && !phase.ends_early()
            }
            Self::Needs(..) | Self::Cut { .. } | Self::Step { .. } | Self::Count => true,
            // These look at the state first, or at host memory alone.
            Self::Spill(..)
            | Self::Idle(_)
            | Self::Say(_)
            | Self::Save(_)
            | Self::EndTickets
            | Self::EndSave(_) => false,
        }
    }

    fn phase(&self) -> Option<Phase> {
        match self {
            Self::Phase(_, order) => Some(order.phase()),
            Self::Needs(..)
            | Self::Cut { .. }
            | Self::Step { .. }
            | Self::Count
            | Self::Spill(..)
            | Self::Idle(_)
            | Self::Say(_)
            | Self::Save(_)
            | Self::EndTickets
            | Self::EndSave(_) => None,
        }
    }
}

impl<D: Driver> Agent<D> {
    fn run(mut self) {
        loop {
            self.wait();
            self.wakeups.clear();
            self.accept();
            self.serve();
            self.deliver();
            self.answer_waiters();
            self.answer_watchers();
            self.hang_up_on_silence();
            self.keep_name();
        }
    }

    /// Puts the socket's name back when it has gone: nobody could reach this process any more, nor what it has saved.
    fn keep_name(&mut self) {
        let now = Instant::now();
        if now < self.look_at {
            return;
        }
        self.look_at = now + NAME_LOOK_EVERY;
        let _seen = self.member.idleness();
        if self.jobs.is_empty() && self.member.pool.has_watched_tickets() {
            self.submit(NOBODY, Work::EndTickets, AGENT_TIMEOUT);
        }
        if self.member.pool.holds_idle_memory()
            && self.pressure.look(&(self.member.config.host_figures)()).is_some()
        {
            self.member.begin_giving_back();
        }
        // A coordinator holds a lock that went with the directory: another one must not find us meanwhile.
        if self.leading().is_some() {
            return;
        }
        if self.listener.is_named() {
            self.keep_counting();
            return;
        }
        // The name goes at the process's end, too.
        if self.member.has_left.load(Ordering::SeqCst) {
            return;
        }
        let member = Arc::clone(&self.member);
        let path = member.socket_path.display();
        match member.config.run_dir.listen_again(member.tenant(), member.id) {
            Ok(listener) => {
                // A client that has connected already is served all the same.
                self.accept();
                self.noted = member.sockets.note(&listener);
                self.listener = listener;
                member.note_new_name();
                member.note(format!("{path} had been removed, and was made again"));
            }
            Err(error) => {
                member.note(format!(
                    "{path} was removed, and nobody can reach this process: {error}"
                ));
            }
        }
        if member.has_left.load(Ordering::SeqCst) {
            member.leave();
        }
    }

    /// Sees that what this process holds is counted where the others of its tenant count.
    fn keep_counting(&self) {
        if self.jobs.is_empty() && self.member.is_to_count() {
            self.submit(NOBODY, Work::Count, AGENT_TIMEOUT);
        }
    }

    fn wait(&self) {
        let waiters = self.waiters.iter().map(|waiter| waiter.deadline);
        let waiters = waiters.chain(self.watchers.iter().map(|watcher| watcher.deadline));
        let silence = self.leading().map(|_| self.due);
        let others = self.clients.next_stall().into_iter().chain(self.accept_after).chain(silence);
        let deadline = waiters.chain(others).min().unwrap_or(self.look_at).min(self.look_at);
        let mut fds = vec![PollFd::new(self.wakeups.0.as_fd(), PollFlags::POLLIN)];
        // Asked after the deadline was taken: room that time makes is seen here, or waited for.
        if self.accept_after.is_none() && self.clients.has_room(self.leading()) {
            fds.push(PollFd::new(self.listener.as_fd(), PollFlags::POLLIN));
        }
        fds.extend(self.clients.poll_fds());
        if let Err(error) = poll_until(&mut fds, deadline) {
            tracing::error!(%error, "the agent could not wait");
            std::thread::yield_now();
        }
    }

    fn accept(&mut self) {
        if self.accept_after.is_some_and(|after| Instant::now() < after) {
            return;
        }
        self.accept_after = None;
        for _ in 0..CONNECTIONS_MAX {
            if !self.clients.has_room(self.leading()) {
                return;
            }
            match self.listener.accept() {
                Ok(Some(connection)) => {
                    if let Some(closed) = self.clients.add(connection, self.leading()) {
                        self.forget(closed);
                    }
                }
                Ok(None) => return,
                Err(error @ TransportError::Io { .. }) => {
                    tracing::warn!(%error, "no connection could be accepted");
                    self.accept_after = Some(Instant::now() + ACCEPT_BACK_OFF);
                    return;
                }
                Err(error) => tracing::warn!(%error, "a connection was refused"),
            }
        }
    }

    fn serve(&mut self) {
        let mut gone = Vec::new();
        for number in self.clients.numbers() {
            for _ in 0..REQUESTS_PER_TURN_MAX {
                match self.clients.next_request(number) {
                    Ok(Some(request)) => self.handle(number, request),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::debug!(%error, "connection ended");
                        gone.push(number);
                        break;
                    }
                }
            }
        }
        for number in gone {
            self.clients.close(number);
            self.forget(number);
        }
    }

    /// The connection `number` is closed.
    fn forget(&mut self, number: u64) {
        self.member.cut().abandon(number);
        self.waiters.retain(|waiter| waiter.connection != number);
        self.watchers.retain(|watcher| watcher.connection != number);
        if let Some(is_called_off) = self.spillers.remove(&number) {
            is_called_off.store(true, Ordering::Relaxed);
        }
        if self.savers.remove(&number) {
            self.submit(NOBODY, Work::EndSave(number), AGENT_TIMEOUT);
        }
        if self.leading() == Some(number) {
            self.leader_gone();
        }
    }

    /// The coordinator went away: nobody will tell us what to do, so the worker finds out when it is done
    /// with what it was told.
    fn leader_gone(&mut self) {
        let round = self.member.status().rounds.end_leading();
        self.submit(NOBODY, Work::Phase(round, Order::Settle), AGENT_TIMEOUT);
    }

    fn submit(&self, connection: u64, work: Work, timeout: Duration) {
        if work.phase().is_some_and(Phase::ends_early) {
            self.member.calling_off.raise();
        }
        let deadline = Instant::now() + timeout;
        if self.jobs.send(Job { connection, work, deadline }).is_err() {
            tracing::error!("the worker thread is gone");
        }
    }

    fn handle(&mut self, number: u64, request: Request) {
        match request {
            Request::Hello => self.answer(number, &Reply::Member(self.member.info())),
            Request::Stats => {
                self.answer(number, &Reply::Stats(Box::new(self.member.stats())));
            }
            Request::Needs(Needs { scope, timeout_ms, all_devices }) => {
                if self.opens(number) {
                    self.submit(number, Work::Needs(scope, all_devices), wait_of(timeout_ms));
                }
            }
            Request::Phase(TakePhase { order: Order::Settle, timeout_ms, .. }) => {
                if self.opens(number) {
                    self.settle(number, wait_of(timeout_ms));
                }
            }
            Request::Phase(request) => {
                if self.opens(number) {
                    self.take_phase(number, request);
                }
            }
            Request::Cut(hold) => {
                if self.opens(number) {
                    let wait = wait_of(hold.wait_ms);
                    if self.follow(number, wait) {
                        let asked = self.member.cut().claim(number);
                        self.submit(number, Work::Cut { hold, asked }, wait);
                    } else {
                        self.refuse(number);
                    }
                }
            }
            Request::Step(step) => {
                if self.opens(number) {
                    let wait = wait_of(step.wait_ms);
                    let is_led = self.member.status().rounds.is_led(number, step.round);
                    if is_led && self.follow(number, wait) {
                        let asked = self.member.cut().claim(number);
                        self.submit(number, Work::Step { step, asked }, wait);
                    } else {
                        self.refuse(number);
                    }
                }
            }
            Request::Save(step) => {
                if self.opens(number) {
                    self.savers.insert(number);
                    self.submit(number, Work::Save(step), AGENT_TIMEOUT);
                }
            }
            Request::Spill(step) => {
                if self.opens(number) {
                    let is_called_off = Arc::clone(self.spillers.entry(number).or_default());
                    self.submit(number, Work::Spill(step, is_called_off), AGENT_TIMEOUT);
                }
            }
            Request::Host(step) => self.handle_host(number, step),
            Request::Count => {
                if self.opens(number) {
                    self.submit(number, Work::Count, AGENT_TIMEOUT);
                }
            }
            Request::Idle(LookIdle { quiet_us }) => {
                if self.opens(number) {
                    self.submit(number, Work::Idle(quiet_us), AGENT_TIMEOUT);
                }
            }
            Request::Withdraw(Withdraw { round }) => {
                let told = self.withdraw(round);
                self.answer(number, &Reply::Told(told));
            }
            Request::GiveUp(GiveUp { action, why }) => {
                self.member.give_up(action, why);
                self.answer(number, &Reply::Noted);
            }
            Request::AwaitConsent(AwaitConsent { action, timeout_ms }) => {
                if self.opens(number) {
                    let deadline = Instant::now() + wait_of(timeout_ms);
                    self.waiters.push_back(Waiter { connection: number, action, deadline });
                }
            }
            Request::FetchFds(fetch) => {
                // Here and not on the worker: once it has shut the gate, what is said to be lent is all.
                match self.member.hand_out(&fetch, self.clients.pid_of(number)) {
                    Ok(HandedOut { fds, tags, missing, devices }) => {
                        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
                        let reply = Reply::Fds { count, tags, missing, devices };
                        self.clients.answer(number, &reply, fds);
                    }
                    Err(failure) => self.answer(number, &Reply::Failed(failure)),
                }
            }
            Request::Lent(AskLent { scope }) => {
                let reply = Reply::Lent(Box::new(self.member.lending(&scope)));
                if self.leading() == Some(number) {
                    // A look that the worker is still at was requested before: it ends now, and is answered before.
                    self.member.cut().claim(number);
                    self.submit(number, Work::Say(reply), AGENT_TIMEOUT);
                } else {
                    self.answer(number, &reply);
                }
            }
        }
    }

    fn handle_host(&mut self, number: u64, step: HostStep) {
        match step {
            HostStep::Need => {
                self.answer(number, &Reply::Host(Box::new(self.member.host_need())));
                return;
            }
            HostStep::Begin { most_bytes } => self.member.begin_ahead(most_bytes),
            HostStep::CallOff => self.member.call_ahead_off(),
            HostStep::Watch { seen_bytes, wait_ms } => {
                if self.opens(number) {
                    let deadline = Instant::now() + wait_of(wait_ms);
                    self.watchers.push(Watcher { connection: number, seen_bytes, deadline });
                }
                return;
            }
        }
        self.answer(number, &Reply::Host(Box::new(self.member.host_progress())));
    }

    fn answer_watchers(&mut self) {
        if self.watchers.is_empty() {
            return;
        }
        let progress = self.member.host_progress();
        let has_ended = matches!(progress.stage, HostStage::Rests | HostStage::Stopped(_));
        let now = Instant::now();
        let mut answered = Vec::new();
        self.watchers.retain(|watcher| {
            let is_due = has_ended
                || progress.brought_in_bytes != watcher.seen_bytes
                || now >= watcher.deadline;
            if is_due {
                answered.push(watcher.connection);
            }
            !is_due
        });
        for number in answered {
            let reply = Reply::Host(Box::new(progress.clone()));
            self.clients.answer_open(number, &reply);
        }
    }

    /// Notes that client `number` is to be answered later. One that has asked too much is closed: an
    /// answer out of order would be taken for another's.
    fn opens(&mut self, number: u64) -> bool {
        let fits = self.clients.open_request(number);
        if !fits {
            tracing::warn!("a client has {OPEN_REQUESTS_MAX} unanswered requests: closed");
            self.clients.close(number);
            self.forget(number);
        }
        fits
    }

    fn answer(&mut self, number: u64, reply: &Reply) {
        self.clients.answer(number, reply, Vec::new());
    }

    fn deliver(&mut self) {
        while let Ok(done) = self.done.try_recv() {
            self.clients.answer_open(done.connection, &done.reply);
            if done.phase.is_some_and(Phase::is_last) {
                self.member.status().rounds.stop_leading(done.connection);
            }
        }
    }

    fn answer_waiters(&mut self) {
        let consent = self.member.status().consent;
        let now = Instant::now();
        let mut answers = Vec::new();
        self.waiters.retain(|waiter| {
            if consent == Some(waiter.action) {
                answers.push((waiter.connection, Reply::Consented));
                return false;
            }
            if now >= waiter.deadline {
                let failure = no_consent(waiter.action);
                answers.push((waiter.connection, Reply::Failed(failure)));
                return false;
            }
            true
        });
        for (number, reply) in answers {
            self.clients.answer_open(number, &reply);
        }
    }
}

fn wait_of(timeout_ms: u64) -> Duration {
    Duration::from_millis(timeout_ms).min(TIMEOUT_MAX)
}

fn no_consent(action: Action) -> Failure {
    let call = match action {
        Action::Pause => "ncclPause",
        Action::Resume => "ncclResume",
    };
    Failure {
        kind: FailureKind::NoConsent,
        message: format!(
            "process {} has not called {call} in time: every process of the tenant must call it, or one \
             of them sublet_pause_tenant for all",
            std::process::id()
        ),
    }
}
