//! Communicators that are made from others, refused, or left.

use super::*;

const PARENT: usize = 500;
const CHILD: usize = 600;

/// Makes rank `rank` of 3 of communicator `ID`.
fn rank_of_three(rank: i32) -> (Fake, Collectives) {
    let (fake, all) = (Fake::default(), Collectives::default());
    all.create(&fake, "init", (ID, rank, 3), 8, || {
        fake.write(8, PARENT);
        ok()
    });
    (fake, all)
}

fn ids(fake: &Fake) -> Vec<CommunicatorId> {
    fake.cut.ranks().iter().map(|local| local.communicator).collect()
}

#[test]
fn a_shrinking_that_aborts_leaves_the_parents_seat_before_it_waits() {
    let (fake, all) = job();
    reduce(&fake, &all, ok());
    all.shrink(&fake, (PARENT, true), &[2], 16, || {
        assert!(!ids(&fake).contains(&ID), "the parent's counts hold others up");
        assert_eq!(fake.cut.report(0).given_up, [ID]);
        fake.write(16, CHILD);
        ok()
    });
    all.launch(&fake, "ncclAllReduce", (CHILD, Operation::Collective), 3, ok);
    let child = identity::of_shrink(ID, 0, &[2]);
    assert_eq!(fake.count(child, Series::Collectives, 1), 1);
    // The parent can still be used. The program gets one message about it.
    for _ in 0..2 {
        assert_eq!(reduce(&fake, &all, ok()), NcclResult::SUCCESS);
    }
    assert_eq!(fake.notes.borrow().len(), 1, "{:?}", fake.notes.borrow());
    assert_eq!(fake.collectives(), 0);
}

#[test]
fn a_shrinking_that_does_not_abort_leaves_the_parent_as_it_is() {
    let (fake, all) = job();
    all.shrink(&fake, (PARENT, false), &[2], 16, ok);
    reduce(&fake, &all, ok());
    assert_eq!(fake.collectives(), 1);
}

#[test]
fn a_revoked_communicator_can_be_split_and_its_children_count() {
    let (fake, all) = job();
    fake.ranks.borrow_mut().insert(CHILD, (0, 2));
    all.revoke(&fake, PARENT, ok);
    all.split(&fake, PARENT, 3, 16, || {
        fake.write(16, CHILD);
        ok()
    });
    all.launch(&fake, "ncclAllReduce", (CHILD, Operation::Collective), 3, ok);
    assert_eq!(fake.count(identity::of_split(ID, 0, 3), Series::Collectives, 0), 1);
    assert_eq!(fake.notes.borrow().len(), 0);
}

#[test]
fn what_nccl_refuses_to_revoke_or_to_end_is_counted_as_before() {
    let (fake, all) = job();
    assert_eq!(all.revoke(&fake, PARENT, || FAILED), FAILED);
    reduce(&fake, &all, ok());
    assert_eq!(all.finalize(&fake, PARENT, || FAILED), FAILED);
    assert_eq!(all.destroy(&fake, PARENT, || FAILED), FAILED);
    reduce(&fake, &all, ok());
    all.group_start(ok);
    all.destroy(&fake, PARENT, ok);
    all.group_end(&fake, || FAILED);
    reduce(&fake, &all, ok());
    assert_eq!(fake.collectives(), 3);
    let end = fake.cut.counter(Lane { communicator: ID, series: Series::End }, 1);
    assert_eq!(end.launched(), 0);
    all.destroy(&fake, PARENT, ok);
    assert_eq!(end.launched(), 1, "now it has ended");
    assert_eq!(ids(&fake), []);
}

