//! Saved contents and host memory outside of pauses and resumes: of members that misbehave as told, and of real ones.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers of it too")]

mod ahead;
mod saving;
mod spilling;
