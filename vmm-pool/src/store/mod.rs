//! Where saved contents are kept: host memory, or a file.
//!
//! Both are linear spaces that the ledger's layout gives places in. Contents that go to the file pass through one
//! chunk of host memory more, the ring ([`ring`]).

mod arena;
mod chunk;
mod disk;
mod ring;

use std::ops::Range;

pub(crate) use arena::{HostArena, Pins};
pub(crate) use disk::ContentsFile;
pub use disk::check_file_dir;
pub(crate) use ring::{SLOT_BYTES, Slot};

use crate::report::Contents;

/// What holds saved contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// The host arena.
    Host,
    /// The file.
    File,
}

impl Store {
    /// Where contents of this policy go, when they are saved at all.
    pub(crate) fn of(contents: Contents) -> Option<Self> {
        match contents {
            Contents::Keep => Some(Self::Host),
            Contents::File => Some(Self::File),
            Contents::Discard => None,
        }
    }
}

/// Where saved contents lie: `[offset, offset + size)` of the linear space of arena or file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) store: Store,
    pub(crate) offset_bytes: u64,
}

impl Saved {
    /// Where a part of the same contents lies, by offset in them.
    pub(crate) fn part(self, part: &Range<u64>) -> Self {
        Self { offset_bytes: self.offset_bytes + part.start, ..self }
    }
}

/// How much the arena may grow by, in bytes; `None` is without limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBudget(pub Option<u64>);

/// Host memory that a pause would take now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostDemand {
    /// Contents to save, in bytes.
    pub saved_bytes: u64,
    /// Host memory held for them already.
    pub held_bytes: u64,
    /// Host memory to be taken in addition.
    pub grow_bytes: u64,
}
