//! The tables of one process: handles, reservations, mappings and registered host memory.
//!
//! This table refuses all calls that the real driver refuses, with its codes. It counts no calls and injects no faults.

use std::collections::BTreeMap;
use std::io;

use nix::errno::Errno;
use nix::sys::mman::ProtFlags;

use super::blocks::Block;
use super::vm;
use sublet_driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, Location, LocationKind,
    RawHandle, VaRange,
};

/// The unit of size and alignment of simulated memory.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

/// The first address that is given out. It is far from the kernel's ordinary mappings, so nobody else takes a freed range
/// before it is reserved again.
const VA_BASE: u64 = 0x1000_0000_0000;
const VA_END: u64 = 0x6000_0000_0000;
/// The distance between the first addresses of processes with neighbouring ids. So an address of one process has no meaning in
/// another.
const VA_PROCESS_STRIDE: u64 = 64 << 30;

pub(super) type Coded<T> = Result<T, DriverCode>;

#[derive(Debug)]
struct Handle {
    block: Block,
    /// The properties, with this process's device numbers.
    prop: AllocationProp,
    references: u64,
    mappings: u64,
    whose: Whose,
}

/// The origin of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// This process made the memory.
    Own,
    /// Imported from a descriptor.
    Imported,
    /// Opened by its published name.
    Opened,
}

#[derive(Debug)]
struct Mapping {
    size_bytes: u64,
    handle: u64,
    access: BTreeMap<Location, i32>,
}

/// One mapping, as a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct MappingInfo {
    /// The addresses of the mapping.
    pub range: VaRange,
    /// The handle that is mapped.
    pub handle: RawHandle,
    /// The properties that the memory was created with.
    pub prop: AllocationProp,
}

/// The number of driver objects that a process holds, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Census {
    /// Handles, created and imported.
    pub handles: usize,
    /// Reserved address ranges.
    pub reservations: usize,
    /// Mappings.
    pub mappings: usize,
    /// Registered ranges of host memory.
    pub host_ranges: usize,
    /// Streams, default ones not counted.
    pub streams: usize,
    /// Events.
    pub events: usize,
}

#[derive(Debug)]
pub(super) struct Memory {
    handles: BTreeMap<u64, Handle>,
    handle_next: u64,
    /// The values of released handles, reused last in first out, as addresses are. A caller that keeps a released handle soon
    /// has another's. (The real driver's handles are addresses of its own objects, which return at some time.)
    handles_gone: Vec<u64>,
    /// Reservations: start to length, in bytes; never overlapping.
    reservations: BTreeMap<u64, u64>,
    /// Mappings by start; each is inside one reservation, and none overlaps another.
    mappings: BTreeMap<u64, Mapping>,
    /// The address where reservations without a hint begin, and the address of the next one.
    va_first: u64,
    va_next: u64,
    /// Freed ranges, reused last in first out as the real driver does.
    freed: Vec<VaRange>,
    /// Registered host memory: start to length, in bytes.
    host: BTreeMap<u64, u64>,
    /// Starts of host memory that was registered for the context of one device alone.
    pinned_for_one: BTreeMap<u64, DeviceOrdinal>,
    /// The number of handles that are imports, and of handles opened by name.
    foreign: (u32, u32),
}

pub(super) fn io_code(error: &io::Error) -> DriverCode {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE | libc::EFBIG) => {
            DriverCode::OUT_OF_MEMORY
        }
        _ => DriverCode::UNKNOWN,
    }
}

fn vm_code(error: Errno) -> DriverCode {
    io_code(&io::Error::from(error))
}

fn check_aligned(value: u64) -> Coded<()> {
    if value.is_multiple_of(GRANULARITY_BYTES) { Ok(()) } else { Err(DriverCode::INVALID_VALUE) }
}

fn check_range(range: VaRange) -> Coded<()> {
    check_aligned(range.start.0)?;
    check_aligned(range.size_bytes)?;
    if range.size_bytes == 0 || range.start.0.checked_add(range.size_bytes).is_none() {
        return Err(DriverCode::INVALID_VALUE);
    }
    Ok(())
}

