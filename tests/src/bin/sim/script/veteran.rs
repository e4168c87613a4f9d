//! The one process that lives from start to end: it must not grow with those that come and go.

/// How much larger it may be at the end than after a tenth of the cycles: a scratch of 8 MiB stays for good each time that
/// the driver would not unpin it.
const GROWTH_BYTES_MAX: u64 = 36 << 20;

/// The footprint of the one process that lives from start to end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Veteran {
    /// When it had joined: bytes and descriptors.
    first: Option<(u64, usize)>,
    /// After a tenth of the cycles.
    early: Option<(u64, usize)>,
    /// When all others had left.
    late: (u64, usize),
}

impl Veteran {
    /// Notes how large it is `now`, and what it had when it had joined.
    pub(super) fn is_now(
        &mut self,
        now: (u64, usize),
        joined: (u64, usize),
        is_past_a_tenth: bool,
    ) {
        self.late = now;
        self.first.get_or_insert(joined);
        if is_past_a_tenth {
            self.early.get_or_insert(now);
        }
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
        )
    }
}
