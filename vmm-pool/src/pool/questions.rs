//! Questions about addresses, and calls that name all that they touch: neither waits for memory of somebody else's.

use std::sync::atomic::Ordering;

use super::Pool;
use crate::driver::{DeviceAddress, DeviceOrdinal, Driver, RawContext, VaRange};
use crate::gate::{Pass, Passage};
use crate::ledger::{Known, PlainMemory, Row, Sight};

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

impl<D: Driver> Pool<D> {
    /// Does the process run without some memory, since a pause by tag? One load.
    #[inline]
    pub fn runs_without_some(&self) -> bool {
        self.runs_without_some.load(Ordering::Relaxed)
    }

    /// Looks for memory that the process runs without, before the gate opens.
    pub(crate) fn note_what_is_away(&self) {
        let is_any = self.ledger().rows().any(Row::is_away_by_tag);
        self.runs_without_some.store(is_any, Ordering::SeqCst);
    }

    /// Memory in `range` that the process runs without, as long as the caller is inside: a call that touches it
    /// would fail, and the context with it.
    pub fn away_by_tag(&self, range: VaRange) -> Option<AwayByTag> {
        let ledger = self.ledger();
        let (mapping, row) = ledger.set_aside_in(range)?;
        Some(AwayByTag {
            tag: row.class().tag.clone(),
            range: mapping.range(),
            device: row.device(),
        })
    }

    /// Who can answer a question about `address` now. Passes no gate, and waits for nothing.
    pub fn who_knows(&self, address: DeviceAddress) -> Known {
        self.ledger().sight_of(address)
    }

    /// Has what was seen of `address` been there all the time since? Then what the driver has said of it in between
    /// is right.
    pub fn is_as_seen(&self, address: DeviceAddress, sight: Sight) -> bool {
        self.ledger().sight_of(address) == Known::Here(sight)
    }

    /// The range that the driver would report for `address`, where the driver cannot or would say something else:
    /// mappings whose memory is away, and blocks that are larger than was requested. Passes no gate.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn range_of(&self, address: DeviceAddress) -> Option<VaRange> {
        self.ledger().range_of(address)
    }

    /// The context in which the block at `address` was allocated.
    pub fn block_context(&self, address: DeviceAddress) -> Option<RawContext> {
        self.ledger().mapping_at(address)?.context()
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

    /// Takes the plain memory of `context`, which is about to be ended, from it: [`crate::Entered::plain_memory_ends`] or
    /// [`Pool::plain_memory_stays`] comes next. Nobody finds it by the context's value from now on, which may be another context's immediately.
    /// No streams of ours are left in it either. No step of a pause or resume may be under way.
    ///
    /// # Driver calls
    /// `cuStreamDestroy`, for streams of all contexts.
    #[doc(alias = "cuCtxDestroy")]
    pub fn take_plain_memory(&self, context: RawContext) -> PlainMemory {
        self.deferred.end_streams();
        self.ledger().take_plain_memory(context)
    }

    /// `context` lives on after all, with what was taken from it.
    pub fn plain_memory_stays(&self, context: RawContext, taken: PlainMemory) {
        self.ledger().give_plain_memory_back(context, taken);
    }

    /// Notes that the block that begins at `address` was allocated in `context`.
    pub fn set_block_context(&self, address: DeviceAddress, context: RawContext) {
        self.ledger().set_context(address.0, context);
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
        let is_any_away = {
            let ledger = self.ledger();
            touched.iter().any(|range| ledger.is_any_away(*range))
        };
        if !is_any_away {
            return pass;
        }
        drop(pass);
        self.gate().pass_for(what, Passage::Use)
    }
}
