//! Writes that no call shows.

use sublet_pager::UnseenWrite;

use crate::program::{Holds, LIMIT, Stage, write_unseen};
use crate::stage::UNIT;

/// Makes spans of one chunk. The last used ones are on the device, and all equal their copies.
fn stage(frames: u64, checks: bool) -> Stage {
    let mut stage = Stage::new(frames);
    if checks {
        stage.pager().check_writes();
    }
    stage.alloc_each(4);
    stage.use_all(true);
    stage.try_use(&[3], 0, false).expect("a use");
    stage.check();
    stage.pager().flush(LIMIT).expect("copied");
    stage
}

/// Uses all spans, twice, so that all pass through the frames.
fn go_around(stage: &mut Stage) {
    for _ in 0..2 {
        stage.use_all(false);
    }
    stage.check();
}

#[test]
fn a_write_that_nobody_shows_is_named_and_kept() {
    let mut stage = stage(1, true);
    go_around(&mut stage);
    stage.try_use(&[3], 0, false).expect("a use");
    stage.check();
    stage.pager().flush(LIMIT).expect("copied");
    assert_eq!(stage.pager().report().unseen, [], "as long as all is shown");
    let holds = Holds::Pattern(77);
    write_unseen(&stage, 3, holds, 0, UNIT);
    stage.spans[3][0].holds = holds;
    go_around(&mut stage);
    let unseen = stage.pager().report().unseen;
    let [found] = &unseen[..] else { panic!("{unseen:?}") };
    let start = stage.start_of(3).0;
    assert_eq!((found.chunk, found.address, found.size_bytes), (3, start, UNIT));
    assert_eq!((found.span, found.span_bytes), (start, UNIT));
    assert!(found.after_use > 0 && found.after_use <= found.before_use, "{found:?}");
    assert!(found.to_string().contains(&format!("from {start:#x} on, chunk 3")), "{found}");
    stage.end();
}

#[test]
fn the_pieces_that_were_written_are_named_also_of_what_was_zero() {
    let mut stage = Stage::new(1);
    stage.pager().check_writes();
    stage.alloc_bytes(UNIT / 2).expect("addresses");
    stage.alloc_bytes(UNIT / 2).expect("addresses");
    stage.alloc(1).expect("addresses");
    stage.try_use(&[0], 0, false).expect("a use");
    stage.check();
    stage.pager().flush(LIMIT).expect("nothing to copy");
    let range = stage.spans[1][0].range;
    write_unseen(&stage, 1, Holds::Pattern(5), UNIT / 8, 16);
    stage.try_use(&[2], 0, false).expect("the other chunk leaves");
    let unseen: Vec<UnseenWrite> = stage.pager().report().unseen;
    let [found] = &unseen[..] else { panic!("{unseen:?}") };
    assert_eq!((found.span, found.span_bytes), (range.start.0, UNIT / 2));
    assert_eq!(found.address, range.start.0 + UNIT / 8);
    assert!(found.size_bytes < UNIT / 8, "{found:?}");
    stage.end();
}

#[test]
fn without_the_check_nothing_is_looked_for() {
    let mut stage = stage(1, false);
    write_unseen(&stage, 3, Holds::Pattern(77), 0, UNIT);
    // The contents that come back are those of the copy in host memory.
    go_around(&mut stage);
    assert_eq!(stage.pager().report().unseen, []);
    stage.end();
}
