//! Host memory that the host and the devices of several processes share. It comes from files in memory instead of the driver's
//! allocator.
//!
//! Driver 580 cannot restore a process from a checkpoint that holds host memory of `cuMemCreate`: the restore fails with 801.
//! It can restore a process whose memory is a file that is mapped, and registered by `cuMemHostRegister`. Threads of the host
//! may use such memory at any time, also while the process is frozen. A device uses the host's addresses for it if the device
//! says so (`CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`).
//!
//! Such a file cannot be mapped in the driver's reservations. So it is mapped and registered when its addresses are reserved.
//! If that fails, nobody has seen the file yet.
//!
//! A file has one page more than its memory. That page says what the file is, and nobody maps it.

#![expect(unsafe_code, reason = "maps files at addresses that it has reserved")]

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::resource::{Resource, getrlimit};

use super::{CudaDriver, HOST_REGISTER_PORTABLE, about, check, size_t};
use crate::descriptors::Uninherited;
use crate::nodes;
use crate::{
    ALLOCATION_KIND_PINNED, AllocationFlags, AllocationProp, DeviceAddress, DeviceAttribute,
    DeviceOrdinal, Driver as _, DriverCode, DriverOp, DriverResult, HANDLE_TYPE_POSIX_FD, Location,
    LocationKind, RawHandle, VaRange,
};
use sublet_sync::sync::lock;

const HOST_REGISTER_DEVICE_MAP: c_uint = 2;
const PAGE_BYTES: u64 = 4096;
/// The share of the process's descriptors that files may use. Each file has a descriptor while it lives, here and where it is
/// imported. The driver's own memory has none.
const SHARE_OF_DESCRIPTORS: u64 = 4;
const MAGIC: [u8; 16] = *b"sublet host file";

/// The result that a driver call would return.
type Coded<T> = Result<T, DriverCode>;

#[derive(Debug)]
struct HostFile {
    file: Uninherited<File>,
    size_bytes: u64,
    node: i32,
}

/// Addresses that were reserved here.
#[derive(Clone, Copy, Debug)]
struct HostRange {
    /// The only handle that may be mapped there.
    handle: RawHandle,
    size_bytes: u64,
    /// Is the file mapped there?
    is_attached: bool,
    /// Is the range registered with the driver?
    is_registered: bool,
    /// Has the caller mapped it?
    is_mapped: bool,
}

impl HostRange {
    fn range(&self, start: u64) -> VaRange {
        VaRange::new(DeviceAddress(start), self.size_bytes)
    }
}

#[derive(Debug, Default)]
struct Tables {
    files: BTreeMap<RawHandle, Arc<HostFile>>,
    last: u64,
    places: BTreeMap<u64, HostRange>,
}

/// The files of a process, and the addresses where they are mapped.
#[derive(Debug, Default)]
pub(super) struct HostFiles(Mutex<Tables>);

fn out_of_memory(errno: Errno) -> DriverCode {
    tracing::debug!(%errno, "no host memory to share");
    DriverCode::OUT_OF_MEMORY
}

fn length(size_bytes: u64) -> Coded<NonZeroUsize> {
    let size = usize::try_from(size_bytes).ok().and_then(NonZeroUsize::new);
    size.ok_or(DriverCode::INVALID_VALUE)
}

fn address(start: u64) -> Coded<NonZeroUsize> {
    length(start)
}

fn pointer(start: u64) -> Coded<NonNull<libc::c_void>> {
    Ok(NonNull::with_exposed_provenance(address(start)?))
}

