//! Saved contents in files: the directory they are written to, and the maps next to them.
//!
//! A tenant whose resume cannot succeed keeps what it has saved, but only its own processes can read that. So each
//! writes its own to a file, with a map of it; the coordinator writes the map of all.
//!
//! ```text
//!   DIR/tenant.json                      which processes, written last
//!   DIR/process-4242-<member>.json       its allocations, and where in the file their bytes lie
//!   DIR/process-4242-<member>.bin        the bytes
//! ```

pub mod dir;
pub mod map;

pub use dir::{DirName, PART_SUFFIX, SaveDirError};
