//! What copies to a device best just now: its copy engine, or a kernel of ours. The engine, as a rule; but the driver has
//! engines clear memory that was given back, and copies to the device get a third of the link until that is done
//! (driver 580, H200: some 3.6 ms a GiB). Nobody says when that is, so both are tried and the faster one goes on.
//!
//! A pure account of samples. One counts when the parcel before it went the same way, as two are on their way at once; and only
//! several together tell a rate, as the two may end at the same time, one in twice its time and one in none.

/// What copies a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Engine,
    Kernel,
}

impl By {
    fn other(self) -> Self {
        match self {
            Self::Engine => Self::Kernel,
            Self::Kernel => Self::Engine,
        }
    }
}

/// Samples by the kernel until the engine is tried again: the engine may have got its link back.
const KERNEL_FOR: u32 = 128;
/// Samples by the engine, at least, until the kernel is tried again.
const ENGINE_FOR: u32 = 8;
/// The engine has slowed down at less than so many quarters of what it did when it was chosen.
const SLOWED_QUARTERS: u64 = 3;
/// The kernel is chosen that is so many twentieths faster: it takes a part of the device.
const BETTER_TWENTIETHS: u64 = 21;
/// What a parcel of a trial holds at most. Six of them go the way that may be the slow one; but an engine that clears copies the
/// first 24 MiB or so at its full rate, and so trials of a few MiB have it for free.
const TRIAL_BYTES: u64 = 16 << 20;
/// Samples that tell a rate.
const TELL: u32 = 4;
/// Parcels that a trial waits through for those: where large and small contents lie mixed, some are the engine's in any case.
const STRAYS_MAX: u32 = 64;

