//! What the devices say of the contents that a pause keeps, before anything is copied.

#![expect(unsafe_code, reason = "has devices read memory")]

use std::collections::BTreeMap;
use std::ptr::NonNull;

use super::still::Still;
use crate::VirtualHandle;
use crate::copies::CopyStreams;
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, PieceSlot, VaRange, WORD_BYTES};
use crate::error::PoolResult;
use crate::journal::StepLog;
use crate::ledger::{Mapping, Row, Selection, Survey};
use crate::report::Looking;
use crate::store::{Pinned, Prints};

/// An allocation to look at, where its device reads it.
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
    pub(super) fn survey(&self, selection: &Selection) -> (Survey, StepLog) {
        let mut log = StepLog::default();
        let pieces = self.pool.copies.pieces();
        let mut survey = Survey::new(pieces.finds_zeros, pieces.finds_unchanged);
        if !pieces.are_looked_for() {
            return (survey, log);
        }
        let all = self.to_look_at(selection);
        if all.is_empty() {
            return (survey, log);
        }
        let piece_bytes = pieces.piece_bytes.get();
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
        if pieces.is_verified {
            self.verify(&mut log, selection, &mut survey);
        }
        (survey, log)
    }

    /// What is saved, by device, where a kernel may read it. What has no such place is saved as a whole.
    fn to_look_at(&self, selection: &Selection) -> BTreeMap<DeviceOrdinal, Vec<Looked>> {
        let ledger = self.pool.ledger();
        let is_saved = |row: &&Row| {
            row.is_resident()
                && selection.has(row)
                && row.is_kept()
                && row.class().looking == Looking::On
        };
        let mut all: BTreeMap<DeviceOrdinal, Vec<Looked>> = BTreeMap::new();
        for row in ledger.rows().filter(is_saved) {
            let Some(device) = row.device().filter(|device| !self.pool.copies.is_refused(*device))
            else {
                continue;
            };
            let location = row.prop().location;
            let mut mappings = ledger.mappings_of(row);
            let readable = mappings.find(|mapping| mapping.is_readable_by_kernels(location));
            let range = readable.map(Mapping::range).filter(|range| {
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
        let count: usize = all.values().flatten().map(|looked| looked.count(piece_bytes)).sum();
        let mut streams: BTreeMap<DeviceOrdinal, CopyStreams<'_, D>> = BTreeMap::new();
        for &device in all.keys() {
            streams.insert(device, CopyStreams::open(&self.pool.deferred, device)?);
        }
        log.call();
        let mut pinned = Pinned::new(&self.pool.driver, count * size_of::<PieceSlot>())?;
        let asked = self.ask(log, all, piece_bytes, &mut pinned, &mut streams);
        let finished = self.wait_for_copies(&streams);
        if !self.pool.deferred.is_settled() {
            pinned.keep_for_good();
            return asked.map(drop).and(finished);
        }
        let told = asked?;
        finished?;
        let mut slots = &*pinned.slots();
        for (device, looked) in all {
            for looked in looked {
                let (own, rest) = slots.split_at(looked.count(piece_bytes).min(slots.len()));
                slots = rest;
                if told.contains(device) {
                    let values = own.iter().map(|slot| slot.print()).collect();
                    survey.insert(looked.row, Prints { piece_bytes, values });
                }
            }
        }
        Ok(())
    }

    /// Puts the questions into `pinned`, in the order of `all`, and has the devices answer them. Returns those that do.
    fn ask(
        &self,
        log: &mut StepLog,
        all: &BTreeMap<DeviceOrdinal, Vec<Looked>>,
        piece_bytes: u64,
        pinned: &mut Pinned<D>,
        streams: &mut BTreeMap<DeviceOrdinal, CopyStreams<'_, D>>,
    ) -> PoolResult<Vec<DeviceOrdinal>> {
        let mut slots = pinned.slots();
        let mut told = Vec::new();
        for (&device, looked) in all {
            let questions = looked.iter().flat_map(|looked| looked.pieces(piece_bytes));
            let count = looked.iter().map(|looked| looked.count(piece_bytes)).sum::<usize>();
            let (own, rest) = slots.split_at_mut(count.min(slots.len()));
            slots = rest;
            for (slot, piece) in own.iter_mut().zip(questions) {
                *slot = PieceSlot::asking(piece);
            }
            let Some(copies) = streams.get_mut(&device) else { continue };
            let stream = copies.take()?;
            log.call();
            // SAFETY: the slots are pinned, and looked at again when the stream is done; the pieces are mapped and
            // readable by their device, and nothing is unmapped before that.
            let asked = unsafe { self.pool.driver.fingerprint(device, NonNull::from(own), stream) };
            match asked {
                Ok(()) => told.push(device),
                Err(error) => {
                    // Memory may be there the next time.
                    if !error.is_transient() {
                        self.pool.copies.refuse(device, error);
                    }
                    tracing::warn!(%error, device = device.0, "everything is copied");
                    log.notes.push(format!(
                        "{device} does not tell what is zero or unchanged, and everything is copied: {error}"
                    ));
                }
            }
        }
        Ok(told)
    }
}
