//! The agent thread of a member: it serves connections, and gives jobs to the worker thread (`executor.rs`).

mod leading;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use nix::poll::{PollFd, PollFlags};
use vmm_pool::Keeper;
use vmm_pool::driver::Driver;
use vmm_pool::threads::text_of;

use super::clients::{CONNECTIONS_MAX, Clients, OPEN_REQUESTS_MAX, REQUESTS_PER_TURN_MAX};
use super::executor::{self, Done, Job, NOBODY, Work};
use super::failures::PID;
use super::keeping::not_kept;
use super::neighbours::Given;
use super::sharing::HandedOut;
use super::signals::Wakeups;
use super::{AGENT_TIMEOUT, Member};
use sublet_protocol::transport::{Listener, TransportError, poll_until};
use sublet_protocol::wire::{
    Action, AskLent, AwaitConsent, Failure, FailureKind, GiveUp, LookIdle, Needs, Order, Phase,
    Reply, Request, TakePhase, Withdraw,
};
use sublet_protocol::{descriptors::Reserve, run_dir::NAME_LOOK_EVERY};

/// The longest timeout of a request, whatever the request says.
const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// The most connections that are accepted before existing ones are served. Many only check whether this process lives, and have
/// closed already. Accepted in one go, they would displace a connection whose request comes next.
const ACCEPTED_PER_TURN_MAX: usize = CONNECTIONS_MAX / 4;
/// The time for which the agent ignores its listening socket when the system gives it no connection. An example is a
/// process with too many open files: the socket would wake the agent again immediately.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// The longest silence of a coordinator after the time limit of its last request has passed for all members. A coordinator
/// waits for answers only for its margin, which is two seconds.
const SILENCE_MAX: Duration = Duration::from_secs(15);

struct Waiter {
    connection: u64,
    action: Action,
    deadline: Instant,
}

struct Agent<D: Driver> {
    member: Arc<Member<D>>,
    /// None once the process has left: then no peer finds it any more.
    listener: Option<Listener>,
    /// The time of the next check whether the listener still has its name.
    look_at: Instant,
    wakeups: Wakeups,
    reserve: Reserve,
    clients: Clients,
    /// No connection is accepted before this time.
    accept_after: Option<Instant>,
    waiters: Vec<Waiter>,
    jobs: Sender<Job>,
    done: Receiver<Done>,
    /// The time at which the next request of the leader is due. If the leader ends, the process settles alone.
    due: Instant,
    /// The connections that requested to write contents to files, each with the flag that tells its steps that the connection
    /// is closed.
    writers: BTreeMap<u64, Arc<AtomicBool>>,
}

