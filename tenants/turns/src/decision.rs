//! The decisions which tenant has the GPUs, and when. Pure functions make them from the known state, on a clock of the caller's.
//!
//! [`scene`] is the present state: tenants, their bytes, and the waiting processes. [`history`] is the past. [`decide()`] makes a
//! decision for each waiting process: go, and pause some tenants; wait, for a time or a tenant; or never. Every decision has its
//! reason as one line. Nothing here reads a clock, a file or another process.
//!
//! * A tenant that waits gets all its GPUs together. Until then it holds none of them, and no later tenant gets one. So no two
//!   tenants wait for each other, and none waits for ever.
//! * A tenant keeps the GPUs for a *quantum*: ten times the time that switching it out and in again takes. So switching costs
//!   less than a tenth of the time. A tenant of a higher class waits no longer than a bound.
//! * An idle tenant is paused before all others: it is in no turn, has launched nothing for a while, and its devices have nothing
//!   left to do.
//! * A tenant that was paused early again and again stays paused for longer each time.
//! * Contexts of a paused tenant leave too, if its settings say so and another tenant lacks their memory (`depth`).

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
