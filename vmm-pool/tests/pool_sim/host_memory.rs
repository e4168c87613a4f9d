//! Host memory of pauses that come to nothing.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, HostBudget, Selection, Tags, Whose};

use crate::stage::{
    DEVICE, SimPool, UNIT, UNLIMITED, WHOLE, create, holds, kept, map, node, pattern, pause, pool,
    resume, write,
};

/// Host memory is taken in pieces of this size at most.
const CHUNK: u64 = 256 << 20;
/// No step takes so long.
const LIMIT: Duration = Duration::from_secs(20);

fn arena_bytes(pool: &SimPool) -> u64 {
    pool.report().host_arena_bytes
}

#[test]
fn processes_that_save_little_take_little_host_memory() {
    let node = SimNode::private(&[64 * UNIT]).expect("a node");
    let pools: Vec<_> = (0..8).map(|_| pool(&node)).collect();
    let places: Vec<_> = (1..)
        .zip(&pools)
        .map(|(seed, pool)| {
            let place =
                map(pool, create(pool, DEVICE, 1, kept()), UNIT, &[AccessDesc::read_write(DEVICE)]);
            write(pool, DEVICE, place, pattern(seed));
            assert!(pool.host_memory().demand(&WHOLE).grow_bytes <= 8 << 20);
            pool.save(&WHOLE, HostBudget(Some(8 << 20))).expect("room for what it saves");
            pool.release_selected().expect("released");
            place
        })
        .collect();
    let held: u64 = pools.iter().map(arena_bytes).sum();
    assert!(held <= 64 << 20, "{held}");
    for (seed, (pool, place)) in (1..).zip(pools.iter().zip(places)) {
        resume(pool);
        assert!(holds(pool, DEVICE, place, pattern(seed)));
    }
}

/// A second pause saves a little more than the first, and what lies across both chunks comes back as it was.
#[test]
fn an_arena_that_grows_a_little_holds_contents_across_its_chunks() {
    let pool = pool(&SimNode::private(&[64 * UNIT]).expect("a node"));
    let mut places = Vec::new();
    for (seed, units) in [(1, 3), (2, 2), (3, 9)] {
        let place = map(
            &pool,
            create(&pool, DEVICE, units, kept()),
            units * UNIT,
            &[AccessDesc::read_write(DEVICE)],
        );
        write(&pool, DEVICE, place, pattern(seed));
        places.push((place, seed));
        pause(&pool);
        resume(&pool);
        assert!(places.iter().all(|(place, seed)| holds(&pool, DEVICE, *place, pattern(*seed))));
    }
    assert_eq!((arena_bytes(&pool), pool.driver().census().host_ranges), (16 * UNIT, 3));
}

/// The copy may take as long as its device does.
#[test]
fn who_asks_about_host_memory_waits_for_no_copy_of_a_pause() {
    let pool = pool(&SimNode::private(&[64 * UNIT]).expect("a node"));
    create(&pool, DEVICE, 1, kept());
    let hold = pool.driver().faults().hold(DriverOp::CopyToHost);
    let asked = Arc::clone(pool.pool());
    let asking = std::thread::spawn(move || {
        assert!(hold.is_met(LIMIT), "contents are saved");
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            tell.send((asked.host_memory().movable_bytes(), asked.host_memory().file_dir()))
        });
        let answer = told.recv_timeout(LIMIT);
        drop(hold);
        answer.map(drop)
    });
    pause(&pool);
    assert_eq!(asking.join().expect("it asks"), Ok(()));
}

