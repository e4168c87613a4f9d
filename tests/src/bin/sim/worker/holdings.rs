//! What one process holds alone, and what must be in it: the model that its member is compared with.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use sublet_tests::{Outcome, Trouble};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, StreamKind};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, RawContext, RawStream, VaRange};
use vmm_pool::gate::Passage;
use vmm_pool::{Class, Contents, Stance, VirtualHandle};

use super::calls::{device_refused, insist, judged, map, unmap};
use super::cells::{self, Cells};
use super::exchange::{Exchange, Shared};
use super::memory::Paint;
use super::paged::{self, Paged};
use super::{Charter, Sim, host, memory};
use crate::orders::{Account, EndOrder};
use crate::usage::{Usage, descriptors, largest_mappings};

/// More descriptors than this for other things than memory are a leak.
const FDS_MAX: usize = 400;

/// From here on a process says which of its mappings are large: a simulation may find that it has grown.
const RESIDENT_BYTES_TELLING: u64 = 12 << 20;

/// What is under way has ended by then.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
struct Holding {
    /// A plain block (`cuMemAlloc`).
    is_block: bool,
    /// None once it has been released: the mappings keep the memory.
    handle: Option<VirtualHandle>,
    places: Vec<VaRange>,
    units: u64,
    device: DeviceOrdinal,
    contents: Contents,
    paint: Paint,
    /// Devices of this process that reach all its places.
    readers: Vec<DeviceOrdinal>,
}

/// See the head of this module.
pub(super) struct Holdings {
    member: Arc<Sim>,
    random: Rng,
    list: Vec<Holding>,
    cells: Cells,
    paged: Paged,
    /// The devices of this process, with a stream each.
    devices: Vec<(DeviceOrdinal, RawStream)>,
    number: u64,
    units_max: u64,
    is_keeper: bool,
    patterns: u64,
    /// Resumes when all was last compared, and faults then.
    resumes: u64,
    fired: u64,
    /// Faults at the time of the resume before. Without one since, nothing is left over: what the driver
    /// refuses to take back is offered again at the next step.
    fired_before: u64,
}

impl Holdings {
    pub(super) fn new(member: Arc<Sim>, charter: &Charter, pager: paged::Open) -> Outcome<Self> {
        let core = member.pool().driver().core();
        let mut devices = Vec::new();
        for device in charter.devices.iter().map(|device| DeviceOrdinal(*device)) {
            core.ensure_context(device).map_err(device_refused)?;
            let stream = core.new_stream(device, StreamKind::NonBlocking);
            devices.push((device, stream.map_err(device_refused)?));
        }
        Ok(Self {
            cells: Cells::new(Arc::clone(&member), charter),
            paged: Paged::new(Arc::clone(&member), charter, pager)?,
            member,
            random: Rng::with_seed(charter.seed),
            list: Vec::new(),
            devices,
            number: charter.number,
            units_max: charter.units_max,
            is_keeper: charter.is_keeper,
            patterns: 0,
            resumes: 0,
            fired: 0,
            fired_before: 0,
        })
    }

    fn driver(&self) -> &SimDriver {
        self.member.pool().driver()
    }

    fn next_pattern(&mut self) -> u64 {
        self.patterns += 1;
        (self.number << 32) | self.patterns
    }

    fn next_paint(&mut self) -> Paint {
        let is_hollow = self.random.u8(..4) == 0;
        Paint { is_hollow, ..Paint::plain(self.next_pattern()) }
    }

    fn class(&mut self) -> Class {
        let keeps = self.is_keeper && self.random.u8(..4) > 0;
        let contents = if keeps { Contents::Keep } else { Contents::Discard };
        let tag = String::new();
        Class { library: "simulation", tag, contents }
    }

    pub(super) fn wants_a_change(&mut self) -> bool {
        self.random.bool()
    }

    /// Waits for writes that were queued.
    pub(super) fn wait(&mut self) -> Outcome {
        let core = self.driver().core();
        let mut streams = self.devices.iter().map(|(_, stream)| *stream);
        streams.try_for_each(|stream| core.wait_stream(stream).map_err(device_refused))?;
        self.paged.wait()
    }

