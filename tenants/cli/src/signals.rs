//! Ctrl-C and SIGTERM on a command that changes a tenant.
//!
//! The first calls the action off: before its point of no return it is undone, after it it is finished, and
//! either way the tenant is left in a state that the command names. The second leaves at once; the
//! tenant's processes notice, and finish or undo their part by themselves.
//!
//! Ctrl-Z does nothing: a command that stands still would have the tenant stand still with it. Nor does writing to
//! the terminal from the background stop it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGTSTP, SIGTTOU};
use signal_hook::{flag, low_level};
use tenants::coordinator::Interrupt;

use crate::failure::{EXIT_CALLED_OFF, EXIT_UNCHANGED, Failure};

/// Takes these signals over for the rest of the process's life.
pub(crate) fn watch() -> Result<Interrupt, Failure> {
    try_watch().map_err(|error| {
        let message = format!("signals could not be watched, and nothing was changed: {error}");
        Failure::new(message, EXIT_UNCHANGED)
    })
}

fn try_watch() -> io::Result<Interrupt> {
    let (interrupt, raise) = Interrupt::new()?;
    let is_second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Actions run in the order of their registration: the first signal only sets the flag.
        flag::register_conditional_shutdown(
            signal,
            i32::from(EXIT_CALLED_OFF),
            Arc::clone(&is_second),
        )?;
        flag::register(signal, Arc::clone(&is_second))?;
        low_level::pipe::register(signal, raise.try_clone()?)?;
    }
    for signal in [SIGTSTP, SIGTTOU] {
        // To be handled is enough not to be stopped; nobody looks at the flag.
        flag::register(signal, Arc::default())?;
    }
    Ok(interrupt)
}
