//! Memory that processes of a tenant share, let go of in any order around pauses: never wrong, never lost, never in
//! the way of a resume.

#![expect(clippy::expect_used, clippy::panic, reason = "a test says what it expected")]

mod draining;
mod endings;
mod joining;
mod pins;
mod random;
mod stage;
mod tickets;
mod undone;
