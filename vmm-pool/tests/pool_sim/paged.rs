//! A window of a process whose memory is paged.

use std::sync::Arc;

use sublet_pager::{Pager, WindowSize};
use vmm_pool::HostBudget;
use vmm_pool::driver::sim::SimDriver;

use crate::process::SimPool;
use crate::stage::{DEVICE, UNIT, UNLIMITED};

/// The chunks of its addresses.
pub(crate) const WINDOW_CHUNKS: u64 = 32;

pub(crate) fn pager(
    pool: &SimPool,
    frames: u64,
    budget: impl Fn(u64) -> HostBudget + Send + Sync + 'static,
) -> Pager<SimDriver> {
    let size = WindowSize {
        window_bytes: WINDOW_CHUNKS * UNIT,
        chunk_bytes: UNIT,
        frames_bytes: frames * UNIT,
    };
    Pager::new(Arc::clone(pool.pool()), DEVICE, size, budget).expect("a window")
}

pub(crate) fn unlimited(_: u64) -> HostBudget {
    UNLIMITED
}
