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
use std::time::Instant;

use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{
    AccessDesc, AllocationProp, CudaDriver, DeviceAddress, DeviceOrdinal, Driver, VaRange,
};
use vmm_pool::{Class, Contents, HostBudget, Pool, Selection};

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
    let pool = Pool::new(Arc::new(driver), 4);
    pool.set_file_dir(dir);
    for _ in 0..total_bytes / BLOCK_BYTES {
        let class = Class { library: "rate", tag: "all".to_owned(), contents: Contents::File };
        let prop = AllocationProp::pinned_on(device);
        let handle = pool.create(BLOCK_BYTES, &prop, class)?;
        let range = VaRange::new(
            pool.driver().address_reserve(BLOCK_BYTES, 0, DeviceAddress(0))?,
            BLOCK_BYTES,
        );
        pool.map(range, 0, handle)?;
        pool.set_access(range, &[AccessDesc::read_write(device)])?;
    }
    let whole = Selection::Whole;
    for round in 1..=rounds {
        let saving = Instant::now();
        pool.save(&whole, HostBudget(None))?;
        let saved = saving.elapsed();
        pool.release_selected(&whole)?;
        pool.create_own(&whole)?;
        let restoring = Instant::now();
        pool.restore_own(&whole, usize::MAX)?;
        let restored = restoring.elapsed();
        drop(pool.commit_resume());
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
