//! What one process holds, and what must be in it: the model that its member is compared with.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use fastrand::Rng;
use sublet_tests::{Outcome, Trouble};
use tenants::gate::Passage;
use tenants::member::ImportError;
use tenants::ticket::Ticket;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, StreamKind};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, RawStream, VaRange,
};
use vmm_pool::{Class, Contents, PoolError, VirtualHandle};

use super::{Charter, Sim, memory};
use crate::orders::{Account, Offer};
use crate::usage::Usage;

/// A call that an injected fault made fail is made again so often at most.
const TRIES_MAX: usize = 8;
/// More descriptors than this for other things than memory are a leak.
const FDS_MAX: usize = 400;

/// Where memory came from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    /// This process created it.
    Own,
    /// As a plain block (`cuMemAlloc`).
    Block,
    /// Another process did.
    Imported {
        owner: u64,
        allocation: u128,
        /// How many resumes there had been when it was last seen whole after its owner's end.
        ended: Option<u64>,
        is_lost: bool,
    },
}

#[derive(Clone, Debug)]
struct Holding {
    origin: Origin,
    /// None once it has been released: the mappings keep the memory.
    handle: Option<VirtualHandle>,
    places: Vec<VaRange>,
    units: u64,
    device: DeviceOrdinal,
    contents: Contents,
    pattern: u64,
    is_shared: bool,
}

impl Holding {
    fn is_own(&self) -> bool {
        matches!(self.origin, Origin::Own | Origin::Block)
    }

    fn is_from(&self, process: u64) -> bool {
        matches!(self.origin, Origin::Imported { owner, .. } if owner == process)
    }

    fn bytes(&self) -> u64 {
        self.units * GRANULARITY_BYTES
    }
}

