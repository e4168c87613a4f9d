//! Small allocations of a library's own as parts of large ones, so that a pause and a resume see few allocations where the
//! library sees many. It is a front of the pool ([`vmm_pool::Front`]), which knows of the large ones alone.

mod cells;
mod slabs;

pub use slabs::Slabs;
