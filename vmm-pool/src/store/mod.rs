//! The stores of saved contents: host memory, or a file.
//!
//! Both are linear spaces that the ledger's layout gives places in. The file is a crate's above ([`file`]). Contents that go there
//! pass through one chunk of host memory more, the ring ([`ring`]).

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
    /// Returns the store that contents of this policy go to, when they are saved at all.
    pub(crate) fn of(contents: Contents) -> Option<Self> {
        match contents {
            Contents::Keep | Contents::DiscardByTag => Some(Self::Host),
            Contents::File => Some(Self::File),
            Contents::Discard => None,
        }
    }
}

/// The number of bytes that the arena may grow by; `None` is without limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostBudget(pub Option<u64>);

/// The amounts of contents that get to the host in a pause that keeps [`Copies::All`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Copying {
    /// The contents that are copied to host memory, in bytes: neither what is zero nor what is there unchanged.
    pub to_memory_bytes: u64,
    /// The contents that go to a file, in bytes.
    pub to_file_bytes: u64,
}

/// Host memory that a pause would take now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostDemand {
    /// Contents to save, in bytes.
    pub saved_bytes: u64,
    /// The amounts of them that go to host memory and to a file.
    pub copying: Copying,
    /// Host memory held for them already.
    pub held_bytes: u64,
    /// Host memory to be taken in addition, with no copy kept.
    pub grow_bytes: u64,
    /// The same with [`Copies::Needed`]; no less.
    pub grow_with_needed_bytes: u64,
    /// The same with [`Copies::All`]; no less.
    pub grow_with_all_bytes: u64,
}

impl HostDemand {
    /// Host memory to be taken in addition when these copies are kept.
    pub fn grow_bytes_with(&self, copies: Copies) -> u64 {
        match copies {
            Copies::None => self.grow_bytes,
            Copies::Needed => self.grow_with_needed_bytes,
            Copies::All => self.grow_with_all_bytes,
        }
    }
}

/// When contents are saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Schedule {
    /// All of them before anything is given back; host memory for them is made during the copies. The pause can be undone
    /// until then.
    #[default]
    SaveFirst,
    /// Each part before it is given back. All host memory and disk space is taken before, and the pause can be undone until
    /// the first part.
    SaveMeanwhile,
}

/// The copies of contents, left in host memory by earlier pauses, that a pause keeps. What is unchanged in them is not
/// copied again. Copies for readers are kept in any case.
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
    /// None: what is saved is laid out again, in the least room.
    None,
    /// Those of the memory that the pause is about.
    Needed,
    /// All.
    #[default]
    All,
}

impl Copies {
    /// From the most to the fewest.
    pub const FEWER: [Self; 3] = [Self::All, Self::Needed, Self::None];
}