#[test]
fn a_making_that_one_rank_fails_to_begin_does_not_shift_the_numbers_of_the_next() {
    let children = [0, 1].map(|rank| {
        let (fake, all) = rank_of_three(rank);
        let arrive = || {
            fake.write(16, CHILD);
            ok()
        };
        if rank == 0 {
            // The program passes a wrong argument, and tries again.
            all.split(&fake, PARENT, 1, 16, || FAILED);
            all.group_start(ok);
            all.split(&fake, PARENT, 1, 16, ok);
            all.split(&fake, PARENT, -1, 16, ok);
            all.group_end(&fake, || FAILED);
            all.shrink(&fake, (PARENT, false), &[2], 16, || FAILED);
            all.grow(&fake, (PARENT, 5), (None, -1), 16, || FAILED);
        }
        fake.ranks.borrow_mut().insert(CHILD, (rank.unsigned_abs(), 2));
        all.split(&fake, PARENT, 1, 16, arrive);
        all.shrink(&fake, (PARENT, false), &[2], 16, arrive);
        all.grow(&fake, (PARENT, 5), (None, -1), 16, arrive);
        ids(&fake)
    });
    assert_eq!(children[0].len(), 4);
    assert_eq!(children[0], children[1]);
}

#[test]
fn communicators_of_one_unique_id_are_told_apart_by_their_order() {
    let made = [0, 1].map(|rank| {
        let (fake, all) = rank_of_three(rank);
        all.create(&fake, "init", (ID, rank, 3), 16, || FAILED);
        all.create(&fake, "init", (ID, rank, 3), 16, || {
            fake.write(16, CHILD);
            ok()
        });
        all.launch(&fake, "ncclAllReduce", (CHILD, Operation::Collective), 3, ok);
        let rank = rank.unsigned_abs();
        assert_eq!(fake.count(ID, Series::Collectives, rank), 0);
        let second = identity::of_reuse(ID, 1);
        assert_eq!(fake.count(second, Series::Collectives, rank), 1);
        all.destroy(&fake, CHILD, ok);
        assert_eq!(ids(&fake), [ID], "ending the second leaves the first its seat");
        second
    });
    assert_eq!(made[0], made[1]);
}

#[test]
fn identities_that_were_used_once_are_remembered_to_a_limit() {
    let (fake, all) = rank_of_three(0);
    for id in 0..10_000 {
        all.create(&fake, "init", (CommunicatorId(1000 + id), 0, 1), 16, || {
            fake.write(16, CHILD);
            ok()
        });
        all.destroy(&fake, CHILD, ok);
        // An identity that is used again and again, as under NCCL_COMM_ID.
        all.create(&fake, "init", (ID, 0, 1), 16, ok);
        all.destroy(&fake, CHILD, ok);
    }
    let uses = all.uses.lock().unwrap();
    assert!(uses.len() <= 4096, "{}", uses.len());
    assert_eq!(uses[&(ID, 0)], 10_001);
}

#[test]
fn a_grown_communicator_is_one_for_old_and_new_ranks() {
    let unique = CommunicatorId(99);
    let grow = |parent, rank, id| {
        let (fake, all) = rank_of_three(rank);
        all.grow(&fake, (parent, 4), (id, if parent == 0 { 3 } else { -1 }), 16, || {
            fake.write(16, CHILD);
            ok()
        });
        all.launch(&fake, "ncclAllReduce", (CHILD, Operation::Collective), 3, ok);
        fake
    };
    let grown = identity::of_grow(ID, 0, 4);
    let (root, other, new) =
        (grow(PARENT, 0, Some(unique)), grow(PARENT, 1, None), grow(0, 0, Some(unique)));
    assert_eq!(root.count(grown, Series::Creation, 0), 1);
    assert_eq!(root.count(grown, Series::Collectives, 0), 1);
    assert_eq!(other.count(grown, Series::Collectives, 1), 1);
    assert_eq!(new.count(unique, Series::Collectives, 3), 1);
    assert_eq!(root.cut.report(0).aliases, [(grown, unique)]);
    let reports = [&root, &other, &new].map(|fake| fake.cut.report(0));
    let last = reports.iter().map(|report| report.ranks.iter().filter(|r| r.ranks == 4).count());
    assert_eq!(last.sum::<usize>(), 3);
}
