//! Every driver call of every step of a pause and resume fails once. Undone as a member undoes it, all
//! contents are intact, nothing is left on the device that should not be, and the next try succeeds.

use std::time::{Duration, Instant};

use sublet_pager::{In, Pager};
use vmm_pool::driver::sim::{FaultSpan, SimDriver};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver as _, DriverCode, DriverOp,
    RawStream, VaRange,
};
use vmm_pool::{Contents, Failed, FromOpen, PoolError, PoolResult, StepLog, VirtualHandle};

use crate::paged::{pager, unlimited};
use crate::stage::{
    CAPACITY_BYTES, DEVICE, OTHER, SimPool, UNIT, UNLIMITED, WHOLE, class, create, end_streams,
    free_bytes, holds, import_again, kept, map, node, pattern, pool, share, write,
};

/// The time that a use of paged memory may take.
const LIMIT: Duration = Duration::from_mins(1);
/// The frames of a rank that is paged, and its chunks.
const FRAMES: u64 = 2;
const CHUNKS: u64 = 3;

/// A window of a process with fewer frames than chunks. Each use is waited for, so that no event stands behind it.
struct PagedRank {
    pager: Pager<SimDriver>,
    stream: RawStream,
    /// The places of its chunks, and their contents.
    spans: Vec<(VaRange, u64)>,
}

impl PagedRank {
    fn new(pool: &SimPool) -> Self {
        let pager = pager(pool, FRAMES, unlimited);
        let span = |seed| (VaRange::new(pager.alloc(UNIT).expect("a span"), UNIT), 1000 + seed);
        let spans = (0..CHUNKS).map(span).collect();
        let stream = pool.driver().stream_create().expect("a stream");
        let rank = Self { pager, stream, spans };
        rank.each(|range, seed| write(pool, DEVICE, range, pattern(seed)));
        rank
    }

    /// Does `work` with each chunk while it is on its device.
    fn each(&self, work: impl Fn(VaRange, u64)) {
        for &(range, seed) in &self.spans {
            let place = In::Elsewhere(self.stream);
            let touched = self.pager.begin_call(&[range], place, LIMIT).expect("here");
            work(range, seed);
            self.pager.end_call(&touched.expect("it is paged"));
        }
    }
}

/// Two processes that share memory in both directions, with one of each kind of mapping.
pub(crate) struct Pair {
    /// The window of process 0, if it is paged.
    paged: Option<PagedRank>,
    /// The streams that stay for good, of each process.
    streams: [usize; 2],
    pub(crate) pools: [SimPool; 2],
    /// What must be readable: which process, as which device, where, and what.
    contents: Vec<(usize, DeviceOrdinal, VaRange, u64)>,
    /// Kept memory that is mapped nowhere, of process 0.
    unmapped: (VirtualHandle, u64),
    resident_bytes: [u64; 2],
}

