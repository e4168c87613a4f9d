//! Owners that let memory go before those who have imported it: while all run, while all are paused, and by dying.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use tenants::coordinator::{Event, Step};
use tenants::identity::MemberId;
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::scope::Scope;
use tenants::ticket::Ticket;
use tenants::wire::{Action, MemberState, Phase};
use vmm_pool::driver::sim::{FaultSpan, Latency, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DriverCode, DriverOp, VaRange};
use vmm_pool::{AllocationId, VirtualHandle};

use crate::stage::{
    DEVICE, Process, Stage, UNIT, assert_one_memory, assert_used, free, holds, kept, map, options,
    share, tags, tenant, write, written,
};

/// An owner that has let memory with contents 7 go, and the importer that holds it still.
fn let_go(stage: &Stage) -> (Process, Process, VirtualHandle, VaRange) {
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let (imported, at_importer) = share(&owner, handle, &importer, 2);
    free(&owner, handle, at_owner);
    assert_eq!(holds(&importer, at_importer, 7), Ok(true), "the driver keeps it");
    (owner, importer, imported, at_importer)
}

#[test]
fn memory_that_its_owner_let_go_stays_and_pauses_go_on() {
    let stage = Stage::new();
    let (owner, importer, imported, there) = let_go(&stage);
    for round in 0..3 {
        let notes = stage.pause();
        assert_eq!(
            (owner.lifecycle().state(), importer.lifecycle().state()),
            (MemberState::Paused, MemberState::Paused)
        );
        assert!(notes.iter().any(|note| note.contains("let go by its owner")), "{notes:?}");
        assert_used(&owner, 2 * UNIT, "nobody could bring it back");
        stage.resume();
        assert_eq!(holds(&importer, there, 7 + round), Ok(true));
        write(&importer, there, 8 + round);
    }
    free(&importer, imported, there);
    assert_used(&owner, 0, "all of it was freed");
    assert!(stage.pause().is_empty());
    stage.resume();
}

#[test]
fn a_failing_call_beside_memory_that_its_owner_let_go_is_undone() {
    for (op, nth) in [(DriverOp::Unmap, 1), (DriverOp::CopyToHost, 1)] {
        let stage = Stage::new();
        let (owner, importer, _, there) = let_go(&stage);
        let (_, own) = written(&importer, 1, "", 9);
        importer.pool().driver().faults().fail(op, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let refused = stage.act(Action::Pause, Scope::Whole).expect_err("one call fails");
        assert!(refused.left_unchanged(), "{refused}");
        assert_eq!(
            (owner.lifecycle().state(), importer.lifecycle().state()),
            (MemberState::Active, MemberState::Active)
        );
        assert_eq!((holds(&importer, there, 7), holds(&importer, own, 9)), (Ok(true), Ok(true)));
    }
}

#[test]
fn memory_freed_by_its_owner_while_paused_comes_back_for_its_importer() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let (imported, there) = share(&owner, handle, &importer, 2);
    stage.pause();
    free(&owner, handle, at_owner);
    stage.resume();
    assert_eq!(holds(&importer, there, 7), Ok(true));
    assert!(owner.pool().report().devices.is_empty(), "it is the importer's alone now");
    // And through the next pause, in which its owner has it no more.
    stage.pause();
    stage.resume();
    assert_eq!(holds(&importer, there, 7), Ok(true));
    free(&importer, imported, there);
    assert_used(&owner, 0, "all of it was freed");
}

#[test]
fn memory_freed_by_its_owner_while_its_tag_is_paused_comes_back_for_its_importer() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "kv", 7);
    let (_, there) = share(&owner, handle, &importer, 2);
    stage.must(Action::Pause, tags("kv"));
    free(&owner, handle, at_owner);
    stage.must(Action::Resume, tags("kv"));
    assert_eq!(holds(&importer, there, 7), Ok(true));
}

#[test]
fn memory_freed_by_its_importer_while_paused_is_its_owners_alone() {
    let stage = Stage::new();
    let (owner, importer) = (stage.join(), stage.join());
    let (handle, at_owner) = written(&owner, 2, "", 7);
    let (imported, there) = share(&owner, handle, &importer, 2);
    stage.pause();
    free(&importer, imported, there);
    stage.resume();
    assert_eq!(holds(&owner, at_owner, 7), Ok(true));
    free(&owner, handle, at_owner);
    assert_used(&owner, 0, "all of it was freed");
}

#[test]
fn a_communicator_ended_on_one_side_between_pauses_is_no_trouble() {
    let stage = Stage::new();
    let processes = [stage.join(), stage.join()];
    for round in 0_u64..4 {
        // As two ranks with a buffer each that the other has imported.
        let made = [0, 1].map(|rank: usize| written(&processes[rank], 1, "", 100 + rank as u64));
        let theirs = [0, 1]
            .map(|rank: usize| share(&processes[1 - rank], made[1 - rank].0, &processes[rank], 1));
        // One side ends its communicator before the pause, in the pause, or not before its end.
        let early = usize::try_from(round % 2).expect("0 or 1");
        let end = |rank: usize| {
            free(&processes[rank], theirs[rank].0, theirs[rank].1);
            free(&processes[rank], made[rank].0, made[rank].1);
        };
        if round < 2 {
            end(early);
        }
        stage.pause();
        if round >= 2 {
            end(early);
        }
        stage.resume();
        let late = 1 - early;
        assert_eq!(holds(&processes[late], made[late].1, 100 + late as u64), Ok(true));
        assert_eq!(holds(&processes[late], theirs[late].1, 100 + early as u64), Ok(true));
        stage.pause();
        stage.resume();
        end(late);
        assert_used(&processes[0], 0, &format!("round {round}"));
    }
}

