//! The driver: its calls, and a simulated one for tests.

pub use sublet_driver::*;
#[cfg(feature = "sim")]
pub use sublet_sim_driver as sim;
