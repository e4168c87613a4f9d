//! The events of the model other than the steps of a pause or resume, and their effects.

use super::{ALL, Action, Memory, NEWCOMER, OWNER, Stage, State, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Event {
    Write(usize),
    Pin(usize),
    IssueTicket,
    Redeem(usize),
    Free(usize),
    Join,
    Die(usize),
    LoseName(usize),
    FindName(usize),
    Pause {
        by_tag: bool,
    },
    Resume {
        without_lost: bool,
    },
    /// A process does the step under way.
    Do(usize),
    /// The step under way fails in a process, or the coordinator ends.
    Fail,
}

impl State {
    /// Everything that can happen now.
    pub(in super::super) fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for who in ALL {
            if self.usable(who).is_some() && self.processes[who].is_held {
                events.extend((self.left.writes > 0).then_some(Event::Write(who)));
                events.extend((self.left.pins > 0).then_some(Event::Pin(who)));
            }
            let is_at_rest = matches!(self.processes[who].stage, Stage::Runs | Stage::Paused);
            if self.is_in(who) && is_at_rest && self.processes[who].is_held {
                events.push(Event::Free(who));
            }
            if who != OWNER && self.can_redeem(who) {
                events.push(Event::Redeem(who));
            }
            if self.is_in(who) && self.left.deaths > 0 {
                events.push(Event::Die(who));
            }
            let is_named = self.processes[who].is_named;
            if self.is_in(who) && is_named && self.left.names > 0 {
                events.push(Event::LoseName(who));
            }
            if self.is_in(who) && !is_named {
                events.push(Event::FindName(who));
            }
        }
        if self.usable(OWNER).is_some() && self.processes[OWNER].is_held && !self.ticket {
            events.push(Event::IssueTicket);
        }
        if !self.processes[NEWCOMER].is_member {
            events.push(Event::Join);
        }
        match &self.action {
            Some(action) => {
                let todo = |who: &usize| action.members[*who] && !action.done[*who];
                events.extend(ALL.into_iter().filter(todo).map(Event::Do));
                events.extend((self.left.failures > 0).then_some(Event::Fail));
            }
            None => self.commands(&mut events),
        }
        events
    }

    fn commands(&self, events: &mut Vec<Event>) {
        let any_runs = ALL.into_iter().any(|who| self.runs(who));
        if self.left.pauses > 0 && any_runs {
            events.push(Event::Pause { by_tag: false });
            // If some processes are paused as a whole, the tenant is resumed first.
            if !self.some_are(Stage::Paused) {
                events.push(Event::Pause { by_tag: true });
            }
        }
        if self.needs_resume() {
            events.push(Event::Resume { without_lost: false });
            events.push(Event::Resume { without_lost: true });
        }
    }

    /// Can `who` redeem memory at its owner? The owner gives it to an importer that runs, with a ticket or a handle that holds
    /// nothing.
    fn can_redeem(&self, who: usize) -> bool {
        let owner = &self.processes[OWNER];
        let is_there = matches!(owner.memory, Memory::Resident(_)) && !owner.frozen;
        let has_none = self.processes[who].memory == Memory::None;
        self.runs(who) && self.is_found(who) && self.is_found(OWNER) && is_there && has_none
    }

    pub(in super::super) fn after(&self, event: Event) -> Self {
        let mut next = self.clone();
        match event {
            Event::Write(who) => {
                next.left.writes -= 1;
                next.written += 1;
                if let Memory::Resident(number) = next.processes[who].memory {
                    next.values[usize::from(number)] = next.written;
                }
            }
            Event::Pin(who) => {
                next.left.pins -= 1;
                next.processes[who].pinned = true;
            }
            Event::IssueTicket => next.ticket = true,
            Event::Redeem(who) => next.redeem(who),
            Event::Free(who) => {
                next.processes[who].is_held = false;
                next.forget_unheld(who);
            }
            Event::Join => next.processes[NEWCOMER].is_member = true,
            Event::Die(who) => next.die(who),
            Event::LoseName(who) => {
                next.left.names -= 1;
                next.processes[who].is_named = false;
            }
            Event::FindName(who) => next.processes[who].is_named = true,
            Event::Pause { by_tag } => next.begin_pause(by_tag),
            Event::Resume { without_lost } => next.begin_resume(without_lost),
            Event::Do(who) => next.do_step(who),
            Event::Fail => {
                next.left.failures -= 1;
                next.go_back();
            }
        }
        next.advance();
        next
    }

    fn redeem(&mut self, who: usize) {
        self.processes[who].memory = self.processes[OWNER].memory;
        self.processes[who].is_held = true;
        self.importers[who] = true;
        self.ticket = false;
        self.forget_unheld(OWNER);
    }

    /// The rule of the pool: a row lives while its application or a ticket holds it. A row whose memory is released also lives
    /// as long as an importer may fetch it.
    pub(super) fn forget_unheld(&mut self, who: usize) {
        let (ticket, owed) = if who == OWNER {
            let is_away = self.processes[OWNER].memory == Memory::Away;
            (self.ticket, is_away && self.importers.contains(&true))
        } else {
            (false, false)
        };
        let process = &mut self.processes[who];
        if !process.is_held && !ticket && !owed {
            process.memory = Memory::None;
            process.pinned = false;
            process.stays = false;
            if who == OWNER {
                self.saved = None;
                self.importers = [false; 3];
            }
        }
    }

    fn die(&mut self, who: usize) {
        self.left.deaths -= 1;
        let process = &mut self.processes[who];
        process.lives = false;
        process.memory = Memory::None;
        process.is_held = false;
        if who == OWNER {
            self.saved = None;
            self.ticket = false;
        }
        let Some(action) = &mut self.action else {
            return;
        };
        if !action.members[who] {
            return;
        }
        action.members[who] = false;
        // After the point of no return the remaining processes go on; before it all go back.
        if !matches!(action.step, Step::Release | Step::Activate) {
            self.go_back();
        }
    }

    fn begin(&mut self, step: Step, members: [bool; 3], by_tag: bool, without_lost: bool) {
        if members.contains(&true) {
            let done = [false; 3];
            let found = ALL.map(|who| self.is_found(who));
            self.action = Some(Action { step, members, found, done, by_tag, without_lost });
        }
    }

    fn begin_pause(&mut self, by_tag: bool) {
        self.left.pauses -= 1;
        let members = ALL.map(|who| self.runs(who) && self.is_found(who));
        self.begin(Step::Close, members, by_tag, false);
    }

    fn begin_resume(&mut self, without_lost: bool) {
        let by_tag = !self.some_are(Stage::Paused);
        let stage = if by_tag { Stage::Runs } else { Stage::Paused };
        let members = ALL.map(|who| self.is_found(who) && self.processes[who].stage == stage);
        let said = ALL.into_iter().filter(|who| members[*who]).map(|who| self.partners(who));
        if Self::are_missing(said.collect(), ALL.map(|who| self.is_found(who))) {
            return;
        }
        self.begin(Step::Create, members, by_tag, without_lost);
    }
}
