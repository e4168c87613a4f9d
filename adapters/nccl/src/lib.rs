//! NCCL's part: its public calls, counted for the consistent cut.
//!
//! Each call becomes increments of the cut's counters, and `Cut::enter` brackets NCCL's own function: wait while held, count,
//! call. Inside a group, calls are gathered and counted at `ncclGroupEnd`; on a stream under capture they are gathered for the
//! graph, and counted at each launch of it. Ending a communicator is let through while paused, aborting one always.

pub mod collectives;