    /// Does something random; says whether the driver let it.
    pub(super) fn change(&mut self) -> Outcome<bool> {
        if self.paged.wants_a_change() {
            return self.paged.change();
        }
        if self.cells.wants_a_change() {
            return self.cells.change();
        }
        let held: u64 = self.list.iter().map(|h| h.units).sum();
        let room = self.units_max.saturating_sub(held);
        match self.random.u8(..10) {
            0..3 if room > 0 => self.create(room),
            3 if room > 0 => self.allocate_block(),
            4..6 => self.free_one(),
            6 => self.remap_one(),
            7 => self.let_a_handle_go(),
            _ => self.rewrite_one(),
        }
    }

    fn create(&mut self, room: u64) -> Outcome<bool> {
        let units = self.random.u64(1..=room.min(2));
        let class = self.class();
        let contents = class.contents;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let fired = self.driver().faults().fired();
        let (device, readers) = self.choose_devices();
        let prop = AllocationProp::pinned_on(device);
        let made = member.pool().enter().create(units * GRANULARITY_BYTES, &prop, class);
        let Some(handle) = judged(&member, fired, made)? else {
            return Ok(false);
        };
        let Some(place) = map(&member, handle, units, &readers)? else {
            // The reference is gone even where the driver refuses to release the memory.
            judged(&member, fired, member.pool().enter_giving_up().release(handle))?;
            return Ok(false);
        };
        let paint = self.next_paint();
        memory::write(self.driver(), readers[0], place, paint).map_err(device_refused)?;
        let (places, handle, is_block) = (vec![place], Some(handle), false);
        self.list.push(Holding {
            is_block,
            handle,
            places,
            units,
            device,
            contents,
            paint,
            readers,
        });
        Ok(true)
    }

    fn allocate_block(&mut self) -> Outcome<bool> {
        let class = self.class();
        let contents = class.contents;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let fired = self.driver().faults().fired();
        let (device, readers) = self.choose_devices();
        let prop = AllocationProp::pinned_on(device);
        let made =
            member.pool().enter().block_allocate(GRANULARITY_BYTES - 512, &prop, &readers, class);
        let Some(start) = judged(&member, fired, made)? else {
            return Ok(false);
        };
        let place = VaRange::new(start, GRANULARITY_BYTES);
        let paint = self.next_paint();
        memory::write(self.driver(), readers[0], place, paint).map_err(device_refused)?;
        self.list.push(Holding {
            is_block: true,
            handle: None,
            places: vec![place],
            units: 1,
            device,
            contents,
            paint,
            readers,
        });
        Ok(true)
    }

    /// Where new memory lies, and which devices of this process reach it: the same one, or another, or both.
    fn choose_devices(&mut self) -> (DeviceOrdinal, Vec<DeviceOrdinal>) {
        let count = self.devices.len();
        let device = self.devices[self.random.usize(..count)].0;
        let other = self.devices[self.random.usize(..count)].0;
        let readers = match self.random.u8(..3) {
            0 if other != device => vec![other],
            1 if other != device => vec![other, device],
            _ => vec![device],
        };
        (device, readers)
    }

    fn choose(&mut self, suits: impl Fn(&Holding) -> bool) -> Option<usize> {
        let indexes = (0..self.list.len()).filter(|index| suits(&self.list[*index]));
        let indexes: Vec<usize> = indexes.collect();
        self.random.choice(indexes)
    }

    /// Also possible while the tenant stands paused.
    fn free_one(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(|_| true) else {
            return Ok(true);
        };
        self.wait()?;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        self.free(index)?;
        Ok(true)
    }

    fn free(&mut self, index: usize) -> Outcome {
        let holding = self.list.swap_remove(index);
        if holding.is_block {
            let start = holding.places[0].start;
            return insist(&self.member, || self.member.pool().enter_giving_up().block_free(start));
        }
        for place in &holding.places {
            unmap(&self.member, *place)?;
        }
        if let Some(handle) = holding.handle {
            let fired = self.driver().faults().fired();
            judged(&self.member, fired, self.member.pool().enter_giving_up().release(handle))?;
        }
        Ok(())
    }

    /// Adds a second place, or takes one of two away.
    fn remap_one(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(|holding| holding.handle.is_some()) else {
            return Ok(true);
        };
        self.wait()?;
        let member = Arc::clone(&self.member);
        if self.list[index].places.len() > 1 {
            let _pass = member.gate().pass(Passage::GiveUp);
            if let Some(place) = self.list[index].places.pop() {
                unmap(&self.member, place)?;
            }
            return Ok(true);
        }
        let _pass = member.gate().pass(Passage::Use);
        let Holding { handle: Some(handle), units, .. } = self.list[index] else {
            return Ok(true);
        };
        let place = map(&member, handle, units, &self.list[index].readers)?;
        self.list[index].places.extend(place);
        Ok(place.is_some())
    }

