//! Host address space as the stand-in for device address space.
//!
//! # Safety of this file
//! Only the tables of [`super::memory`] know the ranges that are reserved here. They hand each range to exactly one
//! reservation. The exception is a function here that gives its range back itself. A change of the protection or the backing of
//! a page in such a range is therefore invisible to Rust: the contents are only ever reached through raw pointers.

#![expect(unsafe_code, reason = "device addresses are host mappings placed at fixed addresses")]

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The size of a large page of the machine, on x86-64.
pub(super) const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// Set when the machine gives no large pages, so that nobody asks it again.
static HAS_NO_LARGE_PAGES: AtomicBool = AtomicBool::new(false);

fn length(size_bytes: u64) -> Result<NonZeroUsize, Errno> {
    usize::try_from(size_bytes).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)
}

fn fixed(start: u64) -> Result<NonZeroUsize, Errno> {
    length(start)
}

fn pointer(start: u64) -> Result<NonNull<std::ffi::c_void>, Errno> {
    NonNull::new(at(start).cast()).ok_or(Errno::EINVAL)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an address of this process always fits its pointers"
)]
fn at(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn idle_flags() -> MapFlags {
    MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE
}

/// Reserves `[start, start + size_bytes)` if nothing at all is there.
pub(super) fn reserve_at(start: u64, size_bytes: u64) -> Result<(), Errno> {
    let flags = idle_flags() | MapFlags::MAP_FIXED_NOREPLACE;
    // SAFETY: `MAP_FIXED_NOREPLACE` never replaces an existing mapping, so no memory in use changes.
    let placed = unsafe {
        mmap_anonymous(Some(fixed(start)?), length(size_bytes)?, ProtFlags::PROT_NONE, flags)
    }?;
    debug_assert_eq!(placed.as_ptr().addr() as u64, start);
    Ok(())
}

/// Gives a reservation back to the operating system.
pub(super) fn give_back(start: u64, size_bytes: u64) -> Result<(), Errno> {
    // SAFETY: the caller's table owns the whole range (head of this file) and forgets it now.
    unsafe { munmap(pointer(start)?, length(size_bytes)?.get()) }
}

/// Maps `fd` over a part of a reservation, without access.
pub(super) fn place(start: u64, size_bytes: u64, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: the range lies inside a reservation of the caller's table (head of this file), so only
    // pages that are ours are replaced.
    unsafe { mmap(Some(fixed(start)?), length(size_bytes)?, ProtFlags::PROT_NONE, flags, fd, 0) }?;
    Ok(())
}

/// Makes each written page of `fd` one of 2 MiB, where the machine can (`MADV_COLLAPSE`, Linux 6.1). Small pages are allocated,
/// cleared, mapped and freed one by one. Most of the time of a test that writes all memory was spent there. A page without
/// contents stays as it is. Best effort: contents and addresses are the same without it.
pub(super) fn enlarge_pages(size_bytes: u64, fd: BorrowedFd<'_>) {
    if size_bytes >= LARGE_PAGE_BYTES
        && !HAS_NO_LARGE_PAGES.load(Ordering::Relaxed)
        && let Err(error) = try_enlarge_pages(size_bytes, fd)
        && error != Errno::EAGAIN
    {
        HAS_NO_LARGE_PAGES.store(true, Ordering::Relaxed);
    }
}

fn try_enlarge_pages(size_bytes: u64, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    // The kernel needs an address at a multiple of their size.
    let room_bytes = size_bytes.checked_add(LARGE_PAGE_BYTES).ok_or(Errno::EINVAL)?;
    // SAFETY: the address is the kernel's choice, so nothing in use is replaced.
    let room =
        unsafe { mmap_anonymous(None, length(room_bytes)?, ProtFlags::PROT_NONE, idle_flags()) }?;
    let room_start = room.as_ptr().expose_provenance() as u64;
    let start = room_start.next_multiple_of(LARGE_PAGE_BYTES);
    let enlarged = place(start, size_bytes, fd).and_then(|()| {
        let length = length(size_bytes)?.get();
        // SAFETY: the range has just been placed, and contents stay as they are.
        Errno::result(unsafe {
            libc::madvise(pointer(start)?.as_ptr(), length, libc::MADV_COLLAPSE)
        })
    });
    give_back(room_start, room_bytes)?;
    enlarged.map(drop)
}

/// Puts empty address space over a part of a reservation again.
pub(super) fn displace(start: u64, size_bytes: u64) -> Result<(), Errno> {
    let flags = idle_flags() | MapFlags::MAP_FIXED;
    // SAFETY: as in `place`.
    unsafe {
        mmap_anonymous(Some(fixed(start)?), length(size_bytes)?, ProtFlags::PROT_NONE, flags)
    }?;
    Ok(())
}

/// Sets the access that code of this process has to a mapped range.
pub(super) fn protect(start: u64, size_bytes: u64, bits: ProtFlags) -> Result<(), Errno> {
    // SAFETY: the range is placed (head of this file); nothing holds a Rust reference into it.
    unsafe { mprotect(pointer(start)?, length(size_bytes)?.get(), bits) }
}

/// Raises the process's limit of descriptors to its hard limit. Best effort.
pub(super) fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).ok();
    }
}

/// Copies bytes; the ranges may overlap.
///
/// # Safety
/// Both ranges are mapped with the access needed, and stay so during the call.
pub(super) unsafe fn copy(target: u64, source: u64, size_bytes: usize) {
    let (target, source) = (at(target), at(source).cast_const());
    // SAFETY: the caller vouches for both ranges; `copy` allows overlap.
    unsafe { std::ptr::copy(source, target, size_bytes) }
}

/// Writes `pattern` repeatedly; a last partial pattern is cut.
///
/// # Safety
/// The range is mapped writable, and stays so during the call.
pub(super) unsafe fn fill(target: u64, size_bytes: usize, pattern: &[u8]) {
    let target = at(target);
    if let [byte] = pattern {
        // SAFETY: the caller vouches for the range.
        unsafe { target.write_bytes(*byte, size_bytes) };
        return;
    }
    let first = pattern.len().min(size_bytes);
    // SAFETY: `first` is below the size that the caller vouches for, and below that of `pattern`, which is no memory of a device's.
    unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), target, first) };
    // The written part is a multiple of the pattern until the last copy: a test build copies fast and writes single elements
    // slowly.
    let mut written = first;
    while written > 0 && written < size_bytes {
        let more = written.min(size_bytes - written);
        // SAFETY: `written` is below the size that the caller vouches for.
        let place = unsafe { target.add(written) };
        // SAFETY: `written + more` is at most that size, and `more` at most `written`, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(target.cast_const(), place, more) };
        written += more;
    }
}
