//! Saved contents on their way to a file, an allocation and a piece at a time: to one with a name, so that they outlive the process,
//! or to the pool's own.
//!
//! ```text
//!   named file:  [A saved ....][B saved | hole | saved][D saved ...]     each begins at a multiple of 4 KiB
//! ```
//!
//! In a named file an allocation has its whole size; parts that nobody needs are holes. Nothing that is saved is changed. The
//! application may free what is still to be written, so each piece is looked up in the ledger.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::driver::Driver;
use crate::error::PoolResult;
use crate::ids::AllocationId;
use crate::ledger::{Holding, Row};
use crate::pool::{HostMemory, Pool};
use crate::store::{ALIGNMENT_BYTES, ContentsFile, Located, SLOT_LENGTH, Saved, Writer};

/// The bytes that are written to a named file in one piece. Between two pieces others have their turn at the arena, and the
/// time is looked at.
const PIECE_BYTES: u64 = 8 << 20;

/// An allocation whose contents go to the file.
#[derive(Debug)]
struct Outgoing {
    id: AllocationId,
    /// The offset in the file where the allocation begins.
    offset_bytes: u64,
    written_bytes: u64,
    /// Of the bytes written so far. None where the file has checksums of its own.
    sum: Option<crc32fast::Hasher>,
}

/// A piece: a part of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    /// The index of the allocation.
    source: usize,
    part: Range<u64>,
    /// The offset in the file.
    at: u64,
}

