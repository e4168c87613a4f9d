//! What happens next, and what must be true afterwards.

mod mishap;
mod population;
mod rivals;
mod saving;
mod scarcity;
mod swapping;
mod trading;
mod veteran;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use sublet_tests::{Outcome, Trouble};
use tenants::coordinator::LostImports;
use tenants::scope::{Scope, TagNames};
use tenants::wire::{Action, MemberState};

use crate::coordinate::{Refusal, Request, Verdict, Way};
use crate::orders::Order;
use crate::tally::Tally;
use crate::worker::TAGS;
use crate::world::{Standing, World};
use mishap::Mishap;
pub(crate) use mishap::let_time_pass;
use population::Crowd;
use rivals::Second;
pub(crate) use veteran::Veteran;

/// How much of what happened is shown with a failure.
const HISTORY_LINES: usize = 60;

/// What a simulation is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) cycles: u64,
    pub(crate) processes_max: usize,
    /// No further cycle begins after that.
    pub(crate) time_max: Option<Duration>,
}

/// See the head of this module.
pub(crate) struct Script {
    pub(crate) world: World,
    pub(crate) history: VecDeque<String>,
    pub(crate) veteran: Veteran,
    settings: Settings,
    crowd: Crowd,
    /// Whose turn it is, when the last one made that clear.
    next: Option<usize>,
    /// A second command that met the one under way.
    second: Option<Second>,
    /// When the run directory was last removed.
    removed: Option<Instant>,
}

/// How a command ended for the tenant.
struct Ending {
    standing: Standing,
    /// Did one of its processes end on the way?
    somebody_died: bool,
}

impl Script {
    pub(crate) fn new(settings: Settings, world: World) -> Self {
        Self {
            world,
            history: VecDeque::new(),
            veteran: Veteran::default(),
            settings,
            crowd: Crowd::default(),
            next: None,
            second: None,
            removed: None,
        }
    }

    fn tell(&mut self, line: &str) {
        if self.history.len() == HISTORY_LINES {
            self.history.pop_front();
        }
        self.history.push_back(format!("cycle {}: {line}", self.world.tally.cycles));
    }

    /// One pause or resume of one tenant, or a swap of two, with or without a mishap, and all checks.
    pub(crate) fn turn(&mut self) -> Outcome {
        self.populate()?;
        if let Some(pair) = self.choose_pair() {
            self.swap(pair)?;
            return self.world.compare_devices();
        }
        let tenant = self.choose_tenant();
        let action =
            if self.world.tenants[tenant].is_paused { Action::Resume } else { Action::Pause };
        let scope = self.choose_scope(tenant, action);
        let (action, scope) = scope;
        if !self.world.tenants[tenant].is_paused {
            self.start_work(tenant)?;
        }
        self.start_trade(tenant)?;
        self.command(tenant, action, scope)?;
        self.world.compare_devices()
    }

    /// All of it most of the time; a tag of a tenant that runs; or a resume of all but some tags.
    fn choose_scope(&mut self, tenant: usize, action: Action) -> (Action, Scope) {
        let random = &mut self.world.random;
        let found = &self.world.tenants[tenant];
        let tag = TAGS[random.usize(..TAGS.len())];
        match random.u8(..12) {
            0 if !self.has_tag(tenant, tag) => (action, Scope::Whole),
            0 => (action, named(tag)),
            1..4 if !found.is_paused && found.market.away.contains(tag) => {
                (Action::Resume, named(tag))
            }
            4..8 if !found.is_paused && !found.market.away.is_empty() => {
                (Action::Resume, Scope::Whole)
            }
            _ => (action, Scope::Whole),
        }
    }

    fn choose_tenant(&mut self) -> usize {
        if let Some(next) = self.next.take()
            && !self.world.tenants[next].workers.is_empty()
        {
            return next;
        }
        let tenants = &self.world.tenants;
        let peopled = (0..tenants.len()).filter(|index| !tenants[*index].workers.is_empty());
        let peopled: Vec<usize> = peopled.collect();
        peopled[self.world.random.usize(..peopled.len())]
    }

