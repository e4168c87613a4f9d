//! Pieces of host memory that a device can copy to and from at full speed.

#![expect(unsafe_code, reason = "writes to each page of new host memory")]

use std::io;
use std::ptr::NonNull;

use memmap2::{Advice, MmapOptions, MmapRaw};

/// Size of a chunk. Large enough that pinning runs at full speed (36 GiB/s measured with huge pages),
/// small enough that the first copies start after some 10 ms.
pub(super) const CHUNK_BYTES: u64 = 256 << 20;
pub(super) const CHUNK_LENGTH: usize = 256 << 20;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// [`CHUNK_BYTES`] of host memory.
#[derive(Debug)]
pub(super) struct Chunk {
    map: MmapRaw,
    /// First huge-page boundary inside `map`.
    pub(super) start: NonNull<u8>,
}

// SAFETY: a chunk is plain memory that its arena owns; who may touch which bytes when is the business of
// the copies' safety contracts.
unsafe impl Send for Chunk {}

impl Chunk {
    /// Never unmaps it: the driver holds its pages.
    pub(super) fn keep_for_good(self) {
        let _kept = std::mem::ManuallyDrop::new(self.map);
    }
}

/// Maps a chunk and brings all its pages in. Without threads to touch them, they come in as they are used.
pub(super) fn new_chunk(toucher_threads: usize) -> io::Result<Chunk> {
    let length = CHUNK_LENGTH;
    let map = MmapRaw::from(MmapOptions::new().len(length + HUGE_PAGE_BYTES).map_anon()?);
    if let Err(error) = map.advise(Advice::HugePage) {
        tracing::debug!(%error, "no huge pages: the first pause will be slower");
    }
    // The chunk stays pinned, and since Linux 5.12 a fork copies pinned pages at once, where it shares others until
    // they are written. A child has no use for them.
    if let Err(error) = map.advise(Advice::DontFork) {
        tracing::warn!(%error, "a fork of this process copies its saved contents");
    }
    let base = map.as_mut_ptr();
    let padding = base.align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
    // SAFETY: the map is one huge page longer than the chunk, and `padding` at most that.
    let start = unsafe { base.add(padding) };
    let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
    if toucher_threads > 0 {
        touch(start, length, toucher_threads);
    }
    Ok(Chunk { map, start })
}

/// Writes a zero to each page of a new anonymous map, so that the kernel brings it in now and in parallel.
fn touch(start: NonNull<u8>, length: usize, threads: usize) {
    const PAGE_BYTES: usize = 4096;
    let share = length.div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
    let base = start.as_ptr().expose_provenance();
    std::thread::scope(|scope| {
        for begin in (0..length).step_by(share) {
            let touch_share = move || {
                for offset in (begin..(begin + share).min(length)).step_by(PAGE_BYTES) {
                    let page = std::ptr::with_exposed_provenance_mut::<u8>(base + offset);
                    // SAFETY: the page lies in the new map, which nobody else uses before this returns.
                    unsafe { page.write_volatile(0) };
                }
            };
            // Without a thread to be had, this one does the share itself.
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, touch_share) {
                tracing::debug!(%error, "no thread to touch host memory with");
                touch_share();
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

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
    fn a_fork_leaves_every_byte_of_a_chunk_out() {
        let chunk = new_chunk(1).unwrap();
        let start = chunk.start.as_ptr().addr() as u64;
        for address in [start, start + CHUNK_BYTES / 2, start + CHUNK_BYTES - 1] {
            let flags = flags_at(address);
            // "do not copy area on fork"
            assert!(flags.contains(&"dc".to_owned()), "{address:#x}: {flags:?}");
        }
    }
}
