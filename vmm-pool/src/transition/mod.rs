//! The steps of a pause and of a resume, and the values that prove that a step may run.
//!
//! ```text
//!   pause:   Keeper --close--> Draining --drain--> Quiesced --prepare--> Prepared --depart--> Departing: release_stage
//!                                                                                 --release--> Done (memory is away)
//!   resume:  Keeper --shut--> Shut --create_own or arrive--> Arriving: restore_stage --restore_rest--> Returning:
//!                             import_batch --map_imports--> Restored --commit--> Done (the process runs)
//!   either:  Done --end--> Keeper
//! ```
//!
//! Each arrow consumes the value to its left. Dropping a value undoes its work. Dropping a [`Draining`], a [`Shut`] or
//! a [`Quiesced`] puts the gate back to its mode before. A pause or resume under way has an `undo`, and dropping it
//! does the same. Each operation that unmaps or releases memory is a method of [`still::Still`]. Only a drained
//! process, or memory that nothing has touched yet, can make one. Each pool has one [`Keeper`], which the start of a
//! pause or resume consumes. So no second pause or resume begins before the first has ended. The type of [`Shut`] has
//! the mode that the gate had before. Only a process that ran is drained, and lets calls in ([`Draining::step_all`]).
//! Only for a process whose memory is off its devices is all memory created. `keeper.rs` has three violations of these
//! rules, and shows that they do not compile.
//!
//! The caller decides the order across processes. After each step here the ledger and the driver agree, whether the
//! step succeeds or fails.

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
