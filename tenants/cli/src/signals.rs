//! Ctrl-C and SIGTERM on a command that changes a tenant.
//!
//! The first calls the action off: before its point of no return it is undone, after it it is finished, and
//! either way the tenant is left in a state that the command names. The second leaves immediately, with an exit
//! code that says whether there was a way back; the tenant's processes notice, and finish or undo their part
//! by themselves.
//!
//! Ctrl-Z does nothing: a stopped command would stop the tenant with it. Writing to the terminal from the background does not
//! stop it either.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM, SIGTSTP, SIGTTOU};
use signal_hook::{SigId, flag, low_level};
use tenants::coordinator::Interrupt;

use crate::failure::{EXIT_CALLED_OFF, EXIT_PARTIAL, EXIT_UNCHANGED, Failure};

/// The effect of the second signal of a kind.
struct Second {
    /// Was there a first signal?
    is_second: Arc<AtomicBool>,
    actions: Vec<SigId>,
}

static SECOND: Mutex<Option<Second>> = Mutex::new(None);

impl Second {
    /// Makes the second signal end the command with `code`.
    fn leave_with(&mut self, code: u8) -> io::Result<()> {
        for action in self.actions.drain(..) {
            low_level::unregister(action);
        }
        for signal in [SIGINT, SIGTERM] {
            // Actions run in the order of their registration: the first signal only sets the flag.
            let is_second = || Arc::clone(&self.is_second);
            let leave = flag::register_conditional_shutdown(signal, i32::from(code), is_second())?;
            let note = flag::register(signal, is_second())?;
            self.actions.extend([leave, note]);
        }
        Ok(())
    }
}

/// Notes a change that cannot be called off. After it, a command that a second signal ends must not report that nothing was
/// changed.
pub(crate) fn past_recall() {
    let mut second = SECOND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(mut second) = second.take() {
        // If the system refuses this, a second signal does no more than the first.
        let _watched = second.leave_with(EXIT_PARTIAL);
    }
}

/// Handles these signals for the rest of the process's life.
pub(crate) fn watch() -> Result<Interrupt, Failure> {
    try_watch().map_err(|error| {
        let message = format!("signals could not be watched, and nothing was changed: {error}");
        Failure::new(message, EXIT_UNCHANGED)
    })
}

fn try_watch() -> io::Result<Interrupt> {
    let (interrupt, raise) = Interrupt::new()?;
    let mut second = Second { is_second: Arc::default(), actions: Vec::new() };
    second.leave_with(EXIT_CALLED_OFF)?;
    *SECOND.lock().unwrap_or_else(PoisonError::into_inner) = Some(second);
    for signal in [SIGINT, SIGTERM] {
        low_level::pipe::register(signal, raise.try_clone()?)?;
    }
    for signal in [SIGTSTP, SIGTTOU] {
        // A handled signal does not stop the process. The flag is not read.
        flag::register(signal, Arc::default())?;
    }
    Ok(interrupt)
}
