//! Errors as one line of text.

use std::error::Error;

/// The error and everything behind it, in one line. A cause that the text holds already is not said twice.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(below) = source {
        let below_text = below.to_string();
        if !text.contains(&below_text) {
            text.push_str(": ");
            text.push_str(&below_text);
        }
        source = below.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Step {
        text: &'static str,
        source: Option<Box<Step>>,
    }

    #[test]
    fn causes_follow_and_none_is_said_twice() {
        let of = |texts: [&'static str; 3]| {
            let source = texts
                .into_iter()
                .rev()
                .fold(None, |source, text| Some(Box::new(Step { text, source })));
            source.map(|error| chain(&*error))
        };
        let told = of(["no pause", "no connection", "refused (111)"]);
        assert_eq!(told.as_deref(), Some("no pause: no connection: refused (111)"));
        let told = of(["no pause: no connection", "no connection", "refused (111)"]);
        assert_eq!(told.as_deref(), Some("no pause: no connection: refused (111)"));
    }
}
