//! Shared memory that a device outside the driver's view has pinned, in whichever process.

use tenants::coordinator::Outcome;
use tenants::scope::Scope;
use tenants::wire::Action;

use crate::stage::{Stage, UNIT, assert_one_memory, assert_used, holds, share, tags, written};

#[test]
fn memory_pinned_by_its_importer_stays_in_its_owner_too() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let (_, there) = share(&owner, handle, &importer, 2);
    let third = stage.join();
    let (_, at_third) = share(&owner, handle, &third, 2);
    assert_eq!(importer.pool().enter().pin(there, "registered with a network card"), 2 * UNIT);
    for seed in 8..10 {
        let notes = stage.pause();
        // It is told once, by its owner.
        let told = "4 MiB of device memory stay: registered with a network card by a process that shares it";
        assert_eq!(notes, [told]);
        assert!(!notes.iter().any(|note| note.contains("not given back")), "{notes:?}");
        assert_used(&owner, 2 * UNIT, "one memory, and it stays");
        stage.resume();
        assert_one_memory((&owner, at_owner), (&importer, there), seed);
        assert_one_memory((&importer, there), (&third, at_third), seed + 10);
    }
}

#[test]
fn a_tag_that_is_all_pinned_in_its_owner_stays_with_its_importers() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "kv", 7);
    let (_, there) = share(&owner, handle, &importer, 2);
    owner.pool().enter().pin(at_owner, "registered with a network card");
    stage.must(Action::Pause, tags("kv"));
    assert_eq!(holds(&importer, there, 7), Ok(true), "the process runs on");
    let resumed = stage.act(Action::Resume, tags("kv")).expect("nothing was away");
    assert_eq!(resumed, Outcome::AlreadyActive);
    stage.pause();
    stage.resume();
    assert_one_memory((&owner, at_owner), (&importer, there), 8);
}

#[test]
fn imports_of_a_tag_whose_owner_has_them_no_more_are_asked_for_by_the_tag() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, _) = written(&owner, 2, "kv", 7);
    let _there = share(&owner, handle, &importer, 2);
    stage.must(Action::Pause, tags("kv"));
    owner.leave();
    // Its owner is no member any more: there is something to do, which cannot be done.
    let refused = stage.act(Action::Resume, tags("kv")).expect_err("it cannot come back");
    assert!(refused.left_unchanged(), "{refused}");
    assert!(refused.to_string().contains("the memory of these tags is paused"), "{refused}");
    assert!(stage.act(Action::Resume, Scope::Whole).is_err());
}
