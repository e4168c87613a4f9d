//! Physical memory that changes hands between two tenants: what is skipped, and that nobody ever sees a byte of the other.

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DeviceAddress, DriverCode, DriverOp, VaRange};
use vmm_pool::{ByDevice, Contents, Handed, Moved, Pieces, Shapes, VirtualHandle};

use crate::stage::{
    CAPACITY_BYTES, DEVICE, GateAt, SimPool, UNIT, UNLIMITED, WHOLE, class, create, free_bytes,
    gate_of, holds, is_clear, kept, map, node, pattern, pool, resume, share, write,
};

/// What a tenant has of each kind, unless less is enough; each is of two units.
const EACH: usize = 3;

/// What of it may change hands: kept and scratch memory, one that is half zero, and one that is mapped nowhere.
const fn shaped(each: usize) -> usize {
    2 * each + 2
}

/// The bytes of all of it, with what comes from the file.
const fn all_bytes(each: usize) -> u64 {
    (shaped(each) + each) as u64 * 2 * UNIT
}

/// A tenant of one process, whose memory is of few shapes.
struct Tenant {
    pool: SimPool,
    /// Kept, in host memory or the file, with seeds.
    filled: Vec<(VaRange, u64)>,
    /// Kept, and its first half is zero.
    part: (VaRange, u64),
    handle: VirtualHandle,
    scratch: Vec<VaRange>,
}

impl Tenant {
    fn new(node: &SimNode, first_seed: u64, each: usize) -> Self {
        let pool = pool(node);
        pool.set_pieces(Pieces::BOTH);
        let rights = [AccessDesc::read_write(DEVICE)];
        let two = |contents| create(&pool, DEVICE, 2, class(contents));
        let (mut filled, mut scratch) = (Vec::new(), Vec::new());
        let handle = two(Contents::Keep);
        let half_zero = map(&pool, handle, 2 * UNIT, &rights);
        write(&pool, DEVICE, half_zero, pattern(first_seed));
        pool.driver().core().fill_device(DEVICE, first_half(half_zero), &[0]).expect("mapped");
        for index in 0..each as u64 {
            for (contents, seed) in [
                (Contents::Keep, first_seed + 1 + index),
                (Contents::File, first_seed + 20 + index),
            ] {
                let place = map(&pool, two(contents), 2 * UNIT, &rights);
                write(&pool, DEVICE, place, pattern(seed));
                filled.push((place, seed));
            }
            let place = map(&pool, two(Contents::Discard), 2 * UNIT, &rights);
            write(&pool, DEVICE, place, pattern(first_seed + 100));
            scratch.push(place);
        }
        // Mapped nowhere when it leaves and when it comes.
        let hidden = two(Contents::Keep);
        let place = map(&pool, hidden, 2 * UNIT, &rights);
        write(&pool, DEVICE, place, pattern(first_seed + 50));
        pool.unmap(place).expect("unmap");
        Self { pool, filled, part: (half_zero, first_seed), handle, scratch }
    }

    fn assert_whole(&self, when: &str) {
        let pool = &self.pool;
        for (place, seed) in &self.filled {
            assert!(holds(pool, DEVICE, *place, pattern(*seed)), "{when}: {place:?}");
        }
        let (place, seed) = self.part;
        assert!(holds(pool, DEVICE, first_half(place), [0; 16]), "{when}: zeros");
        assert!(holds(pool, DEVICE, second_half(place), pattern(seed)), "{when}: behind zeros");
    }

    /// What it finds in memory whose contents nobody keeps, when that was another's.
    fn assert_scratch_is_clear(&self, when: &str) {
        for place in &self.scratch {
            assert!(is_clear(&self.pool, DEVICE, *place), "{when}: another's bytes");
        }
    }

    fn pause(&self) {
        self.pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        self.pool.release_rest().expect("all");
    }

    /// All of it goes, and what the other wants of it is handed over.
    fn leave(&self, wanted: &Shapes) -> (Moved, Vec<Handed>) {
        self.pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        self.pool.hand_over(&everything(), wanted).expect("a stage")
    }

