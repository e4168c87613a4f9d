use vmm_pool::driver::{Fingerprint, RawEvent};

use super::*;
use crate::prints::Prints;

/// The handle of a row, in generation 1.
fn row(index: usize) -> VirtualHandle {
    VirtualHandle::from_raw(0x5b1e << 48 | 1 << 24 | index as u64).expect("it bears the mark")
}

fn mark() -> Arc<Mark> {
    Arc::new(Mark::new(RawEvent(1), &Arc::default()))
}

const CHUNK: u64 = 4096;

/// A window with nothing in it.
fn empty(chunks: u64) -> (WindowChunks, Spans) {
    (WindowChunks::new(2), Spans::new(chunks * CHUNK, CHUNK))
}

fn window(chunks: u64, frames: usize) -> (WindowChunks, Spans) {
    let (_, mut spans) = empty(16);
    let mut table = WindowChunks::new(frames);
    table.alloc(&mut spans, chunks * CHUNK).expect("room");
    (table, spans)
}

fn table(chunks: u64, frames: usize) -> WindowChunks {
    window(chunks, frames).0
}

/// Frees a span. Returns its chunks that are away, with their rows.
fn free(
    table: &mut WindowChunks,
    spans: &mut Spans,
    start: u64,
) -> Option<Vec<(usize, VirtualHandle)>> {
    table.free(spans.remove(start)?);
    Some(table.take_freed())
}

fn bring(table: &mut WindowChunks, id: usize) {
    table.change(id, ChunkEvent::Framed);
    table.came(id);
}

fn take(table: &mut WindowChunks, id: usize) {
    table.change(id, ChunkEvent::Claimed);
    table.change(id, ChunkEvent::Left);
}

#[test]
fn what_was_written_since_its_copy_began_is_not_clean() {
    let mut table = table(1, 1);
    bring(&mut table, 0);
    table.hold(&[0]);
    let first = mark();
    table.used(&[0], Some(&first));
    table.are_over(&[first]);
    assert!(table.chunks[0].is_idle() && !table.chunks[0].is_clean());
    let out = mark();
    table.change(0, ChunkEvent::Claimed);
    table.copying_out(0, Some(Arc::clone(&out)), None);
    let second = mark();
    table.hold(&[0]);
    table.used(&[0], Some(&second));
    table.are_over(&[out, second]);
    assert!(table.chunks[0].is_idle() && !table.chunks[0].is_clean());
    let out = mark();
    table.change(0, ChunkEvent::Claimed);
    table.copying_out(0, Some(Arc::clone(&out)), None);
    assert!(!table.chunks[0].is_idle(), "a copy is under way");
    table.are_over(&[out]);
    assert!(table.chunks[0].is_idle() && table.chunks[0].is_clean());
}

#[test]
fn a_use_on_one_stream_is_not_over_because_a_later_one_on_another_is() {
    let mut table = table(1, 1);
    bring(&mut table, 0);
    let (earlier, later) = (mark(), mark());
    table.hold(&[0]);
    table.used(&[0], Some(&earlier));
    table.hold(&[0]);
    table.used(&[0], Some(&later));
    table.are_over(&[later]);
    assert!(!table.chunks[0].is_idle());
    table.are_over(&[earlier]);
    assert!(table.chunks[0].is_idle());
}

#[test]
fn what_was_announced_gives_its_frame_only_to_somebody_who_waits() {
    let mut table = table(3, 2);
    bring(&mut table, 0);
    bring(&mut table, 1);
    table.announce(&[0, 1, 2]);
    assert!(table.victims(2).is_empty());
    table.hold(&[2]);
    assert_eq!(table.victims(2), [0, 1]);
}

#[test]
fn addresses_of_a_span_are_given_out_again_when_all_of_it_is_away() {
    let (mut table, mut spans) = window(2, 2);
    for id in 0..2 {
        table.entered(id, row(id));
    }
    bring(&mut table, 1);
    assert_eq!(free(&mut table, &mut spans, 0), Some(vec![(0, row(0))]));
    assert_eq!(free(&mut table, &mut spans, 0), None);
    table.gone(0);
    assert_eq!(table.alloc(&mut spans, 2 * CHUNK), Some((2 * CHUNK, vec![2, 3])));
    take(&mut table, 1);
    assert_eq!(table.take_freed(), [(1, row(1))]);
    assert_eq!(
        table.alloc(&mut spans, CHUNK + 1),
        Some((4 * CHUNK, vec![4, 5])),
        "its row is there"
    );
    table.gone(1);
    assert_eq!(table.alloc(&mut spans, 2 * CHUNK), Some((0, vec![0, 1])));
}

#[test]
fn spans_lie_side_by_side_whatever_their_sizes_are() {
    let (mut table, mut spans) = empty(16);
    let size_bytes = 3 * CHUNK / 4;
    for index in 0..20 {
        let (start, bare) = table.alloc(&mut spans, size_bytes - 1).expect("room");
        assert_eq!(start, index * size_bytes, "rounded up");
        for id in bare {
            table.entered(id, row(id));
        }
    }
    assert_eq!(
        table.chunks.iter().filter(|chunk| chunk.is_owned()).count(),
        15,
        "three quarters of twenty"
    );
    assert!(table.alloc(&mut spans, CHUNK + 1).is_none());
    assert_eq!(table.alloc(&mut spans, CHUNK), Some((15 * CHUNK, vec![15])));
    assert_eq!(
        (spans.chunks_of(size_bytes), spans.chunks_of(size_bytes + 512)),
        (Some(0..2), None)
    );
}

