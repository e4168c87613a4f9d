//! The two threads of a member: one that speaks, one that works.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signal::SigSet;
use vmm_pool::driver::Driver;

use super::{AGENT_TIMEOUT, Member};
use crate::cut::{Limits, Seen};
use crate::transport::{Connection, Listener, poll_until};
use crate::wire::{
    Action, FDS_PER_MESSAGE_MAX, Failure, FailureKind, MemberState, Phase, Reply, Request,
};

/// Connections one agent keeps; more are closed at once. Peers on a node and a few commands fit.
const CONNECTIONS_MAX: usize = 256;

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

struct Job {
    connection: u64,
    work: Work,
    deadline: Instant,
}

enum Work {
    Phase(Phase),
    Cut {
        limits: Limits,
        seen: Seen,
        /// What [`crate::cut::Cut::claim`] gave.
        asked: u64,
    },
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

struct Client {
    number: u64,
    connection: Connection,
}

struct Agent<D: Driver> {
    member: Arc<Member<D>>,
    listener: Listener,
    wakeups: Wakeups,
    clients: Vec<Client>,
    next_number: u64,
    waiters: VecDeque<Waiter>,
    jobs: Sender<Job>,
    done: Receiver<Done>,
    /// Who coordinates the pause or resume under way: when it goes, the process undoes its part.
    coordinator: Option<u64>,
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
        listener,
        wakeups,
        clients: Vec::new(),
        next_number: 1,
        waiters: VecDeque::new(),
        jobs,
        done,
        coordinator: None,
    };
    std::thread::Builder::new().name("sublet-agent".to_owned()).spawn(move || {
        block_signals();
        agent.run();
    })?;
    Ok(())
}

fn block_signals() {
    if let Err(error) = SigSet::all().thread_block() {
        tracing::debug!(%error, "signals stay open on a thread of ours");
    }
}

