//! Deep pauses and the way back, of members that speak over real sockets and misbehave as told.

#![expect(clippy::unwrap_used, reason = "tests")]

mod freezing;
