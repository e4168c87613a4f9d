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
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::thread::{Builder, Scope};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::arena::Held;
use super::chunk::CHUNK_BYTES;
use super::disk::{ContentsFile, Writer};
use crate::error::PoolResult;

/// Size of a slot: what is written or read at once.
pub(crate) const SLOT_BYTES: u64 = 32 << 20;
const SLOT_LENGTH: usize = 32 << 20;
const SLOTS: usize = 8;
/// Threads that write, or read. One brings three quarters of what the disk can do, four nine tenths.
const FILE_THREADS: usize = 4;

const _: () = assert!(SLOT_BYTES * SLOTS as u64 == CHUNK_BYTES, "a ring is one chunk");

/// One chunk, cut into slots.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) held: Held,
}

/// A part of the ring, in one hand at a time.
///
/// # Invariants
/// 1. `start` is the first of [`SLOT_BYTES`] bytes that live as long as `'r`, and that no other slot has.
/// 2. Whoever has the driver copy to or from them waits for that before the slot is passed on.
#[derive(Debug)]
pub(crate) struct Slot<'r> {
    start: NonNull<u8>,
    ring: PhantomData<&'r mut Ring>,
}

// SAFETY: a slot is plain memory that nobody else touches (invariants 1 and 2), wherever it is sent.
unsafe impl Send for Slot<'_> {}

impl Ring {
    /// All slots.
    pub(super) fn slots(&mut self) -> Vec<Slot<'_>> {
        let start = self.held.chunk.start;
        let slot = |index| {
            // SAFETY: the chunk has `SLOTS` times this length.
            let start = unsafe { start.add(index * SLOT_LENGTH) };
            // INVARIANT: each is made once while the ring is borrowed.
            Slot { start, ring: PhantomData }
        };
        (0..SLOTS).map(slot).collect()
    }
}

impl Slot<'_> {
    /// Where the driver copies to or from: `offset` bytes into the slot.
    pub(crate) fn at(&self, offset_bytes: u64) -> NonNull<u8> {
        let offset = length_within(offset_bytes);
        // SAFETY: inside the slot.
        unsafe { self.start.add(offset) }
    }

    fn bytes(&self, size_bytes: u64) -> &[u8] {
        let length = length_within(size_bytes);
        // SAFETY: live and this slot's own (invariant 1), written from its making on, no copy under way (2).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), length) }
    }

    fn bytes_mut(&mut self, size_bytes: u64) -> &mut [u8] {
        let length = length_within(size_bytes);
        // SAFETY: as in `bytes`; the slot is borrowed for it alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), length) }
    }
}

/// The same number of bytes, which a slot has.
fn length_within(size_bytes: u64) -> usize {
    let length = usize::try_from(size_bytes).unwrap_or(usize::MAX);
    assert!(length <= SLOT_LENGTH, "longer than a slot");
    length
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
struct Filled<'r> {
    slot: Slot<'r>,
    place: Range<u64>,
    lengths_bytes: Vec<u64>,
}

/// Slots to be filled, and those that are being written.
#[derive(Debug)]
pub(crate) struct Writing<'r> {
    idle: Vec<Slot<'r>>,
    filled: Sender<Filled<'r>>,
    written: Receiver<(Option<Slot<'r>>, PoolResult<()>)>,
}

impl<'r> Writing<'r> {
    /// A slot to fill, as soon as there is one.
    ///
    /// # Errors
    /// Of a write that has failed meanwhile.
    pub(crate) fn take_slot(&mut self) -> PoolResult<Option<Slot<'r>>> {
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
    pub(crate) fn write(&self, slot: Slot<'r>, place: Range<u64>, lengths_bytes: Vec<u64>) {
        // Writers end only when this end is closed.
        let _taken = self.filled.send(Filled { slot, place, lengths_bytes });
    }
}

