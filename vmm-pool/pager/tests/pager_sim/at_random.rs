//! Random programs that use paged memory, with calls that fail: every byte is still there afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use sublet_pager::In;
use vmm_pool::driver::DriverCode;
use vmm_pool::driver::sim::FaultSpan;

use crate::program::{LIMIT, SHORT, Stage, pause_until, word_at};
use crate::stage::{CAPACITY_BYTES, DEVICE, UNIT, UNLIMITED, WHOLE, free_bytes, pause, resume};

/// The next step of a random program.
#[derive(Clone, Debug)]
enum Step {
    Use {
        spans: Vec<usize>,
        stream: usize,
        writes: bool,
        holds: bool,
    },
    Announce(Vec<usize>),
    Frames(u64),
    /// Other memory requests this many chunks of the device.
    Room(u64),
    /// The size in quarters of a chunk, less a few bytes.
    Alloc(u64),
    Free(usize),
    Flush,
    Check,
    Pause,
    PauseUndone,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let spans = || prop::collection::vec(0usize..8, 1..3);
    let step = prop_oneof![
        12 => (spans(), 0usize..2, any::<bool>(), any::<bool>())
            .prop_map(|(spans, stream, writes, holds)| Step::Use { spans, stream, writes, holds }),
        4 => spans().prop_map(Step::Announce),
        1 => (2u64..6).prop_map(Step::Frames),
        2 => (1u64..4).prop_map(Step::Room),
        3 => (1u64..5).prop_map(Step::Alloc),
        1 => (0usize..8).prop_map(Step::Free),
        1 => Just(Step::Flush),
        2 => Just(Step::Check),
        1 => Just(Step::Pause),
        1 => Just(Step::PauseUndone),
    ];
    prop::collection::vec(step, 1..60)
}

/// Chooses spans of the program that are distinct, live, and small enough together.
fn chosen(stage: &Stage, wanted: &[usize], most: usize) -> Vec<usize> {
    let mut spans: Vec<_> = wanted.iter().map(|span| span % stage.spans.len()).collect();
    spans.sort_unstable();
    spans.dedup();
    while stage.chunks_of(&spans) > most {
        spans.pop();
    }
    spans
}

fn run(program: Vec<Step>, pauses_beside: bool, seed: Option<u64>) {
    let mut stage = Stage::in_order(3, seed);
    if seed.is_some_and(|seed| seed.is_multiple_of(2)) {
        stage.pager().check_writes();
    }
    let mut frames = 3;
    stage.alloc(1).expect("addresses");
    let pool = Arc::clone(stage.pool.pool());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if pauses_beside {
            let (pool, stop) = (Arc::clone(&pool), &stop);
            scope.spawn(move || pause_until(pool, stop));
        }
        for step in program {
            match step {
                Step::Use { spans, stream, writes, holds } => {
                    let spans = chosen(&stage, &spans, frames);
                    if spans.is_empty() {
                        continue;
                    }
                    stage.try_use(&spans, stream, writes).expect("a use");
                    if holds && !pauses_beside && seed.is_none() {
                        stage.hold(stream);
                        stage.try_hold_use(&spans, stream);
                    }
                }
                Step::Announce(spans) => {
                    let spans = chosen(&stage, &spans, frames);
                    let starts: Vec<_> = spans.iter().map(|&span| stage.start_of(span)).collect();
                    stage.pager().announce(&starts).expect("announced");
                }
                Step::Frames(count) => {
                    stage.held.clear();
                    frames = usize::try_from(count).expect("small");
                    stage.pager().set_frames(count * UNIT, LIMIT).expect("frames");
                }
                Step::Room(count) => {
                    stage.held.clear();
                    let before = stage.pager().report().resident_bytes;
                    let is_still = !pauses_beside && seed.is_none();
                    if pool.make_room(DEVICE, count * UNIT) && is_still {
                        assert!(stage.pager().report().resident_bytes < before);
                    }
                }
                Step::Alloc(quarters) => {
                    if stage.spans.len() < 8 {
                        let size_bytes = quarters * UNIT / 4 - 16 * (quarters % 3);
                        stage.alloc_bytes(size_bytes).expect("addresses");
                    }
                }
                Step::Free(span) => {
                    if stage.spans.len() > 1 {
                        let span = span % stage.spans.len();
                        stage.free(span);
                    }
                }
                Step::Flush => {
                    stage.held.clear();
                    stage.pager().flush(LIMIT).expect("flushed");
                }
                Step::Check => stage.check(),
                Step::Pause if !pauses_beside => {
                    stage.held.clear();
                    pause(&stage.pool);
                    resume(&stage.pool);
                }
                Step::PauseUndone if !pauses_beside => {
                    stage.held.clear();
                    stage.pool.save(&WHOLE, UNLIMITED).expect("saved");
                    stage.pool.remount().expect("undone");
                    drop(stage.pool.commit_resume());
                }
                Step::Pause | Step::PauseUndone => {}
            }
        }
        stop.store(true, Ordering::Release);
    });
    stage.use_all(false);
    assert_eq!(stage.pager().report().unseen, [], "all that was written was shown");
    stage.end();
}

