//! The report of a pager about itself.

use std::fmt;
use std::time::Duration;

use sublet_sync::time::micros;
use vmm_pool::driver::Driver;

use super::prints::PIECES;
use super::table::{Chunk, Unseen};
use super::{PagedWindow, Pager};

/// The report of what a pager holds and has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PageReport {
    /// Size of one chunk, in bytes.
    pub chunk_bytes: u64,
    /// All spans, in bytes of the chunks that they take together.
    pub paged_bytes: u64,
    /// The most device memory that they may take, in bytes.
    pub frames_bytes: u64,
    /// The device memory that they take now, in bytes.
    pub resident_bytes: u64,
    /// The memory that may not leave, in bytes: something else holds it there.
    pub stays_bytes: u64,
    /// Bytes copied to the host so far.
    pub out_bytes: u64,
    /// Bytes that were not, because a device has said that they are as they were.
    pub unchanged_bytes: u64,
    /// Bytes copied to the device so far.
    pub in_bytes: u64,
    /// Frames that went from one chunk to another so far.
    pub exchanges: u64,
    /// Chunks that were given a frame so far.
    pub remaps: u64,
    /// For how long the driver has mapped and unmapped chunks, in microseconds.
    pub remap_us: u64,
    /// Uses that found all of their memory on the device.
    pub hits: u64,
    /// Uses that did not.
    pub misses: u64,
    /// Calls that named memory that is paged. Those that found what the calls before them on their stream used are
    /// no more than counted here.
    pub calls: u64,
    /// For how long calls have waited, in microseconds.
    pub waited_us: u64,
    /// Writes that nobody has shown, of those that a check has found the first ones.
    #[serde(default)]
    pub unseen: Vec<UnseenWrite>,
    /// The place of each chunk now, as a letter, in the order of their addresses: `a` away, `i` on its way in, `h` on
    /// the device and the same in host memory, `w` on the device and written since it was copied to the host, `o` on
    /// its way out, `-` of no span.
    pub chunks: String,
}

/// The counts of what a window has done so far, in chunks, and of its uses.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) copied_out: u64,
    pub(super) copied_in: u64,
    /// Those that were not copied out, for they were as their copies.
    pub(super) unchanged: u64,
    pub(super) exchanges: u64,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) remaps: u64,
    pub(super) remapping: Duration,
}

/// A write to paged memory that no call has shown, as [`Pager::check_writes`] finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct UnseenWrite {
    /// The chunk, counted from the start of the window.
    pub chunk: usize,
    /// The first address of the pieces of the chunk that were written.
    pub address: u64,
    /// From there to the end of the last of them, in bytes.
    pub size_bytes: u64,
    /// The start of the allocation that they belong to; 0 if it is freed.
    pub span: u64,
    /// Its size, in bytes.
    pub span_bytes: u64,
    /// The number of the use of this window that used the chunk last before it.
    pub after_use: u64,
    /// The number of uses that there were when the write was found.
    pub before_use: u64,
}

impl fmt::Display for UnseenWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chunk, address, size_bytes, span, span_bytes, after_use, before_use } = self;
        write!(
            f,
            "paged memory was written by work that names it nowhere: {size_bytes} bytes from {address:#x} on, chunk {chunk}, of the              allocation of {span_bytes} bytes at {span:#x}, between use {after_use} and use {before_use}; such a write is lost without              SUBLET_PAGING_CHECK=1: keep this memory out of paging, or give its address as an argument"
        )
    }
}

impl<D: Driver> PagedWindow<D> {
    pub(super) fn describe(&self, unseen: &Unseen) -> UnseenWrite {
        let piece_bytes = self.chunk_bytes / PIECES as u64;
        let (first, last) = (*unseen.pieces.start() as u64, *unseen.pieces.end() as u64);
        let start = unseen.id as u64 * self.chunk_bytes + first * piece_bytes;
        let size_bytes = (last + 1 - first) * piece_bytes;
        let window = self.window.start.0;
        let span = self.calls().spans.at(start..=start + size_bytes - 1);
        let (span, span_bytes) = span.map_or((0, 0), |(start, bytes)| (window + start, bytes));
        UnseenWrite {
            chunk: unseen.id,
            address: window + start,
            size_bytes,
            span,
            span_bytes,
            after_use: *unseen.uses.start(),
            before_use: *unseen.uses.end(),
        }
    }
}

impl<D: Driver> Pager<D> {
    /// Reports what the pager holds and has done.
    pub fn report(&self) -> PageReport {
        let (calls, waited) = self.shared.calls().counts();
        let table = self.shared.table();
        let chunk_bytes = self.shared.chunk_bytes;
        let bytes = |chunks: usize| chunks as u64 * chunk_bytes;
        let count =
            |is: fn(&Chunk) -> bool| table.chunks().iter().filter(|chunk| is(chunk)).count();
        let owned = count(Chunk::is_owned);
        let counts = &table.figures;
        let is_elastic = self.shared.leaves_bytes > 0;
        PageReport {
            chunk_bytes,
            paged_bytes: bytes(owned),
            frames_bytes: bytes(if is_elastic {
                table.demand.frames().min(owned)
            } else {
                table.demand.frames()
            }),
            resident_bytes: bytes(table.resident()),
            stays_bytes: bytes(count(Chunk::stays)),
            out_bytes: counts.copied_out * chunk_bytes,
            unchanged_bytes: counts.unchanged * chunk_bytes,
            in_bytes: counts.copied_in * chunk_bytes,
            exchanges: counts.exchanges,
            remaps: counts.remaps,
            remap_us: micros(counts.remapping),
            hits: counts.hits,
            misses: counts.misses,
            calls,
            waited_us: micros(waited),
            unseen: table.checks.found.iter().map(|it| self.shared.describe(it)).collect(),
            chunks: table.chunks().iter().map(Chunk::letter).collect(),
        }
    }
}
