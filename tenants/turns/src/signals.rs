//! Waits that end when the program has been asked to stop.
//!
//! A handler of the program's may do no more than set a flag, as Python's do, and runs its deed when our call has come back. So a call that waits
//! for memory comes back when a signal has come that asks the program to stop.

use std::cell::Cell;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, ppoll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::time::TimeSpec;
use nix::unistd::{getpid, gettid};

/// The signals that ask a program to stop.
const STOPS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

thread_local! {
    static HAS_COME: Cell<bool> = const { Cell::new(false) };
}

/// Waits until one of `fds` is ready, for `most` at most, and says whether one is. On the program's main thread it also ends when a handler of the
/// program's has run for a signal that asks it to stop. All other signals have to wait meanwhile, so that a worker's end does not pass for one.
pub(crate) fn wait(fds: &mut [PollFd<'_>], most: Duration) -> bool {
    let is_main = gettid() == getpid();
    let mask = is_main.then(|| {
        let before = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
        let mut mask = SigSet::all();
        for signal in STOPS.into_iter().filter(|signal| !before.contains(*signal)) {
            mask.remove(signal);
        }
        mask
    });
    match ppoll(fds, Some(TimeSpec::from_duration(most)), mask) {
        Ok(ready) => ready > 0,
        Err(error) => {
            if is_main && error == Errno::EINTR {
                HAS_COME.set(true);
            }
            false
        }
    }
}

/// Has a wait of this thread been ended so, since [`forget`]?
pub(crate) fn has_come() -> bool {
    HAS_COME.get()
}

/// A wait begins: what ended the one before is over.
pub(crate) fn forget() {
    HAS_COME.set(false);
}