/// See the head of this module.
pub(super) struct Holdings {
    member: Arc<Sim>,
    random: Rng,
    list: Vec<Holding>,
    device: DeviceOrdinal,
    stream: RawStream,
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
    pub(super) fn new(member: Arc<Sim>, device: DeviceOrdinal, charter: &Charter) -> Outcome<Self> {
        let core = member.pool().driver().core();
        core.ensure_context(device).map_err(device_refused)?;
        let stream = core.new_stream(device, StreamKind::NonBlocking).map_err(device_refused)?;
        Ok(Self {
            member,
            random: Rng::with_seed(charter.seed),
            list: Vec::new(),
            device,
            stream,
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

    fn class(&mut self) -> Class {
        let keeps = self.is_keeper && self.random.u8(..4) > 0;
        let contents = if keeps { Contents::Keep } else { Contents::Discard };
        Class { library: "simulation", tag: String::new(), contents }
    }

    /// What a call came to: `None` when a fault that was injected, or a full device, explains the refusal.
    fn judged<T>(&self, fired: u64, result: Result<T, PoolError>) -> Outcome<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if self.driver().faults().fired() > fired || is_full(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Calls until it succeeds, which it must as soon as no fault is in the way.
    fn insist<T>(&self, call: impl Fn(&Self) -> Result<T, PoolError>) -> Outcome<T> {
        for _ in 0..TRIES_MAX {
            let fired = self.driver().faults().fired();
            if let Some(value) = self.judged(fired, call(self))? {
                return Ok(value);
            }
        }
        Err(Trouble::new("a call was refused again and again"))
    }

    pub(super) fn wants_a_change(&mut self) -> bool {
        self.random.bool()
    }

    /// Waits for writes that were queued.
    pub(super) fn wait(&mut self) -> Outcome {
        self.driver().core().wait_stream(self.stream).map_err(device_refused)
    }

    /// Does something random; says whether the driver let it.
    pub(super) fn change(&mut self) -> Outcome<bool> {
        let held: u64 = self.list.iter().filter(|h| h.is_own()).map(|h| h.units).sum();
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
        let prop = AllocationProp::pinned_on(self.device);
        let made = member.pool().create(units * GRANULARITY_BYTES, &prop, class);
        let Some(handle) = self.judged(fired, made)? else {
            return Ok(false);
        };
        let Some(place) = self.map(handle, units)? else {
            // The reference is gone even where the driver refuses to release the memory.
            self.judged(fired, member.pool().release(handle))?;
            return Ok(false);
        };
        let pattern = self.next_pattern();
        memory::write(self.driver(), self.device, place, pattern).map_err(device_refused)?;
        let (device, places) = (self.device, vec![place]);
        let (origin, handle) = (Origin::Own, Some(handle));
        let is_shared = false;
        self.list.push(Holding {
            origin,
            handle,
            places,
            units,
            device,
            contents,
            pattern,
            is_shared,
        });
        Ok(true)
    }

    /// Maps `handle` at a fresh place, or leaves nothing behind.
    fn map(&self, handle: VirtualHandle, units: u64) -> Outcome<Option<VaRange>> {
        let size_bytes = units * GRANULARITY_BYTES;
        let core = self.driver().core();
        let start = core.reserve(size_bytes, 0, DeviceAddress(0)).map_err(device_refused)?;
        let place = VaRange::new(start, size_bytes);
        let fired = self.driver().faults().fired();
        if self.judged(fired, self.member.pool().map(place, 0, handle))?.is_none() {
            core.free_addresses(place).map_err(device_refused)?;
            return Ok(None);
        }
        let access = [AccessDesc::read_write(self.device)];
        if self.judged(fired, self.member.pool().set_access(place, &access))?.is_none() {
            self.unmap(place)?;
            return Ok(None);
        }
        Ok(Some(place))
    }

    fn unmap(&self, place: VaRange) -> Outcome {
        self.insist(|holdings| holdings.member.pool().unmap(place))?;
        self.driver().core().free_addresses(place).map_err(device_refused)
    }

    fn allocate_block(&mut self) -> Outcome<bool> {
        let class = self.class();
        let contents = class.contents;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let fired = self.driver().faults().fired();
        let prop = AllocationProp::pinned_on(self.device);
        let made =
            member.pool().block_allocate(GRANULARITY_BYTES - 512, &prop, &[self.device], class);
        let Some(start) = self.judged(fired, made)? else {
            return Ok(false);
        };
        let place = VaRange::new(start, GRANULARITY_BYTES);
        let pattern = self.next_pattern();
        memory::write(self.driver(), self.device, place, pattern).map_err(device_refused)?;
        self.list.push(Holding {
            origin: Origin::Block,
            handle: None,
            places: vec![place],
            units: 1,
            device: self.device,
            contents,
            pattern,
            is_shared: false,
        });
        Ok(true)
    }

    /// Something that this process created and nobody else holds.
    fn choose(&mut self, suits: impl Fn(&Holding) -> bool) -> Option<usize> {
        let indexes = (0..self.list.len())
            .filter(|index| !self.list[*index].is_shared && suits(&self.list[*index]));
        let indexes: Vec<usize> = indexes.collect();
        if indexes.is_empty() { None } else { Some(indexes[self.random.usize(..indexes.len())]) }
    }

    /// Also possible while the tenant stands paused.
    fn free_one(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(Holding::is_own) else {
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
        if holding.origin == Origin::Block {
            let start = holding.places[0].start;
            return self.insist(|holdings| holdings.member.pool().block_free(start));
        }
        for place in &holding.places {
            self.unmap(*place)?;
        }
        if let Some(handle) = holding.handle {
            let fired = self.driver().faults().fired();
            self.judged(fired, self.member.pool().release(handle))?;
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
                self.unmap(place)?;
            }
            return Ok(true);
        }
        let _pass = member.gate().pass(Passage::Use);
        let Holding { handle: Some(handle), units, .. } = self.list[index] else {
            return Ok(true);
        };
        let place = self.map(handle, units)?;
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
            member.pool().release(handle)?;
        }
        Ok(true)
    }

    fn rewrite_one(&mut self) -> Outcome<bool> {
        let Some(index) = self.choose(Holding::is_own) else {
            return Ok(true);
        };
        let pattern = self.next_pattern();
        let place = self.list[index].places[0];
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let target = (self.device, self.stream);
        memory::queue_write(self.driver(), target, place, pattern).map_err(device_refused)?;
        self.list[index].pattern = pattern;
        Ok(true)
    }

    /// Tickets for up to `count` allocations.
    pub(super) fn share(&mut self, count: usize) -> Outcome<Vec<Offer>> {
        let mut offers = Vec::new();
        for _ in 0..count {
            let Some(index) = self.choose(|h| h.is_own() && h.handle.is_some()) else {
                break;
            };
            let Some(handle) = self.list[index].handle else { break };
            let fd = self.member.issue_ticket(handle)?;
            let ticket = Ticket::read(fd.as_fd())?.ok_or_else(|| Trouble::new("no ticket"))?;
            let ticket = ticket.encode().ok_or_else(|| Trouble::new("a ticket too long"))?;
            let holding = &mut self.list[index];
            holding.is_shared = true;
            offers.push(Offer {
                ticket,
                units: holding.units,
                pattern: holding.pattern,
                is_kept: holding.contents == Contents::Keep,
                owner: self.number,
                device: holding.device.0,
            });
        }
        Ok(offers)
    }

    pub(super) fn accept(&mut self, offers: Vec<Offer>) -> Outcome {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        for offer in offers {
            let ticket = Ticket::decode(&offer.ticket)?;
            let contents = if offer.is_kept { Contents::Keep } else { Contents::Discard };
            let handle = redeem(&member, &ticket, "simulation")?;
            let place = self.map(handle, offer.units)?.ok_or_else(|| Trouble::new("no mapping"))?;
            self.list.push(Holding {
                origin: Origin::Imported {
                    owner: offer.owner,
                    allocation: u128::from_be_bytes(ticket.allocation.0),
                    ended: None,
                    is_lost: false,
                },
                handle: Some(handle),
                places: vec![place],
                units: offer.units,
                device: DeviceOrdinal(offer.device),
                contents,
                pattern: offer.pattern,
                is_shared: true,
            });
        }
        Ok(())
    }

    pub(super) fn drop_imports(&mut self, owner: u64) -> Outcome {
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        while let Some(index) = self.list.iter().position(|holding| holding.is_from(owner)) {
            self.free(index)?;
        }
        Ok(())
    }

    pub(super) fn owner_ended(&mut self, process: u64) {
        // How many there had been when all was last seen whole.
        let then = self.resumes;
        for holding in &mut self.list {
            if let Origin::Imported { owner, ended, .. } = &mut holding.origin
                && *owner == process
            {
                *ended = Some(then);
            }
        }
    }

    /// Compares everything that can be reached with what was written, and the accounts.
    pub(super) fn check(&mut self) -> Outcome<Account> {
        self.wait()?;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::Use);
        let resumes = member.stats().resumes;
        if resumes != self.resumes {
            self.resumes = resumes;
            self.fired_before = self.fired;
            self.fired = self.driver().faults().fired();
        }
        let mut account = Account::default();
        for index in 0..self.list.len() {
            self.check_one(index, resumes, &mut account)?;
        }
        self.settle(&mut account)?;
        Ok(account)
    }

    fn check_one(&mut self, index: usize, resumes: u64, account: &mut Account) -> Outcome {
        let holding = &self.list[index];
        let mut is_gone = false;
        for place in &holding.places {
            let seen = memory::holds(self.driver(), self.device, *place, holding.pattern);
            match (seen, &holding.origin) {
                (Ok(true), Origin::Imported { is_lost: true, .. }) => {
                    return Err(Trouble::new(format!("lost memory came back: {holding:?}")));
                }
                (Ok(true), _) => account.checked_bytes += place.size_bytes,
                // What is in it after a pause is not defined; that it can be reached is.
                (Ok(false), _) if holding.contents == Contents::Discard => {}
                (Err(_), Origin::Imported { is_lost: true, .. }) => is_gone = true,
                // Lost by a pause since it was last seen whole.
                (Err(_), Origin::Imported { ended: Some(then), .. }) if resumes > *then => {
                    is_gone = true;
                    account.lost += 1;
                }
                (seen, _) => {
                    return Err(Trouble::new(format!("{seen:?} at {place:?}: {holding:?}")));
                }
            }
        }
        let bytes = holding.bytes();
        let device = holding.device.0;
        if let Origin::Imported { ended: Some(then), is_lost, allocation, .. } =
            &mut self.list[index].origin
        {
            *is_lost = is_gone;
            *then = resumes;
            if !is_gone {
                account.orphans.push((*allocation, device, bytes));
            }
        } else if self.list[index].contents == Contents::Discard && self.list[index].is_own() {
            self.renew_discarded(index)?;
        }
        Ok(())
    }

    /// Memory whose contents a pause may give up is written anew, so that it can be told from others.
    fn renew_discarded(&mut self, index: usize) -> Outcome {
        let (place, pattern) = (self.list[index].places[0], self.list[index].pattern);
        memory::write(self.driver(), self.device, place, pattern).map_err(device_refused)
    }

    /// The rest of the account: bytes, objects, descriptors.
    fn settle(&self, account: &mut Account) -> Outcome {
        let devices = self.driver().core().visible_count();
        account.own_bytes = vec![0; devices];
        for holding in self.list.iter().filter(|holding| holding.is_own()) {
            account.own_bytes[usize::try_from(holding.device.0)?] += holding.bytes();
        }
        let report = self.member.pool().report();
        for (index, bytes) in (0..).zip(&account.own_bytes) {
            let rows = report.devices.iter().filter(|row| row.device.0 == index);
            let own: u64 = rows.clone().map(vmm_pool::DeviceReport::own_bytes).sum();
            let resident: u64 = rows.map(vmm_pool::DeviceReport::resident_bytes).sum();
            if own != *bytes || resident != *bytes {
                return Err(Trouble::new(format!(
                    "device {index}: {bytes} bytes held, {own} on record, {resident} resident"
                )));
            }
        }
        let census = self.driver().census();
        let places: usize = self.list.iter().filter_map(present_places).sum();
        let is_clean = self.driver().faults().fired() == self.fired_before;
        if is_clean && (census.mappings != places || census.streams != 2) {
            return Err(Trouble::new(format!("{census:?}, but {places} places are mapped")));
        }
        let usage = Usage::now(report.host_arena_bytes)?;
        if usage.fds > FDS_MAX {
            return Err(Trouble::new(format!("{} descriptors are open", usage.fds)));
        }
        account.objects = format!("{census:?}");
        account.fds = usage.fds;
        account.resident_bytes = usage.resident_bytes;
        Ok(())
    }

    /// Lets everything go; nothing may be left then.
    pub(super) fn free_all(&mut self) -> Outcome<Account> {
        self.wait()?;
        let member = Arc::clone(&self.member);
        let _pass = member.gate().pass(Passage::GiveUp);
        while !self.list.is_empty() {
            self.free(0)?;
        }
        let mut account = Account::default();
        self.settle(&mut account)?;
        let census = self.driver().census();
        let is_clean = self.driver().faults().fired() == self.fired_before;
        if is_clean && (census.handles, census.reservations, census.mappings) != (0, 0, 0) {
            return Err(Trouble::new(format!("all was freed, and there are {census:?}")));
        }
        Ok(account)
    }
}

/// How many of its places are mapped; none for what is lost.
fn present_places(holding: &Holding) -> Option<usize> {
    let is_lost = matches!(holding.origin, Origin::Imported { is_lost: true, .. });
    (!is_lost).then_some(holding.places.len())
}

/// Imports; a ticket stays good when a fault was in the way.
fn redeem(
    member: &Sim,
    ticket: &Ticket,
    library: &'static str,
) -> Result<VirtualHandle, ImportError> {
    let handle = member.redeem_ticket(ticket, library);
    handle.or_else(|_| member.redeem_ticket(ticket, library))
}

fn is_full(error: &PoolError) -> bool {
    error.code() == Some(DriverCode::OUT_OF_MEMORY)
}

fn device_refused(code: DriverCode) -> Trouble {
    Trouble::new(format!("the simulated device refused with {code}"))
}