/// Which process is `importer`'s owner in this pair.
pub(crate) fn peer(process: usize) -> usize {
    1 - process
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::of(false)
    }

    /// Is process 0 paged?
    fn of(is_paged: bool) -> Self {
        let node = node();
        let pools = [pool(&node), pool(&node)];
        for pool in &pools {
            pool.copies().detect_changes(true);
        }
        let mut contents = Vec::new();
        let mut seed = 1;
        for (process, pool) in pools.iter().enumerate() {
            let device = DeviceOrdinal(i32::try_from(process).expect("0 or 1"));
            let elsewhere = DeviceOrdinal(1 - device.0);
            let rights = [AccessDesc::read_write(device)];
            // Mapped twice, shared with the other process, which maps it twice too.
            let shared = create(pool, device, 2, kept());
            let places = [(); 2].map(|()| map(pool, shared, 2 * UNIT, &rights));
            write(pool, device, places[0], pattern(seed));
            contents.extend(places.map(|place| (process, device, place, seed)));
            let other = &pools[peer(process)];
            let imported = share(pool, shared, other, peer(process) as u64);
            for _ in 0..2 {
                let rights = [AccessDesc::read_write(elsewhere)];
                let place = map(other, imported, 2 * UNIT, &rights);
                contents.push((peer(process), elsewhere, place, seed));
            }
            other.release(imported).expect("the mappings keep it");
            // A plain block, and one that only the other device reaches.
            let prop = AllocationProp::pinned_on(device);
            for accessor in [device, elsewhere] {
                seed += 1;
                let block = pool.block_allocate(UNIT, &prop, &[accessor], kept()).expect("a block");
                let place = VaRange::new(block, UNIT);
                write(pool, accessor, place, pattern(seed));
                contents.push((process, accessor, place, seed));
            }
            let scratch = create(pool, device, 1, class(Contents::Discard));
            map(pool, scratch, UNIT, &rights);
            // In the file: one as usual, and one that only the other device reaches.
            for accessor in [device, elsewhere] {
                seed += 1;
                let handle = create(pool, device, 1, class(Contents::File));
                let place = map(pool, handle, UNIT, &[AccessDesc::read_write(accessor)]);
                write(pool, accessor, place, pattern(seed));
                contents.push((process, accessor, place, seed));
            }
            seed += 1;
        }
        let hidden = create(&pools[0], DEVICE, 1, kept());
        let place = map(&pools[0], hidden, UNIT, &[AccessDesc::read_write(DEVICE)]);
        write(&pools[0], DEVICE, place, pattern(seed));
        pools[0].unmap(place).expect("unmap");
        let paged = is_paged.then(|| PagedRank::new(&pools[0]));
        let paged_bytes = if is_paged { FRAMES * UNIT } else { 0 };
        let resident_bytes = [8 * UNIT + paged_bytes, 7 * UNIT];
        let unmapped = (hidden, seed);
        let mut pair = Self { pools, paged, streams: [0; 2], contents, unmapped, resident_bytes };
        pair.assert_intact("at first");
        pair.streams = [0, 1].map(|process| end_streams(&pair.pools[process]));
        pair
    }

    pub(crate) fn assert_intact(&self, when: &str) {
        for (process, device, place, seed) in &self.contents {
            let pool = &self.pools[*process];
            assert!(holds(pool, *device, *place, pattern(*seed)), "{when}: {place:?} of {process}");
        }
        if let Some(paged) = &self.paged {
            paged.each(|range, seed| {
                assert!(holds(&self.pools[0], DEVICE, range, pattern(seed)), "{when}: {range:?}");
            });
        }
        let (handle, seed) = self.unmapped;
        let place = map(&self.pools[0], handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
        assert!(holds(&self.pools[0], DEVICE, place, pattern(seed)), "{when}: unmapped memory");
        self.pools[0].unmap(place).expect("unmap");
        crate::stage::free_addresses(&self.pools[0], place);
    }

    /// Every byte that was given back is free, so no view, handle or descriptor was left behind.
    pub(crate) fn assert_balance(&self, resident: bool, when: &str) {
        for (device, bytes) in [DEVICE, OTHER].into_iter().zip(self.resident_bytes) {
            let expected = if resident { CAPACITY_BYTES - bytes } else { CAPACITY_BYTES };
            assert_eq!(free_bytes(&self.pools[0], device), expected, "{when}: {device}");
        }
    }

    pub(crate) fn each(
        &self,
        mut step: impl FnMut(&SimPool) -> PoolResult<StepLog>,
    ) -> PoolResult<()> {
        self.pools.iter().try_for_each(|pool| step(pool).map(drop))
    }

    pub(crate) fn import(&self, process: usize) -> PoolResult<StepLog> {
        import_again(&self.pools[peer(process)], &self.pools[process], process as u64)
    }

    pub(crate) fn pause(&self) -> PoolResult<()> {
        self.each(|pool| pool.save(&WHOLE, UNLIMITED))?;
        self.each(SimPool::release_selected)
    }

    pub(crate) fn finish_resume(&self) -> PoolResult<()> {
        self.import(0)?;
        self.import(1)?;
        for pool in &self.pools {
            drop(pool.commit_resume());
        }
        Ok(())
    }

    pub(crate) fn resume(&self) -> PoolResult<()> {
        self.each(|pool| pool.create_own(&WHOLE))?;
        self.each(|pool| pool.restore_own(usize::MAX))?;
        self.finish_resume()
    }

    /// What members do when a step of a pause failed before the first release.
    pub(crate) fn undo_pause(&self) -> PoolResult<()> {
        self.each(SimPool::remount)?;
        for pool in &self.pools {
            drop(pool.commit_resume());
        }
        Ok(())
    }

    /// What members do when a step of a resume failed.
    pub(crate) fn undo_resume(&self) {
        self.each(SimPool::undo_resume).expect("all given up again");
    }
}

/// A call that fails: of which process, which operation, which one of the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) process: usize,
    op: DriverOp,
    nth: u64,
}

