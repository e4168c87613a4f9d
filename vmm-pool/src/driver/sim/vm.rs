//! Host address space as the stand-in for device address space.
//!
//! # Safety of this file
//! Ranges that are reserved here are known to nobody but the tables of [`super::memory`], which hand each
//! of them to exactly one reservation. Changing the protection or the backing of a page inside one is
//! therefore invisible to Rust: the contents are only ever reached through raw pointers.

#![expect(unsafe_code, reason = "device addresses are host mappings placed at fixed addresses")]

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

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

/// Takes `[start, start + size_bytes)` if nothing at all is there.
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

/// Places the contents of `fd` over a part of a reservation, without access.
pub(super) fn place(start: u64, size_bytes: u64, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
    // SAFETY: the range lies inside a reservation of the caller's table (head of this file), so only
    // pages that are ours are replaced.
    unsafe { mmap(Some(fixed(start)?), length(size_bytes)?, ProtFlags::PROT_NONE, flags, fd, 0) }?;
    Ok(())
}

/// Puts empty address space back over a part of a reservation.
pub(super) fn displace(start: u64, size_bytes: u64) -> Result<(), Errno> {
    let flags = idle_flags() | MapFlags::MAP_FIXED;
    // SAFETY: as in `place`.
    unsafe {
        mmap_anonymous(Some(fixed(start)?), length(size_bytes)?, ProtFlags::PROT_NONE, flags)
    }?;
    Ok(())
}

/// Sets what code of this process may do with a placed range.
pub(super) fn protect(start: u64, size_bytes: u64, bits: ProtFlags) -> Result<(), Errno> {
    // SAFETY: the range is placed (head of this file); nothing holds a Rust reference into it.
    unsafe { mprotect(pointer(start)?, length(size_bytes)?.get(), bits) }
}

/// Lets the process have as many descriptors as its hard limit allows. Best effort.
pub(super) fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writes.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known && limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: `limit` is valid for reads.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
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

/// Writes `pattern` over and over; a last partial pattern is cut.
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
    for (offset, byte) in (0..size_bytes).zip(pattern.iter().cycle()) {
        // SAFETY: `offset` is below the size that the caller vouches for.
        let place = unsafe { target.add(offset) };
        // SAFETY: as above.
        unsafe { place.write(*byte) };
    }
}
