//! The coordinator that leads this process through a pause or resume: which orders are followed, and what ends the lead.

use std::time::{Duration, Instant};

use vmm_pool::driver::Driver;

use super::{AGENT_TIMEOUT, Agent, SILENCE_MAX, Work, wait_of};
use crate::failures::{PID, wrong_state};
use crate::rounds::{Admission, OfRound};
use sublet_protocol::phase::Stage;
use sublet_protocol::wire::{Asked, Order, PhaseAnswer, Reply, RoundEnd, TakePhase};

impl<D: Driver> Agent<D> {
    /// Closes the connection of a silent coordinator. A coordinator that is connected and sends no more requests has stopped
    /// itself, and would stop this process too.
    pub(super) fn hang_up_on_silence(&mut self) {
        if let Some(number) = self.leading()
            && Instant::now() >= self.due
        {
            self.member.notes.add(
                "the leader of a pause or resume was silent for too long (stopped?), and was hung up on".to_owned(),
            );
            self.hang_up(number);
        }
    }

    /// Closes the coordinator's connection, so that nothing it may still send is acted on. Then acts as if the coordinator had
    /// ended.
    fn hang_up(&mut self, number: u64) {
        self.clients.close(number);
        self.forget(number);
    }

    /// Handles all requests that the leader has sent so far, since they count.
    fn hear_out(&mut self, number: u64) {
        while let Ok(Some(request)) = self.clients.next_request(number) {
            self.handle(number, request);
        }
    }

    /// Answers a process that settles `round` without its coordinator. That process relies on the answer, so no step of the
    /// round may follow.
    pub(super) fn withdraw(&mut self, round: u64) -> RoundEnd {
        if let Some(number) = self.leading() {
            self.hear_out(number);
            // The next command may lead already, and settle what was left half done. It leads another round than `round`.
            // Closing its connection would exclude this process from its work.
            let leads = self.member.rounds().is_led(number, round);
            if leads {
                self.hang_up(number);
            }
        }
        self.member.rounds().told(round)
    }

    /// Lets `number` lead, unless another connection leads, until its next request is due. That is when `timeout` for this
    /// request has passed for all members.
    pub(super) fn follow(&mut self, number: u64, timeout: Duration) -> bool {
        self.pass_by_the_dead(number);
        let follows = self.member.rounds().lead(number);
        if follows {
            self.due = Instant::now() + timeout + SILENCE_MAX;
        }
        follows
    }

    /// Ends the lead of a leader that has ended, if `number` sends a request.
    fn pass_by_the_dead(&mut self, number: u64) {
        if let Some(leader) = self.leading()
            && leader != number
            && self.clients.has_ended(leader)
        {
            self.hear_out(leader);
            self.hang_up(leader);
        }
    }

    /// Handles an order of a round, or of none.
    pub(super) fn take_phase(&mut self, number: u64, request: TakePhase) {
        if request.order.phase().stage() == Stage::AtRest {
            return self.take_at_rest(number, request);
        }
        let TakePhase { round, alone, order, timeout_ms } = request;
        let (phase, wait) = (order.phase(), wait_of(timeout_ms));
        self.pass_by_the_dead(number);
        let admission = {
            let mut rounds = self.member.rounds();
            let rests = self.member.lifecycle.state().rests();
            rounds.admit(number, OfRound { round, alone, stage: phase.stage() }, rests)
        };
        match admission {
            Admission::Taken => {
                self.member.rounds().asked = Some(Asked { round, phase });
                self.due = Instant::now() + wait + SILENCE_MAX;
                self.member.cut().claim(number);
                self.submit(number, Work::Phase(Some(round), order), wait);
            }
            Admission::NothingToUndo => {
                self.say(number, Reply::PhaseDone(phase, PhaseAnswer::default()));
            }
            Admission::Refused => self.refuse(number),
        }
    }

    /// Handles a step outside any pause or resume, for a process in none. The asking connection leads until it is answered.
    fn take_at_rest(&mut self, number: u64, request: TakePhase) {
        let TakePhase { round, order, timeout_ms, .. } = request;
        let (phase, wait) = (order.phase(), wait_of(timeout_ms));
        let is_free = self.member.rounds().under_way().is_none();
        if !is_free || !self.follow(number, wait) {
            self.refuse(number);
            return;
        }
        self.member.rounds().asked = Some(Asked { round, phase });
        self.submit(number, Work::Phase(None, order), wait);
    }

    /// Settles a round that the asking process found half done, or whose present leader it does not know. Orders of that leader
    /// are not followed any more.
    pub(super) fn settle(&mut self, number: u64, timeout: Duration) {
        if let Some(leader) = self.leading()
            && leader != number
        {
            self.hear_out(leader);
            self.hang_up(leader);
        }
        let round = {
            let mut rounds = self.member.rounds();
            let round = rounds.end_leading();
            rounds.lead(number);
            round
        };
        self.due = Instant::now() + timeout + SILENCE_MAX;
        self.member.cut().claim(number);
        self.submit(number, Work::Phase(round, Order::Settle), timeout);
    }

    /// Refuses a request: another connection leads, or the request does not follow the one before.
    pub(super) fn refuse(&mut self, number: u64) {
        let other = self.leading().filter(|leader| *leader != number);
        let why = other.map(|leader| {
            match self.clients.connection(leader).and_then(|client| client.peer().pid()) {
                Some(pid) => format!("process {pid}"),
                None => "another process".to_owned(),
            }
        });
        let failure = wrong_state(match why {
            Some(leader) => format!(
                "process {PID} takes part in another pause or resume, which {leader} leads: wait for it, or end it"
            ),
            None => format!("process {PID}: this step does not follow the one before"),
        });
        self.say(number, Reply::Failed(failure));
    }

    /// Gives an answer that [`Agent::opens`] has noted: immediately, or after earlier answers of the worker.
    pub(super) fn say(&mut self, number: u64, reply: Reply) {
        if self.clients.owed(number) == 1 {
            self.clients.answer_open(number, &reply);
        } else {
            self.submit(number, Work::Say(reply), AGENT_TIMEOUT);
        }
    }

    /// The connection of the leader.
    pub(super) fn leading(&self) -> Option<u64> {
        self.member.rounds().leader()
    }
}
