//! Decisions one by one, and what comes of them on a virtual clock.

mod by_itself;
mod cases;
mod clock;
mod depth;
mod properties;
