//! What went wrong, for people.

use std::fmt;
use std::time::{Duration, Instant};

/// A sentence, and what the processes concerned had said.
///
/// A test that returns it shows it in full; that is why its `Debug` is its text.
pub struct Trouble(String);

/// A result for tests.
pub type Outcome<T = ()> = Result<T, Trouble>;

impl Trouble {
    /// Trouble in these words.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Asks again and again until it `is_so`, for at most `limit`.
pub fn until(what: &str, limit: Duration, mut is_so: impl FnMut() -> Outcome<bool>) -> Outcome {
    let deadline = Instant::now() + limit;
    while !is_so()? {
        if Instant::now() >= deadline {
            return Err(Trouble::new(format!("it did not come to this: {what}")));
        }
    }
    Ok(())
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Trouble {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        Self(text)
    }
}
