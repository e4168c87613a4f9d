//! Between NCCL (and every other caller of the driver's virtual memory interface) and the driver.
//!
//! * [`lookup`]: which of our functions stands in for which of the driver's.
//! * [`vmm`]: the virtual memory calls, answered from the pool.
//! * [`caller`]: which library a call comes from.
//! * [`collectives`]: NCCL's public calls, counted for the consistent cut.
//! * [`pausing`]: `ncclPause` and its family.
//!
//! No table of allocations lives here: the pool has the only one.

pub mod answer;
pub mod caller;
pub mod collectives;
pub mod lookup;
pub mod pausing;
pub mod vmm;

pub use answer::Answer;
