//! Host memory ahead of a pause, where the machine is short of it and where the driver refuses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sublet_keep::{PrepareReport, Settings};
use sublet_stage::{Place, Process, memory};
use tenants::coordinator::{Coordinator, Options};
use tenants::host_memory::LimitKind;
use tenants::identity::TenantName;
use tenants::keep::HostFigure;
use tenants::member::MemberConfig;
use tenants::wire::HostStage;
use vmm_pool::driver::sim::{FaultSpan, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, Driver as _, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, HOST_CHUNK_BYTES as CHUNK};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
/// What [`process`] keeps.
const SMALL: u64 = 2 * memory::UNIT;
const TOTAL: u64 = 1000 * CHUNK;
/// Everything has happened by then.
const LIMIT: Duration = Duration::from_mins(5);

/// A process that keeps something, and its memory.
fn process(place: &Place, host_figures: fn() -> Vec<HostFigure>) -> (Process, VaRange) {
    let member = join(place, Settings { host_figures: Some(host_figures), ..Settings::default() });
    let range = keep(&member, 2);
    (member, range)
}

/// A process that has no memory yet.
fn join(place: &Place, settings: Settings) -> Process {
    let tenant = TenantName::new("train").unwrap();
    let config = MemberConfig::new(place.run_dir().clone(), tenant, "python train.py", "0.1.0");
    sublet_keep::join(config, settings, Arc::new(place.driver(SimOptions::default()))).unwrap()
}

/// Memory of `units` that a pause saves.
fn keep(member: &Process, units: u64) -> VaRange {
    let pool = member.pool();
    pool.driver().make_current(DEVICE).unwrap();
    let class = Class { library: "test", tag: String::new(), contents: Contents::Keep };
    let handle = memory::create(pool, DEVICE, units, class);
    let range = memory::map(pool, handle, units, DEVICE);
    memory::write(pool.driver(), DEVICE, range, 7);
    range
}

fn coordinator(place: &Place) -> Coordinator {
    let tenant = TenantName::new("train").unwrap();
    let options = Options { contact_timeout: LIMIT, ..Options::default() };
    Coordinator::new(place.run_dir().clone(), tenant, options)
}

fn prepare(place: &Place) -> PrepareReport {
    sublet_keep::prepare(&coordinator(place), None, &mut |_| {}).unwrap()
}

fn held_bytes(member: &Process) -> u64 {
    member.pool().host_memory().standing().held_bytes
}

/// Others have their turn.
fn a_moment() {
    let (_open, nothing) = std::sync::mpsc::channel::<()>();
    nothing.recv_timeout(Duration::from_millis(20)).ok();
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        a_moment();
    }
}

fn machine(available_bytes: u64) -> Vec<HostFigure> {
    vec![HostFigure { kind: LimitKind::Available, total_bytes: TOTAL, available_bytes }]
}

static AVAILABLE: AtomicU64 = AtomicU64::new(TOTAL);

#[test]
fn idle_memory_goes_back_while_the_machine_is_short_and_no_contents_do() {
    let place = Place::new(&[16 << 20]).unwrap();
    let (member, range) = process(&place, || machine(AVAILABLE.load(Ordering::Relaxed)));
    assert!(prepare(&place).is_complete());
    assert_eq!((held_bytes(&member), member.pool().driver().census().host_ranges), (SMALL, 1));
    let pauses = || coordinator(&place).pause(&mut |_| {}).map(drop);
    pauses().unwrap();
    AVAILABLE.store(TOTAL / 20 - 1, Ordering::Relaxed);
    // With each look the agent puts its socket's name back. The second one comes when all of the first has been done.
    for _ in 0..2 {
        std::fs::remove_file(member.presence().socket_path()).unwrap();
        wait_until("the agent has looked", || member.presence().socket_path().exists());
    }
    assert_eq!(held_bytes(&member), SMALL, "it holds contents");
    coordinator(&place).resume(&mut |_| {}).map(drop).unwrap();
    wait_until("idle memory is given back", || held_bytes(&member) == 0);
    assert_eq!(member.pool().driver().census().host_ranges, 0);
    assert_eq!(memory::holds(member.pool().driver(), DEVICE, range, 7), Ok(true));
    // What is between the marks brings nothing back, and takes nothing.
    AVAILABLE.store(TOTAL / 15, Ordering::Relaxed);
    let report = prepare(&place);
    let HostStage::Stopped(failure) = &report.processes[0].host.stage else { panic!("{report:?}") };
    assert!(failure.message.contains("MemAvailable: free host memory"), "{failure}");
    assert!(!report.is_complete());
    assert_eq!(held_bytes(&member), 0);
    pauses().unwrap();
    coordinator(&place).resume(&mut |_| {}).map(drop).unwrap();
    assert_eq!(memory::holds(member.pool().driver(), DEVICE, range, 7), Ok(true));
}

