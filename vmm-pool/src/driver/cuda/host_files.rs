//! Host memory that the host and devices of several processes share, of files in memory instead of the driver's allocator.
//!
//! Driver 580 does not bring a process back from a checkpoint that holds host memory of `cuMemCreate`: its restore fails with 801. It does bring back one
//! whose memory is a file that is mapped and registered by `cuMemHostRegister`. Threads of the host may use that at any time, also while
//! the process is frozen. A device uses the host's addresses for such memory if it says so
//! (`CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`).
//!
//! The driver's reservations are no place for it. So a thread that has just made or imported a file gets its next reservation of that size
//! here. NCCL 2.23 to 2.30 asks in this order, `ncclCuMemHostAlloc` and `ncclShmImportShareableBuffer`.
//!
//! A file has one page more than its memory. The page says what the file is, and nobody maps it.

#![expect(unsafe_code, reason = "maps files at addresses that it has reserved")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::{CudaDriver, HOST_REGISTER_PORTABLE, about, check, size_t};
use crate::driver::{
    ALLOCATION_KIND_PINNED, AllocationFlags, AllocationProp, DeviceAddress, DeviceAttribute,
    DeviceOrdinal, Driver as _, DriverCode, DriverOp, DriverResult, HANDLE_TYPE_POSIX_FD, Location,
    LocationKind, RawHandle, VaRange,
};

const HOST_REGISTER_DEVICE_MAP: c_uint = 2;
const PAGE_BYTES: u64 = 4096;
const MAGIC: [u8; 16] = *b"sublet host file";

/// What a call of the driver's would return.
type Coded<T> = Result<T, DriverCode>;

#[derive(Debug)]
struct HostFile {
    file: File,
    size_bytes: u64,
    node: i32,
}

/// Addresses that were reserved here.
#[derive(Clone, Copy, Debug)]
struct Place {
    size_bytes: u64,
    is_mapped: bool,
    /// Does the driver know of it?
    is_registered: bool,
}

#[derive(Debug, Default)]
struct Tables {
    files: BTreeMap<RawHandle, Arc<HostFile>>,
    last: u64,
    places: BTreeMap<u64, Place>,
}

/// The files of a process, and where they are mapped.
#[derive(Debug, Default)]
pub(super) struct HostFiles(Mutex<Tables>);

thread_local! {
    /// The file that this thread has made or imported last, until it has addresses.
    static NEXT: Cell<Option<RawHandle>> = const { Cell::new(None) };
}

fn out_of_memory(errno: Errno) -> DriverCode {
    tracing::warn!(%errno, "no host memory to share");
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

/// Gives addresses back to the kernel that are ours, and that nobody has any more.
fn give_back(start: u64, size_bytes: u64) -> Coded<()> {
    let (start, size) = (pointer(start)?, length(size_bytes)?);
    // SAFETY: nothing is mapped there but what holds the place.
    unsafe { munmap(start, size.get()) }.map_err(out_of_memory)
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

impl HostFile {
    fn new(size_bytes: u64, node: i32) -> Result<Self, Errno> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("sublet-host-memory", flags)?);
        let failed = |error: std::io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(0));
        file.set_len(size_bytes + PAGE_BYTES).map_err(failed)?;
        file.write_all_at(&MAGIC, size_bytes).map_err(failed)?;
        file.write_all_at(&node.to_le_bytes(), size_bytes + MAGIC.len() as u64).map_err(failed)?;
        // Whoever maps it can rely on its size.
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
        Ok(Self { file, size_bytes, node })
    }

    /// The file that `fd` is, if it is one. Nothing is read of other descriptors.
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        if fcntl(fd, FcntlArg::F_GET_SEALS).ok()? != seals().bits() {
            return None;
        }
        let file = File::from(fd.try_clone_to_owned().ok()?);
        let size_bytes = file.metadata().ok()?.len().checked_sub(PAGE_BYTES)?;
        let (mut magic, mut node) = ([0; MAGIC.len()], [0; 4]);
        file.read_exact_at(&mut magic, size_bytes).ok()?;
        file.read_exact_at(&mut node, size_bytes + MAGIC.len() as u64).ok()?;
        (magic == MAGIC).then(|| Self { file, size_bytes, node: i32::from_le_bytes(node) })
    }
}