/// In a process of its own: owns a block, says where, and waits to be killed.
#[test]
fn plays_an_owner_that_dies() {
    let Ok(dir) = std::env::var("SUBLET_TEST_OWNER_DIR") else {
        return;
    };
    let run_dir = RunDir::open(Some(format!("{dir}/run").into()), None).expect("a run directory");
    let node = SimNode::open(format!("{dir}/node")).expect("the node");
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let config = MemberConfig::new(run_dir, tenant(), "owner", "0.1.0");
    let member = Member::join(config, driver).expect("joined");
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = member
        .pool()
        .enter()
        .block_allocate(2 * UNIT, &prop, &[DEVICE], kept(""))
        .expect("a block");
    write(&member, VaRange::new(block, 2 * UNIT), 5);
    let (id, _, size_bytes) =
        member.pool().enter_giving_up().block_identity(block).expect("a block");
    let said = format!("{id:?} {} {size_bytes}", member.presence().id());
    std::fs::write(format!("{dir}/said.new"), said).expect("written");
    std::fs::rename(format!("{dir}/said.new"), format!("{dir}/said")).expect("renamed");
    std::thread::park_timeout(std::time::Duration::from_mins(3));
}

/// A process that owns memory, and a ticket for it.
fn dying_owner(stage: &Stage) -> (Child, Ticket) {
    let dir = stage.place.path();
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "endings::plays_an_owner_that_dies"]);
    let child =
        command.env("SUBLET_TEST_OWNER_DIR", dir).stdout(Stdio::null()).spawn().expect("a process");
    let said = loop {
        if let Ok(said) = std::fs::read_to_string(dir.join("said")) {
            break said;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(10));
    };
    let words: Vec<&str> = said.split(' ').collect();
    let id = u128::from_str_radix(words[0], 16).expect("an identity");
    let owner = MemberId(u64::from_str_radix(words[1], 16).expect("a member"));
    let size_bytes = words[2].parse().expect("a size");
    let ticket = Ticket::uncounted(AllocationId(id.to_be_bytes()), size_bytes, owner, tenant());
    (child, ticket)
}

#[test]
fn a_death_in_a_pause_takes_all_survivors_back_to_the_same_memory() {
    let stage = Stage::new();
    // Slow to map, so that others are back before it.
    let slow = SimOptions {
        latency: Latency::default().with(DriverOp::Map, 20_000),
        ..SimOptions::default()
    };
    let (middle, last) = (stage.join_with(slow), stage.join());
    let (mut child, ticket) = dying_owner(&stage);
    let of_the_dead =
        middle.sharing().redeem_ticket(&middle.pool().enter(), &ticket, "test").expect("imported");
    let of_the_dead_at = map(&middle, of_the_dead, 2);
    let (handle, at_middle) = written(&middle, 1, "", 7);
    let (_, at_last) = share(&middle, handle, &last, 1);
    let refused = stage.act_with(Action::Pause, options(Scope::Whole), &mut |event| {
        if let Event::StepDone { step: Step::Phase(Phase::Prepare), .. } = event {
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
    });
    let refused = refused.expect_err("one has died");
    assert!(refused.left_unchanged(), "{refused}");
    assert_eq!(
        (middle.lifecycle().state(), last.lifecycle().state()),
        (MemberState::Active, MemberState::Active)
    );
    assert_eq!(holds(&middle, of_the_dead_at, 5), Ok(true), "the driver keeps it, as always");
    assert_eq!(holds(&last, at_last, 7), Ok(true));
    assert_one_memory((&last, at_last), (&middle, at_middle), 8);

    // What the dead had is given up by a pause; all else comes back.
    let notes = stage.pause();
    assert!(notes.iter().any(|note| note.contains("has ended")), "{notes:?}");
    assert_used(&middle, 0, "all of it was freed");
    let refused = stage.act(Action::Resume, Scope::Whole).expect_err("something is lost");
    assert!(refused.to_string().contains("--without-lost"), "{refused}");
    assert!(stage.resume_without_lost().is_ok());
    assert_eq!(holds(&middle, at_middle, 8), Ok(true));
    assert_one_memory((&middle, at_middle), (&last, at_last), 9);
    // What is lost is not given out again by its handle, which would map to nothing.
    let refused = middle
        .sharing()
        .redeem_ticket(&middle.pool().enter(), &ticket, "test")
        .expect_err("nobody has it any more");
    assert!(refused.to_string().contains("could not be asked"), "{refused}");
    free(&middle, of_the_dead, of_the_dead_at);
}