    /// Has all processes of a tenant do some steps, which the coming pause meets at any instant.
    fn start_work(&mut self, tenant: usize) -> Outcome {
        let random = &mut self.world.random;
        let (seed, steps) = (random.u64(..), random.u64(4..40));
        let head_start = Duration::from_micros(random.u64(..12_000));
        let tenant = &mut self.world.tenants[tenant];
        let (first, last) = (tenant.steps, tenant.steps + steps);
        tenant.steps = last;
        for worker in &mut tenant.workers {
            worker.send(&Order::Work { first, last, seed })?;
        }
        mishap::let_time_pass(head_start);
        Ok(())
    }

    /// Asks for `action`, has something go wrong or not, and looks at what came of it.
    fn command(&mut self, tenant: usize, action: Action, scope: Scope) -> Outcome {
        let scarcity = match action {
            Action::Pause => self.make_scarce(&[tenant])?,
            Action::Resume => None,
        };
        let mishap = self.choose_mishap(tenant, action, scarcity.as_ref());
        let mishap = self.choose_rival(tenant, &scope, mishap);
        self.second = None;
        let lost_imports =
            if self.world.random.u8(..4) > 0 { LostImports::LeaveOut } else { LostImports::Refuse };
        let name = self.world.tenants[tenant].name.clone();
        let way = self.choose_way(&mishap);
        // The command has no word for it.
        let early_release = self.world.random.bool() && way != Way::Command;
        let is_whole_pause = action == Action::Pause && scope == Scope::Whole;
        let fails = mishap.fails();
        let is_deep = is_whole_pause && (fails.is_some() || self.world.random.u8(..3) == 0);
        let request = Request {
            tenant: name,
            action,
            lost_imports,
            early_release,
            is_deep,
            fails: fails.clone(),
            scope,
            swap: None,
        };
        self.tell(&format!(
            "{action:?} of {} {:?} by {way:?}{}{} with {mishap:?}",
            request.tenant,
            request.scope,
            if early_release { ", released early" } else { "" },
            if is_deep { ", deep" } else { "" }
        ));
        if !mishap.is_none() {
            self.world.tenants[tenant].market.is_in_trouble();
        }
        let stranger = self.prepare(&mishap)?;
        let fits = !self.is_about_room(tenant, &request) || self.fits(tenant)?;
        let deaths = self.world.deaths;
        let begin = Instant::now();
        let verdict = self.ask(tenant, way, &request, &mishap)?;
        let took = begin.elapsed();
        let fired = self.clear(&mishap)?;
        if let Some(fails) = &fails {
            Tally::count(&mut self.world.tally.faults, fails.call, fails.fired());
        }
        if took > self.world.tally.slowest.0 {
            let what = format!("{action:?} with {mishap:?}: {}", outline(&verdict));
            self.world.tally.slowest = (took, what);
        }
        self.tell(&format!("  {} ({} ms)", outline(&verdict), took.as_millis()));
        if let Some(scarcity) = &scarcity {
            self.end_scarcity(scarcity, &verdict)?;
        }
        let was_half_done = self.second.as_ref().is_some_and(Second::is_half_done)
            || matches!(&verdict, Verdict::Refused(refusal) if !refusal.left_unchanged);
        drop(stranger);
        self.end_faulted(tenant, &mishap)?;
        if let Mishap::ContextLost { worker, .. } = mishap
            && fired > 0
        {
            // Where the command was over by then, its own work has met the error.
            self.kill(worker, "worker whose context was lost")?;
        }
        if self.world.tenants[tenant].workers.is_empty() {
            self.count(&request, &verdict, &mishap);
            // All are dead: the next one to join starts from nothing.
            self.world.tenants[tenant].is_paused = false;
            return Ok(());
        }
        self.enter_tags(tenant, &request, &verdict);
        if was_half_done {
            self.repair(tenant, Action::Resume)?;
        }
        let ending = self.ending(tenant, action, &verdict, deaths)?;
        let is_scarce = scarcity.is_some();
        self.judge(tenant, &request, &verdict, &mishap, (fits, is_scarce), &ending)?;
        self.count(&request, &verdict, &mishap);
        self.conclude(tenant, &ending)
    }

