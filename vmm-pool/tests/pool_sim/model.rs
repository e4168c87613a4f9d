//! Random calls against a model of ten lines a call: sums agree, contents are right, nothing is left.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::Config;
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::{
    AllocationId, Class, ClassBytes, Contents, PeerId, Selection, Tags, VirtualHandle, Whose,
};

use crate::stage::{
    CAPACITY_BYTES, SimPool, UNIT, UNLIMITED, class, free_addresses, free_bytes, holds, map, node,
    pattern, pause, pool, resume, write,
};

/// A call; numbers pick among what exists.
#[derive(Clone, Debug)]
enum Call {
    Create {
        device: bool,
        units: u64,
        contents: Contents,
        tag: &'static str,
    },
    Release(usize),
    Retain(usize),
    Map(usize),
    Unmap(usize),
    SetAccess(usize),
    Write(usize),
    Export(usize),
    Redeem(usize),
    ImportHeld(usize),
    BlockAllocate {
        device: bool,
        size_bytes: u64,
    },
    BlockFree(usize),
    Pin(usize),
    PauseOrResume,
    /// Pauses the tag, or brings it back. Of a process that is paused as a whole: brings it back with the tag.
    Tag(&'static str),
}

/// No tag, and two.
const TAGS: [&str; 3] = ["", "a", "b"];
const ALL_CONTENTS: [Contents; 3] = [Contents::Keep, Contents::Discard, Contents::File];

fn any_call() -> impl Strategy<Value = Call> {
    let pick = any::<usize>;
    prop_oneof![
        3 => (
            any::<bool>(),
            1..4_u64,
            prop::sample::select(&ALL_CONTENTS[..]),
            prop::sample::select(&TAGS[..]),
        )
            .prop_map(|(device, units, contents, tag)| Call::Create { device, units, contents, tag }),
        3 => pick().prop_map(Call::Release),
        1 => pick().prop_map(Call::Retain),
        4 => pick().prop_map(Call::Map),
        2 => pick().prop_map(Call::Unmap),
        3 => pick().prop_map(Call::SetAccess),
        4 => pick().prop_map(Call::Write),
        1 => pick().prop_map(Call::Export),
        1 => pick().prop_map(Call::Redeem),
        1 => pick().prop_map(Call::ImportHeld),
        2 => (any::<bool>(), 1..3 * UNIT)
            .prop_map(|(device, size_bytes)| Call::BlockAllocate { device, size_bytes }),
        1 => pick().prop_map(Call::BlockFree),
        1 => pick().prop_map(Call::Pin),
        2 => Just(Call::PauseOrResume),
        3 => prop::sample::select(&TAGS[1..]).prop_map(Call::Tag),
    ]
}

#[derive(Clone, Debug)]
struct Memory {
    /// None of a block that nobody has asked one of.
    handle: Option<VirtualHandle>,
    id: Option<AllocationId>,
    device: DeviceOrdinal,
    size_bytes: u64,
    contents: Contents,
    tag: &'static str,
    references: u32,
    /// Serial numbers of its open tickets.
    tickets: Vec<u64>,
    /// Another process was given it since it was last created.
    imported: bool,
    pinned: bool,
    /// Given up by its tag, and not brought back.
    away: bool,
    bytes: Option<[u8; 16]>,
}

impl Memory {
    fn handle(&self) -> VirtualHandle {
        self.handle.expect("picked for one")
    }

    fn is_away(&self, paused: bool) -> bool {
        self.away || (paused && !self.pinned)
    }
}

#[derive(Debug)]
struct Place {
    memory: usize,
    range: VaRange,
    accessible: bool,
    block: bool,
}

#[derive(Debug)]
struct Model {
    pool: SimPool,
    memories: BTreeMap<usize, Memory>,
    places: Vec<Place>,
    made: usize,
    paused: bool,
}

fn nth<T>(items: &[T], pick: usize) -> Option<usize> {
    (!items.is_empty()).then(|| pick % items.len())
}

impl Model {
    fn new() -> Self {
        let pool = pool(&node());
        pool.copies().detect_changes(true);
        Self { pool, memories: BTreeMap::new(), places: Vec::new(), made: 0, paused: false }
    }

