//! One allocation: its properties, its holders, and its place.

use std::collections::BTreeSet;
use std::ops::Range;

use super::backing::Backing;
use super::residency::Change;
use super::sharing::Sharing;
use crate::deferred::Physical;
use crate::driver::{
    AllocationProp, DeviceOrdinal, HANDLE_TYPE_POSIX_FD, Location, LocationKind, RawHandle,
};
use crate::ids::{AllocationId, PeerId, VirtualHandle};
use crate::report::Contents;
use crate::store::{Saved, Store};

/// The library that allocated memory, the tag of that memory, and the policy of a pause for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    /// The library that asked, such as `nccl`.
    pub library: &'static str,
    /// The region's tag; empty outside any region.
    pub tag: String,
    /// The policy of a pause for the contents.
    pub contents: Contents,
}

/// The creator of an allocation: this process, another of the tenant, or an unknown one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Created by this process.
    Own,
    /// Created by another process of the tenant.
    Imported { owner: PeerId },
    /// Imported from a descriptor that is no ticket: its owner is unknown, so it can never be given back.
    Foreign,
}

/// Why a pause leaves memory that another tenant has open.
pub(super) const LENT: &str =
    "open in a process of another tenant: the next pause after that has closed it takes it";

/// The facts about an allocation that are known when it is made.
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
    /// The references that callers hold: creates, imports and retains, minus releases.
    references: u32,
    /// The starts of its mappings.
    mappings: BTreeSet<u64>,
    /// True once it has been mapped: somebody may have written to it.
    was_mapped: bool,
    backing: Backing,
    sharing: Sharing,
    /// The reason why a pause must leave it in place.
    pinned: Option<&'static str>,
    /// The number of its registrations with devices, and the reason of the first. While there is one, a pause must
    /// leave it in place.
    registered: Option<(u32, &'static str)>,
    /// The reason why the pause under way, or the last one, leaves it in place in all processes that hold it: nobody
    /// could save it, or another process has pinned it.
    stays: Option<&'static str>,
    /// For memory made as a block: the size that the caller requested.
    block_size_bytes: Option<u64>,
}

impl Row {
    pub(super) fn new(new: NewRow, handle: VirtualHandle, backing: Backing) -> Self {
        Self {
            new,
            handle,
            references: 1,
            mappings: BTreeSet::new(),
            was_mapped: false,
            backing,
            sharing: Sharing::default(),
            pinned: None,
            registered: None,
            stays: None,
            block_size_bytes: None,
        }
    }

    /// Returns the handle that callers hold for it, which is its key in the ledger.
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

    /// Is it memory of a host file, which the driver's own allocator does not manage?
    pub(crate) fn is_of_host_file(&self) -> bool {
        self.raw().is_some_and(RawHandle::is_of_host_file)
    }

    /// Is it host memory for sharing by descriptors that nobody has mapped or exported yet? Then other memory may
    /// replace it.
    pub(crate) fn is_untouched_host(&self) -> bool {
        let Location { kind, .. } = self.new.prop.location;
        kind == LocationKind::HOST_NUMA
            && self.new.prop.requested_handle_types == HANDLE_TYPE_POSIX_FD
            && self.is_own()
            && self.is_resident()
            && !self.was_mapped
            && !self.sharing.is_exported()
            && !self.is_shared()
    }

    pub(crate) fn is_own(&self) -> bool {
        self.new.origin == Origin::Own
    }

    /// Returns the process that owns it, for an import that is not lost.
    pub(crate) fn owner(&self) -> Option<PeerId> {
        match self.new.origin {
            Origin::Imported { owner } if !self.is_lost() => Some(owner),
            Origin::Imported { .. } | Origin::Own | Origin::Foreign => None,
        }
    }

    /// Returns its physical memory and its contents.
    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    pub(super) fn backing_mut(&mut self) -> &mut Backing {
        &mut self.backing
    }

    /// Does it have a place of its own in host memory, large enough for all its contents?
    pub(crate) fn has_own_place(&self) -> bool {
        self.backing.own_place().is_some()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.backing.is_lost()
    }

    /// May a pause release this allocation's memory?
    pub(crate) fn can_leave(&self) -> bool {
        self.reason_to_stay().is_none() && !self.is_host() && self.new.origin != Origin::Foreign
    }