    fn choose_way(&mut self, mishap: &Mishap) -> Way {
        match mishap {
            Mishap::CoordinatorKilled { after, .. }
            | Mishap::Stopped { killed: Some(after), .. } => Way::ChildKilledAfter(*after),
            Mishap::CalledOff { after } => Way::CalledOffAfter(*after),
            Mishap::Interrupted { after, signal } => Way::InterruptedAfter(*after, *signal),
            Mishap::None | Mishap::Faults { .. } if self.world.random.u8(..12) == 0 => Way::Command,
            Mishap::None
            | Mishap::Faults { .. }
            | Mishap::ContextLost { .. }
            | Mishap::NoHostMemory { .. }
            | Mishap::WorkerKilled { .. }
            | Mishap::Stopped { .. }
            | Mishap::Signalled { .. }
            | Mishap::TableFull { .. }
            | Mishap::SecondCommand { .. }
            | Mishap::RunDirGone { .. }
            | Mishap::NameGone { .. }
            | Mishap::CheckpointFails { .. }
            | Mishap::DeadSockets { .. }
            | Mishap::Stranger { .. } => Way::Library,
        }
    }

    /// Is it a resume of a paused tenant as a whole, whose need is known?
    fn is_about_room(&self, tenant: usize, request: &Request) -> bool {
        let is_paused = self.world.tenants[tenant].is_paused;
        request.action == Action::Resume && request.scope == Scope::Whole && is_paused
    }

    /// Which tags may be paused now.
    fn enter_tags(&mut self, tenant: usize, request: &Request, verdict: &Verdict) {
        let found = &mut self.world.tenants[tenant];
        let is_done = matches!(verdict, Verdict::Done { .. });
        let is_unchanged = matches!(verdict, Verdict::Refused(refusal) if refusal.left_unchanged);
        match (request.action, &request.scope) {
            (Action::Pause, Scope::Tags { tags, .. }) if !is_unchanged => {
                let gone = TAGS.iter().filter(|tag| tags.to_resume().has(tag));
                gone.for_each(|tag| found.market.tag_goes(tag));
            }
            (Action::Resume, Scope::Tags { tags, .. }) => {
                if is_done {
                    found.market.tags_are_back(|tag| tags.to_resume().has(tag));
                }
                if found.is_paused && !is_unchanged {
                    let left = TAGS.iter().filter(|tag| !tags.to_resume().has(tag));
                    left.for_each(|tag| found.market.tag_goes(tag));
                }
            }
            (Action::Resume, Scope::Whole) if is_done && !found.is_paused => {
                found.market.tags_are_back(|_| true);
            }
            (Action::Pause | Action::Resume, _) => {}
        }
    }

    /// Has any process memory of this tag?
    fn has_tag(&self, tenant: usize, tag: &str) -> bool {
        let Ok(standing) = self.world.standing(tenant) else {
            return false;
        };
        standing.has_tag(tag)
    }

    /// Do the devices have room for all that a paused tenant must create again?
    fn fits(&mut self, tenant: usize) -> Outcome<bool> {
        let needed = self.world.needed_bytes(tenant)?;
        let free = self.world.free_bytes()?;
        Ok(needed.iter().zip(free).all(|(needed, free)| *needed <= free))
    }

