//! Threads of ours in other people's processes.

use std::io;
use std::thread::{Builder, JoinHandle};

use nix::sys::signal::{SigSet, SigmaskHow};

/// Starts a thread called `name`, which takes no signals from its first moment on: those are the application's, and its handlers may
/// not be made for a thread of ours.
///
/// # Errors
/// The system has no thread to give.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A thread begins with the mask of the one that starts it.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let thread = Builder::new().name(name.to_owned()).spawn(work);
    if let Err(error) = before.thread_set_mask() {
        tracing::error!(%error, "a thread that has started one of ours takes no signals any more");
    }
    thread
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    #[test]
    fn a_thread_of_ours_takes_no_signals_and_the_one_that_starts_it_takes_them_as_before() {
        let mine = || SigSet::thread_get_mask().unwrap();
        let before = mine();
        let theirs = spawn("sublet-test", mine).unwrap().join().unwrap();
        assert!(
            [Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGALRM]
                .iter()
                .all(|one| theirs.contains(*one))
        );
        assert_eq!(mine(), before);
        assert!(!before.contains(Signal::SIGUSR1), "or it shows nothing");
    }
}
