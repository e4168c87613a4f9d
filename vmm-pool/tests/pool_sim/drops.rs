//! A proof that is dropped undoes what was begun: contents are intact, the gate is where it was, and nothing is left
//! on a device that should not be.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimOptions};
use vmm_pool::driver::{AccessDesc, DriverCode, DriverOp, RawContext};
use vmm_pool::gate::Passage;
use vmm_pool::{
    Away, Contents, Copies, DrainError, Failed, FromOffloaded, FromOpen, NotShut, PoolError,
    Schedule, Selection, Tags, Whose,
};

use crate::faults::Pair;
use crate::process::SimPool;
use crate::stage::{
    CAPACITY_BYTES, DEVICE, GateAt, UNIT, UNLIMITED, WHOLE, class, create, end_streams, free_bytes,
    gate_of, holds, is_frozen, kept, map, node, pattern, pool, resume, write,
};

type Steps = fn(&Pair);

/// The process runs as if there had been no pause, and the next one finds everything.
fn assert_runs(pair: &Pair, when: &str) {
    for pool in &pair.pools {
        assert_eq!(gate_of(pool), GateAt::Open, "{when}");
        assert!(!is_frozen(pool), "{when}: importers are given memory");
        assert_eq!(end_streams(pool), 0, "{when}");
    }
    pair.assert_balance(true, when);
    pair.assert_intact(when);
    pair.pause().expect("the next pause");
    pair.assert_balance(false, when);
    pair.resume().expect("the next resume");
    pair.assert_intact(when);
}

/// The process is paused as before, and can be resumed.
fn assert_is_paused(pair: &Pair, when: &str) {
    for pool in &pair.pools {
        assert_eq!(gate_of(pool), GateAt::Offloaded, "{when}");
        assert!(is_frozen(pool), "{when}: nothing is given that is away");
        assert_eq!(end_streams(pool), 0, "{when}");
    }
    pair.assert_balance(false, when);
    pair.resume().expect("another resume");
    assert_runs(pair, when);
}

fn save(pool: &SimPool) {
    pool.save(&WHOLE, UNLIMITED).expect("saving");
}

fn create_own(pool: &SimPool) {
    pool.create_own(&WHOLE).expect("memory");
}

fn restore_own(pool: &SimPool) {
    create_own(pool);
    pool.restore_own(usize::MAX).expect("contents");
}

#[test]
fn a_shut_gate_that_is_dropped_opens_and_importers_are_given_memory() {
    let pool = pool(&node());
    let held = pool.shut::<FromOpen>();
    assert_eq!(gate_of(&pool), GateAt::Shut);
    // As after a drain that came to nothing.
    pool.holdings().freeze();
    drop(held);
    assert_eq!(gate_of(&pool), GateAt::Open);
    assert!(!is_frozen(&pool));
    pool.holdings().freeze();
    drop(pool.shut::<FromOpen>().reopen());
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false));
}

#[test]
fn a_gate_shut_behind_memory_that_is_away_goes_back_there() {
    let pool = pool(&node());
    create(&pool, DEVICE, 1, kept());
    crate::stage::pause(&pool);
    drop(pool.shut::<FromOffloaded>());
    assert_eq!(gate_of(&pool), GateAt::Offloaded);
    assert!(is_frozen(&pool), "nothing is there to be given");
    resume(&pool);
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false));
}

#[test]
fn one_thing_begins_at_a_time_and_from_where_the_gate_is() {
    let pool = pool(&node());
    create(&pool, DEVICE, 1, kept());
    let draining = pool.keeper().close().expect("it runs");
    assert!(pool.pool().keeper().is_none(), "a pause has begun");
    drop(draining);
    let soon = || Instant::now() + Duration::from_mins(1);
    let elsewhere = |refused: &NotShut| matches!(refused, NotShut::Elsewhere(_));
    let refused = pool.keeper().shut::<FromOffloaded>(soon(), || false).expect_err("it runs");
    assert!(elsewhere(&refused.error), "{}", refused.error);
    assert_eq!(gate_of(&pool), GateAt::Open);
    drop(refused);
    crate::stage::pause(&pool);
    let Failed { state: keeper, error } = pool.keeper().close().expect_err("memory is away");
    assert!(elsewhere(&error), "{error}");
    let Failed { state: keeper, error } =
        keeper.shut::<FromOpen>(soon(), || false).expect_err("memory is away");
    assert!(elsewhere(&error), "{error}");
    assert_eq!(gate_of(&pool), GateAt::Offloaded);
    let shut = keeper.shut::<FromOffloaded>(soon(), || false).map_err(|failed| failed.error);
    let keeper = shut.expect("nobody is inside").reopen().done.end();
    assert!(pool.pool().keeper().is_none(), "it is handed on");
    drop(keeper);
    resume(&pool);
    assert_eq!(gate_of(&pool), GateAt::Open);
}