    /// Returns the reason why a pause leaves it in place, because of this process or because all processes have decided
    /// so.
    pub(crate) fn reason_to_stay(&self) -> Option<&'static str> {
        let registered = self.registered.map(|(_, reason)| reason);
        self.pinned.or(registered).or(self.stays)
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.is_some() || self.registered.is_some()
    }

    /// Must a pause copy its contents to `store`?
    pub(crate) fn is_saved_to(&self, store: Store) -> bool {
        let is_wholly_unused = self.backing.unused().first() == Some(&(0..self.size_bytes()));
        self.is_own()
            && self.can_leave()
            && Store::of(self.class().contents) == Some(store)
            && !is_wholly_unused
    }

    /// Must a pause copy its contents anywhere?
    pub(crate) fn is_kept(&self) -> bool {
        [Store::Host, Store::File].iter().any(|store| self.is_saved_to(*store))
    }

    /// Would releasing its memory lose no contents? Contents that a pause should have saved and has not are on its
    /// device alone: the driver refused to copy them, or their memory was unpinned only while the rest was off its
    /// device.
    pub(crate) fn loses_nothing(&self) -> bool {
        !self.is_kept() || self.saved().is_some()
    }

    /// Returns the parts whose contents are saved and restored, by offset.
    pub(crate) fn copied_parts(&self) -> Vec<Range<u64>> {
        self.backing.copied_parts(self.size_bytes())
    }

    /// Returns the driver's handle, while the memory is on its device.
    pub(crate) fn raw(&self) -> Option<RawHandle> {
        self.backing.handle().map(Physical::raw)
    }

    pub(crate) fn is_resident(&self) -> bool {
        self.backing.handle().is_some()
    }

    /// Returns the place of its saved contents, if any.
    pub(crate) fn saved(&self) -> Option<&Saved> {
        self.backing.saved()
    }

    pub(crate) fn is_set_aside(&self) -> bool {
        self.backing.is_set_aside()
    }

    /// Does the process run without it since a pause by tag? False for paged memory, and for lost memory.
    pub(crate) fn is_away_by_tag(&self) -> bool {
        self.is_set_aside() && !self.backing.has_home() && !self.is_lost()
    }

    /// Returns the place of its contents in host memory, if they may be moved: the memory is off its device, and nobody
    /// was given that place.
    pub(super) fn movable(&self) -> Option<&Saved> {
        self.backing.movable().filter(|_| self.is_own())
    }

    /// Returns the place of its contents, if they were meant for host memory and are in the file.
    pub(crate) fn spilled(&self) -> Option<&Saved> {
        let is_kept_in_memory = Store::of(self.class().contents) == Some(Store::Host);
        self.saved().filter(|saved| is_kept_in_memory && saved.store == Store::File)
    }

    pub(crate) fn block_size_bytes(&self) -> Option<u64> {
        self.block_size_bytes
    }

    /// Returns the starts of its mappings, in order.
    pub(crate) fn mapped_at(&self) -> impl ExactSizeIterator<Item = u64> {
        self.mappings.iter().copied()
    }

    /// May another process hold it, or fetch it?
    pub(crate) fn is_shared(&self) -> bool {
        self.is_own() && (self.sharing.has_importers() || self.sharing.tickets.hold())
    }

    /// Returns the record of other processes that may hold it.
    pub(crate) fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    pub(super) fn sharing_mut(&mut self) -> &mut Sharing {
        &mut self.sharing
    }

    /// Does nobody hold it any more? `is_paused` says that its process is paused, and that its importers have given it
    /// up.
    pub(super) fn is_garbage(&self, is_paused: bool) -> bool {
        // The driver keeps resident memory for its importers. Only its owner can restore memory that is off its device,
        // or that the driver has not released yet.
        let is_away = is_paused || !self.backing.is_at_rest() || self.sharing.is_owed_by_tag();
        let is_owed = self.is_own() && is_away && self.sharing.has_importers();
        let is_held = self.references > 0 || !self.mappings.is_empty();
        // Tickets are checked last, because each check is a system call.
        !is_held && !is_owed && !self.sharing.tickets.hold()
    }

    /// Takes the driver's handle from a row that is not in the ledger any more.
    pub(crate) fn take_physical(&mut self) -> Option<Physical> {
        if self.is_resident() { self.backing.change(Change::Released) } else { None }
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

    pub(super) fn add_reference(&mut self) {
        self.references += 1;
    }

    /// Drops a reference. False if there was none.
    pub(super) fn drop_reference(&mut self) -> bool {
        let had_one = self.references > 0;
        self.references -= u32::from(had_one);
        had_one
    }

    /// Turns the memory into a block: from now on only its mapping keeps it.
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

    /// Pins it: a pause leaves it in place. False if it was pinned already.
    pub(super) fn pin(&mut self, reason: &'static str) -> bool {
        let is_new = self.pinned.is_none();
        self.pinned.get_or_insert(reason);
        is_new
    }

    /// Registers it: a pause leaves it in place until [`Row::unregister`] has been called as often.
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

    /// Does a pause leave it in place because another tenant has it open?
    pub(crate) fn is_left_lent(&self) -> bool {
        self.stays == Some(LENT)
    }

    /// Records that the process runs on and importers are without this memory, until a resume of its tag.
    pub(super) fn owe_by_tag(&mut self) {
        if self.can_leave() {
            self.sharing.owe_by_tag();
        }
    }
}