    /// A plain command that brings a tenant to one state after something was left half done.
    fn repair(&mut self, tenant: usize, action: Action) -> Outcome {
        self.world.tally.repairs += 1;
        let request = Request::plain(&self.world.tenants[tenant].name, action);
        let mut verdict = self.world.desk.ask(Way::Library, &request)?;
        while matches!(verdict, Verdict::Refused(_)) && self.names_may_be_missing() {
            mishap::let_time_pass(Duration::from_millis(200));
            verdict = self.world.desk.ask(Way::Library, &request)?;
        }
        self.tell(&format!("  repaired by {action:?}: {}", outline(&verdict)));
        match verdict {
            // What another tenant has taken meanwhile may be missing.
            Verdict::Refused(refusal) if !refusal.is_short_of_devices() => {
                Err(Trouble::new(format!("what was left half done stays so: {}", refusal.text)))
            }
            Verdict::Refused(_) | Verdict::Done { .. } | Verdict::Killed => Ok(()),
        }
    }

    /// Ends processes that have lost something, as their error says; only a lost context leads there.
    fn end_faulted(&mut self, tenant: usize, mishap: &Mishap) -> Outcome {
        for pid in self.world.faulted(tenant)? {
            let workers = &self.world.tenants[tenant].workers;
            let index = workers.iter().position(|worker| worker.pid() == pid);
            let index = index.ok_or_else(|| Trouble::new("a process that is not known"))?;
            if !mishap.loses_context_of(workers[index].number) {
                return Err(Trouble::new(format!("process {pid} is faulted after {mishap:?}")));
            }
            self.world.bury(tenant, index)?;
            Tally::count(&mut self.world.tally.kills, "worker whose context was lost", 1);
        }
        Ok(())
    }

    /// Where all processes of the tenant are now. All are in one state, but where one of them died before
    /// the point of no return.
    fn ending(
        &mut self,
        tenant: usize,
        action: Action,
        verdict: &Verdict,
        deaths: u64,
    ) -> Outcome<Ending> {
        let somebody_died = self.world.deaths > deaths;
        let mut standing = self.world.standing(tenant)?;
        let is_one = standing.all_are(MemberState::Active) || standing.all_are(MemberState::Paused);
        if !is_one && (!somebody_died || matches!(verdict, Verdict::Done { .. })) {
            return Err(Trouble::new(format!(
                "{action:?} left them in different states: {}; {:?}",
                full(verdict),
                standing.states
            )));
        }
        if !is_one {
            // Those that had given up what they imported from the dead stand paused.
            self.repair(tenant, Action::Pause)?;
            standing = self.world.standing(tenant)?;
        }
        Ok(Ending { standing, somebody_died })
    }

    /// Is what came of a command what may come of it?
    #[expect(clippy::too_many_arguments, reason = "all that was seen of one command")]
    fn judge(
        &self,
        tenant: usize,
        request: &Request,
        verdict: &Verdict,
        mishap: &Mishap,
        (fits, is_scarce): (bool, bool),
        ending: &Ending,
    ) -> Outcome {
        let was_paused = self.world.tenants[tenant].is_paused;
        let before = if was_paused { MemberState::Paused } else { MemberState::Active };
        let after = match (request.action, &request.scope) {
            (Action::Pause, Scope::Whole) => MemberState::Paused,
            (Action::Pause | Action::Resume, _) => MemberState::Active,
        };
        let Ending { standing, somebody_died } = ending;
        let is = |state| standing.all_are(state);
        let has_orphans = self.may_have_orphans(tenant);
        let is_brought = self.second.as_ref().and_then(Second::brought).is_some_and(is);
        let wrong = match verdict {
            Verdict::Done { .. } if !is(after) && !is_brought => {
                Some("it succeeded, and the state is another")
            }
            _ if *somebody_died => None,
            Verdict::Done { losses, .. } if *losses > 0 => Some("members were lost, and none died"),
            Verdict::Refused(refusal) if refusal.left_unchanged && !is(before) && !is_brought => {
                Some("it was refused with everything as before, which is not so")
            }
            Verdict::Refused(refusal) if mishap.is_none() => {
                let is_known = self.is_about_room(tenant, request);
                let is_short = refusal.is_short_of_devices() && !(is_known && fits);
                // The last memory of a tag may be freed just then.
                let is_gone = request.scope != Scope::Whole && refusal.is_before_all();
                let is_lost = has_orphans && refusal.is_for_lost_imports();
                let has_no_host = is_scarce && refusal.is_short_of_host();
                // What is registered, or foreign, keeps a process from a deep pause.
                let is_unfreezable = request.is_deep && refusal.left_unchanged;
                (!is_short && !is_lost && !is_gone && !has_no_host && !is_unfreezable)
                    .then_some("it was refused without a reason")
            }
            Verdict::Done { .. } | Verdict::Refused(_) | Verdict::Killed => None,
        };
        match wrong {
            Some(what) => {
                Err(Trouble::new(format!("{what}: {}; {:?}", full(verdict), standing.states)))
            }
            None => Ok(()),
        }
    }

