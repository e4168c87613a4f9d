//! Host memory that a device copies to and from at full speed. Chunks hold saved contents. [`Pinned`] memory belongs to
//! one step, and lasts as long as the step.

#![expect(unsafe_code, reason = "writes to new host memory, and hands it to the driver")]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::driver::{Driver, PieceSlot, PinnedFor};
use crate::error::{Describe, PoolError, PoolResult};
use sublet_driver::nodes;

/// The largest size of a chunk of host memory for saved contents, in bytes. It is large enough that pinning runs at
/// full speed (36 GiB/s measured with huge pages). It is small enough that the first copies start after some 10 ms.
pub const CHUNK_BYTES: u64 = 256 << 20;
/// The smallest size of a chunk, in bytes: a huge page.
const CHUNK_BYTES_MIN: u64 = 2 << 20;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Returns the size in bytes of the next chunk if `held_bytes` are held and `end_bytes` are needed. It is the larger of
/// what is missing and what is held, up to [`CHUNK_BYTES`]. So chunks stay few.
pub(crate) fn next_chunk_bytes(held_bytes: u64, end_bytes: u64) -> u64 {
    let wanted_bytes = end_bytes.saturating_sub(held_bytes).max(held_bytes).min(CHUNK_BYTES);
    wanted_bytes.next_power_of_two().max(CHUNK_BYTES_MIN)
}

/// Returns the sizes in bytes of the chunks that are missing, if `held_bytes` are held and `end_bytes` are needed.
pub(crate) fn missing_chunks(held_bytes: u64, end_bytes: u64) -> impl Iterator<Item = u64> + Send {
    let mut held_bytes = held_bytes;
    std::iter::from_fn(move || {
        let size_bytes = next_chunk_bytes(held_bytes, end_bytes);
        let is_missing = held_bytes < end_bytes;
        held_bytes += size_bytes;
        is_missing.then_some(size_bytes)
    })
}

/// A piece of host memory.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The map, which is unmapped when the chunk is dropped.
    _map: MmapRaw,
    /// The first huge-page boundary inside the map.
    pub(super) start: NonNull<u8>,
    /// The length from `start` on, in bytes.
    pub(super) length: usize,
    /// True once all pages are populated.
    is_touched: bool,
}

/// Returns whether the touching of pages must end. Called between two huge pages.
pub(super) type Stop<'a> = &'a (dyn Fn() -> bool + Sync);

/// The way in which new chunks are populated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BringIn {
    /// The number of threads that touch new chunks. With 0, pages are populated when they are used.
    pub(crate) toucher_threads: usize,
    /// The NUMA nodes over which new chunks are interleaved. Empty: the system chooses.
    pub(crate) nodes: Vec<u32>,
}

// SAFETY: a chunk is plain memory that its arena owns; who may touch which bytes when is the business of
// the copies' safety contracts.
unsafe impl Send for Chunk {}
// SAFETY: as above. A shared one changes nothing but those bytes.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Maps a chunk and populates all its pages, or until `stop` returns true.
    pub(super) fn new(how: &BringIn, size_bytes: u64, stop: Stop<'_>) -> io::Result<Self> {
        let mut chunk = Self::mapped(how, size_bytes)?;
        chunk.touch(how.toucher_threads, stop);
        Ok(chunk)
    }

    fn mapped(how: &BringIn, size_bytes: u64) -> io::Result<Self> {
        let length = usize::try_from(size_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let map = MmapOptions::new().len(length + HUGE_PAGE_BYTES).map_anon()?;
        let map = MmapRaw::from(map);
        if let Err(error) = map.advise(Advice::HugePage) {
            tracing::debug!(%error, "no huge pages: the first pause will be slower");
        }
        // The chunk stays pinned. Since Linux 5.12 a fork copies pinned pages immediately, and shares other pages until
        // they are written. A child has no use for pinned pages.
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::warn!(%error, "a fork of this process copies its saved contents");
        }
        if let Err(error) = map.advise(Advice::DontDump) {
            tracing::warn!(%error, "a core dump of this process holds its saved contents");
        }
        if let Err(error) = nodes::place(map.as_ptr().addr(), map.len(), &how.nodes) {
            tracing::debug!(%error, nodes = ?how.nodes, "host memory lies where the system puts it");
        }
        let base = map.as_mut_ptr();
        let padding = base.align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        // SAFETY: the map is one huge page longer than the chunk, and `padding` at most that.
        let start = unsafe { base.add(padding) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { _map: map, start, length, is_touched: false })
    }

    /// Populates the rest of the chunk, or until `stop` returns true. Nobody else may use the chunk meanwhile.
    pub(super) fn touch(&mut self, threads: usize, stop: Stop<'_>) {
        if !self.is_touched && threads > 0 {
            touch(self.start, self.length, threads, stop);
            self.is_touched = !stop();
        }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.length as u64
    }
}

