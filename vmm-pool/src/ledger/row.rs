//! One allocation: what it is, who holds it, and where it is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};

use super::leases::{Lease, Leases};
use super::residency::{Change, Residency};
use super::tickets::{TicketWatch, Tickets};
use crate::deferred::Physical;
use crate::descriptors::UninheritedFd;
use crate::driver::{
    AccessDesc, AllocationProp, DeviceOrdinal, Location, LocationKind, RawContext, RawHandle,
    VaRange,
};
use crate::report::Contents;
use crate::store::{Copies, Saved, Store};
use crate::{AllocationId, PeerId, VirtualHandle};

/// Smallest unused part that is worth leaving out: below, a copy more costs as much as the bytes.
const UNUSED_BYTES_MIN: u64 = 1 << 20;

/// Who asked for memory, under which tag, and what a pause does with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// The library that asked, such as `nccl`.
    pub library: &'static str,
    /// The region's tag; empty outside any region.
    pub tag: String,
    /// What a pause does with the contents.
    pub contents: Contents,
}

/// Where an allocation comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Created here.
    Own,
    /// Created by another process of the tenant.
    Imported { owner: PeerId },
    /// From a descriptor that is no ticket: its owner is unknown, so it can never be given back.
    Foreign,
}

/// What is known of an allocation when it is made.
#[derive(Debug)]
pub(crate) struct NewRow {
    pub(crate) id: AllocationId,
    pub(crate) size_bytes: u64,
    pub(crate) prop: AllocationProp,
    pub(crate) origin: Origin,
    pub(crate) class: Class,
}

/// An allocation that lives.
#[derive(Debug)]
pub(crate) struct Row {
    new: NewRow,
    handle: VirtualHandle,
    /// References that callers hold: creates, imports and retains, less releases.
    references: u32,
    /// Starts of its mappings.
    mappings: BTreeSet<u64>,
    /// Somebody may have written it.
    was_mapped: bool,
    residency: Residency,
    sharing: Sharing,
    /// Why a pause must leave it where it is.
    pinned: Option<&'static str>,
    /// How many registrations with devices there are of it, and the reason of the first: for as long as they last a
    /// pause must leave it where it is.
    registered: Option<(u32, &'static str)>,
    /// Why the pause under way, or the last one, leaves it where it is in all processes that hold it: nobody could
    /// save it, or somebody else has pinned it.
    stays: Option<&'static str>,
    /// For memory made as a block: the size that the caller asked for.
    block_size_bytes: Option<u64>,
    /// While it is on its device: the copy of the last pause that is still in host memory.
    retained: Option<Retained>,
    /// Somebody may read its saved contents where they lie, until it is back.
    is_lent: bool,
}

/// A copy in host memory of what an allocation held when it was paused.
#[derive(Debug)]
struct Retained {
    saved: Saved,
    /// Readers may ask for it: it stays whatever the next pause needs.
    is_for_readers: bool,
}

impl Retained {
    fn stays(&self, copies: Copies, is_wanted: bool) -> bool {
        self.is_for_readers
            || match copies {
                Copies::All => true,
                Copies::Needed => is_wanted,
                Copies::None => false,
            }
    }
}

/// Who else may hold an allocation.
#[derive(Debug, Default)]
struct Sharing {
    tickets: Tickets,
    /// Processes of other tenants that have it open.
    leases: Leases,
    /// Processes that may hold it: whoever was given a descriptor since it was last created.
    importers: BTreeSet<PeerId>,
    /// From its restoring to the end of that resume: whoever has fetched it again, the importers to come.
    fetched: Option<BTreeSet<PeerId>>,
    /// Importers have given it up by its tag, and come for it when that is brought back, wherever it is meanwhile.
    is_owed_by_tag: bool,
    /// The driver's descriptor for the importers, between issue and redemption.
    exported: Option<UninheritedFd>,
}

impl Row {
    pub(super) fn new(new: NewRow, handle: VirtualHandle, physical: Physical) -> Self {
        Self {
            new,
            handle,
            references: 1,
            mappings: BTreeSet::new(),
            was_mapped: false,
            residency: Residency::Resident { handle: physical, unused: Vec::new() },
            sharing: Sharing::default(),
            pinned: None,
            registered: None,
            stays: None,
            block_size_bytes: None,
            retained: None,
            is_lent: false,
        }
    }

