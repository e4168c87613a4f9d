//! What it costs a thread to show a call's addresses to a pager, when all that the call uses is on the device: on the simulated
//! driver, whose calls take no time of a device.
//!
//! ```text
//! cargo run --release -p vmm-pool --features sim --example look_rate
//! ```
//!
//! Prints one line for each way to use memory: the median and the 99th percentile of one call, in nanoseconds.

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{DeviceAddress, DeviceOrdinal, Driver, VaRange};
use vmm_pool::paging::{In, Pager, WindowSize};
use vmm_pool::{HostBudget, Pool};

const CHUNKS: u64 = 64;
const LIMIT: Duration = Duration::from_secs(10);
const CALLS: usize = 200_000;

fn main() -> Result<(), Box<dyn Error>> {
    let device = DeviceOrdinal(0);
    let node = SimNode::private(&[2 * CHUNKS * GRANULARITY_BYTES]);
    let driver = SimDriver::new(node.map_err(|e| format!("{e:?}"))?, SimOptions::default());
    driver.make_current(device)?;
    let (pool, _keeper) = Pool::new(Arc::new(driver), 4, Vec::new);
    let size = WindowSize {
        window_bytes: CHUNKS * GRANULARITY_BYTES,
        chunk_bytes: GRANULARITY_BYTES,
        frames_bytes: CHUNKS * GRANULARITY_BYTES,
    };
    let budget = |_| HostBudget(None);
    for (name, count, span_bytes) in [
        ("one chunk, again and again", 1, GRANULARITY_BYTES),
        ("six chunks, again and again", 1, 6 * GRANULARITY_BYTES),
        (
            "40 spans of three quarters of a chunk, one after the other",
            40,
            GRANULARITY_BYTES / 4 * 3,
        ),
    ] {
        let pager = Pager::new(Arc::clone(&pool), device, size, budget)?;
        pager.look_for_uses()?;
        let stream = pool.driver().stream_create()?;
        let spans: Result<Vec<_>, _> = (0..count).map(|_| pager.alloc(span_bytes)).collect();
        let words: Vec<_> =
            spans?.iter().map(|start| VaRange::new(DeviceAddress(start.0 + 64), 1)).collect();
        let mut took = Vec::with_capacity(CALLS);
        for index in 0..CALLS + CALLS / 10 {
            let word = words[index % words.len()];
            let began = Instant::now();
            if let Some(touched) = pager.begin_call(&[word], In::Stream(stream), LIMIT)? {
                pager.end_call(&touched);
            }
            took.push(began.elapsed());
        }
        // Those before made the memory.
        let mut took = took.split_off(CALLS / 10);
        took.sort_unstable();
        let (median, late) = (took[took.len() / 2], took[took.len() / 100 * 99]);
        writeln!(std::io::stdout(), "{name}: {} {}", median.as_nanos(), late.as_nanos())?;
        drop(pager);
    }
    Ok(())
}
