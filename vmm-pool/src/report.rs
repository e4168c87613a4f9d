//! Reports of the memory that each process holds, in bytes. Sums are exact: every byte of pool memory is in exactly one
//! [`ClassBytes`].

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::driver::DeviceOrdinal;

/// The treatment of an allocation's contents while its tenant is paused.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Contents {
    /// Saved to host memory and put back.
    #[default]
    Keep,
    /// Given up: the memory comes back with undefined contents.
    Discard,
    /// Given up by a pause of its tag, which its program asks for. A pause of everything may come at any instant, and saves it to host memory.
    #[serde(rename = "discard-by-tag")]
    DiscardByTag,
    /// Saved to a file and put back.
    File,
}

/// The contents that a pause keeps, by the way in which it kept them, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeptBytes {
    /// Zero: neither copied nor given host memory. The resume makes the zeros.
    pub zero_bytes: u64,
    /// As in the copy that host memory still has of the last pause.
    pub unchanged_bytes: u64,
    /// Copied, to host memory or the file.
    pub copied_bytes: u64,
}

impl KeptBytes {
    /// Returns the sum of the three, in bytes.
    pub fn total_bytes(self) -> u64 {
        self.zero_bytes.saturating_add(self.unchanged_bytes).saturating_add(self.copied_bytes)
    }

    /// Returns the sums of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            zero_bytes: self.zero_bytes.saturating_add(other.zero_bytes),
            unchanged_bytes: self.unchanged_bytes.saturating_add(other.unchanged_bytes),
            copied_bytes: self.copied_bytes.saturating_add(other.copied_bytes),
        }
    }
}

/// The bytes that a pause or resume under way copies between devices and host memory or the file. Both counts are 0
/// while none copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CopiedBytes {
    /// Copied so far. A resume from host memory queues all its copies first, and counts them when the last has ended.
    pub done_bytes: u64,
    /// All that it copies.
    pub of_bytes: u64,
}

/// The counters behind [`CopiedBytes`]. The thread that copies writes them, others read them. No decision depends on
/// them, so no order of loads and stores matters.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    done_bytes: AtomicU64,
    of_bytes: AtomicU64,
}

impl Copied {
    /// Resets the counters: a pause or resume is about to copy `of_bytes`.
    pub(crate) fn begin(&self, of_bytes: u64) {
        self.done_bytes.store(0, Ordering::Relaxed);
        self.of_bytes.store(of_bytes, Ordering::Relaxed);
    }

    /// Counts `bytes` more as copied.
    pub(crate) fn add(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the counts so far. A part that a stage copies again after a failure counts once.
    pub(crate) fn read(&self) -> CopiedBytes {
        let of_bytes = self.of_bytes.load(Ordering::Relaxed);
        CopiedBytes { done_bytes: self.done_bytes.load(Ordering::Relaxed).min(of_bytes), of_bytes }
    }
}

/// Bytes of one class of memory (which library allocated it, under which tag, with which policy) on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ClassBytes {
    /// The library that asked, such as `nccl` or `torch`.
    pub library: String,
    /// The region's tag; empty outside any region, which people's programs read as none.
    #[serde(serialize_with = "none_if_empty", deserialize_with = "empty_if_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub tag: String,
    /// The treatment of the contents in a pause.
    pub contents: Contents,
    /// Allocations of this process.
    pub own_bytes: u64,
    /// Of `own_bytes`, how many are on the device now.
    pub resident_bytes: u64,
    /// Of `own_bytes`, how many a pause must leave in place, with the reason in [`DeviceReport::pinned`].
    pub pinned_bytes: u64,
    /// Allocations of other processes that this one has imported; counted by their owners.
    pub imported_bytes: u64,
    /// Number of own allocations.
    pub own_count: u64,
    /// Number of imported allocations.
    pub imported_count: u64,
}

fn none_if_empty<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() && text.is_empty() {
        return serializer.serialize_none();
    }
    serializer.serialize_str(text)
}

fn empty_if_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    if deserializer.is_human_readable() {
        return Ok(Option::deserialize(deserializer)?.unwrap_or_default());
    }
    String::deserialize(deserializer)
}

/// The least memory left to the driver on a device that counts, in bytes. Less gives no tenant room: a context needs
/// more.
pub(crate) const NATIVE_BYTES_MIN: u64 = 16 << 20;

/// The reason for memory that a pause should have released, and that stays.
pub(crate) const OVERDUE: &str =
    "the driver would not copy it or let it go: a resume and another pause try again";

/// Memory that a pause leaves on the device, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PinnedBytes {
    /// Why it stays, with what to do about it.
    pub reason: String,
    /// The size of that memory, in bytes.
    pub bytes: u64,
    /// In how many allocations.
    pub count: u64,
}

impl PinnedBytes {
    /// Adds memory that stays for the same reason.
    pub(crate) fn add(&mut self, more: &Self) {
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.count = self.count.saturating_add(more.count);
    }

    /// Adds `more` to `stays`. Each reason is there once, and the largest is first.
    pub fn merge(stays: &mut Vec<Self>, more: &[Self]) {
        for stay in more {
            match stays.iter_mut().find(|known| known.reason == stay.reason) {
                Some(known) => known.add(stay),
                None => stays.push(stay.clone()),
            }
        }
        stays.sort_by(|one, other| (other.bytes, &one.reason).cmp(&(one.bytes, &other.reason)));
    }

    /// Returns the sum of all `stays`, in bytes.
    pub fn total_bytes(stays: &[Self]) -> u64 {
        stays.iter().map(|stay| stay.bytes).fold(0, u64::saturating_add)
    }
}

/// Bytes of one process on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceReport {
    /// The ordinal in that process.
    pub device: DeviceOrdinal,
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// By class, largest first.
    #[serde(rename = "memory")]
    pub classes: Vec<ClassBytes>,
    /// The memory that a pause leaves in place.
    pub pinned: Vec<PinnedBytes>,
}

impl DeviceReport {
    /// Returns all own bytes, resident or not.
    pub fn own_bytes(&self) -> u64 {
        self.classes.iter().map(|class| class.own_bytes).sum()
    }

    /// Returns the own bytes that are on the device now.
    pub fn resident_bytes(&self) -> u64 {
        self.classes.iter().map(|class| class.resident_bytes).sum()
    }
}

/// Bytes of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PoolReport {
    /// By device, in ordinal order; devices without a byte are absent.
    pub devices: Vec<DeviceReport>,
    /// Host memory held for saved contents, in bytes.
    pub host_arena_bytes: u64,
    /// Contents that are in a file now, in bytes.
    pub file_bytes: u64,
    /// Of these, what had been saved to host memory, and has made room there.
    pub spilled_bytes: u64,
    /// Host bytes of driver allocations on NUMA nodes, which are never paused.
    pub host_numa_bytes: u64,
    /// The totals of the slabs: allocations that small ones of a library's are parts of.
    pub slabs: SlabTotals,
}

/// Slabs of one process, in numbers and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SlabTotals {
    /// Slabs of its own.
    pub slabs: u64,
    /// Their bytes, which are counted under their class too.
    pub slab_bytes: u64,
    /// Of these, what is in allocations that live.
    pub live_bytes: u64,
    /// Bytes of allocations that have been freed, and that are not given out again.
    pub dead_bytes: u64,
    /// Bytes that were not given out yet.
    pub tail_bytes: u64,
    /// Allocations of its own in them that live.
    pub cells: u64,
    /// Slabs of other processes that it has imported.
    pub imported_slabs: u64,
    /// Allocations in those that it holds.
    pub imported_cells: u64,
}
