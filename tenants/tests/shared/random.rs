//! Any order of sharing, freeing, pausing, undoing and resuming, with calls that fail, compared byte by byte.

use tenants::coordinator::{Event, Interrupt, Options, Outcome, Trouble};
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{DriverCode, VaRange};
use vmm_pool::{Class, Contents, VirtualHandle};

use crate::stage::{
    Acted, Process, Stage, UNIT, assert_used, create, free, holds, map, options, share, tenant,
    write,
};

/// What regions there are.
const CLASSES: [(&str, Contents); 4] =
    [("", Contents::Keep), ("a", Contents::Keep), ("b", Contents::File), ("c", Contents::Discard)];
/// Units in use at most.
const UNITS_MAX: u64 = 90;

#[derive(Debug)]
struct Holder {
    process: usize,
    handle: VirtualHandle,
    range: VaRange,
}

#[derive(Debug)]
struct Memory {
    class: usize,
    units: u64,
    /// What it holds; none when a pause may have discarded it.
    seed: Option<u64>,
    /// Who holds it now. The first was its owner, as long as it is there.
    holders: Vec<Holder>,
    owner: usize,
    pinned: bool,
}

impl Memory {
    fn owner_holds_it(&self) -> bool {
        self.holders.first().is_some_and(|holder| holder.process == self.owner)
    }
}

struct Run {
    stage: Stage,
    processes: Vec<Process>,
    memories: Vec<Memory>,
    random: fastrand::Rng,
    seeds: u64,
    /// What was done, for when it goes wrong.
    log: Vec<String>,
}

impl Run {
    fn new(seed: u64, processes: usize) -> Self {
        let stage = Stage::new();
        let processes = (0..processes).map(|_| stage.join()).collect();
        let (random, memories, log) = (fastrand::Rng::with_seed(seed), Vec::new(), Vec::new());
        Self { stage, processes, memories, random, seeds: 0, log }
    }

    fn all_are(&self, state: MemberState) -> bool {
        self.processes.iter().all(|process| process.lifecycle().state() == state)
    }

    fn any(&mut self, count: usize) -> usize {
        self.random.usize(0..count)
    }

    fn is_resident(&self, holder: &Holder) -> bool {
        holds(&self.processes[holder.process], holder.range, 0).is_ok()
    }

    fn step(&mut self) {
        let (active, paused) =
            (self.all_are(MemberState::Active), self.all_are(MemberState::Paused));
        match self.random.u32(0..24) {
            0..=3 if active => self.create(),
            4..=7 if active => self.share(),
            8..=11 if active || paused => self.free_somewhere(),
            12..=14 if active => self.write(),
            15 if active => self.pin(),
            _ => self.act(),
        }
    }

    fn create(&mut self) {
        if self.memories.iter().map(|memory| memory.units).sum::<u64>() >= UNITS_MAX {
            return;
        }
        let (owner, class) = (self.any(self.processes.len()), self.any(CLASSES.len()));
        let units = self.random.u64(1..4);
        let (tag, contents) = CLASSES[class];
        let process = &self.processes[owner];
        let kind = Class { library: "test", tag: tag.to_owned(), contents };
        let handle = create(process, units, kind);
        let range = map(process, handle, units);
        self.seeds += 1;
        write(process, range, self.seeds);
        let holders = vec![Holder { process: owner, handle, range }];
        let seed = Some(self.seeds);
        self.memories.push(Memory { class, units, seed, holders, owner, pinned: false });
        self.log.push(format!("{owner} makes memory {} of {tag:?}", self.memories.len() - 1));
    }

