//! What could change hands in a swap: of which kind, and how many allocations of each shape. Counts are of what others have
//! said, so that no sum of them overflows.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::wire::{BlockShape, Needed};

/// What physical memory changes hands in a swap.
///
/// For the driver it is imported memory from then on, which it lets take part in all that is known of but one: nobody has
/// tried to make it part of a multicast object. Nor can memory that was asked for by address be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandOver {
    /// None.
    Nothing,
    /// What was asked for by address (`cuMemAlloc`).
    #[default]
    Plain,
    /// What was asked for by handle (`cuMemCreate`) too.
    All,
}

impl FromStr for HandOver {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "none" | "0" => Ok(Self::Nothing),
            "plain" => Ok(Self::Plain),
            "all" | "1" => Ok(Self::All),
            _ => Err(format!("'{word}' is none of none, plain and all")),
        }
    }
}

impl HandOver {
    /// Does memory of this shape change hands?
    pub(super) fn takes(self, shape: &BlockShape) -> bool {
        match self {
            Self::Nothing => false,
            Self::Plain => shape.is_plain,
            Self::All => true,
        }
    }

    /// What changes hands of all that a process tells of, which is all that could.
    pub(super) fn of(self, shapes: &[(BlockShape, u32)]) -> Counts {
        shapes.iter().filter(|(shape, _)| self.takes(shape)).cloned().collect()
    }
}

/// How many allocations of each shape.
pub(super) type Counts = BTreeMap<BlockShape, u32>;

/// What there is of each shape on both sides.
pub(super) fn alike(leaving: &[Vec<(BlockShape, u32)>], coming: &[Needed]) -> Counts {
    let gives = all_of(leaving.iter().flatten());
    let lacks = all_of(coming.iter().flat_map(|needed| &needed.shapes));
    let both = lacks.into_iter().filter_map(|(shape, count)| {
        let count = count.min(*gives.get(&shape)?);
        Some((shape, count))
    });
    both.collect()
}

pub(super) fn as_count(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

pub(super) fn add_up(counts: impl Iterator<Item = u32>) -> u32 {
    counts.fold(0, u32::saturating_add)
}

fn all_of<'a>(counts: impl Iterator<Item = &'a (BlockShape, u32)>) -> Counts {
    let mut all = Counts::new();
    for (shape, count) in counts {
        let so_far = all.entry(shape.clone()).or_insert(0);
        *so_far = count.saturating_add(*so_far);
    }
    all
}

pub(super) fn bytes_on(counts: &Counts, uuid: &str) -> u64 {
    let there = counts.iter().filter(|(shape, _)| shape.uuid == uuid);
    sum(there.map(|(shape, count)| shape.size_bytes.saturating_mul(u64::from(*count))))
}

/// No more of each shape than fits into what is left there.
pub(super) fn cap(counts: &mut Counts, left: impl Fn(&str) -> u64) {
    for (shape, count) in counts.iter_mut() {
        *count = as_count(left(&shape.uuid) / shape.size_bytes.max(1)).min(*count);
    }
    counts.retain(|_, count| *count > 0);
}

/// Of numbers that others have said.
pub(super) fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

pub(super) fn take_one(counts: &mut Counts, shape: &BlockShape) {
    if let Some(count) = counts.get_mut(shape) {
        *count = count.saturating_sub(1);
    }
    counts.retain(|_, count| *count > 0);
}
