//! Saved contents into a file with a name, so that they outlive the process.
//!
//! ```text
//!   file:  [A saved ....][B saved | hole | saved][D saved ...]     each begins at a multiple of 4 KiB
//! ```
//!
//! An allocation has its whole size there; parts that nobody needs are holes. Nothing that is saved is changed. The
//! application may free what is still to be written, so each piece is looked up in the ledger.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

use crate::AllocationId;
use crate::driver::Driver;
use crate::error::PoolResult;
use crate::ledger::{Holding, Row};
use crate::pool::Pool;
use crate::store::{ALIGNMENT_BYTES, ContentsFile, Located, Writer};

/// The bytes that are read and written in one piece. Between two pieces others have their turn at the arena, and the
/// time is looked at.
const PIECE_LENGTH: usize = 8 << 20;

/// One allocation's place in the file.
#[derive(Clone, Debug)]
struct FilePlace {
    id: AllocationId,
    /// The offset in the file where the allocation begins.
    offset_bytes: u64,
    /// Parts of it to be written, by offset.
    parts: Vec<Range<u64>>,
    /// Of the bytes written so far.
    sum: crc32fast::Hasher,
}

/// Writes saved contents to a file, a while at a time. Between its making and its end no pause or resume of the pool
/// may begin: it would put other contents in the same places.
#[derive(Debug)]
pub struct WriteOut {
    file: ContentsFile,
    /// By index of the holding; none for those that have nothing saved, or were freed before all of it was written.
    places: Vec<Option<FilePlace>>,
    /// The position of the next piece to write: index of the holding, and part of it by offset.
    next: Cursor,
    total_bytes: u64,
    written_bytes: u64,
    writer: Writer,
    buffer: Vec<u8>,
}

/// The position that the writing has reached.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    holding: usize,
    part: usize,
    /// Into the part.
    offset_bytes: u64,
}

/// The place and the checksum of an allocation's contents in a file that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The offset in the file where the allocation begins.
    pub offset_bytes: u64,
    /// CRC-32 (as of zlib) of its saved parts, one behind the other.
    pub crc32: u32,
}

impl WriteOut {
    /// Lays `holdings` out in `file`, which is empty and lies in `dir`. Nothing is written yet.
    ///
    /// # Errors
    /// [`crate::PoolError::FileRefused`], also when the process may not write files as large as that.
    pub fn new(holdings: &[Holding], file: File, dir: PathBuf) -> PoolResult<Self> {
        let mut end_bytes = 0_u64;
        let places: Vec<_> =
            holdings.iter().map(|holding| place(holding, &mut end_bytes)).collect();
        let file = ContentsFile::over(file, dir);
        file.extend_to(end_bytes)?;
        Ok(Self::into(file, places))
    }

    fn into(file: ContentsFile, places: Vec<Option<FilePlace>>) -> Self {
        let parts = places.iter().flatten().flat_map(|place| &place.parts);
        Self {
            file,
            next: Cursor::default(),
            total_bytes: parts.map(|part| part.end - part.start).sum(),
            places,
            written_bytes: 0,
            writer: Writer::default(),
            buffer: Vec::new(),
        }
    }

    /// Returns the number of bytes to write, without those that were freed before.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the number of bytes that are written so far.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Returns the place of the contents of holding `index` in the file. None when nothing of it is saved, or it was
    /// freed before all of it was written. Its checksum is that of what is written so far.
    pub fn written(&self, index: usize) -> Option<Written> {
        let place = self.places.get(index)?.as_ref()?;
        Some(Written { offset_bytes: place.offset_bytes, crc32: place.sum.clone().finalize() })
    }

    /// Writes on until `until`, one piece at least. True when all is on the disk.
    ///
    /// # Errors
    /// [`crate::PoolError::FileRefused`], [`crate::PoolError::FileUnreadable`]; the file is of no use then.
    pub fn write_on<D: Driver>(&mut self, pool: &Pool<D>, until: Instant) -> PoolResult<bool> {
        while let Some((index, piece)) = self.next_piece() {
            if !self.write_piece(pool, index, &piece)? {
                self.pass_over(index, piece.start);
                continue;
            }
            if Instant::now() >= until && self.written_bytes < self.total_bytes {
                return Ok(false);
            }
        }
        self.writer.settle(&self.file)?;
        self.buffer = Vec::new();
        self.file.finish()?;
        Ok(true)
    }

    /// The next piece to write: of which holding, and where in it. Moves the cursor behind it.
    fn next_piece(&mut self) -> Option<(usize, Range<u64>)> {
        while self.next.holding < self.places.len() {
            let place = self.places[self.next.holding].as_ref();
            let part = place.and_then(|place| place.parts.get(self.next.part));
            let Some(part) = part else {
                self.next = Cursor { holding: self.next.holding + 1, ..Cursor::default() };
                continue;
            };
            let begin = part.start + self.next.offset_bytes;
            let end = part.end.min(begin + PIECE_LENGTH as u64);
            if begin < end {
                self.next.offset_bytes += end - begin;
                return Some((self.next.holding, begin..end));
            }
            self.next.part += 1;
            self.next.offset_bytes = 0;
        }
        None
    }

    /// Holding `index` is gone, of which all is written before `offset_bytes`: what follows in the file is left as it is.
    fn pass_over(&mut self, index: usize, offset_bytes: u64) {
        let Some(place) = self.places.get_mut(index).and_then(Option::take) else { return };
        for part in place.parts {
            let done = offset_bytes.clamp(part.start, part.end) - part.start;
            self.written_bytes -= done;
            self.total_bytes -= part.end - part.start;
        }
    }