#[test]
fn host_memory_of_a_pause_that_failed_goes_back_to_what_the_last_one_used() {
    let node = SimNode::private(&[CHUNK + 64 * UNIT]).expect("a node");
    let pool = pool(&node);
    let handle = create(&pool, DEVICE, 1, kept());
    let place = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, place, pattern(3));
    let faults = pool.driver().faults();
    for op in [DriverOp::HostRegister, DriverOp::CopyToHost, DriverOp::StreamSynchronize] {
        faults.fail(op, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
        assert!(pool.save(&WHOLE, UNLIMITED).is_err(), "{op}");
        faults.clear();
        assert_eq!(arena_bytes(&pool), 0, "{op}: nothing was used before");
        pool.remount().expect("mapped again");
    }
    // Saved well, and undone for another's sake.
    pool.save(&WHOLE, UNLIMITED).expect("saving");
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
    assert_eq!((arena_bytes(&pool), pool.driver().census().host_ranges), (0, 0));

    pause(&pool);
    resume(&pool);
    assert_eq!(arena_bytes(&pool), UNIT, "kept for the next pause");
    let more = create(&pool, DEVICE, CHUNK / UNIT, kept());
    assert_eq!(pool.host_memory().demand(&WHOLE).grow_bytes, CHUNK);
    faults.fail(DriverOp::HostRegister, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    let error = pool.save(&WHOLE, UNLIMITED).expect_err("the second piece is refused");
    assert!(error.to_string().contains("pinning of host memory"), "{error}");
    faults.clear();
    pool.remount().expect("mapped again");
    assert_eq!(arena_bytes(&pool), UNIT, "what the last pause used stays");
    pool.release(more).expect("release");
    assert!(holds(&pool, DEVICE, place, pattern(3)));
    pause(&pool);
    resume(&pool);
    assert!(holds(&pool, DEVICE, place, pattern(3)));
}

#[test]
fn host_memory_behind_a_gap_is_not_given_back_while_contents_lie_there() {
    let node = SimNode::private(&[CHUNK + 64 * UNIT]).expect("a node");
    let pool = pool(&node);
    let tags = |tag: &str| Tags::Named([tag.to_owned()].into());
    let class =
        |tag: &str| Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep };
    let pause_tag = |tag: &str| {
        let selection = Selection::Tagged(tags(tag), Whose::Everybody);
        pool.save(&selection, UNLIMITED).expect("saved");
        pool.release_selected().expect("released");
    };
    let resume_tag = |tag: &str| {
        let selection = Selection::SetAside(tags(tag), Whose::Everybody);
        pool.create_own(&selection).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
        drop(pool.commit_resume());
    };
    let filled = |tag: &str, units: u64, seed: u64| {
        let handle = create(&pool, DEVICE, units, class(tag));
        let place = map(&pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
        let end = DeviceAddress(place.end().0 - UNIT);
        write(&pool, DEVICE, VaRange::new(end, UNIT), pattern(seed));
        place
    };
    filled("before", 1, 1);
    let large = filled("between", CHUNK / UNIT, 2);
    let behind = filled("behind", 1, 3);
    pause_tag("before");
    // All of it but the end is as good as not there, and has its place all the same.
    pool.mark_unused(&[VaRange::new(large.start, CHUNK - UNIT)]);
    pause_tag("between");
    pause_tag("behind");
    resume_tag("between");
    // A pause that has nothing to save completes: what is set aside is what it has used.
    pause_tag("another");
    // One that comes to nothing gives back what the last one has not used.
    pool.save(&Selection::Tagged(tags("another"), Whose::Everybody), UNLIMITED).expect("nothing");
    pool.remount().expect("undone");
    assert_eq!(arena_bytes(&pool), UNIT + 2 * CHUNK);
    resume_tag("behind");
    assert!(holds(&pool, DEVICE, behind, pattern(3)));
}

#[test]
fn what_nobody_used_may_be_used_after_a_pause_that_came_to_nothing() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, kept());
    let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    pool.mark_unused(&[place]);
    pool.drain();
    assert_eq!(pool.host_memory().demand(&WHOLE).saved_bytes, 0);
    pool.remount().expect("nothing has moved");
    assert_eq!(pool.host_memory().demand(&WHOLE).saved_bytes, 2 * UNIT);
}
