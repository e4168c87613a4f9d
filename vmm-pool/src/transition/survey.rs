//! The survey: the devices compute fingerprints of the contents that a pause keeps, before anything is copied.

#![expect(unsafe_code, reason = "has devices read memory, and starts copies through the driver")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

use super::still::Still;
use crate::copies::{CopyStreams, DeviceStreams};
use crate::driver::{
    DeviceAddress, DeviceOrdinal, Driver, Fingerprint, PieceSlot, RawStream, VaRange, WORD_BYTES,
};
use crate::error::PoolResult;
use crate::ids::VirtualHandle;
use crate::journal::StepLog;
use crate::ledger::{Row, Rows, Survey};
use crate::store::{Pinned, Prints};

/// An allocation to read, and the range where its device can read it.
#[derive(Clone, Copy, Debug)]
struct Looked {
    row: VirtualHandle,
    range: VaRange,
}

impl Looked {
    fn pieces(&self, piece_bytes: u64) -> impl Iterator<Item = VaRange> + use<> {
        let VaRange { start, size_bytes } = self.range;
        (0..size_bytes.div_ceil(piece_bytes)).map(move |index| {
            let offset = index * piece_bytes;
            VaRange::new(DeviceAddress(start.0 + offset), piece_bytes.min(size_bytes - offset))
        })
    }

    /// CAST: pieces of memory that exists on one machine.
    fn count(&self, piece_bytes: u64) -> usize {
        usize::try_from(self.range.size_bytes.div_ceil(piece_bytes)).unwrap_or(usize::MAX)
    }
}

impl<D: Driver> Still<'_, D> {
    /// See [`super::Quiesced::survey`].
    pub(super) fn survey(&self, rows: &Rows) -> (Survey, StepLog) {
        let mut log = StepLog::default();
        let mut survey = Survey::default();
        if !self.pool.copies.are_changes_detected() {
            return (survey, log);
        }
        let all = self.to_look_at(rows);
        if all.is_empty() {
            return (survey, log);
        }
        let piece_bytes = self.pool.copies.piece_bytes().get();
        let looked = log.timed("fingerprint", |log| {
            self.pool.deferred.settle()?;
            self.look_at(log, &all, piece_bytes, &mut survey)
        });
        if let Err(error) = looked {
            survey.clear();
            log.notes.push(format!(
                "what is zero or unchanged could not be told, and everything is copied: {error}"
            ));
        }
        (survey, log)
    }

    /// Lists the allocations that are saved, by device, each with a range where a kernel may read it. An allocation
    /// without such a range is saved as a whole.
    fn to_look_at(&self, rows: &Rows) -> BTreeMap<DeviceOrdinal, Vec<Looked>> {
        let ledger = self.pool.ledger();
        let is_saved = |row: &&Row| row.backing().has_contents() && row.is_kept();
        let mut all: BTreeMap<DeviceOrdinal, Vec<Looked>> = BTreeMap::new();
        for row in ledger.rows.among(rows).filter(is_saved) {
            let Some(device) = row.device().filter(|device| !self.pool.copies.is_refused(*device))
            else {
                continue;
            };
            let range = ledger.mappings.readable(row).filter(|range| {
                let is_even = |bytes: u64| bytes.is_multiple_of(WORD_BYTES);
                is_even(range.start.0) && is_even(range.size_bytes)
            });
            if let Some(range) = range.filter(|range| range.size_bytes == row.size_bytes()) {
                all.entry(device).or_default().push(Looked { row: row.handle(), range });
            }
        }
        all
    }

    fn look_at(
        &self,
        log: &mut StepLog,
        all: &BTreeMap<DeviceOrdinal, Vec<Looked>>,
        piece_bytes: u64,
        survey: &mut Survey,
    ) -> PoolResult<()> {
        let mut streams = DeviceStreams::new(&self.pool.deferred);
        let mut askers = Vec::new();
        let mut slots = 0;
        for (&device, looked) in all {
            streams.of(device)?;
            let asker = Asker::new(device, looked, piece_bytes, slots);
            slots = asker.halves[1].slots.end;
            askers.push(asker);
        }
        log.call();
        let mut pinned = Pinned::new(&self.pool.driver, slots * size_of::<PieceSlot>())?;
        let mut asked = Ok(());
        // All devices work simultaneously.
        while asked.is_ok() && askers.iter().any(|asker| !asker.is_over()) {
            asked = askers
                .iter_mut()
                .filter(|asker| !asker.is_over())
                .try_for_each(|asker| self.ask(log, asker, &mut pinned, streams.of(asker.device)?));
        }
        let finished = streams.finish_or_leave();
        if !self.pool.deferred.is_settled() {
            pinned.keep_for_good();
            return asked.and(finished);
        }
        asked?;
        finished?;
        for asker in askers.into_iter().filter(|asker| !asker.is_refused) {
            for (looked, values) in asker.looked.iter().zip(asker.answers.by_allocation) {
                let values = values.into();
                survey.insert(looked.row, Prints { piece_bytes, values });
            }
        }
        Ok(())
    }

    /// Takes the answers from the next half, and puts further questions there. The device answers these while the other
    /// half is next.
    fn ask(
        &self,
        log: &mut StepLog,
        asker: &mut Asker<'_>,
        pinned: &mut Pinned<D>,
        copies: &mut CopyStreams<'_, D>,
    ) -> PoolResult<()> {
        let half = &mut asker.halves[asker.turn];
        asker.turn = 1 - asker.turn;
        if let Some((count, stream)) = half.under_way.take() {
            copies.finish(stream)?;
            let answered = half.slots.start..half.slots.start + count;
            for slot in pinned.slots(answered) {
                asker.answers.take(slot.print());
            }
        }
        let own = pinned.slots(half.slots.clone());
        let mut count = 0;
        for (slot, piece) in own.iter_mut().zip(&mut asker.questions) {
            *slot = PieceSlot::asking(piece);
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let stream = copies.take()?;
        log.call();
        let questions = NonNull::from(&mut own[..count]);
        // SAFETY: the slots are pinned, and looked at again when the stream is done; the pieces are mapped and
        // readable by their device, and nothing is unmapped before that.
        let asked = unsafe { self.pool.driver.fingerprint(asker.device, questions, stream) };
        match asked {
            Ok(()) => half.under_way = Some((count, stream)),
            Err(error) => {
                let device = asker.device;
                asker.is_refused = true;
                // Memory may be available the next time.
                if !error.is_transient() {
                    self.pool.copies.refuse(device, error);
                }
                tracing::warn!(%error, device = device.0, "everything is copied");
                log.notes.push(format!(
                    "{device} does not tell what is zero or unchanged, and everything is copied: {error}"
                ));
            }
        }
        Ok(())
    }
}

