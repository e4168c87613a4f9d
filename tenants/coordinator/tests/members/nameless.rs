//! Members that share memory with a live process that is not found in the run directory.

use super::*;
use sublet_protocol::references::Partner;

/// Makes a member of `script` that shares memory with a live process of that identity.
fn sharing_with(member: u64, script: Script) -> Script {
    let partner = Partner { member: MemberId(member), pid: Some(std::process::id()) };
    Script { partner: Some(partner), ..script }
}

fn is_refused_for(error: &Trouble, member: u64) {
    let failures = error.failures();
    assert!(failures.iter().all(|one| one.who.member == MemberId(member)), "{error}");
    let kinds: Vec<_> = failures.iter().map(|one| one.failure.kind).collect();
    assert_eq!(kinds, [FailureKind::Nameless], "{error}");
    assert!(error.left_unchanged() && error.is_retryable(), "{error}");
}

#[test]
fn a_pause_is_refused_without_one_that_shares_memory_and_lives() {
    let world = World::of(&[active(), sharing_with(9, active())]);
    let error = world.coordinator().pause(&mut quiet).unwrap_err();
    is_refused_for(&error, 9);
    assert_eq!(world.states(), [MemberState::Active; 2]);
    assert!(!world.phases_of(1).contains(&Phase::Prepare));
}

#[test]
fn a_resume_is_refused_before_it_begins_without_one_that_shares_memory_and_lives() {
    let world = World::of(&[paused(), sharing_with(9, paused())]);
    let error = world.coordinator().resume(&mut quiet).unwrap_err();
    is_refused_for(&error, 9);
    assert_eq!(world.states(), [MemberState::Paused; 2]);
    assert_eq!(world.phases_of(1), []);
}

#[test]
fn one_that_is_found_is_missed_by_nobody() {
    let world = World::of(&[sharing_with(2, active()), sharing_with(1, active())]);
    report(world.coordinator().pause(&mut quiet).unwrap());
    report(world.coordinator().resume(&mut quiet).unwrap());
}