#[test]
fn a_chunk_of_two_spans_is_in_use_as_long_as_one_of_them_is() {
    let (mut table, mut spans) = empty(16);
    for _ in 0..2 {
        let (_, bare) = table.alloc(&mut spans, CHUNK / 2).expect("room");
        for id in bare {
            table.entered(id, row(id));
        }
    }
    bring(&mut table, 0);
    // One call holds the chunk for two spans, and each hold ends separately.
    table.hold(&[0, 0]);
    let (one, other) = (mark(), mark());
    table.used(&[0], Some(&one));
    table.are_over(&[one]);
    assert!(!table.chunks[0].is_idle() && table.claim(0).is_none(), "the other is held");
    table.used(&[0], Some(&other));
    assert_eq!(free(&mut table, &mut spans, 0), Some(Vec::new()));
    assert!(!table.chunks[0].is_freed() && !table.chunks[0].is_clean());
    table.are_over(&[other]);
    assert!(table.chunks[0].is_idle());
    assert_eq!(table.alloc(&mut spans, CHUNK / 2), Some((0, Vec::new())), "what was freed of it");
    free(&mut table, &mut spans, 0);
    free(&mut table, &mut spans, CHUNK / 2);
    assert!(table.chunks[0].is_freed() && table.chunks[0].is_clean());
}

#[test]
fn what_may_have_been_written_is_clean_if_it_is_as_it_was() {
    let one = |seed: u8| -> Prints { [Fingerprint::of(&[seed; 16])].into() };
    let mut table = table(1, 1);
    bring(&mut table, 0);
    let used = |table: &mut WindowChunks| {
        let over = mark();
        table.hold(&[0]);
        table.used(&[0], Some(&over));
        table.are_over(&[over]);
    };
    let end = |table: &mut WindowChunks, out: Arc<Mark>, prints: Prints| {
        table.are_over(&[out]);
        for answered in table.take_answered() {
            table.told(&answered, Arc::clone(&prints));
        }
    };
    used(&mut table);
    assert!(!table.is_to_compare(0), "it has no copy");
    let out = mark();
    let asked = Asked { question: 2, mark: mark() };
    let answer = Arc::clone(&asked.mark);
    table.change(0, ChunkEvent::Claimed);
    table.copying_out(0, Some(Arc::clone(&out)), Some(asked));
    assert_eq!(table.free_question(3), Some(0));
    end(&mut table, out, one(1));
    assert!(!table.chunks[0].is_idle() && !table.chunks[0].is_clean(), "the question is under way");
    end(&mut table, answer, one(1));
    assert!(table.chunks[0].is_idle() && table.chunks[0].is_clean());
    for (prints, is_clean) in [(one(1), true), (one(2), false)] {
        (0..2).for_each(|_| used(&mut table));
        assert!(!table.chunks[0].is_clean() && table.is_to_compare(0));
        let asked = mark();
        table.change(0, ChunkEvent::Claimed);
        table.asking(0, Asked { question: 0, mark: Arc::clone(&asked) });
        assert_eq!(table.copies_out(), 0);
        assert!(!table.chunks[0].is_idle(), "a question is under way");
        end(&mut table, asked, prints);
        assert_eq!(table.chunks[0].is_clean(), is_clean);
    }
    used(&mut table);
    assert!(!table.is_to_compare(0), "it was written");
}

#[test]
fn only_the_later_half_of_what_is_here_is_used_late() {
    let mut table = table(5, 5);
    (0..4).for_each(|id| bring(&mut table, id));
    table.demand.foretell(vec![3, 10, 1, 7, 2]);
    let later_half = table.later_half(|_| 0);
    let late: Vec<_> = (0..4).filter(|&id| table.is_used_late(id, later_half)).collect();
    assert_eq!(late, [1, 3]);
    // A chunk that more than lists hold does not leave for a newcomer.
    table.hold(&[1]);
    assert_eq!(table.later_half(|id| u32::from(id == 1)), later_half);
    let later_half = table.later_half(|_| 0);
    let late: Vec<_> =
        [0, 2, 3].into_iter().filter(|&id| table.is_used_late(id, later_half)).collect();
    assert_eq!(late, [0, 3]);
    table.demand.foretell(Vec::new());
    assert!(table.is_used_late(2, table.later_half(|_| 0)), "nothing is foretold");
}

#[test]
fn with_frames_for_all_nothing_is_copied_out_ahead() {
    let mut table = table(2, 2);
    for id in 0..2 {
        table.entered(id, row(id));
        bring(&mut table, id);
        table.hold(&[id]);
        let written = mark();
        table.used(&[id], Some(&written));
        table.are_over(&[written]);
    }
    table.demand.foretell(vec![2, 3]);
    assert_eq!(table.to_clean(3), None);
    table.demand.flushing = 1;
    assert_eq!(table.to_clean(4), Some(1));
    table.demand.flushing = 0;
    table.demand.set_frames(1);
    assert_eq!(table.to_clean(3), Some(1));
    assert_eq!(table.to_clean(4), None, "it is used soon");
}

