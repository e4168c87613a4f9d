//! The spans of a window, which callers have.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

/// The alignment of spans, in bytes, which is that of PyTorch's own allocator.
const ALIGNMENT_BYTES: u64 = 512;

/// The spans of one window.
#[derive(Debug)]
pub(in crate::paging) struct Spans {
    /// Their starts in the window and sizes, in bytes.
    all: BTreeMap<u64, u64>,
    /// No byte of the window before it can be given out.
    pub(super) full_bytes: u64,
    window_bytes: u64,
    chunk_bytes: u64,
}

impl Spans {
    pub(super) fn new(window_bytes: u64, chunk_bytes: u64) -> Self {
        Self { all: BTreeMap::new(), full_bytes: 0, window_bytes, chunk_bytes }
    }

    /// Was all freed that was given out?
    pub(in crate::paging) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// So many bytes that belong to no span, nor to a chunk that is `freed`: where they begin, and their chunks.
    pub(super) fn take(
        &mut self,
        size_bytes: u64,
        freed: impl Iterator<Item = usize>,
    ) -> Option<(u64, Range<usize>)> {
        let size_bytes = size_bytes.checked_next_multiple_of(ALIGNMENT_BYTES)?;
        let full = self.full_bytes;
        let behind = usize::try_from(full / self.chunk_bytes).ok()?;
        let freed = freed.skip_while(|id| *id < behind);
        let freed = freed.map(|id| (id as u64 * self.chunk_bytes, self.chunk_bytes));
        let spans = self.all.range(full..).map(|(start, size_bytes)| (*start, *size_bytes));
        let mut taken: Vec<_> = spans.chain(freed).collect();
        taken.sort_unstable();
        let mut start = full;
        for (taken, taken_bytes) in taken {
            if taken - start >= size_bytes {
                break;
            }
            start = taken + taken_bytes;
        }
        if size_bytes == 0 || start.checked_add(size_bytes)? > self.window_bytes {
            return None;
        }
        self.all.insert(start, size_bytes);
        if start == full {
            self.full_bytes += size_bytes;
        }
        Some((start, self.chunks_of(start)?))
    }

    /// The chunks of the span that begins here.
    pub(in crate::paging) fn chunks_of(&self, start: u64) -> Option<Range<usize>> {
        let last = start + self.all.get(&start)? - 1;
        let index = |at: u64| usize::try_from(at / self.chunk_bytes).ok();
        Some(index(start)?..index(last)? + 1)
    }

    /// The span that begins here is gone. Its chunks come out.
    pub(super) fn remove(&mut self, start: u64) -> Option<Range<usize>> {
        let ids = self.chunks_of(start)?;
        self.all.remove(&start);
        self.full_bytes = self.full_bytes.min(start);
        Some(ids)
    }

    /// Their starts.
    pub(super) fn starts(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }

    /// The start and size of the span that one of these bytes of the window belongs to.
    pub(in crate::paging) fn at(&self, bytes: RangeInclusive<u64>) -> Option<(u64, u64)> {
        let last = self.all.range(..=*bytes.end()).next_back();
        let (start, size_bytes) = last.map(|(start, size_bytes)| (*start, *size_bytes))?;
        (start + size_bytes > *bytes.start()).then_some((start, size_bytes))
    }
}
