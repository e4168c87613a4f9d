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
