//! The decisions who has the GPUs when. Pure functions make them from what is known, on a clock of the caller's.
//!
//! [`scene`] says what is so (tenants, their bytes, who waits), [`history`] what has been, and [`decide()`] what follows for each who
//! waits: go, with what is to be paused for it; wait, until when or for whom; or never. Every decision has its reason as one line.
//! Nothing here reads a clock, a file or another process.
//!
//! * A tenant that waits and may go takes all its GPUs together. Until then it holds none, and nobody who came later gets one of them: no two
//!   wait for each other, and nobody is passed by for ever.
//! * A tenant keeps the GPUs for a *quantum*, ten times what switching it out and in again takes, so that switching costs less than a tenth
//!   of the time. A waiter of a higher class waits for no longer than a bound.
//! * A tenant that is in no turn, has launched nothing for a while and whose devices have nothing left to do makes way before all others.
//! * A tenant that was pushed out early again and again stays away for longer each time.
//! * Contexts of a paused tenant leave too, if it says so, where another lacks their room (`depth`).

mod decide;
mod depth;
pub mod history;
mod quanta;
pub mod scene;
mod victims;

#[cfg(test)]
mod tests;

pub use decide::{Decision, Verdict, decide};
pub use depth::is_due;
pub use quanta::idle_after_us;
