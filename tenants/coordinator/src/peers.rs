//! The coordinator's connections, its questions on them, and the answers that are due.
//!
//! Answers come in the order of the questions on each connection, so a question may be sent while an
//! earlier one is unanswered: each connection keeps the queue of what it owes. One poll waits for all.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::unistd::geteuid;

use super::conversation::{Inquiry, Next, Wait};
use super::interrupt::Interrupt;
pub(super) use super::report::Question;
use super::report::{MemberFailure, Step, Who};
use sublet_protocol::identity::MemberId;
use sublet_protocol::run_dir::{MemberSocket, RunDirError, TenantDir};
use sublet_protocol::scope::TagNames;
use sublet_protocol::transport::{
    Connection, Process, TransportError, has_ended, poll_until, user_of,
};
use sublet_protocol::wire::{FailureKind, MemberInfo, MemberState, Reply};

/// The time limit of a send. Requests are short, so a peer that receives none in this time does not read its socket at all.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest time of a process between closing its descriptors and its end.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// One member, connected until it is lost.
#[derive(Debug)]
pub(super) struct Peer {
    who: Who,
    /// The member's id in this process's pid namespace, if it has one. `who` may have the id of the member's own namespace.
    pid_here: Option<u32>,
    info: Option<MemberInfo>,
    /// The member's process. The connection does not always tell of its end: a forked child may hold the connection open.
    process: Process,
    link: Link,
}

#[derive(Debug)]
enum Link {
    Up {
        connection: Box<Connection>,
        owed: VecDeque<Owed>,
    },
    /// The process ended, or closed the connection.
    HungUp,
    /// The connection cannot be used any more, though the process may live.
    Broken,
}

impl Link {
    /// Returns the state of a link after `error`.
    fn after(error: &TransportError) -> Self {
        if error.peer_is_gone() { Self::HungUp } else { Self::Broken }
    }
}

/// An answer that is due.
#[derive(Debug)]
struct Owed {
    step: Step,
    asked: Instant,
    deadline: Instant,
    /// Was the answer reported as missing already? It may still come, and then comes before later ones.
    overdue: bool,
}

/// A reply, or the report that none will come in time.
#[derive(Debug)]
pub struct Answer {
    /// The member, by its index.
    pub peer: usize,
    /// The step of the question.
    pub step: Step,
    who: Who,
    reply: Result<Reply, MemberFailure>,
}

impl Answer {
    /// Reads the answer as one to `question`.
    ///
    /// # Errors
    /// A refusal, and a reply of another kind.
    pub fn to<Q: Question>(self, question: &Q) -> Result<Q::Answer, MemberFailure> {
        let (who, step) = (self.who, self.step);
        // The code that knows the descriptors of a reply has received them before.
        match question.outcome_in(self.reply?, Vec::new()) {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(failure)) => Err(MemberFailure { who, step, failure }),
            None => Err(another_answer(who, step)),
        }
    }

    /// The failure, if there is one, for any question.
    pub(super) fn failure(self) -> Option<MemberFailure> {
        let (who, step) = (self.who, self.step);
        match self.reply {
            Ok(Reply::Failed(failure)) => Some(MemberFailure { who, step, failure }),
            Ok(_) => None,
            Err(failure) => Some(failure),
        }
    }
}

/// The failure of a member whose answer fits another question.
fn another_answer(who: Who, step: Step) -> MemberFailure {
    let message = "its answer does not fit the question";
    MemberFailure::new(who, step, FailureKind::Unknown, message)
}

/// The outcome of a try to reach the process behind a socket.
pub(super) enum Reached {
    Peer(Box<Peer>),
    Dead,
}

/// Connects to a member. A socket that no process serves any more is no error.
pub(super) fn reach(socket: &MemberSocket, deadline: Instant) -> Result<Reached, TransportError> {
    let connection = match Connection::connect(&socket.path, deadline) {
        Err(error) if error.nobody_listens() => return Ok(Reached::Dead),
        connection => connection?,
    };
    // A forked child may hold a dead parent's listening socket open without serving it.
    let process = connection.process();
    if process.has_ended() {
        return Ok(Reached::Dead);
    }
    Ok(Reached::Peer(Box::new(Peer {
        who: Who { pid: connection.peer().pid(), member: socket.id },
        pid_here: connection.peer().pid(),
        info: None,
        process,
        link: Link::Up { connection: Box::new(connection), owed: VecDeque::new() },
    })))
}

