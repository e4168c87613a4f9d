//! Saved contents from host memory into the pool's file, to make room for others: what a process that rests can do for one that is
//! about to.

use std::time::Instant;

use crate::driver::Driver;
use crate::error::PoolResult;
use crate::ids::AllocationId;
use crate::pool::HostMemory;
use crate::store::{Extent, FILE_ALIGNMENT_BYTES, HostArena, Saved, Store};

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
            (moves, all_bytes, reserved.map(|()| arena.disk.file.clone()))
        };
        let written = file.and_then(|file| {
            let Some(file) = file else { return Ok(0) };
            let parts = |to: &Saved| to.extents.iter().map(|e| (e.part(), e.at)).collect();
            let all = moves.iter().map(|(id, to)| (*id, parts(to))).collect();
            // Until then the contents are those in host memory.
            file.write_out(all, &|id, part| self.part_of(id, part), until, is_called_off)
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
        let at = end_bytes.next_multiple_of(FILE_ALIGNMENT_BYTES);
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
