//! The driver's memory calls, answered from the pool, whichever library makes them.
//!
//! * [`functions`]: the driver's functions that we stand in for.
//! * [`lookup`]: which of our functions stands in for which of the driver's.
//! * [`caller`]: which library a call comes from.
//! * [`vmm`]: the virtual memory calls (`cuMemCreate`, `cuMemMap` and theirs).
//! * [`blocks`]: `cuMemAlloc`, `cuMemFree`, peer access.
//! * [`paged`]: `cuMemAlloc` in regions whose memory is paged.
//! * [`pointers`]: facts about addresses.
//! * [`ipc`]: `cudaIpc` handles of such memory, as tickets.
//!
//! Each call has an [`Answer`]. No table of allocations lives here: the pool has the only one.

mod answer;
pub mod blocks;
pub mod caller;
pub mod functions;
pub mod ipc;
pub mod lookup;
pub mod paged;
pub mod pointers;
pub mod vmm;

pub use answer::Answer;
pub use blocks::{Accessors, BLOCK_BYTES_MIN};