/// All members of one operation.
#[derive(Debug, Default)]
pub struct Peers {
    list: Vec<Peer>,
    /// The number of dead processes whose sockets were removed.
    dead: usize,
    /// The peers that have sent something or ended, by index. An entry too many does no harm, and the next look finds a missing
    /// one.
    ready: VecDeque<usize>,
}

impl Peers {
    /// Adds the process behind `socket`, or removes the socket if the process is dead.
    pub(super) fn add(
        &mut self,
        dir: &TenantDir,
        socket: &MemberSocket,
        reached: Reached,
    ) -> Result<(), RunDirError> {
        match reached {
            Reached::Peer(peer) => self.list.push(*peer),
            Reached::Dead => {
                dir.remove_socket(socket)?;
                self.dead += 1;
            }
        }
        Ok(())
    }

    /// The indexes of all members.
    pub fn all(&self) -> Vec<usize> {
        (0..self.list.len()).collect()
    }

    /// The number of processes that had ended before the first question.
    pub fn dead(&self) -> usize {
        self.dead
    }

    /// The process of a member, for people.
    pub fn who(&self, index: usize) -> Who {
        self.list[index].who
    }

    /// The names of all members.
    pub(super) fn names(&self) -> BTreeSet<MemberId> {
        self.list.iter().map(|peer| peer.who.member).collect()
    }

    /// The greeting of a member.
    pub fn info(&self, index: usize) -> Option<&MemberInfo> {
        self.list[index].info.as_ref()
    }

    /// The greetings of all members.
    pub(super) fn infos(&self) -> impl Iterator<Item = &MemberInfo> {
        self.list.iter().filter_map(|peer| peer.info.as_ref())
    }

    /// The id of a member's process in the pid namespace of this process.
    pub fn pid_here(&self, index: usize) -> Option<u32> {
        self.list[index].pid_here
    }

    /// Makes the process of this member look like one of another pid namespace.
    #[cfg(test)]
    pub(super) fn move_out_of_sight(&mut self, index: usize) {
        self.list[index].pid_here = None;
    }

    /// The indexes of the members for which `is_meant` is true.
    pub(super) fn those(&self, is_meant: impl Fn(&MemberInfo) -> bool) -> Vec<usize> {
        let mut all = self.all();
        all.retain(|index| self.info(*index).is_some_and(&is_meant));
        all
    }

    /// The indexes of the members that have answered the greeting.
    pub fn greeted(&self) -> Vec<usize> {
        self.those(|_| true)
    }

    /// The members that are stopped in a pause by tag.
    pub(super) fn standing(&self) -> Vec<usize> {
        self.those(|info| info.stands_without.is_some())
    }

    /// The tags of a pause by tag in which members are stopped.
    pub(super) fn stands_without(&self) -> Option<TagNames> {
        self.infos().find_map(|info| info.stands_without.clone())
    }

    /// The state of a member, if it has answered the greeting.
    pub fn state(&self, index: usize) -> Option<MemberState> {
        self.info(index).map(|info| info.state)
    }

    /// Records that a step has brought this member to `state`.
    pub fn set_state(&mut self, index: usize, state: MemberState) {
        if let Some(info) = &mut self.list[index].info {
            info.state = state;
        }
    }

    /// Does this member run, so that its memory is restored by tag?
    pub fn runs(&self, index: usize) -> bool {
        self.state(index) == Some(MemberState::Active)
    }

    /// Forgets the members that have not answered the greeting.
    pub(super) fn drop_nameless(&mut self) {
        self.list.retain(|peer| peer.info.is_some());
    }

    /// Sends those of `members` that are connected a message that changes nothing more, and waits for their answers.
    pub fn tell<Q: Question>(&mut self, members: &[usize], news: Q, timeout: Duration) {
        let up: Vec<usize> = members.iter().copied().filter(|index| self.is_up(*index)).collect();
        self.converse(&up, Inquiry::of(news, timeout, None), |_, _, said| {
            if let Err(failure) = said {
                tracing::debug!(%failure, "a process was not told, or did not say that it was");
            }
            Next::Done
        });
    }

