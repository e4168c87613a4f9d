//! When an allocation waits for others to make way, and when not; and how a process knows that it is idle. Members over simulated drivers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

use std::time::{Duration, Instant};

use sublet_stage::memory::UNIT;
use sublet_stage::{Place, Process, memory};
use sublet_turns::{Allocation, SwitchOptions, resume_in_turn, switch, with_room};
use tenants::class::TurnSettings;
use tenants::coordinator::{Coordinator, Options, Outcome};
use tenants::identity::TenantName;
use tenants::requests::act;
use tenants::scope::{Scope, TagNames};
use tenants::wire::{Action, Idleness, MemberState};
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{AllocationProp, DeviceOrdinal};
use vmm_pool::{Class, Contents, PoolResult, VirtualHandle};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const UNITS: u64 = 8;
/// Of what is refused immediately, as nobody comes back for it, if all answers come in time.
const WAIT: Duration = Duration::from_secs(10);

/// For processes whose answers are late on a busy machine.
const BUSY: Duration = Duration::from_mins(1);

fn class() -> Class {
    Class { library: "test", tag: String::new(), contents: Contents::Keep }
}

const ALLOCATION: Allocation = Allocation {
    device: Some(DEVICE),
    size_bytes: 5 * UNIT,
    is_asked_twice: false,
    may_wait: true,
};

/// A process that queues where `wait` is some, next to one that holds five of eight units and would not come back.
fn process(wait: Option<Duration>) -> (Place, Process) {
    let place = Place::new(&[UNITS * UNIT]).unwrap();
    let other = place.join("other", SimOptions::default()).unwrap();
    let handle = memory::create(other.pool(), DEVICE, 5, class());
    memory::map(other.pool(), handle, 5, DEVICE);
    let join = place.join_with("own", SimOptions::default(), |config| {
        let usual = config.turns;
        config.turns =
            TurnSettings { queues: wait.is_some(), wait: wait.unwrap_or(usual.wait), ..usual };
    });
    let own = join.unwrap();
    (place, own)
}

fn ask(own: &Process, allocation: Allocation) -> PoolResult<VirtualHandle> {
    let prop = AllocationProp::pinned_on(DEVICE);
    with_room(own, allocation, || own.pool().enter().create(allocation.size_bytes, &prop, class()))
}

/// What is said of allocations that waited.
fn notes(own: &Process) -> Vec<String> {
    own.stats().notes
}

#[test]
fn an_allocation_waits_where_its_process_queues_and_its_refusal_says_for_whom() {
    let (_place, own) = process(Some(WAIT));
    ask(&own, ALLOCATION).unwrap_err();
    let [note] = &notes(&own)[..] else { panic!("{:?}", notes(&own)) };
    assert!(note.contains("was refused after it had waited") && note.contains("'other' holds"));
    ask(&own, Allocation { size_bytes: 3 * UNIT, ..ALLOCATION }).unwrap();
    let (_place, own) = process(None);
    ask(&own, ALLOCATION).unwrap_err();
    assert!(notes(&own).is_empty());
}

#[test]
fn the_first_refusal_is_for_a_library_that_frees_its_caches_and_asks_again() {
    let (_place, own) = process(Some(WAIT));
    let asked_twice = Allocation { is_asked_twice: true, ..ALLOCATION };
    ask(&own, asked_twice).unwrap_err();
    // Another size is another allocation.
    ask(&own, Allocation { size_bytes: 6 * UNIT, ..asked_twice }).unwrap_err();
    ask(&own, asked_twice).unwrap_err();
    assert!(notes(&own).is_empty());
    ask(&own, asked_twice).unwrap_err();
    assert_eq!(notes(&own).len(), 1);
}

#[test]
fn none_waits_where_it_would_hold_others_up_or_a_pause() {
    let (_place, own) = process(Some(WAIT));
    let entered = own.pool().enter();
    ask(&own, ALLOCATION).unwrap_err();
    drop(entered);
    let launch = own.cut().enter("ncclAllReduce", &[]);
    ask(&own, ALLOCATION).unwrap_err();
    drop(launch);
    own.captures().begun();
    ask(&own, ALLOCATION).unwrap_err();
    own.captures().ended();
    ask(&own, Allocation { may_wait: false, ..ALLOCATION }).unwrap_err();
    ask(&own, Allocation { device: None, ..ALLOCATION }).unwrap_err();
    assert!(notes(&own).is_empty(), "{:?}", notes(&own));
    ask(&own, ALLOCATION).unwrap_err();
    assert_eq!(notes(&own).len(), 1);
}

