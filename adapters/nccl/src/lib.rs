//! NCCL's part: its public calls, counted for the consistent cut.

pub mod collectives;
