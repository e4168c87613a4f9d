//! Saved contents from host memory into the file, to make room for others: what a process that rests can do for one that is
//! about to.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::VirtualHandle;
use crate::driver::Driver;
use crate::error::{Describe, PoolError, PoolResult};
use crate::pool::HostMemory;
use crate::store::{
    ALIGNMENT_BYTES, ContentsFile, Extent, HostArena, Piece, SLOT_BYTES, SLOT_LENGTH, Saved, Store,
    Writer,
};

/// The bytes that are written between two looks at the clock: whole pages.
const AT_ONCE_BYTES: usize = 2 * SLOT_LENGTH;

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
        let is_over = || is_called_off() || Instant::now() >= until;
        let (mut moves, all_bytes, portions, file, kept) = {
            let mut arena = self.arena();
            let (chosen, all_bytes) =
                self.holdings.ledger().rows.movable(most_bytes, |at| arena.chunk_end(at));
            let moves = in_file(chosen, self.holdings.ledger().rows.end_in(Store::File));
            let places: Vec<_> = moves.iter().flat_map(|(_, _, to)| to.places()).collect();
            // Taken now: what is freed meanwhile stays where it is until it is written, and a pager puts nothing in its place.
            let kept = moves.iter().map(|(_, from, _)| from.clone()).collect();
            let kept = self.holdings.ledger().keep_places(kept);
            let portions = moves.iter().map(|(_, from, to)| in_portions(&arena, from, to));
            let portions: Vec<_> = portions.collect();
            let reserved = arena.disk.reserve(&places);
            (moves, all_bytes, portions, reserved.map(|()| arena.disk.file()), kept)
        };
        let written = file.and_then(|file| {
            let Some(file) = file else { return Ok(()) };
            let (mut count, mut writer) = (0, Writer::default());
            for ((_, from, _), portions) in moves.iter().zip(portions) {
                match write_whole(&file, &mut writer, &portions, &is_over)? {
                    None => count += 1,
                    Some(_) if count > 0 || is_called_off() => break,
                    Some(written_bytes) => {
                        return Err(too_slow(&self.file_dir(), from, written_bytes));
                    }
                }
            }
            moves.truncate(count);
            // Until then the contents are those in host memory.
            writer.settle(&file)?;
            file.finish()
        });
        drop(kept);
        let mut moved_bytes = 0;
        let mut arena = self.arena();
        if written.is_ok() {
            let mut ledger = self.holdings.ledger();
            // But for what was freed meanwhile, or somebody was given the place of.
            let moved = moves.into_iter().filter_map(|(row, from, to)| {
                ledger.rows.spilled(row, to).then(|| bytes_of(&from))
            });
            moved_bytes = moved.sum();
        }
        let live: Vec<Range<u64>> = self.holdings.ledger().places_in(Store::File);
        drop(arena.disk.keep_only(&live));
        written?;
        let end_bytes = self.holdings.ledger().rows.end_in(Store::Host);
        let before_bytes = arena.held_bytes();
        if let Some(&device) = self.holdings.devices().first() {
            let about = || "giving host memory back".to_owned();
            self.devices.driver.make_current(device).about(about, 0, Some(device))?;
            arena.shrink_to(end_bytes)?;
        }
        let given_back_bytes = before_bytes.saturating_sub(arena.held_bytes());
        Ok(Spilled { moved_bytes, given_back_bytes, left_bytes: all_bytes - moved_bytes })
    }
}

/// Pieces of host memory that are written between two looks at the clock, and where in the file each goes.
type Portion = Vec<(u64, Piece)>;

/// All contents of one allocation, where they lie and where they go.
fn in_portions<D: Driver>(arena: &HostArena<D>, from: &Saved, to: &Saved) -> Vec<Portion> {
    let mut portions = Vec::new();
    for (from, to) in from.extents.iter().zip(&*to.extents) {
        for done in (0..from.size_bytes).step_by(AT_ONCE_BYTES) {
            let end = from.size_bytes.min(done.saturating_add(AT_ONCE_BYTES as u64));
            let pieces = arena.pieces_of(&(from.at + done..from.at + end)).into_iter();
            portions.push(pieces.map(|piece| (to.at + done + piece.part.start, piece)).collect());
        }
    }
    portions
}