    /// A memory that passes `fits`.
    fn memory(&self, pick: usize, fits: impl Fn(&Memory) -> bool) -> Option<usize> {
        let keys: Vec<_> = self.memories.iter().filter(|(_, m)| fits(m)).map(|(&k, _)| k).collect();
        nth(&keys, pick).map(|index| keys[index])
    }

    fn forget_unheld(&mut self) {
        let (places, paused) = (&self.places, self.paused);
        self.memories.retain(|key, memory| {
            let mapped = places.iter().any(|place| place.memory == *key);
            // Only its owner can bring memory back. Pinned memory may have been pinned after its importers gave it up.
            let is_owed = memory.imported && (memory.away || paused);
            memory.references > 0 || !memory.tickets.is_empty() || mapped || is_owed
        });
    }

    /// What has come back was fetched by nobody, so that it is its owner's alone.
    fn note_back(&mut self, was_away: &[usize]) {
        let paused = self.paused;
        for key in was_away {
            if let Some(memory) = self.memories.get_mut(key).filter(|m| !m.is_away(paused)) {
                memory.imported = false;
            }
        }
        self.forget_unheld();
    }

    fn away(&self) -> Vec<usize> {
        let away = self.memories.iter().filter(|(_, memory)| memory.is_away(self.paused));
        away.map(|(key, _)| *key).collect()
    }

    fn add(
        &mut self,
        handle: Option<VirtualHandle>,
        device: DeviceOrdinal,
        size_bytes: u64,
        contents: Contents,
        tag: &'static str,
    ) {
        let memory = Memory {
            handle,
            id: None,
            device,
            size_bytes,
            contents,
            tag,
            references: 1,
            tickets: Vec::new(),
            imported: false,
            pinned: false,
            away: false,
            bytes: None,
        };
        self.memories.insert(self.made, memory);
        self.made += 1;
    }

    fn run(&mut self, call: &Call) {
        // While paused the gate lets only those through that give up or ask.
        match *call {
            Call::Release(pick) => self.release(pick),
            Call::Retain(pick) => self.retain(pick),
            Call::Unmap(pick) => self.unmap(pick, false),
            Call::BlockFree(pick) => self.unmap(pick, true),
            Call::PauseOrResume => self.pause_or_resume(),
            Call::Tag(tag) => self.act_on_tag(tag),
            _ if self.paused => {}
            Call::Create { device, units, contents, tag } => {
                let device = DeviceOrdinal(i32::from(device));
                let prop = AllocationProp::pinned_on(device);
                let class = Class { library: "test", tag: tag.to_owned(), contents };
                let made = self.pool.create(units * UNIT, &prop, class).expect("memory");
                self.add(Some(made), device, units * UNIT, contents, tag);
            }
            Call::Map(pick) => self.map(pick),
            Call::SetAccess(pick) => {
                let Some(index) = nth(&self.places, pick) else { return };
                let place = &mut self.places[index];
                let device = self.memories[&place.memory].device;
                let access = [AccessDesc::read_write(device)];
                self.pool.set_access(place.range, &access).expect("access");
                place.accessible = true;
            }
            Call::Write(pick) => self.write(pick),
            Call::Export(pick) => {
                let Some(key) = self.memory(pick, |m| m.references > 0 && !m.away) else { return };
                let memory = self.memories.get_mut(&key).expect("picked");
                let export = self.pool.export(memory.handle()).expect("export");
                memory.id = Some(export.id);
                memory.tickets.push(export.serial);
            }
            Call::Redeem(pick) => self.redeem(pick),
            Call::ImportHeld(pick) => {
                let Some(key) = self.memory(pick, |m| !m.tickets.is_empty()) else { return };
                let memory = self.memories.get_mut(&key).expect("picked");
                let serial = memory.tickets.pop().expect("picked for one");
                let held = self.pool.import_held(memory.id.expect("exported"), serial);
                assert_eq!(held.expect("held"), memory.handle());
                memory.references += 1;
            }
            Call::BlockAllocate { device, size_bytes } => {
                self.block_allocate(DeviceOrdinal(i32::from(device)), size_bytes);
            }
            Call::Pin(pick) => {
                let Some(index) = nth(&self.places, pick) else { return };
                let place = &self.places[index];
                if self.memories[&place.memory].away {
                    return;
                }
                self.pool.pin(place.range, "pinned by the test");
                self.memories.get_mut(&place.memory).expect("mapped").pinned = true;
            }
        }
    }