    /// What callers hold for it, and its key in the ledger.
    pub(crate) fn handle(&self) -> VirtualHandle {
        self.handle
    }

    pub(crate) fn id(&self) -> AllocationId {
        self.new.id
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.new.size_bytes
    }

    pub(crate) fn prop(&self) -> &AllocationProp {
        &self.new.prop
    }

    pub(crate) fn class(&self) -> &Class {
        &self.new.class
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.new.origin
    }

    pub(crate) fn device(&self) -> Option<DeviceOrdinal> {
        self.new.prop.location.as_device()
    }

    pub(crate) fn is_host(&self) -> bool {
        self.new.prop.location.kind != LocationKind::DEVICE
    }

    pub(crate) fn is_own(&self) -> bool {
        self.new.origin == Origin::Own
    }

    /// Whom to ask for it, for an import that is not lost.
    pub(crate) fn owner(&self) -> Option<PeerId> {
        match (&self.new.origin, &self.residency) {
            (Origin::Imported { .. }, Residency::Lost) | (Origin::Own | Origin::Foreign, _) => None,
            (Origin::Imported { owner }, _) => Some(*owner),
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.residency, Residency::Lost)
    }

    /// Does a pause take this allocation's memory away?
    pub(crate) fn can_leave(&self) -> bool {
        self.reason_to_stay().is_none() && !self.is_host() && self.new.origin != Origin::Foreign
    }

    /// Why a pause leaves it in place, by this process's doing or by what all have decided.
    pub(crate) fn reason_to_stay(&self) -> Option<&'static str> {
        let registered = self.registered.map(|(_, reason)| reason);
        self.pinned.or(registered).or(self.stays)
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.is_some() || self.registered.is_some()
    }

    /// Must a pause copy its contents to `store`?
    pub(crate) fn is_saved_to(&self, store: Store) -> bool {
        let is_wholly_unused = self.residency.unused().first() == Some(&(0..self.size_bytes()));
        self.is_own()
            && self.can_leave()
            && Store::of(self.class().contents) == Some(store)
            && !is_wholly_unused
    }

    /// Must a pause copy its contents anywhere?
    pub(crate) fn is_kept(&self) -> bool {
        [Store::Host, Store::File].iter().any(|store| self.is_saved_to(*store))
    }

    /// Would nothing be lost if its memory were released? What a pause was to save and has not is on its device alone:
    /// the driver would not copy it, or what pinned it let go of it while the rest was away.
    pub(crate) fn loses_nothing(&self) -> bool {
        !self.is_kept() || self.saved().is_some()
    }

