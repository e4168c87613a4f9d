//! Those that wait, with a lock that somebody else has and a device that gives nothing.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_pool::Class as Contents;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _};

use super::*;
use crate::identity::MemberId;
use crate::member::{Member, MemberConfig};

const MIB: u64 = 1 << 20;

fn run_dir(base: &tempfile::TempDir) -> RunDir {
    RunDir::open(Some(base.path().join("run")), None).unwrap()
}

#[test]
fn who_has_no_place_yet_can_be_called_off_while_somebody_switches() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let turns = run_dir.turns().unwrap();
    let _held = turns.lock(Instant::now()).unwrap();
    let enter = |calls_off: (Option<&Interrupt>, &dyn Fn() -> bool)| {
        let began = Instant::now();
        let entered =
            Queue::enter(&run_dir, &tenant, Wish::Order, Duration::from_secs(20), calls_off);
        assert!(began.elapsed() < Duration::from_secs(10), "it was not heard");
        entered.map(drop).unwrap_err()
    };
    let soon = Interrupt::at(Instant::now() + Duration::from_millis(100)).unwrap();
    assert!(matches!(enter((Some(&soon), &never)), SwitchError::CalledOff { .. }));
    assert!(matches!(enter((None, &|| true)), SwitchError::CalledOff { .. }));
    assert!(turns.claims(None).unwrap().is_empty());
}

#[test]
fn an_allocation_waits_for_memory_also_while_it_rests_between_two_tries() {
    let base = tempfile::tempdir().unwrap();
    let wait = Duration::from_millis(1500);
    let mut config = MemberConfig::new(
        run_dir(&base),
        TenantName::new("a").unwrap(),
        "python train.py",
        "0.1.0",
    );
    config.queues = Some(wait);
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    let device = DeviceOrdinal(0);
    let prop = AllocationProp::pinned_on(device);
    member.pool().driver().make_current(device).unwrap();
    // By all figures there is room, and the driver has none.
    let make = || member.pool().enter().create(1024 * MIB, &prop, Contents::default());
    let allocation =
        Allocation { device: Some(device), size_bytes: MIB, is_asked_twice: false, may_wait: true };
    let is_over = AtomicBool::new(false);
    // How often it was seen to wait, and not to.
    let [waits, does_not] = std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let mut seen = [0_u32; 2];
            while !is_over.load(Ordering::Relaxed) {
                let waits_ms = member.cut().report(0).waits_for_memory_ms;
                seen[usize::from(waits_ms.is_none())] += 1;
                pause_thread(Duration::from_millis(5));
            }
            seen
        });
        let refused = with_room(&member, allocation, make);
        is_over.store(true, Ordering::Relaxed);
        assert!(refused.is_err());
        seen.join().unwrap()
    });
    assert!(member.cut().report(0).waits_for_memory_ms.is_none());
    member.leave();
    assert!(waits > 5 * does_not, "{waits} and {does_not}: {:?}", member.stats().notes);
}

#[test]
fn who_does_not_answer_may_hold_what_is_missing_so_nothing_is_refused_for_good() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let tenant = TenantName::new("a").unwrap();
    let mut config = MemberConfig::new(run_dir.clone(), tenant.clone(), "python train.py", "0.1.0");
    config.queues = Some(Duration::ZERO);
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    member.pool().driver().make_current(DeviceOrdinal(0)).unwrap();
    let gpu = member.pool().uuid(DeviceOrdinal(0));
    // As of a process that is stopped.
    let stopped = run_dir.tenant(&TenantName::new("stopped").unwrap()).unwrap();
    let socket = stopped.socket_path(MemberId(9)).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let wish = Wish::Memory([(gpu, 1024 * MIB)].into());
    let mut queue = Queue::enter(&run_dir, &tenant, wish, Duration::ZERO, (None, &never)).unwrap();
    let options = SwitchOptions::default();
    let error = queue.wait_and_go(&options, &never, &mut |_| {}).unwrap_err();
    assert!(matches!(error, SwitchError::Busy { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().contains("'stopped' may hold is not known"), "{error}");
    // There is time until it is asked again, and no longer.
    queue.wait_anew(Instant::now() + Duration::from_mins(1));
    assert!(queue.looks_again(true));
    queue.never_since = queue.never_since.and_then(|since| since.checked_sub(NEVER_MAX));
    assert!(!queue.looks_again(true));
    // It has ended.
    drop((listener, std::fs::remove_file(socket)));
    queue.silent = Silent::default();
    queue.wait_anew(Instant::now() + Duration::from_mins(1));
    let error = queue.wait_and_go(&options, &never, &mut |_| {}).unwrap_err();
    assert!(matches!(error, SwitchError::Never { .. }), "{error}");
    member.leave();
}
