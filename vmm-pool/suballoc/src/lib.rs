//! Small allocations of a library as parts of large ones. A pause and a resume then see few allocations where the library sees
//! many. This crate is a front of the pool ([`vmm_pool::Front`]), which knows only the large ones.

mod cells;
mod slabs;

pub use slabs::Slabs;
