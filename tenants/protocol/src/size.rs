//! Sizes in bytes, as people write and read them: one reader for the command line, budgets and the environment.

use std::fmt;
use std::str::FromStr;

/// Units, the largest first, each with its power of two. The reader ignores the case of their names, and accepts them without
/// `ib` or `i`. All units are binary.
const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// A fraction with more digits is refused, so that no product of the reader overflows.
const DECIMALS_MAX: usize = 9;

/// A size in bytes. Read from a number and a unit, such as `512MiB`, `1.5GiB`, `2 GiB`, `16g` or `4096`; bytes of a fraction are rounded down.
/// Written for people, with one decimal at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

/// The text is no size; the message quotes it. Nothing was changed. Give a number with a unit, such as `512MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no size: say for example 512MiB or 1.5GiB")]
pub struct NoSize;

impl Size {
    /// The size in the largest unit that divides it. The text is read back as the same size.
    pub fn exact(self) -> String {
        let fits = |(_, shift): &&(&str, u32)| self.0.is_multiple_of(1 << *shift);
        let unit = UNITS.iter().find(fits).filter(|_| self.0 > 0);
        unit.map_or_else(
            || self.0.to_string(),
            |(unit, shift)| format!("{}{unit}", self.0 >> shift),
        )
    }
}

impl FromStr for Size {
    type Err = NoSize;

    fn from_str(text: &str) -> Result<Self, NoSize> {
        let text = text.trim();
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim_start().to_ascii_lowercase();
        let is_named = |(name, _): &&(&str, u32)| {
            let name = name.to_ascii_lowercase();
            let letter = &name[..1];
            [name.as_str(), &format!("{letter}b"), letter].contains(&unit.as_str())
        };
        let shift = match unit.as_str() {
            "" | "b" => 0,
            _ => UNITS.iter().find(is_named).ok_or(NoSize)?.1,
        };
        let (whole, decimals) = match number.split_once('.') {
            None => (number, ""),
            // Bytes have no fraction.
            Some(_) if shift == 0 => return Err(NoSize),
            Some((_, decimals)) if !(1..=DECIMALS_MAX).contains(&decimals.len()) => {
                return Err(NoSize);
            }
            Some(parts) => parts,
        };
        let whole: u64 = whole.parse().map_err(|_| NoSize)?;
        let (count, divisor) = decimals
            .bytes()
            .try_fold((0_u128, 1_u128), |(all, places), digit| {
                digit.is_ascii_digit().then(|| (all * 10 + u128::from(digit - b'0'), places * 10))
            })
            .ok_or(NoSize)?;
        let bytes = (u128::from(whole) << shift) + (count << shift) / divisor;
        u64::try_from(bytes).map(Self).map_err(|_| NoSize)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((unit, shift)) = UNITS.iter().find(|(_, shift)| self.0 >= 1 << shift) else {
            return write!(f, "{} B", self.0);
        };
        // Rounded to the nearest.
        let unit_bytes = 1_u128 << shift;
        let tenths = (u128::from(self.0) * 10 + unit_bytes / 2) / unit_bytes;
        match (tenths / 10, tenths % 10) {
            (whole, 0) => write!(f, "{whole} {unit}"),
            (whole, tenth) => write!(f, "{whole}.{tenth} {unit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_all_the_ways_that_people_write_them_and_nothing_else_is() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096b", 4096),
            ("7 B", 7),
            ("8k", 8 << 10),
            ("8KB", 8 << 10),
            ("512M", 512 << 20),
            ("512MiB", 512 << 20),
            ("16 gb", 16 << 30),
            ("60GB", 60 << 30),
            (" 2 GiB ", 2 << 30),
            ("2T", 2 << 40),
            ("3tib", 3 << 40),
            ("1.5GiB", 3 << 29),
            ("0.25 m", 1 << 18),
            ("199.9MiB", 209_610_342),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text:?}");
        }
        for text in [
            "",
            " ",
            "yes",
            "-1",
            "+5",
            "1.5",
            "1.5B",
            "1.G",
            ".5G",
            "1.5.5G",
            "1.0000000001G",
            "16777216T",
            "1,5G",
            "GiB",
            "16 GPUs",
            "16i",
            "16bb",
            "16gi",
            "1 2",
            "0x10",
            "99999999999999999999",
            "99999999T",
            "20000000000GiB",
            "5GiB6",
            "1P",
        ] {
            assert_eq!(text.parse::<Size>(), Err(NoSize), "{text:?}");
        }
    }

    #[test]
    fn sizes_are_written_for_people_and_exactly() {
        for (bytes, said, exact) in [
            (0, "0 B", "0"),
            (1023, "1023 B", "1023"),
            (1 << 10, "1 KiB", "1KiB"),
            (1536, "1.5 KiB", "1536"),
            (3 << 29, "1.5 GiB", "1536MiB"),
            (5 << 40, "5 TiB", "5TiB"),
            (209_610_342, "199.9 MiB", "209610342"),
            (u64::MAX, "16777216 TiB", "18446744073709551615"),
        ] {
            assert_eq!(
                (Size(bytes).to_string().as_str(), Size(bytes).exact().as_str()),
                (said, exact)
            );
            assert_eq!(exact.parse(), Ok(Size(bytes)));
        }
    }
}
