//! Tickets and `cudaIpc` handles that are redeemed while their owner is being paused.

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Event, Options, Outcome, Step, TakesPart};
use tenants::member::ImportError;
use tenants::scope::{Scope, TagNames};
use tenants::ticket::Ticket;
use tenants::wire::{Action, MemberState, Phase};
use vmm_pool::driver::{AllocationProp, DeviceAddress, DriverOp, VaRange};
use vmm_pool::gate::Passage;

use crate::stage::{
    DEVICE, Process, Stage, UNIT, assert_one_memory, assert_used, free, holds, kept, map, options,
    redeem, share, tags, tenant, write, written,
};

/// Redeems on a thread of its own, inside its gate as an application's call is, and maps what it gets.
fn redeems(importer: &Process, ticket: &OwnedFd) -> JoinHandle<VaRange> {
    let (importer, ticket) = (importer.clone(), ticket.try_clone().expect("a copy"));
    std::thread::spawn(move || {
        let imported = redeem(&importer, &ticket).expect("redeemed in the end");
        let _pass = importer.gate().pass(Passage::Use);
        map(&importer, imported, 2)
    })
}

/// A process joins when `phase` begins, and comes with a ticket.
fn joined_in(phase: Phase) {
    let stage = Stage::new();
    let owner = stage.join();
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let ticket = owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket");
    let mut late: Option<(Process, JoinHandle<VaRange>)> = None;
    let outcome = stage.act_with(Action::Pause, options(Scope::Whole), &mut |event| {
        if let Event::StepStarted { step: Step::Phase(begun), .. } = event
            && begun == phase
            && late.is_none()
        {
            let importer = stage.join();
            let redeeming = redeems(&importer, &ticket);
            late = Some((importer, redeeming));
        }
    });
    assert!(outcome.is_ok(), "{phase:?}: {outcome:?}");
    let (importer, redeeming) = late.expect("it joined");
    assert_eq!(owner.lifecycle().state(), MemberState::Paused, "{phase:?}");
    // A process that is not paused waits with the ticket in its hand.
    let is_there = importer.lifecycle().state() == MemberState::Active;
    if is_there {
        assert_used(&owner, 0, &format!("{phase:?}: nobody was given the old memory"));
    }
    stage.resume();
    let at_importer = redeeming.join().expect("redeemed");
    assert_eq!(holds(&importer, at_importer, 7), Ok(true), "{phase:?}");
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
    assert_used(&owner, 2 * UNIT, &format!("{phase:?}"));
    // All of them together, once more.
    stage.pause();
    assert_used(&owner, 0, &format!("{phase:?}"));
    stage.resume();
    assert_one_memory((&importer, at_importer), (&owner, at_owner), 9);
}

#[test]
fn a_process_that_joins_in_a_pause_and_redeems_a_ticket_gets_the_memory_that_all_see() {
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare, Phase::Release] {
        joined_in(phase);
    }
}

#[test]
fn a_process_that_waits_with_a_ticket_of_a_paused_owner_can_be_paused_itself() {
    let stage = Stage::new();
    let owner = stage.join();
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let ticket = owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket");
    stage.pause();
    let importer = stage.join();
    let redeeming = redeems(&importer, &ticket);
    // It is refused at least once before its own pause.
    let deadline = Instant::now() + Duration::from_secs(20);
    while importer.gate().waits() == 0 && Instant::now() < deadline {
        if stage.act(Action::Pause, Scope::Whole).is_ok() {
            break;
        }
    }
    assert_eq!(
        (owner.lifecycle().state(), importer.lifecycle().state()),
        (MemberState::Paused, MemberState::Paused)
    );
    stage.resume();
    let at_importer = redeeming.join().expect("redeemed");
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
}

/// A block with contents 7, and a handle for it as `cudaIpc` gives them.
fn block(owner: &Process, tag: &str) -> (VaRange, Ticket, u64) {
    let prop = AllocationProp::pinned_on(DEVICE);
    let start =
        owner.pool().enter().block_allocate(2 * UNIT, &prop, &[DEVICE], kept(tag)).expect("block");
    let range = VaRange::new(start, 2 * UNIT);
    write(owner, range, 7);
    let (allocation, asked_bytes, size_bytes) =
        owner.pool().enter_giving_up().block_identity(start).expect("known");
    let ticket = Ticket::uncounted(allocation, size_bytes, owner.presence().id(), tenant());
    (range, ticket, asked_bytes)
}

fn own_tags(owner: &Process) -> Scope {
    Scope::Tags { tags: TagNames::All, owner: Some(owner.presence().id()) }
}

fn alone(owner: &Process) -> Options {
    Options { takes_part: TakesPart::Alone(owner.presence().id()), ..options(own_tags(owner)) }
}

