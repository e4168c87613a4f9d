//! Streams: one worker thread each, which does the submitted work later and in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::SimContext;
use super::core::Core;
use crate::driver::{DriverCode, RawStream};

/// A piece of work of a stream. It may run any number of times: a graph replays it.
pub type Work = Arc<dyn Fn(&Core) -> Result<(), DriverCode> + Send + Sync>;

/// How a stream relates to the default stream of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// The default stream itself: waits for all blocking streams, and they for it.
    Default,
    /// Ordered against the default stream.
    Blocking,
    /// Independent of the default stream.
    NonBlocking,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    /// No more work comes; the worker ends when the queue is empty.
    ending: bool,
    /// The driver is going away: queued work is dropped and nobody waits any more.
    aborted: bool,
}

pub(super) struct Stream {
    pub(super) id: RawStream,
    pub(super) context: SimContext,
    pub(super) kind: StreamKind,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.id)
            .field("context", &self.context)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Makes a stream and starts its worker.
    pub(super) fn start(
        core: &Arc<Core>,
        id: RawStream,
        context: SimContext,
        kind: StreamKind,
    ) -> std::io::Result<(Arc<Self>, JoinHandle<()>)> {
        let stream =
            Arc::new(Self { id, context, kind, queue: Mutex::default(), changed: Condvar::new() });
        let (worker, core) = (stream.clone(), core.clone());
        let thread = thread::Builder::new()
            .name(format!("sim-stream-{:x}", id.0))
            .spawn(move || worker.run(&core))?;
        Ok((stream, thread))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, core: &Core) {
        while let Some(work) = self.next() {
            // Nothing runs on a device whose earlier work failed.
            if core.device_failure(self.context.device).is_ok() {
                let done = catch_unwind(AssertUnwindSafe(|| work(core)))
                    .unwrap_or(Err(DriverCode::LAUNCH_FAILED));
                if let Err(code) = done {
                    core.fail_device(self.context.device, code);
                }
            }
            // What the work holds goes before anybody is told that it is done.
            drop(work);
            self.lock().completed += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if queue.aborted {
                return None;
            }
            if let Some(work) = queue.work.pop_front() {
                return Some(work);
            }
            if queue.ending {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Adds work and returns the point that the stream reaches when it is done.
    pub(super) fn submit(&self, work: Work) -> u64 {
        let mut queue = self.lock();
        queue.work.push_back(work);
        queue.submitted += 1;
        let point = queue.submitted;
        drop(queue);
        self.changed.notify_all();
        point
    }

    /// The point that the stream reaches when all work submitted so far is done; `None` when it is.
    pub(super) fn pending(&self) -> Option<u64> {
        let queue = self.lock();
        (queue.completed < queue.submitted).then_some(queue.submitted)
    }

    pub(super) fn wait_until(&self, point: u64) {
        let mut queue = self.lock();
        while queue.completed < point && !queue.aborted {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn end(&self) {
        self.lock().ending = true;
        self.changed.notify_all();
    }

    pub(super) fn abort(&self) {
        let mut queue = self.lock();
        queue.aborted = true;
        let dropped = std::mem::take(&mut queue.work);
        drop(queue);
        self.changed.notify_all();
        drop(dropped);
    }
}
