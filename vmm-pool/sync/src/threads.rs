//! Sublet's threads in other people's processes.
//!
//! None of them unwinds into foreign code. After a panic, each does what this table says, so that no thread waits for
//! it forever:
//!
//! | thread | after a panic |
//! | --- | --- |
//! | `sublet-worker` | the step is answered as failed inside; the process is faulted, its gate opens, and it runs on. The thread goes on |
//! | `sublet-agent` | it closes the connections of all clients; a pause or resume under way is settled as after a coordinator's death; a note says so. The thread goes on |
//! | `sublet-drain` | the wait counts as failed, so the pause is refused and names the device; the next pause begins another thread |
//! | `sublet-pager` | the pager has ended: each use of memory that is not on the device is refused, and the message names the device |
//! | `sublet-prefault` | populating host memory ahead of a pause is refused, with a message; the next request begins another thread |
//! | `sublet-arena` | the thread that runs the pause allocates the host memory that it needs |
//! | `sublet-file` | the step that waits for it is refused |
//! | those that touch host memory | the step that waits for them panics too, on the worker |
//! | `sublet-fill` | the call that waits for it is refused |
//! | `sublet-turn` | the turn goes on, and is checked again a little later |
//! | `sublet-back` | a note says so, and another thread begins a little later |
//! | `sublet-answers`, `sublet-driver` | the calls that wait for it are told that they failed |
//! | `sublet-frees` | this block stays; the next blocks are freed |
//! | `sublet-unused` | the pause saves everything |
//! | `sublet-walk` | the pause goes on without what the walk would have found |

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::Builder;

use nix::sys::signal::{SigSet, SigmaskHow};

/// Starts a thread called `name`. It blocks all signals from its start: signals are the application's, and its handlers
/// may not expect a thread of Sublet's. If `work` panics, the same thread calls `after_panic` with the panic's message.
/// `after_panic` must release all threads that wait for this one.
///
/// # Errors
/// The system cannot start a thread.
pub fn spawn(
    name: &'static str,
    work: impl FnOnce() + Send + 'static,
    after_panic: impl FnOnce(&str) + Send + 'static,
) -> io::Result<()> {
    let body = move || {
        let Err(panic) = catch_unwind(AssertUnwindSafe(work)) else { return };
        tracing::error!(thread = name, panic = text_of(&*panic), "Sublet failed inside");
        let told = AssertUnwindSafe(|| after_panic(text_of(&*panic)));
        if catch_unwind(told).is_err() {
            tracing::error!(thread = name, "Sublet failed inside once more");
        }
    };
    // A new thread inherits the signal mask of the thread that starts it.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let thread = Builder::new().name(name.to_owned()).spawn(body);
    if let Err(error) = before.thread_set_mask() {
        tracing::error!(%error, "a thread that has started one of ours takes no signals any more");
    }
    thread.map(drop)
}

/// Returns the message of a panic.
pub fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    #[test]
    fn a_thread_of_ours_takes_no_signals_and_the_one_that_starts_it_takes_them_as_before() {
        let mine = || SigSet::thread_get_mask().unwrap();
        let before = mine();
        let (tell, told) = crossbeam_channel::bounded(1);
        spawn("sublet-test", move || tell.send(mine()).unwrap(), |_| {}).unwrap();
        let theirs = told.recv().unwrap();
        assert!(
            [Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGALRM]
                .iter()
                .all(|one| theirs.contains(*one))
        );
        assert_eq!(mine(), before);
        assert!(!before.contains(Signal::SIGUSR1), "or it shows nothing");
    }

    #[test]
    fn what_is_to_be_done_after_a_panic_is_told_what_that_said_and_may_panic_too() {
        let (tell, told) = crossbeam_channel::bounded(1);
        let after = move |text: &str| {
            tell.send(text.to_owned()).unwrap();
            panic!("this one as well");
        };
        spawn("sublet-test", || panic!("row {} is not there", 7), after).unwrap();
        assert_eq!(told.recv().unwrap(), "row 7 is not there");
        assert!(told.recv().is_err(), "it has ended, and what it held is dropped");
    }
}