/// A periodic task of the agent: its name and its function.
type Aftercare<A> = (&'static str, fn(&mut A));

/// Starts both threads.
pub(super) fn spawn<D: Driver>(
    member: &Arc<Member<D>>,
    keeper: Keeper<D>,
    listener: Listener,
    wakeups: Wakeups,
) -> io::Result<()> {
    let (jobs, done) = executor::spawn(member, keeper)?;
    let after_panic = jobs.clone();
    let mut reserve = Reserve::default();
    reserve.fill(&wakeups.0);
    let agent = Agent {
        member: Arc::clone(member),
        listener: Some(listener),
        look_at: Instant::now() + NAME_LOOK_EVERY,
        wakeups,
        reserve,
        clients: Clients::default(),
        accept_after: None,
        waiters: Vec::new(),
        jobs,
        done,
        due: Instant::now(),
        writers: BTreeMap::new(),
    };
    vmm_pool::threads::spawn(
        "sublet-agent",
        move || agent.run(),
        move |text| {
            let (work, deadline) = (Work::Fail(text.to_owned()), Instant::now());
            drop(after_panic.send(Job { connection: NOBODY, work, deadline }));
        },
    )?;
    Ok(())
}

impl<D: Driver> Agent<D> {
    fn run(mut self) {
        loop {
            // A defect must not end the thread. Otherwise no peer could reach this process any more, nor open its gate.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.turn())) {
                let settle = AssertUnwindSafe(|| self.hang_up_on_all(text_of(&*panic)));
                // The next turn finds again whatever could not be settled.
                let _panic = catch_unwind(settle);
            }
        }
    }

    fn turn(&mut self) {
        self.reserve.fill(&self.wakeups.0);
        self.wait();
        self.wakeups.clear();
        let has_left = self.member.presence.has_left();
        self.listener.take_if(|listener| has_left && !listener.is_named());
        self.accept();
        self.serve();
        self.deliver();
        self.answer_waiters();
        self.hang_up_on_silence();
        self.keep_name();
    }

    /// Handles a turn that failed inside. Its subject is not known, so all actions under way are settled as if their clients
    /// had ended.
    fn hang_up_on_all(&mut self, panic: &str) {
        self.member.notes.add(format!(
            "Sublet failed inside, in its agent ({panic}): it hung up on all who had connected, and goes on; report this"
        ));
        for number in self.clients.numbers() {
            self.clients.close(number);
            self.forget(number);
        }
        // A turn that fails each time must not use a whole processor.
        std::thread::park_timeout(ACCEPT_BACK_OFF);
    }

    /// Periodic tasks, in the order in which they run.
    const LOOKS: [Aftercare<Self>; 5] = [
        ("idleness", |agent| _ = agent.member.idle.look()),
        ("closed tickets", |agent| {
            if agent.jobs.is_empty() && agent.member.pool.holdings().has_watched_tickets() {
                agent.submit(NOBODY, Work::EndTickets, AGENT_TIMEOUT);
            }
        }),
        ("host memory outside of pauses", |agent| {
            agent.member.keeping.iter().for_each(|keeping| Arc::clone(keeping).look());
        }),
        ("lenders beyond a budget", |agent| agent.member.pool.yield_to_budgets()),
        // Memory of this process is counted with that of the other processes of its tenant.
        ("share of the budgets", |agent| {
            let may = agent.leading().is_none() && agent.is_named() && agent.jobs.is_empty();
            let counting = agent.member.config().counting.as_ref();
            if may && counting.is_some_and(|counting| counting.is_due(&*agent.member)) {
                agent.submit(NOBODY, Work::Count, AGENT_TIMEOUT);
            }
        }),
    ];

    /// Has the listener its name, if there is a listener?
    fn is_named(&self) -> bool {
        self.listener.as_ref().is_none_or(Listener::is_named)
    }

    /// Makes the socket's name again after it was removed. Otherwise no peer could reach this process any more, nor its saved
    /// contents.
    fn keep_name(&mut self) {
        let now = Instant::now();
        if now < self.look_at {
            return;
        }
        self.look_at = now + NAME_LOOK_EVERY;
        for (_, look) in Self::LOOKS {
            look(self);
        }
        // A coordinator may hold a lock that was removed with the directory: another coordinator must not find this process
        // meanwhile. The name is also removed at the process's end.
        if self.leading().is_some() || self.is_named() || self.member.presence.has_left() {
            return;
        }
        let member = Arc::clone(&self.member);
        let path = member.presence.socket_path().display();
        let note = match member.presence.listen_again() {
            Ok(listener) => {
                // A client that has connected already is still served.
                self.accept();
                self.listener = Some(listener);
                format!("{path} had been removed, and was made again")
            }
            Err(error) => format!("{path} was removed, and nobody can reach this process: {error}"),
        };
        member.notes.add(note);
        if member.presence.has_left() {
            member.leave();
        }
    }

    fn wait(&self) {
        let waiters = self.waiters.iter().map(|waiter| waiter.deadline);
        let silence = self.leading().map(|_| self.due);
        let others = self.clients.next_stall().into_iter().chain(self.accept_after).chain(silence);
        let deadline = waiters.chain(others).min().unwrap_or(self.look_at).min(self.look_at);
        let mut fds = vec![PollFd::new(self.wakeups.0.as_fd(), PollFlags::POLLIN)];
        // Checked after the deadline was computed: room that appears with time is seen here, or waited for.
        let has_room = self.accept_after.is_none() && self.clients.has_room(self.leading());
        let listener = self.listener.as_ref().filter(|_| has_room);
        fds.extend(listener.map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)));
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
        for _ in 0..ACCEPTED_PER_TURN_MAX {
            if !self.clients.has_room(self.leading()) {
                return;
            }
            let Some(listener) = &self.listener else { return };
            let accepted = match listener.accept() {
                Err(error) if error.is_for_want_of_descriptors() && self.reserve.give_up() => {
                    listener.accept()
                }
                accepted => accepted,
            };
            match accepted {
                Ok(Some(connection)) => {
                    if let Some(closed) = self.clients.add(connection, self.leading()) {
                        self.forget(closed);
                    }
                }
                Ok(None) => return,
                Err(error @ TransportError::Accept { .. }) => {
                    self.member.notes.add(format!("nobody can reach this process: {error}"));
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

    /// Handles the end of connection `number`.
    fn forget(&mut self, number: u64) {
        self.member.cut().abandon(number);
        self.waiters.retain(|waiter| waiter.connection != number);
        if let Some(is_called_off) = self.writers.remove(&number) {
            is_called_off.store(true, Ordering::Relaxed);
            self.submit(NOBODY, Work::EndSave(number), AGENT_TIMEOUT);
        }
        if self.leading() == Some(number) {
            self.leader_gone();
        }
    }

    /// Handles the end of the coordinator. No further order will come, so the worker settles after its current order.
    fn leader_gone(&mut self) {
        let round = self.member.rounds().end_leading();
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
        if is_answered_later(&request) && !self.opens(number) {
            return;
        }
        match request {
            Request::Hello => self.answer(number, &Reply::Member(self.member.info())),
            Request::Stats => {
                self.answer(number, &Reply::Stats(Box::new(self.member.stats())));
            }
            Request::Needs(Needs { scope, timeout_ms, all_devices }) => {
                self.submit(number, Work::Needs(scope, all_devices), wait_of(timeout_ms));
            }
            Request::Phase(TakePhase { order: Order::Settle, timeout_ms, .. }) => {
                self.settle(number, wait_of(timeout_ms));
            }
            Request::Phase(request) => self.take_phase(number, request),
            Request::Cut(hold) => {
                let wait = wait_of(hold.wait_ms);
                if self.follow(number, wait) {
                    let asked = self.member.cut().claim(number);
                    self.submit(number, Work::Cut { hold, asked }, wait);
                } else {
                    self.refuse(number);
                }
            }
            Request::Step(step) => {
                let wait = wait_of(step.wait_ms);
                let is_led = self.member.rounds().is_led(number, step.round);
                if is_led && self.follow(number, wait) {
                    let asked = self.member.cut().claim(number);
                    self.submit(number, Work::Step { step, asked }, wait);
                } else {
                    self.refuse(number);
                }
            }
            Request::Save(step) => {
                let client = self.clients.connection(number);
                let checked = client
                    .map(|client| self.member.presence.check_neighbour(client, Given::Contents));
                if let Some(Err(failure)) = checked {
                    self.say(number, Reply::Failed(failure));
                    return;
                }
                self.writers.entry(number).or_default();
                self.submit(number, Work::Save(step), AGENT_TIMEOUT);
            }
            Request::Spill(step) => {
                let is_called_off = Arc::clone(self.writers.entry(number).or_default());
                self.submit(number, Work::Spill(step, is_called_off), AGENT_TIMEOUT);
            }
            Request::Host(step) => {
                let said = self.member.keeping.clone().map(|keeping| keeping.host(step));
                let said = said.map(|said| Reply::Host(Box::new(said)));
                self.answer(number, &said.unwrap_or_else(|| Reply::Failed(not_kept())));
            }
            Request::Count => self.submit(number, Work::Count, AGENT_TIMEOUT),
            Request::Idle(LookIdle { quiet_us }) => {
                self.submit(number, Work::Idle(quiet_us), AGENT_TIMEOUT);
            }
            Request::Withdraw(Withdraw { round }) => {
                let told = self.withdraw(round);
                self.answer(number, &Reply::Told(told));
            }
            Request::GiveUp(GiveUp { action, why }) => {
                self.member.asking.give_up(action, why);
                self.answer(number, &Reply::Noted);
            }
            Request::AwaitConsent(AwaitConsent { action, timeout_ms }) => {
                let deadline = Instant::now() + wait_of(timeout_ms);
                self.waiters.push(Waiter { connection: number, action, deadline });
            }
            Request::FetchFds(fetch) => {
                // On this thread and not on the worker: after the worker has closed the gate, the reported loans are complete.
                let client = self.clients.find(number);
                match client.map(|client| self.member.sharing.hand_out(&fetch, client)) {
                    None => {}
                    Some(Ok(HandedOut { fds, tags, missing, devices })) => {
                        let count = u32::try_from(fds.len()).unwrap_or(u32::MAX);
                        let reply = Reply::Fds { count, tags, missing, devices };
                        self.clients.answer(number, &reply, fds);
                    }
                    Some(Err(failure)) => self.answer(number, &Reply::Failed(failure)),
                }
            }
            Request::Lent(AskLent { scope }) => {
                let reply = Reply::Lent(Box::new(self.member.sharing.lending(&scope)));
                if self.leading() == Some(number) {
                    // A look that the worker still does was requested before. It ends now, and its answer comes first.
                    self.member.cut().claim(number);
                    self.submit(number, Work::Say(reply), AGENT_TIMEOUT);
                } else {
                    self.answer(number, &reply);
                }
            }
        }
    }

    /// Notes that client `number` gets an answer later. A client with too many open requests is closed: an answer out of order
    /// would count for another request.
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
                self.member.rounds().stop_leading(done.connection);
            }
        }
    }

    fn answer_waiters(&mut self) {
        let consent = self.member.asking.consent_to();
        let now = Instant::now();
        let answered = self
            .waiters
            .extract_if(.., |waiter| consent == Some(waiter.action) || now >= waiter.deadline);
        for Waiter { connection, action, .. } in answered {
            let reply = if consent == Some(action) {
                Reply::Consented
            } else {
                Reply::Failed(no_consent(action))
            };
            self.clients.answer_open(connection, &reply);
        }
    }
}

