//! The protocol of the processes of a tenant: names, the table of phases, messages, connections, and the run directory where
//! processes meet. It knows no thread of a member, and no coordinator.

#![forbid(unsafe_code)]

pub mod checkpoints;
pub mod class;
pub mod code;
pub mod descriptors;
pub mod error_text;
pub mod family;
pub mod host_memory;
pub mod identity;
pub mod phase;
pub mod references;
pub mod region;
pub mod run_dir;
pub mod saving;
pub mod scope;
pub mod size;
pub mod state;
pub mod ticket;
pub mod time;
pub mod transport;
pub mod wire;

pub use sublet_cut::{self as cut, stepping};
