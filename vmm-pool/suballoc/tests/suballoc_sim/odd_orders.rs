//! The same calls, in orders that no library has, by two processes with slabs and by two without. Every call's code, every
//! answer and every byte is the same, through pauses.
//!
//! One difference is allowed: a call that is refused because of slabs names the setting. Then neither world makes the call.

mod calls;
mod world;

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::{Export, VirtualHandle};

use self::calls::{Call, Wrong, any_call};
use self::world::{Heard, World, device, heard};
use crate::slabbed::{nccl, new_memory};
use crate::stage::{CAPACITY_BYTES, SimPool, UNIT, free_bytes, pattern};

/// The state of a handle's memory that matters for a refusal.
#[derive(Clone, Debug, Default)]
struct Use {
    mapped: u32,
    is_shared: bool,
    device: bool,
}

/// The same object in both worlds: without slabs, and with them.
#[derive(Clone, Debug)]
struct Handle {
    values: [VirtualHandle; 2],
    units: u64,
    memory: usize,
}

#[derive(Clone, Debug)]
struct Place {
    ranges: [VaRange; 2],
    units: u64,
    /// The mappings, by offset in units: the memory, and the length.
    mapped: BTreeMap<u64, (usize, u64)>,
}

type Ticket = [Export; 2];

#[derive(Debug)]
struct Both {
    /// The world without slabs, and the one with them.
    worlds: [World; 2],
    /// The handles of each process.
    handles: [Vec<Handle>; 2],
    places: [Vec<Place>; 2],
    tickets: Vec<(usize, usize, Ticket)>,
    uses: Vec<Use>,
    is_paused: bool,
    /// The number of calls since the last pause or resume.
    since: u32,
    written: u64,
    refused: u64,
}

/// The bytes of each end of a unit that are checked.
const EDGE_BYTES: u64 = 4096;
/// The most calls for which the worlds stay paused.
const PAUSED_MAX: u32 = 5;

/// Returns the two ends of a unit, which are written and read: all bytes of a unit are treated alike.
fn edges(unit: DeviceAddress) -> [VaRange; 2] {
    let last = DeviceAddress(unit.0 + UNIT - EDGE_BYTES);
    [unit, last].map(|start| VaRange::new(start, EDGE_BYTES))
}

fn nth<T>(items: &[T], pick: usize) -> Option<usize> {
    (!items.is_empty()).then(|| pick % items.len())
}

impl Both {
    fn new() -> Self {
        Self {
            worlds: [World::new(false), World::new(true)],
            handles: Default::default(),
            places: Default::default(),
            tickets: Vec::new(),
            uses: Vec::new(),
            is_paused: false,
            since: 0,
            written: 0,
            refused: 0,
        }
    }

