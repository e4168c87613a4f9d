//! Those that wait, with a lock that somebody else has and a device that gives nothing.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use vmm_pool::Class as Contents;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _};

use std::mem::MaybeUninit;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::gather::Displaced;
use super::queue::{AGAIN_AFTER, LOOK_MAX, NEVER_MAX};
use super::*;
use crate::decision::history::History;
use tenants::class::TurnSettings;
use tenants::coordinator::{Interrupt, Step};
use tenants::identity::MemberId;
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::pause_thread;
use tenants::wire::Phase;

const MIB: u64 = 1 << 20;

fn run_dir(base: &tempfile::TempDir) -> RunDir {
    RunDir::open(Some(base.path().join("run")), None).unwrap()
}

#[test]
fn who_has_no_place_yet_can_be_called_off_while_somebody_switches() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let turns = TurnDir::make(&run_dir).unwrap();
    let _held = turns.lock(Instant::now()).unwrap();
    let enter = |calls_off: CallsOff<'_>| {
        let began = Instant::now();
        let entered =
            Queue::enter(&run_dir, &tenant, Wish::Order, Duration::from_mins(5), calls_off);
        assert!(began.elapsed() < Duration::from_mins(2), "it was not heard");
        entered.map(drop).unwrap_err()
    };
    let soon = Interrupt::at(Instant::now() + Duration::from_millis(100)).unwrap();
    assert!(matches!(
        enter(CallsOff { interrupt: Some(&soon), asks: None, is_over: &never }),
        Trouble::NotSwitched { .. }
    ));
    let asks: fn() -> bool = || true;
    assert!(matches!(
        enter(CallsOff { interrupt: None, asks: Some(asks), is_over: &never }),
        Trouble::NotSwitched { .. }
    ));
    assert!(matches!(enter(CallsOff::when(&|| true)), Trouble::NotSwitched { .. }));
    assert!(turns.claims(None).unwrap().is_empty());
}

#[test]
fn who_waits_decides_without_the_lock_so_that_none_is_held_by_one_that_is_stopped() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let enter = || {
        let calls_off = CallsOff::when(&never);
        Queue::enter(&run_dir, &tenant, Wish::Order, Duration::ZERO, calls_off).unwrap()
    };
    let mut queue = enter();
    let _held = TurnDir::make(&run_dir).unwrap().lock(Instant::now()).unwrap();
    // It has no process, and need not act to know that.
    let error = queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::Never { .. }), "{error}");
}

/// Counts how often somebody has opened the claim `number`, and so looked at all claims. It counts until `end`, and
/// longer where nobody has looked until then: a busy machine keeps threads waiting.
fn looks_at(turns: &std::path::Path, number: u64, end: Instant) -> u32 {
    let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&fd, turns, WatchFlags::OPEN).unwrap();
    let (wanted, mut looks) = (format!("{number:016x}.claim"), 0);
    let mut bytes = [MaybeUninit::uninit(); 4096];
    let late = end + Duration::from_mins(1);
    while Instant::now() < if looks == 0 { late } else { end } {
        pause_thread(Duration::from_millis(5));
        let mut events = inotify::Reader::new(&fd, &mut bytes);
        while let Ok(event) = events.next() {
            looks += u32::from(
                event.file_name().is_some_and(|name| name.to_bytes() == wanted.as_bytes()),
            );
        }
    }
    looks
}