/// Calls `fill`, while what it hands over is written. All is on the disk when this returns without an error, and
/// nothing is written any more in any case.
pub(super) fn write_behind<'r>(
    file: &ContentsFile,
    slots: Vec<Slot<'r>>,
    fill: impl FnOnce(&mut Writing<'r>) -> PoolResult<()>,
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

fn write_all<'r>(
    file: &ContentsFile,
    to_write: &Receiver<Filled<'r>>,
    tell: &Sender<(Option<Slot<'r>>, PoolResult<()>)>,
) {
    let mut writer = Writer::default();
    for Filled { slot, place, lengths_bytes } in to_write {
        let bytes = slot.bytes(length_of(&place));
        let written = writer.write(file, place.start, bytes, &lengths_bytes);
        // Nobody listens any more when another piece has failed.
        let _told = tell.send((Some(slot), written));
    }
    let _told = tell.send((None, writer.settle(file)));
}

/// Reads `places` and calls `each` with the index of every one and the slot that holds it, in any order. Nothing
/// is read any more when this returns.
pub(super) fn read_ahead<'r>(
    file: &ContentsFile,
    slots: Vec<Slot<'r>>,
    places: &[Range<u64>],
    mut each: impl FnMut(usize, &Slot<'r>) -> PoolResult<()>,
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

fn read_all<'r>(
    file: &ContentsFile,
    idle: &Receiver<Slot<'r>>,
    wanted: &Receiver<(usize, &Range<u64>)>,
    tell: &Sender<(usize, Slot<'r>, PoolResult<()>)>,
) {
    for (index, place) in wanted {
        // Whoever gives slots is gone when another piece has failed.
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
    use crate::store::Pins;
    use crate::store::chunk::{BringIn, new_chunk};
    use crate::store::disk::Disk;

    const PIECE_BYTES: u64 = 1 << 20;
    /// More than there are slots.
    const PIECES: u64 = 3 * SLOTS as u64;

    fn places() -> Vec<Range<u64>> {
        (0..PIECES).map(|index| index * PIECE_BYTES..(index + 1) * PIECE_BYTES).collect()
    }

    fn ring() -> Ring {
        let chunk =
            new_chunk(&BringIn { toucher_threads: 1, nodes: Vec::new() }, CHUNK_BYTES).unwrap();
        Ring { held: Held { chunk, pins: Pins::Nobody } }
    }

    fn fill(slot: &mut Slot<'_>, place: &Range<u64>) {
        let value = u8::try_from(place.start / PIECE_BYTES + 1).unwrap();
        slot.bytes_mut(PIECE_BYTES).fill(value);
    }

    fn write_places(file: &ContentsFile, ring: &mut Ring) -> PoolResult<()> {
        write_behind(file, ring.slots(), |writing| {
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
        let mut ring = ring();
        let mut disk = Disk::new();
        disk.set_dir(dir.path().to_owned());
        disk.reserve(&places()).unwrap();
        let file = disk.file().unwrap();
        write_places(file, &mut ring).unwrap();
        let mut seen = vec![false; places().len()];
        read_ahead(file, ring.slots(), &places(), |index, slot| {
            let value = u8::try_from(index + 1).unwrap();
            assert!(slot.bytes(PIECE_BYTES).iter().all(|byte| *byte == value), "piece {index}");
            seen[index] = true;
            Ok(())
        })
        .unwrap();
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn a_full_disk_ends_the_writing_with_an_error_that_names_the_place() {
        let mut ring = ring();
        let error = write_places(&ContentsFile::full(), &mut ring).unwrap_err();
        let PoolError::FileRefused { size_bytes, source, .. } = &error else { panic!("{error}") };
        assert_eq!((*size_bytes, source.kind()), (PIECE_BYTES, io::ErrorKind::StorageFull));
    }

    #[test]
    fn a_piece_that_is_lost_on_its_way_to_the_disk_fails_the_writing() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut ring = ring();
        // The last one is its writer's last too: no piece after it settles it.
        for lost in [0, PIECES / 2, PIECES - 1] {
            let file = ContentsFile::broken_at(dir.path(), lost * PIECE_BYTES);
            let error = write_places(&file, &mut ring).unwrap_err();
            let PoolError::FileRefused { offset_bytes, .. } = &error else { panic!("{error}") };
            assert_eq!(*offset_bytes, lost * PIECE_BYTES, "{error}");
        }
    }

    #[test]
    fn what_the_last_flush_says_counts() {
        let mut ring = ring();
        let error = write_places(&ContentsFile::without_flush(), &mut ring).unwrap_err();
        assert!(matches!(error, PoolError::FileRefused { operation: "writing", .. }), "{error}");
    }

    #[test]
    fn what_fails_between_the_pieces_ends_the_reading() {
        let mut ring = ring();
        let dir = tempfile::tempdir().unwrap();
        let file = ContentsFile::over(tempfile::tempfile_in(&dir).unwrap(), dir.path().to_owned());
        write_places(&file, &mut ring).unwrap();
        let mut calls = 0;
        let outcome = read_ahead(&file, ring.slots(), &places(), |_, _| {
            calls += 1;
            if calls == 3 { Err(PoolError::NotOurs) } else { Ok(()) }
        });
        assert!(matches!(outcome, Err(PoolError::NotOurs)));
        assert_eq!(calls, 3);
    }
}