/// Gives addresses of ours back to the kernel. Nobody uses them any more.
fn give_back(start: u64, size_bytes: u64) -> Coded<()> {
    let (start, size) = (pointer(start)?, length(size_bytes)?);
    // SAFETY: nothing is mapped there but the reservation itself.
    unsafe { munmap(start, size.get()) }.map_err(out_of_memory)
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Is the size within the process's limit? A signal would kill the process if it made a larger file.
fn is_file_allowed(size_bytes: u64) -> bool {
    getrlimit(Resource::RLIMIT_FSIZE).is_ok_and(|(most, _)| size_bytes <= most)
}

/// Has the process descriptors to spare? The kernel gives out the lowest free number.
fn is_number_low(fd: &impl AsRawFd) -> bool {
    let number = u64::try_from(fd.as_raw_fd()).unwrap_or(u64::MAX);
    getrlimit(Resource::RLIMIT_NOFILE).is_ok_and(|(most, _)| number < most / SHARE_OF_DESCRIPTORS)
}

impl HostFile {
    fn new(size_bytes: u64, node: i32) -> Result<Self, Errno> {
        if !is_file_allowed(size_bytes + PAGE_BYTES) {
            return Err(Errno::EFBIG);
        }
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("sublet-host-memory", flags)?);
        if !is_number_low(&file) {
            return Err(Errno::EMFILE);
        }
        let failed = |error: std::io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(0));
        file.set_len(size_bytes + PAGE_BYTES).map_err(failed)?;
        file.write_all_at(&MAGIC, size_bytes).map_err(failed)?;
        file.write_all_at(&node.to_le_bytes(), size_bytes + MAGIC.len() as u64).map_err(failed)?;
        // A process that maps the file can rely on its size.
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
        Ok(Self { file: file.into(), size_bytes, node })
    }

    /// Returns the host file that `fd` refers to, if it is one. Reads nothing from other descriptors.
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        if fcntl(fd, FcntlArg::F_GET_SEALS).ok()? != seals().bits() {
            return None;
        }
        let file = File::from(fd.try_clone_to_owned().ok()?);
        let size_bytes = file.metadata().ok()?.len().checked_sub(PAGE_BYTES)?;
        let (mut magic, mut node) = ([0; MAGIC.len()], [0; 4]);
        file.read_exact_at(&mut magic, size_bytes).ok()?;
        file.read_exact_at(&mut node, size_bytes + MAGIC.len() as u64).ok()?;
        (magic == MAGIC).then(|| Self {
            file: file.into(),
            size_bytes,
            node: i32::from_le_bytes(node),
        })
    }
}

impl HostFiles {
    fn add(&self, file: HostFile) -> RawHandle {
        let mut tables = lock(&self.0);
        tables.last += 1;
        let handle = RawHandle::of_host_file(tables.last);
        tables.files.insert(handle, Arc::new(file));
        handle
    }

    fn find(&self, handle: RawHandle) -> Coded<Arc<HostFile>> {
        lock(&self.0).files.get(&handle).cloned().ok_or(DriverCode::INVALID_VALUE)
    }

