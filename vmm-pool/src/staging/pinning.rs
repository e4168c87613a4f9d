//! Pinning behind a pause: a thread that pins chunk after chunk, in turn with other processes.
//!
//! It takes no lock of ours and is called off between two chunks, so whoever needs the arena waits for the
//! pinning of one chunk at most (4 to 10 ms for 256 MiB). It never changes contents: the chunks are its
//! arena's, which joins it before it unpins or unmaps any.

#![expect(unsafe_code, reason = "pins host memory through the driver")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use super::PinFor;
use super::chunk::HostPlace;
use crate::driver::{Driver, DriverResult};
use crate::turns::PinTurns;

#[derive(Debug, Default)]
struct Progress {
    called_off: AtomicBool,
    /// How many are pinned, from the first on.
    pinned: AtomicUsize,
}

/// A thread that pins.
#[derive(Debug)]
pub(super) struct Pinner {
    /// Which chunks of the arena, in order.
    indices: Vec<usize>,
    progress: Arc<Progress>,
    thread: JoinHandle<()>,
}

impl Pinner {
    /// Pins `chunks`, each of `length` bytes, one after the other.
    ///
    /// # Safety
    /// The chunks stay mapped, and nobody else pins or unpins them, until [`Pinner::end`].
    ///
    /// # Errors
    /// When no thread can be had.
    pub(super) unsafe fn start<D: Driver>(
        driver: Arc<D>,
        turns: Arc<PinTurns>,
        pin_for: PinFor,
        length: usize,
        chunks: Vec<(usize, HostPlace)>,
    ) -> io::Result<Self> {
        let progress = Arc::new(Progress::default());
        let (indices, places): (Vec<_>, Vec<_>) = chunks.into_iter().unzip();
        let its_progress = Arc::clone(&progress);
        let thread =
            std::thread::Builder::new().name("sublet-pin".to_owned()).spawn(move || {
                let begin = Instant::now();
                // SAFETY: the caller's promise.
                let outcome =
                    unsafe { pin_all(&*driver, &turns, pin_for, length, &places, &its_progress) };
                let elapsed_us = begin.elapsed().as_micros();
                let pinned = its_progress.pinned.load(Ordering::Acquire);
                tracing::debug!(
                    pinned,
                    of = places.len(),
                    elapsed_us,
                    ?outcome,
                    "pinned behind a pause"
                );
            })?;
        Ok(Self { indices, progress, thread })
    }

    /// How many chunks it has pinned so far.
    pub(super) fn pinned(&self) -> usize {
        self.progress.pinned.load(Ordering::Acquire)
    }

    /// Has it pinned all, or given up?
    pub(super) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Lets it pin one chunk more at most.
    pub(super) fn call_off(&self) {
        self.progress.called_off.store(true, Ordering::Release);
    }

    /// Waits for its end; returns which chunks are pinned.
    pub(super) fn end(self) -> Vec<usize> {
        let Self { mut indices, progress, thread } = self;
        if thread.join().is_err() {
            tracing::error!("the thread that pins host memory panicked");
        }
        indices.truncate(progress.pinned.load(Ordering::Acquire));
        indices
    }
}

/// # Safety
/// As [`Pinner::start`].
unsafe fn pin_all<D: Driver>(
    driver: &D,
    turns: &PinTurns,
    pin_for: PinFor,
    length: usize,
    places: &[HostPlace],
    progress: &Progress,
) -> DriverResult<()> {
    driver.make_current(pin_for.device)?;
    for place in places {
        let _turn = turns.take_unless(&progress.called_off);
        if progress.called_off.load(Ordering::Acquire) {
            break;
        }
        // SAFETY: the chunk stays mapped until the arena has joined this thread and unpinned it.
        unsafe { driver.host_register(place.0, length, pin_for.contexts) }?;
        progress.pinned.fetch_add(1, Ordering::Release);
    }
    Ok(())
}
