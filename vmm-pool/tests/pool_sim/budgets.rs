//! What processes hold counts against a budget that they share: always just what their driver has given them, whatever
//! fails, and never more than the budget where that was requested.

use std::sync::Arc;

use vmm_pool::budget::Counted;
use vmm_pool::driver::sim::FaultSpan;
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, DriverCode, VaRange,
};
use vmm_pool::{Class, Contents, PoolError, VirtualHandle};

use crate::counting::{BUDGET_BYTES, Slot, counts, shared};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, create, free_bytes,
    import_again, kept, map, native, node, pause, pause_tags, pool, resume, resume_tags, share,
};

fn held(pool: &SimPool, device: DeviceOrdinal) -> u64 {
    pool.budget().figure(device).expect("it counts").held_bytes
}

/// What is counted is what the devices have given.
fn assert_counted(pool: &SimPool, after: &str) {
    for device in [DEVICE, OTHER] {
        let given = CAPACITY_BYTES - free_bytes(pool, device);
        assert_eq!(held(pool, device), given, "{device} after {after}");
    }
}

fn tagged() -> Class {
    Class { library: "test", tag: "kv".to_owned(), contents: Contents::Discard }
}

fn is_over(outcome: Result<VirtualHandle, PoolError>) {
    let error = outcome.expect_err("more than the budget");
    assert!(matches!(error, PoolError::OverBudget { .. }), "{error}");
    assert_eq!(error.code(), Some(DriverCode::OUT_OF_MEMORY));
}

#[test]
fn what_was_there_before_counting_began_counts_too() {
    let pool = pool(&node());
    let early = create(&pool, DEVICE, 3, kept());
    let away = create(&pool, DEVICE, 5, tagged());
    let prop = AllocationProp::pinned_on(OTHER);
    pool.block_allocate(7 * UNIT, &prop, &[OTHER], kept()).expect("a block");
    pool.natives().allocated(DeviceAddress(8), native(100, OTHER, None, Counted::Yes(None)));
    pool.natives().allocated(DeviceAddress(16), native(100, OTHER, None, Counted::No));
    pause_tags(&pool, &["kv"]);
    assert!(pool.budget().figure(DEVICE).is_none());
    let shared = shared(1);
    counts(&pool, &shared, 0);
    assert!(!pool.count_against(Arc::new(Slot { shared, slot: 0 })), "it counts already");
    assert_eq!(held(&pool, DEVICE), 3 * UNIT);
    assert_eq!(held(&pool, OTHER), 7 * UNIT + 100);
    resume_tags(&pool, &["kv"]);
    assert_eq!(held(&pool, DEVICE), 8 * UNIT);
    pool.natives().freed(DeviceAddress(8));
    pool.natives().freed(DeviceAddress(16));
    for handle in [early, away] {
        pool.release(handle).expect("release");
    }
    assert_eq!([held(&pool, DEVICE), held(&pool, OTHER)], [0, 7 * UNIT]);
}