    /// Creates memory of zeros, preferably on the node that `prop` names.
    pub(super) fn create(&self, size_bytes: u64, prop: &AllocationProp) -> Coded<RawHandle> {
        let is_meant = prop.location.kind == LocationKind::HOST_NUMA
            && prop.requested_handle_types == HANDLE_TYPE_POSIX_FD;
        if !is_meant || size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(DriverCode::NOT_SUPPORTED);
        }
        HostFile::new(size_bytes, prop.location.id)
            .map(|file| self.add(file))
            .map_err(out_of_memory)
    }

    /// Returns a handle for the memory of `fd`, if that is a file of this kind.
    pub(super) fn import(&self, fd: BorrowedFd<'_>) -> Option<RawHandle> {
        HostFile::of(fd).map(|file| self.add(file))
    }

    /// Returns a new descriptor of the file.
    pub(super) fn export(&self, handle: RawHandle) -> Coded<OwnedFd> {
        let copy = self.find(handle)?.file.as_fd().try_clone_to_owned();
        copy.map_err(|_| DriverCode::OUT_OF_MEMORY)
    }

    /// Returns the properties that the memory of `handle` was made with.
    pub(super) fn properties(&self, handle: RawHandle) -> Coded<AllocationProp> {
        Ok(AllocationProp {
            kind: ALLOCATION_KIND_PINNED,
            requested_handle_types: HANDLE_TYPE_POSIX_FD,
            location: Location { kind: LocationKind::HOST_NUMA, id: self.find(handle)?.node },
            win32_handle_metadata: 0,
            flags: AllocationFlags::default(),
        })
    }

    /// Ends the handle. Its mappings stay.
    pub(super) fn release(&self, handle: RawHandle) -> Coded<()> {
        let ended = lock(&self.0).files.remove(&handle);
        ended.map(drop).ok_or(DriverCode::INVALID_VALUE)
    }

    /// Reserves addresses for `handle`, and maps its file there. The host may use them now, and devices once they are
    /// registered.
    pub(super) fn reserve(&self, handle: RawHandle, alignment_bytes: u64) -> Coded<VaRange> {
        let file = self.find(handle)?;
        let alignment = alignment_bytes.max(PAGE_BYTES);
        let whole_bytes = file.size_bytes.checked_add(alignment);
        let is_whole = alignment_bytes == 0 || alignment_bytes.is_power_of_two();
        let whole_bytes = whole_bytes.filter(|_| is_whole);
        let whole = length(whole_bytes.ok_or(DriverCode::INVALID_VALUE)?)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses addresses that nobody has.
        let taken = unsafe { mmap_anonymous(None, whole, ProtFlags::PROT_NONE, flags) };
        let first = taken.map_err(out_of_memory)?.as_ptr().expose_provenance() as u64;
        let start = first.next_multiple_of(alignment);
        let end = start + file.size_bytes;
        for (from, until) in [(first, start), (end, first + whole.get() as u64)] {
            // Nobody knows of these addresses. A refusal costs addresses alone.
            let _refused = give_back(from, until - from);
        }
        if let Err(code) = attach(start, &file) {
            let _refused = give_back(start, file.size_bytes);
            return Err(code);
        }
        let size_bytes = file.size_bytes;
        let (is_attached, is_registered, is_mapped) = (true, false, false);
        let place = HostRange { handle, size_bytes, is_attached, is_registered, is_mapped };
        lock(&self.0).places.insert(start, place);
        Ok(place.range(start))
    }

    /// Frees addresses that were reserved here and are not registered.
    fn free(&self, range: VaRange) -> Coded<()> {
        lock(&self.0).places.remove(&range.start.0).ok_or(DriverCode::INVALID_VALUE)?;
        give_back(range.start.0, range.size_bytes)
    }

    /// Maps the whole of `handle` at addresses that were reserved for it.
    pub(super) fn map(&self, range: VaRange, handle: RawHandle) -> Coded<()> {
        let mut tables = lock(&self.0);
        let file = tables.files.get(&handle).cloned().ok_or(DriverCode::INVALID_VALUE)?;
        let place = tables.places.get_mut(&range.start.0);
        let place = place.filter(|place| {
            place.handle == handle && place.size_bytes == range.size_bytes && !place.is_mapped
        });
        let place = place.ok_or(DriverCode::INVALID_VALUE)?;
        if !place.is_attached {
            attach(range.start.0, &file)?;
        }
        (place.is_attached, place.is_mapped) = (true, true);
        Ok(())
    }

    /// Returns the whole place that holds `address`, and whether something is mapped there.
    fn place_at(&self, address: DeviceAddress) -> Option<(VaRange, bool)> {
        let tables = lock(&self.0);
        let (start, place) = tables.places.range(..=address.0).next_back()?;
        let is_inside = address.0 - start < place.size_bytes;
        is_inside.then(|| (place.range(*start), place.is_mapped))
    }

    /// Returns the whole mapping that holds `address`, if it was made here.
    pub(super) fn mapping_at(&self, address: DeviceAddress) -> Option<VaRange> {
        self.place_at(address).filter(|(_, is_mapped)| *is_mapped).map(|(range, _)| range)
    }

    /// Records whether the place at `start` is registered. Returns the former value.
    fn note_registered(&self, start: DeviceAddress, is_registered: bool) -> Coded<bool> {
        let mut tables = lock(&self.0);
        let place = tables.places.get_mut(&start.0).ok_or(DriverCode::INVALID_VALUE)?;
        Ok(std::mem::replace(&mut place.is_registered, is_registered))
    }

    /// Unmaps the file at `start`, which is not registered any more. The addresses stay reserved.
    fn unmap(&self, start: DeviceAddress) -> Coded<()> {
        let mut tables = lock(&self.0);
        let place = tables.places.get_mut(&start.0).ok_or(DriverCode::INVALID_VALUE)?;
        let (at, size) = (address(start.0)?, length(place.size_bytes)?);
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: only the mapping that the entry stands for is replaced, and the caller vouches that nothing uses it.
        unsafe { mmap_anonymous(Some(at), size, ProtFlags::PROT_NONE, flags) }
            .map_err(out_of_memory)?;
        (place.is_attached, place.is_mapped) = (false, false);
        Ok(())
    }
}