/// Writes a zero to each page of a new anonymous map, so that the kernel populates it now and in parallel. Ends early,
/// at a huge page, once `stop` returns true.
fn touch(start: NonNull<u8>, length: usize, threads: usize, stop: Stop<'_>) {
    const PAGE_BYTES: usize = 4096;
    let share = length.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
    let base = start.as_ptr().expose_provenance();
    std::thread::scope(|scope| {
        for begin in (0..length).step_by(share) {
            let touch_share = move || {
                for offset in (begin..(begin + share).min(length)).step_by(PAGE_BYTES) {
                    if offset % HUGE_PAGE_BYTES == 0 && stop() {
                        return;
                    }
                    let page = std::ptr::with_exposed_provenance_mut::<u8>(base + offset);
                    // SAFETY: the page lies in the new map, which nobody else uses before this returns.
                    unsafe { page.write_volatile(0) };
                }
            };
            // If no thread can be started, this one does the share itself.
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, touch_share) {
                tracing::debug!(%error, "no thread to touch host memory with");
                touch_share();
            }
        }
    });
}

/// As [`Chunk::new`], without an early end.
pub(super) fn new_chunk(how: &BringIn, size_bytes: u64) -> io::Result<Chunk> {
    Chunk::new(how, size_bytes, &|| false)
}

/// Host memory of one step, which devices write to. Dropping it unmaps it, unless the driver refuses to unpin it.
///
/// # Invariants
/// 1. `map` is registered with the driver, zeros at first, and no part of it is handed out beyond a borrow.
#[derive(Debug)]
pub struct Pinned<D: Driver> {
    driver: Arc<D>,
    /// None once the map has been given up.
    map: Option<MmapRaw>,
}

impl<D: Driver> Pinned<D> {
    /// Makes `length` bytes, for devices of all contexts. A context must be current on this thread.
    ///
    /// # Errors
    /// [`PoolError::HostMemoryRefused`], [`PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuMemHostRegister`.
    pub fn new(driver: &Arc<D>, length: usize) -> PoolResult<Self> {
        let size_bytes = length as u64;
        let refused = |source| PoolError::HostMemoryRefused { size_bytes, source };
        let map = MmapOptions::new().len(length).populate().map_anon().map_err(refused)?;
        let map = MmapRaw::from(map);
        if let Err(error) = map.advise(Advice::DontFork) {
            tracing::debug!(%error, "a fork of this process copies a little pinned memory");
        }
        let driver = Arc::clone(driver);
        // SAFETY: it stays mapped until it is unregistered below, or for good.
        unsafe { driver.host_register(start_of(&map), length, PinnedFor::AllContexts) }.about(
            || "pinning of host memory".to_owned(),
            size_bytes,
            None,
        )?;
        // INVARIANT: registered above.
        Ok(Self { driver, map: Some(map) })
    }

    /// Returns a part of the memory as slots, without slots beyond its end. No device may be writing there.
    pub fn slots(&mut self, part: Range<usize>) -> &mut [PieceSlot] {
        let Some(map) = &self.map else { return &mut [] };
        let count = map.len() / size_of::<PieceSlot>();
        let end = part.end.min(count);
        let start = part.start.min(end);
        // SAFETY: within the map, or at its end.
        let first = unsafe { start_of(map).cast::<PieceSlot>().add(start) };
        // SAFETY: live, aligned to a page and then to a slot, zeros or slots, and this value's own (invariant 1); any bits are a
        // slot.
        unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), end - start) }
    }

    /// Keeps the memory mapped for good: a device may still be writing there.
    pub fn keep_for_good(mut self) {
        if let Some(map) = self.map.take() {
            let _kept = std::mem::ManuallyDrop::new(map);
        }
    }
}

fn start_of(map: &MmapRaw) -> NonNull<u8> {
    NonNull::new(map.as_mut_ptr()).unwrap_or(NonNull::dangling())
}

