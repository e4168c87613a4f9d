//! Plain device allocations made pausable.
//!
//! `cuMemAlloc` of [`BLOCK_BYTES_MIN`] and more becomes pool memory with a range of its own; less stays
//! with the driver and is counted, because every pool allocation takes a whole granule of 2 MiB. Below
//! `PyTorch`'s caching allocator this loses nothing: its segments are 2 MiB and more.
//!
//! * [`blocks`]: `cuMemAlloc`, `cuMemFree`, peer access.
//! * [`ipc`]: `cudaIpc` handles of such memory, as tickets.

pub mod blocks;
pub mod ipc;

pub use blocks::{Accessors, BLOCK_BYTES_MIN};