/// Returns the last entry that starts at or before `address`, if it reaches beyond it.
fn covering(table: &BTreeMap<u64, u64>, address: u64) -> Option<VaRange> {
    let (&start, &size_bytes) = table.range(..=address).next_back()?;
    let range = VaRange::new(DeviceAddress(start), size_bytes);
    range.contains_address(DeviceAddress(address)).then_some(range)
}

fn overlaps(table: &BTreeMap<u64, u64>, range: VaRange) -> bool {
    table
        .range(..range.end().0)
        .next_back()
        .is_some_and(|(start, size)| start + size > range.start.0)
}

impl Memory {
    pub(super) fn new(process_id: u32) -> Self {
        let va_first = VA_BASE + u64::from(process_id % 1024) * VA_PROCESS_STRIDE;
        Self {
            handles: BTreeMap::new(),
            // Values of one process have no meaning in another.
            handle_next: (u64::from(process_id) << 24) | 0x10,
            handles_gone: Vec::new(),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            va_first,
            va_next: va_first,
            freed: Vec::new(),
            host: BTreeMap::new(),
            pinned_for_one: BTreeMap::new(),
            foreign: (0, 0),
        }
    }

    /// Counts the handles that are imports, and the handles opened by a published name.
    pub(super) fn foreign(&self) -> (u32, u32) {
        self.foreign
    }

    fn count_foreign(&mut self, whose: Whose, change: impl Fn(u32) -> u32) {
        match whose {
            Whose::Own => {}
            Whose::Imported => self.foreign.0 = change(self.foreign.0),
            Whose::Opened => self.foreign.1 = change(self.foreign.1),
        }
    }

    /// Counts objects by kind; streams and events are not in this table.
    pub(super) fn census(&self) -> Census {
        Census {
            handles: self.handles.len(),
            reservations: self.reservations.len(),
            mappings: self.mappings.len(),
            host_ranges: self.host.len(),
            streams: 0,
            events: 0,
        }
    }

    // Reservations.

    pub(super) fn reserve(
        &mut self,
        size_bytes: u64,
        alignment_bytes: u64,
        hint: DeviceAddress,
    ) -> Coded<DeviceAddress> {
        check_aligned(size_bytes)?;
        if size_bytes == 0 || (alignment_bytes != 0 && !alignment_bytes.is_power_of_two()) {
            return Err(DriverCode::INVALID_VALUE);
        }
        let alignment = alignment_bytes.max(GRANULARITY_BYTES);
        let start = self
            .reserve_hinted(size_bytes, alignment, hint.0)
            .or_else(|| self.reserve_freed(size_bytes, alignment))
            .or_else(|| self.reserve_fresh(size_bytes, alignment))
            .ok_or(DriverCode::OUT_OF_MEMORY)?;
        self.reservations.insert(start, size_bytes);
        Ok(DeviceAddress(start))
    }

    fn reserve_hinted(&mut self, size_bytes: u64, alignment: u64, hint: u64) -> Option<u64> {
        if hint == 0 || !hint.is_multiple_of(alignment) {
            return None;
        }
        hint.checked_add(size_bytes)?;
        vm::reserve_at(hint, size_bytes).ok()?;
        let taken = VaRange::new(DeviceAddress(hint), size_bytes);
        self.freed.retain(|range| range.end() <= taken.start || taken.end() <= range.start);
        Some(hint)
    }

    fn reserve_freed(&mut self, size_bytes: u64, alignment: u64) -> Option<u64> {
        let index = self.freed.iter().rposition(|range| {
            range.size_bytes == size_bytes && range.start.0.is_multiple_of(alignment)
        })?;
        let range = self.freed.remove(index);
        vm::reserve_at(range.start.0, size_bytes).ok()?;
        Some(range.start.0)
    }

    fn reserve_fresh(&mut self, size_bytes: u64, alignment: u64) -> Option<u64> {
        loop {
            let start = self.va_next.checked_next_multiple_of(alignment)?;
            let end = start.checked_add(size_bytes).filter(|end| *end <= VA_END)?;
            match vm::reserve_at(start, size_bytes) {
                // A gap after each reservation: an overrun finds nothing mapped.
                Ok(()) => {
                    self.va_next = end + GRANULARITY_BYTES;
                    return Some(start);
                }
                Err(Errno::EEXIST) => self.va_next = start + alignment,
                Err(_) => return None,
            }
        }
    }