    /// Asks one member. Its answer is due within `timeout` of now, or of the deadline of an earlier answer that it owes.
    ///
    /// # Errors
    /// The member has ended, or does not receive the question.
    pub fn ask<Q: Question>(
        &mut self,
        index: usize,
        question: &Q,
        timeout: Duration,
    ) -> Result<(), MemberFailure> {
        let step = question.step();
        if matches!(&self.list[index].link, Link::Up { owed, .. } if owed.is_empty()) {
            // A message that is already here answers no question, and must not count as the answer to this one.
            self.check_alive(index, step)?;
        }
        let peer = &mut self.list[index];
        let who = peer.who;
        let Link::Up { connection, owed } = &mut peer.link else {
            return Err(gone(who, step, "its connection was lost before".to_owned()));
        };
        let now = Instant::now();
        if let Err(error) = connection.ask(&question.to_request(), now + SEND_TIMEOUT) {
            return Err(peer.lose(step, &error));
        }
        let busy_until = owed.iter().filter(|owed| !owed.overdue);
        let start = busy_until.map(|owed| owed.deadline).max().unwrap_or(now);
        owed.push_back(Owed {
            step,
            asked: now,
            deadline: start.max(now) + timeout,
            overdue: false,
        });
        Ok(())
    }

    /// Extends all deadlines of this question to the last one, so that all silent members are overdue together, and named.
    pub(super) fn give_all_the_time_of_the_last(&mut self, step: Step) {
        let all = self.list.iter_mut().filter_map(|peer| match &mut peer.link {
            Link::Up { owed, .. } => {
                owed.back_mut().filter(|owed| owed.step == step && !owed.overdue)
            }
            Link::HungUp | Link::Broken => None,
        });
        let mut all: Vec<_> = all.collect();
        let last = all.iter().map(|owed| owed.deadline).max();
        for owed in &mut all {
            owed.deadline = last.unwrap_or(owed.deadline);
        }
    }

    /// The next answer of several tenants' members with the position of that tenant, or the next overdue member. None if no
    /// member owes an answer that could still be in time, or if `interrupt` was raised. With [`Wait::Nobody`] it does not
    /// block, and only returns answers that have arrived or are overdue already.
    pub fn next_of(
        all: &mut [&mut Self],
        wait: Wait,
        interrupt: Option<&Interrupt>,
    ) -> Option<(usize, Answer)> {
        let interrupt = interrupt.filter(|_| wait == Wait::Others);
        loop {
            if let Some(found) = Self::first(all, Self::answer_at_hand) {
                return Some(found);
            }
            if interrupt.is_some_and(Interrupt::is_raised) {
                return None;
            }
            let deadline = match wait {
                Wait::Others => all.iter().filter_map(|peers| peers.earliest_deadline()).min()?,
                Wait::Nobody => Instant::now(),
            };
            Self::look(all, deadline, interrupt);
            if Instant::now() >= deadline {
                let late = |peers: &mut Self| {
                    peers.answer_at_hand().or_else(|| peers.mark_overdue(deadline))
                };
                let found = Self::first(all, late);
                if found.is_some() || wait == Wait::Nobody {
                    return found;
                }
            }
        }
    }

    fn first(
        all: &mut [&mut Self],
        mut answer: impl FnMut(&mut Self) -> Option<Answer>,
    ) -> Option<(usize, Answer)> {
        let mut each = all.iter_mut().enumerate();
        each.find_map(|(position, peers)| Some((position, answer(peers)?)))
    }

