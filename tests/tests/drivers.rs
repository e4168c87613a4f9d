//! Drivers that Sublet cannot work with, and processes that it must not mix.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;

use sublet_sim_driver::conformance::{Limits, cases};
use sublet_tests::{Files, JobOptions, MIB, Outcome, Stage};
use tenants::identity::TenantName;
use tenants::keep;
use tenants::member::{Member, MemberConfig};
use vmm_pool::driver::CudaDriver;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};

const CAPACITIES: [u64; 2] = [128 * MIB; 2];

fn runs_native_and_says(variable: (&str, &str), reason: &str) -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let options = JobOptions { is_plain: true, ..JobOptions::new("train", 2) };
    let options = options.with("SIMCUDA_PROGRAM_LOOKUP", "dlsym").with(variable.0, variable.1);
    let mut job = stage.job(&options)?;
    job.all("step 2")?;
    job.verify()?;
    for rank in &job.ranks {
        rank.complained("this process is not under Sublet")?;
        rank.complained(reason)?;
        let errors = rank.stderr();
        assert_eq!(errors.lines().count(), 1, "said more than once: {errors}");
    }
    let ran = stage.sublet(&["pause", "train"])?.exited(1)?;
    assert!(ran.stderr.contains("train"), "{ran:#?}");
    job.all("step 1")?;
    job.verify()?;
    job.exit()
}

#[test]
fn driver_without_virtual_memory_runs_the_job_as_without_sublet() -> Outcome {
    runs_native_and_says(("SIMCUDA_NO_VMM", "1"), "virtual memory management")
}

#[test]
fn driver_older_than_12_0_runs_the_job_as_without_sublet() -> Outcome {
    runs_native_and_says(("SIMCUDA_DRIVER_VERSION", "11080"), "12.0")
}

#[test]
fn processes_of_different_versions_are_named_and_left_alone() -> Outcome {
    let (stage, job) = Stage::with_train(&CAPACITIES, 2)?;
    let config = MemberConfig {
        host_limits: || keep::limits(None),
        ..MemberConfig::new(
            stage.run_dir().clone(),
            TenantName::new("train")?,
            "a process with another libsublet",
            "9.9.9",
        )
    };
    let node = SimNode::open(stage.node_path())?;
    let stranger = Member::join(config, Arc::new(SimDriver::new(node, SimOptions::default())))?;
    let ran = stage.sublet(&["pause", "train"])?.exited(1)?;
    assert!(ran.stderr.contains("different versions of Sublet"), "{ran:#?}");
    assert!(ran.stderr.contains("9.9.9"), "{ran:#?}");
    stranger.leave();
    job.works_and_exits()
}

#[test]
fn socket_path_that_is_too_long_is_said_before_the_job_starts() -> Outcome {
    let stage = Stage::new(&CAPACITIES)?;
    let long = stage.run_dir_path().join("d".repeat(90));
    std::fs::create_dir_all(stage.run_dir_path())?;
    let mut command = stage.command(&stage.files().sublet);
    command.env("SUBLET_RUN_DIR", &long).args(["run", "--tenant", "train", "--library"]);
    command.arg(&stage.files().preload).args(["--", "true"]);
    let output = command.output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("SUBLET_RUN_DIR") && errors.contains("107"), "{errors}");
    Ok(())
}

/// In a process of its own, which finds the simulated library by the driver's name.
#[test]
fn the_class_of_the_real_driver_conforms_on_the_simulated_library() -> Outcome {
    let ran = Command::new(std::env::current_exe()?)
        .args(["--exact", "--ignored", "conforms"])
        .env("LD_LIBRARY_PATH", Files::from_environment()?.simcuda_dir)
        .env_remove("SIMCUDA_NODE")
        .output()?;
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && text.contains("1 passed"), "{text}");
    Ok(())
}

#[test]
#[ignore = "the test above runs it in a process that has a driver"]
fn conforms() {
    let driver = CudaDriver::load().unwrap();
    let limits = Limits { free_tolerance_bytes: 0 };
    let mut all = cases::<CudaDriver>();
    all.retain(|case| catch_unwind(AssertUnwindSafe(|| (case.run)(&driver, limits))).is_err());
    let failed: Vec<_> = all.iter().map(|case| case.name).collect();
    assert!(failed.is_empty(), "failed: {failed:?}");
}