#[test]
fn an_import_counts_at_its_owner_alone() {
    let node = node();
    let (owner, importer) = (pool(&node), pool(&node));
    let shared = shared(2);
    counts(&owner, &shared, 0);
    counts(&importer, &shared, 1);
    let handle = create(&owner, DEVICE, 2, kept());
    let imported = share(&owner, handle, &importer, 1);
    map(&importer, imported, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    assert_counted(&owner, "import");
    for pool in [&importer, &owner] {
        pool.save(&WHOLE, UNLIMITED).expect("saving");
    }
    for pool in [&importer, &owner] {
        pool.release_selected().expect("release");
    }
    assert_eq!(held(&owner, DEVICE), 0);
    for pool in [&owner, &importer] {
        pool.create_own(&WHOLE).expect("memory");
        pool.restore_own(usize::MAX).expect("contents");
    }
    import_again(&owner, &importer, 1).expect("imports");
    for pool in [&owner, &importer] {
        drop(pool.commit_resume());
    }
    assert_counted(&importer, "resume");
    assert_eq!(held(&owner, DEVICE), 2 * UNIT);
}

#[test]
fn a_whole_resume_takes_its_room_and_one_by_tag_is_refused_where_there_is_none() {
    let pool = pool(&node());
    let shared = shared(2);
    counts(&pool, &shared, 0);
    let kv = create(&pool, DEVICE, 10, tagged());
    create(&pool, DEVICE, 20, kept());
    pause_tags(&pool, &["kv"]);
    assert_eq!(held(&pool, DEVICE), 20 * UNIT, "what is away does not count");
    let other = create(&pool, DEVICE, 8, kept());
    let selection = vmm_pool::Selection::SetAside(
        vmm_pool::Tags::Named(["kv".to_owned()].into()),
        vmm_pool::Whose::Everybody,
    );
    let error = pool.create_own(&selection).expect_err("38 units of 32");
    let PoolError::OverBudget { asked_bytes, held_bytes, budget_bytes, .. } = error else {
        panic!("{error}")
    };
    assert_eq!([asked_bytes, held_bytes, budget_bytes], [10, 28, 32].map(|units| units * UNIT));
    assert_counted(&pool, "a refused resume");
    pause(&pool);
    assert_eq!(held(&pool, DEVICE), 0);
    shared.set_budget(0, Some(4 * UNIT));
    resume(&pool);
    assert_eq!(held(&pool, DEVICE), 28 * UNIT, "it was within the budget when it left");
    is_over(pool.create(UNIT, &AllocationProp::pinned_on(DEVICE), kept()));
    shared.set_budget(0, Some(BUDGET_BYTES));
    pool.release(other).expect("release");
    resume_tags(&pool, &["kv"]);
    assert_counted(&pool, "a resume by tag");
    pool.release(kv).expect("release");
    assert_eq!(held(&pool, DEVICE), 20 * UNIT);
}

/// One of the processes of the random walk.
struct Walker {
    pool: SimPool,
    handles: Vec<(VirtualHandle, DeviceOrdinal)>,
    mapped: Vec<(VirtualHandle, VaRange)>,
    blocks: Vec<DeviceAddress>,
    is_set_aside: bool,
}

/// A small generator: the walk is the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn pick<T>(&mut self, from: &mut Vec<T>) -> Option<T> {
        let bound = from.len() as u64;
        let at = (bound > 0).then(|| self.below(bound))?;
        Some(from.swap_remove(usize::try_from(at).expect("an index")))
    }
}

impl Walker {
    fn device(dice: &mut Dice) -> DeviceOrdinal {
        if dice.below(4) == 0 { OTHER } else { DEVICE }
    }

