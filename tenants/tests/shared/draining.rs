//! Pauses that wait for devices.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use tenants::coordinator::Options;
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};
use vmm_pool::driver::sim::Work;
use vmm_pool::driver::{Driver as _, DriverOp};

use crate::stage::{DEVICE, Stage, TIMEOUT, holds, options, written};

/// What one kernel takes.
const KERNEL: Duration = Duration::from_millis(1);
const KERNELS: usize = 2000;

#[test]
fn a_long_queue_is_drained_or_refused_with_what_waits_longer() {
    let stage = Stage::new();
    let process = stage.join();
    let (_, range) = written(&process, 2, "", 7);
    let driver = process.pool().driver();
    driver.make_current(DEVICE).expect("current");
    let stream = driver.stream_create().expect("a stream");
    let (go, goes) = mpsc::channel::<()>();
    let goes = Mutex::new(goes);
    let held = Work::new(move |_| {
        let _gone = goes.lock().map(|goes| goes.recv());
        Ok(())
    });
    driver.core().enqueue(stream, held).expect("queued");
    let done = Arc::new(AtomicUsize::new(0));
    for _ in 0..KERNELS {
        let done = Arc::clone(&done);
        let kernel = Work::new(move |_| {
            std::thread::park_timeout(KERNEL);
            done.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        driver.core().enqueue(stream, kernel).expect("queued");
    }
    let short = Options { timeout: Some(Duration::from_secs(2)), ..options(Scope::Whole) };
    let begin = Instant::now();
    let refused = stage.act_with(Action::Pause, short, &mut |_| {});
    let took_s = begin.elapsed().as_secs();
    let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
    for words in ["GPU 0 has work left", "s were too short", "sublet pause train --timeout "] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
    // Four times as long as it has waited, which is at least what it was told.
    let (_, longer) = refused.split_once("--timeout ").expect("looked at above");
    let longer = longer.split_once('s').and_then(|(seconds, _)| seconds.parse::<u64>().ok());
    assert!(longer.is_some_and(|seconds| (8..4 * (took_s + 1)).contains(&seconds)), "{refused}");
    assert_eq!(process.lifecycle().state(), MemberState::Active);
    drop(go);
    stage.pause();
    assert_eq!(done.load(Ordering::SeqCst), KERNELS, "all that was queued is over");
    stage.resume();
    assert_eq!(holds(&process, range, 7), Ok(true));
}

#[test]
fn a_wait_for_a_device_that_panics_refuses_the_pause_and_the_next_one_has_another_thread() {
    let stage = Stage::new();
    let process = stage.join();
    let (_, range) = written(&process, 2, "", 7);
    process.pool().driver().faults().panic_at(DriverOp::ContextSynchronize);
    let begin = Instant::now();
    let refused = stage.act(Action::Pause, Scope::Whole).err().map(|error| error.to_string());
    assert!(begin.elapsed() < TIMEOUT / 2, "it took {:?}", begin.elapsed());
    assert!(refused.as_ref().is_some_and(|text| text.contains("work on GPU 0")), "{refused:?}");
    assert_eq!(process.lifecycle().state(), MemberState::Active);
    assert_eq!(holds(&process, range, 7), Ok(true));
    stage.pause();
    stage.resume();
    assert_eq!(holds(&process, range, 7), Ok(true));
}