#[test]
fn a_handle_opened_while_its_owner_pauses_alone_is_refused_by_the_tags_name_and_opens_afterwards() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (at_owner, ticket, asked_bytes) = block(&owner, "kv");
    let (tell, hear) = mpsc::channel();
    let opening = |ticket: Ticket| {
        let (importer, tell) = (importer.clone(), tell.clone());
        std::thread::spawn(move || {
            let entered = importer.pool().enter();
            tell.send(importer.sharing().redeem_ticket(&entered, &ticket, "test")).expect("heard");
        })
    };
    let mut opened = None;
    let outcome = stage.act_with(Action::Pause, alone(&owner), &mut |event| {
        if let Event::StepStarted { step: Step::Phase(Phase::Prepare), .. } = event {
            opened = Some(opening(ticket.clone()));
        }
    });
    assert!(matches!(outcome, Ok(Outcome::Completed(_))), "{outcome:?}");
    let refused = hear.recv_timeout(Duration::from_secs(30)).expect("an answer");
    let Err(ImportError::Refused(failure)) = refused else { panic!("{refused:?}") };
    assert!(failure.message.contains("tag 'kv' is paused"), "{failure}");
    opened.expect("it tried").join().expect("it ended");
    assert_used(&owner, 0, "all of it was freed");

    let resumed = stage.act_with(Action::Resume, alone(&owner), &mut |_| {});
    assert!(matches!(resumed, Ok(Outcome::Completed(_))), "{resumed:?}");
    let handle = importer
        .sharing()
        .redeem_ticket(&importer.pool().enter(), &ticket, "test")
        .expect("it is there");
    let start = importer.pool().enter().block_open(handle, asked_bytes, DEVICE).expect("opened");
    let at_importer = VaRange::new(start, 2 * UNIT);
    assert_eq!(holds(&importer, at_importer, 7), Ok(true));
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
}

#[test]
fn an_alone_pause_of_memory_that_somebody_has_opened_gives_way_to_one_of_all() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (at_owner, ticket, asked_bytes) = block(&owner, "opened");
    let handle = importer
        .sharing()
        .redeem_ticket(&importer.pool().enter(), &ticket, "test")
        .expect("redeemed");
    let start = importer.pool().enter().block_open(handle, asked_bytes, DEVICE).expect("opened");
    let at_importer = VaRange::new(start, 2 * UNIT);
    let refused = stage.act_with(Action::Pause, alone(&owner), &mut |_| {});
    let refused = refused.expect_err("it is shared");
    assert!(refused.is_shared(), "{refused}");
    assert_eq!(holds(&importer, at_importer, 7), Ok(true), "nothing has moved");
    // Who has it open would be waited for.
    tenants::region::agree_to_run_without("opened");
    stage.must(Action::Pause, own_tags(&owner));
    assert_used(&owner, 0, "all of it was freed");
    assert!(holds(&importer, at_importer, 7).is_err());
    stage.must(Action::Resume, own_tags(&owner));
    assert_eq!(holds(&importer, at_importer, 7), Ok(true));
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
}

#[test]
fn mapping_memory_once_more_while_its_tag_is_paused_is_refused_by_the_tags_name() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, _) = written(&owner, 2, "kv", 7);
    let (imported, _) = share(&owner, handle, &importer, 2);
    stage.must(Action::Pause, tags("kv"));
    for (process, handle) in [(&owner, handle), (&importer, imported)] {
        let driver = process.pool().driver();
        let start = driver.reserve(2 * UNIT, 0, DeviceAddress(0)).expect("a place");
        let refused = process.pool().enter().map(VaRange::new(start, 2 * UNIT), 0, handle);
        let refused = refused.expect_err("it is away");
        assert!(refused.to_string().contains("tag 'kv' is paused"), "{refused}");
    }
}

#[test]
fn a_handle_that_is_opened_while_its_owner_frees_the_memory_is_refused_as_stale() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    for _ in 0..3 {
        let (at_owner, ticket, _) = block(&owner, "");
        // The memory is freed before the driver has looked at it.
        let export = owner.pool().driver().faults().hold(DriverOp::Export);
        let opening = {
            let importer = importer.clone();
            std::thread::spawn(move || {
                importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test")
            })
        };
        assert!(export.is_met(Duration::from_secs(30)), "it asks");
        owner.pool().enter_giving_up().block_free(at_owner.start).expect("freed");
        drop(export);
        let refused = opening.join().expect("it ended").expect_err("it is gone");
        assert!(matches!(refused, ImportError::Stale { .. }), "{refused}");
    }
}

#[test]
fn an_agent_that_panics_hangs_up_says_so_and_goes_on() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (at_owner, ticket, _) = block(&owner, "");
    let redeem = || importer.sharing().redeem_ticket(&importer.pool().enter(), &ticket, "test");
    owner.pool().driver().faults().panic_at(DriverOp::Export);
    let hung_up = redeem().expect_err("its agent has failed");
    assert!(matches!(hung_up, ImportError::Owner { .. }), "{hung_up}");
    let handle = redeem().expect("it goes on");
    let at_importer = map(&importer, handle, 2);
    stage.pause();
    stage.resume();
    assert_one_memory((&owner, at_owner), (&importer, at_importer), 8);
    let coordinator = Coordinator::new(stage.place.run_dir().clone(), tenant(), alone(&owner));
    let stats = coordinator.stats().expect("reachable");
    let mut notes = stats.members.iter().flat_map(|member| &member.notes);
    assert!(notes.any(|note| note.contains("in its agent")), "{stats:?}");
}

#[test]
fn a_second_ticket_for_what_is_held_is_redeemed_or_stays_good_when_its_tag_is_paused() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "kv", 7);
    let tickets = [(); 2]
        .map(|()| owner.sharing().issue_ticket(&owner.pool().enter(), handle).expect("a ticket"));
    let first = redeem(&importer, &tickets[0]).expect("imported");
    stage.must(Action::Pause, tags("kv"));
    let refused = redeem(&importer, &tickets[1]).expect_err("it is away");
    assert!(refused.to_string().contains("tag 'kv' is paused"), "{refused}");
    stage.must(Action::Resume, tags("kv"));
    let second = redeem(&importer, &tickets[1]).expect("the ticket is good still");
    free(&owner, handle, at_owner);
    for imported in [first, second] {
        importer.pool().enter_giving_up().release(imported).expect("released");
    }
    drop(tickets);
    assert_used(&owner, 0, "no ticket holds it any more");
}
