use super::*;
use crate::driver::sim::{SimDriver, SimNode, SimOptions};

#[test]
fn a_chunk_that_somebody_has_a_piece_of_is_not_given_back() {
    let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
    driver.make_current(DeviceOrdinal(0)).unwrap();
    let mut arena = HostArena::new(Arc::new(driver), 0);
    for end_bytes in [2 << 20, 4 << 20, 8 << 20] {
        arena.grow_to(&mut StepLog::default(), end_bytes, Pins::All).unwrap();
    }
    let pieces = arena.pieces_of(&(1 << 20..3 << 20));
    let parts: Vec<_> = pieces.iter().map(|piece| piece.part.clone()).collect();
    assert_eq!(parts, [0..1 << 20, 1 << 20..2 << 20]);
    arena.shrink_to(0).unwrap();
    assert_eq!(arena.held_bytes(), 4 << 20, "one behind the last piece goes");
    assert!(pieces.iter().all(|piece| piece.bytes().iter().all(|byte| *byte == 0)));
    drop(pieces);
    arena.shrink_to(0).unwrap();
    assert_eq!(arena.held_bytes(), 0);
}

#[test]
fn what_a_pause_needs_comes_in_once_and_goes_if_it_is_not_taken() {
    const END_BYTES: u64 = 3 * CHUNK_BYTES;
    let driver = SimDriver::new(SimNode::private(&[64 << 20]).unwrap(), SimOptions::default());
    driver.make_current(DeviceOrdinal(0)).unwrap();
    let driver = Arc::new(driver);
    for turn in 0..20 {
        let mut arena = HostArena::new(Arc::clone(&driver), 0);
        let bring_in = arena.begin_growth(Vec::new(), END_BYTES).expect("all of it is missing");
        sublet_sync::threads::spawn("sublet-arena", bring_in, |_| {}).unwrap();
        let taken_bytes = turn % 4 * CHUNK_BYTES;
        let pins = if turn % 2 == 0 { Pins::Nobody } else { Pins::All };
        arena.grow_to(&mut StepLog::default(), taken_bytes, pins).unwrap();
        arena.end_growth();
        assert_eq!(arena.held_bytes(), taken_bytes, "turn {turn}");
    }
}

#[test]
fn what_two_devices_use_one_after_the_other_is_pinned_for_both() {
    let driver = SimDriver::new(SimNode::private(&[64 << 20; 2]).unwrap(), SimOptions::default());
    driver.make_current(DeviceOrdinal(0)).unwrap();
    let mut arena = HostArena::new(Arc::new(driver), 0);
    let log = &mut StepLog::default();
    let [first, second] = [0, 1].map(|device| Pins::of(&[DeviceOrdinal(device)]));
    arena.grow_to(log, CHUNK_BYTES, first).unwrap();
    let pins = |arena: &HostArena<SimDriver>| {
        arena.chunks.iter().map(|placed| placed.held.pins).collect::<Vec<_>>()
    };
    assert_eq!(pins(&arena), [first]);
    arena.pin_again(log, second).unwrap();
    assert_eq!(pins(&arena), [Pins::All]);
    arena.unpin_all(log);
    arena.pin_again(log, second).unwrap();
    assert_eq!(pins(&arena), [second]);
}

#[test]
fn a_thread_that_brings_nothing_in_is_waited_for_until_a_deadline() {
    let (give, growth) = bounded(1);
    let late = brought(&growth, Duration::from_millis(1)).unwrap_err();
    assert!(
        matches!(&late, PoolError::HostMemoryRefused { source, .. } if source.kind() == io::ErrorKind::TimedOut),
        "{late}"
    );
    drop::<crossbeam_channel::Sender<Chunk>>(give);
    assert!(brought(&growth, BROUGHT_WITHIN).unwrap().is_none(), "it has ended");
}
