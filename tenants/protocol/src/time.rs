//! Times, as people write them: one reader for the command line and the environment. Also times as messages show them.

use std::time::Duration;

pub use sublet_sync::time::{micros, millis};

/// A time such as `500ms`, `30s`, `2m` or `1h 30m`, from a millisecond to a day. A bare number is in seconds.
///
/// # Errors
/// The text is no such time; the error says what is expected.
pub fn parse(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().map(Duration::from_secs);
    seconds
        .or_else(|| humantime::parse_duration(text).ok())
        .filter(|time| (Duration::from_millis(1)..=Duration::from_hours(24)).contains(time))
        .ok_or_else(|| format!("'{text}' is no time; examples: 500ms, 30s, 2m (at most 24h)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(parse("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse("2m"), Ok(Duration::from_mins(2)));
        assert_eq!(parse("24h"), Ok(Duration::from_hours(24)));
        assert_eq!(parse("1h 30m"), Ok(Duration::from_mins(90)));
        for text in ["", "s", "0", "0s", "1us", "-1s", "2d", "25h", "99999999999999999999s", "x5s"]
        {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
