//! Work on saved contents and host memory outside of pauses and resumes, which know nothing of it.
//!
//! ```text
//!   save     what is saved goes to files, with maps of it: `save` asks, and the `desk` of each process writes
//!   room     a pause that lacks host memory has it from tenants that rest: `room` asks, and their desks move contents
//!   prepare  the host memory of the next pause comes in before it: `prepare` asks, and `prefault` of each process does it
//! ```
//!
//! A process joins a tenant with [`join`], and a coordinator gets [`room`] in its options. `save` writes:
//!
//! ```text
//!   DIR/tenant.json                      which processes, written last
//!   DIR/process-4242-<member>.json       its allocations, and where in the file their bytes lie
//!   DIR/process-4242-<member>.bin        the bytes
//! ```
//!
//! A tenant that cannot be resumed keeps its saved contents, but only its own processes can read them. So each process writes its
//! contents to a file, with a map. The coordinator writes the map of all processes.

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