#[test]
fn refused_pinning_ends_it_with_the_call_and_the_limit_that_it_may_be() {
    let place = Place::new(&[16 << 20]).unwrap();
    let (member, range) = process(&place, || machine(TOTAL));
    let faults = member.pool().driver().faults();
    faults.fail(DriverOp::HostRegister, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    let report = prepare(&place);
    let HostStage::Stopped(failure) = &report.processes[0].host.stage else { panic!("{report:?}") };
    assert!(failure.message.contains("pinning of host memory"), "{failure}");
    faults.clear();
    assert_eq!((held_bytes(&member), member.pool().driver().census().host_ranges), (0, 0));
    assert!(prepare(&place).is_complete());
    assert_eq!(held_bytes(&member), SMALL);
    assert_eq!(memory::holds(member.pool().driver(), DEVICE, range, 7), Ok(true));
    // The process ends: nothing comes in any more.
    member.leave();
    assert!(member.pool().host_memory().has_stopped());
}

#[test]
fn a_thread_that_panics_ends_it_with_a_reason_and_the_next_request_has_another() {
    let place = Place::new(&[16 << 20]).unwrap();
    let (member, _) = process(&place, || machine(TOTAL));
    member.pool().driver().faults().panic_at(DriverOp::HostRegister);
    let report = prepare(&place);
    let HostStage::Stopped(failure) = &report.processes[0].host.stage else { panic!("{report:?}") };
    assert!(failure.message.contains("failed inside"), "{failure}");
    assert!(prepare(&place).is_complete());
    assert_eq!(held_bytes(&member), SMALL);
}

#[test]
fn who_asks_while_a_process_prepares_by_itself_up_to_its_bound_waits_for_the_rest() {
    let place = Place::new(&[512 << 20]).unwrap();
    let settings = Settings { prepares_up_to: Some(CHUNK), ..Settings::default() };
    let member = join(&place, Settings { host_figures: Some(|| machine(TOTAL)), ..settings });
    let faults = member.pool().driver().faults();
    let its_own = faults.hold(DriverOp::HostRegister);
    let range = keep(&member, CHUNK / memory::UNIT + 1);
    assert!(its_own.is_met(LIMIT), "it begins by itself");
    let (tell, is_asked) = std::sync::mpsc::channel();
    let report = std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut progress = |_: &[_]| tell.send(()).unwrap();
            sublet_keep::prepare(&coordinator(&place), None, &mut progress).unwrap()
        });
        is_asked.recv_timeout(LIMIT).unwrap();
        let asked_for = faults.hold(DriverOp::HostRegister);
        drop(its_own);
        assert!(asked_for.is_met(LIMIT), "it goes on as it was asked to");
        // Once more it says how it is, and that it goes on.
        is_asked.recv_timeout(LIMIT).unwrap();
        drop(asked_for);
        asker.join().unwrap()
    });
    assert!(report.is_complete(), "{report:?}");
    assert_eq!(held_bytes(&member), 2 * CHUNK);
    assert_eq!(memory::holds(member.pool().driver(), DEVICE, range, 7), Ok(true));
}
