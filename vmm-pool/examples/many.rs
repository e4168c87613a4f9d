//! How long a pause and a resume of many allocations take, as the ledger and the steps cost it: on the simulated driver,
//! whose calls take no time of their own.
//!
//! ```text
//! cargo run --release -p vmm-pool --features sim --example many -- COUNT ROUNDS
//! ```
//!
//! Prints one line a round: milliseconds of the pause and of the resume.

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AccessDesc, AllocationProp, DeviceAddress, DeviceOrdinal, Driver, VaRange};
use vmm_pool::{
    Away, Class, Contents, Copies, Failed, FromOffloaded, HostBudget, Pool, Schedule, Selection,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().ok_or("how many allocations?")?.parse()?;
    let rounds: u32 = arguments.next().ok_or("how many rounds?")?.parse()?;
    let device = DeviceOrdinal(0);
    let node = SimNode::private(&[count * GRANULARITY_BYTES]);
    let driver = SimDriver::new(node.map_err(|e| format!("{e:?}"))?, SimOptions::default());
    driver.make_current(device)?;
    let (pool, mut keeper) = Pool::new(Arc::new(driver), 4, Vec::new);
    for _ in 0..count {
        // Nothing is copied, so that what is left is the tables and the calls.
        let class = Class { library: "many", tag: String::new(), contents: Contents::Discard };
        let entered = pool.enter();
        let handle =
            entered.create(GRANULARITY_BYTES, &AllocationProp::pinned_on(device), class)?;
        let start = pool.driver().address_reserve(GRANULARITY_BYTES, 0, DeviceAddress(0))?;
        let range = VaRange::new(start, GRANULARITY_BYTES);
        entered.map(range, 0, handle)?;
        entered.set_access(range, &[AccessDesc::read_write(device)])?;
    }
    let soon = || Instant::now() + Duration::from_mins(1);
    for _ in 0..rounds {
        let pausing = Instant::now();
        let draining = keeper.close().map_err(Failed::into_error)?;
        let drained = draining.drain(soon(), &crossbeam_channel::never());
        let (quiesced, _) = drained.map_err(Failed::into_error)?;
        let prepared = quiesced.prepare(
            Selection::Whole,
            &[],
            Copies::All,
            |_| HostBudget(None),
            Schedule::SaveFirst,
        );
        let (prepared, _) = prepared.map_err(Failed::into_error)?;
        let (paused, _) =
            prepared.depart().release(Schedule::SaveMeanwhile).map_err(Failed::into_error)?;
        let paused_keeper = paused.end();
        let paused = pausing.elapsed();
        let resuming = Instant::now();
        let shut =
            paused_keeper.shut::<FromOffloaded>(soon(), || false).map_err(Failed::into_error)?;
        let created = shut.create_own(Away::Whole);
        let (arriving, _) = created.map_err(Failed::into_error)?;
        let (returning, _) = arriving.restore_rest(usize::MAX).map_err(Failed::into_error)?;
        let (restored, _) = returning.map_imports().map_err(Failed::into_error)?;
        let (running, spare) = restored.commit();
        keeper = running.end();
        drop(spare);
        let resumed = resuming.elapsed();
        let (pause_ms, resume_ms) = (paused.as_secs_f64() * 1e3, resumed.as_secs_f64() * 1e3);
        writeln!(std::io::stdout(), "{pause_ms:.1} {resume_ms:.1}")?;
    }
    Ok(())
}