fn looked(place: &Place, quiet_us: u64) -> Idleness {
    let tenant = TenantName::new("own").unwrap();
    let coordinator = Coordinator::new(place.run_dir().clone(), tenant, Options::default());
    coordinator.look_idle(quiet_us).unwrap()[0]
}

/// A look may end before its thread has had its turn.
fn is_seen_drained(place: &Place) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !looked(place, 0).is_drained {
        if Instant::now() > deadline {
            return false;
        }
    }
    true
}

#[test]
fn a_process_is_idle_from_a_look_at_its_devices_until_the_next_call() {
    // Alone: a thread keeps one slot, at the gate that it came to first.
    let place = Place::new(&[UNITS * UNIT]).unwrap();
    let own = place.join("own", SimOptions::default()).unwrap();
    let handle = memory::create(own.pool(), DEVICE, 1, class());
    memory::map(own.pool(), handle, 1, DEVICE);
    assert!(!own.stats().idleness.is_drained, "nobody has looked");
    assert!(!looked(&place, u64::MAX).is_drained, "it was not quiet for so long");
    own.captures().begun();
    assert!(!looked(&place, 0).is_drained, "a look would end the capture");
    own.captures().ended();
    assert!(is_seen_drained(&place));
    assert!(own.stats().idleness.is_drained, "as long as nobody comes");
    drop(own.pool().enter());
    assert!(!own.stats().idleness.is_drained);
    let inside = own.pool().enter();
    assert!(!looked(&place, 0).is_drained, "a call is under way");
    drop(inside);
    assert!(is_seen_drained(&place));
    assert!(own.gate().waiting().is_empty());
}

#[test]
fn a_resume_that_queues_brings_back_what_a_running_tenant_is_without() {
    let place = Place::new(&[UNITS * UNIT]).unwrap();
    let own = place.join("own", SimOptions::default()).unwrap();
    let handle = memory::create(own.pool(), DEVICE, 1, Class { tag: "kv".to_owned(), ..class() });
    memory::map(own.pool(), handle, 1, DEVICE);
    let tags = TagNames::Named(["kv".to_owned()].into());
    let scope = Scope::Tags { tags, owner: None };
    let tenant = own.presence().tenant();
    let options = Options { scope, ..Options::default() };
    act(place.run_dir(), tenant, Action::Pause, options).map(drop).unwrap();
    assert_eq!(place.used_bytes(DEVICE).unwrap(), 0);
    let options = SwitchOptions { wait: BUSY, ..SwitchOptions::default() };
    let resume = || resume_in_turn(place.run_dir(), tenant, &options, &mut |_| {}).unwrap();
    let done = resume();
    assert!(done.had_them && matches!(done.changes[..], [(_, Outcome::Completed(_))]));
    assert_eq!(place.used_bytes(DEVICE).unwrap(), UNIT);
    assert!(matches!(resume().changes[..], [(_, Outcome::AlreadyActive)]));
}

#[test]
fn a_switch_that_is_done_and_cannot_be_written_down_says_both() {
    let place = Place::new(&[UNITS * UNIT]).unwrap();
    let fill = |process: &Process| {
        let handle = memory::create(process.pool(), DEVICE, 5, class());
        memory::map(process.pool(), handle, 5, DEVICE);
    };
    let train = place.join("train", SimOptions::default()).unwrap();
    fill(&train);
    act(place.run_dir(), train.presence().tenant(), Action::Pause, Options::default())
        .map(drop)
        .unwrap();
    let infer = place.join("infer", SimOptions::default()).unwrap();
    fill(&infer);
    // What has been cannot be replaced any more, from the middle of the switch on.
    let in_the_way = place.run_dir().path().join(".turns/history.next");
    let options = SwitchOptions { wait: BUSY, ..SwitchOptions::default() };
    let done = switch(place.run_dir(), train.presence().tenant(), &options, &mut |_| {
        std::fs::create_dir_all(&in_the_way).unwrap();
    });
    let done = done.unwrap();
    assert_eq!(
        [train.lifecycle().state(), infer.lifecycle().state()],
        [MemberState::Active, MemberState::Paused]
    );
    let why = done.unrecorded.unwrap();
    assert!(why.contains("history.next"), "{why}");
    std::fs::remove_dir(&in_the_way).unwrap();
    let done = switch(place.run_dir(), infer.presence().tenant(), &options, &mut |_| {}).unwrap();
    assert!(done.unrecorded.is_none(), "{:?}", done.unrecorded);
    assert_eq!(
        [train.lifecycle().state(), infer.lifecycle().state()],
        [MemberState::Paused, MemberState::Active]
    );
}
