//! The stores of saved contents: host memory, or a file.
//!
//! Both are linear spaces, where the ledger's layout assigns places. A crate above implements the file ([`file`]).
//! Contents of the file pass through one more chunk of host memory, the ring ([`ring`]).

mod arena;
mod chunk;
mod file;
mod incoming;
mod places;
mod ring;

pub(crate) use arena::{HostArena, Pins, bring_in};
pub use chunk::{CHUNK_BYTES, Pinned};
pub use file::{
    ContentsFile, Each, FILE_ALIGNMENT_BYTES, FilePlace, Fill, HeldFile, LookUp, MakeFile, ToFile,
    check_file_length,
};
pub(crate) use file::{Disk, nothing_to_write_to};
pub(crate) use incoming::{Coming, HeldFigures, Incoming, Used};
pub use places::SavedPart;
pub(crate) use places::{Extent, Located, Part, Piece, Prints, Saved, append};
pub(crate) use ring::SLOT_BYTES;
pub use ring::Slot;

use crate::report::Contents;

/// The kind of place that holds saved contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// The host arena.
    Host,
    /// The file.
    File,
}

impl Store {
    /// Returns the store for contents of this policy. None if they are not saved.
    pub(crate) fn of(contents: Contents) -> Option<Self> {
        match contents {
            Contents::Keep | Contents::DiscardByTag => Some(Self::Host),
            Contents::File => Some(Self::File),
            Contents::Discard => None,
        }
    }
}

/// The number of bytes that the arena may grow by. `None`: no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBudget(pub Option<u64>);

/// The contents that reach the host in a pause that keeps [`Copies::All`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Copying {
    /// The contents that are copied to host memory, in bytes. Contents that are zero, or unchanged since an earlier
    /// copy, do not count.
    pub to_memory_bytes: u64,
    /// The contents that go to a file, in bytes.
    pub to_file_bytes: u64,
}

/// The host memory that a pause would need now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostDemand {
    /// The contents to save, in bytes.
    pub saved_bytes: u64,
    /// The contents that go to host memory and to a file.
    pub copying: Copying,
    /// The host memory that is held for them already, in bytes.
    pub held_bytes: u64,
    /// The host memory to allocate in addition, in bytes, if no copy is kept.
    pub grow_bytes: u64,
    /// The same with [`Copies::Needed`]. It is not less.
    pub grow_with_needed_bytes: u64,
    /// The same with [`Copies::All`]. It is not less.
    pub grow_with_all_bytes: u64,
}

impl HostDemand {
    /// Returns the host memory to allocate in addition, in bytes, when these copies are kept.
    pub fn grow_bytes_with(&self, copies: Copies) -> u64 {
        match copies {
            Copies::None => self.grow_bytes,
            Copies::Needed => self.grow_with_needed_bytes,
            Copies::All => self.grow_with_all_bytes,
        }
    }
}

/// The time at which contents are saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Schedule {
    /// All contents are saved before any memory is released. Host memory for them is populated during the copies. The
    /// pause can be undone until then.
    #[default]
    SaveFirst,
    /// Each part is saved before it is released. All host memory and disk space is allocated before, and the pause can
    /// be undone until the first part is released.
    SaveMeanwhile,
}

/// The copies of contents that a pause keeps. Earlier pauses have left them in host memory. Contents that are unchanged
/// since are not copied again. Copies for readers are kept in any case.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
pub enum Copies {
    /// None: contents are laid out again, in the least space.
    None,
    /// The copies of the memory that the pause concerns.
    Needed,
    /// All copies.
    #[default]
    All,
}

impl Copies {
    /// All values, from the most copies to the fewest.
    pub const FEWER: [Self; 3] = [Self::All, Self::Needed, Self::None];
}