    /// Makes the call in both worlds, and returns their common answer.
    fn same<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        mut call: impl FnMut(&World, usize) -> T,
    ) -> T {
        let plain = call(&self.worlds[0], 0);
        let slabbed = call(&self.worlds[1], 1);
        assert_eq!(plain, slabbed, "{what}: without slabs, and with them");
        plain
    }

    fn run(&mut self, process: usize, call: &Call) {
        self.since += 1;
        if self.is_paused && self.since > PAUSED_MAX {
            self.pause_or_resume();
        }
        match *call {
            Call::PauseOrResume => self.pause_or_resume(),
            Call::Unmap { place, at, units } => self.unmap(process, place, at, units),
            Call::Free { place } => self.free(process, place),
            Call::Release { handle } => self.release(process, handle),
            Call::Retain { place, at } => self.retain(process, place, at),
            Call::Ask { handle } => self.ask(process, handle),
            _ if self.is_paused => {}
            Call::Create { device, units } => {
                self.create(process, device, units);
            }
            Call::Reserve { units } => {
                self.reserve(process, units);
            }
            Call::Map { handle, place, fits, at, wrong } => {
                self.map(process, (handle, place, fits), at, wrong);
            }
            Call::Access { place, at, units, device: to, flags } => {
                let Some(index) = nth(&self.places[process], place) else { return };
                self.access(process, index, (at, units), (device(to), flags));
            }
            Call::Export { handle } => self.export(process, handle),
            Call::Import { ticket } => self.import(process, ticket),
            Call::Write { place, at, device: by } => self.write(process, place, at, device(by)),
            Call::Usual { device: other, units } => {
                let handle = self.create(process, other, units);
                let place = self.reserve(process, units);
                self.map(process, (handle, place, false), 0, Wrong::Nothing);
                self.access(process, place, (0, units), (device(other), 3));
                self.write(process, place, 0, device(other));
            }
        }
    }

    fn create(&mut self, process: usize, other: bool, units: u64) -> usize {
        let prop = AllocationProp::pinned_on(device(other));
        let values = [0, 1].map(|world: usize| {
            let pool: &SimPool = &self.worlds[world].pools[process];
            pool.front()
                .create(&pool.enter(), new_memory(units * UNIT, prop, nccl()))
                .expect("memory")
        });
        self.uses.push(Use { device: other, ..Use::default() });
        let memory = self.uses.len() - 1;
        self.handles[process].push(Handle { values, units, memory });
        self.handles[process].len() - 1
    }

    fn reserve(&mut self, process: usize, units: u64) -> usize {
        let ranges = [0, 1].map(|world: usize| self.worlds[world].reserve(process, units * UNIT));
        self.places[process].push(Place { ranges, units, mapped: BTreeMap::new() });
        self.places[process].len() - 1
    }

    fn map(
        &mut self,
        process: usize,
        (handle, place, fits): (usize, usize, bool),
        at: u64,
        wrong: Wrong,
    ) {
        let Some(handle) = nth(&self.handles[process], handle) else { return };
        let handle = self.handles[process][handle].clone();
        let places = &self.places[process];
        let fitting: Vec<usize> = (0..places.len())
            .filter(|&index| !fits || places[index].units == handle.units)
            .collect();
        let Some(index) = nth(&fitting, place).map(|index| fitting[index]) else { return };
        let at = at % self.places[process][index].units;
        let (units, offset) = match wrong {
            Wrong::Nothing => (handle.units, 0),
            Wrong::Offset => (handle.units, UNIT),
            Wrong::Longer => (handle.units + 1, 0),
            Wrong::Shorter => (handle.units - 1, 0),
        };
        if units == 0 {
            return;
        }
        let ranges = self.places[process][index]
            .ranges
            .map(|range| VaRange::new(DeviceAddress(range.start.0 + at * UNIT), units * UNIT));
        let call = |world: usize| {
            let pool = &self.worlds[world].pools[process];
            pool.front().map(&pool.enter(), ranges[world], offset, handle.values[world])
        };
        let slabbed = call(1);
        if let Err(error) = &slabbed
            && error.to_string().contains("SUBLET_SLABS")
        {
            self.check_refusal(&handle);
            return;
        }
        let plain = heard(call(0));
        let told = format!("{slabbed:?}");
        assert_eq!(plain, heard(slabbed), "a mapping, without slabs and with them: {told}");
        if plain.is_ok() {
            self.places[process][index].mapped.insert(at, (handle.memory, units));
            self.uses[handle.memory].mapped += 1;
        }
    }

    /// Checks that a refusal has a reason: some memory is mapped or shared, or is of another device.
    fn check_refusal(&mut self, handle: &Handle) {
        self.refused += 1;
        let own = &self.uses[handle.memory];
        let is_used = |found: &Use| found.mapped > 0 || found.is_shared;
        let is_another = |found: &Use| found.device != own.device;
        assert!(self.uses.iter().any(|found| is_used(found) || is_another(found)), "{handle:?}");
    }

    fn part(&self, process: usize, index: usize, at: u64, units: u64) -> [VaRange; 2] {
        let place = &self.places[process][index];
        let at = at % place.units;
        // None means all units that are left.
        let units = if units == 0 { place.units - at } else { units };
        place
            .ranges
            .map(|range| VaRange::new(DeviceAddress(range.start.0 + at * UNIT), units * UNIT))
    }

    /// Can the answers about this range be compared? Drivers differ about ranges that reach out of their place. The driver
    /// decides about rights to a part of a mapping.
    fn is_comparable(&self, process: usize, index: usize, range: VaRange) -> bool {
        let place = &self.places[process][index];
        let end = place.ranges[0].end();
        let cuts = |edge: u64| {
            let edge = (edge - place.ranges[0].start.0) / UNIT;
            place.mapped.iter().any(|(&at, (_, units))| at < edge && edge < at + units)
        };
        range.end() <= end && !cuts(range.start.0) && !cuts(range.end().0)
    }

    fn access(
        &mut self,
        process: usize,
        index: usize,
        (at, units): (u64, u64),
        (to, flags): (DeviceOrdinal, i32),
    ) {
        let ranges = self.part(process, index, at, units);
        if !self.is_comparable(process, index, ranges[0]) {
            return;
        }
        let access = AccessDesc { flags, ..AccessDesc::read_write(to) };
        let _same =
            self.same("rights", |world, index| world.set_access(process, ranges[index], access));
        self.check_place(process, index);
    }

    fn unmap(&mut self, process: usize, place: usize, at: u64, units: u64) {
        let Some(index) = nth(&self.places[process], place) else { return };
        let ranges = self.part(process, index, at, units);
        let place = &self.places[process][index];
        if ranges[0].end() > place.ranges[0].end() {
            return;
        }
        let start = (ranges[0].start.0 - place.ranges[0].start.0) / UNIT;
        let end = start + ranges[0].size_bytes / UNIT;
        let done = self.same("an unmapping", |world, index| world.unmap(process, ranges[index]));
        if done.is_ok() {
            let place = &mut self.places[process][index];
            let gone: Vec<_> = place.mapped.range(start..end).map(|(&at, _)| at).collect();
            for at in gone {
                if let Some((memory, _)) = place.mapped.remove(&at) {
                    self.uses[memory].mapped -= 1;
                }
            }
        }
    }

    fn free(&mut self, process: usize, place: usize) {
        let Some(index) = nth(&self.places[process], place) else { return };
        let ranges = self.places[process][index].ranges;
        let done = self.same("a free", |world, index| world.free(process, ranges[index]));
        if done.is_ok() {
            self.places[process].swap_remove(index);
        }
    }

    fn release(&mut self, process: usize, handle: usize) {
        let Some(index) = nth(&self.handles[process], handle) else { return };
        let values = self.handles[process][index].values;
        let done = self.same("a release", |world, index| {
            heard(
                world.pools[process]
                    .front()
                    .release(&world.pools[process].enter_giving_up(), values[index]),
            )
        });
        assert_eq!(done, Ok(()), "each is in the list as often as it has references");
        // The driver decides about a number that nobody holds. The pool knows the numbers that tickets hold.
        self.handles[process].swap_remove(index);
    }

    fn retain(&mut self, process: usize, place: usize, at: u64) {
        let Some(index) = nth(&self.places[process], place) else { return };
        let ranges = self.part(process, index, at, 1);
        let at = (ranges[0].start.0 - self.places[process][index].ranges[0].start.0) / UNIT;
        let mut values = Vec::new();
        let _same = self.same("a handle asked back", |world, index| {
            let inside = DeviceAddress(ranges[index].start.0 + 5);
            world.retain(process, inside).map(|value| values.push(value))
        });
        if let [plain, slabbed] = values[..] {
            let mapped = self.places[process][index].mapped.range(..=at).next_back();
            let (_, &(memory, units)) = mapped.expect("it is mapped");
            self.handles[process].push(Handle { values: [plain, slabbed], units, memory });
        }
    }

    fn ask(&mut self, process: usize, handle: usize) {
        let Some(index) = nth(&self.handles[process], handle) else { return };
        let values = self.handles[process][index].values;
        let _same = self.same("properties", |world, index| {
            heard(
                world.pools[process]
                    .front()
                    .properties(&world.pools[process].enter_giving_up(), values[index]),
            )
        });
    }

    fn export(&mut self, process: usize, handle: usize) {
        let Some(index) = nth(&self.handles[process], handle) else { return };
        let Handle { values, memory, .. } = self.handles[process][index];
        let mut tickets = Vec::new();
        let done = self.same("an export", |world, index| -> Heard<bool> {
            let pool = &world.pools[process];
            let ticket = heard(pool.front().export(&pool.enter(), values[index]))?;
            // The agent passes on memory that another process owns.
            let is_own = ticket.owner.is_none();
            if is_own {
                tickets.push(ticket);
            }
            Ok(is_own)
        });
        if done == Ok(true) {
            let ticket: Ticket = tickets.try_into().expect("two");
            self.uses[memory].is_shared = true;
            self.tickets.push((process, index, ticket));
            let units = self.handles[process][index].units;
            if let Some(last) = self.tickets.last_mut() {
                last.1 = memory << 8 | usize::try_from(units).expect("small");
            }
        }
    }

    fn import(&mut self, process: usize, ticket: usize) {
        let Some(index) = nth(&self.tickets, ticket) else { return };
        let (owner, what, ticket) = self.tickets.swap_remove(index);
        let (memory, units) = (what >> 8, (what & 0xff) as u64);
        let mut values = Vec::new();
        let _same = self.same("an import", |world, index| {
            world.import(owner, process, &ticket[index]).map(|value| values.push(value))
        });
        if let [plain, slabbed] = values[..] {
            self.handles[process].push(Handle { values: [plain, slabbed], units, memory });
        }
    }

    fn write(&mut self, process: usize, place: usize, at: u64, by: DeviceOrdinal) {
        let Some(index) = nth(&self.places[process], place) else { return };
        let ranges = self.part(process, index, at, 1);
        self.written += 1;
        let bytes = pattern(self.written);
        let fill = |world: usize| {
            let core = self.worlds[world].pools[process].driver().core();
            let filled = edges(ranges[world].start).map(|edge| core.fill_device(by, edge, &bytes));
            filled.into_iter().collect::<Result<(), _>>()
        };
        // With slabs a device can reach more memory. So only a device that has the right without slabs writes.
        if fill(0).is_ok() {
            assert_eq!(fill(1), Ok(()), "who may write does");
        }
    }

    fn pause_or_resume(&mut self) {
        self.check();
        for world in &self.worlds {
            if self.is_paused { world.resume() } else { world.pause() }
        }
        self.is_paused = !self.is_paused;
        self.since = 0;
        self.check();
    }

    fn check(&self) {
        for process in [0, 1] {
            for index in 0..self.places[process].len() {
                self.check_place(process, index);
            }
        }
    }

    /// Checks that the answers about a place, and its contents, are the same.
    fn check_place(&self, process: usize, index: usize) {
        let place = &self.places[process][index];
        for at in 0..place.units {
            let address = |world: usize| DeviceAddress(place.ranges[world].start.0 + at * UNIT + 8);
            let _same = self.same("the range", |world, index| {
                world.range(process, place.ranges[index], address(index))
            });
            let _same = self.same("what is reserved", |world, index| {
                let reserved = world.reserved(process, address(index)).expect("reserved");
                (reserved.start.0 - place.ranges[index].start.0, reserved.size_bytes)
            });
            for by in [DeviceOrdinal(0), DeviceOrdinal(1)] {
                let right =
                    self.same("a right", |world, index| world.right(process, address(index), by));
                if right.is_ok_and(|right| right & 1 != 0) && !self.is_paused {
                    self.check_bytes(process, place.ranges, at, by);
                }
            }
        }
    }

    fn check_bytes(&self, process: usize, ranges: [VaRange; 2], at: u64, by: DeviceOrdinal) {
        let unit = |world: usize| DeviceAddress(ranges[world].start.0 + at * UNIT);
        let holds = |world: usize, seed: Option<u64>| {
            let core = self.worlds[world].pools[process].driver().core();
            let is_so = |edge| match seed {
                Some(seed) => core.device_holds(by, edge, &pattern(seed)),
                None => core.is_clear(by, edge),
            };
            edges(unit(world)).map(is_so) == [Ok(true); 2]
        };
        let seeds = std::iter::once(None).chain((1..=self.written).rev().map(Some));
        let found = seeds.into_iter().find(|seed| holds(0, *seed));
        let found = found.expect("it holds what was written");
        assert!(holds(1, found), "it holds {found:?} without slabs");
    }

    /// Gives everything up, and checks that nothing is left.
    fn finish(mut self) -> u64 {
        if self.is_paused {
            self.pause_or_resume();
        }
        self.check();
        for process in [0, 1] {
            while !self.places[process].is_empty() {
                self.unmap(process, 0, 0, 0);
                self.free(process, 0);
            }
        }
        for (owner, _, ticket) in std::mem::take(&mut self.tickets) {
            for (world, export) in self.worlds.iter().zip(ticket) {
                world.pools[owner].enter().take_ticket_back(&export);
            }
        }
        for process in [0, 1] {
            while !self.handles[process].is_empty() {
                self.release(process, 0);
            }
        }
        for world in &self.worlds {
            for pool in &world.pools {
                // A pause ends descriptors and deferred work.
                assert!(pool.report().devices.is_empty(), "{:?}", pool.report());
                let census = pool.driver().core().census();
                assert_eq!((census.handles, census.reservations, census.mappings), (0, 0, 0));
            }
            for device in [DeviceOrdinal(0), DeviceOrdinal(1)] {
                assert_eq!(free_bytes(&world.pools[0], device), CAPACITY_BYTES);
            }
        }
        self.refused
    }
}

#[test]
fn calls_in_any_order_are_answered_as_without_slabs() {
    let cases = std::env::var("SUBLET_ODD_ORDERS").ok().and_then(|cases| cases.parse().ok());
    let config = Config {
        cases: cases.unwrap_or(60),
        max_shrink_iters: 400,
        failure_persistence: None,
        ..Config::default()
    };
    // The random numbers are the same in every run.
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let calls = prop::collection::vec(any_call(), 1..80);
    let (refused, made) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let outcome = runner.run(&calls, |calls| {
        let mut both = Both::new();
        for (process, call) in &calls {
            both.run(usize::from(*process), call);
        }
        made.set(made.get() + calls.len() as u64);
        refused.set(refused.get() + both.finish());
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(refused.get() * 10 < made.get(), "{} of {} are refused", refused.get(), made.get());
}
