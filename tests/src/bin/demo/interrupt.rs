//! Ctrl-C: ends the processes that were started, by their ids; the rest follows from that.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use sublet_tests::{Job, Outcome, Trouble};

/// Whether the user has had enough, and what must end then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    came: AtomicBool,
    pids: Mutex<Vec<Pid>>,
}

impl Interrupt {
    /// Takes the signals of Ctrl-C and of a plain `kill` from now on. Call it before there are threads.
    pub(crate) fn watch() -> Outcome<Self> {
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        signals.thread_block()?;
        let interrupt = Self::default();
        let shared = Arc::clone(&interrupt.shared);
        thread::spawn(move || {
            while signals.wait().is_ok() {
                shared.came.store(true, Ordering::SeqCst);
                for pid in shared.pids.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    // It may have ended by itself; its parent, we, has not waited for it, so the id is its.
                    kill(*pid, Signal::SIGKILL).ok();
                }
            }
        });
        Ok(interrupt)
    }

    /// Has these processes end with us.
    pub(crate) fn cover(&self, job: &Job) -> Outcome {
        let pids = job.ranks.iter().filter_map(|rank| i32::try_from(rank.pid()).ok());
        let pids = pids.map(Pid::from_raw);
        self.shared.pids.lock().unwrap_or_else(PoisonError::into_inner).extend(pids);
        self.check()
    }

    /// These processes are about to end by themselves.
    pub(crate) fn uncover_all(&self) {
        self.shared.pids.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// # Errors
    /// When the user has had enough.
    pub(crate) fn check(&self) -> Outcome {
        if self.came() {
            return Err(Trouble::new("interrupted"));
        }
        Ok(())
    }

    pub(crate) fn came(&self) -> bool {
        self.shared.came.load(Ordering::SeqCst)
    }
}