    fn release(&mut self, pick: usize) {
        let Some(key) = self.memory(pick, |m| m.references > 0) else { return };
        let memory = self.memories.get_mut(&key).expect("picked");
        self.pool.release(memory.handle()).expect("a reference");
        memory.references -= 1;
        self.forget_unheld();
    }

    fn retain(&mut self, pick: usize) {
        let Some(index) = nth(&self.places, pick) else { return };
        let place = &self.places[index];
        let inside = DeviceAddress(place.range.start.0 + place.range.size_bytes - 1);
        let handle = self.pool.retain_at(inside).expect("mapped there");
        let memory = self.memories.get_mut(&place.memory).expect("mapped");
        memory.references += 1;
        memory.handle = Some(handle);
    }

    fn map(&mut self, pick: usize) {
        let Some(key) = self.memory(pick, |m| m.references > 0 && !m.away) else { return };
        let memory = &self.memories[&key];
        let range = map(&self.pool, memory.handle(), memory.size_bytes, &[]);
        self.places.push(Place { memory: key, range, accessible: false, block: false });
    }

    fn unmap(&mut self, pick: usize, block: bool) {
        let fits = |place: &Place| place.block == block;
        let indices: Vec<_> = (0..self.places.len()).filter(|&i| fits(&self.places[i])).collect();
        let Some(index) = nth(&indices, pick) else { return };
        let place = self.places.swap_remove(indices[index]);
        if block {
            self.pool.block_free(place.range.start).expect("a block");
        } else {
            self.pool.unmap(place.range).expect("a mapping");
            free_addresses(&self.pool, place.range);
        }
        self.forget_unheld();
    }

    fn write(&mut self, pick: usize) {
        let Some(index) = nth(&self.places, pick) else { return };
        let place = &self.places[index];
        let memory = self.memories.get_mut(&place.memory).expect("mapped");
        if place.accessible && !memory.away {
            let bytes = pattern(pick as u64);
            write(&self.pool, memory.device, place.range, bytes);
            memory.bytes = Some(bytes);
        }
    }

    fn redeem(&mut self, pick: usize) {
        let Some(key) = self.memory(pick, |m| !m.tickets.is_empty() && !m.away) else { return };
        let memory = self.memories.get_mut(&key).expect("picked");
        // Each importer is another process.
        self.made += 1;
        let id = memory.id.expect("exported");
        let serial = memory.tickets.pop().expect("picked for one");
        drop(self.pool.redeem(id, serial, PeerId(self.made as u64)).expect("a descriptor"));
        memory.imported = true;
        self.forget_unheld();
    }

    fn block_allocate(&mut self, device: DeviceOrdinal, size_bytes: u64) {
        let prop = AllocationProp::pinned_on(device);
        let made = self.pool.block_allocate(size_bytes, &prop, &[device], class(Contents::Keep));
        let start = made.expect("a block");
        let padded_bytes = size_bytes.next_multiple_of(UNIT);
        let tag = class(Contents::Keep).tag;
        assert_eq!(tag, "", "blocks here have no tag");
        self.add(None, device, padded_bytes, Contents::Keep, "");
        let memory = self.made - 1;
        self.memories.get_mut(&memory).expect("added").references = 0;
        let range = VaRange::new(start, padded_bytes);
        self.places.push(Place { memory, range, accessible: true, block: true });
    }

    fn pause_or_resume(&mut self) {
        let was_away = self.away();
        if self.paused {
            resume(&self.pool);
        } else {
            pause(&self.pool);
            self.lose_discarded(|memory| !memory.away);
        }
        self.paused = !self.paused;
        self.note_back(&was_away);
    }

    /// Contents that nobody has saved, of what leaves now.
    fn lose_discarded(&mut self, leaves: impl Fn(&Memory) -> bool) {
        for memory in self.memories.values_mut().filter(|m| !m.pinned && leaves(m)) {
            if memory.contents == Contents::Discard {
                memory.bytes = None;
            }
        }
    }

