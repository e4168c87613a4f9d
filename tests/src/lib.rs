//! A harness for tests of several processes: real programs under the real preload
//! object, on a simulated node.
//!
//! ```text
//!   Stage    one node, one run directory; everything under one temporary directory
//!     Job      the ranks of one tenant, `programs/rank.c`, driven line by line
//!       Rank     one process; killed by its id when dropped
//!     Spmd     the ranks of a job that never stops for a pause, `programs/spmd.c`
//!     sublet   the real command
//! ```
//!
//! Every wait has a deadline. Nothing here panics: what goes wrong is a [`Trouble`], which names the process
//! and shows what it said.

#![expect(
    clippy::missing_errors_doc,
    reason = "what goes wrong is a `Trouble`, which says it in words"
)]

mod child;
mod files;
mod job;
mod random;
mod rank;
mod spmd;
mod stage;
mod steps;
mod trouble;

pub use child::Ran;
pub use files::Files;
pub use job::{Job, JobOptions};
pub use random::{Random, seed};
pub use rank::{Answer, Rank};
pub use spmd::{Spmd, SpmdOptions};
pub use stage::{MIB, Stage, statistic};
pub use steps::{Boundary, PAUSE, RESUME, Steps};
pub use trouble::{Outcome, Trouble, until};