/// Does the answer come from the worker, or after an event? A client may have only a limited number of such requests.
fn is_answered_later(request: &Request) -> bool {
    matches!(
        request,
        Request::Needs(_)
            | Request::Phase(_)
            | Request::Cut(_)
            | Request::Step(_)
            | Request::Save(_)
            | Request::Spill(_)
            | Request::Count
            | Request::Idle(_)
            | Request::AwaitConsent(_)
    )
}

fn wait_of(timeout_ms: u64) -> Duration {
    Duration::from_millis(timeout_ms).min(TIMEOUT_MAX)
}

fn no_consent(action: Action) -> Failure {
    let call = match action {
        Action::Pause => "ncclPause",
        Action::Resume => "ncclResume",
    };
    // `ncclPause` and `ncclResume` wait until all processes of the tenant have called them, and this one did not
    // within `SUBLET_WAIT`. Nothing was changed. Helper processes that use CUDA must call too, or one process calls
    // `sublet_pause_tenant` for all.
    FailureKind::NoConsent.because(format!(
            "process {PID} has not called {call} in time: every process of the tenant must call it, or one \
             of them sublet_pause_tenant for all"
        ))
}

#[cfg(test)]
mod tests {
    use vmm_pool::driver::sim::SimDriver;

    use super::*;

    #[test]
    fn the_order_of_looks_is_behaviour() {
        assert_eq!(
            Agent::<SimDriver>::LOOKS.map(|(name, _)| name),
            [
                "idleness",
                "closed tickets",
                "host memory outside of pauses",
                "lenders beyond a budget",
                "share of the budgets",
            ]
        );
    }
}
