//! Errors, and texts from other processes, as one line of text.

use std::error::Error;
use std::io;

use nix::errno::Errno;
use serde::{Deserialize, Deserializer};

/// The error and all its causes, in one line. A cause that the text already contains is not repeated. If this process has no
/// descriptor left, the remedy follows.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = causes(error);
    let mut cause = Some(error);
    while cause.is_some_and(|cause| !is_out_of_descriptors(cause)) {
        cause = cause.and_then(Error::source);
    }
    if cause.is_some() {
        text.push_str(
            "; give this process more descriptors: `ulimit -n`, or its hard limit `ulimit -Hn`",
        );
    }
    text
}

/// Longest text that is accepted from another process about its failure, in bytes.
const PEERS_TEXT_BYTES_MAX: usize = 4096;

/// Does a terminal show this character? It obeys controls, marks that turn the direction of text, and characters without width.
pub(crate) fn is_shown(character: char) -> bool {
    matches!(character, '\'' | '"' | '\\') || character.escape_debug().len() == 1
}

/// `text` in one line that a terminal shows and does not obey. Other characters are written as JSON writes them, so that a JSON
/// document keeps its meaning.
pub fn plain(text: &str) -> String {
    plain_by("\\u", text)
}

/// As [`plain`], with `mark` before the number of a character that is not shown.
pub fn plain_by(mark: &str, text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if is_shown(character) {
            shown.push(character);
        } else {
            let mut units = [0; 2];
            let units = character.encode_utf16(&mut units).iter();
            shown.extend(units.map(|unit| format!("{mark}{unit:04x}")));
        }
    }
    shown
}

/// Another process's text about its failure, without control characters, and no longer than a message of Sublet's.
pub(crate) fn from_peer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let mut text = String::deserialize(deserializer)?;
    if text.len() > PEERS_TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(PEERS_TEXT_BYTES_MAX));
        text.push_str("...");
    }
    Ok(plain(&text))
}

fn is_out_of_descriptors(error: &(dyn Error + 'static)) -> bool {
    let code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let errno = error.downcast_ref::<Errno>().copied();
    errno.or_else(|| code.map(Errno::from_raw)) == Some(Errno::EMFILE)
}

fn causes(error: &dyn Error) -> String {
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

    #[test]
    fn what_a_terminal_would_obey_is_shown_as_json_writes_it() {
        for (text, shown) in [
            ("GPU 0: 'a' \"b\" \\c, \u{e4}\u{4e16}", None),
            ("\u{1b}]0;T\u{7}\r\n\t", Some("\\u001b]0;T\\u0007\\u000d\\u000a\\u0009")),
            (
                "\u{9b}2J\u{202e}x\u{200b}\u{2066}\u{feff}",
                Some("\\u009b2J\\u202ex\\u200b\\u2066\\ufeff"),
            ),
            ("\u{e0041}", Some("\\udb40\\udc41")),
        ] {
            assert_eq!(plain(text), shown.unwrap_or(text));
            assert_eq!(plain(&plain(text)), plain(text));
            let json = serde_json::to_string(text).unwrap();
            assert_eq!(serde_json::from_str::<String>(&plain(&json)).unwrap(), text);
        }
    }

    #[test]
    fn who_has_no_descriptor_left_is_told_what_helps() {
        #[derive(Debug, thiserror::Error)]
        #[error("{text}")]
        struct Outer {
            text: &'static str,
            source: io::Error,
        }
        let of = |errno: Errno| chain(&Outer { text: "no socket", source: io::Error::from(errno) });
        assert!(of(Errno::EMFILE).contains("`ulimit -n`"), "{}", of(Errno::EMFILE));
        assert!(!of(Errno::ENOENT).contains("ulimit"));
    }
}