/// The number of questions in one launch: a device needs a quarter of a millisecond and more for so many pieces of 64
/// KiB.
const ASKED_AT_ONCE: usize = 16 << 10;

/// The questions to one device, and its answers. The device answers one half of its slots while the other is read and
/// filled.
struct Asker<'a> {
    device: DeviceOrdinal,
    looked: &'a [Looked],
    questions: Box<dyn Iterator<Item = VaRange> + 'a>,
    answers: Answers,
    halves: [Half; 2],
    /// The half that is next.
    turn: usize,
    is_refused: bool,
}

/// One half of the slots, by their numbers.
struct Half {
    slots: Range<usize>,
    /// The number of questions under way, and their stream.
    under_way: Option<(usize, RawStream)>,
}

impl<'a> Asker<'a> {
    /// Makes the questions and answers of one device, with slots from `first` on.
    fn new(device: DeviceOrdinal, looked: &'a [Looked], piece_bytes: u64, first: usize) -> Self {
        let counts: Vec<_> = looked.iter().map(|looked| looked.count(piece_bytes)).collect();
        let each = counts.iter().sum::<usize>().div_ceil(2).min(ASKED_AT_ONCE);
        let half = |start| Half { slots: start..start + each, under_way: None };
        Self {
            device,
            looked,
            questions: Box::new(looked.iter().flat_map(move |looked| looked.pieces(piece_bytes))),
            answers: Answers::new(counts),
            halves: [half(first), half(first + each)],
            turn: 0,
            is_refused: false,
        }
    }

    fn is_over(&self) -> bool {
        self.is_refused || self.answers.are_complete()
    }
}

/// The fingerprints of each allocation. They arrive one after the other.
struct Answers {
    /// The number of fingerprints of each allocation.
    counts: Vec<usize>,
    by_allocation: Vec<Vec<Fingerprint>>,
    /// The allocation of the next fingerprint.
    next: usize,
}

impl Answers {
    fn new(counts: Vec<usize>) -> Self {
        let by_allocation = counts.iter().map(|count| Vec::with_capacity(*count)).collect();
        let mut answers = Self { counts, by_allocation, next: 0 };
        answers.pass_full();
        answers
    }

    fn take(&mut self, print: Fingerprint) {
        if let Some(open) = self.by_allocation.get_mut(self.next) {
            open.push(print);
        }
        self.pass_full();
    }

    fn pass_full(&mut self) {
        let is_full = |(open, count): (&Vec<_>, &usize)| open.len() >= *count;
        while self.by_allocation.get(self.next).zip(self.counts.get(self.next)).is_some_and(is_full)
        {
            self.next += 1;
        }
    }

    fn are_complete(&self) -> bool {
        self.next == self.counts.len()
    }
}
