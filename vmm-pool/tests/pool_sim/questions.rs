//! Questions about addresses, and calls that name all that they touch, while memory is away.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use vmm_pool::budget::Counted;
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, RawContext, VaRange};
use vmm_pool::{Facts, Known};

use crate::stage::{DEVICE, UNIT, create, kept, map, native, node, pause, pool, resume};

const CONTEXT: RawContext = RawContext(77);

#[test]
fn the_driver_answers_for_what_is_here_and_the_ledger_for_what_is_away() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = pool.block_allocate(100, &prop, &[DEVICE], kept()).expect("a block");
    pool.holdings().set_block_context(block, CONTEXT);
    let inside = DeviceAddress(block.0 + 64);
    let elsewhere = DeviceAddress(block.0 + UNIT);
    assert_eq!(pool.holdings().who_knows(elsewhere), Known::Elsewhere);
    let Known::Here(sight) = pool.holdings().who_knows(inside) else { panic!("it is mapped") };
    assert!(pool.holdings().is_as_seen(inside, sight));

    pause(&pool);
    assert_eq!(pool.holdings().who_knows(elsewhere), Known::Elsewhere);
    let access = vec![AccessDesc::read_write(DEVICE)];
    let mapping = VaRange::new(block, UNIT);
    let context = Some(CONTEXT);
    let number = pool.memory_number(inside).expect("a number");
    let block_bytes = Some(100);
    let facts = Facts { mapping, number, block_bytes, reserved: None, prop, access, context };
    assert_eq!(pool.holdings().who_knows(inside), Known::Away(facts));
    assert!(!pool.holdings().is_as_seen(inside, sight));

    resume(&pool);
    assert!(matches!(pool.holdings().who_knows(inside), Known::Here(_)));
    assert!(!pool.holdings().is_as_seen(inside, sight), "it was away in between");
    assert_eq!(pool.memory_number(inside), Some(number), "it is the same memory");
    assert_eq!(pool.memory_number(elsewhere), None);
}

#[test]
fn the_plain_memory_of_a_context_is_found_by_it() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let [mine, other] =
        [(); 2].map(|()| pool.block_allocate(UNIT, &prop, &[DEVICE], kept()).expect("a block"));
    pool.holdings().set_block_context(mine, CONTEXT);
    let small = DeviceAddress(4096);
    pool.natives().allocated(small, native(512, DEVICE, Some(CONTEXT), Counted::No));
    pool.natives().allocated(DeviceAddress(8192), native(512, DEVICE, None, Counted::No));
    let counted = pool.report();
    let taken = pool.take_plain_memory(CONTEXT);
    assert_eq!(taken.blocks().collect::<Vec<_>>(), [VaRange::new(mine, UNIT)]);
    assert_eq!(taken.natives(), 1);
    pool.plain_memory_stays(CONTEXT, taken);
    assert_eq!(format!("{:?}", pool.report()), format!("{counted:?}"), "it is all there again");

    let taken = pool.take_plain_memory(CONTEXT);
    assert_eq!((taken.blocks().count(), taken.natives()), (1, 1));
    pool.enter_giving_up().plain_memory_ends(taken);
    let none = pool.take_plain_memory(CONTEXT);
    assert_eq!((none.blocks().count(), none.natives()), (0, 0));
    pool.plain_memory_stays(CONTEXT, none);
    assert_eq!(pool.range_of(mine), None);
    assert!(pool.range_of(other).is_some());
}

/// The driver gives the value of an ended context to the next one immediately.
#[test]
fn what_ends_with_a_context_is_not_taken_for_that_of_the_next_of_its_value() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = |context| {
        let made = pool.block_allocate(UNIT, &prop, &[DEVICE], kept()).expect("a block");
        pool.holdings().set_block_context(made, context);
        made
    };
    let entered = pool.enter_giving_up();
    let first = block(CONTEXT);
    let of_first = pool.take_plain_memory(CONTEXT);
    // The first context has ended, and another thread has made one of the same value, and ends it.
    let of_second = pool.take_plain_memory(CONTEXT);
    assert_eq!(of_second.blocks().count(), 0, "its memory is that of the first");
    entered.plain_memory_ends(of_first);
    // The first thread has made its next context, and memory, which gets the same addresses.
    let next = block(RawContext(CONTEXT.0 + 1));
    assert_eq!(next, first);
    entered.plain_memory_ends(of_second);
    assert!(pool.range_of(next).is_some(), "it is in use");
}

#[test]
fn memory_that_is_freed_while_its_context_ends_is_not_ended_for_its_addresses() {
    let pool = pool(&node());
    let prop = AllocationProp::pinned_on(DEVICE);
    let block = || pool.block_allocate(UNIT, &prop, &[DEVICE], kept()).expect("a block");
    let entered = pool.enter_giving_up();
    let first = block();
    pool.holdings().set_block_context(first, CONTEXT);
    let taken = [(); 2].map(|()| pool.take_plain_memory(CONTEXT));
    entered.block_free(first).expect("freed");
    assert_eq!(block(), first, "another thread has it");
    let [taken, _none] = taken;
    entered.plain_memory_ends(taken);
    assert!(pool.range_of(first).is_some(), "it is in use");
}

#[test]
fn a_call_that_touches_nothing_that_is_away_goes_in_and_any_other_waits() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    let away = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    let pinned = create(&pool, DEVICE, 1, kept());
    let stays = map(&pool, pinned, UNIT, &[AccessDesc::read_write(DEVICE)]);
    pool.pin(stays, "a network card holds it");
    let elsewhere = VaRange::new(DeviceAddress(4096), 4096);
    pause(&pool);
    assert!(pool.pass_touching("a copy", &[elsewhere]).is_offloaded());
    assert!(pool.pass_touching("a copy", &[stays, elsewhere]).is_offloaded(), "it never left");
    let (tell, hear) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let last_byte = VaRange::new(DeviceAddress(away.end().0 - 1), 1);
            let pass = pool.pass_touching("a copy", &[elsewhere, last_byte]);
            tell.send(pass.is_offloaded()).expect("a listener");
        });
        while pool.gate().waits() == 0 {
            thread::yield_now();
        }
        assert!(hear.try_recv().is_err(), "it is in before the resume");
        resume(&pool);
        assert_eq!(hear.recv_timeout(Duration::from_secs(10)), Ok(false));
    });
}