    /// The parts whose contents are saved and put back, by offset.
    pub(crate) fn copied_parts(&self) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut begin = 0;
        let unused = self.residency.unused().iter();
        for unused in unused.filter(|part| part.end - part.start >= UNUSED_BYTES_MIN) {
            parts.push(begin..unused.start);
            begin = unused.end;
        }
        parts.push(begin..self.size_bytes());
        parts.retain(|part| part.start < part.end);
        parts
    }

    /// The driver's handle, while it is on its device.
    pub(crate) fn raw(&self) -> Option<RawHandle> {
        self.residency.handle().map(Physical::raw)
    }

    pub(crate) fn is_resident(&self) -> bool {
        self.residency.handle().is_some()
    }

    /// Does its device have its contents? Not while they come back: what is saved are the contents until then.
    pub(crate) fn has_contents(&self) -> bool {
        self.residency.has_contents()
    }

    /// Is it on its device again, and its contents are what is saved of it?
    pub(super) fn is_coming(&self) -> bool {
        self.residency.is_coming()
    }

    /// Its saved contents are about to be written to its memory. That may be memory which a pause could not release.
    pub(super) fn begin_refill(&mut self) {
        if self.has_contents() && self.saved().is_some() {
            let _none = self.change(Change::Refilled);
        }
    }

    /// Where its contents are saved.
    pub(crate) fn saved(&self) -> Option<&Saved> {
        self.residency.saved()
    }

    /// Its contents, or a copy of them, in `store`, when they are there.
    pub(crate) fn held_in(&self, store: Store) -> Option<&Saved> {
        let retained = self.retained.as_ref().map(|retained| &retained.saved);
        self.saved().or(retained).filter(|saved| saved.store == store)
    }

    /// The copy of the last pause in `store`, while it is on its device, where one stays that keeps `copies`.
    /// `is_wanted` says whether this is memory of that pause.
    pub(super) fn retained_in(
        &self,
        store: Store,
        copies: Copies,
        is_wanted: bool,
    ) -> Option<&Saved> {
        let retained = self.retained.as_ref().filter(|kept| kept.saved.store == store)?;
        retained.stays(copies, is_wanted).then_some(&retained.saved)
    }

    /// The copy of the last pause that is kept for readers, while it is on its device.
    pub(crate) fn retained(&self) -> Option<&Saved> {
        self.retained.as_ref().filter(|kept| kept.is_for_readers).map(|kept| &kept.saved)
    }

    /// It is back on its device: its copy in host memory is kept for readers, or for the next pause, or not.
    /// What was kept for the next pause alone goes where nothing is kept for that, of memory that has been back for
    /// longer too.
    pub(super) fn retain_copy(&mut self, for_readers: bool, for_pauses: bool) {
        self.is_lent &= !self.is_resident();
        if !for_pauses {
            self.retained.take_if(|kept| !kept.is_for_readers);
        }
        let in_memory = self.saved().filter(|saved| saved.store == Store::Host);
        let Some(saved) = in_memory.filter(|_| self.is_resident()) else { return };
        let is_kept = for_readers || (for_pauses && saved.prints.is_some());
        let kept = Retained { saved: saved.clone(), is_for_readers: for_readers };
        self.retained = is_kept.then_some(kept);
    }

    /// Somebody was given the place of its copy, and may write there: nobody takes fingerprints of it for its bytes.
    pub(super) fn forget_prints(&mut self) {
        self.is_lent = true;
        self.residency.forget_prints();
        if let Some(kept) = &mut self.retained {
            kept.saved.prints = None;
        }
    }

    /// What was kept of it is about to be written over, or given up.
    pub(crate) fn forget_copy(&mut self) {
        self.retained = None;
    }

    /// Gives its copy up, unless it stays in a pause that keeps `copies`. Says how much it held.
    pub(super) fn give_copy_up(&mut self, copies: Copies, is_wanted: bool) -> u64 {
        let goes = self.retained.take_if(|kept| !kept.stays(copies, is_wanted));
        goes.map_or(0, |kept| kept.saved.extents.iter().map(|extent| extent.size_bytes).sum())
    }

    pub(crate) fn is_set_aside(&self) -> bool {
        self.residency.is_set_aside()
    }

    /// What of it lies in host memory while it is away, and may be moved: nobody was given its place.
    pub(super) fn movable(&self) -> Option<&Saved> {
        let is_away = self.is_own() && !self.is_resident() && !self.is_lent;
        let in_memory = self.saved().filter(|saved| saved.store == Store::Host);
        in_memory.filter(|saved| is_away && !saved.extents.is_empty())
    }

    /// Its contents, which are away, lie there from now on. The places that they had are free. False when it has changed
    /// meanwhile.
    pub(super) fn spill_to(&mut self, saved: Saved) -> bool {
        let moves = self.movable().is_some();
        if moves {
            self.retained = None;
            let _none = self.change(Change::Spilled(saved));
        }
        moves
    }

    /// Was it saved to host memory, and is it in the file all the same?
    pub(super) fn spilled(&self) -> Option<&Saved> {
        let is_kept_in_memory = Store::of(self.class().contents) == Some(Store::Host);
        self.saved().filter(|saved| is_kept_in_memory && saved.store == Store::File)
    }

    pub(crate) fn block_size_bytes(&self) -> Option<u64> {
        self.block_size_bytes
    }

    /// Starts of its mappings, in order.
    pub(crate) fn mapped_at(&self) -> impl ExactSizeIterator<Item = u64> {
        self.mappings.iter().copied()
    }

    /// May another process hold it, or come for it?
    pub(crate) fn is_shared(&self) -> bool {
        self.is_own() && (!self.sharing.importers.is_empty() || self.sharing.tickets.hold())
    }

    /// Are importers without it until its tag is brought back?
    pub(crate) fn is_owed_by_tag(&self) -> bool {
        self.sharing.is_owed_by_tag
    }

    pub(crate) fn importers(&self) -> Vec<PeerId> {
        self.sharing.importers.iter().copied().collect()
    }

    pub(crate) fn is_exported(&self) -> bool {
        self.sharing.exported.is_some()
    }

    /// A copy of the descriptor kept for importers, where there is one and room for another.
    pub(crate) fn copy_of_export(&self) -> Option<OwnedFd> {
        self.sharing.exported.as_ref()?.as_fd().try_clone_to_owned().ok()
    }

    /// Does nobody hold it any more? `is_paused` says that its process is, and its importers have given up what they had.
    pub(super) fn is_garbage(&self, is_paused: bool) -> bool {
        // Resident memory the driver keeps for its importers. What is away nobody but its owner can bring back, nor what was to be and that the
        // driver has not let go.
        let is_away = is_paused || self.residency.is_away_or_to_be() || self.sharing.is_owed_by_tag;
        let is_owed = self.is_own() && is_away && !self.sharing.importers.is_empty();
        let is_held = self.references > 0 || !self.mappings.is_empty();
        // Tickets last: each is a question to the system.
        !is_held && !is_owed && !self.sharing.tickets.hold()
    }

    /// Takes the handle out of a row that is in the ledger no more.
    pub(crate) fn take_physical(&mut self) -> Option<Physical> {
        if self.is_resident() { self.change(Change::Released) } else { None }
    }

    /// Is it on its device, which alone has its contents, with no pause or resume of it under way?
    pub(super) fn is_at_rest(&self) -> bool {
        !self.residency.is_away_or_to_be()
    }

    /// Its handle, where it is own memory on its device.
    pub(super) fn own_physical(&mut self) -> Option<&mut Physical> {
        if self.is_own() { self.residency.handle_mut() } else { None }
    }

    pub(crate) fn describe(&self) -> String {
        let what = if self.is_own() { "allocation" } else { "imported allocation" };
        let Class { library, tag, .. } = self.class();
        let of_tag = if tag.is_empty() { "" } else { " of tag " };
        match self.mappings.first() {
            Some(start) => format!("{library} {what} at {start:#x}{of_tag}{tag}"),
            None => format!("{library} {what}{of_tag}{tag}"),
        }
    }

    /// The change of its residency, in place, which it must have. A handle that comes out must be released.
    pub(super) fn change(&mut self, change: Change) -> Option<Physical> {
        let before = std::mem::replace(&mut self.residency, Residency::Lost);
        let (after, handle) = before.next(change).unwrap_or_else(|state| {
            debug_assert!(false, "a change that is none of {state:?}");
            tracing::error!(
                ?state,
                "memory is not where a step of a pause or resume takes it to be"
            );
            (*state, None)
        });
        self.residency = after;
        handle
    }

    pub(super) fn add_reference(&mut self) {
        self.references += 1;
    }

    /// False when there was none.
    pub(super) fn drop_reference(&mut self) -> bool {
        let had_one = self.references > 0;
        self.references -= u32::from(had_one);
        had_one
    }

    /// From here on its mapping alone keeps it.
    pub(super) fn become_block(&mut self, asked_bytes: u64) {
        self.block_size_bytes = Some(asked_bytes);
    }

    pub(super) fn mapped(&mut self, start: u64) {
        self.was_mapped = true;
        self.mappings.insert(start);
    }

    pub(super) fn unmapped(&mut self, start: u64) {
        self.mappings.remove(&start);
    }

    /// Has a pause leave it in place. False when it did already.
    pub(super) fn pin(&mut self, reason: &'static str) -> bool {
        let is_new = self.pinned.is_none();
        self.pinned.get_or_insert(reason);
        is_new
    }

    /// Has a pause leave it in place until [`Row::unregister`] has been called as often.
    pub(super) fn register(&mut self, reason: &'static str) {
        let (count, reason) = self.registered.unwrap_or((0, reason));
        self.registered = Some((count.saturating_add(1), reason));
    }

    pub(super) fn unregister(&mut self) {
        let rest = self.registered.map(|(count, reason)| (count.saturating_sub(1), reason));
        self.registered = rest.filter(|(count, _)| *count > 0);
    }

    pub(super) fn set_stays(&mut self, reason: Option<&'static str>) {
        self.stays = reason;
    }

    pub(super) fn add_ticket(&mut self, serial: u64) {
        self.sharing.tickets.add(serial);
    }

    /// A ticket that nobody was given.
    pub(super) fn take_ticket_back(&mut self, serial: u64) {
        self.sharing.tickets.take_back(serial);
    }

    /// The ticket `serial` is redeemed. With the last the descriptor goes that was kept for them.
    pub(super) fn use_ticket(&mut self, serial: u64) -> Option<OwnedFd> {
        self.sharing.tickets.redeem(serial);
        if self.has_tickets() { None } else { self.take_export() }
    }

    /// From now on the ticket `serial` lasts until it is closed.
    pub(super) fn watch_ticket(&mut self, serial: u64, watch: TicketWatch) -> bool {
        self.sharing.tickets.watch(serial, watch)
    }

    /// Drops tickets that have been closed, and with the last that nobody had redeemed the descriptor that was kept for
    /// them. Says how many.
    pub(super) fn drop_closed_tickets(&mut self) -> (usize, Option<OwnedFd>) {
        if self.sharing.tickets.is_empty() {
            return (0, None);
        }
        let dropped = self.sharing.tickets.drop_closed();
        let spare = if dropped > 0 && !self.has_tickets() { self.take_export() } else { None };
        (dropped, spare)
    }

    /// How many tickets are watched.
    pub(super) fn watched_tickets(&self) -> usize {
        self.sharing.tickets.watched()
    }

    /// Are there tickets that nobody has redeemed?
    pub(super) fn has_tickets(&self) -> bool {
        self.sharing.tickets.await_somebody()
    }

    pub(super) fn add_importer(&mut self, importer: PeerId) {
        self.sharing.importers.insert(importer);
        if let Some(fetched) = &mut self.sharing.fetched {
            fetched.insert(importer);
        }
    }

    /// A process of another tenant holds it from now on.
    pub(super) fn add_lease(&mut self, lease: Lease, by_ticket: bool) {
        self.sharing.leases.add(lease, by_ticket);
    }

    pub(super) fn leases(&mut self) -> &mut Leases {
        &mut self.sharing.leases
    }

    pub(super) fn keep_export(&mut self, fd: OwnedFd) -> Option<OwnedFd> {
        self.sharing.exported.replace(fd.into()).map(UninheritedFd::into_fd)
    }

    pub(super) fn take_export(&mut self) -> Option<OwnedFd> {
        self.sharing.exported.take().map(UninheritedFd::into_fd)
    }

    /// The process runs on, and importers without it, until its tag is brought back.
    pub(super) fn owe_by_tag(&mut self) {
        self.sharing.is_owed_by_tag |= self.can_leave() && !self.sharing.importers.is_empty();
    }

    /// Importers fetch it again: who they are is counted from now on.
    pub(super) fn begin_fetching(&mut self) {
        self.sharing.fetched.get_or_insert_default();
    }

    pub(super) fn call_off_fetching(&mut self) {
        self.sharing.fetched = None;
    }

    /// Whoever has fetched it is its importer from now on, and nobody else. Where importers are without it until its
    /// tag is back, that is so if `is_tag_back`.
    pub(super) fn end_fetching(&mut self, is_tag_back: bool) {
        let fetched = self.sharing.fetched.take();
        if self.sharing.is_owed_by_tag && !is_tag_back {
            return;
        }
        self.sharing.is_owed_by_tag = false;
        if let Some(fetched) = fetched {
            self.sharing.importers = fetched;
        }
    }
}

