//! The proof that nothing of the application's touches the memory that a step moves.

use super::quiesced::{Quiesced, ShutGate};
use crate::VirtualHandle;
use crate::driver::{Driver, RawEvent};
use crate::error::{Describe, PoolResult};
use crate::pool::{Entered, Pool, Use};

/// While it lives, no call of the application's is under way, and no work of its on a device can touch the memory
/// that is moved. It covers all memory of the process. That of a part is a [`StillChunk`].
pub(super) struct Still<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
}

impl<'a, D: Driver> Still<'a, D> {
    /// The gate is shut, and the devices have nothing left to do.
    pub(super) fn drained(quiesced: &'a Quiesced<D>) -> Self {
        Self { pool: quiesced.pool() }
    }

    /// The gate has been shut since before the memory came back, so that nothing has been launched that knows it. For
    /// steps that touch no other memory.
    pub(super) fn not_touched_yet(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }

    /// What a proof that is dropped has moved: it was drained, or not touched yet, when that began.
    pub(super) fn of_dropped(shut: &'a ShutGate<D>) -> Self {
        Self { pool: shut.pool() }
    }
}

/// The same of one chunk of a window, while the process runs. No pause or resume moves it meanwhile: its maker is past the
/// gate. Its methods are about this chunk alone.
pub(crate) struct StillChunk<'a, D: Driver> {
    pub(super) pool: &'a Pool<D>,
    pub(super) row: VirtualHandle,
}

impl<'a, D: Driver> StillChunk<'a, D> {
    /// Asks the driver whether every use of the chunk is over: `uses` are the events behind each of them and behind
    /// copies of it, on every stream. The caller gives the chunk to nobody before this is dropped. `None` if one is not
    /// over, or if it is no chunk on its device.
    ///
    /// # Errors
    /// [`crate::PoolError::Driver`].
    ///
    /// # Driver calls
    /// `cuEventQuery` for each.
    pub(crate) fn of(
        entered: &'a Entered<'_, D, Use>,
        row: VirtualHandle,
        uses: &[RawEvent],
    ) -> PoolResult<Option<Self>> {
        let pool = entered.pool;
        for &event in uses {
            let is_over = pool.driver.event_is_done(event);
            if !is_over.about(|| "a use of paged memory".to_owned(), 0, None)? {
                return Ok(None);
            }
        }
        let is_chunk = pool
            .ledger()
            .row(row)
            .is_some_and(|row| row.backing().is_chunk() && row.backing().is_at_rest());
        Ok(is_chunk.then_some(Self { pool, row }))
    }

    /// Of a chunk that is away, so that nothing can touch it. `None` if it is not.
    pub(crate) fn away(entered: &'a Entered<'_, D, Use>, row: VirtualHandle) -> Option<Self> {
        let pool = entered.pool;
        let is_away = pool
            .ledger()
            .row(row)
            .is_some_and(|row| row.backing().is_chunk() && row.is_set_aside());
        is_away.then_some(Self { pool, row })
    }
}