    /// False when the allocation is gone.
    fn write_piece<D: Driver>(
        &mut self,
        pool: &Pool<D>,
        index: usize,
        piece: &Range<u64>,
    ) -> PoolResult<bool> {
        let Some(place) = self.places.get_mut(index).and_then(Option::as_mut) else {
            return Ok(false);
        };
        self.buffer.resize(PIECE_LENGTH, 0);
        let size_bytes = piece.end - piece.start;
        let length = usize::try_from(size_bytes).unwrap_or(PIECE_LENGTH).min(PIECE_LENGTH);
        let bytes = &mut self.buffer[..length];
        let (located, kept) = {
            // While it is held, no memory of saved contents goes elsewhere. What is located does not go back to the system either, and a
            // pager puts nothing in its place.
            let arena = pool.host_memory().arena();
            let mut ledger = pool.ledger();
            let saved = ledger.rows.by_id(place.id).and_then(Row::saved).cloned();
            let Some(saved) = saved else { return Ok(false) };
            let located = arena.locate(&saved, piece.start..piece.start + length as u64)?;
            (located, ledger.keep_places(vec![saved]))
        };
        Located::read(&located, bytes)?;
        drop(kept);
        place.sum.update(bytes);
        let at = place.offset_bytes + piece.start..place.offset_bytes + piece.end;
        // Again, for a limit may have been set since: the kernel would end the process.
        self.file.check_limit(at.end)?;
        self.writer.write(&self.file, at.start, bytes, &[])?;
        self.written_bytes += size_bytes;
        Ok(true)
    }
}

/// The place of `holding` behind `end_bytes`, which moves on.
fn place(holding: &Holding, end_bytes: &mut u64) -> Option<FilePlace> {
    if holding.saved_parts.is_empty() {
        return None;
    }
    // OVERFLOW: sizes of allocations that exist on one machine.
    let offset_bytes = end_bytes.next_multiple_of(ALIGNMENT_BYTES);
    *end_bytes = offset_bytes + holding.size_bytes;
    let (parts, sum) = (holding.saved_parts.clone(), crc32fast::Hasher::new());
    Some(FilePlace { id: holding.id, offset_bytes, parts, sum })
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::deferred::Physical;
    use crate::driver::sim::{SimDriver, SimNode, SimOptions};
    use crate::driver::{AllocationProp, DeviceOrdinal, RawHandle};
    use crate::error::PoolError;
    use crate::ledger::{NewRow, Origin};
    use crate::store::{Saved, Store};
    use crate::{AllocationId, Class, HoldingSource};

    const ID: AllocationId = AllocationId([7; 16]);

    fn holding(size_bytes: u64, parts: &[Range<u64>]) -> Holding {
        Holding {
            id: ID,
            class: Class::default(),
            device: None,
            size_bytes,
            ranges: Vec::new(),
            source: HoldingSource::Own { importers: Vec::new() },
            is_resident: false,
            saved_parts: parts.to_vec(),
        }
    }

    fn placed(holdings: &[Holding]) -> Vec<Option<FilePlace>> {
        let mut end_bytes = 0;
        holdings.iter().map(|holding| place(holding, &mut end_bytes)).collect()
    }

    #[test]
    fn allocations_begin_at_whole_pages_and_what_is_not_saved_has_no_place() {
        let parts = [0..5000, 9000..10_000];
        let whole = Range { start: 0, end: 4096 };
        let holdings = [
            holding(10_000, &parts),
            holding(8192, &[]),
            holding(4096, std::slice::from_ref(&whole)),
        ];
        let places = placed(&holdings);
        let offsets: Vec<_> = places.iter().map(|p| p.as_ref().map(|p| p.offset_bytes)).collect();
        assert_eq!(offsets, [Some(0), None, Some(12_288)]);
        let mut out = WriteOut::into(ContentsFile::full(), places);
        assert_eq!(out.total_bytes(), 10_096);
        let pieces: Vec<_> = std::iter::from_fn(|| out.next_piece()).collect();
        assert_eq!(pieces, [(0, 0..5000), (0, 9000..10_000), (2, whole)]);
    }

    #[test]
    fn large_parts_are_written_piece_by_piece() {
        let piece = PIECE_LENGTH as u64;
        let large = Range { start: 100, end: 2 * piece + 300 };
        let mut out = WriteOut::into(ContentsFile::full(), placed(&[holding(3 * piece, &[large])]));
        let pieces: Vec<_> = std::iter::from_fn(|| out.next_piece()).collect();
        let ends = [100, 100 + piece, 100 + 2 * piece, 300 + 2 * piece];
        let expected: Vec<_> = ends.windows(2).map(|pair| (0, pair[0]..pair[1])).collect();
        assert_eq!(pieces, expected);
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_place() {
        let node = SimNode::private(&[64 << 20]).unwrap();
        let driver = std::sync::Arc::new(SimDriver::new(node, SimOptions::default()));
        let (pool, _keeper) = Pool::new(driver, 1, Vec::new);
        pool.host_memory().arena().disk.use_full();
        let full = holding(4096, &[Range { start: 0, end: 4096 }]);
        let (prop, class) = (AllocationProp::pinned_on(DeviceOrdinal(0)), Class::default());
        let (size_bytes, origin) = (full.size_bytes, Origin::Own);
        let new = NewRow { id: ID, size_bytes, prop, origin, class };
        let row = pool.ledger().rows.insert(new, Physical::new(RawHandle(1), size_bytes, None));
        // What is read there is zeros.
        pool.ledger().saved(row, Saved::whole(Store::File, 0, size_bytes));
        let mut out = WriteOut::into(ContentsFile::full(), placed(&[full]));
        let error = out.write_on(&pool, Instant::now()).unwrap_err();
        assert!(matches!(&error, PoolError::FileRefused { size_bytes: 4096, .. }), "{error}");
        assert!(error.to_string().contains("No space left on device"), "{error}");
    }
}
