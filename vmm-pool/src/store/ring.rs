//! Contents on their way between devices and the file, through a few slots of pinned host memory.
//!
//! ```text
//!   pause:   device --copy--> slot --writer threads--> file
//!   resume:  file --reader threads--> slot --copy--> device
//! ```
//!
//! The disk is the slowest part by far, so it is the one that never waits: while one slot is written or read,
//! the copies of the next run on the calling thread.

#![expect(unsafe_code, reason = "looks at host memory that the driver copies to and from")]

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Builder, Scope};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::chunk::{CHUNK_BYTES, Chunk};
use super::disk::{ContentsFile, Writer};
use super::places::Piece;
use crate::error::PoolResult;

/// Size of a slot: what is written or read in one piece.
pub(crate) const SLOT_BYTES: u64 = SLOT_LENGTH as u64;
/// The same.
pub(crate) const SLOT_LENGTH: usize = 32 << 20;
const SLOTS: usize = 8;
/// Threads that write, or read. One brings three quarters of what the disk can do, four nine tenths.
const FILE_THREADS: usize = 4;

const _: () = assert!(SLOT_BYTES * SLOTS as u64 == CHUNK_BYTES, "a ring is one chunk");

/// A part of the ring, in one hand at a time.
///
/// # Invariants
/// 1. Nobody else has a piece of its bytes, but for copies of the driver's.
/// 2. A thread that has the driver copy to or from them waits for that before the slot is passed on.
#[derive(Debug)]
pub(crate) struct Slot(Piece);

/// All slots of a ring, of which nobody has a piece.
pub(super) fn slots(ring: &Arc<Chunk>) -> Vec<Slot> {
    let part = |at| Slot(Piece::new(ring, at, 0..SLOT_BYTES));
    // INVARIANT: each is made once.
    (0..CHUNK_BYTES).step_by(SLOT_LENGTH).map(part).collect()
}

impl Slot {
    /// A part of it, by offset, for the driver to copy to or from.
    pub(crate) fn part(&self, part: Range<u64>) -> Piece {
        self.0.part(part)
    }

    fn bytes(&self, size_bytes: u64) -> Piece {
        self.part(0..size_bytes)
    }

    fn bytes_mut(&mut self, size_bytes: u64) -> &mut [u8] {
        let piece = self.bytes(size_bytes);
        // SAFETY: live as long as the slot and its own (invariant 1), no copy under way (2), and all of it can be read; the slot is
        // borrowed for it alone.
        unsafe { std::slice::from_raw_parts_mut(piece.start().as_ptr(), piece.bytes().len()) }
    }
}

fn length_of(place: &Range<u64>) -> u64 {
    place.end - place.start
}

fn spawn<'scope>(
    file: &ContentsFile,
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() + Send + 'scope,
) -> PoolResult<()> {
    let thread = Builder::new().name("sublet-file".to_owned()).spawn_scoped(scope, work);
    let refused = |source| file.refused("starting a thread for", &(0..0), source);
    thread.map(drop).map_err(refused)
}

/// A slot to be written.
#[derive(Debug)]
struct Filled {
    slot: Slot,
    place: Range<u64>,
    lengths_bytes: Vec<u64>,
}

/// Slots to be filled, and those that are being written.
#[derive(Debug)]
pub(crate) struct Writing {
    idle: Vec<Slot>,
    filled: Sender<Filled>,
    written: Receiver<(Option<Slot>, PoolResult<()>)>,
}

impl Writing {
    /// A slot to fill, as soon as there is one.
    ///
    /// # Errors
    /// Of a write that has failed meanwhile.
    pub(crate) fn take_slot(&mut self) -> PoolResult<Option<Slot>> {
        loop {
            if let Some(slot) = self.idle.pop() {
                return Ok(Some(slot));
            }
            let Ok((slot, written)) = self.written.recv() else {
                return Ok(None);
            };
            written?;
            self.idle.extend(slot);
        }
    }

    /// Has the first bytes of `slot` written to `place`: those of one allocation behind the other's, each as long as
    /// `lengths_bytes` say.
    pub(crate) fn write(&self, slot: Slot, place: Range<u64>, lengths_bytes: Vec<u64>) {
        // Writers end only when this end is closed.
        let _taken = self.filled.send(Filled { slot, place, lengths_bytes });
    }
}

/// Calls `fill`, while what it hands over is written. All is on the disk when this returns without an error, and
/// nothing is written any more in any case.
pub(crate) fn write_behind(
    file: &ContentsFile,
    slots: Vec<Slot>,
    fill: impl FnOnce(&mut Writing) -> PoolResult<()>,
) -> PoolResult<()> {
    std::thread::scope(|scope| {
        let (filled, to_write) = unbounded();
        let (tell, written) = unbounded();
        for _ in 0..FILE_THREADS {
            let (to_write, tell) = (to_write.clone(), tell.clone());
            spawn(file, scope, move || write_all(file, &to_write, &tell))?;
        }
        drop(tell);
        let mut writing = Writing { idle: slots, filled, written };
        let outcome = fill(&mut writing);
        let Writing { filled, written, idle: _ } = writing;
        drop(filled);
        // Until every writer has ended.
        written.iter().fold(outcome, |all, (_, outcome)| all.and(outcome))
    })?;
    file.finish()
}

fn write_all(
    file: &ContentsFile,
    to_write: &Receiver<Filled>,
    tell: &Sender<(Option<Slot>, PoolResult<()>)>,
) {
    let mut writer = Writer::default();
    for Filled { slot, place, lengths_bytes } in to_write {
        let filled = slot.bytes(length_of(&place));
        let written = writer.write(file, place.start, filled.bytes(), &lengths_bytes);
        // Nobody listens any more when another piece has failed.
        let _told = tell.send((Some(slot), written));
    }
    let _told = tell.send((None, writer.settle(file)));
}