impl HostFiles {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, file: HostFile) -> RawHandle {
        let mut tables = self.tables();
        tables.last += 1;
        let handle = RawHandle::of_host_file(tables.last);
        tables.files.insert(handle, Arc::new(file));
        NEXT.set(Some(handle));
        handle
    }

    fn find(&self, handle: RawHandle) -> Coded<Arc<HostFile>> {
        self.tables().files.get(&handle).cloned().ok_or(DriverCode::INVALID_VALUE)
    }

    /// Memory of zeros, preferably on the node that `prop` names.
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

    /// The memory that `fd` is, if it is a file of this kind.
    pub(super) fn import(&self, fd: BorrowedFd<'_>) -> Option<RawHandle> {
        HostFile::of(fd).map(|file| self.add(file))
    }

    /// A descriptor of it.
    pub(super) fn export(&self, handle: RawHandle) -> Coded<OwnedFd> {
        let copy = self.find(handle)?.file.as_fd().try_clone_to_owned();
        copy.map_err(|_| DriverCode::OUT_OF_MEMORY)
    }

    /// What it was made with.
    pub(super) fn properties(&self, handle: RawHandle) -> Coded<AllocationProp> {
        Ok(AllocationProp {
            kind: ALLOCATION_KIND_PINNED,
            requested_handle_types: HANDLE_TYPE_POSIX_FD,
            location: Location { kind: LocationKind::HOST_NUMA, id: self.find(handle)?.node },
            win32_handle_metadata: 0,
            flags: AllocationFlags::default(),
        })
    }

    /// Its handle ends. What is mapped stays.
    pub(super) fn release(&self, handle: RawHandle) -> Coded<()> {
        let ended = self.tables().files.remove(&handle);
        ended.map(drop).ok_or(DriverCode::INVALID_VALUE)
    }

    /// Addresses for the file that this thread has just made or imported; none if that is of another size.
    pub(super) fn reserve(&self, size_bytes: u64, alignment_bytes: u64) -> Option<DeviceAddress> {
        let file = self.find(NEXT.take()?).ok()?;
        let alignment = alignment_bytes.max(PAGE_BYTES);
        if file.size_bytes != size_bytes || !alignment.is_power_of_two() {
            return None;
        }
        let whole = length(size_bytes.checked_add(alignment)?).ok()?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses addresses that nobody has.
        let taken = unsafe { mmap_anonymous(None, whole, ProtFlags::PROT_NONE, flags) }.ok()?;
        let first = taken.as_ptr().expose_provenance() as u64;
        let start = first.next_multiple_of(alignment);
        let end = start + size_bytes;
        for (from, until) in [(first, start), (end, first + whole.get() as u64)] {
            // Nobody knows of it. What is refused costs addresses alone.
            let _refused = give_back(from, until - from);
        }
        let place = Place { size_bytes, is_mapped: false, is_registered: false };
        self.tables().places.insert(start, place);
        Some(DeviceAddress(start))
    }

    /// Frees addresses that were reserved here; none if they were not.
    pub(super) fn free(&self, range: VaRange) -> Option<Coded<()>> {
        let mut tables = self.tables();
        let place = *tables.places.get(&range.start.0)?;
        if place.is_mapped || place.size_bytes != range.size_bytes {
            return Some(Err(DriverCode::INVALID_VALUE));
        }
        tables.places.remove(&range.start.0);
        drop(tables);
        Some(give_back(range.start.0, range.size_bytes))
    }

    /// Maps the whole of it at addresses that were reserved here. The host has access from then on, devices once they are
    /// registered.
    pub(super) fn map(&self, range: VaRange, handle: RawHandle) -> Coded<()> {
        let file = self.find(handle)?;
        let size = length(range.size_bytes)?;
        let mut tables = self.tables();
        let place = tables.places.get_mut(&range.start.0).ok_or(DriverCode::INVALID_VALUE)?;
        if place.is_mapped
            || range.size_bytes != file.size_bytes
            || place.size_bytes != file.size_bytes
        {
            return Err(DriverCode::INVALID_VALUE);
        }
        let (rights, flags) = (
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_SHARED | MapFlags::MAP_FIXED,
        );
        // SAFETY: the place is ours and empty, and its entry is held meanwhile.
        unsafe { mmap(Some(address(range.start.0)?), size, rights, flags, &file.file, 0) }
            .map_err(out_of_memory)?;
        prefer_node(pointer(range.start.0)?, size, file.node);
        place.is_mapped = true;
        // It has addresses: the next reservation of this thread is for something else.
        NEXT.set(NEXT.get().filter(|next| *next != handle));
        Ok(())
    }

    /// Is something mapped at `start` that was mapped here?
    pub(super) fn has(&self, start: DeviceAddress) -> bool {
        self.tables().places.get(&start.0).is_some_and(|place| place.is_mapped)
    }

    /// Notes whether the mapping at `range` is registered. What was noted before.
    pub(super) fn note_registered(&self, range: VaRange, is_registered: bool) -> Coded<bool> {
        let mut tables = self.tables();
        let place = tables.places.get_mut(&range.start.0);
        let place = place.filter(|place| place.is_mapped && place.size_bytes == range.size_bytes);
        let place = place.ok_or(DriverCode::INVALID_VALUE)?;
        Ok(std::mem::replace(&mut place.is_registered, is_registered))
    }

    /// Unmaps what is mapped at `range`, which is not registered any more. The addresses stay reserved.
    pub(super) fn unmap(&self, range: VaRange) -> Coded<()> {
        let mut tables = self.tables();
        let place = tables.places.get_mut(&range.start.0).ok_or(DriverCode::INVALID_VALUE)?;
        let (start, size) = (address(range.start.0)?, length(place.size_bytes)?);
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: only the mapping that the entry stands for is replaced, and the caller vouches that nothing uses it.
        unsafe { mmap_anonymous(Some(start), size, ProtFlags::PROT_NONE, flags) }
            .map_err(out_of_memory)?;
        place.is_mapped = false;
        Ok(())
    }
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

    /// Lets all devices reach a mapping of a host file.
    pub(super) fn register_host_file(
        &self,
        range: VaRange,
        device: DeviceOrdinal,
    ) -> DriverResult<()> {
        if about(DriverOp::SetAccess, self.host_files.note_registered(range, true))? {
            return Ok(());
        }
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICE_MAP;
        let (start, size) = (host_pointer(range.start), size_t(range.size_bytes));
        // SAFETY: the mapping stays until it is unregistered: `unmap_host_file` does that first.
        let register = || unsafe { (self.table.host_register)(start, size, flags) };
        let mut code = register();
        if DriverCode(code) == DriverCode::INVALID_CONTEXT && self.make_current(device).is_ok() {
            code = register();
            // SAFETY: as before, none is current.
            let _refused = unsafe { (self.table.context_set_current)(std::ptr::null_mut()) };
        }
        let registered = check(DriverOp::HostRegister, code);
        if registered.is_err() {
            about(DriverOp::SetAccess, self.host_files.note_registered(range, false))?;
        }
        registered
    }

    pub(super) fn unmap_host_file(&self, range: VaRange) -> DriverResult<()> {
        if about(DriverOp::Unmap, self.host_files.note_registered(range, false))? {
            // SAFETY: the caller of `unmap` vouches that no work uses the range. It needs no context.
            let code = unsafe { (self.table.host_unregister)(host_pointer(range.start)) };
            if let Err(error) = check(DriverOp::HostUnregister, code) {
                about(DriverOp::Unmap, self.host_files.note_registered(range, true))?;
                return Err(error);
            }
        }
        about(DriverOp::Unmap, self.host_files.unmap(range))
    }
}

fn host_pointer(address: DeviceAddress) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size_t(address.0))
}

/// Has pages that come in later lie on `node`, if there is room. Best effort.
fn prefer_node(start: NonNull<libc::c_void>, size: NonZeroUsize, node: i32) {
    let bit = u32::try_from(node).ok().and_then(|node| 1_usize.checked_shl(node));
    let Some(mask) = bit else { return };
    // SAFETY: the range is a map of ours; the mask has as many bits as is said (the kernel reads one less).
    unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start.as_ptr(),
            size.get(),
            libc::c_long::from(libc::MPOL_PREFERRED),
            &raw const mask,
            usize::BITS as usize + 1,
            0_usize,
        )
    };
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
