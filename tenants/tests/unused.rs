//! The source that knows what memory is unused is asked by a pause only if an answer cannot come to wait for the resume.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sublet_stage::{Place, Process, memory};
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::member::{Member, MemberConfig};
use vmm_pool::Class;
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{DeviceOrdinal, Driver as _};
use vmm_pool::gate::{Pass, Passage};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

static ASKED: AtomicUsize = AtomicUsize::new(0);

fn coordinator(place: &Place) -> Coordinator {
    let tenant = TenantName::new("train").unwrap();
    Coordinator::new(place.run_dir().clone(), tenant, Options::default())
}

/// Pauses while a thread waits at the gate inside `call`, resumes, and tells how often was asked.
fn asked_while_waits(place: &Place, member: &Process, call: fn(&Process) -> Pass<'_>) -> usize {
    let before = ASKED.load(Ordering::Relaxed);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        // The pause waits for it, and so cannot ask before the other is there.
        let inside = member.gate().pass(Passage::Use);
        let paused = threads.spawn(|| coordinator(place).pause(&mut |_| {}).map(drop));
        let waits = threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                drop(call(member));
            }
        });
        wait_until(|| member.gate().waiting().len() == 1);
        drop(inside);
        paused.join().unwrap().unwrap();
        let asked = ASKED.load(Ordering::Relaxed) - before;
        is_over.store(true, Ordering::Relaxed);
        coordinator(place).resume(&mut |_| {}).map(drop).unwrap();
        waits.join().unwrap();
        asked
    })
}

fn wait_until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

fn launches(member: &Process) -> Pass<'_> {
    member.gate().pass_for("cuLaunchKernel", Passage::Use)
}

fn allocates(member: &Process) -> Pass<'_> {
    member.gate().pass(Passage::Use)
}

#[test]
fn who_may_need_the_lock_of_an_allocator_that_waits_at_the_gate_is_not_asked() {
    let place = Place::new(&[16 << 20]).unwrap();
    let tenant = TenantName::new("train").unwrap();
    let mut config = MemberConfig::new(place.run_dir().clone(), tenant, "python train.py", "0.1.0");
    config.unused = || {
        ASKED.fetch_add(1, Ordering::Relaxed);
        Vec::new()
    };
    let member = Member::join(config, Arc::new(place.driver(SimOptions::default()))).unwrap();
    let pool = member.pool();
    pool.driver().make_current(DEVICE).unwrap();
    let range = memory::map(pool, memory::create(pool, DEVICE, 2, Class::default()), 2, DEVICE);
    memory::write(pool.driver(), DEVICE, range, 7);
    // Threads wait at launches in most pauses.
    assert_eq!(asked_while_waits(&place, &member, launches), 1);
    assert_eq!(asked_while_waits(&place, &member, allocates), 0);
    assert_eq!(asked_while_waits(&place, &member, launches), 1, "and the next time it is");
    assert_eq!(memory::holds(pool.driver(), DEVICE, range, 7), Ok(true));
}
