//! Figures for people.

use vmm_pool::KeptBytes;

/// Bytes in the largest binary unit that leaves at least one, with one decimal; whole bytes below 1 KiB.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (name, shift) in UNITS {
        let unit = 1_u64 << shift;
        if count >= unit {
            // Tenths, rounded to the nearest, in integers that cannot overflow.
            let tenths = (u128::from(count) * 10 + u128::from(unit / 2)) / u128::from(unit);
            return match tenths % 10 {
                0 => format!("{} {name}", tenths / 10),
                rest => format!("{}.{rest} {name}", tenths / 10),
            };
        }
    }
    format!("{count} B")
}

/// As [`bytes`], with a dash for none.
pub(crate) fn bytes_or_dash(count: u64) -> String {
    if count == 0 { "-".to_owned() } else { bytes(count) }
}

/// Microseconds as microseconds, milliseconds or seconds, three digits or so.
pub(crate) fn micros(count: u64) -> String {
    match count {
        0..1000 => format!("{count} us"),
        1000..10_000 => format!("{}.{} ms", count / 1000, count % 1000 / 100),
        10_000..1_000_000 => format!("{} ms", count / 1000),
        1_000_000.. => format!("{}.{:02} s", count / 1_000_000, count % 1_000_000 / 10_000),
    }
}

/// The first characters of `text`, with dots where something was left out.
pub(crate) fn shortened(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(chars_max.saturating_sub(3)).collect();
    format!("{kept}...")
}

/// What became of contents that are kept, such as "17 GiB kept: 16 GiB zero, 412 MiB unchanged, 820 MiB copied".
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
    fn bytes_have_one_decimal_in_their_unit() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (2 << 20, "2 MiB"),
            (1_610_612_736, "1.5 GiB"),
            (80 << 30, "80 GiB"),
            (3 << 40, "3 TiB"),
            (u64::MAX, "16777216 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(bytes_or_dash(0), "-");
    }

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
    fn long_text_is_cut_between_characters() {
        assert_eq!(shortened("python train.py", 40), "python train.py");
        assert_eq!(shortened("ääääääää", 6), "äää...");
    }
}
