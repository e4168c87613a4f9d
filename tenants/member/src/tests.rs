//! Members after a pause by tag, a freeze and a panic.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal};
use vmm_pool::{Class, Contents};

use super::executor::Executor;
use super::progress::Progress;
use super::{Member, MemberConfig};
use sublet_coordinator::{Coordinator, Options};
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::RunDir;
use sublet_protocol::scope::{NCCL_TAG, Scope, TagNames};
use sublet_protocol::state::Event;
use sublet_protocol::transport::Connection;
use sublet_protocol::wire::{
    MemberState, Order, Phase, Reply, Request, RoundEnd, TakePhase, Told, Withdraw,
};

struct Alone {
    run_dir: RunDir,
    name: TenantName,
    member: Arc<Member<SimDriver>>,
    _base: tempfile::TempDir,
}

fn alone() -> Alone {
    alone_with(|_| {})
}

fn alone_with(change: impl FnOnce(&mut MemberConfig)) -> Alone {
    let base = tempfile::tempdir().unwrap();
    let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
    let name = TenantName::new("train").unwrap();
    let mut config = MemberConfig::new(run_dir.clone(), name.clone(), "python train.py", "0.1.0");
    change(&mut config);
    let node = SimNode::private(&[8 * GRANULARITY_BYTES]).unwrap();
    let driver = SimDriver::new(node, SimOptions::default());
    let member = Member::join(config, Arc::new(driver)).unwrap();
    Alone { run_dir, name, member, _base: base }
}

#[test]
fn calls_into_nccl_wait_from_a_pause_of_its_tag_to_the_resume() {
    let Alone { run_dir, name, member, _base } = alone();
    let class = Class { library: "nccl", tag: NCCL_TAG.to_owned(), contents: Contents::Keep };
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    member.pool().enter().create(GRANULARITY_BYTES, &prop, class).unwrap();
    let scope = Scope::Tags { tags: TagNames::Named([NCCL_TAG.to_owned()].into()), owner: None };
    let options = Options { scope, ..Options::default() };
    let mut coordinator = Coordinator::new(run_dir, name, options);
    let waits = || member.cut.is_away();
    assert!(!waits());
    coordinator.pause(&mut |_| {}).map(drop).unwrap();
    assert!(waits());
    coordinator.resume(&mut |_| {}).map(drop).unwrap();
    assert!(!waits());
}

/// The contexts of a frozen process are off the devices, so calls of its threads would end it.
#[test]
fn a_panic_leaves_a_frozen_process_frozen_unless_it_was_being_thawed() {
    let Alone { member, _base, .. } = alone();
    for event in [Event::PauseBegun, Event::Released, Event::Frozen] {
        member.lifecycle.transition(event).unwrap();
    }
    let mut executor = Executor::new(Arc::clone(&member), Progress::Taken);
    for phase in [None, Some(Phase::Freeze), Some(Phase::Create)] {
        executor.fail_inside(phase, "a deliberate panic");
        assert_eq!(member.lifecycle().state(), MemberState::Deep, "{phase:?}");
    }
    executor.fail_inside(Some(Phase::Thaw), "a deliberate panic");
    assert_eq!(member.lifecycle().state(), MemberState::Faulted);
}

/// The vetoes that were asked, and the one that refuses.
static VETOES: Mutex<(Vec<&str>, &str)> = Mutex::new((Vec::new(), ""));

fn veto(name: &'static str) -> Option<String> {
    let mut vetoes = vmm_pool::sync::lock(&VETOES);
    vetoes.0.push(name);
    (vetoes.1 == name).then(|| format!("a reason of {name}"))
}

/// The look of the first feature finds facts that the next needs. No feature may be asked after one has refused.
#[test]
fn features_keep_the_gate_open_in_one_order_and_only_those_that_the_pause_uses() {
    const ORDER: [&str; 4] = ["unfreezable", "ungated", "unseen_pins", "unseen_nccl"];
    let Alone { member, _base, .. } = alone_with(|config| {
        config.unfreezable = || veto("unfreezable");
        config.ungated = || veto("ungated");
        config.unseen_pins = || veto("unseen_pins");
        config.unseen_nccl = || veto("unseen_nccl");
    });
    let class = Class { library: "nccl", tag: NCCL_TAG.to_owned(), contents: Contents::Keep };
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    member.pool().enter().create(GRANULARITY_BYTES, &prop, class).unwrap();
    let asked = |refuses: &'static str, is_deep, scope| {
        *vmm_pool::sync::lock(&VETOES) = (Vec::new(), refuses);
        let mut executor = Executor::new(Arc::clone(&member), Progress::Taken);
        let order = Order::CloseGate { scope, is_deep, stands: false };
        let Reply::Failed(failure) = executor.run_phase(None, &order, Instant::now()) else {
            panic!("a stream is captured, so the gate stays open");
        };
        (vmm_pool::sync::lock(&VETOES).0.clone(), failure.message)
    };
    let nccl = Scope::Tags { tags: TagNames::Named([NCCL_TAG.to_owned()].into()), owner: None };
    member.captures().begun();
    for (index, refuses) in ORDER.into_iter().enumerate() {
        let (names, message) = asked(refuses, true, nccl.clone());
        assert_eq!(names, ORDER[..=index]);
        assert!(message.contains(&format!("a reason of {refuses}")), "{message}");
    }
    let (names, message) = asked("", true, nccl);
    assert_eq!(names, ORDER);
    assert!(message.contains("is capturing 1 stream(s)"), "captures are the last: {message}");
    assert_eq!(asked("", false, Scope::Whole).0, ["ungated", "unseen_pins"], "a plain pause");
}

#[test]
fn what_lies_unread_counts_for_whoever_asks() {
    let Alone { member, _base, .. } = alone();
    let soon = || Instant::now() + Duration::from_secs(30);
    let connect = || Connection::connect(member.presence().socket_path(), soon()).unwrap();
    let order = |phase: Phase| {
        let order = phase.order(&Told::new(&Scope::Whole, &[]));
        Request::Phase(TakePhase { round: 7, alone: false, order, timeout_ms: 30_000 })
    };
    // The asking process's question is read before messages on a later connection.
    let mut asker = connect();
    assert!(matches!(asker.exchange(&Request::Hello, 0, soon()).unwrap().0, Reply::Member(_)));
    let mut leader = connect();
    for phase in [Phase::CloseGate, Phase::Drain, Phase::Prepare] {
        let (reply, _) = leader.exchange(&order(phase), 0, soon()).unwrap();
        assert!(matches!(reply, Reply::PhaseDone(..)), "{phase:?}: {reply:?}");
    }
    {
        // The agent reads nothing meanwhile.
        let _held = member.rounds();
        let question = Request::Withdraw(Withdraw { round: 7 });
        asker.send(&question, &[], soon()).unwrap();
        leader.send(&order(Phase::Release), &[], soon()).unwrap();
    }
    let (reply, _) = asker.receive::<Reply>(soon()).unwrap();
    assert_eq!(reply, Reply::Told(RoundEnd::Commit));
    let deadline = soon();
    while member.lifecycle().state() != MemberState::Paused {
        assert!(Instant::now() < deadline, "its release");
        std::thread::yield_now();
    }
}
