//! For tests: does work on more take as much longer, or the square of that?

mod idle;

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

pub(crate) use idle::IdleDriver;

const FEW: usize = 5_000;
const MANY: usize = 20_000;
/// 4 is linear, 16 quadratic; a busy machine is somewhere in between.
const RATIO_MAX: u32 = 9;

/// Fails when what `prepare` makes for four times as many takes some sixteen times as long. Time is the calling
/// thread's own, and the least of several runs, so that other work on the machine counts little.
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
    // Below that, the clock says little.
    let few = few.max(Duration::from_micros(100));
    assert!(many < few * RATIO_MAX, "{FEW} take {few:?}, {MANY} take {many:?}");
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}