    fn let_a_handle_go(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(|holding| holding.handle.is_some()) else {
            return Ok(true);
        };
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        if let Some(handle) = self.list[index].handle.take() {
            member.pool().enter_giving_up().release(handle)?;
        }
        Ok(true)
    }

    fn rewrite_one(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(|_| true) else {
            return Ok(true);
        };
        let place = self.list[index].places[0];
        let old = self.list[index].paint;
        // All of it, or a page: the one that is different already, so that what is in it stays easy to tell.
        let (changed, written, paint) = if self.random.bool() {
            let paint = self.next_paint();
            (place, paint, paint)
        } else {
            let any = self.random.u64(..memory::page_count(place));
            let page = old.page.map_or(any, |(page, _)| page);
            let pattern = self.next_pattern();
            let changed = memory::page_at(place, page);
            (changed, Paint::plain(pattern), Paint { page: Some((page, pattern)), ..old })
        };
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let reader = self.list[index].readers[0];
        let all = self.devices.iter();
        let target = all.copied().find(|(device, _)| *device == reader);
        let target = target.ok_or_else(|| Trouble::new("a device that is not used"))?;
        memory::queue_write(self.driver(), target, changed, written).map_err(device_refused)?;
        self.list[index].paint = paint;
        Ok(true)
    }

