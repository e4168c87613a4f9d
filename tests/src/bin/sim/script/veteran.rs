//! The one process that lives from start to end: it must not grow with those that come and go.

use crate::orders::Account;

/// How much larger it may be at the end than after a tenth of the cycles: a scratch of 8 MiB stays for good each time that
/// the driver would not unpin it.
const GROWTH_BYTES_MAX: u64 = 36 << 20;

/// The footprint of the one process that lives from start to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Veteran {
    /// When it had joined: bytes and descriptors.
    first: Option<(u64, usize)>,
    /// After a tenth of the cycles.
    early: Option<(u64, usize)>,
    /// When all others had left.
    late: (u64, usize),
    /// What its descriptors were when it had joined, and what they are.
    descriptors: [Vec<String>; 2],
}

impl Veteran {
    /// Notes how large it is `now`, and what it had when it had joined.
    pub(super) fn is_now(&mut self, now: &Account, joined: &Account, is_past_a_tenth: bool) {
        let figures = |account: &Account| (account.resident_bytes, account.fds);
        self.late = figures(now);
        self.first.get_or_insert(figures(joined));
        if is_past_a_tenth {
            self.early.get_or_insert(figures(now));
        }
        self.descriptors = [joined, now].map(|account| account.descriptors.clone());
    }

    /// It keeps nothing for the many processes that came and went, and the board of its communicators.
    pub(crate) fn is_flat(&self) -> bool {
        let (first, early) = (self.first.unwrap_or(self.late), self.early.unwrap_or(self.late));
        self.late.1 <= first.1 + 2 && self.late.0 <= early.0 + GROWTH_BYTES_MAX
    }
}

impl std::fmt::Display for Veteran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (first, early) = (self.first.unwrap_or(self.late), self.early.unwrap_or(self.late));
        let late = self.late;
        write!(
            f,
            "{} descriptors at first, {} after a tenth, {} at the end; {} KiB resident after a tenth, {} KiB at the \
             end",
            first.1,
            early.1,
            late.1,
            early.0 >> 10,
            late.0 >> 10
        )?;
        if self.is_flat() {
            return Ok(());
        }
        let [first, late] = &self.descriptors;
        let only = |one: &[String], other: &[String]| -> Vec<String> {
            one.iter().filter(|each| !other.contains(each)).cloned().collect()
        };
        write!(f, "\n  descriptors at first alone: {:#?}", only(first, late))?;
        write!(f, "\n  descriptors at the end alone: {:#?}", only(late, first))
    }
}