    /// One step in which one call of the driver's may fail.
    fn step(&mut self, dice: &mut Dice) -> &'static str {
        let kind = dice.below(24);
        if kind >= 22 {
            // That the devices are idle is seen before anything fails.
            self.pool.drain();
        }
        if dice.below(3) == 0 {
            let codes = [DriverCode::UNKNOWN, DriverCode::OUT_OF_MEMORY];
            let code = codes[usize::from(dice.below(2) == 0)];
            self.pool.driver().faults().fail_any(FaultSpan::Nth(1 + dice.below(12)), code);
        }
        let done = match kind {
            0..8 => self.create(dice),
            8..13 => self.allocate(dice),
            13..19 => self.free(dice),
            19 | 20 => self.map_or_unmap(dice),
            21 => self.tag(),
            22 => self.pause_and_resume(),
            _ => self.pause_and_undo(),
        };
        self.pool.driver().faults().clear();
        done
    }

    fn create(&mut self, dice: &mut Dice) -> &'static str {
        let device = Self::device(dice);
        let prop = AllocationProp::pinned_on(device);
        let class = if dice.below(4) == 0 { kept() } else { tagged() };
        let made = self.pool.create((1 + dice.below(6)) * UNIT, &prop, class);
        self.handles.extend(made.ok().map(|handle| (handle, device)));
        "create"
    }

    fn allocate(&mut self, dice: &mut Dice) -> &'static str {
        let device = Self::device(dice);
        let prop = AllocationProp::pinned_on(device);
        let bytes = 1 + dice.below(6 * UNIT);
        let made = self.pool.block_allocate(bytes, &prop, &[device], tagged());
        self.blocks.extend(made.ok());
        "allocate"
    }

    fn free(&mut self, dice: &mut Dice) -> &'static str {
        if dice.below(2) == 0 {
            if let Some((handle, _)) = dice.pick(&mut self.handles) {
                // It is gone either way, or kept until the driver takes it.
                let _done = self.pool.release(handle);
            }
        } else if let Some(block) = dice.pick(&mut self.blocks)
            && self.pool.block_free(block).is_err()
        {
            self.blocks.push(block);
        }
        "free"
    }

    fn map_or_unmap(&mut self, dice: &mut Dice) -> &'static str {
        self.pool.driver().faults().clear();
        if let Some((handle, range)) = dice.pick(&mut self.mapped) {
            self.pool.unmap(range).expect("unmap");
            self.pool.release(handle).expect("release");
        } else if !self.is_set_aside
            && let Some((handle, device)) = dice.pick(&mut self.handles)
        {
            let range =
                map(&self.pool, handle, self.size_of(handle), &[AccessDesc::read_write(device)]);
            self.mapped.push((handle, range));
        }
        "map"
    }

    fn size_of(&self, handle: VirtualHandle) -> u64 {
        let export = self.pool.export(handle).expect("export");
        export.size_bytes
    }

    fn pause_and_resume(&mut self) -> &'static str {
        if self.pool.save(&WHOLE, UNLIMITED).is_err() {
            self.go_back();
            return "a pause that failed";
        }
        let _notes = self.pool.release_selected().expect("release");
        self.resume();
        "pause and resume"
    }

    fn resume(&mut self) {
        let faults = Arc::clone(self.pool.driver());
        loop {
            let came = self.pool.create_own(&WHOLE).and_then(|_| self.pool.restore_own(0));
            faults.faults().clear();
            if came.is_ok() {
                break;
            }
            self.pool.undo_resume().expect("undone");
        }
        drop(self.pool.commit_resume());
    }

    fn go_back(&mut self) {
        self.pool.driver().faults().clear();
        self.pool.remount().expect("undone");
        drop(self.pool.commit_resume());
    }

    fn pause_and_undo(&mut self) -> &'static str {
        let _saved = self.pool.save(&WHOLE, UNLIMITED);
        self.go_back();
        "a pause that was undone"
    }

    fn tag(&mut self) -> &'static str {
        self.pool.driver().faults().clear();
        if !self.is_set_aside {
            pause_tags(&self.pool, &["kv"]);
            self.is_set_aside = true;
            return "a pause by tag";
        }
        let selection = vmm_pool::Selection::SetAside(
            vmm_pool::Tags::Named(["kv".to_owned()].into()),
            vmm_pool::Whose::Everybody,
        );
        match self.pool.create_own(&selection) {
            Ok(_) => {
                self.pool.restore_own(0).expect("contents");
                drop(self.pool.commit_resume());
                self.is_set_aside = false;
                "a resume by tag"
            }
            Err(PoolError::OverBudget { .. }) => "a resume by tag that was refused",
            Err(error) => panic!("{error}"),
        }
    }

    fn end(self) {
        let Self { pool, handles, mapped, blocks, .. } = self;
        for (handle, range) in mapped {
            pool.unmap(range).expect("unmap");
            pool.release(handle).expect("release");
        }
        for (handle, _) in handles {
            pool.release(handle).expect("release");
        }
        for block in blocks {
            pool.block_free(block).expect("free");
        }
        // Whatever the driver would not take back goes now.
        pause(&pool);
        resume(&pool);
    }
}

#[test]
fn after_every_step_what_counts_is_what_the_driver_has_given() {
    const STEPS: u32 = 500;
    for seed in 1..=2 {
        let node = node();
        let shared = shared(2);
        let walker = |slot: usize| {
            let pool = pool(&node);
            counts(&pool, &shared, slot);
            let (handles, mapped, blocks) = (Vec::new(), Vec::new(), Vec::new());
            Walker { pool, handles, mapped, blocks, is_set_aside: false }
        };
        let mut walkers = [walker(0), walker(1)];
        let mut dice = Dice(seed);
        let mut fullest = 0;
        for number in 0..STEPS {
            let turn = usize::from(dice.below(2) == 0);
            let done = walkers[turn].step(&mut dice);
            let after = format!("step {number} of seed {seed}: {done}");
            assert_counted(&walkers[turn].pool, &after);
            let held = held(&walkers[0].pool, DEVICE);
            assert!(held <= BUDGET_BYTES, "{held} after {after}");
            fullest = fullest.max(held);
        }
        assert!(fullest > BUDGET_BYTES - 6 * UNIT, "the walk never came near the budget");
        walkers.into_iter().for_each(Walker::end);
        assert_eq!(shared.figure(0).held_bytes, 0, "seed {seed}");
        assert_eq!(shared.figure(1).held_bytes, 0, "seed {seed}");
    }
}
