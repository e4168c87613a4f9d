//! Writes saved contents to a file, one allocation and one piece at a time. The file has a name, so that the contents
//! outlive the process, or it is the pool's own.
//!
//! ```text
//!   named file:  [A saved ....][B saved | hole | saved][D saved ...]     each begins at a multiple of 4 KiB
//! ```
//!
//! In a named file each allocation has its whole size, and its unused parts are holes. Saved contents do not change.
//! The application may free contents before they are written, so each piece is looked up in the ledger.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use vmm_pool::driver::Driver;
use vmm_pool::{AllocationId, FILE_ALIGNMENT_BYTES, Holding, LookUp, Pool, PoolResult, ToFile};

use crate::file::{DiskFile, Writer};

/// The size of the pieces of a named file, in bytes. Between two pieces, other threads can lock the arena, and the
/// clock is read.
const PIECE_BYTES: u64 = 8 << 20;
/// The bytes that are written to the pool's own file between two readings of the clock.
const AT_ONCE_BYTES: u64 = 64 << 20;
/// The bytes that one write call passes to the file at most.
const TOGETHER: usize = 32 << 20;

/// An allocation whose contents are written to the file.
#[derive(Debug)]
struct Outgoing {
    id: AllocationId,
    /// The offset in the file where the allocation begins.
    offset_bytes: u64,
    written_bytes: u64,
    /// The checksum of the bytes written so far. None where the file keeps checksums itself.
    sum: Option<crc32fast::Hasher>,
}

/// Writes saved contents to a file, in calls of limited time. From its creation to its end, no pause or resume of the
/// pool may begin: that would put other contents in the same places.
#[derive(Debug)]
pub struct WriteOut {
    file: Arc<DiskFile>,
    /// The allocations. None for one that has nothing saved, or was freed before all of it was written.
    sources: Vec<Option<Outgoing>>,
    /// The pieces not written yet, in order. Each has the index of its allocation, the part of it, and the offset in
    /// the file.
    left: VecDeque<(usize, Range<u64>, u64)>,
    writer: Writer,
    buffer: Vec<u8>,
}

/// The place and the checksum of an allocation's contents in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The offset in the file where the allocation begins.
    pub offset_bytes: u64,
    /// The CRC-32 (the one of zlib) of its saved parts, one behind the other.
    pub crc32: u32,
}

impl WriteOut {
    /// Lays `holdings` out in `file`, which is empty and is in `dir`. Nothing is written yet.
    ///
    /// # Errors
    /// [`vmm_pool::PoolError::FileRefused`], also when the process may not write a file of this size.
    pub fn new(holdings: &[Holding], file: File, dir: PathBuf) -> PoolResult<Self> {
        let (out, end_bytes) = Self::laid_out(holdings, DiskFile::over(file, dir));
        out.file.check_limit(end_bytes)?;
        let extended = out.file.file.set_len(end_bytes);
        extended.map_err(|source| out.file.refused("making", &(0..end_bytes), source))?;
        Ok(out)
    }

    /// Lays `holdings` out in `file`. Returns the end of the file too.
    pub(crate) fn laid_out(holdings: &[Holding], file: DiskFile) -> (Self, u64) {
        let (mut out, mut end_bytes) = (Self::to(Arc::new(file)), 0_u64);
        for Holding { id, size_bytes, saved_parts, .. } in holdings {
            if saved_parts.is_empty() {
                out.sources.push(None);
                continue;
            }
            // OVERFLOW: sizes of allocations that exist on one machine.
            let begin = end_bytes.next_multiple_of(FILE_ALIGNMENT_BYTES);
            end_bytes = begin + size_bytes;
            let places = saved_parts.iter().map(|part| (part.clone(), begin + part.start));
            out.add((*id, places.collect()), Some(begin), PIECE_BYTES);
        }
        (out, end_bytes)
    }

    /// Makes a [`WriteOut`] to `file` without any allocation.
    fn to(file: Arc<DiskFile>) -> Self {
        let (sources, left) = Default::default();
        Self { file, sources, left, writer: Writer::default(), buffer: Vec::new() }
    }

