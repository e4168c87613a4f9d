//! Decides which process keeps shared memory alive, and which one saves it. The decision is made once for all processes of a
//! tenant.
//!
//! While a tenant runs, the driver answers: memory lives while any process holds it. A pause releases every reference, so
//! exactly one process must save the contents and create the memory again. That process is the owner, if the owner can do it.
//! Otherwise the memory stays on its device, in all processes that hold it.
//!
//! [`decide`] is a pure function of the reports of all processes. Each reported when its gate was closed and its pool frozen,
//! so all reports were true at one moment. A process exports nothing from that report until it runs again.
//!
//! | the owner of imported memory | what happens |
//! | --- | --- |
//! | takes part, and still has it | it saves, creates and exports; importers drop theirs at the release, and fetch it again |
//! | takes part, and has freed it | it stays mapped in all processes that hold it, counted and named |
//! | lives, and does not take part | it stays |
//! | lives, and is not found | the pause is refused ([`missing`]): the name of its socket may be missing for a moment |
//! | has ended | given up at the release; its contents were its owner's to save, and are named as lost |
//! | any of these, and a process has pinned it | it stays, in its owner too |
//!
//! The same applies to processes that hold memory which an owner exports: otherwise the owner would save memory to which they
//! still write. So each process names the processes with which it shares memory, except for those that it knows to have ended.
//! No list of names decides which processes live.
//!
//! Saving keeps every handle, so undoing it needs no peer. The owner keeps released memory as long as an importer may need it,
//! even if its application frees the memory. The memory is created again, importers fetch it, and the owner frees it when the
//! resume is committed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use vmm_pool::{AllocationId, Shareable, StayReason};

use crate::identity::MemberId;

/// The shared device memory that one process holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct References {
    /// The process's own memory that others hold or may still fetch.
    pub given: Vec<Shareable>,
    /// Memory that it has imported, by owner.
    pub taken: Vec<(MemberId, Vec<Shareable>)>,
    /// Is some of the memory to pause among `given`?
    pub shares_scope: bool,
    /// Processes of other tenants that have some of its memory open, by their own statements.
    pub lent: Vec<MemberId>,
    /// The processes of its tenant with which it shares memory, except for those that it knows to have ended.
    pub partners: Vec<Partner>,
}

/// A process with which another one shares memory, and which that one does not know to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Partner {
    /// The partner's identity.
    pub member: MemberId,
    /// The partner's process id in the pid namespace of the process that names it, if the kernel tells.
    pub pid: Option<u32>,
}

/// An allocation that a pause leaves on its device in all processes that hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stay {
    /// The allocation.
    pub id: AllocationId,
    /// The reason.
    pub reason: StayReason,
}

impl References {
    /// Makes the report from the pool's.
    pub fn new(references: vmm_pool::References, partners: Vec<Partner>) -> Self {
        let taken = references.taken.into_iter().map(|(owner, held)| (owner.into(), held));
        let shares_scope = references.shares_selection;
        let lent = references.lent.into_keys().map(MemberId::from).collect();
        Self { given: references.given, taken: taken.collect(), shares_scope, lent, partners }
    }
}

/// Processes with which another process shares memory and that are not in `found`. Nothing may be decided without them.
pub fn missing(
    partners: impl Iterator<Item = Partner>,
    found: &BTreeSet<MemberId>,
) -> Vec<Partner> {
    let missing = partners.filter(|partner| !found.contains(&partner.member));
    let by_member: BTreeMap<MemberId, Partner> =
        missing.map(|found| (found.member, found)).collect();
    by_member.into_values().collect()
}

