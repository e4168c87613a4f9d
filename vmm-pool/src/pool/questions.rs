//! Questions about addresses, and calls that name all memory they touch: neither waits for other memory.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::{Holdings, Pool};
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, RawContext, VaRange};
use crate::gate::{Pass, Passage};
use crate::ledger::{Block, Known, Row, Sight};

/// Memory that the process runs without, since a pause by tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwayByTag {
    /// Its tag.
    pub tag: String,
    /// The mapping of the memory.
    pub range: VaRange,
    /// The device of the memory.
    pub device: Option<DeviceOrdinal>,
}

impl Holdings {
    /// Returns memory in `range` that the process runs without. A call that touches it would fail, and its context with
    /// it. The answer is valid while the caller is inside.
    pub fn away_by_tag(&self, range: VaRange) -> Option<AwayByTag> {
        let ledger = self.ledger();
        let touched = ledger.mappings.touched_by(range);
        let mut rows =
            touched.filter_map(|found| Some((found, ledger.rows.get(found.allocation())?)));
        let (mapping, row) = rows.find(|(_, row)| row.is_away_by_tag())?;
        let (tag, range, device) = (row.class().tag.clone(), mapping.range(), row.device());
        Some(AwayByTag { tag, range, device })
    }

    /// Has this pool mappings in `range`, on their devices or not?
    pub fn has_mapping_in(&self, range: VaRange) -> bool {
        self.ledger().mappings.overlapping(range).next().is_some()
    }

    /// Returns the source that can answer a question about `address` now. Passes no gate.
    pub fn who_knows(&self, address: DeviceAddress) -> Known {
        self.ledger().sight_of(address)
    }

    /// Has the mapping of `sight` been in the page tables all the time since? Then the driver's answers about `address`
    /// in between are right.
    pub fn is_as_seen(&self, address: DeviceAddress, sight: Sight) -> bool {
        self.who_knows(address) == Known::Here(sight)
    }

    /// Returns the range that the driver would report for `address`, if the driver cannot answer or would answer
    /// differently: mappings whose memory is off its device or a host file, and blocks that are larger than requested.
    /// Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        let ledger = self.ledger();
        let (mapping, row) = ledger.mapped_at(address)?;
        if let Some(size_bytes) = row.block_size_bytes() {
            return Some(VaRange::new(mapping.range().start, size_bytes));
        }
        let is_of_driver = mapping.standing().is_some() && !row.is_of_host_file();
        (!is_of_driver).then(|| mapping.range())
    }

    /// Returns the block that starts at `address`; none for a block that [`crate::Entered::block_open`] opened.
    pub fn block_at(&self, address: DeviceAddress) -> Option<Block> {
        let ledger = self.ledger();
        let mapping = ledger.mappings.get(address.0).filter(|found| found.opened() == 0)?;
        ledger.rows.get(mapping.allocation())?.block_size_bytes()?;
        Some(Block::of(mapping))
    }

    /// Returns the context in which the block at `address` was allocated.
    pub fn block_context(&self, address: DeviceAddress) -> Option<RawContext> {
        self.ledger().mappings.at(address)?.context()
    }

    /// Records that the block at `address` was allocated in `context`.
    pub fn set_block_context(&self, address: DeviceAddress, context: RawContext) {
        self.ledger().mappings.set_context(address.0, context);
    }

    /// Returns the device of the block that holds `address`, and the context in which it was allocated, if that is
    /// known.
    pub fn block_place(
        &self,
        address: DeviceAddress,
    ) -> Option<(DeviceOrdinal, Option<RawContext>)> {
        let ledger = self.ledger();
        let (mapping, row) = ledger.mapped_at(address)?;
        row.block_size_bytes()?;
        Some((row.device()?, mapping.context()))
    }

    /// Returns the device of the block that starts at `address`.
    pub fn block_device(&self, address: DeviceAddress) -> Option<DeviceOrdinal> {
        let ledger = self.ledger();
        ledger.rows.get(ledger.mappings.get(address.0)?.allocation())?.device()
    }

    /// Returns the devices of all blocks that are on their devices now.
    pub fn block_devices(&self) -> BTreeSet<DeviceOrdinal> {
        let ledger = self.ledger();
        let blocks = ledger.rows.iter().filter(|row| row.block_size_bytes().is_some());
        blocks.filter(|row| row.is_resident()).filter_map(Row::device).collect()
    }
}

impl<D: Driver> Pool<D> {
    /// Does the process run without some memory, since a pause by tag? Costs one load.
    #[inline]
    pub fn runs_without_some(&self) -> bool {
        self.runs_without_some.load(Ordering::Relaxed)
    }

    /// Records whether the process runs without some memory, before the gate opens.
    pub(crate) fn note_what_is_away(&self) {
        let is_any = self.ledger().rows.iter().any(Row::is_away_by_tag);
        self.runs_without_some.store(is_any, Ordering::SeqCst);
    }

    /// Passes the gate for the call `what`, which touches only the addresses `touched`. While the process is paused,
    /// such a call need not wait if no pause moves that memory. This is so if the addresses are not the pool's, or if a
    /// pause leaves their memory in place. Otherwise as [`Passage::Use`].
    #[inline]
    pub fn pass_touching(&self, what: &'static str, touched: &[VaRange]) -> Pass<'_> {
        let pass = self.gate().pass_for(what, Passage::GiveUp);
        if pass.is_offloaded() { self.pass_if_there(pass, what, touched) } else { pass }
    }

    #[cold]
    fn pass_if_there<'a>(
        &'a self,
        pass: Pass<'a>,
        what: &'static str,
        touched: &[VaRange],
    ) -> Pass<'a> {
        let ledger = self.ledger();
        if !touched.iter().any(|range| ledger.mappings.is_any_away(*range)) {
            return pass;
        }
        drop((ledger, pass));
        self.gate().pass_for(what, Passage::Use)
    }
}