    fn act_on_tag(&mut self, tag: &'static str) {
        let tags = Tags::Named([tag.to_owned()].into());
        let is_away = self.memories.values().any(|m| m.tag == tag && m.away);
        let was_away = self.away();
        if self.paused {
            self.resume(&Selection::Staged(tags));
            // What was paused and is not of this tag stays away; what stayed for a reason is here.
            for memory in self.memories.values_mut() {
                let is_back = memory.tag.is_empty() || memory.tag == tag;
                memory.away = !is_back && (memory.away || !memory.pinned);
            }
            self.paused = false;
        } else if is_away {
            self.resume(&Selection::SetAside(tags, Whose::Everybody));
            for memory in self.memories.values_mut().filter(|m| m.tag == tag) {
                memory.away = false;
            }
        } else {
            let selection = Selection::Tagged(tags, Whose::Everybody);
            self.pool.save(&selection, UNLIMITED).expect("saved");
            self.pool.release_selected().expect("released");
            self.lose_discarded(|memory| memory.tag == tag);
            for memory in self.memories.values_mut().filter(|m| m.tag == tag && !m.pinned) {
                memory.away = true;
            }
        }
        self.note_back(&was_away);
    }

    fn resume(&self, selection: &Selection) {
        self.pool.create_own(selection).expect("memory");
        self.pool.restore_own(usize::MAX).expect("contents");
        drop(self.pool.commit_resume());
    }

    fn check(&self) {
        let report = self.pool.report();
        for device in [DeviceOrdinal(0), DeviceOrdinal(1)] {
            let row = report.devices.iter().find(|row| row.device == device);
            for contents in ALL_CONTENTS {
                let here = |m: &&Memory| m.device == device && m.contents == contents;
                let mine = self.memories.values().filter(here);
                let own_bytes: u64 = mine.clone().map(|m| m.size_bytes).sum();
                let pinned = mine.clone().filter(|m| m.pinned);
                let pinned_bytes: u64 = pinned.map(|m| m.size_bytes).sum();
                let is_here = |m: &&Memory| !m.away && (m.pinned || !self.paused);
                let resident_bytes: u64 = mine.filter(is_here).map(|m| m.size_bytes).sum();
                let classes = row.into_iter().flat_map(|row| &row.classes);
                let found = classes.filter(|c| c.contents == contents);
                let sum = |what: fn(&ClassBytes) -> u64| found.clone().map(what).sum::<u64>();
                assert_eq!(sum(|c| c.own_bytes), own_bytes);
                assert_eq!(sum(|c| c.resident_bytes), resident_bytes);
                assert_eq!(sum(|c| c.pinned_bytes), pinned_bytes);
            }
            let taken_bytes = row.map_or(0, vmm_pool::DeviceReport::resident_bytes);
            assert_eq!(free_bytes(&self.pool, device), CAPACITY_BYTES - taken_bytes);
        }
        let readable = self.places.iter().filter(|place| place.accessible && !self.paused);
        for place in readable {
            let memory = &self.memories[&place.memory];
            if let (Some(bytes), false) = (memory.bytes, memory.away) {
                assert!(holds(&self.pool, memory.device, place.range, bytes));
            }
        }
    }

    fn finish(mut self) {
        if self.paused {
            self.pause_or_resume();
            self.check();
        }
        for tag in &TAGS[1..] {
            if self.memories.values().any(|memory| memory.tag == *tag && memory.away) {
                self.act_on_tag(tag);
                self.check();
            }
        }
        while !self.places.is_empty() {
            self.unmap(0, false);
            self.unmap(0, true);
        }
        while self.memory(0, |m| m.references > 0).is_some() {
            self.release(0);
        }
        while self.memory(0, |m| !m.tickets.is_empty()).is_some() {
            self.redeem(0);
        }
        assert!(self.memories.is_empty());
        let report = self.pool.report();
        assert!(report.devices.is_empty(), "{report:?}");
        for device in [DeviceOrdinal(0), DeviceOrdinal(1)] {
            assert_eq!(free_bytes(&self.pool, device), CAPACITY_BYTES);
        }
    }
}

proptest! {
    #![proptest_config(Config { cases: 40, max_shrink_iters: 200, ..Config::default() })]

    #[test]
    fn any_calls_leave_pool_and_model_agreed(calls in prop::collection::vec(any_call(), 1..60)) {
        let mut model = Model::new();
        for call in &calls {
            model.run(call);
            model.check();
        }
        model.finish();
    }
}
