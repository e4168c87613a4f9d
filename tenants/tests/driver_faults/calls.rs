//! One call fails that an application makes, each in turn, with a pause and a resume behind it.

use std::fmt::Debug;

use sublet_stage::{Process, redeem};
use tenants::scope::{Scope, TagNames};
use tenants::wire::Action;
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, VaRange,
};
use vmm_pool::{Class, Contents, VirtualHandle};

use crate::stage::{Stage, UNIT, class, device_of, holds, write};

/// The tag of the memory that is away while the application gives it up.
const AWAY: &str = "kv";
/// Seeds that the stage does not use.
const SEED: u64 = 1 << 20;

/// Tries once more what was refused: a call that failed has changed nothing.
fn again<T, E: Debug>(mut call: impl FnMut() -> Result<T, E>) -> T {
    call().or_else(|_| call()).expect("nothing fails at the second try")
}

fn reserve(member: &Process, units: u64) -> VaRange {
    let reserve = || member.pool().driver().reserve(units * UNIT, 0, DeviceAddress(0));
    VaRange::new(again(reserve), units * UNIT)
}

fn map(member: &Process, range: VaRange, handle: VirtualHandle, device: DeviceOrdinal) {
    again(|| member.pool().enter().map(range, 0, handle));
    again(|| member.pool().enter().set_access(range, &[AccessDesc::read_write(device)]));
}

/// Unmaps a whole reservation and gives it back.
fn give_up(member: &Process, range: VaRange) {
    again(|| member.pool().enter_giving_up().unmap(range));
    again(|| member.pool().driver().free_addresses(range));
}

/// What the application of the first member makes, and that of the second opens.
struct Made {
    /// Three mappings, the first of memory with the tag [`AWAY`].
    range: VaRange,
    /// The references to what is mapped there.
    handles: Vec<VirtualHandle>,
    block: VaRange,
    /// The third mapping, and the block, as the second member has them.
    imported: VaRange,
    opened: VaRange,
}

impl Made {
    fn new(stage: &Stage) -> Self {
        let [owner, importer] = [&stage.members[0], &stage.members[1]];
        let [device, elsewhere] = [device_of(0), device_of(1)];
        let prop = AllocationProp::pinned_on(device);
        let range = reserve(owner, 3);
        let mut handles = Vec::new();
        for (n, part) in parts(range).enumerate() {
            let mut class = class(Contents::Keep);
            if n == 0 {
                class = Class { tag: AWAY.to_owned(), ..class };
            }
            let handle = again(|| owner.pool().enter().create(UNIT, &prop, class.clone()));
            map(owner, part, handle, device);
            write(owner, device, part, SEED + n as u64);
            handles.push(handle);
        }
        let fd = again(|| owner.sharing().issue_ticket(&owner.pool().enter(), handles[2]));
        let handle = again(|| redeem(importer, &fd));
        let imported = reserve(importer, 1);
        map(importer, imported, handle, elsewhere);
        // The mapping keeps it.
        let _kept = importer.pool().enter_giving_up().release(handle);
        let block = again(|| {
            let class = class(Contents::Keep);
            owner.pool().enter().block_allocate(UNIT, &prop, &[device], class)
        });
        let block = VaRange::new(block, UNIT);
        write(owner, device, block, SEED + 3);
        // The reference is used up by a block that was not opened.
        let opened = again(|| {
            let handle = crate::stage::redeem_block(owner, importer, block.start);
            importer.pool().enter().block_open(handle?, UNIT, elsewhere).map_err(|_| ())
        });
        let opened = VaRange::new(opened, UNIT);
        Self { range, handles, block, imported, opened }
    }

    fn assert_intact(&self, stage: &Stage, when: &str) {
        let own = parts(self.range).chain([self.block]);
        for (range, seed) in own.zip(SEED..) {
            assert!(holds(&stage.members[0], device_of(0), range, seed), "{when}: {range:?}");
        }
        for (range, seed) in [(self.imported, SEED + 2), (self.opened, SEED + 3)] {
            assert!(holds(&stage.members[1], device_of(1), range, seed), "{when}: {range:?}");
        }
    }

    fn end(self, stage: &Stage) {
        let [owner, importer] = [&stage.members[0], &stage.members[1]];
        give_up(owner, self.range);
        give_up(importer, self.imported);
        again(|| importer.pool().enter_giving_up().block_close(self.opened.start));
        again(|| owner.pool().enter_giving_up().block_free(self.block.start));
        for handle in self.handles {
            // Where the driver refuses, the reference is gone all the same.
            let _gone = owner.pool().enter_giving_up().release(handle);
        }
    }
}

/// The mappings of one unit each in `range`.
fn parts(range: VaRange) -> impl Iterator<Item = VaRange> {
    let starts = (range.start.0..range.end().0).step_by(usize::try_from(UNIT).expect("small"));
    starts.map(|start| VaRange::new(DeviceAddress(start), UNIT))
}

/// Runs `work` with its call `nth` of `member` failing. Says how many calls of it were made, and if that was one of them.
fn with_fault<T>(
    stage: &Stage,
    member: usize,
    nth: u64,
    work: impl FnOnce() -> T,
) -> (T, u64, bool) {
    let fired = stage.clear_faults();
    let faults = stage.faults(member);
    let before = faults.calls_total();
    if nth > 0 {
        faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
    }
    let done = work();
    let calls = faults.calls_total() - before;
    (done, calls, stage.clear_faults() > fired)
}

fn each_call_of(member: usize, least: u64) {
    let stage = Stage::new();
    let away = Scope::Tags { tags: TagNames::Named([AWAY.to_owned()].into()), owner: None };
    for nth in 1.. {
        let what = format!("call {nth} of the application of member {member} failed");
        let (made, calls, mut met) = with_fault(&stage, member, nth, || Made::new(&stage));
        stage.must_then(Action::Pause, &what);
        stage.must_then(Action::Resume, &what);
        made.assert_intact(&stage, &what);
        let paused = stage.act_on(Action::Pause, away.clone());
        assert!(paused.is_ok(), "{what}: {paused:?}");
        let rest = if met { 0 } else { nth.saturating_sub(calls) };
        met |= with_fault(&stage, member, rest, || made.end(&stage)).2;
        stage.must_then(Action::Pause, &what);
        stage.assert_gone(&what);
        stage.must_then(Action::Resume, &what);
        stage.assert_intact(&what);
        if !met {
            assert!(nth > least, "only {nth} calls were met");
            break;
        }
    }
    stage.assert_ticket_is_good();
}

#[test]
fn any_call_of_the_application_may_fail_and_the_next_pause_loses_nothing() {
    each_call_of(0, 20);
}

#[test]
fn any_call_of_an_importing_application_may_fail_and_the_next_pause_loses_nothing() {
    each_call_of(1, 10);
}
