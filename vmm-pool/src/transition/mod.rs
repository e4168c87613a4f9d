//! The steps of a pause and of a resume, and the proofs that they need.
//!
//! ```text
//!   pause:   Pool::close -> Draining --drain--> Quiesced --save--> Prepared --release--> (memory is away)
//!   resume:  Pool::shut -> Shut --create_own--> Returning: restore_own, import_batch --map_imports--> Restored
//!                                                                              --commit--> (the process runs)
//!   by stages: Quiesced --reserve--> Reserved --depart--> Departing: release_stage --release--> (memory is away)
//!              Shut --arrive--> Arriving: restore_stage --restore_rest--> Returning
//! ```
//!
//! Each arrow consumes what is left of it. What is given up on the way is put back: dropping a [`Draining`], a [`Shut`] or a
//! [`Quiesced`] puts the gate where it was, and a pause or resume under way has an `undo`, which dropping it does too.
//! All that takes memory from its addresses or from the process is a method of [`still::Still`], which only a drained
//! process or memory that nothing has touched yet can make. The types prove that for **one** pause or resume at a time: they do
//! not keep a caller from beginning a second one before the first has ended. [`Pool::close`](crate::Pool::close) and
//! [`Pool::shut`](crate::Pool::shut) are for a caller that never does, as the worker thread of a member, which keeps the one value in one place.
//!
//! The order across processes is the caller's business; each step here leaves ledger and driver in agreement, whether
//! it succeeds or fails.

mod ahead;
mod draining;
mod file;
mod handover;
mod links;
mod mappings;
mod pause;
mod quiesced;
mod release;
mod restore;
mod resume;
mod save;
mod staged;
mod still;
mod survey;
mod verify;
mod views;

pub use ahead::{BroughtIn, HostStanding};
pub use draining::{Activity, DrainError, Draining};
pub use handover::{Handed, Shape, Shapes};
pub use pause::{Leaving, Prepared, Undone};
pub use quiesced::{Done, Failed, Quiesced, Shut};
pub use restore::ImportRequest;
pub use resume::{Restored, Returning};
pub use staged::{Arriving, ByDevice, Departing, Left, Moved, Reserved, Stages};