    pub(super) fn free(&mut self, range: VaRange) -> Coded<()> {
        let whole = self.reservations.get(&range.start.0) == Some(&range.size_bytes);
        if !whole || self.mappings_in(range).next().is_some() {
            return Err(DriverCode::INVALID_VALUE);
        }
        vm::give_back(range.start.0, range.size_bytes).map_err(vm_code)?;
        self.reservations.remove(&range.start.0);
        self.freed.push(range);
        Ok(())
    }

    pub(super) fn reservation_at(&self, address: DeviceAddress) -> Option<VaRange> {
        covering(&self.reservations, address.0)
    }

    // Handles.

    pub(super) fn add_handle(
        &mut self,
        block: Block,
        prop: AllocationProp,
        whose: Whose,
    ) -> RawHandle {
        self.count_foreign(whose, |count| count + 1);
        let value = self.handles_gone.pop().unwrap_or_else(|| {
            self.handle_next += 0x10;
            self.handle_next - 0x10
        });
        self.handles.insert(value, Handle { block, prop, references: 1, mappings: 0, whose });
        RawHandle(value)
    }

    fn handle(&self, handle: RawHandle) -> Coded<&Handle> {
        self.handles
            .get(&handle.0)
            .filter(|entry| entry.references > 0)
            .ok_or(DriverCode::INVALID_VALUE)
    }

    /// Gives back one reference. Returns the block if it was the last. The caller drops the block without the lock of this
    /// table, because the drop waits for the ledger.
    pub(super) fn release(&mut self, handle: RawHandle) -> Coded<Option<Block>> {
        let entry = self
            .handles
            .get_mut(&handle.0)
            .filter(|entry| entry.references > 0)
            .ok_or(DriverCode::INVALID_VALUE)?;
        entry.references -= 1;
        Ok(self.take_if_unused(handle.0))
    }

    fn take_if_unused(&mut self, handle: u64) -> Option<Block> {
        let entry = self.handles.get(&handle)?;
        if entry.references > 0 || entry.mappings > 0 {
            return None;
        }
        let whose = entry.whose;
        self.count_foreign(whose, |count| count - 1);
        self.handles_gone.push(handle);
        self.handles.remove(&handle).map(|entry| entry.block)
    }

    pub(super) fn prop_of(&self, handle: RawHandle) -> Coded<AllocationProp> {
        self.handle(handle).map(|entry| entry.prop)
    }

    pub(super) fn block_of(&self, handle: RawHandle) -> Coded<&Block> {
        self.handle(handle).map(|entry| &entry.block)
    }

    /// Adds a reference to the handle mapped at `address`.
    pub(super) fn retain_at(&mut self, address: DeviceAddress) -> Coded<RawHandle> {
        let (_, mapping) = self.mapping_entry(address.0).ok_or(DriverCode::INVALID_VALUE)?;
        let value = mapping.handle;
        let entry = self.handles.get_mut(&value).ok_or(DriverCode::INVALID_VALUE)?;
        entry.references += 1;
        Ok(RawHandle(value))
    }

    // Mappings.

