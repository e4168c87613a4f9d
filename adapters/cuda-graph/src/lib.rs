//! CUDA graphs: the streams that are being captured, and the graphs that launch work which waits for other ranks.
//!
//! * [`captures`]: a capture turns a device synchronise, which every pause needs, into an error that also
//!   ends the capture. Beginning one is therefore gated like a launch, and a pause is refused while any is
//!   open.
//! * [`graphs`]: what a graph launch adds to the counts of the consistent cut.

pub mod captures;
pub mod graphs;

pub use captures::{Captures, Target};
pub use graphs::{Counted, Graphs};