fn work<D: Driver>(member: &Member<D>, jobs: &Receiver<Job>, report: &Sender<Done>) {
    for job in jobs {
        let Job { connection, work, deadline } = job;
        let done = match work {
            Work::Phase(phase) => {
                Done { connection, phase: Some(phase), reply: member.run_phase(phase, deadline) }
            }
            Work::Cut { limits, seen, asked } => {
                let reply = member.run_cut(connection, limits, seen, asked, deadline);
                Done { connection, phase: None, reply }
            }
        };
        if report.send(done).is_err() {
            return;
        }
        member.waker.wake();
        member.close_spare();
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
        }
    }

    fn wait(&self) {
        let mut fds = vec![
            PollFd::new(self.listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wakeups.0.as_fd(), PollFlags::POLLIN),
        ];
        fds.extend(
            self.clients.iter().map(|c| PollFd::new(c.connection.as_fd(), PollFlags::POLLIN)),
        );
        let idle = Instant::now() + Duration::from_hours(1);
        let deadline = self.waiters.iter().map(|waiter| waiter.deadline).min().unwrap_or(idle);
        if let Err(error) = poll_until(&mut fds, deadline) {
            tracing::error!(%error, "the agent could not wait");
            std::thread::yield_now();
        }
    }

    fn accept(&mut self) {
        while let Ok(Some(connection)) = self.listener.accept() {
            if self.clients.len() >= CONNECTIONS_MAX {
                tracing::warn!(peer = %connection.peer(), "too many connections: closed");
                continue;
            }
            self.clients.push(Client { number: self.next_number, connection });
            self.next_number += 1;
        }
    }

    fn serve(&mut self) {
        let mut gone = Vec::new();
        for index in 0..self.clients.len() {
            loop {
                let number = self.clients[index].number;
                match self.clients[index].connection.try_receive::<Request>() {
                    Ok(Some((request, _fds))) => self.handle(index, number, request),
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
            self.member.cut().abandon(number);
            self.clients.retain(|client| client.number != number);
            self.waiters.retain(|waiter| waiter.connection != number);
            if self.coordinator == Some(number) {
                self.coordinator_gone();
            }
        }
    }

    /// The coordinator went away between two phases: nobody will tell us to undo, so we do.
    fn coordinator_gone(&mut self) {
        self.coordinator = None;
        let phase = match self.member.state() {
            MemberState::Offloading => Phase::AbortPause,
            MemberState::Restoring => Phase::AbortResume,
            MemberState::Active | MemberState::Paused | MemberState::Faulted => return,
        };
        tracing::warn!(?phase, "the coordinator is gone: undoing");
        self.submit(0, Work::Phase(phase), AGENT_TIMEOUT);
    }

    fn submit(&self, connection: u64, work: Work, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        if self.jobs.send(Job { connection, work, deadline }).is_err() {
            tracing::error!("the worker thread is gone");
        }
    }

    fn handle(&mut self, index: usize, number: u64, request: Request) {
        match request {
            Request::Hello => self.reply(index, &Reply::Member(self.member.info()), &[]),
            Request::Stats => {
                self.reply(index, &Reply::Stats(Box::new(self.member.stats())), &[]);
            }
            Request::Phase { phase, timeout_ms } => {
                self.coordinator = Some(number);
                self.member.cut().claim(number);
                self.submit(number, Work::Phase(phase), Duration::from_millis(timeout_ms));
            }
            Request::Cut { limits, seen, wait_ms } => {
                self.coordinator = Some(number);
                let asked = self.member.cut().claim(number);
                let work = Work::Cut { limits, seen, asked };
                self.submit(number, work, Duration::from_millis(wait_ms));
            }
            Request::AwaitConsent { action, timeout_ms } => {
                let deadline = Instant::now() + Duration::from_millis(timeout_ms);
                self.waiters.push_back(Waiter { connection: number, action, deadline });
            }
            Request::FetchFds { allocations, importer } => {
                let reply = self.hand_out(&allocations, importer.0);
                match reply {
                    Ok(fds) => {
                        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
                        self.reply(index, &Reply::Fds { count }, &fds);
                    }
                    Err(failure) => self.reply(index, &Reply::Failed(failure), &[]),
                }
            }
        }
    }

    fn hand_out(
        &self,
        ids: &[vmm_pool::AllocationId],
        importer: u64,
    ) -> Result<Vec<OwnedFd>, Failure> {
        if ids.len() > FDS_PER_MESSAGE_MAX {
            let message = format!("{} descriptors in one request are too many", ids.len());
            return Err(Failure { kind: FailureKind::Unknown, message });
        }
        let pool = self.member.pool();
        let active = self.member.state() == MemberState::Active;
        ids.iter()
            .map(|&id| if active { pool.redeem(id, importer) } else { pool.hand_out(id, importer) })
            .collect::<Result<_, _>>()
            .map_err(|error| Failure {
                kind: FailureKind::Unknown,
                message: format!("process {}: {error}", std::process::id()),
            })
    }

    fn reply(&mut self, index: usize, reply: &Reply, fds: &[OwnedFd]) {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let deadline = Instant::now() + AGENT_TIMEOUT;
        let Some(client) = self.clients.get_mut(index) else {
            return;
        };
        if let Err(error) = client.connection.send(reply, &borrowed, deadline) {
            tracing::warn!(%error, "an answer was not delivered");
        }
    }

    fn reply_to(&mut self, number: u64, reply: &Reply) {
        if let Some(index) = self.clients.iter().position(|client| client.number == number) {
            self.reply(index, reply, &[]);
        }
    }

    fn deliver(&mut self) {
        while let Ok(done) = self.done.try_recv() {
            self.reply_to(done.connection, &done.reply);
            let over = matches!(
                done.phase,
                Some(Phase::Verify | Phase::Activate | Phase::AbortPause | Phase::AbortResume)
            );
            if over && self.coordinator == Some(done.connection) {
                self.coordinator = None;
            } else if self.clients.iter().all(|client| client.number != done.connection)
                && done.connection != 0
                && done.phase.is_some()
            {
                // The phase outlived its coordinator.
                self.coordinator_gone();
            }
        }
    }

    fn answer_waiters(&mut self) {
        let consent = self.member.standing().consent;
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
            self.reply_to(number, &reply);
        }
    }
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