/// A place where an allocation is mapped, and the rights set on it.
#[derive(Debug)]
pub(crate) struct Mapping {
    range: VaRange,
    allocation: VirtualHandle,
    /// Rights by place, as last set. Empty: never set, so nobody may touch it.
    access: BTreeMap<Location, i32>,
    presence: Presence,
    /// It is about to be taken out of the driver's page tables: what the driver says of it holds no more.
    is_leaving: bool,
    /// How often that has begun.
    departures: u64,
    /// How often a block of another process was opened here and not closed yet; 0 for any other mapping.
    opened: u32,
    /// For a block: the context that it was asked for in, with which it ends.
    context: Option<RawContext>,
    /// Rights were set on a part of it: what is recorded of them may not hold for all.
    is_uneven: bool,
}

/// How much of a mapping is in the driver's page tables now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Nothing.
    Absent,
    /// It is mapped, and its rights are still to be set.
    Bare,
    /// All that its record says.
    Whole,
}

impl Mapping {
    pub(super) fn new(range: VaRange, allocation: VirtualHandle) -> Self {
        let (access, presence) = (BTreeMap::new(), Presence::Absent);
        Self {
            range,
            allocation,
            access,
            presence,
            is_leaving: false,
            departures: 0,
            opened: 0,
            context: None,
            is_uneven: false,
        }
    }