#[test]
fn who_waits_looks_at_the_claims_of_others_when_they_change_and_a_few_times_a_second_at_most() {
    const WAITERS: u32 = 4;
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let is_over = AtomicBool::new(false);
    let wait = || {
        let (long, over) = (Duration::from_mins(5), || is_over.load(Ordering::Relaxed));
        let calls_off = CallsOff::when(&over);
        let mut queue = Queue::enter(&run_dir, &tenant, Wish::Order, long, calls_off).unwrap();
        queue.wait_and_go(&SwitchOptions::default(), &over, &mut |_| {}).unwrap_err();
    };
    std::thread::scope(|scope| {
        for _ in 0..WAITERS {
            scope.spawn(wait);
        }
        let turns = TurnDir::make(&run_dir).unwrap();
        let deadline = Instant::now() + Duration::from_mins(1);
        while turns.claims(None).unwrap().len() < WAITERS as usize && Instant::now() < deadline {
            pause_thread(Duration::from_millis(5));
        }
        let began = Instant::now();
        let path = run_dir.path().join(".turns");
        let looks = looks_at(&path, 1, began + Duration::from_secs(2));
        let rounds = u32::try_from(began.elapsed().as_millis() / LOOK_MAX.as_millis()).unwrap();
        is_over.store(true, Ordering::Relaxed);
        assert!(looks >= 1, "nobody looks");
        assert!(looks <= WAITERS * (rounds + 2), "{looks} looks in {rounds} rounds");
    });
}

#[test]
fn that_a_tenant_is_away_for_another_outlives_the_run_directory_and_a_pause_by_name_ends_it() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let mut away = Displaced::default();
    assert!(!away.look(&run_dir, &tenant));
    let turns = TurnDir::make(&run_dir).unwrap();
    let mut history = History::default();
    history.is_leaving(&tenant);
    turns.keep_history(&turns.lock(Instant::now()).unwrap(), &history).unwrap();
    assert!(away.look(&run_dir, &tenant));
    std::fs::remove_dir_all(run_dir.path()).unwrap();
    assert!(away.look(&run_dir, &tenant));
    assert_eq!(history_of(&turns).is_displaced(&tenant), Some(true), "all can read it again");
    stays_away(&run_dir, &tenant);
    assert!(!away.look(&run_dir, &tenant));
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
    config.turns = TurnSettings { queues: true, wait, ..TurnSettings::default() };
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    let device = DeviceOrdinal(0);
    let prop = AllocationProp::pinned_on(device);
    member.pool().driver().make_current(device).unwrap();
    // By all figures there is room, and the driver has none.
    let allocation =
        Allocation { device: Some(device), size_bytes: MIB, is_asked_twice: false, may_wait: true };
    // How often it was seen not to wait, and to; on a busy machine one allocation may not be enough to see it often.
    let [mut does_not, mut waits] = [0_u32; 2];
    while does_not + waits < 50 {
        // Odd during a try. It is looked at from the second try to the last: around them a busy machine may keep the thread at anything.
        let (marks, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
        let make = || {
            marks.fetch_add(1, Ordering::SeqCst);
            let made = member.pool().enter().create(1024 * MIB, &prop, Contents::default());
            marks.fetch_add(1, Ordering::SeqCst);
            made
        };
        let mut seen = std::thread::scope(|scope| {
            let looking = scope.spawn(|| {
                let mut seen = BTreeMap::<u32, [u32; 2]>::new();
                while !is_over.load(Ordering::Relaxed) {
                    let mark = marks.load(Ordering::SeqCst);
                    let waits = member.cut().report(0).waits_for_memory_ms.is_some();
                    let is_between = mark >= 4 && mark.is_multiple_of(2);
                    if is_between && marks.load(Ordering::SeqCst) == mark {
                        seen.entry(mark).or_default()[usize::from(waits)] += 1;
                    }
                    pause_thread(Duration::from_millis(5));
                }
                seen
            });
            assert!(with_room(&member, allocation, make).is_err());
            is_over.store(true, Ordering::Relaxed);
            looking.join().unwrap()
        });
        seen.remove(&marks.load(Ordering::SeqCst));
        does_not += seen.values().map(|[does_not, _]| does_not).sum::<u32>();
        waits += seen.values().map(|[_, waits]| waits).sum::<u32>();
    }
    assert!(member.cut().report(0).waits_for_memory_ms.is_none());
    member.leave();
    assert!(waits > 5 * does_not, "{waits} and {does_not}: {:?}", member.stats().notes);
}