/// See the head of this module. Rates are in bytes a second.
#[derive(Debug)]
pub(super) struct Pace {
    now: By,
    /// What was seen last of each.
    engine: Option<u64>,
    kernel: Option<u64>,
    /// Of the engine, when it was chosen.
    chosen_at: u64,
    is_trial: bool,
    /// Samples since the last trial, or the begin of this one.
    samples: u32,
    /// What did not count since then.
    strays: u32,
    /// Of those that tell the next rate.
    bytes: u64,
    elapsed_ns: u64,
    before: Option<By>,
    /// The driver refuses the kernel.
    is_engine_only: bool,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            now: By::Engine,
            engine: None,
            kernel: None,
            chosen_at: 0,
            is_trial: true,
            samples: 0,
            strays: 0,
            bytes: 0,
            elapsed_ns: 0,
            before: None,
            is_engine_only: false,
        }
    }

    /// What the next parcel is to be copied by.
    pub(super) fn next(&self) -> By {
        self.now
    }

    /// Bytes that the next parcel may hold.
    pub(super) fn next_bytes_max(&self) -> u64 {
        if self.is_trial && !self.is_engine_only { TRIAL_BYTES } else { u64::MAX }
    }

    /// The driver refuses the kernel.
    pub(super) fn refuse_kernel(&mut self) {
        self.is_engine_only = true;
        self.now = By::Engine;
    }

    /// A parcel was copied, in the order in which they began: so much in the time since it began, or since the one before it
    /// was, whichever was later.
    pub(super) fn copied(&mut self, by: By, bytes: u64, elapsed_ns: u64) {
        let counts = self.before == Some(by) && by == self.now && !self.is_engine_only;
        self.before = Some(by);
        if !counts {
            self.strays += 1;
            if self.is_trial && self.strays > STRAYS_MAX {
                self.choose(self.engine.unwrap_or(u64::MAX), self.kernel.unwrap_or(0));
            }
            return;
        }
        self.samples += 1;
        self.bytes += bytes;
        self.elapsed_ns += elapsed_ns;
        if !self.samples.is_multiple_of(TELL) {
            return;
        }
        let rate = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.elapsed_ns.max(1));
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        (self.bytes, self.elapsed_ns) = (0, 0);
        match by {
            By::Engine => self.engine = Some(rate),
            By::Kernel => self.kernel = Some(rate),
        }
        if self.is_trial {
            match (self.engine, self.kernel) {
                (Some(engine), Some(kernel)) => self.choose(engine, kernel),
                _ => self.try_it(by.other()),
            }
        } else if self.is_another_trial_due(rate) {
            self.try_it(by.other());
        }
    }

    fn choose(&mut self, engine: u64, kernel: u64) {
        let is_kernel_better = kernel / BETTER_TWENTIETHS > engine / 20;
        self.now = if is_kernel_better { By::Kernel } else { By::Engine };
        self.chosen_at = engine;
        self.is_trial = false;
        (self.samples, self.strays) = (0, 0);
        (self.bytes, self.elapsed_ns) = (0, 0);
    }

    fn try_it(&mut self, by: By) {
        self.now = by;
        self.is_trial = true;
        (self.samples, self.strays) = (0, 0);
        (self.bytes, self.elapsed_ns) = (0, 0);
    }

    fn is_another_trial_due(&self, rate: u64) -> bool {
        match self.now {
            By::Engine => {
                let has_slowed = rate / SLOWED_QUARTERS < self.chosen_at / 4;
                has_slowed && self.samples >= ENGINE_FOR
            }
            By::Kernel => self.samples >= KERNEL_FOR,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const PARCEL: u64 = 32 << 20;
    const MS: u64 = 1_000_000;
    /// What the engine does, in bytes a microsecond, alone and while the driver clears.
    const FREE: u64 = 55_000;
    const CLEARING: u64 = 20_000;

    /// Copies so many whole parcels on a virtual clock, two at a time that share their way, at the rates (bytes a microsecond) that
    /// `rates` gives for the time in milliseconds; how many of them the kernel copied, and what all took, in milliseconds. While the
    /// driver clears, the engine has the first 24 MiB of a turn at the rate of a free one.
    fn play(parcels: u64, rates: impl Fn(u64) -> (u64, u64)) -> (u64, u64) {
        const TICK_NS: u64 = 1000;
        const BURST: u64 = 24 << 20;
        struct Flying {
            by: By,
            bytes: u64,
            left: u64,
            began: u64,
        }
        let mut pace = Pace::new();
        let (mut now, mut last_done, mut by_kernel) = (0, 0, 0);
        let mut flying: VecDeque<Flying> = VecDeque::new();
        // What the engine has copied since a kernel has.
        let mut turn = 0;
        let mut left = parcels * PARCEL;
        while left > 0 || !flying.is_empty() {
            while left > 0 && flying.len() < 2 {
                let bytes = left.min(PARCEL).min(pace.next_bytes_max());
                flying.push_back(Flying { by: pace.next(), bytes, left: bytes, began: now });
                left -= bytes;
            }
            let (engine, kernel) = rates(now / MS);
            now += TICK_NS;
            let moving = flying.iter().filter(|one| one.left > 0).count().max(1) as u64;
            for one in &mut flying {
                let rate = match one.by {
                    By::Kernel => kernel,
                    By::Engine if turn < BURST && engine == CLEARING => FREE,
                    By::Engine => engine,
                };
                let moved = (rate * TICK_NS / 1000 / moving).min(one.left);
                one.left -= moved;
                turn = if one.by == By::Engine { turn + moved } else { 0 };
            }
            while flying.front().is_some_and(|one| one.left == 0) {
                let Some(Flying { by, bytes, began, .. }) = flying.pop_front() else { break };
                by_kernel += if by == By::Kernel { bytes } else { 0 };
                pace.copied(by, bytes, now - last_done.max(began));
                last_done = now;
            }
        }
        (by_kernel.div_ceil(PARCEL), now / MS)
    }

    #[test]
    fn a_link_that_is_free_is_the_engines_but_for_one_trial() {
        let (by_kernel, took) = play(1000, |_| (FREE, 51_000));
        assert!((1..=3).contains(&by_kernel), "six parcels of a trial, {by_kernel}");
        let alone = 1000 * PARCEL / 55_000_000;
        assert!(took <= alone + alone / 100, "{took} ms, the engine alone {alone}");
    }

    #[test]
    fn while_the_driver_clears_the_kernel_copies_and_the_engine_comes_back_after_it() {
        let clears = |until| move |ms| if ms < until { (CLEARING, 50_500) } else { (FREE, 51_000) };
        // 20 GiB, of which the engine alone would have copied 4 in the 215 ms.
        let (by_kernel, took) = play(640, clears(215));
        assert!((270..400).contains(&by_kernel), "{by_kernel}");
        assert!(took < 422, "{took} ms, with engines alone 527, at best 408");
        // Less than the clearing lasts: as fast as the kernel alone would be, but for three hundredths.
        let (_, took) = play(640, clears(10_000));
        let alone = 640 * PARCEL / 50_500_000;
        assert!(took <= alone + alone / 33, "{took} ms, the kernel alone {alone}");
    }

    #[test]
    fn an_engine_that_slows_down_on_the_way_is_left() {
        let rates = |ms| if ms < 100 { (FREE, 51_000) } else { (CLEARING, 48_000) };
        let (by_kernel, took) = play(640, rates);
        assert!(by_kernel > 400, "{by_kernel}");
        assert!(took < 470, "{took} ms");
    }

    #[test]
    fn a_slow_link_alone_is_no_reason_for_the_kernel() {
        let (by_kernel, _) = play(200, |_| (12_000, 11_900));
        assert!((1..=3).contains(&by_kernel), "six parcels of a trial, {by_kernel}");
    }

    #[test]
    fn a_trial_that_hears_nothing_ends_with_the_engine() {
        let mut pace = Pace::new();
        for _ in 0..=TELL {
            pace.copied(By::Engine, PARCEL, MS);
        }
        assert_eq!(pace.next(), By::Kernel);
        for _ in 0..=STRAYS_MAX / 2 {
            assert!(pace.next_bytes_max() < u64::MAX);
            pace.copied(By::Kernel, PARCEL, MS);
            pace.copied(By::Engine, PARCEL, MS);
        }
        assert_eq!((pace.next(), pace.next_bytes_max()), (By::Engine, u64::MAX));
    }

    #[test]
    fn a_kernel_that_is_refused_is_asked_no_more() {
        let mut pace = Pace::new();
        for _ in 0..=TELL {
            pace.copied(By::Engine, PARCEL, MS);
        }
        assert_eq!(pace.next(), By::Kernel);
        pace.refuse_kernel();
        for _ in 0..300 {
            pace.copied(By::Engine, PARCEL, 3 * MS);
            assert_eq!(pace.next(), By::Engine);
        }
    }
}
