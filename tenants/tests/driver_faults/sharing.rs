//! Joining, exporting and importing, and freeing while paused.

use std::sync::Arc;

use sublet_stage::memory::reserve;
use sublet_stage::{Place, redeem};
use tenants::member::{ImportError, Member};
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::{FaultSpan, SimOptions};
use vmm_pool::driver::{AccessDesc, AllocationProp, DriverCode, VaRange};
use vmm_pool::{Contents, PoolError};

use crate::stage::{Stage, UNIT, class, config, device_of, free_addresses, holds, tenant, write};

#[test]
fn any_call_of_joining_may_fail_and_nothing_is_left_behind() {
    let place = Place::new(&[64 << 20; 2]).expect("a place");
    for nth in 1.. {
        let driver = Arc::new(place.driver(SimOptions::default()));
        driver.faults().fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let joined = Member::join(config(place.run_dir()), Arc::clone(&driver));
        let members = place.run_dir().existing_tenant(&tenant()).expect("readable");
        let members = members.map_or(0, |dir| dir.members().expect("readable").len());
        match joined {
            Ok(member) => {
                assert_eq!(driver.faults().fired(), 0, "call {nth} was hidden");
                assert!(nth > 3, "only {nth} calls were met");
                assert_eq!(members, 1);
                member.leave();
                return;
            }
            Err(error) => {
                assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN"), "{error}");
                assert_eq!(members, 0, "call {nth} left a socket behind");
            }
        }
    }
}

/// The result of an operation that may fail once, and then must succeed.
fn again<T>(mut operation: impl FnMut() -> Result<T, ImportError>) -> T {
    operation().unwrap_or_else(|first| {
        operation().unwrap_or_else(|second| panic!("{first}; second try: {second}"))
    })
}

/// As [`again`], for memory given back: after a failure the reference is gone, and the pool keeps the rest.
fn given_back(outcome: Result<(), PoolError>) {
    match outcome {
        Ok(()) | Err(PoolError::Driver { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

/// One process makes memory, another imports and maps it, and both let it go.
fn share_and_let_go(stage: &Stage) {
    let [owner, importer] = [&stage.members[0], &stage.members[1]];
    let kept = || class(Contents::Keep);
    let prop = AllocationProp::pinned_on(device_of(0));
    let made = again(|| Ok(owner.pool().enter().create(UNIT, &prop, kept())?));
    let ticket = again(|| owner.sharing().issue_ticket(&owner.pool().enter(), made));
    let imported = again(|| redeem(importer, &ticket));
    let mut places = Vec::new();
    for (member, handle, device) in
        [(owner, made, device_of(0)), (importer, imported, device_of(1))]
    {
        let range = reserve(member.pool(), UNIT);
        again(|| Ok(member.pool().enter().map(range, 0, handle)?));
        let rights = [AccessDesc::read_write(device)];
        again(|| Ok(member.pool().enter().set_access(range, &rights)?));
        given_back(member.pool().enter_giving_up().release(handle));
        places.push((member, device, range));
    }
    write(owner, device_of(0), places[0].2, 77);
    for (member, device, range) in places {
        assert!(holds(member, device, range, 77));
        again(|| Ok(member.pool().enter_giving_up().unmap(range)?));
        free_addresses(member, range);
    }
    let block =
        again(|| Ok(owner.pool().enter().block_allocate(UNIT, &prop, &[device_of(0)], kept())?));
    write(owner, device_of(0), VaRange::new(block, UNIT), 78);
    again(|| Ok(owner.pool().enter_giving_up().block_free(block)?));
}

#[test]
fn any_call_of_sharing_may_fail_once_and_the_same_request_then_succeeds() {
    let stage = Stage::new();
    for member in 0..2 {
        for nth in 1.. {
            let before = stage.clear_faults();
            stage.faults(member).fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
            share_and_let_go(&stage);
            let met = stage.clear_faults() > before;
            stage.must(Action::Pause);
            stage.must(Action::Resume);
            stage.assert_intact(&format!("sharing, call {nth} of member {member}"));
            if !met {
                assert!(nth > 5, "only {nth} calls were met");
                break;
            }
        }
    }
    stage.assert_ticket_is_good();
}

#[test]
fn any_call_of_freeing_while_paused_may_fail_and_nothing_is_left_over() {
    let stage = Stage::new();
    let member = &stage.members[0];
    let kept = || class(Contents::Keep);
    let prop = AllocationProp::pinned_on(device_of(0));
    for nth in 1.. {
        let blocks = [(); 3].map(|()| {
            member
                .pool()
                .enter()
                .block_allocate(UNIT, &prop, &[device_of(0)], kept())
                .expect("a block")
        });
        let handle = member.pool().enter().create(UNIT, &prop, kept()).expect("memory");
        let range = reserve(member.pool(), UNIT);
        member.pool().enter().map(range, 0, handle).expect("mapping");
        stage.must(Action::Pause);
        stage.assert_all(MemberState::Paused, "freeing");
        let before = stage.clear_faults();
        stage.faults(0).fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        for block in blocks {
            member
                .pool()
                .enter_giving_up()
                .block_free(block)
                .expect("freed, whatever the driver says");
        }
        member.pool().enter_giving_up().unmap(range).expect("from the table");
        member.pool().enter_giving_up().release(handle).expect("from the table");
        let met = stage.clear_faults() > before;
        free_addresses(member, range);
        stage.assert_gone("after freeing");
        stage.must(Action::Resume);
        stage.assert_intact(&format!("freeing while paused, call {nth}"));
        if !met {
            assert!(nth > 3, "only {nth} calls were met");
            break;
        }
    }
    stage.assert_ticket_is_good();
}