/// Writes saved contents to a file, a while at a time. Between its making and its end no pause or resume of the pool
/// may begin: it would put other contents in the same places.
#[derive(Debug)]
pub struct WriteOut {
    file: Arc<ContentsFile>,
    /// None for those that have nothing saved, or were freed before all of it was written.
    sources: Vec<Option<Outgoing>>,
    /// The pieces that are not written yet, in order.
    left: VecDeque<Stretch>,
    writer: Writer,
    buffer: Vec<u8>,
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
        let (out, end_bytes) = Self::laid_out(holdings, ContentsFile::over(file, dir));
        out.file.extend_to(end_bytes)?;
        Ok(out)
    }

    /// The end of the file too.
    fn laid_out(holdings: &[Holding], file: ContentsFile) -> (Self, u64) {
        let (mut out, mut end_bytes) = (Self::to(Arc::new(file)), 0_u64);
        for Holding { id, size_bytes, saved_parts, .. } in holdings {
            if saved_parts.is_empty() {
                out.sources.push(None);
                continue;
            }
            // OVERFLOW: sizes of allocations that exist on one machine.
            let begin = end_bytes.next_multiple_of(ALIGNMENT_BYTES);
            end_bytes = begin + size_bytes;
            let places = saved_parts.iter().map(|part| (part.clone(), begin + part.start));
            out.add(*id, Some(begin), PIECE_BYTES, places);
        }
        (out, end_bytes)
    }

    /// Nothing yet, to `file`.
    pub(super) fn to(file: Arc<ContentsFile>) -> Self {
        let (sources, left) = Default::default();
        Self { file, sources, left, writer: Writer::default(), buffer: Vec::new() }
    }

    /// Adds an allocation: parts of it, each with the offset in the file where it goes, in pieces of so many bytes. One that begins
    /// somewhere in the file has a checksum of its own.
    pub(super) fn add(
        &mut self,
        id: AllocationId,
        begin: Option<u64>,
        piece_bytes: u64,
        parts: impl Iterator<Item = (Range<u64>, u64)>,
    ) {
        let source = self.sources.len();
        for (part, at) in parts {
            let pieces = part.clone().step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX));
            self.left.extend(pieces.map(|start| Stretch {
                source,
                part: start..part.end.min(start + piece_bytes),
                at: at + (start - part.start),
            }));
        }
        let (offset_bytes, sum) = (begin.unwrap_or(0), begin.map(|_| crc32fast::Hasher::new()));
        self.sources.push(Some(Outgoing { id, offset_bytes, written_bytes: 0, sum }));
    }

    /// Returns the number of bytes to write, without those that were freed before.
    pub fn total_bytes(&self) -> u64 {
        let left = self.left.iter().filter(|piece| self.sources[piece.source].is_some());
        self.written_bytes() + left.map(|piece| piece.part.end - piece.part.start).sum::<u64>()
    }

    /// Returns the number of bytes that are written so far.
    pub fn written_bytes(&self) -> u64 {
        self.sources.iter().flatten().map(|source| source.written_bytes).sum()
    }

    /// Returns the place of the contents of holding `index` in the file. None when nothing of it is saved, or it was
    /// freed before all of it was written. Its checksum is that of what is written so far.
    pub fn written(&self, index: usize) -> Option<Written> {
        let Outgoing { offset_bytes, sum, .. } = self.sources.get(index)?.as_ref()?;
        Some(Written { offset_bytes: *offset_bytes, crc32: sum.clone()?.finalize() })
    }

    /// Writes on until `until`, one piece at least. True when all is on the disk.
    ///
    /// # Errors
    /// [`crate::PoolError::FileRefused`], [`crate::PoolError::FileUnreadable`]; the file is of no use then.
    pub fn write_on<D: Driver>(&mut self, pool: &Pool<D>, until: Instant) -> PoolResult<bool> {
        let mut is_first = true;
        let is_over = || !std::mem::take(&mut is_first) && Instant::now() >= until;
        Ok(self.write_until(pool.host_memory(), is_over)? && self.finish().map(|()| true)?)
    }

    /// Writes until it `is_over`, which is asked before each piece. Has all been written?
    pub(super) fn write_until<D: Driver>(
        &mut self,
        host: &HostMemory<D>,
        mut is_over: impl FnMut() -> bool,
    ) -> PoolResult<bool> {
        while let Some(Stretch { source: index, part, at }) = self.left.front().cloned() {
            let Some(source) = self.sources.get_mut(index).and_then(Option::as_mut) else {
                self.left.pop_front();
                continue;
            };
            let Some((located, kept)) = locate(host, source.id, &part)? else {
                self.sources[index] = None;
                continue;
            };
            if is_over() {
                return Ok(false);
            }
            // Again, for a limit may have been set since: the kernel would end the process.
            self.file.check_limit(at + (part.end - part.start))?;
            let in_memory: Option<Vec<_>> = located.iter().map(Located::in_memory).collect();
            let pieces = if let Some(pieces) = in_memory {
                pieces
            } else {
                let length_bytes = part.end - part.start;
                self.buffer.resize(usize::try_from(length_bytes).unwrap_or(usize::MAX), 0);
                Located::read(&located, &mut self.buffer)?;
                vec![&self.buffer[..]]
            };
            let mut at = at;
            for bytes in pieces.into_iter().flat_map(|bytes| bytes.chunks(SLOT_LENGTH)) {
                let length_bytes = bytes.len() as u64;
                source.sum.iter_mut().for_each(|sum| sum.update(bytes));
                let to_check = if source.sum.is_some() { &[][..] } else { &[length_bytes] };
                self.writer.write(&self.file, at, bytes, to_check)?;
                source.written_bytes += length_bytes;
                at += length_bytes;
            }
            drop(kept);
            self.left.pop_front();
        }
        Ok(true)
    }

    /// Sees what was written to the disk.
    pub(super) fn finish(&mut self) -> PoolResult<()> {
        self.buffer = Vec::new();
        self.writer.settle(&self.file)?;
        self.file.finish()
    }

    /// The number of allocations of which nothing is left to be written.
    pub(super) fn whole(&self) -> usize {
        self.left.front().map_or(self.sources.len(), |next| next.source)
    }
}

/// The places of a part of an allocation's contents, and what keeps them.
type Kept = (Vec<Located>, Arc<Vec<Saved>>);

/// Finds where a part of an allocation's contents lies. None when the allocation is gone. While both values live, no memory of it
/// goes elsewhere, and a pager puts nothing in its place.
fn locate<D: Driver>(
    host: &HostMemory<D>,
    id: AllocationId,
    part: &Range<u64>,
) -> PoolResult<Option<Kept>> {
    let arena = host.arena();
    let mut ledger = host.holdings.ledger();
    let Some(saved) = ledger.rows.by_id(id).and_then(Row::saved).cloned() else { return Ok(None) };
    let located = arena.locate(&saved, part.clone())?;
    Ok(Some((located, ledger.keep_places(vec![saved]))))
}

#[cfg(all(test, feature = "sim"))]
mod tests;
