//! Errors as one line of text.

use std::error::Error;
use std::io;

use nix::errno::Errno;

/// The error and everything behind it, in one line. A cause that the text holds already is not said twice. Where this process has no descriptor left,
/// what helps follows.
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