impl Stage {
    /// Uses spans behind held work: the use is not over when the next step begins.
    fn try_hold_use(&mut self, spans: &[usize], stream: usize) {
        let words: Vec<_> = spans.iter().map(|&span| word_at(self.start_of(span), 0)).collect();
        let raw = self.streams[stream];
        // The spans were used just now. With announcements of other spans they may have left all the same.
        if let Ok(Some(touched)) = self.pager().begin_call(&words, In::Stream(raw), SHORT) {
            self.launch(spans, stream, true).expect("launched");
            self.pager().end_call(&touched);
        }
    }
}

/// A thread has one slot, at the gate of the first pool that it meets.
pub(crate) fn on_a_thread(body: impl FnOnce() + Send + 'static) {
    let ended = std::thread::spawn(body).join();
    ended.expect("what the thread says above");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_find_every_byte(program in steps()) {
        on_a_thread(move || run(program, false, None));
    }

    #[test]
    fn random_calls_find_every_byte_with_pauses_at_any_instant(program in steps()) {
        on_a_thread(move || run(program, true, None));
    }

    #[test]
    fn random_calls_find_every_byte_in_whatever_order_streams_come(
        (program, pauses, seed) in (steps(), any::<bool>(), any::<u64>())
    ) {
        on_a_thread(move || run(program, pauses, Some(seed)));
    }
}

/// Announcements only save time: if each tenth is left out, every byte is still there.
#[test]
fn each_tenth_announcement_may_be_left_out() {
    for seed in 0..4 {
        on_a_thread(move || {
            let mut stage = Stage::in_order(3, Some(seed));
            stage.alloc_each(8);
            let order: Vec<usize> = (0..8).chain((0..8).rev()).cycle().take(6 * 16 + 1).collect();
            let mut left_out = 0;
            for (number, uses) in order.windows(2).enumerate() {
                let (span, next) = (uses[0], stage.start_of(uses[1]));
                if number % 10 == 9 {
                    left_out += 1;
                } else {
                    stage.pager().announce(&[next]).expect("announced");
                }
                // Writes in every other step; both streams use each span.
                stage
                    .try_use(&[span], (span + number / 16) % 2, number / 16 % 2 == 0)
                    .expect("a use");
            }
            stage.use_all(false);
            stage.check();
            assert_eq!(left_out, 9);
            assert!(stage.pager().report().misses > 0, "{:?}", stage.pager().report());
            stage.end();
        });
    }
}

/// Every kind of call fails once, at each place where it is made. The use that meets the failure may get an error. The next use
/// works.
#[test]
fn any_call_may_fail_once() {
    let (tell, told) = std::sync::mpsc::channel();
    let mut at = 1;
    loop {
        let tell = tell.clone();
        on_a_thread(move || {
            let _told = tell.send(fail_at(at, Stage::new(2)));
        });
        if told.recv().expect("an answer") == 0 {
            break;
        }
        // There are many calls.
        at += 3;
    }
    assert!(at > 100, "{at} calls");
}

/// Makes the call of this number fail. Returns the number of calls that failed.
fn fail_at(at: u64, mut stage: Stage) -> u64 {
    stage.alloc_each(3);
    let code = if at.is_multiple_of(2) { DriverCode::UNKNOWN } else { DriverCode::OUT_OF_MEMORY };
    stage.driver().faults().fail_any(FaultSpan::Nth(at), code);
    for writes in [true, true, false] {
        for span in 0..3 {
            for attempt in 0.. {
                let outcome = stage.try_use(&[span], span % 2, writes);
                let Err(error) = outcome else { break };
                assert!(attempt < 2, "{at}: {error}");
            }
        }
    }
    let fired = stage.driver().faults().fired();
    stage.driver().faults().clear();
    stage.use_all(false);
    pause(&stage.pool);
    assert_eq!(free_bytes(&stage.pool, DEVICE), CAPACITY_BYTES, "after call {at} failed");
    resume(&stage.pool);
    stage.use_all(false);
    stage.use_all(true);
    stage.use_all(false);
    stage.end();
    fired
}