#[test]
fn a_drained_process_that_is_dropped_runs_on() {
    let pair = Pair::new();
    for pool in &pair.pools {
        pool.drain();
        assert_eq!((gate_of(pool), is_frozen(pool)), (GateAt::Shut, true));
        pool.drop_proof();
    }
    assert_runs(&pair, "drained");
}

#[test]
fn no_device_is_asked_while_a_capture_is_under_way_that_the_last_call_has_begun() {
    let pair = Pair::new();
    let pool = &pair.pools[0];
    let waits = || pool.driver().faults().calls(DriverOp::ContextSynchronize);
    let call = pool.gate().pass_for("cuStreamBeginCapture", Passage::Capture);
    let mut draining = pool.keeper().close().expect("it runs");
    let before = waits();
    let seen = draining.look(|| 1).expect("nothing is asked");
    assert_eq!(seen.inside, 1);
    drop(call);
    let refused = draining.look(|| 1).expect_err("a capture");
    assert!(matches!(refused, DrainError::InCapture { count: 1 }), "{refused}");
    draining.wait_for_change(Duration::from_millis(20), &crossbeam_channel::never());
    assert_eq!(waits(), before, "a wait would have ended the capture");
    while !draining.look(|| 0).expect("no work").is_idle {
        draining.wait_for_change(Duration::from_secs(5), &crossbeam_channel::never());
    }
    assert!(waits() > before);
    drop(draining);
    assert_runs(&pair, "after it was looked at");
}

#[test]
fn a_capture_that_only_the_driver_knows_of_is_named_as_one() {
    let pair = Pair::new();
    let pool = &pair.pools[0];
    let in_capture = DriverCode::STREAM_CAPTURE_IMPLICIT;
    pool.driver().faults().fail(DriverOp::ContextSynchronize, FaultSpan::From(1), in_capture);
    let mut draining = pool.keeper().close().expect("it runs");
    let refused = loop {
        match draining.look(|| 0) {
            Ok(_) => draining.wait_for_change(Duration::from_secs(5), &crossbeam_channel::never()),
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, DrainError::InCapture { .. }), "{refused}");
}

#[test]
fn a_context_that_its_application_has_ended_unseen_holds_no_pause_up() {
    let driver = SimDriver::new(node(), SimOptions::default());
    let gone = || vec![RawContext(0x6100_0000)];
    let pool = SimPool::with_contexts(Arc::new(driver), 1, gone);
    let mut draining = pool.keeper().close().expect("it runs");
    while !draining.look(|| 0).expect("it has no work").is_idle {
        draining.wait_for_change(Duration::from_secs(5), &crossbeam_channel::never());
    }
}

#[test]
fn a_save_that_fails_half_way_and_is_dropped_is_undone() {
    let pair = Pair::new();
    for pool in &pair.pools {
        let faults = pool.driver().faults();
        // By then the imports are unmapped, and some of what was copied.
        faults.fail(DriverOp::Unmap, FaultSpan::Nth(4), DriverCode::UNKNOWN);
        pool.save(&WHOLE, UNLIMITED).expect_err("the fourth is refused");
        faults.clear();
        assert_eq!(gate_of(pool), GateAt::Shut, "until it is undone");
        pool.drop_proof();
    }
    assert_runs(&pair, "half saved");
}

#[test]
fn a_prepared_process_that_is_dropped_runs_on() {
    let pair = Pair::new();
    pair.pools.iter().for_each(save);
    pair.pools.iter().for_each(SimPool::drop_proof);
    assert_runs(&pair, "prepared");
}

#[test]
fn a_prepared_process_gives_back_the_host_memory_that_it_took_for_nothing() {
    let pool = pool(&node());
    create(&pool, DEVICE, 1, kept());
    save(&pool);
    assert!(pool.report().host_arena_bytes > 0);
    pool.drop_proof();
    assert_eq!(pool.report().host_arena_bytes, 0);
}

