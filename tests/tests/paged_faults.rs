//! Every driver call of a pause and of a resume fails, one at a time, in a process whose memory is paged.
//!
//! A process with plain memory stands next to it in their tenant. Of the chunks two are held, and were written since they came.
//! The others are away, or on the device as the host has them.

#![expect(clippy::expect_used, reason = "a test fails by panicking, helpers of it too")]

use std::sync::Arc;
use std::time::Duration;

use sublet_pager::{Pager, WindowSize};
use sublet_stage::memory::{self, UNIT};
use sublet_stage::{Place, Process};
use tenants::coordinator::{Coordinator, Options, Outcome, Trouble};
use tenants::identity::TenantName;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::{FaultSpan, SimDriver, SimOptions};
use vmm_pool::driver::{DeviceOrdinal, DriverCode, VaRange};
use vmm_pool::{Class, Contents, HostBudget};

const TENANT: &str = "train";
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const CAPACITY_BYTES: u64 = 64 << 20;
const CHUNKS: u64 = 6;
const FRAMES: u64 = 4;
/// Chunks that are held over a pause.
const HELD: usize = 2;
/// Long enough for a busy machine; no test waits for it.
const LIMIT: Duration = Duration::from_mins(1);

/// Memory of the process that pages, or plain memory of either, and what was written there.
#[derive(Clone, Copy, Debug)]
struct Written {
    range: VaRange,
    seed: u64,
}

struct Scene {
    /// The first one pages.
    members: [Process; 2],
    pager: Pager<SimDriver>,
    chunks: Vec<Written>,
    /// Of each member.
    plain: [Written; 2],
    releases_early: bool,
    seeds: u64,
    place: Place,
}

impl Scene {
    fn new(releases_early: bool) -> Self {
        let place = Place::new(&[CAPACITY_BYTES]).expect("a place");
        let members = [(); 2].map(|()| place.join(TENANT, SimOptions::default()).expect("joined"));
        let size = WindowSize {
            window_bytes: CHUNKS * UNIT,
            chunk_bytes: UNIT,
            frames_bytes: FRAMES * UNIT,
        };
        let unlimited = |_| HostBudget(None);
        let pager = Pager::new(Arc::clone(members[0].pool()), DEVICE, size, unlimited);
        let pager = pager.expect("a window");
        let alloc =
            |_| Written { range: VaRange::new(pager.alloc(UNIT).expect("room"), UNIT), seed: 0 };
        let chunks: Vec<Written> = (0..CHUNKS).map(alloc).collect();
        let class = || Class { library: "test", tag: String::new(), contents: Contents::Keep };
        let plain = [0, 1].map(|index: usize| {
            let pool = members[index].pool();
            let handle = memory::create(pool, DEVICE, 1, class());
            let range = memory::map(pool, handle, 1, DEVICE);
            let seed = 1 + index as u64;
            memory::write(pool.driver(), DEVICE, range, seed);
            Written { range, seed }
        });
        let mut scene = Self { members, pager, chunks, plain, releases_early, seeds: 2, place };
        for chunk in 0..scene.chunks.len() {
            scene.write_held(&[chunk]);
            scene.release(&[chunk]);
        }
        scene
    }

    fn driver(&self) -> &SimDriver {
        self.members[0].pool().driver()
    }

    /// Each gets new contents, and stays where it is until it is released.
    fn write_held(&mut self, chunks: &[usize]) {
        for &chunk in chunks {
            self.hold(chunk);
            self.seeds += 1;
            self.chunks[chunk].seed = self.seeds;
            memory::write(self.driver(), DEVICE, self.chunks[chunk].range, self.seeds);
        }
    }

    fn hold(&self, chunk: usize) {
        let start = self.chunks[chunk].range.start;
        self.pager.acquire(&[start], LIMIT).unwrap_or_else(|error| panic!("{chunk}: {error}"));
    }

    fn release(&self, chunks: &[usize]) {
        for &chunk in chunks {
            let start = self.chunks[chunk].range.start;
            self.pager.release(&[start]).unwrap_or_else(|error| panic!("{chunk}: {error}"));
        }
    }

