//! Moves saved contents from host memory to the pool's file, to make room for others. A paused process can do so for a
//! process that is about to pause.

use std::time::Instant;

use crate::driver::Driver;
use crate::error::PoolResult;
use crate::ids::AllocationId;
use crate::pool::HostMemory;
use crate::store::{Extent, FILE_ALIGNMENT_BYTES, HostArena, Saved, Store};

/// The bytes that one call of [`HostMemory::spill`] has moved, and the bytes that are left.
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
    /// Counts the bytes of saved contents in host memory that [`HostMemory::spill`] may move. Moving them would free
    /// host memory. Does not block for long.
    pub fn movable_bytes(&self) -> u64 {
        let arena = self.arena();
        self.holdings.ledger().rows.movable(0, |at| arena.chunk_end(at)).1
    }

    /// Moves saved contents from host memory to the file, about `most_bytes` of them. Their memory is off its device.
    /// Then gives back the chunks that hold no more contents. The file is that of [`HostMemory::set_file_dir`]. A
    /// resume finds the contents there. Contents that somebody may be reading in place ([`crate::SavedContents::at`])
    /// stay.
    ///
    /// Call it while no step of a pause or resume is under way, on the thread that takes those steps. Blocks for the
    /// disk, and after `until` for no longer than the disk needs for 64 MiB. Allocations that are wholly written by
    /// then have moved. Ends in the same way, without an error, once `is_called_off` returns true, which is called
    /// before each 64 MiB.
    ///
    /// # Errors
    /// [`crate::PoolError::OutOfDisk`] and [`crate::PoolError::FileRefused`], also if the first allocation was not
    /// written by `until`: nothing has moved, and all contents are where they were; [`crate::PoolError::Driver`]: they
    /// have moved, and the host memory stays until the next pause.
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
            // Until the rows are changed below, the contents in host memory count.
            file.write_out(all, &|id, part| self.part_of(id, part), until, is_called_off)
        });
        let mut arena = self.arena();
        let whole = *written.as_ref().unwrap_or(&0);
        let moved = moves.into_iter().take(whole).map(|(id, to)| {
            // Except allocations that were freed meanwhile, or whose place somebody was given.
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

/// Assigns each of `chosen` a place in the file, behind `end_bytes`. Each part begins at a whole page.
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