impl Fault {
    /// Runs `step` with this fault. `None` when the step makes fewer such calls.
    pub(crate) fn during<T>(
        self,
        pair: &Pair,
        step: impl FnOnce() -> PoolResult<T>,
    ) -> Option<PoolResult<T>> {
        let faults = pair.pools[self.process].driver().faults();
        let before = faults.fired();
        faults.fail(self.op, FaultSpan::Nth(self.nth), DriverCode::UNKNOWN);
        let outcome = step();
        faults.clear();
        (faults.fired() > before).then_some(outcome)
    }

    /// A handle or stream that the driver would not take back stays until it is offered again, at the next
    /// step of a pause or resume; until then sums cannot add up.
    pub(crate) fn is_put_off(self) -> bool {
        matches!(self.op, DriverOp::Release | DriverOp::StreamDestroy)
    }
}

/// Calls `round` on a fresh pair for each call of each process that it lets happen, one at a time. `round`
/// says whether the fault was met.
pub(crate) fn each_fault(mut round: impl FnMut(&Pair, Fault) -> bool) -> u64 {
    each_fault_of(&Pair::new(), &[0, 1], &mut round)
        + each_fault_of(&Pair::of(true), &[0], &mut round)
}

fn each_fault_of(
    pair: &Pair,
    processes: &[usize],
    round: &mut impl FnMut(&Pair, Fault) -> bool,
) -> u64 {
    // What one pause has used of host memory stays; without it most of the time goes into bringing that in.
    pair.pause().expect("pause");
    pair.resume().expect("resume");
    let mut met = 0;
    for &process in processes {
        // The pager asks about events also while the gate is shut.
        let is_pagers = |op: DriverOp| pair.paged.is_some() && op == DriverOp::EventQuery;
        for &op in DriverOp::ALL.iter().filter(|op| !is_pagers(**op)) {
            for nth in 1.. {
                let fault = Fault { process, op, nth };
                if !round(pair, fault) {
                    break;
                }
                met += 1;
                pair.assert_intact(&format!("{fault:?}"));
                pair.assert_balance(true, &format!("{fault:?}"));
                for (pool, stay) in pair.pools.iter().zip(pair.streams) {
                    assert_eq!(end_streams(pool), stay, "{fault:?}: streams stay");
                }
            }
        }
    }
    met
}

#[test]
fn any_call_of_saving_may_fail_and_the_pause_is_undone() {
    let met = each_fault(|pair, fault| {
        // The other process has saved when this one fails.
        let other = &pair.pools[peer(fault.process)];
        other.save(&WHOLE, UNLIMITED).expect("no fault here");
        let pool = &pair.pools[fault.process];
        pool.drain();
        let outcome = fault.during(pair, || pool.save(&WHOLE, UNLIMITED));
        pair.undo_pause().unwrap_or_else(|error| panic!("{fault:?}: undo: {error}"));
        pair.assert_intact(&format!("{fault:?} undone"));
        if !fault.is_put_off() {
            pair.assert_balance(true, &format!("{fault:?} undone"));
        }
        pair.pause().unwrap_or_else(|error| panic!("{fault:?}: second try: {error}"));
        if !fault.is_put_off() {
            pair.assert_balance(false, &format!("{fault:?} paused"));
        }
        pair.resume().unwrap_or_else(|error| panic!("{fault:?}: resume: {error}"));
        outcome.is_some()
    });
    assert!(met >= 30, "only {met} calls were met");
}

/// A resume in which `step` of one process fails, undone, then tried again.
fn resume_with_fault(
    pair: &Pair,
    fault: Fault,
    steps_before: impl FnOnce(),
    step: impl FnOnce() -> PoolResult<StepLog>,
) -> bool {
    pair.pause().expect("pause");
    steps_before();
    let Some(outcome) = fault.during(pair, step) else {
        pair.undo_resume();
        pair.resume().expect("resume");
        return false;
    };
    if outcome.is_ok() {
        // Only what can be put off may go wrong unnoticed.
        assert!(fault.is_put_off(), "{fault:?} was hidden");
    }
    pair.undo_resume();
    if !fault.is_put_off() {
        pair.assert_balance(false, &format!("{fault:?} undone"));
    }
    pair.resume().unwrap_or_else(|error| panic!("{fault:?}: second try: {error}"));
    true
}