/// Reads `places` and calls `each` with the index of every one and the slot that holds it, in any order. Nothing
/// is read any more when this returns.
pub(crate) fn read_ahead(
    file: &ContentsFile,
    slots: Vec<Slot>,
    places: &[Range<u64>],
    mut each: impl FnMut(usize, &Slot) -> PoolResult<()>,
) -> PoolResult<()> {
    std::thread::scope(|scope| {
        let (give, idle) = unbounded();
        for slot in slots {
            let _given = give.send(slot);
        }
        let (put, wanted) = unbounded();
        for place in places.iter().enumerate() {
            let _put = put.send(place);
        }
        drop(put);
        let (tell, filled) = unbounded();
        for _ in 0..FILE_THREADS {
            let (idle, wanted, tell) = (idle.clone(), wanted.clone(), tell.clone());
            spawn(file, scope, move || read_all(file, &idle, &wanted, &tell))?;
        }
        drop((idle, tell));
        for place in places {
            let Ok((index, slot, read)) = filled.recv() else {
                return Err(file.unreadable(place, io::ErrorKind::Interrupted.into()));
            };
            read?;
            each(index, &slot)?;
            // Readers that have found nothing more to read are gone.
            let _given = give.send(slot);
        }
        Ok(())
    })
}

fn read_all(
    file: &ContentsFile,
    idle: &Receiver<Slot>,
    wanted: &Receiver<(usize, &Range<u64>)>,
    tell: &Sender<(usize, Slot, PoolResult<()>)>,
) {
    for (index, place) in wanted {
        // The giver of slots is gone when another piece has failed.
        let Ok(mut slot) = idle.recv() else {
            return;
        };
        let read = file.read(place.start, slot.bytes_mut(length_of(place)), true);
        if tell.send((index, slot, read)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PoolError;
    use crate::store::chunk::{BringIn, new_chunk};
    use crate::store::disk::Disk;

    const PIECE_BYTES: u64 = 1 << 20;
    /// More than there are slots.
    const PIECES: u64 = 3 * SLOTS as u64;

    fn places() -> Vec<Range<u64>> {
        (0..PIECES).map(|index| index * PIECE_BYTES..(index + 1) * PIECE_BYTES).collect()
    }

    fn ring() -> Arc<Chunk> {
        Arc::new(
            new_chunk(&BringIn { toucher_threads: 1, nodes: Vec::new() }, CHUNK_BYTES).unwrap(),
        )
    }

    fn fill(slot: &mut Slot, place: &Range<u64>) {
        let value = u8::try_from(place.start / PIECE_BYTES + 1).unwrap();
        slot.bytes_mut(PIECE_BYTES).fill(value);
    }

    fn write_places(file: &ContentsFile, ring: &Arc<Chunk>) -> PoolResult<()> {
        write_behind(file, slots(ring), |writing| {
            for place in places() {
                let mut slot = writing.take_slot()?.expect("writers wait for more");
                fill(&mut slot, &place);
                writing.write(slot, place, vec![PIECE_BYTES]);
            }
            Ok(())
        })
    }

    #[test]
    fn every_piece_comes_back_through_fewer_slots_than_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let ring = ring();
        let mut disk = Disk::new();
        disk.set_dir(dir.path().to_owned());
        disk.reserve(&places()).unwrap();
        let file = &*disk.file().unwrap();
        write_places(file, &ring).unwrap();
        let mut seen = vec![false; places().len()];
        read_ahead(file, slots(&ring), &places(), |index, slot| {
            let value = u8::try_from(index + 1).unwrap();
            assert!(
                slot.bytes(PIECE_BYTES).bytes().iter().all(|byte| *byte == value),
                "piece {index}"
            );
            seen[index] = true;
            Ok(())
        })
        .unwrap();
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn a_full_disk_ends_the_writing_with_an_error_that_names_the_place() {
        let ring = ring();
        let error = write_places(&ContentsFile::full(), &ring).unwrap_err();
        let PoolError::FileRefused { size_bytes, source, .. } = &error else { panic!("{error}") };
        assert_eq!((*size_bytes, source.kind()), (PIECE_BYTES, io::ErrorKind::StorageFull));
    }

    #[test]
    fn a_piece_that_is_lost_on_its_way_to_the_disk_fails_the_writing() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let ring = ring();
        // The last one is its writer's last too: no piece after it settles it.
        for lost in [0, PIECES / 2, PIECES - 1] {
            let file = ContentsFile::broken_at(dir.path(), lost * PIECE_BYTES);
            let error = write_places(&file, &ring).unwrap_err();
            let PoolError::FileRefused { offset_bytes, .. } = &error else { panic!("{error}") };
            assert_eq!(*offset_bytes, lost * PIECE_BYTES, "{error}");
        }
    }

    #[test]
    fn what_the_last_flush_says_counts() {
        let ring = ring();
        let error = write_places(&ContentsFile::without_flush(), &ring).unwrap_err();
        assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    }

    #[test]
    fn what_fails_between_the_pieces_ends_the_reading() {
        let ring = ring();
        let dir = tempfile::tempdir().unwrap();
        let file = ContentsFile::over(tempfile::tempfile_in(&dir).unwrap(), dir.path().to_owned());
        write_places(&file, &ring).unwrap();
        let mut calls = 0;
        let outcome = read_ahead(&file, slots(&ring), &places(), |_, _| {
            calls += 1;
            if calls == 3 { Err(PoolError::NotOurs) } else { Ok(()) }
        });
        assert!(matches!(outcome, Err(PoolError::NotOurs)));
        assert_eq!(calls, 3);
    }
}
