//! What NVIDIA's management library (NVML) says of a GPU inside a tenant that has a budget there: as much memory as the tenant may
//! hold, and the tenant's own processes. Libraries size their caches by asking; without a budget nothing is changed.
//!
//! * [`bound`]: what the tenant may hold of a GPU, and holds.
//! * [`memory`]: the answers about memory, within that.
//! * [`processes`]: the answers about processes, those of the tenant alone.
//!
//! Nothing here calls NVML, and nothing is kept between two answers.

pub mod bound;
pub mod memory;
pub mod processes;

pub use bound::{Asker, Bound, Gpu};
pub use memory::{Memory, MemoryV2};
pub use processes::{Process, ProcessV1, Row};

/// A code of NVML's, as its functions return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlCode(pub i32);

impl NvmlCode {
    /// `NVML_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `NVML_ERROR_INSUFFICIENT_SIZE`: the caller's buffer is too short, and it is told how long it must be.
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    /// `NVML_ERROR_FUNCTION_NOT_FOUND`.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
}
