//! Deep pauses and the way back, of members that speak over real sockets and misbehave as told.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "tests of the coordinator use more of it")]
#[path = "../../../coordinator/src/tests/fake.rs"]
mod fake;
mod freezing;
#[expect(dead_code, reason = "tests of the coordinator use more of it")]
#[path = "../../../coordinator/src/tests/script.rs"]
mod script;

use sublet_coordinator::{Coordinator, Event, Options};