#[test]
fn any_call_of_creating_may_fail_and_nothing_is_taken() {
    let met = each_fault(|pair, fault| {
        pair.pause().expect("pause");
        let pool = &pair.pools[fault.process];
        let outcome = fault.during(pair, || pool.create_own(&WHOLE));
        let Some(outcome) = outcome else {
            pair.undo_resume();
            pair.resume().expect("resume");
            return false;
        };
        assert!(outcome.is_err(), "{fault:?} was hidden");
        pair.assert_balance(false, &format!("{fault:?}: nothing was taken"));
        pair.resume().unwrap_or_else(|error| panic!("{fault:?}: second try: {error}"));
        true
    });
    assert!(met >= 9, "only {met} calls were met");
}

#[test]
fn any_call_of_restoring_may_fail_and_the_tenant_stays_paused() {
    let met = each_fault(|pair, fault| {
        let before = || pair.each(|pool| pool.create_own(&WHOLE)).expect("memory");
        let step = || pair.pools[fault.process].restore_own(usize::MAX);
        resume_with_fault(pair, fault, before, step)
    });
    assert!(met >= 40, "only {met} calls were met");
}

#[test]
fn any_call_of_importing_may_fail_and_the_tenant_stays_paused() {
    let met = each_fault(|pair, fault| {
        let before = || {
            pair.each(|pool| pool.create_own(&WHOLE)).expect("memory");
            pair.each(|pool| pool.restore_own(usize::MAX)).expect("contents");
        };
        resume_with_fault(pair, fault, before, || pair.import(fault.process))
    });
    assert!(met >= 8, "only {met} calls were met");
}

#[test]
fn any_call_of_mapping_own_memory_again_may_fail_and_be_tried_again() {
    let met = each_fault(|pair, fault| {
        pair.each(|pool| pool.save(&WHOLE, UNLIMITED)).expect("saving");
        let pool = &pair.pools[fault.process];
        let outcome = fault.during(pair, || pool.remount());
        pair.undo_pause().unwrap_or_else(|error| panic!("{fault:?}: second try: {error}"));
        outcome.is_some()
    });
    assert!(met >= 6, "only {met} calls were met");
}

#[test]
fn nothing_is_unmapped_under_copies_whose_end_nobody_has_seen() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 2, kept());
    let place = map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&pool, DEVICE, place, pattern(5));
    // This is copied through a view.
    create(&pool, DEVICE, 1, kept());
    let faults = pool.driver().faults();
    let unmapped = faults.calls(DriverOp::Unmap);
    faults.fail(DriverOp::StreamSynchronize, FaultSpan::From(1), DriverCode::UNKNOWN);
    assert!(pool.save(&WHOLE, UNLIMITED).is_err(), "no wait for a copy succeeded");
    assert!(faults.calls(DriverOp::CopyToHost) > 0);
    faults.clear();
    assert_eq!(faults.calls(DriverOp::Unmap), unmapped, "no view was taken down");
    assert!(pool.report().host_arena_bytes > 0, "copies may be writing there");
    // Nor does the device itself say that it is done.
    faults.fail(DriverOp::ContextSynchronize, FaultSpan::From(1), DriverCode::UNKNOWN);
    // Going back is all that is left, by the types.
    let error = pool.remount().expect_err("copies may be under way");
    assert!(error.to_string().contains("copies that did not end"), "{error}");
    assert_eq!(faults.calls(DriverOp::Unmap), unmapped);
    faults.clear();
    pool.remount().expect("it says so now");
    assert!(holds(&pool, DEVICE, place, pattern(5)));
    assert_eq!(faults.calls(DriverOp::Unmap), unmapped + 1, "the view is in nobody's way");
    crate::stage::pause(&pool);
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

#[test]
fn calls_are_let_through_if_the_context_is_lost_under_a_look_at_the_contents() {
    let pool = pool(&node());
    pool.copies().detect_changes(true);
    let handle = create(&pool, DEVICE, 2, kept());
    map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    let draining = pool.shut::<FromOpen>().into_draining();
    let soon = Instant::now() + Duration::from_mins(1);
    let drained = draining.drain(soon, &crossbeam_channel::never());
    let (mut quiesced, _) = drained.map_err(|failed| failed.error).expect("no work");
    let faults = pool.driver().faults();
    for op in [DriverOp::StreamSynchronize, DriverOp::ContextSynchronize] {
        faults.fail(op, FaultSpan::From(1), DriverCode::ILLEGAL_ADDRESS);
    }
    quiesced.survey(&WHOLE);
    drop(quiesced);
    assert!(pool.gate().is_open(), "the application hears of it");
}