/// Returns the tenants that did not answer, as they are written down for all.
fn turns_of(run_dir: &RunDir) -> Silent {
    TurnDir::make(run_dir).unwrap().silent()
}

#[test]
fn one_that_did_not_answer_another_is_not_asked_for_a_while() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let stopped = TenantName::new("stopped").unwrap();
    let socket = run_dir.tenant(&stopped).unwrap().socket_path(MemberId(9)).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let was_asked = || listener.accept().is_ok();
    let tenant = TenantName::new("a").unwrap();
    let enter = || {
        Queue::enter(&run_dir, &tenant, Wish::Turn, Duration::ZERO, CallsOff::when(&never)).unwrap()
    };
    let decide = |queue: &Queue| queue.gather(&[], false).unheard.contains(&stopped);
    let (one, other) = (enter(), enter());
    let mut noted = Silent::default();
    noted.note(&stopped, true, now_us() + 50_000_000);
    one.turns.keep_silent(&noted);
    assert!(decide(&one) && decide(&other) && !was_asked());
    // One whose rest is over is asked, and rests for all again.
    noted = Silent::default();
    noted.note(&stopped, true, now_us().saturating_sub(50_000_000));
    one.turns.keep_silent(&noted);
    assert!(decide(&one) && was_asked());
    assert_ne!(turns_of(&run_dir), noted);
}

#[test]
fn who_does_not_answer_may_hold_what_is_missing_so_nothing_is_refused_for_good() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let tenant = TenantName::new("a").unwrap();
    let mut config = MemberConfig::new(run_dir.clone(), tenant.clone(), "python train.py", "0.1.0");
    let wait = Duration::ZERO;
    config.turns = TurnSettings { queues: true, wait, ..TurnSettings::default() };
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let driver = Arc::new(SimDriver::new(node.clone(), SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    member.pool().driver().make_current(DeviceOrdinal(0)).unwrap();
    let gpu = member.pool().devices().uuid(DeviceOrdinal(0));
    let outside = SimDriver::new(node, SimOptions::default());
    outside.create(32 * MIB, &AllocationProp::pinned_on(DeviceOrdinal(0))).unwrap();
    // As of a process that is stopped.
    let stopped = TenantName::new("stopped").unwrap();
    let socket = run_dir.tenant(&stopped).unwrap().socket_path(MemberId(9)).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let wish = Wish::Memory([(gpu, 48 * MIB)].into());
    let mut queue =
        Queue::enter(&run_dir, &tenant, wish, Duration::ZERO, CallsOff::when(&never)).unwrap();
    let options = SwitchOptions::default();
    let error = queue.wait_and_go(&options, &never, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::Busy { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().contains("'stopped' may hold is not known"), "{error}");
    // What this one has found out every other knows.
    assert_ne!(turns_of(&run_dir), Silent::default());
    // There is time until it is asked again, and no longer.
    queue.wait_anew(Instant::now() + Duration::from_mins(1));
    assert_eq!(queue.looks_again(true), Some(LOOK_MAX));
    queue.never_since = queue.never_since.and_then(|since| since.checked_sub(NEVER_MAX));
    assert_eq!(queue.looks_again(true), None);
    // It has ended.
    drop((listener, std::fs::remove_file(socket)));
    std::fs::remove_file(run_dir.path().join(".turns/silent")).unwrap();
    queue.wait_anew(Instant::now() + Duration::from_mins(1));
    let error = queue.wait_and_go(&options, &never, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Trouble::Never { .. }), "{error}");
    member.leave();
}

/// A tenant whose one process is a thread of this one, on the device of `node`, and queues.
fn queuing(run_dir: &RunDir, tenant: &str, node: &SimNode) -> Arc<Member<SimDriver>> {
    let tenant = TenantName::new(tenant).unwrap();
    let mut config = MemberConfig::new(run_dir.clone(), tenant, "python train.py", "0.1.0");
    config.turns = TurnSettings { queues: true, ..TurnSettings::default() };
    let driver = SimDriver::new(node.clone(), SimOptions::default());
    let member = Member::join(config, Arc::new(driver)).unwrap();
    member.pool().driver().make_current(DeviceOrdinal(0)).unwrap();
    member
}

/// Goes without a wait, and once more where a thread of a busy machine was late with an answer.
fn goes(queue: &mut Queue) -> Result<Switched, Trouble> {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let went = queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {});
        let is_late = |error: &Trouble| error.to_string().contains("does not answer");
        if !went.as_ref().is_err_and(is_late) || Instant::now() >= deadline {
            return went;
        }
    }
}

