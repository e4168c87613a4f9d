//! The C interface, through programs of their own processes.

#![expect(clippy::expect_used, reason = "a test fails by panicking, helpers of it too")]

mod holders;
mod stage;
mod transcripts;
