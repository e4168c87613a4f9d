//! Saved contents from host memory into the pool's file, to make room for others: what a process that rests can do for one that is
//! about to.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Instant;

use super::WriteOut;
use crate::driver::Driver;
use crate::error::PoolResult;
use crate::ids::AllocationId;
use crate::pool::HostMemory;
use crate::store::{ALIGNMENT_BYTES, Extent, HostArena, Saved, Store};

/// The bytes that are written between two looks at the clock.
const AT_ONCE_BYTES: u64 = 64 << 20;

/// The bytes that one step has moved, and the bytes that are left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// Contents that went to the file, in bytes.
    pub moved_bytes: u64,
    /// Host memory that went back to the system, in bytes.
    pub given_back_bytes: u64,
    /// Contents that may still be moved, in bytes.
    pub left_bytes: u64,
}

impl<D: Driver> HostMemory<D> {
    /// Counts the bytes of saved contents in host memory that [`HostMemory::spill`] may move. They are those for which
    /// host memory would be given back. Does not block for long.
    pub fn movable_bytes(&self) -> u64 {
        let arena = self.arena();
        self.holdings.ledger().rows.movable(0, |at| arena.chunk_end(at)).1
    }

    /// Moves saved contents of memory that is away from host memory to the file, about `most_bytes` of them, and gives the
    /// chunks back that hold none any more. The file is that of [`HostMemory::set_file_dir`]. A resume finds them there. What
    /// somebody may be reading in place ([`crate::SavedContents::at`]) stays. To be called while no step of a pause or resume is under
    /// way, by the thread that takes those steps. Blocks for as long as the disk takes, and at `until` for no longer than it takes for 64 MiB: what has been
    /// written as a whole by then has moved. Ends in the same way, without an error, once it `is_called_off`, which is asked before each 64 MiB.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDisk`] and [`crate::PoolError::FileRefused`], also for an allocation that was not written by `until`: nothing has moved, and all
    /// contents are where they were;
    /// [`crate::PoolError::Driver`]: they have moved, and the host memory stays until the next pause.
    ///
    /// # Driver calls
    /// `cuMemHostUnregister`.
    pub fn spill(
        &self,
        most_bytes: u64,
        until: Instant,
        is_called_off: &dyn Fn() -> bool,
    ) -> PoolResult<Spilled> {
        let (moves, all_bytes, file) = {
            let mut arena = self.arena();
            let (moves, all_bytes) = {
                let rows = &self.holdings.ledger().rows;
                let (chosen, bytes) = rows.movable(most_bytes, |at| arena.chunk_end(at));
                (in_file(chosen, rows.end_in(Store::File)), bytes)
            };
            let places: Vec<_> = moves.iter().flat_map(|(_, to)| to.places()).collect();
            let reserved = arena.disk.reserve(&places);
            (moves, all_bytes, reserved.map(|()| arena.disk.file()))
        };
        let is_over = || is_called_off() || Instant::now() >= until;
        let written = file.and_then(|file| {
            let Some(file) = file else { return Ok(0) };
            let mut out = WriteOut::to(Arc::clone(&file));
            for (id, to) in &moves {
                let parts = to.extents.iter().map(|extent| (extent.part(), extent.at));
                out.add(*id, None, AT_ONCE_BYTES, parts);
            }
            let is_done = out.write_until(self, is_over)?;
            if let (0, Some((_, to))) = (out.whole(), moves.first())
                && !is_done
                && !is_called_off()
            {
                let why = "one allocation moves as a whole, and its time was over there: a faster disk would do";
                let (at, source) = (out.written_bytes(), io::Error::new(ErrorKind::TimedOut, why));
                return Err(file.refused("writing", &(at..at + to.bytes()), source));
            }
            // Until then the contents are those in host memory.
            out.finish().map(|()| out.whole())
        });
        let mut arena = self.arena();
        let whole = *written.as_ref().unwrap_or(&0);
        let moved = moves.into_iter().take(whole).map(|(id, to)| {
            // But for what was freed meanwhile, or somebody was given the place of.
            let bytes = to.bytes();
            if self.holdings.ledger().rows.spilled(id, to) { bytes } else { 0 }
        });
        let moved_bytes: u64 = moved.sum();
        drop(self.give_disk_back(&mut arena));
        written?;
        let before_bytes = arena.held_bytes();
        self.try_give_back_by(&mut arena, HostArena::shrink_to)?;
        let given_back_bytes = before_bytes.saturating_sub(arena.held_bytes());
        Ok(Spilled { moved_bytes, given_back_bytes, left_bytes: all_bytes - moved_bytes })
    }
}

/// Gives each of `chosen` its place in the file: behind `end_bytes`, each part of it at a whole page.
fn in_file(chosen: Vec<(AllocationId, Saved)>, mut end_bytes: u64) -> Vec<(AllocationId, Saved)> {
    let mut place = |extent: &Extent| {
        let at = end_bytes.next_multiple_of(ALIGNMENT_BYTES);
        // OVERFLOW: sizes of allocations that exist on one machine.
        end_bytes = at + extent.size_bytes;
        Extent { at, ..*extent }
    };
    let to_file = |(id, from): (AllocationId, Saved)| {
        let extents = from.extents.iter().map(&mut place).collect();
        (id, Saved { store: Store::File, extents, prints: None })
    };
    chosen.into_iter().map(to_file).collect()
}

#[cfg(all(test, feature = "sim"))]
mod tests;
