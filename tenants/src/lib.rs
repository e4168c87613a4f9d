//! Tenants: identity, the agent in each process, and the protocol that pauses and resumes them together.

#![forbid(unsafe_code)]

pub mod budget;
pub mod checkpoints;
pub mod class;
pub mod code;
pub mod coordinator;
mod descriptors;
pub mod error_text;
pub mod family;
pub mod host_memory;
pub mod identity;
pub mod member;
pub mod numa;
pub mod phase;
pub mod references;
pub mod region;
pub mod requests;
pub mod run_dir;
pub mod saving;
pub mod scope;
pub mod settings;
pub mod size;
pub mod state;
pub mod ticket;
pub mod time;
pub mod transport;
pub mod wire;

pub use sublet_cut::{self as cut, stepping};