    /// May some have memory of processes that have ended, or of which nobody knows that they have?
    fn may_have_orphans(&self, tenant: usize) -> bool {
        self.world.tenants[tenant].has_orphans || self.names_may_be_missing()
    }

    fn count(&mut self, request: &Request, verdict: &Verdict, mishap: &Mishap) {
        let tally = &mut self.world.tally;
        let by_tag = request.scope != Scope::Whole;
        if matches!(verdict, Verdict::Done { .. }) && request.action == Action::Pause {
            tally.early += u64::from(request.early_release && request.swap.is_none());
        }
        match (verdict, request.action) {
            (Verdict::Done { .. }, Action::Pause) if by_tag => tally.tag_pauses += 1,
            (Verdict::Done { .. }, Action::Resume) if by_tag => tally.tag_resumes += 1,
            (Verdict::Done { .. }, Action::Pause) => {
                tally.pauses += 1;
                tally.deep += u64::from(request.is_deep);
            }
            (Verdict::Done { .. }, Action::Resume) => tally.resumes += 1,
            (Verdict::Refused(refusal), _) => {
                let cause = if mishap.is_none() { cause_of(refusal) } else { mishap.cause() };
                Tally::count(&mut tally.refused, cause, 1);
            }
            (Verdict::Killed, _) => {
                Tally::count(&mut tally.refused, "unknown, the coordinator was killed", 1);
            }
        }
    }

    /// Records the state that the tenant is in; when it is active, has all work end and compares all.
    fn conclude(&mut self, index: usize, ending: &Ending) -> Outcome {
        let world = &mut self.world;
        let tenant = &mut world.tenants[index];
        if tenant.workers.is_empty() {
            tenant.is_paused = false;
            return Ok(());
        }
        let was_paused = tenant.is_paused;
        tenant.is_paused = ending.standing.all_are(MemberState::Paused);
        if tenant.is_paused {
            let is_troubled = world.tenants[index].market.is_troubled;
            if !is_troubled && world.random.u8(..12) == 0 {
                self.save(index)?;
            }
            let world = &mut self.world;
            // It did not fit: somebody else must make room.
            if was_paused {
                let others: Vec<usize> = (0..world.tenants.len())
                    .filter(|other| *other != index && !world.tenants[*other].is_paused)
                    .collect();
                self.next = world.random.choice(others);
            }
            return Ok(());
        }
        world.tally.cycles += u64::from(was_paused);
        world.check(index)?;
        let tenant = &world.tenants[index];
        if let Some(worker) = tenant.workers.iter().find(|worker| worker.is_veteran) {
            let is_past_a_tenth = world.tally.cycles * 10 >= self.settings.cycles;
            self.veteran.is_now(&worker.account, &worker.joined_with, is_past_a_tenth);
        }
        if was_paused { Ok(()) } else { self.world.compare_devices() }
    }

