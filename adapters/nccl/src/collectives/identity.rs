//! Names of communicators that are the same in all their processes, without a message to any of them.
//!
//! All processes of a tenant run the same version of this library (`tenants` refuses others). So a hash with fixed keys gives
//! the same value in all of them.

use std::hash::{DefaultHasher, Hash, Hasher};

use tenants::cut::CommunicatorId;

/// The way in which a communicator came to be.
#[derive(Clone, Copy, Debug, Hash)]
enum Origin {
    UniqueIds,
    Split,
    Shrink,
    Grow,
    Local,
    Reuse,
}

fn named(origin: Origin, facts: &impl Hash) -> CommunicatorId {
    let half = |which: u8| {
        let mut hasher = DefaultHasher::new();
        (which, origin).hash(&mut hasher);
        facts.hash(&mut hasher);
        u128::from(hasher.finish())
    };
    CommunicatorId(half(0) << 64 | half(1))
}

/// Names a communicator by the bytes of its `ncclUniqueId`, or of all of them for `ncclCommInitRankScalable`.
pub fn of_unique_ids(bytes: &[u8]) -> CommunicatorId {
    named(Origin::UniqueIds, &bytes)
}

/// Names the communicator that the `number`th split of `parent` makes for the ranks that give `color`.
pub(super) fn of_split(parent: CommunicatorId, number: u64, color: i32) -> CommunicatorId {
    named(Origin::Split, &(parent, number, color))
}

/// Names the rest of `parent` without the ranks `excluded`, by the `number`th shrink of it.
pub(super) fn of_shrink(parent: CommunicatorId, number: u64, excluded: &[i32]) -> CommunicatorId {
    let mut excluded = excluded.to_vec();
    excluded.sort_unstable();
    named(Origin::Shrink, &(parent, number, excluded))
}

/// Names the communicator of `ranks` ranks that the `number`th growth of `parent` makes, for the ranks in `parent`.
pub(super) fn of_grow(parent: CommunicatorId, number: u64, ranks: u32) -> CommunicatorId {
    named(Origin::Grow, &(parent, number, ranks))
}

/// Names a communicator by an `ncclUniqueId` that named `number` others before, as all do if `NCCL_COMM_ID` is set.
pub(super) fn of_reuse(first: CommunicatorId, number: u64) -> CommunicatorId {
    named(Origin::Reuse, &(first, number))
}

/// Names a communicator whose ranks are all in this process. `seed` tells this process from all others.
pub(super) fn of_local(seed: u64, number: u64) -> CommunicatorId {
    named(Origin::Local, &(seed, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_depend_on_all_that_tells_communicators_apart_and_on_nothing_else() {
        let parent = of_unique_ids(&[7; 128]);
        assert_eq!(parent, of_unique_ids(&[7; 128]));
        assert_ne!(parent, of_unique_ids(&[8; 128]));
        assert_ne!(of_split(parent, 0, 1), of_split(parent, 0, 2));
        assert_ne!(of_split(parent, 0, 1), of_split(parent, 1, 1));
        assert_ne!(of_split(parent, 0, 1), parent);
        assert_eq!(of_shrink(parent, 0, &[3, 1]), of_shrink(parent, 0, &[1, 3]));
        assert_ne!(of_shrink(parent, 0, &[1]), of_shrink(parent, 0, &[3]));
        assert_ne!(of_local(1, 0), of_local(2, 0));
        assert_ne!(of_grow(parent, 0, 4), of_grow(parent, 1, 4));
        assert_ne!(of_reuse(parent, 1), of_reuse(parent, 2));
    }
}
