//! Host memory for saved contents, and the ways into and out of it.
//!
//! Pinned memory is copied to straight, at the speed of the link. Pinning is what a first pause has no time
//! for: processes that pin at once get 23 to 29 GB/s in all, and make each other's copies slow. So new
//! memory is left as the kernel gave it, untouched; contents reach it through a ring of pinned slots, out of
//! which threads copy them (52 GB/s in all for four processes; 4 H200, driver 580). After the pause a
//! thread pins it, so that the next pause goes straight.
//!
//! ```text
//!   device ==link==> slot of the ring ==copier thread==> fresh chunk   (then pinned, behind the pause)
//!   device ==link=====================================> pinned chunk
//! ```
//!
//! Nothing of a pause outlives it but the chunks: copiers are joined and events ended before it returns.

mod arena;
mod chunk;
mod copies;
mod pinning;
mod ring;
mod streams;

use crate::driver::{DeviceOrdinal, PinnedFor};

pub(crate) use arena::HostArena;
pub(crate) use copies::Saved;
pub(crate) use ring::{DeviceStream, Mark};
pub(crate) use streams::CopyStreams;

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

/// When memory is pinned that a pause has filled through the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinLater {
    /// By a thread behind the pause; what it has not come to, when needed.
    Behind,
    /// When a resume or a pause needs it, and no sooner.
    WhenNeeded,
}

/// Measures of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// How many threads copy out of the ring. None is as good as one.
    pub copier_threads: usize,
    /// Size of a chunk, a multiple of the page size.
    pub chunk_bytes: u64,
    /// Size of a slot of the ring; at least two must fit into a chunk.
    pub slot_bytes: u64,
    /// When new memory is pinned.
    pub pin_later: PinLater,
}

impl Staging {
    /// What a process on a machine of today should use, with this many copiers.
    ///
    /// Chunks of 256 MiB are large enough that pinning runs at full speed (36 GiB/s with huge pages), and
    /// small enough that the ring, which lies in one, is there after some 20 ms. Slots of 8 MiB keep the
    /// link busy (a copy takes 150 us) and leave enough of them for copiers and link at once.
    pub fn with_copiers(copier_threads: usize) -> Self {
        Self {
            copier_threads,
            chunk_bytes: 256 << 20,
            slot_bytes: 8 << 20,
            pin_later: PinLater::Behind,
        }
    }
}

/// For whom memory is pinned, and on behalf of which device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinFor {
    pub(crate) device: DeviceOrdinal,
    pub(crate) contexts: PinnedFor,
}

/// Bytes of host memory as a length or an index. Lossless: the crate builds for 64-bit Linux only.
fn length_of(bytes: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