    fn come(&self, handed: Vec<Handed>) -> Moved {
        let moved = self.pool.take_over(&ByDevice::new(), handed, &Shapes::new()).expect("a stage");
        self.pool.restore_rest(usize::MAX).expect("the rest");
        drop(self.pool.commit_resume());
        moved
    }
}

fn first_half(place: VaRange) -> VaRange {
    VaRange::new(place.start, UNIT)
}

fn second_half(place: VaRange) -> VaRange {
    VaRange::new(DeviceAddress(place.start.0 + UNIT), UNIT)
}

fn everything() -> ByDevice {
    [(DEVICE, CAPACITY_BYTES)].into()
}

/// Two tenants on one device, of which the first is paused.
fn two(each: usize) -> [Tenant; 2] {
    let node = node();
    let first = Tenant::new(&node, 1, each);
    first.pause();
    [first, Tenant::new(&node, 1000, each)]
}

fn count(shapes: &Shapes) -> usize {
    shapes.values().sum()
}

#[test]
fn memory_changes_hands_without_being_released_and_nobody_sees_the_others_bytes() {
    let [mut away, mut here] = two(EACH);
    for round in 0..4 {
        let wanted = away.pool.shapes_to_take(&WHOLE);
        assert_eq!(count(&wanted), shaped(EACH), "what comes from the file does not");
        assert_eq!(count(&here.pool.shapes_to_give(&WHOLE)), shaped(EACH) + 3);
        let (moved, handed) = here.leave(&wanted);
        assert!(moved.log.notes.is_empty(), "{:?}", moved.log.notes);
        assert_eq!(handed.len(), shaped(EACH));
        // The rest is free, and this is still nobody else's.
        let handed_bytes = 2 * UNIT * shaped(EACH) as u64;
        assert_eq!(moved.bytes[&DEVICE], all_bytes(EACH));
        assert_eq!(free_bytes(&away.pool, DEVICE), CAPACITY_BYTES - handed_bytes);
        let faults = away.pool.driver().faults();
        let created = faults.calls(DriverOp::Create);
        let moved = away.come(handed);
        assert_eq!(moved.bytes[&DEVICE], handed_bytes, "nothing was allowed besides");
        assert_eq!(faults.calls(DriverOp::Create) - created, EACH as u64);
        here.pool.release_rest().expect("nothing is left");
        assert_eq!(free_bytes(&away.pool, DEVICE), CAPACITY_BYTES - all_bytes(EACH));
        away.assert_whole(&format!("round {round}"));
        away.assert_scratch_is_clear(&format!("round {round}"));
        for place in &away.scratch {
            write(&away.pool, DEVICE, *place, pattern(7));
        }
        std::mem::swap(&mut away, &mut here);
    }
}

#[test]
fn what_will_be_handed_over_is_not_created_meanwhile() {
    let [away, here] = two(EACH);
    let wanted = away.pool.shapes_to_take(&WHOLE);
    let (_, mut handed) = here.leave(&wanted);
    here.pool.release_rest().expect("all");
    let faults = away.pool.driver().faults();
    let created = faults.calls(DriverOp::Create);
    let mut kept = wanted.clone();
    let (later, now) = (handed.split_off(3), handed);
    *kept.values_mut().next().expect("one shape") = later.len() - 1;
    let moved = away.pool.take_over(&everything(), now, &kept).expect("a stage");
    // One of them, and those that come from the file.
    assert_eq!(faults.calls(DriverOp::Create) - created, 1 + EACH as u64);
    assert_eq!(count(&moved.taken), 3);
    assert_eq!(away.pool.shapes_to_take(&WHOLE), kept);
    let moved = away.pool.take_over(&everything(), later, &Shapes::new()).expect("a stage");
    assert_eq!(moved.taken, kept, "all but what nothing is missing for");
    away.pool.restore_rest(usize::MAX).expect("the rest");
    drop(away.pool.commit_resume());
    assert_eq!(faults.calls(DriverOp::Create) - created, 1 + EACH as u64);
    assert_eq!(free_bytes(&away.pool, DEVICE), CAPACITY_BYTES - all_bytes(EACH));
    away.assert_whole("at the end");
}

