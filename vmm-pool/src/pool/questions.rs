//! Questions about addresses, and calls that name all that they touch: neither waits for memory of somebody else's.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::{Holdings, Pool};
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, RawContext, VaRange};
use crate::gate::{Pass, Passage};
use crate::ledger::{Block, Known, Row, Sight};

/// Memory that its process runs without, since a pause by tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwayByTag {
    /// Its tag.
    pub tag: String,
    /// The mapping that was asked about.
    pub range: VaRange,
    /// The device that it belongs to.
    pub device: Option<DeviceOrdinal>,
}

impl Holdings {
    /// Memory in `range` that the process runs without, as long as the caller is inside: a call that touches it
    /// would fail, and the context with it.
    pub fn away_by_tag(&self, range: VaRange) -> Option<AwayByTag> {
        let ledger = self.ledger();
        let touched = ledger.mappings.touched_by(range);
        let mut rows =
            touched.filter_map(|found| Some((found, ledger.rows.get(found.allocation())?)));
        let (mapping, row) = rows.find(|(_, row)| row.is_away_by_tag())?;
        let (tag, range, device) = (row.class().tag.clone(), mapping.range(), row.device());
        Some(AwayByTag { tag, range, device })
    }

    /// Is anything of `range` mapped by this pool, here or away?
    pub fn has_mapping_in(&self, range: VaRange) -> bool {
        self.ledger().mappings.overlapping(range).next().is_some()
    }

    /// The side that can answer a question about `address` now. Passes no gate.
    pub fn who_knows(&self, address: DeviceAddress) -> Known {
        self.ledger().sight_of(address)
    }

    /// Has what was seen of `address` been there all the time since? Then what the driver has said of it in between
    /// is right.
    pub fn is_as_seen(&self, address: DeviceAddress, sight: Sight) -> bool {
        self.who_knows(address) == Known::Here(sight)
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else: mappings
    /// whose memory is away or a host file, and blocks that are larger than was requested. Passes no gate.
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

    /// The block that starts at `address`; none for one that [`crate::Entered::block_open`] opened.
    pub fn block_at(&self, address: DeviceAddress) -> Option<Block> {
        let ledger = self.ledger();
        let mapping = ledger.mappings.get(address.0).filter(|found| found.opened() == 0)?;
        ledger.rows.get(mapping.allocation())?.block_size_bytes()?;
        Some(Block::of(mapping))
    }

    /// The context in which the block at `address` was allocated.
    pub fn block_context(&self, address: DeviceAddress) -> Option<RawContext> {
        self.ledger().mappings.at(address)?.context()
    }

    /// Notes that the block that begins at `address` was allocated in `context`.
    pub fn set_block_context(&self, address: DeviceAddress, context: RawContext) {
        self.ledger().mappings.set_context(address.0, context);
    }

    /// The device of the block that holds `address`, and the context in which it was allocated, if that is known.
    pub fn block_place(
        &self,
        address: DeviceAddress,
    ) -> Option<(DeviceOrdinal, Option<RawContext>)> {
        let ledger = self.ledger();
        let (mapping, row) = ledger.mapped_at(address)?;
        row.block_size_bytes()?;
        Some((row.device()?, mapping.context()))
    }

    /// The device of the block that starts at `address`.
    pub fn block_device(&self, address: DeviceAddress) -> Option<DeviceOrdinal> {
        let ledger = self.ledger();
        ledger.rows.get(ledger.mappings.get(address.0)?.allocation())?.device()
    }

    /// The devices that blocks lie on, other than those that are away.
    pub fn block_devices(&self) -> BTreeSet<DeviceOrdinal> {
        let ledger = self.ledger();
        let blocks = ledger.rows.iter().filter(|row| row.block_size_bytes().is_some());
        blocks.filter(|row| row.is_resident()).filter_map(Row::device).collect()
    }
}

impl<D: Driver> Pool<D> {
    /// Does the process run without some memory, since a pause by tag? One load.
    #[inline]
    pub fn runs_without_some(&self) -> bool {
        self.runs_without_some.load(Ordering::Relaxed)
    }

    /// Looks for memory that the process runs without, before the gate opens.
    pub(crate) fn note_what_is_away(&self) {
        let is_any = self.ledger().rows.iter().any(Row::is_away_by_tag);
        self.runs_without_some.store(is_any, Ordering::SeqCst);
    }

    /// Goes in for the call `what`, which touches these addresses and nothing else. While all memory of the process is away that
    /// can be, such a call need not wait where its addresses are not the pool's, or in what a pause leaves in place:
    /// nothing that a pause or resume moves is touched. Otherwise as [`Passage::Use`].
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
