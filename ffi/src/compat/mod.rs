//! Functions under the names that other projects' callers know, on top of the C interface.
//!
//! * [`saver`]: the functions of `torch_memory_saver`.

pub mod saver;