    /// Adds an allocation: its parts, each with its offset in the file, in pieces of `piece_bytes`. With a `begin`, the
    /// allocation has a checksum of its own.
    fn add(&mut self, (id, parts): ToFile, begin: Option<u64>, piece_bytes: u64) {
        let source = self.sources.len();
        for (part, at) in parts {
            let pieces = part.clone().step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX));
            self.left.extend(pieces.map(|start| {
                (source, start..part.end.min(start + piece_bytes), at + (start - part.start))
            }));
        }
        let (offset_bytes, sum) = (begin.unwrap_or(0), begin.map(|_| crc32fast::Hasher::new()));
        self.sources.push(Some(Outgoing { id, offset_bytes, written_bytes: 0, sum }));
    }

    /// Returns the number of bytes to write, without allocations that were freed before.
    pub fn total_bytes(&self) -> u64 {
        let left = self.left.iter().filter(|(source, ..)| self.sources[*source].is_some());
        self.written_bytes() + left.map(|(_, part, _)| part.end - part.start).sum::<u64>()
    }

    /// Returns the number of bytes that are written so far.
    pub fn written_bytes(&self) -> u64 {
        self.sources.iter().flatten().map(|source| source.written_bytes).sum()
    }

    /// Returns the place in the file of the contents of holding `index`. None if nothing of it is saved, or it was
    /// freed before all of it was written. The checksum covers what is written so far.
    pub fn written(&self, index: usize) -> Option<Written> {
        let Outgoing { offset_bytes, sum, .. } = self.sources.get(index)?.as_ref()?;
        Some(Written { offset_bytes: *offset_bytes, crc32: sum.clone()?.finalize() })
    }

    /// Writes until `until`, and one piece at least. True when all is on the disk.
    ///
    /// # Errors
    /// [`vmm_pool::PoolError::FileRefused`], [`vmm_pool::PoolError::FileUnreadable`]; the file is then useless.
    pub fn write_on<D: Driver>(&mut self, pool: &Pool<D>, until: Instant) -> PoolResult<bool> {
        let mut is_first = true;
        let is_over = || !std::mem::take(&mut is_first) && Instant::now() >= until;
        let look_up = |id, part| pool.host_memory().part_of(id, part);
        Ok(self.write_until(&look_up, is_over)? && self.finish().map(|()| true)?)
    }

    /// See [`vmm_pool::ContentsFile::write_out`].
    pub(crate) fn move_in_time(
        file: Arc<DiskFile>,
        all: Vec<ToFile>,
        look_up: LookUp<'_>,
        until: Instant,
        is_called_off: &dyn Fn() -> bool,
    ) -> PoolResult<usize> {
        let first = all.first().into_iter().flat_map(|(_, parts)| parts);
        let first_bytes: u64 = first.map(|(part, _)| part.end - part.start).sum();
        let mut out = Self::to(file);
        for each in all {
            out.add(each, None, AT_ONCE_BYTES);
        }
        let is_done = out.write_until(look_up, || is_called_off() || Instant::now() >= until)?;
        let whole = out.left.front().map_or(out.sources.len(), |(next, ..)| *next);
        if whole == 0 && !is_done && !is_called_off() {
            let why = "one allocation moves as a whole, and its time was over there: a faster disk would do";
            let (at, source) = (out.written_bytes(), io::Error::new(ErrorKind::TimedOut, why));
            return Err(out.file.refused("writing", &(at..at + first_bytes), source));
        }
        out.finish().map(|()| whole)
    }

    /// Writes until `is_over`, which is called before each piece. True when all is written.
    fn write_until(
        &mut self,
        look_up: LookUp<'_>,
        mut is_over: impl FnMut() -> bool,
    ) -> PoolResult<bool> {
        while let Some((index, part, mut at)) = self.left.front().cloned() {
            let Some(source) = self.sources.get_mut(index).and_then(Option::as_mut) else {
                self.left.pop_front();
                continue;
            };
            let length_bytes = part.end - part.start;
            let Some(found) = look_up(source.id, part)? else {
                self.sources[index] = None;
                continue;
            };
            if is_over() {
                return Ok(false);
            }
            // Checked again, because a limit may have been set since: the kernel would end the process.
            self.file.check_limit(at + length_bytes)?;
            let pieces = found.read(&mut self.buffer)?;
            for bytes in pieces.into_iter().flat_map(|bytes| bytes.chunks(TOGETHER)) {
                let length_bytes = bytes.len() as u64;
                source.sum.iter_mut().for_each(|sum| sum.update(bytes));
                let to_check = if source.sum.is_some() { &[][..] } else { &[length_bytes] };
                self.writer.write(&self.file, at, bytes, to_check)?;
                source.written_bytes += length_bytes;
                at += length_bytes;
            }
            self.left.pop_front();
        }
        Ok(true)
    }

    /// Waits until all that was written is on the disk.
    fn finish(&mut self) -> PoolResult<()> {
        self.buffer = Vec::new();
        self.writer.settle(&self.file)?;
        self.file.finish()
    }
}

#[cfg(test)]
mod tests;