    /// By a ticket, or as a `cudaIpc` handle does, which holds nothing.
    fn share(&mut self) {
        if self.memories.is_empty() {
            return;
        }
        let (picked, to) = (self.any(self.memories.len()), self.any(self.processes.len()));
        let memory = &self.memories[picked];
        let is_there = memory.holders.iter().all(|holder| self.is_resident(holder));
        let holds_it = memory.holders.iter().any(|holder| holder.process == to);
        if !memory.owner_holds_it() || holds_it || !is_there {
            return;
        }
        let (owner, importer) = (&self.processes[memory.owner], &self.processes[to]);
        let (handle, units) = (memory.holders[0].handle, memory.units);
        let (handle, range) = if self.random.bool() {
            share(owner, handle, importer, units)
        } else {
            let export = owner.pool().enter().export(handle).expect("known");
            let handle =
                owner.pool().enter().import_held(export.id, export.serial).expect("its own");
            owner.pool().enter_giving_up().release(handle).expect("that once more");
            let ticket =
                Ticket::uncounted(export.id, export.size_bytes, owner.presence().id(), tenant());
            let handle = importer
                .sharing()
                .redeem_ticket(&importer.pool().enter(), &ticket, "test")
                .expect("redeemed");
            (handle, map(importer, handle, units))
        };
        self.memories[picked].holders.push(Holder { process: to, handle, range });
        self.log.push(format!("{to} imports memory {picked}"));
    }

    fn free_somewhere(&mut self) {
        if self.memories.is_empty() {
            return;
        }
        let picked = self.any(self.memories.len());
        let which = self.any(self.memories[picked].holders.len());
        let Holder { process, handle, range } = self.memories[picked].holders.remove(which);
        free(&self.processes[process], handle, range);
        self.log.push(format!("{process} frees memory {picked}"));
        if self.memories[picked].holders.is_empty() {
            self.memories.remove(picked);
        }
    }

    fn write(&mut self) {
        if self.memories.is_empty() {
            return;
        }
        let picked = self.any(self.memories.len());
        let which = self.any(self.memories[picked].holders.len());
        let holder = &self.memories[picked].holders[which];
        if !self.is_resident(holder) {
            return;
        }
        self.seeds += 1;
        write(&self.processes[holder.process], holder.range, self.seeds);
        self.memories[picked].seed = Some(self.seeds);
    }

    fn pin(&mut self) {
        if self.memories.is_empty() || self.random.u32(0..4) > 0 {
            return;
        }
        let picked = self.any(self.memories.len());
        let which = self.any(self.memories[picked].holders.len());
        let holder = &self.memories[picked].holders[which];
        if self.is_resident(holder) {
            let process = holder.process;
            self.processes[process].pool().enter().pin(holder.range, "a network card has it");
            self.memories[picked].pinned = true;
            self.log.push(format!("{process} pins memory {picked}"));
        }
    }

    fn act(&mut self) {
        let action = if self.random.bool() { Action::Pause } else { Action::Resume };
        let scope = self.scope(action);
        let fails = self.random.u32(0..3) == 0;
        if fails {
            let (who, nth) = (self.any(self.processes.len()), self.random.u64(1..40));
            let faults = self.processes[who].pool().driver().faults();
            faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        }
        let called_off_at = (self.random.u32(0..6) == 0).then(|| self.random.u32(1..10));
        let outcome = self.act_once(action, scope.clone(), called_off_at);
        for process in &self.processes {
            process.pool().driver().faults().clear();
        }
        self.log.push(format!("{action:?} {scope:?} fails {fails}: {outcome:?}"));
        for memory in &mut self.memories {
            if CLASSES[memory.class].1 == Contents::Discard && !memory.pinned {
                memory.seed = None;
            }
        }
        if let (Err(error), false, None) = (&outcome, fails, called_off_at) {
            let refused = matches!(error, Trouble::Refused { .. });
            assert!(!refused, "refused although nothing failed: {error}");
        }
    }

    /// A process pauses tags of its own only while no other has that memory open: until then it is refused.
    fn scope(&mut self, action: Action) -> Scope {
        if self.random.bool() {
            return Scope::Whole;
        }
        let tags = CLASSES[1..].iter().filter(|_| self.random.bool());
        let tags: std::collections::BTreeSet<_> = tags.map(|(tag, _)| (*tag).to_owned()).collect();
        let tags = if tags.is_empty() { TagNames::All } else { TagNames::Named(tags) };
        let is_open = |memory: &Memory| {
            let is_elsewhere = |holder: &Holder| holder.process != memory.owner;
            let is_tagged = !CLASSES[memory.class].0.is_empty();
            memory.owner == 0 && is_tagged && memory.holders.iter().any(is_elsewhere)
        };
        let may = action == Action::Resume || !self.memories.iter().any(is_open);
        let owner = (self.random.bool() && may).then(|| self.processes[0].presence().id());
        Scope::Tags { tags, owner }
    }

