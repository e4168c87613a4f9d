//! What one process shares with others: memory that it gave out, and memory that it took. Each deal is made by a
//! thread of its own at an instant of its own, as communicators come and end, so that it meets a pause anywhere.
//!
//! A pass of the gate is taken before the lock of the model, never behind it.

mod taking;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastrand::Rng;
use sublet_cuda_driver::{Answer, ipc};
use sublet_tests::{Outcome, Trouble};
use tenants::ticket::Ticket;
use vmm_pool::driver::sim::GRANULARITY_BYTES;
use vmm_pool::driver::{AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
use vmm_pool::gate::Passage;
use vmm_pool::{Class, Contents, Stance, VirtualHandle};

use super::calls::{device_refused, fired, insist, is_explained, judged, map, unmap};
use super::memory::Paint;
use super::{Charter, Sim, memory};
use crate::orders::{Account, EndOrder, Offer, Paper};

/// Of regions, as processes use them.
pub(crate) const TAGS: [&str; 2] = ["kv", "weights"];
/// Instead of a region.
const LIBRARY: &str = "simulation";

/// Where memory came from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    Own,
    /// A plain block of this process's own (`cuMemAlloc`).
    Block,
    Imported {
        owner: u64,
        /// Its owner has ended: a pause loses it.
        is_orphan: bool,
        is_lost: bool,
        /// So often it was opened as a `cudaIpc` handle; 0 for a ticket.
        opens: u32,
    },
}

#[derive(Clone, Debug)]
struct Piece {
    id: u128,
    origin: Origin,
    /// None for blocks.
    handle: Option<VirtualHandle>,
    place: Option<VaRange>,
    /// Devices of this process that reach it.
    readers: Vec<DeviceOrdinal>,
    units: u64,
    device: DeviceOrdinal,
    contents: Contents,
    tag: String,
    pattern: u64,
}

impl Piece {
    fn is_own(&self) -> bool {
        matches!(self.origin, Origin::Own | Origin::Block)
    }

    fn bytes(&self) -> u64 {
        self.units * GRANULARITY_BYTES
    }
}

/// Own memory that was let go, which a ticket or a pause may keep.
#[derive(Clone, Debug)]
struct LetGo {
    id: u128,
    tag: String,
    device: DeviceOrdinal,
    bytes: u64,
}

struct Model {
    random: Rng,
    pieces: Vec<Piece>,
    let_go: Vec<LetGo>,
    /// Processes that have ended; one may be heard of before what was taken from it is entered.
    ended: BTreeSet<u64>,
    made: u64,
}

impl Model {
    fn enter(&mut self, mut piece: Piece) {
        if let Origin::Imported { owner, is_orphan, .. } = &mut piece.origin {
            *is_orphan = self.ended.contains(owner);
        }
        self.pieces.push(piece);
    }
}

/// See the head of this module.
pub(super) struct Exchange {
    member: Arc<Sim>,
    charter: Charter,
    devices: Vec<DeviceOrdinal>,
    model: Mutex<Model>,
}

/// What is shared, as the rest of the account needs it.
pub(super) struct Shared {
    /// Own bytes by device, held or kept for a ticket.
    pub(super) own_bytes: Vec<u64>,
    /// What may be there besides: let go while its tag was paused.
    pub(super) perhaps_bytes: Vec<u64>,
    /// Places that are mapped.
    pub(super) places: usize,
    /// Allocations that only a ticket keeps.
    pub(super) kept_by_tickets: usize,
}