    pub(super) fn map(&mut self, range: VaRange, handle: RawHandle) -> Coded<()> {
        check_range(range)?;
        let entry = self.handle(handle)?;
        let whole = entry.block.name().size_bytes;
        if range.size_bytes < whole {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        let reserved =
            self.reservation_at(range.start).is_some_and(|reservation| reservation.contains(range));
        let taken = self
            .mappings
            .range(..range.end().0)
            .next_back()
            .is_some_and(|(start, mapping)| start + mapping.size_bytes > range.start.0);
        if range.size_bytes > whole || !reserved || taken {
            return Err(DriverCode::INVALID_VALUE);
        }
        vm::place(range.start.0, range.size_bytes, entry.block.fd()).map_err(vm_code)?;
        self.mappings.insert(
            range.start.0,
            Mapping { size_bytes: range.size_bytes, handle: handle.0, access: BTreeMap::new() },
        );
        if let Some(entry) = self.handles.get_mut(&handle.0) {
            entry.mappings += 1;
        }
        Ok(())
    }

    fn mappings_in(&self, range: VaRange) -> impl Iterator<Item = (u64, &Mapping)> {
        self.mappings.range(range.start.0..range.end().0).map(|(start, mapping)| (*start, mapping))
    }

    /// Returns the starts of the mappings in `range`, which must hold at least one and cut none.
    fn whole_mappings(&self, range: VaRange) -> Coded<Vec<u64>> {
        check_range(range)?;
        let starts: Vec<u64> = self.mappings_in(range).map(|(start, _)| start).collect();
        let cut_first =
            self.mapping_entry(range.start.0).is_some_and(|(start, _)| start != range.start.0);
        let cut_last = self
            .mappings_in(range)
            .any(|(start, mapping)| start + mapping.size_bytes > range.end().0);
        if starts.is_empty() || cut_first || cut_last {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(starts)
    }

    /// Would [`Self::unmap`] be refused?
    pub(super) fn check_unmap(&self, range: VaRange) -> Coded<()> {
        self.whole_mappings(range).map(drop)
    }

    /// Unmaps all mappings in `range`. Returns the blocks that nothing holds any more. The caller drops them without the lock
    /// of this table.
    pub(super) fn unmap(&mut self, range: VaRange) -> Coded<Vec<Block>> {
        let mut dead = Vec::new();
        for start in self.whole_mappings(range)? {
            let Some(mapping) = self.mappings.get(&start) else {
                continue;
            };
            vm::displace(start, mapping.size_bytes).map_err(vm_code)?;
            let handle = mapping.handle;
            self.mappings.remove(&start);
            if let Some(entry) = self.handles.get_mut(&handle) {
                entry.mappings -= 1;
            }
            dead.extend(self.take_if_unused(handle));
        }
        Ok(dead)
    }

    pub(super) fn set_access(&mut self, range: VaRange, access: &[AccessDesc]) -> Coded<()> {
        let starts = self.whole_mappings(range)?;
        let covered: u64 = self.mappings_in(range).map(|(_, mapping)| mapping.size_bytes).sum();
        if covered != range.size_bytes || access.is_empty() {
            return Err(DriverCode::INVALID_VALUE);
        }
        for start in &starts {
            self.check_access(*start, access)?;
        }
        for start in starts {
            let Some(mapping) = self.mappings.get_mut(&start) else {
                continue;
            };
            for desc in access {
                mapping.access.insert(desc.location, desc.flags);
            }
            let bits = mapping.access.values().fold(0, |bits, flags| bits | flags);
            vm::protect(start, mapping.size_bytes, protection(bits)).map_err(vm_code)?;
        }
        Ok(())
    }

    /// Checks that host code gets access to host memory only.
    fn check_access(&self, start: u64, access: &[AccessDesc]) -> Coded<()> {
        let on_device = self
            .mappings
            .get(&start)
            .and_then(|mapping| self.handles.get(&mapping.handle))
            .is_some_and(|entry| entry.prop.location.kind == LocationKind::DEVICE);
        let refused = access.iter().any(|desc| {
            !matches!(desc.flags, 0 | 1 | 3)
                || (on_device && desc.location.kind != LocationKind::DEVICE)
        });
        if refused {
            return Err(DriverCode::INVALID_VALUE);
        }
        Ok(())
    }

    pub(super) fn access_of(&self, address: DeviceAddress, place: Location) -> Coded<i32> {
        let (_, mapping) = self.mapping_entry(address.0).ok_or(DriverCode::INVALID_VALUE)?;
        Ok(mapping.access.get(&place).copied().unwrap_or(0))
    }

    fn mapping_entry(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size_bytes).then_some((start, mapping))
    }

    pub(super) fn mapping_at(&self, address: DeviceAddress) -> Option<MappingInfo> {
        let (start, mapping) = self.mapping_entry(address.0)?;
        let prop = self.handles.get(&mapping.handle)?.prop;
        Some(MappingInfo {
            range: VaRange::new(DeviceAddress(start), mapping.size_bytes),
            handle: RawHandle(mapping.handle),
            prop,
        })
    }

    /// Returns the block mapped at `address`, whether or not its handle has been released.
    pub(super) fn mapped_block(&self, address: DeviceAddress) -> Option<&Block> {
        let (_, mapping) = self.mapping_entry(address.0)?;
        Some(&self.handles.get(&mapping.handle)?.block)
    }

    /// May `place` access every byte of `range`? Addresses outside all reservations are host memory, for which the caller
    /// vouches. Addresses that were given back are the exception.
    pub(super) fn check_touch(&self, range: VaRange, place: Location, flags: i32) -> Coded<()> {
        let mut at = range.start.0;
        while at < range.end().0 {
            let Some((start, mapping)) = self.mapping_entry(at) else {
                let inside = (self.va_first..self.va_next).contains(&at)
                    || self.reservation_at(DeviceAddress(at)).is_some();
                return if inside || at != range.start.0 || overlaps(&self.reservations, range) {
                    Err(DriverCode::ILLEGAL_ADDRESS)
                } else {
                    Ok(())
                };
            };
            let held = mapping.access.get(&place).copied().unwrap_or(0);
            if held & flags != flags {
                return Err(DriverCode::ILLEGAL_ADDRESS);
            }
            at = start + mapping.size_bytes;
        }
        Ok(())
    }

    /// Has `place` some access to every mapping that `range` meets?
    pub(super) fn is_in_reach(&self, range: VaRange, place: Location) -> bool {
        let before = self.mapping_entry(range.start.0);
        let met = before.into_iter().chain(self.mappings_in(range));
        let mut rights = met.map(|(_, mapping)| mapping.access.get(&place).copied().unwrap_or(0));
        rights.all(|flags| flags != 0)
    }

    // Host memory.

    pub(super) fn host_register(
        &mut self,
        start: u64,
        size_bytes: u64,
        pinned_for: Option<DeviceOrdinal>,
    ) -> Coded<()> {
        if start == 0 || size_bytes == 0 || start.checked_add(size_bytes).is_none() {
            return Err(DriverCode::INVALID_VALUE);
        }
        if overlaps(&self.host, VaRange::new(DeviceAddress(start), size_bytes)) {
            return Err(DriverCode::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.host.insert(start, size_bytes);
        self.pinned_for_one.extend(pinned_for.map(|device| (start, device)));
        Ok(())
    }

    pub(super) fn host_unregister(&mut self, start: u64) -> Coded<()> {
        self.pinned_for_one.remove(&start);
        self.host.remove(&start).map(drop).ok_or(DriverCode::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Forgets registrations for the context of `device` alone, which has ended.
    pub(super) fn host_unregister_all_of(&mut self, device: DeviceOrdinal) {
        let host = &mut self.host;
        self.pinned_for_one.retain(|start, only| {
            let stays = *only != device;
            if !stays {
                host.remove(start);
            }
            stays
        });
    }

    pub(super) fn host_range_at(&self, address: u64) -> Option<VaRange> {
        covering(&self.host, address)
    }

    /// Is the host memory at `address` registered only for the context of another device?
    pub(super) fn is_pinned_for_others(&self, address: u64, device: DeviceOrdinal) -> bool {
        let start = covering(&self.host, address).map(|range| range.start.0);
        start.and_then(|start| self.pinned_for_one.get(&start)).is_some_and(|only| *only != device)
    }

    /// Releases everything.
    pub(super) fn clear(&mut self) {
        self.mappings.clear();
        for (start, size_bytes) in std::mem::take(&mut self.reservations) {
            if let Err(error) = vm::give_back(start, size_bytes) {
                tracing::trace!(%error, start, size_bytes, "reservation not given back");
            }
        }
        // The blocks go after the mappings: a block is settled once nothing holds its file.
        self.handles.clear();
        self.foreign = (0, 0);
        self.host.clear();
        self.pinned_for_one.clear();
    }
}

fn protection(bits: i32) -> ProtFlags {
    match bits {
        0 => ProtFlags::PROT_NONE,
        1 => ProtFlags::PROT_READ,
        _ => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
    }
}