impl<D: Driver> Drop for Pinned<D> {
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        // SAFETY: the thread that drops it has waited for the devices; see `keep_for_good`.
        if let Err(error) = unsafe { self.driver.host_unregister(start_of(&map)) } {
            tracing::error!(%error, size_bytes = map.len(), "host memory stays pinned");
            // Never unmap memory that the driver still has pinned.
            let _kept = std::mem::ManuallyDrop::new(map);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn sizes_mib(held_mib: u64, end_mib: u64) -> Vec<u64> {
        missing_chunks(held_mib << 20, end_mib << 20).map(|bytes| bytes >> 20).collect()
    }

    #[test]
    fn chunks_are_as_large_as_what_is_missing_or_held_within_bounds() {
        assert_eq!(missing_chunks(0, 1).collect::<Vec<_>>(), [CHUNK_BYTES_MIN]);
        assert_eq!((sizes_mib(0, 0), sizes_mib(8, 8)), (vec![], vec![]));
        assert_eq!([sizes_mib(0, 2), sizes_mib(0, 3), sizes_mib(0, 100)], [[2], [4], [128]]);
        assert_eq!(sizes_mib(2, 9), [8]);
        assert_eq!(sizes_mib(100, 101), [128]);
        assert_eq!(sizes_mib(0, 1025), [256; 5]);
        // Large ones do not depend on how it began.
        assert_eq!(sizes_mib(2, 1024), [256; 4]);
        // A little more each time takes few chunks.
        let mut held_mib = 0;
        let mut count = 0;
        for end_mib in (1..=1024).step_by(2) {
            let new = sizes_mib(held_mib, end_mib);
            count += new.len();
            held_mib += new.iter().sum::<u64>();
        }
        assert!(count <= 12, "{count}");
    }

    /// Flags of the map that holds `address`, as the kernel names them.
    fn flags_at(address: u64) -> Vec<String> {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_it = false;
        for line in maps.lines() {
            let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
            let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
            if let Some((start, end)) = range
                && let (Some(start), Some(end)) = (hexadecimal(start), hexadecimal(end))
            {
                is_it = (start..end).contains(&address);
            }
            if let (true, Some(flags)) = (is_it, line.strip_prefix("VmFlags:")) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("nothing is mapped at {address:#x}");
    }

    #[test]
    fn a_fork_and_a_core_dump_leave_every_byte_of_a_chunk_out() {
        let chunk =
            new_chunk(&BringIn { toucher_threads: 1, nodes: Vec::new() }, CHUNK_BYTES).unwrap();
        let start = chunk.start.as_ptr().addr() as u64;
        for address in [start, start + CHUNK_BYTES / 2, start + CHUNK_BYTES - 1] {
            let flags = flags_at(address);
            // "do not copy area on fork", "do not include area into core dump"
            for wanted in ["dc", "dd"] {
                assert!(flags.contains(&wanted.to_owned()), "{address:#x}: {flags:?}");
            }
        }
    }

    #[test]
    fn touching_ends_at_a_huge_page_when_told_and_goes_on_where_it_is_wanted() {
        let how = BringIn { toucher_threads: 2, nodes: Vec::new() };
        let mut chunk = Chunk::new(&how, CHUNK_BYTES, &|| true).unwrap();
        assert!(!chunk.is_touched);
        chunk.touch(2, &|| false);
        assert!(chunk.is_touched);
    }

    /// Returns the memory policy that the kernel reports in `numa_maps` for the map at `start`, if it reports one.
    fn policy_at(start: u64) -> Option<String> {
        let maps = fs::read_to_string("/proc/self/numa_maps").ok()?;
        let mut before: Option<(u64, String)> = None;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            if address <= start {
                before = Some((address, words.next()?.to_owned()));
            }
        }
        before.map(|(_, policy)| policy)
    }

    #[test]
    fn a_chunk_is_placed_on_its_node_and_one_that_cannot_be_is_used_all_the_same() {
        let chunk =
            new_chunk(&BringIn { toucher_threads: 1, nodes: vec![0] }, CHUNK_BYTES).unwrap();
        if let Some(policy) = policy_at(chunk.start.as_ptr().addr() as u64) {
            // Where a container forbids the call, it stays the default.
            assert!(["prefer:0", "default"].contains(&policy.as_str()), "{policy}");
        }
        // No such node.
        for nodes in [vec![1023], vec![70_000], vec![0, 1023]] {
            new_chunk(&BringIn { toucher_threads: 1, nodes }, CHUNK_BYTES_MIN).unwrap();
        }
    }
}
