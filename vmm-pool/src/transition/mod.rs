//! The steps of a pause and of a resume, and the proofs that they need.
//!
//! ```text
//!   pause:   Keeper --close--> Draining --drain--> Quiesced --prepare--> Prepared --depart--> Departing: release_stage
//!                                                                                 --release--> Done (memory is away)
//!   resume:  Keeper --shut--> Shut --create_own or arrive--> Arriving: restore_stage --restore_rest--> Returning:
//!                             import_batch --map_imports--> Restored --commit--> Done (the process runs)
//!   either:  Done --end--> Keeper
//! ```
//!
//! Each arrow consumes what is left of it. What is given up on the way is put back: dropping a [`Draining`], a [`Shut`] or a
//! [`Quiesced`] puts the gate where it was, and a pause or resume under way has an `undo`, which dropping it does too.
//! All that takes memory from its addresses or from the process is a method of [`still::Still`], which only a drained
//! process or memory that nothing has touched yet can make. There is one [`Keeper`] a pool, which whatever begins consumes, so
//! no second pause or resume begins before the first has ended. [`Shut`] says in its type where the gate was: only a process
//! that ran is drained, and lets calls in ([`Draining::step_all`]); only one whose memory is away has all of it created. Three ways
//! round that, and why they do not compile, are in `keeper.rs`.
//!
//! The order across processes is the caller's business; each step here leaves ledger and driver in agreement, whether
//! it succeeds or fails.

mod coming;
mod copier;
mod draining;
mod frozen;
mod home;
mod keeper;
mod leaving;
mod queue;
mod release;
mod restore;
mod save;
mod still;
mod survey;

pub use coming::{Arriving, Restored, Returning};
pub use draining::{Activity, DrainError, Draining};
pub use frozen::{Frozen, NotFrozen};
pub use home::HomeCopies;
pub use keeper::{Aside, Away, FromOffloaded, FromOpen, Keeper, NotShut, Origin, Shut};
pub use leaving::{Departing, Leaving, Prepared, Undone};
pub use queue::{ByDevice, Left, Moved};
pub use restore::ImportRequest;
pub use still::{Done, Failed, Quiesced, StillChunk};

#[cfg(test)]
mod tests;