#[test]
fn a_resume_that_is_dropped_at_any_step_gives_up_again_what_has_come_back() {
    let pair = Pair::new();
    let steps: [(&str, Steps); 4] = [
        ("created", |pair| pair.pools.iter().for_each(create_own)),
        ("restored", |pair| pair.pools.iter().for_each(restore_own)),
        ("half imported", |pair| {
            pair.pools.iter().for_each(restore_own);
            pair.import(0).expect("imports");
        }),
        ("imported", |pair| {
            pair.pools.iter().for_each(restore_own);
            for process in [0, 1] {
                pair.import(process).expect("imports");
            }
        }),
    ];
    for (when, steps) in steps {
        pair.pause().expect("pause");
        steps(&pair);
        for pool in &pair.pools {
            assert_eq!(gate_of(pool), GateAt::Shut, "{when}");
        }
        pair.pools.iter().for_each(SimPool::drop_proof);
        assert_is_paused(&pair, when);
    }
}

#[test]
fn a_pause_and_a_resume_by_tag_that_are_dropped_leave_the_process_running() {
    let pool = pool(&node());
    let rights = [AccessDesc::read_write(DEVICE)];
    let handle = create(&pool, DEVICE, 2, class(Contents::File));
    let tagged = map(&pool, handle, 2 * UNIT, &rights);
    let handle = create(&pool, DEVICE, 1, kept());
    let other = map(&pool, handle, UNIT, &rights);
    write(&pool, DEVICE, tagged, pattern(1));
    write(&pool, DEVICE, other, pattern(2));

    pool.save(&Selection::Tagged(Tags::All, Whose::Everybody), UNLIMITED).expect("saving");
    pool.drop_proof();
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false));
    assert!(holds(&pool, DEVICE, tagged, pattern(1)) && holds(&pool, DEVICE, other, pattern(2)));

    pool.save(&Selection::Tagged(Tags::All, Whose::Everybody), UNLIMITED).expect("saving");
    pool.release_selected().expect("release");
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false), "it runs on");
    let back = Selection::SetAside(Tags::All, Whose::Everybody);
    pool.create_own(&back).expect("memory");
    pool.restore_own(usize::MAX).expect("contents");
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Shut, true));
    pool.drop_proof();
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false), "as before");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES - UNIT, "and set aside as before");

    pool.create_own(&back).expect("memory");
    pool.restore_own(usize::MAX).expect("contents");
    drop(pool.commit_resume());
    assert!(holds(&pool, DEVICE, tagged, pattern(1)) && holds(&pool, DEVICE, other, pattern(2)));
}

#[test]
fn the_gate_goes_where_a_step_has_led_when_its_end_is_dropped_and_not_before() {
    let pool = pool(&node());
    create(&pool, DEVICE, 1, kept());
    let quiesced = || {
        let soon = Instant::now() + Duration::from_mins(1);
        let drained =
            pool.shut::<FromOpen>().into_draining().drain(soon, &crossbeam_channel::never());
        drained.map_err(|failed| failed.error).expect("no work").0
    };
    let prepared = || {
        quiesced()
            .prepare(WHOLE, &[], Copies::All, |_| UNLIMITED, Schedule::SaveFirst)
            .map_err(|failed| failed.error)
            .expect("saved")
            .0
    };
    let check = |when: &str, at: GateAt| assert_eq!(gate_of(&pool), at, "{when}");

    let undone = prepared().undo().map_err(|failed| failed.error).expect("mapped again");
    check("undone, and held", GateAt::Shut);
    drop(undone);
    check("undone", GateAt::Open);

    let released = prepared()
        .depart()
        .release(Schedule::SaveMeanwhile)
        .map_err(|failed| failed.error)
        .expect("released");
    check("released, and held", GateAt::Shut);
    drop(released);
    check("released", GateAt::Offloaded);

    let create = || {
        let created = pool.shut::<FromOffloaded>().create_own(Away::Whole);
        created.map_err(|failed| failed.error).expect("memory").0
    };
    let undone = create().undo().map_err(|failed| failed.error).expect("given up");
    check("given up, and held", GateAt::Shut);
    drop(undone);
    check("given up", GateAt::Offloaded);

    let restored = create().restore_rest(usize::MAX).map_err(|failed| failed.error);
    let (returning, _) = restored.expect("contents");
    let (restored, _) = returning.map_imports().map_err(|failed| failed.error).expect("no imports");
    let committed = restored.commit();
    check("committed, and held", GateAt::Shut);
    drop(committed);
    check("committed", GateAt::Open);
}

