//! Figures for people.

use tenants::size::Size;
use vmm_pool::KeptBytes;

/// Returns a number of bytes as people write it.
pub(crate) fn bytes(count: u64) -> String {
    Size(count).to_string()
}

/// As [`bytes`], with a dash for zero.
pub(crate) fn bytes_or_dash(count: u64) -> String {
    if count == 0 { "-".to_owned() } else { bytes(count) }
}

/// Returns a time in microseconds, milliseconds or seconds, with about three digits.
pub(crate) fn micros(count: u64) -> String {
    match count {
        0..1000 => format!("{count} us"),
        1000..10_000 => format!("{}.{} ms", count / 1000, count % 1000 / 100),
        10_000..1_000_000 => format!("{} ms", count / 1000),
        1_000_000.. => format!("{}.{:02} s", count / 1_000_000, count % 1_000_000 / 10_000),
    }
}

/// Returns the first characters of `text`, with dots if text was left out.
pub(crate) fn shortened(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(chars_max.saturating_sub(3)).collect();
    format!("{kept}...")
}

/// Returns a command line in one line: its program without folders, and no control characters.
pub(crate) fn command(text: &str) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let (program, rest) = plain.split_once(' ').unwrap_or((&plain, ""));
    let program = program.rsplit('/').next().unwrap_or(program);
    format!("{program} {rest}").trim_end().to_owned()
}

/// Returns a count such as "1 process" or "2 processes".
pub(crate) fn counted(count: usize, one: &str, more: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { more })
}

/// Groups the sources of equal texts, and returns each group with its text.
pub(crate) fn folded(said: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut groups: Vec<(String, usize, String)> = Vec::new();
    for (who, text) in said {
        match groups.iter_mut().find(|(_, _, known)| *known == text) {
            Some((_, count, _)) => *count += 1,
            None => groups.push((who, 1, text)),
        }
    }
    let one = |(who, count, text): (String, usize, String)| match count {
        1 => (who, text),
        _ => (counted(count, "process", "processes"), text),
    };
    groups.into_iter().map(one).collect()
}

/// Describes kept contents, such as "17 GiB kept: 16 GiB zero, 412 MiB unchanged, 820 MiB copied".
pub(crate) fn kept(kept: KeptBytes) -> String {
    format!(
        "{} kept: {} zero, {} unchanged, {} copied",
        bytes(kept.total_bytes()),
        bytes(kept.zero_bytes),
        bytes(kept.unchanged_bytes),
        bytes(kept.copied_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_fits() {
        for (count, text) in [
            (0, "0 us"),
            (999, "999 us"),
            (1250, "1.2 ms"),
            (412_345, "412 ms"),
            (1_234_567, "1.23 s"),
        ] {
            assert_eq!(micros(count), text);
        }
    }

    #[test]
    fn a_command_is_one_plain_line() {
        for (text, shown) in [
            ("/opt/envs/rl/bin/python3 job.py 0 150", "python3 job.py 0 150"),
            ("sh", "sh"),
            ("python3 -c import x\n\x1b[2Jrun()", "python3 -c import x  [2Jrun()"),
            ("", ""),
        ] {
            assert_eq!(command(text), shown);
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shortened("python train.py", 40), "python train.py");
        assert_eq!(shortened("ääääääää", 6), "äää...");
    }
}