#[test]
fn a_process_runs_on_when_no_device_looks_at_its_contents_any_more() {
    let pool = pool(&node());
    pool.copies().detect_changes(true);
    let places = [(); 2].map(|()| {
        let handle = create(&pool, DEVICE, 2, kept());
        map(&pool, handle, 2 * UNIT, &[AccessDesc::read_write(DEVICE)])
    });
    let faults = pool.driver().faults();
    let looked_at = || {
        let draining = pool.shut::<FromOpen>().into_draining();
        let soon = Instant::now() + Duration::from_mins(1);
        let drained = draining.drain(soon, &crossbeam_channel::never());
        let (mut quiesced, _) = drained.map_err(|failed| failed.error).expect("no work");
        faults.fail(DriverOp::StreamSynchronize, FaultSpan::From(1), DriverCode::UNKNOWN);
        let log = quiesced.survey(&WHOLE);
        assert!(log.notes.iter().any(|note| note.contains("could not be told")), "{log:?}");
        quiesced
    };
    let quiesced = looked_at();
    // Nor does the device itself say that it is done.
    faults.fail(DriverOp::ContextSynchronize, FaultSpan::From(1), DriverCode::UNKNOWN);
    let Failed { state, error } = quiesced.reopen().expect_err("looks may be under way");
    assert!(error.to_string().contains("copies that did not end"), "{error}");
    faults.clear();
    drop(state.reopen().map_err(|failed| failed.error).expect("it says so now"));
    pool.unmap(places[0]).expect("the gate is open");
    let quiesced = looked_at();
    faults.clear();
    drop(quiesced);
    pool.unmap(places[1]).expect("the gate is open");
    pool.driver().core().device_failure(DEVICE).expect("nothing was unmapped under a look");
}

#[test]
fn memory_that_runs_out_half_way_is_named_and_given_back() {
    let pair = Pair::new();
    pair.pause().expect("pause");
    let faults = pair.pools[0].driver().faults();
    for nth in 1..=5 {
        faults.fail(DriverOp::Create, FaultSpan::Nth(nth), DriverCode::OUT_OF_MEMORY);
        let error = pair.pools[0].create_own(&WHOLE).expect_err("it was made to run out");
        let PoolError::OutOfDeviceMemory { device, needed_bytes, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((device, needed_bytes), (DEVICE, pair.resident_bytes[0]));
        faults.clear();
        pair.assert_balance(false, "ran out");
    }
    pair.resume().expect("resume");
    pair.assert_intact("after running out");
}

#[test]
fn a_mapping_that_the_driver_will_not_undo_is_named_and_stays() {
    let pool = pool(&node());
    let handle = create(&pool, DEVICE, 1, class(Contents::Discard));
    let place = map(&pool, handle, UNIT, &[AccessDesc::read_write(DEVICE)]);
    pool.save(&WHOLE, UNLIMITED).expect("nothing to save");
    pool.driver().faults().fail(DriverOp::Unmap, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    let log = pool.release_selected().expect("the others are gone all the same");
    assert_eq!(log.notes.len(), 1, "{:?}", log.notes);
    assert!(log.notes[0].contains("stays mapped"), "{:?}", log.notes);
    let row = &pool.report().devices[0];
    assert_eq!(row.resident_bytes(), UNIT, "it is still there, and says so");
    crate::stage::resume(&pool);
    write(&pool, DEVICE, VaRange::new(DeviceAddress(place.start.0), UNIT), pattern(1));
    pool.unmap(place).expect("unmap");
    pool.release(handle).expect("release");
    assert_eq!(free_bytes(&pool, DEVICE), CAPACITY_BYTES);
}

#[test]
fn addresses_that_the_driver_would_not_take_back_go_with_the_next_pause() {
    let pool = pool(&node());
    let faults = pool.driver().faults();
    faults.fail(DriverOp::SetAccess, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    faults.fail(DriverOp::AddressFree, FaultSpan::Nth(1), DriverCode::UNKNOWN);
    let prop = AllocationProp::pinned_on(DEVICE);
    pool.block_allocate(UNIT, &prop, &[DEVICE], kept()).expect_err("nobody may reach it");
    faults.clear();
    let census = pool.driver().census();
    assert_eq!((census.reservations, census.handles), (1, 0));
    crate::stage::pause(&pool);
    assert_eq!(pool.driver().census().reservations, 0);
}
