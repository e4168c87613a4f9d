//! Locks and threads as Sublet uses them inside other people's processes. It knows no GPU, no file and no other process.

pub mod slots;
pub mod sync;
pub mod threads;
pub mod time;
