//! `bench --scaling`: how driver calls and CPU time of a pause grow with allocations and processes, on the simulated driver.

use std::fs;

use crate::workspace::Workspace;
use crate::{Outcome, build, process};

const JOB: &str = "benchmarks/jobs/scaling_job.py";

/// Builds what users run, in release, and has the job count. The record is written beside the build.
pub(crate) fn run(workspace: &Workspace) -> Outcome {
    let shipped = ["--release", "--package", "sublet-ffi", "--package", "sublet-cli"];
    let shipped = build::build(workspace, &shipped)?;
    // A build of its own: in one with the others it would turn the simulated driver on in the preload object.
    let simulated = build::build(workspace, &["--release", "--package", "simcuda"])?;
    let place = workspace.target.join("scaling");
    let [command, library, driver] = ["sublet", "libsublet.so", "simcuda/libcuda.so.1"];
    build::install(shipped.binary("sublet")?, &place.join(command))?;
    build::install(shipped.library("sublet")?, &place.join(library))?;
    build::install(simulated.library("cuda")?, &place.join(driver))?;

    let record = place.join("scaling.json");
    if record.exists() {
        fs::remove_file(&record)?;
    }
    let mut job = workspace.command("python3");
    job.arg(JOB).args(["--profile", "release", "--out"]).arg(&record);
    job.arg("--logs").arg(place.join("logs.txt"));
    job.env("SUBLET_BIN", place.join(command));
    job.env("LD_LIBRARY_PATH", place.join("simcuda"));
    job.env("SUBLET_COMMIT", process::commit(workspace)?);
    process::run(&mut job)?;
    println!("{}: copy it to {} to record it", record.display(), crate::bench::RESULTS);
    Ok(())
}