#[test]
fn a_resume_for_which_memory_is_missing_leaves_the_gate_as_it_was() {
    let node = node();
    let (tenant, other) = (pool(&node), pool(&node));
    create(&tenant, DEVICE, 8, kept());
    crate::stage::pause(&tenant);
    create(&other, DEVICE, CAPACITY_BYTES / UNIT - 5, kept());
    let refused = tenant.create_own(&WHOLE).expect_err("three units are missing");
    assert!(matches!(refused, PoolError::OutOfDeviceMemory { .. }));
    assert_eq!((gate_of(&tenant), is_frozen(&tenant)), (GateAt::Offloaded, true));
}

#[test]
fn what_the_driver_does_not_let_be_undone_stays_behind_a_shut_gate() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, kept());
    map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    save(&pool);
    pool.driver().faults().fail(DriverOp::Map, FaultSpan::From(1), DriverCode::UNKNOWN);
    pool.drop_proof();
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Shut, true));
}

/// Each proof of something under way, one after the other, with the driver calls made until then.
fn each_under_way(check: impl Fn(usize, &SimPool, u64)) {
    let steps: [fn(&SimPool); 4] = [
        save,
        |pool| {
            crate::stage::pause(pool);
            create_own(pool);
        },
        |pool| {
            crate::stage::pause(pool);
            restore_own(pool);
            pool.map_imports().expect("no imports");
        },
        |pool| {
            pool.driver().faults().fail(DriverOp::Unmap, FaultSpan::From(1), DriverCode::UNKNOWN);
            pool.save(&WHOLE, UNLIMITED).expect_err("nothing is unmapped");
        },
    ];
    for (step, steps) in steps.into_iter().enumerate() {
        let pool = pool(&node());
        let handle = create(&pool, DEVICE, 1, kept());
        map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
        steps(&pool);
        check(step, &pool, pool.driver().faults().calls_total());
    }
}

#[test]
fn a_proof_that_a_panic_drops_moves_nothing_and_leaves_the_gate_shut() {
    each_under_way(|step, pool, calls| {
        pool.drop_proof_in_panic();
        assert_eq!(gate_of(pool), GateAt::Shut, "{step}");
        assert_eq!(pool.driver().faults().calls_total(), calls, "{step}");
    });
    // Nothing has been moved yet.
    let pool = pool(&node());
    pool.drain();
    pool.drop_proof_in_panic();
    assert_eq!((gate_of(&pool), is_frozen(&pool)), (GateAt::Open, false));
}

#[test]
fn what_is_abandoned_stays_where_it_is_until_all_calls_are_let_through() {
    each_under_way(|step, pool, calls| {
        pool.abandon();
        assert_eq!(pool.driver().faults().calls_total(), calls, "{step}: the context is lost");
        assert_eq!((gate_of(pool), is_frozen(pool)), (GateAt::Shut, true), "{step}");
        pool.keeper().let_through_for_good();
        assert_eq!(gate_of(pool), GateAt::Open, "{step}");
        assert!(pool.pool().keeper().is_none(), "{step}: nothing begins any more");
        assert!(is_frozen(pool), "{step}: nobody is given what is lost");
    });
}

#[test]
fn who_went_in_while_memory_was_away_is_told_so_when_a_resume_begins() {
    let pool = pool(&node());
    create(&pool, DEVICE, 1, kept());
    assert!(!pool.enter_giving_up().is_offloaded());
    crate::stage::pause(&pool);
    let entered = pool.enter_giving_up();
    let has_looked = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let resumer = scope.spawn(|| {
            let soon = Instant::now() + Duration::from_mins(1);
            let look = || has_looked.swap(true, Ordering::Relaxed);
            let shut = pool.keeper().shut::<FromOffloaded>(soon, look);
            shut.map(drop).map_err(|failed| failed.error)
        });
        while !has_looked.load(Ordering::Relaxed) && !resumer.is_finished() {
            std::thread::yield_now();
        }
        assert!(entered.is_offloaded(), "the gate is shut, and memory is away");
        let refused = resumer.join().expect("no panic").expect_err("this thread is inside");
        assert!(matches!(refused, NotShut::StillInside(_)), "{refused}");
    });
    drop(entered);
    resume(&pool);
    assert!(!pool.enter_giving_up().is_offloaded());
}
