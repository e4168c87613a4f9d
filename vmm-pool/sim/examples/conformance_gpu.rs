//! Runs the conformance list on the real driver and prints one line per case.
//!
//! ```text
//! cargo run -p sublet-sim-driver --example conformance_gpu
//! ```

#![expect(clippy::print_stdout, reason = "a program whose output is its report")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use sublet_driver::CudaDriver;
use sublet_sim_driver::conformance::{Limits, cases};

/// The tolerance: page tables and other tenants of the device change its free memory a little.
const FREE_TOLERANCE_BYTES: u64 = 16 << 20;

fn main() -> ExitCode {
    let driver = match CudaDriver::load() {
        Ok(driver) => driver,
        Err(error) => {
            println!("no driver: {error:?}");
            return ExitCode::FAILURE;
        }
    };
    let limits = Limits { free_tolerance_bytes: FREE_TOLERANCE_BYTES };
    let (mut passed, mut failed) = (0, 0);
    for case in cases::<CudaDriver>() {
        if catch_unwind(AssertUnwindSafe(|| (case.run)(&driver, limits))).is_ok() {
            passed += 1;
            println!("ok      {}", case.name);
        } else {
            failed += 1;
            println!("FAILED  {}", case.name);
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