#[test]
fn what_was_used_since_it_was_found_ready_does_not_give_its_frame() {
    let mut table = table(1, 1);
    bring(&mut table, 0);
    table.entered(0, row(0));
    assert!(table.is_ready(0), "it is zero");
    table.hold(&[0]);
    // The thread waits for a call in another context: it has no event.
    table.used(&[0], None);
    assert!(table.chunks[0].is_idle());
    assert_eq!(table.claim_ready(0), None);
    assert!(table.claim(0).is_some(), "it may be copied out");
}

#[test]
fn what_stays_takes_a_frame_from_what_is_used_together() {
    let mut table = table(3, 2);
    bring(&mut table, 0);
    assert!(table.fits(&[1, 2]));
    table.set_stays(0, true);
    assert!(!table.fits(&[1, 2]) && table.fits(&[0, 1]));
    take(&mut table, 0);
    assert!(table.fits(&[1, 2]), "it has no frame");
}

#[test]
fn what_was_refused_is_tried_again_behind_its_next_use() {
    let mut table = table(1, 1);
    table.entered(0, row(0));
    bring(&mut table, 0);
    table.demand.flushing = 1;
    for _ in 0..2 {
        table.hold(&[0]);
        table.used(&[0], None);
        assert_eq!(table.to_clean(0), Some(0));
        table.refused(0);
        assert_eq!(table.to_clean(0), None);
    }
}

#[test]
fn what_is_here_is_held_only_if_all_that_is_held_fits_the_frames() {
    let mut table = table(2, 2);
    (0..2).for_each(|id| bring(&mut table, id));
    assert!(table.hold_if_here(&[0]));
    // The other chunk is about to leave.
    table.demand.set_frames(1);
    assert!(!table.hold_if_here(&[1]) && table.hold_if_here(&[0]));
    assert_eq!(table.chunks.iter().filter(|chunk| chunk.is_held()).count(), 1);
}

#[test]
fn what_graphs_let_go_is_held_by_lists_of_their_launches() {
    let (mut table, mut spans) = window(1, 1);
    table.entered(0, row(0));
    bring(&mut table, 0);
    table.hold(&[0]);
    free(&mut table, &mut spans, 0);
    // One thread is about to end a list.
    table.graphs_let_go(&[0], 1);
    assert!(!table.chunks[0].is_idle() && table.claim(0).is_none());
    let launched = mark();
    table.used(&[0], Some(&launched));
    assert!(!table.chunks[0].is_idle(), "the launch is not over");
    table.are_over(&[launched]);
    assert!(table.claim(0).is_some());
}

#[test]
fn addresses_are_the_first_that_fit_and_what_lies_before_all_gaps_is_not_looked_at() {
    let (mut table, mut spans) = empty(64);
    let mut given_out: Vec<(u64, u64)> = Vec::new();
    // The chunks that leave later.
    let mut freed: Vec<usize> = Vec::new();
    let (mut end, mut in_gaps) = (0, 0);
    for turn in 0..2000_u64 {
        let number = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        if number.is_multiple_of(3) && !given_out.is_empty() {
            let (start, _) = given_out.remove(number as usize / 3 % given_out.len());
            let before = table.chunks.iter().map(Chunk::is_freed).collect::<Vec<_>>();
            free(&mut table, &mut spans, start).expect("it was given out");
            let now = table.chunks.iter().enumerate().filter(|(_, chunk)| chunk.is_freed());
            freed.extend(now.map(|(id, _)| id).filter(|&id| !before[id]));
        } else if number.is_multiple_of(4) && !freed.is_empty() {
            table.gone(freed.remove(number as usize / 4 % freed.len()));
        } else {
            let size_bytes = 512 * (1 + number % 20);
            let of_freed = freed.iter().map(|id| (*id as u64 * CHUNK, CHUNK));
            let mut taken: Vec<_> = given_out.iter().copied().chain(of_freed).collect();
            taken.sort_unstable();
            let first = taken.iter().fold((0, false), |(at, found), (start, size)| match found {
                true => (at, true),
                false if start - at >= size_bytes => (at, true),
                false => (start + size, false),
            });
            let fits = first.0 + size_bytes <= 64 * CHUNK;
            let given = table.alloc(&mut spans, size_bytes).map(|(start, _)| start);
            assert_eq!(given, fits.then_some(first.0), "turn {turn}");
            given_out.extend(given.map(|start| (start, size_bytes)));
            in_gaps += u32::from(first.0 < end);
            end = end.max(first.0 + size_bytes);
        }
    }
    assert!(in_gaps > 100, "{in_gaps}");
    let (mut table, mut spans) = empty(64);
    for index in 1..=100 {
        table.alloc(&mut spans, CHUNK / 2).expect("room");
        assert_eq!(spans.full_bytes, index * CHUNK / 2);
    }
}