/// Maps the whole of `file` at addresses that are ours and empty.
fn attach(start: u64, file: &HostFile) -> Coded<()> {
    let (at, size) = (address(start)?, length(file.size_bytes)?);
    let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: the addresses are ours and empty, as the caller vouches.
    let mapped = unsafe { mmap(Some(at), size, rights, flags, &*file.file, 0) };
    let mapped = mapped.map_err(out_of_memory)?;
    // Memory on another node still works.
    let node = u32::try_from(file.node).ok();
    let _placed = node.map(|node| nodes::place(mapped.as_ptr().addr(), size.get(), &[node]));
    Ok(())
}

impl CudaDriver {
    /// Does every device reach registered host memory at the host's addresses?
    pub(super) fn devices_use_host_addresses(&self) -> DriverResult<bool> {
        for device in (0..self.device_count()?).map(DeviceOrdinal) {
            if self.device_attribute(device, DeviceAttribute::HOST_ADDRESSES_FOR_REGISTERED)? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// See [`crate::Driver::reserve_for_host_file`].
    pub(super) fn reserve_and_register(
        &self,
        handle: RawHandle,
        alignment_bytes: u64,
    ) -> DriverResult<DeviceAddress> {
        let range =
            about(DriverOp::AddressReserve, self.host_files.reserve(handle, alignment_bytes))?;
        match self.register_host_file(range.start, None) {
            // A caller that sets access names a device, so its context can be used then.
            Err(error) if error.code != DriverCode::INVALID_CONTEXT => {
                if let Some(Err(error)) = self.free_host_place(range) {
                    tracing::warn!(%error, "addresses at {} stay", range.start);
                }
                Err(error)
            }
            Ok(()) | Err(_) => Ok(range.start),
        }
    }

    /// Registers the place of a host file at `start`, so that all devices reach it.
    pub(super) fn register_host_file(
        &self,
        start: DeviceAddress,
        device: Option<DeviceOrdinal>,
    ) -> DriverResult<()> {
        let Some((range, _)) = self.host_files.place_at(start) else {
            return about(DriverOp::HostRegister, Err(DriverCode::INVALID_VALUE));
        };
        if about(DriverOp::HostRegister, self.host_files.note_registered(range.start, true))? {
            return Ok(());
        }
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICE_MAP;
        let (pointer, size) = (host_pointer(range.start), size_t(range.size_bytes));
        let register = || {
            // SAFETY: the mapping stays until it is unregistered: `unregister_host_file` goes before each unmapping.
            self.beside_captures(|| unsafe { (self.table.host_register)(pointer, size, flags) })
        };
        let mut code = register();
        if let (DriverCode::INVALID_CONTEXT, Some(device)) = (DriverCode(code), device)
            && self.make_current(device).is_ok()
        {
            code = register();
            // SAFETY: as before, none is current.
            let _refused = unsafe { (self.table.context_set_current)(std::ptr::null_mut()) };
        }
        let registered = check(DriverOp::HostRegister, code);
        if registered.is_err() {
            about(DriverOp::HostRegister, self.host_files.note_registered(range.start, false))?;
        }
        registered
    }

    fn unregister_host_file(&self, start: DeviceAddress) -> DriverResult<()> {
        if about(DriverOp::HostUnregister, self.host_files.note_registered(start, false))? {
            let pointer = host_pointer(start);
            // SAFETY: the caller vouches that no work uses the range. It needs no context.
            let unregister = || unsafe { (self.table.host_unregister)(pointer) };
            let code = DriverCode(self.beside_captures(unregister));
            // A reset of the context has unregistered it.
            if code != DriverCode::HOST_MEMORY_NOT_REGISTERED
                && let Err(error) = check(DriverOp::HostUnregister, code.0)
            {
                about(DriverOp::HostUnregister, self.host_files.note_registered(start, true))?;
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) fn unmap_host_file(&self, start: DeviceAddress) -> DriverResult<()> {
        self.unregister_host_file(start)?;
        about(DriverOp::Unmap, self.host_files.unmap(start))
    }

    /// See [`crate::Driver::free_of_host_file`].
    pub(super) fn free_host_place(&self, range: VaRange) -> Option<DriverResult<()>> {
        let (place, is_mapped) = self.host_files.place_at(range.start)?;
        if is_mapped || place != range {
            return Some(about(DriverOp::AddressFree, Err(DriverCode::INVALID_VALUE)));
        }
        let freed = self.unregister_host_file(range.start);
        Some(freed.and_then(|()| about(DriverOp::AddressFree, self.host_files.free(range))))
    }
}

fn host_pointer(address: DeviceAddress) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size_t(address.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE_BYTES: u64 = 8 * PAGE_BYTES;

    fn prop() -> AllocationProp {
        let location = Location { kind: LocationKind::HOST_NUMA, id: 0 };
        AllocationProp { location, ..AllocationProp::pinned_on(DeviceOrdinal(0)) }
    }

    #[test]
    fn only_shared_memory_of_a_node_is_a_host_file() {
        let files = HostFiles::default();
        let of_device = AllocationProp::pinned_on(DeviceOrdinal(0));
        let unshared = AllocationProp { requested_handle_types: 0, ..prop() };
        for (size_bytes, prop) in [(SIZE_BYTES, of_device), (SIZE_BYTES, unshared), (100, prop())] {
            assert_eq!(files.create(size_bytes, &prop), Err(DriverCode::NOT_SUPPORTED));
        }
        let handle = files.create(SIZE_BYTES, &prop()).unwrap();
        assert_eq!(files.properties(handle), Ok(prop()));
    }

    /// A file whose size another process can change would end a process that maps it.
    #[test]
    fn a_descriptor_of_something_else_is_no_host_file() {
        let files = HostFiles::default();
        let handle = files.create(SIZE_BYTES, &prop()).unwrap();
        let export = files.export(handle).unwrap();
        assert!(files.import(export.as_fd()).is_some());
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let other = File::from(memfd_create("other", flags).unwrap());
        other.set_len(SIZE_BYTES + PAGE_BYTES).unwrap();
        other.write_all_at(&MAGIC, SIZE_BYTES).unwrap();
        assert!(files.import(other.as_fd()).is_none(), "it is not sealed");
        other.write_all_at(&[0], SIZE_BYTES).unwrap();
        fcntl(&other, FcntlArg::F_ADD_SEALS(seals())).unwrap();
        assert!(files.import(other.as_fd()).is_none(), "it does not say so");
        assert!(files.import(std::io::pipe().unwrap().0.as_fd()).is_none());
    }
}
