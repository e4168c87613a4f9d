//! How fast do contents go to a file and back? Prints bytes a second for each of some rounds.
//!
//! On the first GPU where there is one, else on a simulated device, which costs processor time of its own: compare
//! with a run in `/dev/shm` then. What the disk itself does, `dd` says: `bs=64M conv=fdatasync` for writing.
//!
//! ```text
//! cargo run --release -p vmm-pool --features sim --example file_rate -- DIRECTORY GIB ROUNDS
//! ```

#![expect(clippy::print_stdout, reason = "a program whose output is its report")]

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, CudaDriver, DeviceAddress, DeviceOrdinal, Driver, VaRange,
};
use vmm_pool::{
    Away, Class, Contents, Copies, Failed, FromOffloaded, HostBudget, Pool, Schedule, Selection,
};

const BLOCK_BYTES: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().ok_or("which directory?")?);
    let gib: u64 = arguments.next().ok_or("how many GiB?")?.parse()?;
    let rounds: u32 = arguments.next().ok_or("how many rounds?")?.parse()?;
    vmm_pool::check_file_dir(&dir)?;

    let total_bytes = gib << 30;
    if let Ok(driver) = CudaDriver::load() {
        return run(driver, dir, total_bytes, rounds);
    }
    let node = SimNode::private(&[total_bytes]);
    let node = node.map_err(|error| format!("no devices: {error:?}"))?;
    run(SimDriver::new(node, SimOptions::default()), dir, total_bytes, rounds)
}

fn run<D: Driver>(
    driver: D,
    dir: PathBuf,
    total_bytes: u64,
    rounds: u32,
) -> Result<(), Box<dyn Error>> {
    let device = DeviceOrdinal(0);
    driver.make_current(device)?;
    let (pool, mut keeper) = Pool::new(Arc::new(driver), 4, Vec::new);
    pool.set_file_dir(dir);
    for _ in 0..total_bytes / BLOCK_BYTES {
        let class = Class { library: "rate", tag: "all".to_owned(), contents: Contents::File };
        let prop = AllocationProp::pinned_on(device);
        let entered = pool.enter();
        let handle = entered.create(BLOCK_BYTES, &prop, class)?;
        let range = VaRange::new(
            pool.driver().address_reserve(BLOCK_BYTES, 0, DeviceAddress(0))?,
            BLOCK_BYTES,
        );
        entered.map(range, 0, handle)?;
        entered.set_access(range, &[AccessDesc::read_write(device)])?;
    }
    let soon = || Instant::now() + Duration::from_mins(1);
    for round in 1..=rounds {
        let draining = keeper.close().map_err(Failed::into_error)?;
        let drained = draining.drain(soon(), &crossbeam_channel::never());
        let (quiesced, _) = drained.map_err(Failed::into_error)?;
        let saving = Instant::now();
        let prepared = quiesced.prepare(
            Selection::Whole,
            &[],
            Copies::All,
            |_| HostBudget(None),
            Schedule::SaveFirst,
        );
        let (prepared, _) = prepared.map_err(Failed::into_error)?;
        let saved = saving.elapsed();
        let (paused, _) =
            prepared.depart().release(Schedule::SaveMeanwhile).map_err(Failed::into_error)?;
        let shut =
            paused.end().shut::<FromOffloaded>(soon(), || false).map_err(Failed::into_error)?;
        let (arriving, _) = shut.create_own(Away::Whole).map_err(Failed::into_error)?;
        let restoring = Instant::now();
        let (returning, _) = arriving.restore_rest(usize::MAX).map_err(Failed::into_error)?;
        let restored = restoring.elapsed();
        let (back, _) = returning.map_imports().map_err(Failed::into_error)?;
        let (running, spare) = back.commit();
        keeper = running.end();
        drop(spare);
        // CAST: a figure for people.
        #[expect(clippy::cast_precision_loss, reason = "bytes as gigabytes")]
        let gigabytes = total_bytes as f64 / 1e9;
        println!(
            "round {round}: out {:.2} GB/s, in {:.2} GB/s",
            gigabytes / saved.as_secs_f64(),
            gigabytes / restored.as_secs_f64()
        );
    }
    Ok(())
}