#[test]
fn what_was_taken_over_is_shared_and_paused_like_any_memory() {
    let [away, here] = two(EACH);
    let (_, handed) = here.leave(&away.pool.shapes_to_take(&WHOLE));
    away.come(handed);
    let importer = pool(away.pool.driver().core().node());
    let imported = share(&away.pool, away.handle, &importer, 5);
    let seen = map(&importer, imported, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    assert!(holds(&importer, DEVICE, second_half(seen), pattern(away.part.1)));
    // It has become shared memory, which does not change hands.
    assert_eq!(count(&away.pool.shapes_to_give(&WHOLE)), shaped(EACH) + 3 - 1);
}

#[test]
fn what_nothing_is_missing_for_or_nobody_takes_is_free_again() {
    let [away, here] = two(EACH);
    let (_, handed) = here.leave(&here.pool.shapes_to_give(&WHOLE));
    assert_eq!(handed.len(), shaped(EACH) + 3);
    assert_eq!(free_bytes(&here.pool, DEVICE), CAPACITY_BYTES - all_bytes(EACH));
    let moved = away.pool.take_over(&ByDevice::new(), handed, &Shapes::new()).expect("a stage");
    assert_eq!(moved.bytes[&DEVICE], 2 * UNIT * shaped(EACH) as u64);
    assert_eq!(free_bytes(&here.pool, DEVICE), CAPACITY_BYTES - moved.bytes[&DEVICE]);
    // The resume is undone.
    away.pool.drop_proof();
    assert_eq!(
        (free_bytes(&here.pool, DEVICE), gate_of(&away.pool)),
        (CAPACITY_BYTES, GateAt::Offloaded)
    );
    here.pool.release_rest().expect("nothing is left");
    let wanted = away.pool.shapes_to_take(&WHOLE);
    resume(&here.pool);
    let (_, handed) = here.leave(&wanted);
    drop(handed);
    assert_eq!(free_bytes(&here.pool, DEVICE), CAPACITY_BYTES);
    here.pool.release_rest().expect("nothing is left");
    resume(&away.pool);
    away.assert_whole("created anew");
}

#[test]
fn memory_that_was_handed_over_is_shared_as_any_and_gone_with_its_last_use() {
    let node = node();
    let first = Tenant::new(&node, 1, 1);
    first.pause();
    let [mut away, mut here] = [first, Tenant::new(&node, 1000, 1)];
    // The second time it goes back by the descriptor that it came by.
    for round in 0..3 {
        let wanted = away.pool.shapes_to_take(&WHOLE);
        let (_, handed) = here.leave(&wanted);
        assert_eq!(handed.len(), shaped(1), "{round}");
        assert_eq!(count(&away.come(handed).taken), shaped(1), "{round}");
        away.assert_whole("handed over");
        here.pool.release_rest().expect("the rest");
        (away, here) = (here, away);
    }
    // The driver exports nothing of it; others import it all the same.
    let importer = pool(&node);
    let imported = share(&here.pool, here.handle, &importer, 1);
    let there = map(&importer, imported, 2 * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(&importer, DEVICE, there, pattern(7));
    let (place, _) = here.part;
    assert!(holds(&here.pool, DEVICE, place, pattern(7)), "the same memory");
    here.pool.save(&WHOLE, UNLIMITED).expect("saving");
    importer.save(&WHOLE, UNLIMITED).expect("nothing to save");
    here.pool.release_selected().expect("release");
    importer.release_selected().expect("release");
    assert_eq!(free_bytes(&here.pool, DEVICE), CAPACITY_BYTES, "no descriptor holds it");
}

#[test]
fn nothing_is_handed_over_while_a_place_made_for_a_copy_is_still_mapped() {
    let mut met = 0;
    for nth in 1..8 {
        let [away, here] = two(1);
        let wanted = away.pool.shapes_to_take(&WHOLE);
        here.pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
        let faults = here.pool.driver().faults();
        // The place stays behind a stage that fails, and the driver keeps it once more.
        for op in [DriverOp::Unmap, DriverOp::AddressFree] {
            faults.fail(op, FaultSpan::From(1), DriverCode::UNKNOWN);
        }
        here.pool.hand_over(&everything(), &wanted).expect_err("a place stays");
        faults.clear();
        faults.fail(DriverOp::Unmap, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
        let stage = here.pool.hand_over(&everything(), &wanted);
        faults.clear();
        if let Ok((moved, handed)) = stage {
            let is_view =
                |note: &&String| note.contains("stays mapped") && note.contains("view for a copy");
            if moved.log.notes.iter().any(|note| is_view(&note)) {
                assert_eq!(handed.len(), 0, "{nth}: {:?}", moved.log.notes);
                met += 1;
            }
        }
        here.pool.release_rest().expect("the rest");
        resume(&here.pool);
        here.assert_whole(&format!("{nth}"));
    }
    assert!(met > 0, "no place stayed");
}

#[test]
fn shared_memory_stays_its_owners() {
    let node = node();
    let [owner, importer] = [pool(&node), pool(&node)];
    let rights = [AccessDesc::read_write(DEVICE)];
    let shared = create(&owner, DEVICE, 2, kept());
    map(&owner, shared, 2 * UNIT, &rights);
    let imported = share(&owner, shared, &importer, 1);
    map(&importer, imported, 2 * UNIT, &rights);
    let alone = create(&owner, DEVICE, 4, kept());
    map(&owner, alone, 4 * UNIT, &rights);
    let shapes = owner.shapes_to_give(&WHOLE);
    assert_eq!(
        shapes.iter().map(|(shape, n)| (shape.size_bytes / UNIT, *n)).collect::<Vec<_>>(),
        [(4, 1)]
    );
    assert_eq!(count(&importer.shapes_to_give(&WHOLE)), 0);
}

/// A swap in which a call of one side may fail: whatever becomes of it, both have all of their bytes and nothing of the
/// other's, and no memory is lost.
fn swap_with_fault(away: &Tenant, here: &Tenant, side: usize, fault: (DriverOp, u64)) {
    let when = format!("{fault:?} of {side}");
    let failing = [&here.pool, &away.pool][side].driver().faults();
    let wanted = away.pool.shapes_to_take(&WHOLE);
    here.pool.reserve(&WHOLE, UNLIMITED).expect("host memory");
    let (op, nth) = fault;
    failing.fail(op, FaultSpan::Nth(nth), DriverCode::UNKNOWN);
    let stage = here.pool.hand_over(&everything(), &wanted);
    let handed = stage.map(|(_, handed)| handed).unwrap_or_default();
    let came = away.pool.take_over(&ByDevice::new(), handed, &Shapes::new());
    failing.clear();
    here.pool.release_rest().unwrap_or_else(|error| panic!("{when}: the rest: {error}"));
    if came.is_ok() {
        away.pool.restore_rest(usize::MAX).unwrap_or_else(|error| panic!("{when}: {error}"));
        drop(away.pool.commit_resume());
        away.assert_scratch_is_clear(&when);
    } else {
        away.pool.undo_resume().unwrap_or_else(|error| panic!("{when}: undo: {error}"));
        resume(&away.pool);
    }
    away.assert_whole(&when);
    // What the driver would not take back is offered again meanwhile.
    away.pause();
    resume(&here.pool);
    here.assert_whole(&when);
    assert_eq!(free_bytes(&away.pool, DEVICE), CAPACITY_BYTES - all_bytes(1), "{when}");
}

#[test]
fn any_call_of_a_hand_over_may_fail_and_nothing_is_lost_or_seen() {
    let [away, here] = two(1);
    let mut met = 0;
    for side in 0..2 {
        let faults = [&here.pool, &away.pool][side].driver().faults();
        // Only what is called at all.
        let calls = || DriverOp::ALL.iter().map(|op| faults.calls(*op)).collect::<Vec<_>>();
        let before = calls();
        swap_with_fault(&away, &here, side, (DriverOp::Init, u64::MAX));
        let called = calls().into_iter().zip(before).map(|(after, before)| after > before);
        let called: Vec<_> = DriverOp::ALL.iter().zip(called).filter(|(_, is)| *is).collect();
        for (&op, _) in called {
            let mut fired = faults.fired();
            for nth in 1.. {
                swap_with_fault(&away, &here, side, (op, nth));
                if std::mem::replace(&mut fired, faults.fired()) == faults.fired() {
                    break;
                }
                met += 1;
            }
        }
    }
    assert!(met >= 30, "only {met} calls were met");
}
