//! NCCL's part: its public calls, counted for the consistent cut.
//!
//! Each call becomes increments of the cut's counters. `Cut::enter` brackets NCCL's own function: wait while held, count, call.
//! Inside a group, calls are gathered, and counted at `ncclGroupEnd`. On a stream under capture they are gathered for the
//! graph, and counted at each launch of it. A call that ends a communicator passes while paused. A call that aborts one always
//! passes.

pub mod collectives;