/// Writes all contents of one allocation. If it `is_over` before, how much is written.
fn write_whole(
    file: &ContentsFile,
    writer: &mut Writer,
    portions: &[Portion],
    is_over: &dyn Fn() -> bool,
) -> PoolResult<Option<u64>> {
    let mut written_bytes = 0;
    for portion in portions {
        if is_over() {
            return Ok(Some(written_bytes));
        }
        for (to, piece) in portion {
            for (part, bytes) in (0..).zip(piece.bytes().chunks(SLOT_LENGTH)) {
                let length_bytes = bytes.len() as u64;
                writer.write(file, to + part * SLOT_BYTES, bytes, &[length_bytes])?;
                written_bytes += length_bytes;
            }
        }
    }
    Ok(None)
}

fn bytes_of(saved: &Saved) -> u64 {
    saved.extents.iter().map(|extent| extent.size_bytes).sum()
}

/// One allocation, which moves as a whole, was not written in time.
fn too_slow(dir: &Path, saved: &Saved, written_bytes: u64) -> PoolError {
    PoolError::FileRefused {
        operation: "writing",
        dir: dir.to_owned(),
        offset_bytes: written_bytes,
        size_bytes: bytes_of(saved),
        source: io::Error::new(
            io::ErrorKind::TimedOut,
            "one allocation moves as a whole, and its time was over there: a faster disk would do",
        ),
    }
}

/// Gives each of `chosen` its place in the file: behind `end_bytes`, each part of it at a whole page.
fn in_file(
    chosen: Vec<(VirtualHandle, Saved)>,
    mut end_bytes: u64,
) -> Vec<(VirtualHandle, Saved, Saved)> {
    let to_file = |(row, from): (VirtualHandle, Saved)| {
        let extents: Arc<[Extent]> = from
            .extents
            .iter()
            .map(|extent| {
                let at = end_bytes.next_multiple_of(ALIGNMENT_BYTES);
                // OVERFLOW: sizes of allocations that exist on one machine.
                end_bytes = at + extent.size_bytes;
                Extent { at, ..*extent }
            })
            .collect();
        (row, from, Saved { store: Store::File, extents, prints: None })
    };
    chosen.into_iter().map(to_file).collect()
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
    use crate::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, VaRange};
    use crate::{Class, Copies, HostBudget, Pool, Schedule, Selection};

    #[test]
    fn what_the_disk_loses_before_its_flush_has_not_moved() {
        const GPU: DeviceOrdinal = DeviceOrdinal(0);
        let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
        driver.make_current(GPU).unwrap();
        let (pool, keeper) = Pool::new(Arc::new(driver), 1, Vec::new);
        let (entered, prop) = (pool.enter(), AllocationProp::pinned_on(GPU));
        let handle = entered.create(GRANULARITY_BYTES, &prop, Class::default()).unwrap();
        let start = pool.driver().reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
        let range = VaRange::new(start, GRANULARITY_BYTES);
        entered.map(range, 0, handle).unwrap();
        entered.set_access(range, &[AccessDesc::read_write(GPU)]).unwrap();
        drop(entered);
        pool.driver().core().fill_device(GPU, range, &[7; 16]).unwrap();
        let soon = Instant::now() + Duration::from_mins(1);
        let drained = keeper.close().unwrap().drain(soon, &crossbeam_channel::never());
        let (quiesced, _) = drained.unwrap();
        let saved = quiesced.prepare(
            Selection::Whole,
            &[],
            Copies::All,
            |_| HostBudget(None),
            Schedule::SaveFirst,
        );
        drop(saved.unwrap().0.depart().release(Schedule::SaveMeanwhile).unwrap());
        let before = pool.report().host_arena_bytes;
        pool.host_memory().arena().disk.use_without_flush();
        let error = pool.host_memory().spill(u64::MAX, soon, &|| false).unwrap_err();
        assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
        let report = pool.report();
        assert_eq!((report.host_arena_bytes, report.spilled_bytes), (before, 0));
        let mut bytes = [0; 16];
        pool.saved().read(start, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 16]);
    }
}