#[test]
fn memory_of_a_tenant_that_is_being_paused_may_be_free_soon_and_is_waited_for() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let [leaves, wants] = ["leaves", "wants"].map(|name| queuing(&run_dir, name, &node));
    let device = DeviceOrdinal(0);
    let prop = AllocationProp::pinned_on(device);
    let entered = leaves.pool().enter();
    entered.block_allocate(48 * MIB, &prop, &[device], Contents::default()).unwrap();
    drop(entered);
    let wish = Wish::Memory([(wants.pool().devices().uuid(device), 32 * MIB)].into());
    let none = Duration::ZERO;
    let mut queue =
        Queue::enter(&run_dir, wants.presence().tenant(), wish, none, CallsOff::when(&never))
            .unwrap();
    let mut said = Vec::new();
    let coordinator =
        Coordinator::new(run_dir.clone(), leaves.presence().tenant().clone(), Options::default());
    let paused = { coordinator }.pause(&mut |event| {
        if let Event::StepStarted { step: Step::Phase(Phase::Prepare), .. } = event {
            said.push(goes(&mut queue));
        }
    });
    let _report = paused.unwrap();
    let error = said.pop().unwrap().unwrap_err();
    assert!(matches!(error, Trouble::Busy { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().contains("'leaves' is being paused or resumed"), "{error}");
    queue.wait_anew(Instant::now() + Duration::from_mins(1));
    queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {}).unwrap();
    leaves.leave();
    wants.leave();
}

#[test]
fn an_allocation_that_seems_to_fit_nowhere_is_looked_at_once_more() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let (wish, wait) = (Wish::Memory([("gpu".to_owned(), MIB)].into()), Duration::from_mins(1));
    let mut queue = Queue::enter(&run_dir, &tenant, wish, wait, CallsOff::when(&never)).unwrap();
    assert_eq!(queue.looks_again(false), Some(AGAIN_AFTER));
    assert_eq!(queue.looks_again(false), None);
    queue.wait_anew(Instant::now());
    assert_eq!(queue.looks_again(false), None, "its time is over");
}

#[test]
fn a_paused_process_that_nobody_sees_for_a_moment_gets_no_turn_and_stays_away_for_another() {
    let base = tempfile::tempdir().unwrap();
    let (run_dir, tenant) = (run_dir(&base), TenantName::new("a").unwrap());
    let mut queue =
        Queue::enter(&run_dir, &tenant, Wish::Turn, Duration::ZERO, CallsOff::when(&never))
            .unwrap();
    queue.is_paused = || true;
    let mut go = || queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {});
    let is_displaced = || history_of(&TurnDir::make(&run_dir).unwrap()).is_displaced(&tenant);
    // Its socket has gone with the run directory.
    let error = go().unwrap_err();
    assert!(matches!(error, Trouble::Busy { .. }) && error.is_retryable(), "{error}");
    assert!(error.to_string().contains("'a' does not answer"), "{error}");
    assert_eq!(is_displaced(), None);
    let turns = TurnDir::make(&run_dir).unwrap();
    let mut history = History::default();
    history.is_leaving(&tenant);
    turns.keep_history(&turns.lock(Instant::now()).unwrap(), &history).unwrap();
    go().unwrap_err();
    std::fs::remove_dir_all(run_dir.path()).unwrap();
    go().unwrap_err();
    assert_eq!(is_displaced(), Some(true), "others would take it for paused by name");
    // One that has no memory yet needs nothing.
    queue.is_paused = never;
    queue.displaced = Displaced::default();
    queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {}).unwrap();
}

