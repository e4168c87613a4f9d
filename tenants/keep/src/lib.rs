//! Saved contents and host memory, outside of the pauses and resumes of tenants, which know nothing of it.
//!
//! ```text
//!   save     what is saved goes to files, with maps of it: `save` asks, and the `desk` of each process writes
//!   room     a pause that lacks host memory has it from tenants that rest: `room` asks, and their desks move contents
//!   prepare  the host memory of the next pause comes in before it: `prepare` asks, and `prefault` of each process does it
//! ```
//!
//! A process joins by [`join`], and a coordinator has [`room`] in its options. `save` writes:
//!
//! ```text
//!   DIR/tenant.json                      which processes, written last
//!   DIR/process-4242-<member>.json       its allocations, and where in the file their bytes lie
//!   DIR/process-4242-<member>.bin        the bytes
//! ```
//!
//! A tenant whose resume cannot succeed keeps what it has saved, but only its own processes can read that. So each
//! writes its own to a file, with a map of it; the coordinator writes the map of all.

#![forbid(unsafe_code)]

mod desk;
mod dir;
mod figures;
pub mod map;
pub mod numa;
mod prefault;
mod prepare;
mod pressure;
mod room;
mod save;
mod settings;

pub use dir::PART_SUFFIX;
pub use figures::{HostFigure, figures, limits};
pub use prefault::join;
pub use prepare::{PrepareReport, PreparedProcess, prepare};
pub use room::room;
pub use save::{SaveReport, SaveState, save};
pub use settings::{Settings, is_in_memory};
pub use sublet_disk::check_file_dir;