    pub(crate) fn range(&self) -> VaRange {
        self.range
    }

    pub(crate) fn allocation(&self) -> VirtualHandle {
        self.allocation
    }

    pub(crate) fn presence(&self) -> Presence {
        self.presence
    }

    /// Is anything of it in the driver's page tables?
    pub(crate) fn is_present(&self) -> bool {
        self.presence != Presence::Absent
    }

    /// Rights are about to be set on a part of it.
    pub(super) fn set_uneven(&mut self) {
        self.is_uneven = true;
    }

    /// May a kernel on `place` read all of it, as far as is known?
    pub(crate) fn is_readable_by_kernels(&self, place: Location) -> bool {
        let rights = self.rights_of(place).unwrap_or(0);
        self.presence == Presence::Whole && !self.is_leaving && !self.is_uneven && rights != 0
    }

    pub(crate) fn access_list(&self) -> Vec<AccessDesc> {
        self.access.iter().map(|(&location, &flags)| AccessDesc { location, flags }).collect()
    }

    /// The rights of `place`; none where they were never set.
    pub(crate) fn rights_of(&self, place: Location) -> Option<i32> {
        self.access.get(&place).copied()
    }

    /// Who has rights.
    pub(crate) fn accessors(&self) -> impl Iterator<Item = Location> {
        self.access.keys().copied()
    }

    pub(crate) fn opened(&self) -> u32 {
        self.opened
    }

    /// What [`super::Ledger::sight_of`] tells two looks apart by; `None` while the driver knows less than the record.
    pub(super) fn standing(&self) -> Option<u64> {
        (self.presence == Presence::Whole && !self.is_leaving).then_some(self.departures)
    }

    pub(super) fn set_presence(&mut self, presence: Presence) {
        self.presence = presence;
        self.is_leaving = false;
    }

    pub(super) fn begin_leaving(&mut self) {
        self.is_leaving = true;
        self.departures += 1;
    }

    pub(super) fn call_off_leaving(&mut self) {
        self.is_leaving = false;
    }

    pub(super) fn add_access(&mut self, access: &[AccessDesc]) {
        self.access.extend(access.iter().map(|desc| (desc.location, desc.flags)));
    }

    pub(crate) fn context(&self) -> Option<RawContext> {
        self.context
    }

    pub(super) fn set_context(&mut self, context: Option<RawContext>) {
        self.context = context;
    }

    pub(super) fn set_opened(&mut self, opened: u32) {
        self.opened = opened;
    }
}
