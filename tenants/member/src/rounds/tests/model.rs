//! Members, coordinators, and the messages between them, as a state machine. The code that decides in production also decides
//! here: on orders, on answers to other members, and on a round's end.

mod member;
mod setting;

use std::collections::VecDeque;

use crate::rounds::{Admission, PAST_MAX, Said, Verdict, known};
use sublet_protocol::phase::Stage;
use sublet_protocol::wire::RoundEnd;

use self::member::{ALL, At, Member, Order, Settling};
pub(super) use self::setting::{Event, Setting};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Answer {
    Due,
    Done,
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Line {
    unread: VecDeque<Order>,
    is_closed: bool,
    answer: Option<Answer>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    Waits,
    Leads(Order),
    Over,
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Coordinator {
    life: Life,
    lines: Vec<Line>,
    /// The members that do this step.
    takes: Vec<bool>,
}

/// The state of all members and coordinators at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact that a property asks for")]
pub(super) struct State {
    members: Vec<Member>,
    coordinators: Vec<Coordinator>,
    own: u8,
    repeats: u8,
    stops: u8,
    deaths: u8,
    lock_is_gone: bool,
    /// Was a member told to commit, and silent while the others followed their own orders?
    pub(super) may_part: bool,
    /// Was a member that acts alone refused although no other process led it?
    pub(super) own_was_refused: bool,
    pub(super) own_was_taken: bool,
    pub(super) asked: Option<Verdict>,
}

fn round_of(coordinator: usize) -> u64 {
    100 + coordinator as u64
}

fn connection_of(coordinator: usize) -> u64 {
    1 + coordinator as u64
}

/// A connection of no coordinator here.
const STRANGE: u64 = 99;

impl State {
    /// Removes the lock's file, while a coordinator holds it and another one waits.
    fn lock_goes(&mut self) -> bool {
        let is = |life: fn(&Life) -> bool| self.coordinators.iter().any(|other| life(&other.life));
        let matters = is(|life| *life == Life::Waits) && is(|life| matches!(life, Life::Leads(_)));
        matters && !std::mem::replace(&mut self.lock_is_gone, true)
    }

    fn lock_is_free(&self) -> bool {
        self.lock_is_gone
            || !self.coordinators.iter().any(|other| matches!(other.life, Life::Leads(_)))
    }

    /// The coordinator has the lock, and greets all members.
    fn starts(&mut self, c: usize) -> bool {
        if self.coordinators[c].life != Life::Waits || !self.lock_is_free() {
            return false;
        }
        if self.members.iter().any(|member| member.is_stopped) {
            return false;
        }
        let is_half_way = |member: &Member| !member.rests() || member.rounds.under_way().is_some();
        let half_way: Vec<bool> = self.members.iter().map(is_half_way).collect();
        let coordinator = &mut self.coordinators[c];
        if half_way.contains(&true) {
            coordinator.life = Life::Leads(Order::Settle);
            coordinator.takes = half_way;
        } else {
            coordinator.life = Life::Leads(Order::Begin);
            coordinator.takes.fill(true);
        }
        true
    }

    fn sends(&mut self, c: usize, m: usize) -> bool {
        let coordinator = &mut self.coordinators[c];
        let (Life::Leads(order), true) = (coordinator.life, coordinator.takes[m]) else {
            return false;
        };
        // The coordinator sends in the order of its list.
        if (0..m).any(|m| coordinator.takes[m] && coordinator.lines[m].answer.is_none()) {
            return false;
        }
        let line = &mut coordinator.lines[m];
        if line.answer.is_some() {
            return false;
        }
        if line.is_closed {
            line.answer = Some(Answer::Failed);
        } else {
            line.answer = Some(Answer::Due);
            line.unread.push_back(order);
        }
        true
    }

    fn repeats(&mut self, c: usize, m: usize) -> bool {
        let coordinator = &mut self.coordinators[c];
        let line = &mut coordinator.lines[m];
        let (Life::Leads(order), Some(_), false) = (coordinator.life, line.answer, line.is_closed)
        else {
            return false;
        };
        line.unread.push_back(order);
        self.repeats += 1;
        true
    }

    fn calls_off(&mut self, c: usize) -> bool {
        let coordinator = &mut self.coordinators[c];
        let Life::Leads(Order::Begin | Order::Prepare) = coordinator.life else {
            return false;
        };
        coordinator.undo();
        true
    }

    fn goes_on(&mut self, c: usize) -> bool {
        let coordinator = &mut self.coordinators[c];
        let Life::Leads(order) = coordinator.life else { return false };
        let is_due = |(line, takes): (&Line, &bool)| {
            *takes && matches!(line.answer, None | Some(Answer::Due)) && !line.is_closed
        };
        if coordinator.lines.iter().zip(&coordinator.takes).any(is_due) {
            return false;
        }
        let failed = |line: &Line| line.answer != Some(Answer::Done);
        let has_failed: Vec<bool> = coordinator.lines.iter().map(failed).collect();
        let takes = coordinator.takes.clone();
        let one_failed = has_failed.iter().zip(&takes).any(|(failed, takes)| *failed && *takes);
        match order {
            Order::Begin | Order::Prepare if one_failed => coordinator.undo(),
            Order::Settle if one_failed => coordinator.life = Life::Over,
            Order::Begin
            | Order::Prepare
            | Order::Commit
            | Order::Verify
            | Order::Abort
            | Order::Settle => {
                if order == Order::Settle {
                    coordinator.takes.fill(true);
                } else if order.stage() == Stage::Commit {
                    // A member that has failed is asked no more.
                    for (takes, failed) in coordinator.takes.iter_mut().zip(has_failed) {
                        *takes &= !failed;
                    }
                }
                coordinator.life = order.next().map_or(Life::Over, Life::Leads);
                coordinator.ask();
            }
        }
        true
    }

    fn dies(&mut self, c: usize) -> bool {
        let life = &mut self.coordinators[c].life;
        let leads = matches!(life, Life::Leads(_));
        if leads {
            *life = Life::Dead;
            self.deaths += 1;
        }
        leads
    }

    fn reads(&mut self, m: usize, c: usize) -> bool {
        let line = &mut self.coordinators[c].lines[m];
        if self.members[m].is_stopped || line.is_closed {
            return false;
        }
        let Some(order) = line.unread.pop_front() else { return false };
        self.takes(m, c, order);
        true
    }

    fn takes(&mut self, m: usize, c: usize, order: Order) {
        if order == Order::Settle {
            if let Some(leader) = self.leader(m)
                && leader != c
            {
                self.hears_out(m, leader);
                self.hangs_up(m, leader);
            }
            let member = &mut self.members[m];
            let round = member.rounds.end_leading();
            member.rounds.lead(connection_of(c));
            member.asks_to_settle = Some(c);
            self.begins_to_settle(m, round);
            return;
        }
        self.passes_by_the_dead(m, c);
        let member = &mut self.members[m];
        let done = match member.admit(connection_of(c), round_of(c), false, order) {
            Admission::Taken => {
                assert!(member.settling.is_none(), "an order during settling");
                let done = member.obey(round_of(c), order);
                if order.is_last() {
                    member.rounds.stop_leading(connection_of(c));
                }
                done
            }
            Admission::NothingToUndo => true,
            Admission::Refused => false,
        };
        self.answers(m, c, done);
    }

    fn answers(&mut self, m: usize, c: usize, done: bool) {
        let line = &mut self.coordinators[c].lines[m];
        if line.answer == Some(Answer::Due) && !line.is_closed {
            line.answer = Some(if done { Answer::Done } else { Answer::Failed });
        }
    }

    fn leader(&self, m: usize) -> Option<usize> {
        let leader = self.members[m].rounds.leader()?;
        (0..self.coordinators.len()).find(|c| connection_of(*c) == leader)
    }

    fn has_ended(&self, c: usize) -> bool {
        matches!(self.coordinators[c].life, Life::Dead | Life::Over)
    }

    fn passes_by_the_dead(&mut self, m: usize, asker: usize) {
        if let Some(leader) = self.leader(m)
            && leader != asker
            && self.has_ended(leader)
        {
            self.hears_out(m, leader);
            self.hangs_up(m, leader);
        }
    }

    fn hears_out(&mut self, m: usize, c: usize) {
        while !self.coordinators[c].lines[m].is_closed
            && let Some(order) = self.coordinators[c].lines[m].unread.pop_front()
        {
            self.takes(m, c, order);
        }
    }

    fn hangs_up(&mut self, m: usize, c: usize) {
        let line = &mut self.coordinators[c].lines[m];
        line.is_closed = true;
        line.unread.clear();
        if self.members[m].rounds.leader() == Some(connection_of(c)) {
            let round = self.members[m].rounds.end_leading();
            self.begins_to_settle(m, round);
        }
    }

    fn sees_its_end(&mut self, m: usize, c: usize) -> bool {
        let line = &self.coordinators[c].lines[m];
        let is_there = !self.members[m].is_stopped && !line.is_closed && line.unread.is_empty();
        // The end of a coordinator that does not lead has no effect.
        if !is_there || !self.has_ended(c) || self.leader(m) != Some(c) {
            return false;
        }
        self.hangs_up(m, c);
        true
    }

    fn hangs_up_on(&mut self, m: usize, c: usize) -> bool {
        if self.members[m].is_stopped || self.leader(m) != Some(c) || self.has_ended(c) {
            return false;
        }
        self.hangs_up(m, c);
        true
    }

    fn begins_to_settle(&mut self, m: usize, round: Option<u64>) {
        let others = self.members.len();
        let member = &mut self.members[m];
        if member.rests() {
            // The worker finds no work.
            if let Some(round) = round {
                member.rounds.last_step_taken(round, true);
            }
            self.has_settled(m);
        } else if member.settling.is_none() {
            member.settling =
                Some(Settling { round, said: Said::default(), asked: vec![false; others] });
        }
    }

    fn asks(&mut self, m: usize, other: usize) -> bool {
        if m == other || self.members[m].is_stopped || self.members[other].is_stopped {
            return false;
        }
        let Some(Settling { round: Some(round), asked, .. }) = &self.members[m].settling else {
            return false;
        };
        let round = *round;
        // While one member is silent, the others are asked once more.
        let is_silent = |(asked, member): (&bool, &Member)| !asked && member.is_stopped;
        let asks_again = asked.iter().zip(&self.members).any(is_silent);
        if (asked[other] && !asks_again) || self.knows(m).is_some() {
            return false;
        }
        if let Some(leader) = self.leader(other) {
            self.hears_out(other, leader);
            if self.members[other].rounds.is_led(connection_of(leader), round) {
                self.hangs_up(other, leader);
            }
        }
        let told = self.members[other].rounds.told(round);
        if let Some(settling) = &mut self.members[m].settling {
            settling.asked[other] = true;
            settling.said.hear(told);
        }
        true
    }

    /// Returns the verdict that member `m` knows without asking.
    fn knows(&self, m: usize) -> Option<Verdict> {
        let member = &self.members[m];
        let round = member.settling.as_ref()?.round;
        let told = round.map_or(RoundEnd::Open, |round| member.rounds.told(round));
        known(member.outlook(), told)
    }

    fn decides(&mut self, m: usize) -> bool {
        let Some(settling) = self.members[m].settling.clone() else { return false };
        if self.members[m].is_stopped {
            return false;
        }
        let others = (0..self.members.len()).filter(|other| *other != m);
        let mut silent = others.filter(|other| !settling.asked[*other]);
        let said = self.knows(m).or_else(|| settling.said.verdict());
        let all_are_silent = silent.clone().all(|other| self.members[other].is_stopped);
        // A silent member counts as told nothing.
        if said.is_none() && settling.round.is_some() && !all_are_silent {
            return false;
        }
        let verdict = said.unwrap_or(Verdict::Abort);
        if let (None, Some(round)) = (said, settling.round) {
            self.asked = Some(verdict);
            let passed_by: Vec<usize> = silent.by_ref().collect();
            for other in &passed_by {
                self.may_part |= self.was_told_to_commit(*other, round);
                self.members[*other].was_passed_by = true;
            }
            if !passed_by.is_empty() {
                self.ask_again(m);
            }
        }
        let member = &mut self.members[m];
        member.settling = None;
        if let Some(round) = settling.round {
            if !member.rests() {
                member.rounds.decide(round, verdict);
                member.end(round, verdict);
            }
            member.rounds.last_step_taken(round, true);
        }
        self.has_settled(m);
        true
    }

    /// Was member `m` told to commit, even if it has not read the order yet?
    fn was_told_to_commit(&self, m: usize, round: u64) -> bool {
        let lines = self.coordinators.iter().map(|coordinator| &coordinator.lines[m]);
        let is_unread = lines.flat_map(|line| &line.unread).any(|order| *order == Order::Commit);
        is_unread || self.members[m].rounds.told(round) == RoundEnd::Commit
    }

    fn has_settled(&mut self, m: usize) {
        let member = &mut self.members[m];
        if let Some(asker) = member.asks_to_settle.take() {
            member.rounds.stop_leading(connection_of(asker));
            self.answers(m, asker, true);
        }
    }

    /// `m` has waited in vain for long; any other member that waits as long will ask it again.
    fn ask_again(&mut self, m: usize) {
        for settling in self.members.iter_mut().filter_map(|member| member.settling.as_mut()) {
            settling.asked[m] = false;
        }
    }

    /// Lets a member act alone, more often than rounds are remembered.
    fn acts_alone(&mut self, m: usize) -> bool {
        if self.members[m].is_stopped || !self.members[m].rests() || !self.lock_is_free() {
            return false;
        }
        if self.members[m].settling.is_some() {
            return false;
        }
        if let Some(leader) = self.leader(m)
            && self.has_ended(leader)
        {
            self.hears_out(m, leader);
            self.hangs_up(m, leader);
        }
        self.own += 1;
        let steps = [Order::Begin, Order::Prepare, Order::Commit, Order::Verify];
        for round in (0..=PAST_MAX as u64).map(|count| 1000 + count) {
            for order in steps {
                let member = &mut self.members[m];
                if member.admit(STRANGE, round, true, order) != Admission::Taken {
                    // Another connection leads: the lock was removed, or the leader's end has just been seen.
                    self.own_was_refused |= !self.lock_is_gone && self.members[m].rests();
                    return true;
                }
                let member = &mut self.members[m];
                member.at = match order {
                    Order::Begin => At::Begun(round),
                    Order::Prepare => At::Prepared(round),
                    Order::Commit | Order::Verify | Order::Abort | Order::Settle => At::Rest,
                };
            }
            let member = &mut self.members[m];
            member.rounds.last_step_taken(round, true);
            member.rounds.stop_leading(STRANGE);
        }
        self.own_was_taken = true;
        true
    }

    /// Stops a member. A member that has just settled still answers members that ask simultaneously.
    fn stops(&mut self, m: usize) -> bool {
        let settles = |member: &Member| member.settling.is_some();
        if self.members[m].rests() && self.members.iter().any(settles) {
            return false;
        }
        self.stops += 1;
        !std::mem::replace(&mut self.members[m].is_stopped, true)
    }

    /// Continues a stopped member. If others have waited for it in vain, it has waited in vain for them, and asks again.
    fn goes_on_after_stop(&mut self, m: usize) -> bool {
        let member = &mut self.members[m];
        if let Some(settling) = &mut member.settling
            && member.was_passed_by
        {
            settling.said = Said::default();
            settling.asked.fill(false);
        }
        member.was_passed_by = false;
        std::mem::replace(&mut member.is_stopped, false)
    }

    /// Has each round ended the same way in all members that took part?
    pub(super) fn is_agreed(&self) -> bool {
        (0..self.coordinators.len()).map(round_of).all(|round| {
            let ends = || self.members.iter().filter_map(|member| member.ends.get(&round));
            !(ends().any(|end| *end == Verdict::Commit) && ends().any(|end| *end == Verdict::Abort))
        })
    }

    /// Are orders of a round followed only over its leader's connection, and only while the round is under way?
    pub(super) fn obeys_leaders_alone(&self) -> bool {
        let rounds = || (0..self.coordinators.len()).map(round_of);
        self.members.iter().all(|member| {
            let known = rounds().filter(|round| {
                member.rounds.under_way() == Some(*round) || member.rounds.is_past(*round)
            });
            known.into_iter().all(|round| {
                ALL.iter().all(|order| {
                    let admission = member.clone().admit(STRANGE, round, false, *order);
                    admission != Admission::Taken
                })
            })
        })
    }

    pub(super) fn all_rest(&self) -> bool {
        self.members.iter().all(|member| member.rests() && member.settling.is_none())
    }

    /// Has a round ended in one member, while another is still to settle it?
    pub(super) fn is_one_to_ask(&self) -> bool {
        self.members.iter().any(|member| !member.ends.is_empty())
            && self.members.iter().any(|member| member.settling.is_some())
    }
}

impl Coordinator {
    fn undo(&mut self) {
        self.life = Life::Leads(Order::Abort);
        self.ask();
    }

    fn ask(&mut self) {
        for line in &mut self.lines {
            line.answer = None;
        }
    }
}