    /// Compares everything that can be reached with what was written, and the accounts.
    #[expect(
        clippy::disallowed_methods,
        reason = "what ends on other threads and in the kernel gives no event"
    )]
    pub(super) fn check(
        &mut self,
        exchange: &Exchange,
        away: &[String],
        open: &[u128],
    ) -> Outcome<Account> {
        self.wait()?;
        let mut first = Account::default();
        self.paged.check(&mut first.checked_bytes)?;
        first.paged = self.paged.take_done();
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let resumes = member.stats().resumes;
        if resumes != self.resumes {
            self.resumes = resumes;
            self.fired_before = self.fired;
            self.fired = self.driver().faults().fired();
        }
        // Threads of its own may be about to let memory go, and the kernel may close a ticket of a process that was killed
        // after its death was heard of.
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let mut account = first.clone();
            for index in 0..self.list.len() {
                self.check_one(index, &mut account)?;
            }
            let shared = exchange.check(away, open, &mut account)?;
            match self.settle(&mut account, &shared, away.is_empty()) {
                Ok(_is_exact) => {
                    host::has_descriptors();
                    return Ok(account);
                }
                Err(trouble) if Instant::now() > until => {
                    return Err(Trouble::new(format!("{trouble}; {}", exchange.told())));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn check_one(&self, index: usize, account: &mut Account) -> Outcome {
        let holding = &self.list[index];
        for place in &holding.places {
            for reader in &holding.readers {
                match memory::holds(self.driver(), *reader, *place, holding.paint) {
                    Ok(true) => account.checked_bytes += place.size_bytes,
                    // What is in it after a pause is not defined; that it can be reached is.
                    Ok(false) if holding.contents == Contents::Discard => {}
                    seen => {
                        let at = format!("{seen:?} at {place:?} seen by {reader:?}: {holding:?}");
                        return Err(Trouble::new(at));
                    }
                }
            }
        }
        if holding.contents == Contents::Discard { self.renew_discarded(index) } else { Ok(()) }
    }

    /// Memory whose contents a pause may give up is written again, so that it can be told from others.
    fn renew_discarded(&self, index: usize) -> Outcome {
        let holding = &self.list[index];
        memory::write(self.driver(), holding.readers[0], holding.places[0], holding.paint)
            .map_err(device_refused)
    }

    /// The rest of the account: bytes, objects, descriptors. Says whether nothing of slabs can be left over.
    fn settle(&self, account: &mut Account, shared: &Shared, is_all_back: bool) -> Outcome<bool> {
        account.own_bytes.clone_from(&shared.own_bytes);
        for holding in &self.list {
            let bytes = holding.units * GRANULARITY_BYTES;
            account.own_bytes[usize::try_from(holding.device.0)?] += bytes;
        }
        let report = self.paged.report();
        let cells = self.cells.check(&report, &mut account.checked_bytes)?;
        let paged = self.paged.account(&report)?;
        for ((index, bytes), perhaps) in (0..).zip(&account.own_bytes).zip(&shared.perhaps_bytes) {
            let rows = report.devices.iter().filter(|row| row.device.0 == index);
            let of_pager: u64 = rows.clone().map(paged::own_bytes_on).sum();
            let own: u64 = rows.clone().map(vmm_pool::DeviceReport::own_bytes).sum();
            let own = own - of_pager;
            let of_cells: u64 = rows.clone().map(cells::own_bytes_on).sum();
            let paged: u64 = rows.clone().map(paged::resident_bytes_on).sum();
            let resident: u64 = rows.map(vmm_pool::DeviceReport::resident_bytes).sum();
            let resident = resident - paged;
            let is_right = (*bytes..=bytes + perhaps).contains(&(own - of_cells));
            if !is_right || (is_all_back && resident != own) {
                let recorded = self.member.pool().holdings().inventory(Stance::Runs).into_iter();
                let own_here = recorded.filter(|item| {
                    item.is_own() && item.device.is_some_and(|device| device.0 == index)
                });
                return Err(Trouble::new(format!(
                    "device {index}: {bytes} to {} bytes held, {own} on record, {of_cells} of them of cells, {resident} \
                     resident: {:#?}",
                    bytes + perhaps,
                    own_here
                        .map(|item| (
                            u128::from_be_bytes(item.id.0),
                            self.member.pool().holdings().told_of(item.id)
                        ))
                        .collect::<Vec<_>>()
                )));
            }
        }
        // Those that the pool keeps from step to step are not counted.
        let _none = self.member.pool().take_plain_memory(RawContext(0));
        let census = self.driver().census();
        let own_places: usize = self.list.iter().map(|holding| holding.places.len()).sum();
        let places = own_places + shared.places + cells.places + paged.places;
        let of_paging = census.streams.checked_sub(self.devices.len() + 1);
        let is_clean = self.driver().faults().fired() == self.fired_before;
        let has_all = if cells.is_exact && paged.is_exact {
            census.mappings == places
        } else {
            // A slab that the driver would not take back stays until the next one ends.
            census.mappings >= places
        };
        let has_streams = of_paging.is_some_and(|streams| paged.streams.contains(&streams));
        let has_streams = has_streams || !paged.is_exact;
        if is_clean && (!has_all || !has_streams) {
            return Err(Trouble::new(format!("{census:?}, but {places} places are mapped")));
        }
        let usage = Usage::now(report.host_arena_bytes)?;
        if usage.resident_bytes > RESIDENT_BYTES_TELLING {
            let told = largest_mappings();
            writeln!(io::stderr(), "process {}: {usage:?}:\n{told}", std::process::id()).ok();
        }
        if usage.fds > FDS_MAX {
            return Err(Trouble::new(format!("{} descriptors are open", usage.fds)));
        }
        account.objects = format!("{census:?}");
        account.fds = usage.fds;
        account.descriptors = descriptors();
        account.resident_bytes = usage.resident_bytes;
        account.slabs = report.slabs.slabs;
        account.cells = report.slabs.cells;
        Ok(cells.is_exact && paged.is_exact)
    }

    /// Lets everything go; nothing may be left then.
    pub(super) fn free_all(
        &mut self,
        exchange: &Exchange,
        away: &[String],
        open: &[u128],
    ) -> Outcome<Account> {
        self.wait()?;
        self.paged.free_all()?;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        while !self.list.is_empty() {
            self.free(0)?;
        }
        self.cells.free_all()?;
        exchange.end(EndOrder::Any)?;
        let mut account = Account::default();
        let shared = exchange.check(away, open, &mut account)?;
        let is_exact = self.settle(&mut account, &shared, false)?;
        let census = self.driver().census();
        let is_clean =
            is_exact && self.driver().faults().fired() == self.fired_before && away.is_empty();
        let left = (census.handles, census.reservations, census.mappings);
        if is_clean && left != (shared.kept_by_tickets, 0, 0) {
            return Err(Trouble::new(format!("all was freed, and there are {census:?}")));
        }
        Ok(account)
    }
}