    /// Brings every tenant back, one at a time, and has every process end in an orderly way.
    pub(crate) fn finish(&mut self) -> Outcome {
        // Until then processes keep what they have for others that may have ended.
        while self.names_may_be_missing() {
            mishap::let_time_pass(Duration::from_millis(200));
        }
        for index in 0..self.world.tenants.len() {
            if !self.world.tenants[index].is_paused && !self.world.tenants[index].workers.is_empty()
            {
                self.plainly(index, Action::Pause)?;
            }
        }
        for index in 0..self.world.tenants.len() {
            self.end_all_trade(index)?;
        }
        for index in 0..self.world.tenants.len() {
            if !self.world.tenants[index].workers.is_empty() {
                self.plainly(index, Action::Resume)?;
                // And its tags, unless it has filled a device without them.
                if self.plainly_if_it_fits(index, Action::Resume)?.is_none() {
                    self.world.tenants[index].market.tags_are_back(|_| true);
                }
                self.world.check(index)?;
            }
            while let Some(last) = self.world.tenants[index].workers.len().checked_sub(1) {
                if self.world.tenants[index].workers[last].is_veteran {
                    // What it keeps for others goes with its next pause.
                    self.plainly(index, Action::Pause)?;
                    self.plainly(index, Action::Resume)?;
                }
                self.world.leave(index, last, true)?;
            }
            self.world.clear_board(index)?;
        }
        // What ended processes left in the run directory goes with the next look at it.
        for tenant in self.world.desk.run_dir.tenants()? {
            if let Some(dir) = self.world.desk.run_dir.existing_tenant(&tenant)? {
                dir.remove_stale()?;
            }
        }
        let free = self.world.free_bytes()?;
        self.tell(&format!("all have left; free on the devices: {free:?}"));
        self.world.compare_devices()
    }

    fn plainly(&mut self, index: usize, action: Action) -> Outcome {
        match self.plainly_if_it_fits(index, action)? {
            None => Ok(()),
            Some(refusal) => {
                let text = format!("at the end there is no room for a tenant alone: {refusal}");
                Err(Trouble::new(text))
            }
        }
    }

    /// The refusal, if device memory is missing.
    fn plainly_if_it_fits(&mut self, index: usize, action: Action) -> Outcome<Option<String>> {
        let request = Request::plain(&self.world.tenants[index].name, action);
        self.tell(&format!("{action:?} of {} at the end", request.tenant));
        let verdict = self.world.desk.ask(Way::Library, &request)?;
        match &verdict {
            Verdict::Done { .. } => {}
            Verdict::Refused(refusal) if refusal.is_short_of_devices() => {
                return Ok(Some(refusal.text.clone()));
            }
            Verdict::Refused(_) | Verdict::Killed => {
                return Err(Trouble::new(format!("at the end: {}", full(&verdict))));
            }
        }
        let standing = self.world.standing(index)?;
        self.conclude(index, &Ending { standing, somebody_died: false })?;
        Ok(None)
    }
}

fn named(tag: &str) -> Scope {
    Scope::Tags { tags: TagNames::Named([tag.to_owned()].into()), owner: None }
}

/// Why a command was refused that nothing went wrong in, for the account.
fn cause_of(refusal: &Refusal) -> &'static str {
    if refusal.is_for_lost_imports() {
        "lost imports"
    } else if refusal.is_short_of_devices() {
        "no device memory"
    } else if refusal.is_short_of_host() {
        "no host memory"
    } else {
        "no memory of that tag"
    }
}

fn full(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Done { losses, overlapped, notes } => {
            let how = if *overlapped { ", by stages" } else { "" };
            format!("done{how}, {losses} lost; {}", notes.join("; "))
        }
        Verdict::Refused(refusal) => format!("refused: {}", refusal.text),
        Verdict::Killed => "the coordinator was killed".to_owned(),
    }
}

fn outline(verdict: &Verdict) -> String {
    full(verdict).chars().take(240).collect()
}