    /// Waits until a member that owes an answer has sent something or ended, and notes all such members. With many members, a
    /// look at each member for each answer would be most of the time of a pause.
    fn look(all: &mut [&mut Self], deadline: Instant, interrupt: Option<&Interrupt>) {
        let mut owners = Vec::new();
        let mut fds = Vec::new();
        for (position, peers) in all.iter().enumerate() {
            for (index, peer) in peers.list.iter().enumerate() {
                for event in waiting_fds(peer) {
                    owners.push((position, index));
                    fds.push(event);
                }
            }
        }
        fds.extend(interrupt.map(|raised| PollFd::new(raised.as_fd(), PollFlags::POLLIN)));
        match poll_until(&mut fds, deadline) {
            Ok(_) => {
                let ready = owners.iter().zip(&fds).filter(|(_, fd)| fd.any() != Some(false));
                let ready: Vec<_> = ready.map(|(owner, _)| *owner).collect();
                for (position, index) in ready {
                    all[position].ready.push_back(index);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the members could not be waited for: each is looked at");
                for peers in all {
                    peers.ready.extend(0..peers.list.len());
                }
                std::thread::yield_now();
            }
        }
    }

    /// The next answer of the members that were found ready. A member may have sent more than one.
    fn answer_at_hand(&mut self) -> Option<Answer> {
        while let Some(&index) = self.ready.front() {
            let answer = self.list.get_mut(index).and_then(|peer| peer.try_answer(index));
            if answer.is_some() {
                return answer;
            }
            self.ready.pop_front();
        }
        None
    }

    /// Records a greeting, which must come from the member whose socket was called.
    pub(super) fn introduce(
        &mut self,
        index: usize,
        mut info: MemberInfo,
    ) -> Result<(), MemberFailure> {
        let peer = &mut self.list[index];
        if info.id != peer.who.member {
            return Err(another_answer(peer.who, Step::Hello));
        }
        // The kernel's id is valid in our namespace, and the member's own id may not be.
        info.pid = peer.who.pid.unwrap_or(info.pid);
        peer.who.pid = Some(info.pid);
        peer.info = Some(info);
        Ok(())
    }

    /// Does this member still owe an answer to `step`?
    pub(super) fn owes(&self, index: usize, step: Step) -> bool {
        match &self.list[index].link {
            Link::Up { owed, .. } => owed.iter().any(|owed| owed.step == step),
            Link::HungUp | Link::Broken => false,
        }
    }

    /// Is this member's connection up?
    pub fn is_up(&self, index: usize) -> bool {
        matches!(self.list[index].link, Link::Up { .. })
    }

    /// Has this member's process ended? A closed connection does not prove it.
    pub(super) fn is_dead(&self, index: usize, dir: &TenantDir) -> bool {
        let Peer { who, process, link, .. } = &self.list[index];
        let is_left = || dir.socket_path(who.member).is_ok_and(|path| has_ended(&path));
        process.has_ended() || (matches!(link, Link::HungUp) && is_left())
    }

    /// Forgets the members that have ended.
    pub(super) fn drop_ended(&mut self) {
        self.list.retain(|peer| !matches!(peer.link, Link::HungUp));
    }

    /// Closes our end of the connection. Answers that the member still owes are dropped.
    pub(super) fn drop_link(&mut self, index: usize) {
        self.list[index].link = Link::Broken;
    }

    /// Is this member silent beyond a deadline?
    pub fn is_overdue(&self, index: usize) -> bool {
        match &self.list[index].link {
            Link::Up { owed, .. } => owed.iter().any(|owed| owed.overdue),
            Link::HungUp | Link::Broken => false,
        }
    }

    /// Notices a member that closed its connection while it owed no answer.
    pub(super) fn check_alive(&mut self, index: usize, step: Step) -> Result<(), MemberFailure> {
        let peer = &mut self.list[index];
        let who = peer.who;
        let has_ended = peer.process.has_ended();
        let Link::Up { connection, .. } = &mut peer.link else {
            return Err(gone(who, step, "its connection was lost before".to_owned()));
        };
        match connection.try_receive::<Reply>() {
            Ok(None) if has_ended => Err(peer.note_end(step)),
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                peer.link = Link::Broken;
                Err(gone(who, step, "it sent an answer to no question".to_owned()))
            }
            Err(error) => Err(peer.lose(step, &error)),
        }
    }

    fn earliest_deadline(&self) -> Option<Instant> {
        let owed = self.list.iter().filter_map(|peer| match &peer.link {
            Link::Up { owed, .. } => Some(owed.iter()),
            Link::HungUp | Link::Broken => None,
        });
        let owed = owed.flatten();
        let due = owed.filter(|owed| !owed.overdue);
        due.map(|owed| owed.deadline).min()
    }

