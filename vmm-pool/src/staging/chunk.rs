//! A chunk: mapped host memory, brought in by whoever writes it first.

#![expect(unsafe_code, reason = "writes to new host memory by address, from several threads")]

use std::io;
use std::ptr::NonNull;

use memmap2::{Advice, MmapOptions, MmapRaw};

const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4096;

/// A place in a chunk, for threads of ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostPlace(pub(super) NonNull<u8>);

// SAFETY: an address is plain data; who may touch the bytes there when is the business of the copies'
// safety contracts.
unsafe impl Send for HostPlace {}

#[derive(Debug)]
pub(super) struct Chunk {
    map: MmapRaw,
    /// First huge-page boundary inside `map`.
    start: HostPlace,
    pub(super) is_pinned: bool,
}

impl Chunk {
    /// Maps a chunk. Nothing is brought in yet.
    pub(super) fn map(length: usize) -> io::Result<Self> {
        let map = MmapRaw::from(MmapOptions::new().len(length + HUGE_PAGE_BYTES).map_anon()?);
        if let Err(error) = map.advise(Advice::HugePage) {
            tracing::debug!(%error, "no huge pages: the first pause will be slower");
        }
        let base = map.as_mut_ptr();
        let padding = base.align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        // SAFETY: the map is one huge page longer than the chunk, and `padding` at most that.
        let start = unsafe { base.add(padding) };
        let start = HostPlace(NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?);
        Ok(Self { map, start, is_pinned: false })
    }

    pub(super) fn start(&self) -> HostPlace {
        self.start
    }

    /// Keeps the memory mapped for good: unmapping it would pull it from under the driver.
    pub(super) fn keep(self) {
        let _kept = std::mem::ManuallyDrop::new(self.map);
    }

    /// Brings all pages in, by `threads` threads at once: one brings in 1.6 to 3 GiB/s, sixteen 57. The first
    /// byte of each page becomes 0.
    ///
    /// # Safety
    /// Nobody uses the chunk, and nothing is saved in it.
    pub(super) unsafe fn touch(&self, length: usize, threads: usize) {
        let share = length.div_ceil(threads.max(1)).next_multiple_of(HUGE_PAGE_BYTES);
        let base = self.start.0.as_ptr().expose_provenance();
        std::thread::scope(|scope| {
            for begin in (0..length).step_by(share) {
                let touch_share = move || {
                    for offset in (begin..(begin + share).min(length)).step_by(PAGE_BYTES) {
                        let page = std::ptr::with_exposed_provenance_mut::<u8>(base + offset);
                        // SAFETY: the page lies in the chunk, which nobody else uses before this returns.
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
}
