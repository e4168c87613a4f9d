//! The report of a pager.

use std::fmt;
use std::time::Duration;

use sublet_sync::time::micros;
use vmm_pool::driver::Driver;

use super::prints::PIECES;
use super::table::{Chunk, Unseen};
use super::{PagedWindow, Pager};

/// The state of a pager, and the counts of its work so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PageReport {
    /// Size of one chunk, in bytes.
    pub chunk_bytes: u64,
    /// The chunks that all spans take together, in bytes.
    pub paged_bytes: u64,
    /// The most device memory that the chunks may take, in bytes.
    pub frames_bytes: u64,
    /// The device memory that the chunks take now, in bytes.
    pub resident_bytes: u64,
    /// The memory that may not leave, in bytes: something else keeps it on the device.
    pub stays_bytes: u64,
    /// Bytes copied to the host so far.
    pub out_bytes: u64,
    /// Bytes that were not copied to the host, because a device has said that they are unchanged.
    pub unchanged_bytes: u64,
    /// Bytes copied to the device so far.
    pub in_bytes: u64,
    /// Frames that went from one chunk to another so far.
    pub exchanges: u64,
    /// Chunks that were given a frame so far.
    pub remaps: u64,
    /// The time that the driver has spent to map and unmap chunks, in microseconds.
    pub remap_us: u64,
    /// Uses that found all of their memory on the device.
    pub hits: u64,
    /// Uses that did not find all of their memory on the device.
    pub misses: u64,
    /// Calls that named paged memory. A call whose chunks earlier calls on its stream used counts only here.
    pub calls: u64,
    /// The time that calls have waited, in microseconds.
    pub waited_us: u64,
    /// The first of the writes that nobody has shown, as checks have found them.
    #[serde(default)]
    pub unseen: Vec<UnseenWrite>,
    /// The place of each chunk now, as a letter, in the order of their addresses: `a` away, `i` on its way in, `h` on
    /// the device and the same in host memory, `w` on the device and written since it was copied to the host, `o` on
    /// its way out, `-` of no span.
    pub chunks: String,
}

/// The counts of a window's work so far, in chunks, and of its uses.
#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) copied_out: u64,
    pub(super) copied_in: u64,
    /// Chunks that were not copied out, because they were the same as their copies.
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
    /// The bytes from there to the end of the last written piece.
    pub size_bytes: u64,
    /// The start of the allocation that the pieces belong to; 0 if it is freed.
    pub span: u64,
    /// The size of that allocation, in bytes.
    pub span_bytes: u64,
    /// The number of the last use of the chunk before the write, counted in this window.
    pub after_use: u64,
    /// The number of the window's uses when the write was found.
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
    /// Reports the state of the pager and the counts of its work.
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