#[test]
fn who_would_give_up_because_of_one_that_rests_asks_it_once_more() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let (rests, ended) = (TenantName::new("rests").unwrap(), TenantName::new("ended").unwrap());
    let turns = TurnDir::make(&run_dir).unwrap();
    let config = MemberConfig::new(run_dir.clone(), rests.clone(), "python train.py", "0.1.0");
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    let mut noted = Silent::default();
    noted.note(&rests, true, now_us() + 50_000_000);
    turns.keep_silent(&noted);
    let mut queue =
        Queue::enter(&run_dir, &ended, Wish::Order, Duration::ZERO, CallsOff::when(&never))
            .unwrap();
    let error = queue.wait_and_go(&SwitchOptions::default(), &never, &mut |_| {}).unwrap_err();
    // It answers, so that all is known.
    assert!(matches!(error, Trouble::Never { .. }), "{error}");
    assert_eq!(turns_of(&run_dir), Silent::default());
    member.leave();
}

#[test]
fn one_that_has_a_turn_or_waits_for_one_comes_back() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let (name, node) = (TenantName::new("a").unwrap(), SimNode::private(&[64 * MIB]).unwrap());
    let config = MemberConfig::new(run_dir.clone(), name.clone(), "python train.py", "0.1.0");
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let member = Member::join(config, driver).unwrap();
    let enter =
        |wish| Queue::enter(&run_dir, &name, wish, Duration::ZERO, CallsOff::when(&never)).unwrap();
    let comes_back = |queue: &Queue| {
        let claims = queue.turns.claims(None).unwrap();
        queue.gather(&claims, true).tenants[&name].comes_back
    };
    // By itself it does not queue.
    assert!(!comes_back(&enter(Wish::Order)));
    let mut queue = enter(Wish::Turn);
    assert!(comes_back(&queue), "it waits");
    queue.say(false).unwrap();
    assert!(comes_back(&queue), "it has its turn");
    member.leave();
}

#[test]
fn one_that_was_brought_back_by_name_is_not_away_for_another_any_more() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let node = SimNode::private(&[64 * MIB]).unwrap();
    let back = queuing(&run_dir, "back", &node);
    let turns = TurnDir::make(&run_dir).unwrap();
    let mut history = History::default();
    history.is_leaving(back.presence().tenant());
    turns.keep_history(&turns.lock(Instant::now()).unwrap(), &history).unwrap();
    // Who comes next sees that it runs, and all know it then.
    let other = TenantName::new("other").unwrap();
    let none = Duration::ZERO;
    let mut queue =
        Queue::enter(&run_dir, &other, Wish::Turn, none, CallsOff::when(&never)).unwrap();
    goes(&mut queue).unwrap();
    assert_eq!(history_of(&turns).is_displaced(back.presence().tenant()), Some(false));
    back.leave();
}

#[test]
fn one_process_of_a_tenant_has_its_contexts_leave() {
    let base = tempfile::tempdir().unwrap();
    let run_dir = run_dir(&base);
    let member = queuing(&run_dir, "a", &SimNode::private(&[64 * MIB]).unwrap());
    let dir = run_dir.tenant(member.presence().tenant()).unwrap();
    assert!(back::is_first(&member));
    // Without a name it is not the first; it takes the name again after a while.
    let is_another = (0..100).any(|_| {
        std::fs::remove_file(dir.socket_path(member.presence().id()).unwrap()).ok();
        !back::is_first(&member)
    });
    assert!(is_another, "each process would");
    member.leave();
}
