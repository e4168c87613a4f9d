//! For tests: checks that the time of work grows linearly with its amount, and not quadratically.

mod idle;

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

pub(crate) use idle::IdleDriver;

const FEW: usize = 5_000;
const MANY: usize = 20_000;
/// The largest ratio of times. Linear work has 4, quadratic work 16; a busy machine is somewhere in between.
const RATIO_MAX: u32 = 9;

/// Fails if the work of `prepare` takes some sixteen times as long for four times as many items. Counts the calling
/// thread's own time, and the shortest of several runs, so that other work on the machine counts little.
pub(crate) fn assert_not_quadratic<F: FnMut()>(prepare: impl Fn(usize) -> F) {
    let [few, many] = [FEW, MANY].map(|count| {
        let mut work = prepare(count);
        let runs = (0..5).map(|_| {
            let begin = thread_time();
            work();
            thread_time().saturating_sub(begin)
        });
        runs.min().unwrap_or_default()
    });
    // Below that, the clock is not precise enough.
    let few = few.max(Duration::from_micros(100));
    assert!(many < few * RATIO_MAX, "{FEW} take {few:?}, {MANY} take {many:?}");
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}
