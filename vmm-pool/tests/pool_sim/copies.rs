//! Copies of contents that are kept for readers after a resume, and host memory that a resume gives back.

use vmm_pool::driver::sim::{FaultSpan, SimNode};
use vmm_pool::driver::{AccessDesc, DriverCode, DriverOp, VaRange};
use vmm_pool::{Class, Contents, SavedError, Selection, Tags, Whose};

use crate::stage::{
    DEVICE, SimPool, UNIT, UNLIMITED, create, holds, map, pattern, pause_tags, pool, resume_tags,
    write,
};

const CHUNK: u64 = 256 << 20;

fn a_pool() -> SimPool {
    pool(&SimNode::private(&[2 * CHUNK]).expect("a node"))
}

fn filled(pool: &SimPool, tag: &str, units: u64, seed: u64) -> VaRange {
    let class = Class { library: "test", tag: tag.to_owned(), contents: Contents::Keep };
    let handle = create(pool, DEVICE, units, class);
    let place = map(pool, handle, units * UNIT, &[AccessDesc::read_write(DEVICE)]);
    write(pool, DEVICE, place, pattern(seed));
    place
}

/// Where the copy is, and its first bytes.
fn copy(pool: &SimPool, range: VaRange) -> Result<(usize, [u8; 16]), SavedError> {
    let mut bytes = [0; 16];
    pool.saved_or_retained().read(range.start, &mut bytes)?;
    Ok((pool.saved_or_retained().at(range)?.addr().get(), bytes))
}

#[test]
fn a_copy_that_is_kept_is_read_after_the_resume_and_lies_where_it_was() {
    let pool = a_pool();
    let other = filled(&pool, "other", 3, 9);
    let range = filled(&pool, "weights", 2, 1);
    pool.copies().retain(true);
    assert_eq!(copy(&pool, range), Err(SavedError::Resident(range.start)));
    pause_tags(&pool, &["weights"]);
    let (place, bytes) = copy(&pool, range).expect("away");
    assert_eq!(bytes, pattern(1));
    resume_tags(&pool, &["weights"]);
    assert_eq!(copy(&pool, range), Ok((place, pattern(1))));
    assert_eq!(pool.saved().at(range), Err(SavedError::Resident(range.start)), "not the contents");

    // Nobody else's contents come there, and the next copy of the same memory does.
    write(&pool, DEVICE, range, pattern(2));
    assert_eq!(copy(&pool, range), Ok((place, pattern(1))), "as it was paused");
    pause_tags(&pool, &["other"]);
    assert_eq!(copy(&pool, range), Ok((place, pattern(1))));
    pause_tags(&pool, &["weights"]);
    assert_eq!(copy(&pool, range), Ok((place, pattern(2))));
    resume_tags(&pool, &["other"]);
    resume_tags(&pool, &["weights"]);
    assert_eq!(copy(&pool, range), Ok((place, pattern(2))));
    assert!(holds(&pool, DEVICE, range, pattern(2)) && holds(&pool, DEVICE, other, pattern(9)));
}

#[test]
fn a_copy_goes_with_the_next_resume_that_keeps_none_and_with_its_memory() {
    let pool = a_pool();
    let (kept, gone) = (filled(&pool, "kept", 2, 1), filled(&pool, "gone", 1, 2));
    pool.copies().retain(true);
    for tag in ["kept", "gone"] {
        pause_tags(&pool, &[tag]);
        resume_tags(&pool, &[tag]);
    }
    pool.copies().retain(false);
    assert!(copy(&pool, kept).is_ok(), "it counts from the next resume on");
    pause_tags(&pool, &["gone"]);
    resume_tags(&pool, &["gone"]);
    assert_eq!(copy(&pool, gone), Err(SavedError::Resident(gone.start)));
    assert!(copy(&pool, kept).is_ok(), "that resume was not about it");
    pause_tags(&pool, &["kept"]);
    resume_tags(&pool, &["kept"]);
    assert_eq!(copy(&pool, kept), Err(SavedError::Resident(kept.start)));
    assert!(holds(&pool, DEVICE, kept, pattern(1)) && holds(&pool, DEVICE, gone, pattern(2)));
}

#[test]
fn a_copy_that_a_failed_pause_may_have_written_over_is_not_given_out() {
    let pool = a_pool();
    let range = filled(&pool, "weights", 2, 1);
    pool.copies().retain(true);
    pause_tags(&pool, &["weights"]);
    resume_tags(&pool, &["weights"]);
    write(&pool, DEVICE, range, pattern(2));
    let faults = pool.driver().faults();
    faults.fail(DriverOp::CopyToHost, FaultSpan::Nth(1), DriverCode::OUT_OF_MEMORY);
    let selection = Selection::Tagged(Tags::All, Whose::Everybody);
    assert!(pool.save(&selection, UNLIMITED).is_err());
    faults.clear();
    pool.remount().expect("mapped again");
    drop(pool.commit_resume());
    assert_eq!(copy(&pool, range), Err(SavedError::Resident(range.start)));
    pause_tags(&pool, &["weights"]);
    resume_tags(&pool, &["weights"]);
    assert_eq!(copy(&pool, range).map(|(_, bytes)| bytes), Ok(pattern(2)));
    assert!(holds(&pool, DEVICE, range, pattern(2)));
}

#[test]
fn a_resume_gives_host_memory_back_that_holds_neither_contents_nor_copies() {
    let pool = a_pool();
    let (large, small) = (filled(&pool, "large", CHUNK / UNIT, 1), filled(&pool, "small", 1, 2));
    let held = || (pool.report().host_arena_bytes, pool.driver().census().host_ranges);
    pause_tags(&pool, &["small"]);
    pause_tags(&pool, &["large"]);
    resume_tags(&pool, &["large"]);
    assert_eq!(held(), (UNIT + CHUNK, 2), "kept for the next pause");
    pool.copies().give_back(true);
    pause_tags(&pool, &["large"]);
    resume_tags(&pool, &["large"]);
    assert_eq!(held(), (UNIT, 1), "contents lie in the first piece");
    pool.copies().retain(true);
    resume_tags(&pool, &["small"]);
    assert_eq!(held(), (UNIT, 1), "a copy does");
    pool.copies().retain(false);
    pause_tags(&pool, &["small"]);
    resume_tags(&pool, &["small"]);
    assert_eq!(held(), (0, 0));
    assert!(holds(&pool, DEVICE, large, pattern(1)) && holds(&pool, DEVICE, small, pattern(2)));
}