impl Exchange {
    pub(super) fn new(member: Arc<Sim>, charter: &Charter) -> Self {
        let random = Rng::with_seed(charter.seed ^ 0x5ba3);
        let model = Model {
            random,
            pieces: Vec::new(),
            let_go: Vec::new(),
            ended: BTreeSet::new(),
            made: 0,
        };
        let devices = charter.devices.iter().map(|device| DeviceOrdinal(*device)).collect();
        Self { member, charter: charter.clone(), devices, model: Mutex::new(model) }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// New memory, with papers for others to come for it.
    pub(super) fn offer(&self, count: usize) -> Outcome<Vec<Offer>> {
        let mut offers = Vec::new();
        for _ in 0..count {
            let _pass = self.member.gate().pass(Passage::Use);
            let mut model = self.model();
            let own = model.pieces.iter().filter(|piece| piece.is_own()).count();
            if own as u64 >= self.charter.units_max.min(3) {
                break;
            }
            if let Some(piece) = self.make(&mut model)? {
                let papers = if model.random.u8(..3) == 0 { 2 } else { 1 };
                self.issue(&mut model, piece, papers, &mut offers)?;
            }
        }
        Ok(offers)
    }

    fn make(&self, model: &mut Model) -> Outcome<Option<Piece>> {
        model.made += 1;
        let pattern = (self.charter.number << 32) | (1 << 31) | model.made;
        let device = self.devices[model.random.usize(..self.devices.len())];
        // Mapped from one device to another inside the process, now and then.
        let mut readers = vec![device];
        readers.extend(model.random.choice(&self.devices).filter(|other| **other != device));
        let keeps = self.charter.is_keeper && model.random.u8(..4) > 0;
        let contents = if keeps { Contents::Keep } else { Contents::Discard };
        let tag = match model.random.usize(..4) {
            index if index < TAGS.len() => TAGS[index],
            _ => "",
        };
        let class = Class { library: LIBRARY, tag: tag.to_owned(), contents };
        let prop = AllocationProp::pinned_on(device);
        let before = fired(&self.member);
        let pool = self.member.pool();
        let piece = |origin, handle, place| Piece {
            id: 0,
            origin,
            handle,
            place: Some(place),
            readers: readers.clone(),
            units: 1,
            device,
            contents,
            tag: tag.to_owned(),
            pattern,
        };
        let piece = if model.random.bool() {
            let made = pool.enter().block_allocate(GRANULARITY_BYTES - 512, &prop, &readers, class);
            let Some(start) = judged(&self.member, before, made)? else { return Ok(None) };
            piece(Origin::Block, None, VaRange::new(start, GRANULARITY_BYTES))
        } else {
            let made = pool.enter().create(GRANULARITY_BYTES, &prop, class);
            let Some(handle) = judged(&self.member, before, made)? else { return Ok(None) };
            let Some(place) = map(&self.member, handle, 1, &readers)? else {
                judged(&self.member, before, pool.enter_giving_up().release(handle))?;
                return Ok(None);
            };
            piece(Origin::Own, Some(handle), place)
        };
        let place = piece.place.ok_or_else(|| Trouble::new("a piece without a place"))?;
        memory::write(pool.driver(), device, place, Paint::plain(pattern))
            .map_err(device_refused)?;
        Ok(Some(piece))
    }

    /// Papers for a piece that is new; it is freed again where none could be made.
    fn issue(
        &self,
        model: &mut Model,
        mut piece: Piece,
        papers: usize,
        offers: &mut Vec<Offer>,
    ) -> Outcome {
        let place = piece.place.ok_or_else(|| Trouble::new("a piece without a place"))?;
        let mut issued = 0;
        for _ in 0..papers {
            let paper = if let Some(handle) = piece.handle {
                let before = fired(&self.member);
                // Its words travel, and not its descriptor: nobody watches whether that is open.
                let ticket = match self.member.pool().enter().export(handle) {
                    Ok(export) => Ticket {
                        allocation: export.id,
                        serial: export.serial,
                        size_bytes: export.size_bytes,
                        owner: self.member.presence().id(),
                        tenant: self.member.presence().tenant().clone(),
                        part: None,
                    },
                    Err(_) if is_explained(&self.member, before) => continue,
                    Err(error) => return Err(error.into()),
                };
                piece.id = u128::from_be_bytes(ticket.allocation.0);
                Paper::Ticket(ticket.encode().to_vec())
            } else {
                let handle = ipc::handle_of(&self.member, place.start);
                let Answer::Done(handle) = handle else {
                    return Err(Trouble::new("a block without a handle"));
                };
                let (id, _, _) = self
                    .member
                    .pool()
                    .enter_giving_up()
                    .block_identity(place.start)
                    .ok_or_else(|| Trouble::new("a block that is not known"))?;
                piece.id = u128::from_be_bytes(id.0);
                Paper::Handle(handle.to_vec())
            };
            issued += 1;
            model.made += 1;
            offers.push(Offer {
                number: (self.charter.number << 32) | model.made,
                paper,
                id: piece.id,
                units: piece.units,
                pattern: piece.pattern,
                is_kept: piece.contents == Contents::Keep,
                owner: self.charter.number,
                device: piece.device.0,
                tag: piece.tag.clone(),
            });
        }
        if issued > 0 {
            model.pieces.push(piece);
            Ok(())
        } else {
            self.free(&piece)
        }
    }

    /// The communicator ends here: all that it has is let go, in this order.
    pub(super) fn end(&self, order: EndOrder) -> Outcome {
        let _pass = self.member.gate().pass(Passage::GiveUp);
        let mut model = self.model();
        let mut pieces = std::mem::take(&mut model.pieces);
        match order {
            EndOrder::ImportsFirst => pieces.sort_by_key(Piece::is_own),
            EndOrder::OwnFirst => pieces.sort_by_key(|piece| !piece.is_own()),
            EndOrder::Any => model.random.shuffle(&mut pieces),
        }
        for piece in pieces {
            self.let_go(&mut model, piece)?;
        }
        Ok(())
    }

    /// Lets one piece go; an opened handle is closed once.
    pub(super) fn let_one_go(&self) -> Outcome {
        let _pass = self.member.gate().pass(Passage::GiveUp);
        let mut model = self.model();
        if model.pieces.is_empty() {
            return Ok(());
        }
        let count = model.pieces.len();
        let index = model.random.usize(..count);
        if let Origin::Imported { opens, .. } = &mut model.pieces[index].origin
            && *opens > 1
        {
            *opens -= 1;
            let place = model.pieces[index].place;
            return match place {
                Some(place) => self.close(place.start),
                None => Ok(()),
            };
        }
        let piece = model.pieces.swap_remove(index);
        self.let_go(&mut model, piece)
    }

    /// Lets all go that came from `process`.
    pub(super) fn drop_imports(&self, process: u64) -> Outcome {
        let _pass = self.member.gate().pass(Passage::GiveUp);
        let mut model = self.model();
        let is_from = |piece: &mut Piece| matches!(piece.origin, Origin::Imported { owner, .. } if owner == process);
        let theirs: Vec<Piece> = model.pieces.extract_if(.., is_from).collect();
        theirs.iter().try_for_each(|piece| self.free(piece))
    }

    fn let_go(&self, model: &mut Model, piece: Piece) -> Outcome {
        self.free(&piece)?;
        if piece.is_own() {
            let (id, device, bytes) = (piece.id, piece.device, piece.bytes());
            model.let_go.push(LetGo { id, tag: piece.tag, device, bytes });
        }
        Ok(())
    }

    fn free(&self, piece: &Piece) -> Outcome {
        let pool = self.member.pool();
        match (&piece.origin, piece.place) {
            (Origin::Block, Some(place)) => {
                return insist(&self.member, || pool.enter_giving_up().block_free(place.start));
            }
            (Origin::Imported { opens, .. }, Some(place)) if *opens > 0 => {
                return (0..*opens).try_for_each(|_| self.close(place.start));
            }
            (_, Some(place)) => unmap(&self.member, place)?,
            (_, None) => {}
        }
        if let Some(handle) = piece.handle {
            let before = fired(&self.member);
            judged(&self.member, before, pool.enter_giving_up().release(handle))?;
        }
        Ok(())
    }

    fn close(&self, start: DeviceAddress) -> Outcome {
        insist(&self.member, || self.member.pool().enter_giving_up().block_close(start))
    }

    /// Fills one piece that has a tag with what is in it, unless its memory is away by tag, where a hook refuses it.
    /// Was it away? What is not refused is there, and right.
    pub(super) fn touch(&self) -> Outcome<bool> {
        let _pass = self.member.gate().pass(Passage::Use);
        let mut model = self.model();
        let model = &mut *model;
        let has_tag = |piece: &&mut Piece| !piece.tag.is_empty();
        let tagged =
            model.random.choice(model.pieces.iter_mut().filter(has_tag).collect::<Vec<_>>());
        let Some(piece) = tagged else { return Ok(false) };
        let Some(place) = piece.place else { return Ok(false) };
        let pool = self.member.pool();
        let seen =
            memory::holds(pool.driver(), piece.readers[0], place, Paint::plain(piece.pattern));
        if let Some(away) = pool.holdings().away_by_tag(place) {
            if away.tag != piece.tag || seen.is_ok() || !pool.runs_without_some() {
                return Err(Trouble::new(format!("{seen:?} of {piece:?}, which is {away:?}")));
            }
            return Ok(true);
        }
        // What was imported may have gone with its owner, and this process not have heard of that.
        if piece.is_own() || seen.is_ok() {
            self.check_one(piece, &[], &mut Account::default())?;
            memory::write(pool.driver(), piece.readers[0], place, Paint::plain(piece.pattern))
                .map_err(device_refused)?;
        }
        Ok(false)
    }

    /// A device outside the driver's view takes one piece, for good.
    pub(super) fn pin_one(&self) {
        let _pass = self.member.gate().pass(Passage::Use);
        let mut model = self.model();
        let model = &mut *model;
        if let Some(place) = model.random.choice(&model.pieces).and_then(|piece| piece.place) {
            self.member.pool().enter().pin(place, "registered with a network card");
        }
    }

    pub(super) fn owner_ended(&self, process: u64) {
        let mut model = self.model();
        model.ended.insert(process);
        for piece in &mut model.pieces {
            if let Origin::Imported { owner, is_orphan, .. } = &mut piece.origin
                && *owner == process
            {
                *is_orphan = true;
            }
        }
    }

    /// Compares all that can be reached. `away`: tags that may be paused; `open`: allocations with tickets that nobody
    /// has redeemed.
    pub(super) fn check(
        &self,
        away: &[String],
        open: &[u128],
        account: &mut Account,
    ) -> Outcome<Shared> {
        let mut model = self.model();
        let devices = self.member.pool().driver().core().visible_count();
        let mut shared = Shared {
            own_bytes: vec![0; devices],
            perhaps_bytes: vec![0; devices],
            places: 0,
            kept_by_tickets: 0,
        };
        for piece in &mut model.pieces {
            if self.check_one(piece, away, account)? {
                shared.places += usize::from(piece.place.is_some());
            }
            if piece.is_own() {
                shared.own_bytes[usize::try_from(piece.device.0)?] += piece.bytes();
            }
        }
        model.let_go.retain(|gone| open.contains(&gone.id) || away.contains(&gone.tag));
        for gone in &model.let_go {
            let device = usize::try_from(gone.device.0)?;
            // A ticket of a tag that is away may have been redeemed.
            if open.contains(&gone.id) && !away.contains(&gone.tag) {
                shared.own_bytes[device] += gone.bytes;
                shared.kept_by_tickets += 1;
            } else {
                shared.perhaps_bytes[device] += gone.bytes;
            }
        }
        Ok(shared)
    }

    /// What it knows, for an error.
    pub(super) fn told(&self) -> String {
        let model = self.model();
        format!("shared: {:?}; let go: {:?}", model.pieces, model.let_go)
    }

    /// Is it there?
    fn check_one(
        &self,
        piece: &mut Piece,
        away: &[String],
        account: &mut Account,
    ) -> Outcome<bool> {
        let Some(place) = piece.place else {
            return Ok(false);
        };
        let driver = self.member.pool().driver();
        let mut is_there = false;
        for reader in &piece.readers {
            let seen = memory::holds(driver, *reader, place, Paint::plain(piece.pattern));
            match (seen, &mut piece.origin) {
                (Ok(_), Origin::Imported { is_lost: true, .. }) => {
                    return Err(Trouble::new(format!("lost memory came back: {piece:?}")));
                }
                (Ok(true), _) => is_there = true,
                // What is in it after a pause is not defined; that it can be reached is.
                (Ok(false), _) if piece.contents == Contents::Discard => is_there = true,
                (Err(_), _) if away.contains(&piece.tag) => {}
                (Err(_), Origin::Imported { is_orphan: true, is_lost, .. }) => {
                    account.lost += u64::from(!*is_lost);
                    *is_lost = true;
                }
                (seen, _) => {
                    let found = memory::told(driver, *reader, place);
                    let all = self.member.pool().holdings().inventory(Stance::Runs).into_iter();
                    let known: Vec<_> =
                        all.filter(|held| u128::from_be_bytes(held.id.0) == piece.id).collect();
                    return Err(Trouble::new(format!(
                        "{seen:?} seen by {reader:?}: {piece:?} of pattern {:#x}; it holds{found}; on record: {known:?}",
                        piece.pattern
                    )));
                }
            }
        }
        if is_there {
            account.checked_bytes += piece.bytes() * piece.readers.len() as u64;
            if let Origin::Imported { is_orphan: true, .. } = piece.origin {
                account.orphans += 1;
            }
        } else if away.contains(&piece.tag)
            && let Origin::Imported { is_orphan: true, is_lost: false, .. } = piece.origin
        {
            account.orphans += 1;
        }
        Ok(is_there)
    }
}
