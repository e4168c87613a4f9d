//! Locks and threads for use inside other people's processes. This crate knows no GPU, no file and no other process.

pub mod slots;
pub mod sync;
pub mod threads;
pub mod time;
