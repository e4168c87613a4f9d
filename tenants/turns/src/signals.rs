//! Waits that end when a signal asks the program to stop.
//!
//! A signal handler of the program may only set a flag, as Python's do. The program acts on the flag when our call has returned.
//! So a call that waits for memory returns when such a signal has arrived.

use std::cell::Cell;
use std::fs;
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
    /// The signals that [`HeldBack`] keeps from this thread.
    static HELD: Cell<Option<SigSet>> = const { Cell::new(None) };
}

/// Blocks signals on the program's main thread between waits: those that ask it to stop, and that a handler of the program
/// handles. So none arrives unseen between two waits.
pub(crate) struct HeldBack;

impl HeldBack {
    /// Begins a wait, and forgets the signal that ended the one before.
    pub(crate) fn begin() -> Self {
        HAS_COME.set(false);
        if is_main() {
            let (before, handled) = (mask(), handled());
            let is_handled = |signal: Signal| handled >> (signal as i32 - 1) & 1 == 1;
            let stops = STOPS.into_iter();
            let held = stops.filter(|signal| !before.contains(*signal) && is_handled(*signal));
            hold(held.collect());
        }
        Self
    }
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        let_go();
    }
}

/// Runs a function that may take as long as a call of the program's own. Signals arrive as usual meanwhile.
pub(crate) fn let_in<T>(deed: impl FnOnce() -> T) -> T {
    let held = HELD.get();
    let_go();
    let done = deed();
    if let Some(held) = held {
        hold(held);
    }
    done
}

fn hold(held: SigSet) {
    HELD.set(held.thread_block().is_ok().then_some(held));
}

/// Lets signals that have arrived meanwhile be handled, and notes them.
fn let_go() {
    if HELD.get().is_some() {
        wait(&mut [], Duration::ZERO);
        HELD.take().map(|held| held.thread_unblock());
    }
}

/// Waits until one of `fds` is ready, for `most` at most, and returns whether one is. On the program's main thread, it also ends
/// when a handler of the program has run for a signal that asks it to stop. All other signals are blocked meanwhile, so that the
/// end of a worker is not mistaken for one.
pub(crate) fn wait(fds: &mut [PollFd<'_>], most: Duration) -> bool {
    let is_main = is_main();
    let mask = is_main.then(|| {
        let (before, held) = (mask(), HELD.get().unwrap_or_else(SigSet::empty));
        let mut mask = SigSet::all();
        for signal in STOPS {
            if !before.contains(signal) || held.contains(signal) {
                mask.remove(signal);
            }
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

/// Has such a signal ended a wait of this thread since [`HeldBack::begin`]?
pub(crate) fn has_come() -> bool {
    HAS_COME.get()
}

/// Is this the program's main thread? Each thread of our own tests counts as one.
fn is_main() -> bool {
    cfg!(test) || gettid() == getpid()
}

fn mask() -> SigSet {
    SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty())
}

/// Returns the signals that handlers of the program handle, as bits; 0 if they are not known. Other signals, which may end the
/// program, are never blocked.
fn handled() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, raise, sigaction};

    use super::*;

    extern "C" fn handle(_: i32) {}

    #[expect(unsafe_code, reason = "a handler as a program has one")]
    #[test]
    fn a_signal_that_comes_between_two_waits_ends_the_next() {
        let handler = SigHandler::Handler(handle);
        let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler does nothing.
        unsafe { sigaction(Signal::SIGHUP, &action) }.unwrap();

        let held = HeldBack::begin();
        assert!(!wait(&mut [], Duration::ZERO) && !has_come());
        raise(Signal::SIGHUP).unwrap();
        assert!(!has_come());
        // Longer than a test may take.
        assert!(!wait(&mut [], Duration::from_hours(1)) && has_come());

        // A new wait knows nothing of it; one that comes before a call of the program's own is seen too.
        drop(held);
        let held = HeldBack::begin();
        assert!(!has_come());
        raise(Signal::SIGHUP).unwrap();
        assert!(let_in(has_come));
        assert!(!mask().contains(Signal::SIGINT), "nobody takes it");
        assert!(mask().contains(Signal::SIGHUP));
        drop(held);
        assert!(!mask().contains(Signal::SIGHUP));
    }
}