    fn act_once(&self, action: Action, scope: Scope, called_off_at: Option<u32>) -> Acted {
        let (interrupt, raise) = Interrupt::new().expect("a pipe");
        let options = Options { interrupt: Some(interrupt), ..options(scope) };
        let mut steps = 0;
        self.stage.act_with(action, options, &mut |event| {
            if let Event::StepStarted { .. } = event {
                steps += 1;
                if Some(steps) == called_off_at {
                    nix::unistd::write(&raise, &[1]).expect("raised");
                }
            }
        })
    }

    /// A process that runs sees what it must, where it sees anything.
    fn check(&self) {
        for process in &self.processes {
            assert_ne!(process.lifecycle().state(), MemberState::Faulted, "{:#?}", self.last());
        }
        for (number, memory) in self.memories.iter().enumerate() {
            for holder in &memory.holders {
                let process = &self.processes[holder.process];
                if process.lifecycle().state() != MemberState::Active {
                    continue;
                }
                let seen = holds(process, holder.range, memory.seed.unwrap_or(0));
                let is_wrong = match (&seen, memory.seed) {
                    (Ok(false), Some(_)) => true,
                    (Err(_), _) => CLASSES[memory.class].0.is_empty(),
                    (Ok(_), _) => false,
                };
                assert!(
                    !is_wrong,
                    "memory {number} in {}: {seen:?}; {:#?}",
                    holder.process,
                    self.last()
                );
            }
        }
    }

    /// Everything comes back, and nothing is left of what was freed.
    fn bring_back(&mut self) {
        let mut outcome = None;
        for _ in 0..6 {
            let resumed = self.stage.act(Action::Resume, Scope::Whole);
            let is_back = matches!(resumed, Ok(Outcome::AlreadyActive));
            outcome = Some(resumed);
            if is_back {
                break;
            }
        }
        self.log.push(format!("all back: {outcome:?}"));
        self.check();
        for (number, memory) in self.memories.iter().enumerate() {
            for holder in &memory.holders {
                let is_there = self.is_resident(holder);
                assert!(is_there, "memory {number} in {}: {:#?}", holder.process, self.last());
            }
        }
        let wanted: u64 = self.memories.iter().map(|memory| memory.units).sum();
        assert_used(&self.processes[0], wanted * UNIT, &format!("{:#?}", self.last()));
    }

    fn last(&self) -> &[String] {
        &self.log[self.log.len().saturating_sub(16)..]
    }
}

fn run(seed: u64, processes: usize, steps: usize) {
    let mut run = Run::new(seed, processes);
    for step in 1..=steps {
        run.step();
        run.check();
        if step % 20 == 0 {
            run.bring_back();
        }
    }
    for process in &run.processes {
        process.leave();
    }
}

/// Seeds that have failed: in the first the driver refuses a release while the gate opens, and memory stayed until the next
/// pause. In the others a process was to pause alone what another had open.
const KNOWN: [u64; 3] = [346_932_431_701, 396_858_410_526, 113_277_798_942];

/// `SUBLET_TEST_SEED` repeats a run, `SUBLET_TEST_ROUNDS` makes more of them.
#[expect(clippy::print_stdout, reason = "a failure shows the seed that repeats it")]
#[test]
fn any_order_of_sharing_freeing_and_pausing_loses_no_byte() {
    let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = read("SUBLET_TEST_SEED").unwrap_or_else(|| fastrand::u64(0..1 << 40));
    let drawn = first..first + read("SUBLET_TEST_ROUNDS").unwrap_or(4);
    for seed in KNOWN.into_iter().chain(drawn) {
        println!("SUBLET_TEST_SEED={seed}");
        run(seed, 2 + usize::from(seed % 2 == 0), 60);
    }
}
