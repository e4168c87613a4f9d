//! PyTorch's pluggable allocator and the interface of `torch_memory_saver`: what their callers ask for beyond device memory.
//!
//! * [`Settings`]: what a thread has set, and the [`Environment`] that it begins with.
//! * [`Saver`]: what follows for memory that is allocated, paused and resumed.
//!
//! Memory of one tag may be kept, discarded or written to files there, as the calling thread was set when it
//! allocated it. A tag of ours has one policy, so each such pair is a tag of its own, `tms/<tag>/<policy>`, and
//! pausing a tag pauses all that it has.
//!
//! The C functions themselves are `ffi`'s: they call the driver, and another adapter makes the memory.

mod saver;
mod settings;

pub use saver::Saver;
pub use settings::{Backend, Environment, Settings, tags_of};
