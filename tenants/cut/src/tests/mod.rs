//! The cut on its own: the member's side, and what is let through next, tried on all interleavings of small
//! programs and on many of large ones.

mod member;
mod model;
mod programs;
mod search;
mod seats;
