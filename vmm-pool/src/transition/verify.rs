//! What would not be copied, compared byte by byte: for users who do not take a fingerprint's word.

#![expect(unsafe_code, reason = "starts copies through the driver")]

use std::ops::Range;

use memmap2::MmapMut;

use super::still::Still;
use crate::VirtualHandle;
use crate::copies::DeviceStreams;
use crate::driver::{DeviceOrdinal, Driver, VaRange};
use crate::error::{Describe, PoolResult};
use crate::journal::StepLog;
use crate::ledger::{Mapping, Rows, Survey, Wish};
use crate::store::{Extent, Located, Part, Pinned, Saved, Store, memory_refused};

/// What is compared in one piece.
const SCRATCH_LENGTH: usize = 8 << 20;

/// What is claimed of an allocation.
struct Claim {
    row: VirtualHandle,
    device: DeviceOrdinal,
    range: VaRange,
    /// Parts that hold what `saved` says.
    parts: Vec<Range<u64>>,
    saved: Saved,
}

impl<D: Driver> Still<'_, D> {
    /// Compares all that `survey` says is zero or unchanged. What is not so is forgotten, with its copy, so that it is
    /// copied as a whole.
    pub(super) fn verify(&self, log: &mut StepLog, rows: &Rows, survey: &mut Survey) {
        for claim in self.claims(rows, survey) {
            let compared = log.timed("verify", |log| self.first_difference(log, &claim));
            let about = match compared {
                Ok(None) => continue,
                Ok(Some(offset)) => {
                    let address = claim.range.start.0 + offset;
                    format!("the byte at {address:#x} differs from what its fingerprint says")
                }
                Err(error) => format!("contents could not be compared: {error}"),
            };
            tracing::error!(start = %claim.range.start, "{about}");
            log.notes.push(format!("{about}: the allocation is copied as a whole"));
            survey.forget(claim.row);
            self.pool.ledger().forget_copy(claim.row);
            if !self.pool.deferred.is_settled() {
                survey.clear();
                return;
            }
        }
    }

    fn claims(&self, rows: &Rows, survey: &Survey) -> Vec<Claim> {
        let ledger = self.pool.ledger();
        let mut claims = Vec::new();
        for row in ledger.rows_in(rows).filter(|row| row.is_resident()) {
            let (Some(fresh), Some(device)) = (survey.of(row.handle()), row.device()) else {
                continue;
            };
            let mut mappings = ledger.mappings_of(row);
            let location = row.prop().location;
            let readable = mappings.find(|mapping| mapping.is_readable_by_kernels(location));
            let Some(range) = readable.map(Mapping::range) else { continue };
            let parts = row.copied_parts();
            let before = row.backing().held_in(Store::Host);
            let wish = Wish::of(row.size_bytes(), &parts, Some(fresh), before);
            let changed = wish.changed.into_iter().map(|Range { start, end }| Extent {
                start,
                size_bytes: end - start,
                at: 0,
            });
            let copied = Saved { store: Store::Host, extents: changed.collect(), prints: None };
            // What is in none of the changes is claimed to be as it lies, or zero where it lies nowhere.
            let parts = parts.into_iter().flat_map(|part| {
                let parts = copied.parts_of(part).filter_map(|part| match part {
                    Part::Zeros(part) => Some(part),
                    Part::Stored(_) => None,
                });
                parts.collect::<Vec<_>>()
            });
            let parts = parts.collect();
            let saved = Saved { store: Store::Host, extents: wish.kept.into(), prints: None };
            claims.push(Claim { row: row.handle(), device, range, parts, saved });
        }
        claims
    }

    /// The first byte of the allocation, by offset, that is not what it is claimed to be.
    fn first_difference(&self, log: &mut StepLog, claim: &Claim) -> PoolResult<Option<u64>> {
        let mut streams = DeviceStreams::new(&self.pool.deferred);
        // Its context is current from here on: pinning takes one.
        streams.of(claim.device)?;
        let pinned = Pinned::new(&self.pool.driver, SCRATCH_LENGTH)?;
        // Not of the heap, which would keep it for the process's life.
        let expected = MmapMut::map_anon(SCRATCH_LENGTH);
        let mut expected = expected.map_err(memory_refused(SCRATCH_LENGTH as u64))?;
        for part in &claim.parts {
            let mut at = part.start;
            while at < part.end {
                let size_bytes = (part.end - at).min(SCRATCH_LENGTH as u64);
                let length = usize::try_from(size_bytes).unwrap_or(SCRATCH_LENGTH);
                let stream = streams.of(claim.device)?.take()?;
                let source = claim.range.part(&(at..at + size_bytes));
                log.call();
                // SAFETY: the source is mapped, and the scratch this comparison's own; both outlive the wait.
                let queued =
                    unsafe { self.pool.driver.copy_to_host(pinned.start(), source, stream) };
                let queued = queued.about(
                    || format!("comparing of {}", source.start),
                    size_bytes,
                    Some(claim.device),
                );
                let finished = streams.finish_or_leave();
                if !self.pool.deferred.is_settled() {
                    pinned.keep_for_good();
                    return queued.and(finished).map(|()| None);
                }
                queued.and(finished)?;
                let expected = &mut expected[..length];
                let located = self.pool.arena().locate(&claim.saved, at..at + size_bytes)?;
                Located::read(&located, expected)?;
                let found = pinned.bytes(length);
                if let Some(index) = differs_at(found, expected) {
                    return Ok(Some(at + index as u64));
                }
                at += size_bytes;
            }
        }
        Ok(None)
    }
}

/// The index of the first byte that differs.
fn differs_at(found: &[u8], expected: &[u8]) -> Option<usize> {
    if found == expected {
        return None;
    }
    found.iter().zip(expected).position(|(found, expected)| found != expected)
}