    /// Records one answer that was due at `deadline` as missing.
    fn mark_overdue(&mut self, deadline: Instant) -> Option<Answer> {
        for (index, peer) in self.list.iter_mut().enumerate() {
            let Link::Up { owed, .. } = &mut peer.link else {
                continue;
            };
            let late = owed.iter_mut().find(|owed| !owed.overdue && owed.deadline <= deadline);
            if let Some(owed) = late {
                owed.overdue = true;
                let waited = owed.deadline.saturating_duration_since(owed.asked);
                let message = format!("it did not answer within {:.1} s", waited.as_secs_f64());
                let (who, step) = (peer.who, owed.step);
                let reply = Err(gone(who, step, message));
                return Some(Answer { peer: index, step, who, reply });
            }
        }
        None
    }
}

impl Peer {
    /// Reads an answer that has arrived. A broken connection answers the oldest question and voids the rest.
    fn try_answer(&mut self, index: usize) -> Option<Answer> {
        let who = self.who;
        let Link::Up { connection, owed } = &mut self.link else {
            return None;
        };
        let step = owed.front()?.step;
        // Checked before the connection is read: messages that the member sent before its end count.
        let has_ended = self.process.has_ended();
        let reply = match connection.try_receive::<Reply>() {
            Ok(None) if has_ended => Err(self.note_end(step)),
            Ok(None) => return None,
            Ok(Some((reply, _no_fds))) => {
                owed.pop_front();
                Ok(reply)
            }
            Err(error) => Err(self.lose(step, &error)),
        };
        Some(Answer { peer: index, step, who, reply })
    }

    /// Records that the process has ended, though its connection does not show it.
    fn note_end(&mut self, step: Step) -> MemberFailure {
        self.link = Link::HungUp;
        gone(self.who, step, self.end_in_words())
    }

    /// Records that the connection failed with `error`.
    fn lose(&mut self, step: Step, error: &TransportError) -> MemberFailure {
        self.link = Link::after(error);
        let in_words = match &self.info {
            Some(info) => format!("{} ({})", with_source(error), info.command),
            None => with_source(error),
        };
        let message = match self.link {
            Link::HungUp if self.ends_soon() => self.end_in_words(),
            Link::HungUp if let Some(user) = self.other_user() => format!(
                "{in_words}; it runs as user {user} now, and this process as user {}: a process obeys its own user alone, so have \
                 it change its user before it first uses a GPU",
                geteuid()
            ),
            Link::HungUp => format!(
                "{in_words}; if it lives, it goes on without this command, which may have stood still for too long: \
                 see `sublet ps`"
            ),
            Link::Broken | Link::Up { .. } => in_words,
        };
        gone(self.who, step, message)
    }

    /// Does a process that closed its connection end soon? The kernel closes descriptors first.
    fn ends_soon(&self) -> bool {
        let ended = self.process.ends_before(Instant::now() + END_TIMEOUT);
        ended.unwrap_or(self.info.is_some())
    }

    /// The user of a process that has changed it since it joined.
    fn other_user(&self) -> Option<u32> {
        user_of(self.pid_here?).filter(|user| *user != geteuid().as_raw())
    }

    fn end_in_words(&self) -> String {
        match &self.info {
            Some(info) => format!("it has ended ({})", info.command),
            None => "it has ended".to_owned(),
        }
    }
}

/// Returns the descriptors to wait for if `peer` owes an answer: the connection's, and that for the end of the process.
fn waiting_fds(peer: &Peer) -> impl Iterator<Item = PollFd<'_>> {
    let connection = match &peer.link {
        Link::Up { connection, owed } if !owed.is_empty() => Some(connection.as_fd()),
        Link::Up { .. } | Link::HungUp | Link::Broken => None,
    };
    let process = connection.and(peer.process.end_event());
    connection.into_iter().chain(process).map(|fd| PollFd::new(fd, PollFlags::POLLIN))
}

/// The failure of a member that cannot answer itself.
pub(super) fn gone(who: Who, step: Step, message: String) -> MemberFailure {
    MemberFailure::new(who, step, FailureKind::PeerGone, message)
}

/// An error and its cause in one line: failures of members travel as text.
pub(super) fn with_source(error: &TransportError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
