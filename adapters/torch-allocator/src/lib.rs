//! The settings of `torch_memory_saver`: what callers of torch's allocators ask for beyond device memory.
//!
//! Memory of one tag may be kept, discarded or written to files there, as the calling thread was set when it
//! allocated it. A tag of ours has one policy, so each such pair is a tag of its own, `tms/<tag>/<policy>`, and
//! pausing a tag pauses all that it has. The memory itself is the driver's calls' to make; who has set what is
//! remembered by those who export the functions.

mod settings;

pub use settings::{Backend, Environment, Settings, tags_of};
