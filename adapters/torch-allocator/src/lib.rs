//! PyTorch's pluggable allocator and the interface of `torch_memory_saver`: the requests of their callers beyond device memory.
//!
//! * [`Settings`]: the settings of a thread, and the [`Environment`] that it begins with.
//! * [`Saver`]: the effect of the settings on memory that is allocated, paused and resumed.
//!
//! In that interface, memory of one tag may be kept, discarded or written to files. The settings of the allocating thread
//! decide. A tag of Sublet has one policy. So each pair of tag and policy is a tag of its own, `tms/<tag>/<policy>`. A pause of
//! a tag pauses all of its pairs.
//!
//! The C functions themselves are in `ffi`: they call the driver, and another adapter makes the memory.

mod saver;
mod settings;

pub use saver::Saver;
pub use settings::{Backend, Environment, Settings, tags_of};