/// Returns the imported memory that must stay. `members` take part in the pause, and have reported the memory that they hold;
/// `bystanders` live and do not take part. No process is [`missing`].
///
/// Memory of an owner that has ended is not included, unless it is pinned. That memory is given up, since only its owner could
/// save its contents.
pub fn decide(members: &[(MemberId, &References)], bystanders: &BTreeSet<MemberId>) -> Vec<Stay> {
    let mut owned: HashMap<AllocationId, MemberId> = HashMap::new();
    let mut pinned: BTreeSet<AllocationId> = BTreeSet::new();
    for (member, references) in members {
        owned.extend(references.given.iter().map(|held| (held.id, *member)));
        let taken = references.taken.iter().flat_map(|(_, held)| held);
        let held = references.given.iter().chain(taken);
        pinned.extend(held.filter(|held| held.is_pinned).map(|held| held.id));
    }
    let takes_part: BTreeSet<MemberId> = members.iter().map(|(member, _)| *member).collect();
    let mut stays: BTreeMap<AllocationId, StayReason> = BTreeMap::new();
    let all_taken = members.iter().flat_map(|(_, references)| &references.taken);
    for (owner, held) in all_taken.flat_map(|(owner, held)| held.iter().map(move |h| (*owner, h))) {
        let reason = match owned.get(&held.id) {
            None if takes_part.contains(&owner) => Some(StayReason::LetGo),
            None if bystanders.contains(&owner) => Some(StayReason::OwnerApart),
            Some(_) | None => pinned.contains(&held.id).then_some(StayReason::Pinned),
        };
        if let Some(reason) = reason {
            stays.insert(held.id, reason);
        }
    }
    stays.into_iter().map(|(id, reason)| Stay { id, reason }).collect()
}

#[cfg(test)]
mod tests {
    mod model;
    mod search;

    use super::*;

    fn held(number: u8) -> Shareable {
        Shareable { id: AllocationId([number; 16]), is_pinned: false }
    }

    fn pinned(number: u8) -> Shareable {
        Shareable { is_pinned: true, ..held(number) }
    }

    fn owner(given: &[Shareable]) -> References {
        References { given: given.to_vec(), ..References::default() }
    }

    fn importer(owner: u64, held: &[Shareable]) -> References {
        References { taken: vec![(MemberId(owner), held.to_vec())], ..References::default() }
    }

    fn decided(all: &[(u64, References)], bystanders: &[u64]) -> Vec<(u8, StayReason)> {
        let members: Vec<_> = all.iter().map(|(id, held)| (MemberId(*id), held)).collect();
        let bystanders = bystanders.iter().map(|id| MemberId(*id)).collect();
        let stays = decide(&members, &bystanders).into_iter();
        stays.map(|stay| (stay.id.0[0], stay.reason)).collect()
    }

    #[test]
    fn who_shares_memory_and_is_not_found_is_missing_once() {
        let partner = |member| Partner { member: MemberId(member), pid: Some(7) };
        let said = || [partner(3), partner(1), partner(3), partner(2)].into_iter();
        assert_eq!(missing(said(), &BTreeSet::from([1, 2, 3].map(MemberId))), []);
        assert_eq!(missing(said(), &BTreeSet::from([MemberId(1)])), [partner(2), partner(3)]);
    }

    #[test]
    fn what_its_owner_has_leaves_with_it() {
        let all = [(1, owner(&[held(7), held(8)])), (2, importer(1, &[held(7)]))];
        assert_eq!(decided(&all, &[]), []);
    }

    #[test]
    fn what_its_owner_let_go_stays_for_all_who_hold_it() {
        let all = [
            (1, owner(&[held(7)])),
            (2, importer(1, &[held(7), held(8)])),
            (3, importer(1, &[held(8)])),
        ];
        assert_eq!(decided(&all, &[]), [(8, StayReason::LetGo)]);
    }

    #[test]
    fn what_is_pinned_by_anybody_stays_everywhere() {
        let by_importer = [(1, owner(&[held(7)])), (2, importer(1, &[pinned(7)]))];
        assert_eq!(decided(&by_importer, &[]), [(7, StayReason::Pinned)]);
        let by_owner = [(1, owner(&[pinned(7)])), (2, importer(1, &[held(7)]))];
        assert_eq!(decided(&by_owner, &[]), [(7, StayReason::Pinned)]);
        // No other process holds the memory: its owner's own pin keeps it.
        assert_eq!(decided(&[(1, owner(&[pinned(7)]))], &[]), []);
    }

    #[test]
    fn memory_of_the_dead_is_given_up_and_of_bystanders_stays() {
        let all = [(2, importer(1, &[held(7)]))];
        assert_eq!(decided(&all, &[]), []);
        assert_eq!(decided(&all, &[1]), [(7, StayReason::OwnerApart)]);
        let pinned_of_the_dead = [(2, importer(1, &[pinned(7)])), (3, importer(1, &[held(7)]))];
        assert_eq!(decided(&pinned_of_the_dead, &[]), [(7, StayReason::Pinned)]);
    }
}