    fn assert_holds(&self, member: usize, written: Written, what: &str) {
        let driver = self.members[member].pool().driver();
        let holds = memory::holds(driver, DEVICE, written.range, written.seed);
        assert_eq!(holds, Ok(true), "{what}: {written:?}");
    }

    fn act(&self, action: Action) -> Result<Outcome, Trouble> {
        let releases_early = self.releases_early;
        let options = Options { timeout: Some(LIMIT), releases_early, ..Options::default() };
        let tenant = TenantName::new(TENANT).expect("a good name");
        let mut coordinator = Coordinator::new(self.place.run_dir().clone(), tenant, options);
        match action {
            Action::Pause => coordinator.pause(&mut |_| {}),
            Action::Resume => coordinator.resume(&mut |_| {}),
        }
    }

    fn must(&self, action: Action, what: &str) {
        match self.act(action) {
            Ok(Outcome::Completed(report)) => {
                assert!(report.losses.is_empty(), "{what}: {:?}", report.losses);
            }
            other => panic!("{what}, then {action:?}: {other:?} ({:?})", self.states()),
        }
    }

    fn states(&self) -> [MemberState; 2] {
        [0, 1].map(|member: usize| self.members[member].lifecycle().state())
    }

    fn used(&self) -> u64 {
        self.place.used_bytes(DEVICE).expect("a look")
    }

    /// False when `failing` made fewer calls.
    fn one_call(&mut self, action: Action, failing: usize, nth: u64) -> bool {
        let what = &format!("{action:?} with call {nth} of process {failing} failed");
        self.pager.flush(LIMIT).expect("clean");
        let first = usize::try_from(nth).expect("few") % self.chunks.len();
        let held: [usize; HELD] = std::array::from_fn(|next| (first + next) % self.chunks.len());
        self.write_held(&held);
        if action == Action::Resume {
            self.must(Action::Pause, what);
        }
        let (before, used) = (self.states(), self.used());
        let member = Arc::clone(&self.members[failing]);
        let faults = member.pool().driver().faults();
        let fired = faults.fired();
        faults.fail_any(FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let outcome = self.act(action);
        faults.clear();
        let is_made = faults.fired() > fired;
        if let Err(error) = outcome {
            assert!(is_made, "{what}: {error}");
            assert!(error.left_unchanged(), "{what}: {error}");
            assert_eq!((self.states(), self.used()), (before, used), "{what}: {error}");
            self.must(action, what);
        }
        let behind =
            if action == Action::Pause { MemberState::Paused } else { MemberState::Active };
        assert_eq!(self.states(), [behind; 2], "{what}");
        if action == Action::Pause {
            assert!(is_made || self.used() == 0, "{what}: memory stays");
            self.must(Action::Resume, what);
        }
        self.assert_all_is_there(&held, what);
        is_made
    }

    fn assert_all_is_there(&self, held: &[usize], what: &str) {
        for &chunk in held {
            self.assert_holds(0, self.chunks[chunk], what);
        }
        self.release(held);
        for chunk in 0..self.chunks.len() {
            self.hold(chunk);
            self.assert_holds(0, self.chunks[chunk], what);
            self.release(&[chunk]);
        }
        for (member, plain) in self.plain.into_iter().enumerate() {
            self.assert_holds(member, plain, what);
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for member in &self.members {
            member.leave();
        }
    }
}

/// Fails each call of each process in turn. The one that pages makes so many at least.
fn each_call(action: Action, releases_early: bool, least: u64) {
    let mut scene = Scene::new(releases_early);
    let made = [0, 1].map(|failing| {
        let not_made = (1..10_000).find(|&nth| !scene.one_call(action, failing, nth));
        not_made.expect("some call is the last") - 1
    });
    assert!(made[0] >= least && made[1] > 0, "{made:?} calls");
}

#[test]
fn any_call_of_a_pause_of_paged_memory_may_fail_and_nothing_is_lost() {
    each_call(Action::Pause, false, 20);
}

#[test]
fn any_call_of_a_pause_of_paged_memory_that_releases_early_may_fail_and_nothing_is_lost() {
    each_call(Action::Pause, true, 20);
}

#[test]
fn any_call_of_a_resume_of_paged_memory_may_fail_and_nothing_is_lost() {
    each_call(Action::Resume, false, 20);
}
