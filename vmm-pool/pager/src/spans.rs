//! The spans of a window: the address ranges that callers have.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

/// The alignment of spans, in bytes, which is that of PyTorch's own allocator.
const ALIGNMENT_BYTES: u64 = 512;

/// The spans of one window.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// The start of each span in the window, and its size, in bytes.
    all: BTreeMap<u64, u64>,
    /// No byte of the window before this one is free.
    pub(super) full_bytes: u64,
    window_bytes: u64,
    chunk_bytes: u64,
}

impl Spans {
    pub(super) fn new(window_bytes: u64, chunk_bytes: u64) -> Self {
        Self { all: BTreeMap::new(), full_bytes: 0, window_bytes, chunk_bytes }
    }

    /// Were all spans freed?
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Finds `size_bytes` that belong to no span and to no `freed` chunk. Returns their start and their chunks.
    pub(super) fn take(
        &mut self,
        size_bytes: u64,
        freed: impl Iterator<Item = usize>,
    ) -> Option<(u64, Range<usize>)> {
        let aligned_bytes = size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES)?;
        let full = self.full_bytes;
        let behind = usize::try_from(full / self.chunk_bytes).ok()?;
        let freed = freed.skip_while(|id| *id < behind);
        let freed = freed.map(|id| (id as u64 * self.chunk_bytes, self.chunk_bytes));
        let spans = self.all.range(full..);
        let spans = spans.map(|(start, bytes)| (*start, bytes.next_multiple_of(ALIGNMENT_BYTES)));
        let mut taken: Vec<_> = spans.chain(freed).collect();
        taken.sort_unstable();
        let mut start = full;
        for (taken, taken_bytes) in taken {
            if taken - start >= aligned_bytes {
                break;
            }
            start = taken + taken_bytes;
        }
        if size_bytes == 0 || start.checked_add(aligned_bytes)? > self.window_bytes {
            return None;
        }
        self.all.insert(start, size_bytes);
        if start == full {
            self.full_bytes += aligned_bytes;
        }
        Some((start, self.chunks_of(start)?))
    }

    fn chunks(&self, start: u64, size_bytes: u64) -> Range<usize> {
        let index = |at: u64| usize::try_from(at / self.chunk_bytes).unwrap_or(usize::MAX);
        index(start)..index(start + size_bytes - 1) + 1
    }

    /// Returns the chunks of the span that begins here.
    pub(super) fn chunks_of(&self, start: u64) -> Option<Range<usize>> {
        Some(self.chunks(start, *self.all.get(&start)?))
    }

    /// Adds the chunks of all spans that these ranges of the window meet to `ids`.
    pub(super) fn meet(
        &self,
        ranges: impl Iterator<Item = RangeInclusive<u64>>,
        ids: &mut Vec<usize>,
    ) {
        ids.clear();
        for range in ranges {
            let met = self.at(*range.start()..=*range.start()).into_iter();
            let behind = self.all.range(range).map(|(start, size_bytes)| (*start, *size_bytes));
            met.chain(behind).for_each(|(start, size)| ids.extend(self.chunks(start, size)));
        }
        ids.sort_unstable();
        ids.dedup();
    }

    /// Removes the span that begins here. Returns its chunks.
    pub(super) fn remove(&mut self, start: u64) -> Option<Range<usize>> {
        let ids = self.chunks_of(start)?;
        self.all.remove(&start);
        self.full_bytes = self.full_bytes.min(start);
        Some(ids)
    }

    /// Returns the start and size of the last span that has one of these bytes of the window.
    pub(super) fn at(&self, bytes: RangeInclusive<u64>) -> Option<(u64, u64)> {
        let last = self.all.range(..=*bytes.end()).next_back();
        let (start, size_bytes) = last.map(|(start, size_bytes)| (*start, *size_bytes))?;
        (start + size_bytes > *bytes.start()).then_some((start, size_bytes))
    }
}
