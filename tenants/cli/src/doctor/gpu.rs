//! The driver and its devices.

use tenants::error_text::chain;
use vmm_pool::driver::{
    CudaDriver, DeviceAttribute, DeviceOrdinal, Driver, DriverResult, DriverVersion,
};
use vmm_pool::support::VERSION_MIN;

use super::Check;
use crate::gpus::{Gpu, Gpus};

pub(super) fn checks() -> Vec<Check> {
    match CudaDriver::load() {
        Ok(driver) => driver_checks(&driver),
        Err(error) => vec![no_driver(chain(&error))],
    }
}

/// Returns the finding that there is no driver. The loader's message names its own next step, if it has one.
fn no_driver(message: String) -> Check {
    let next = "without a driver nothing can be paused on this machine; `sublet simulate -- bash` has simulated GPUs to try it on";
    Check::fail("driver", message, next)
}

fn driver_checks<D: Driver>(driver: &D) -> Vec<Check> {
    let mut checks = vec![version(driver.version())];
    match driver.device_count() {
        Ok(0) => checks.push(no_device("the driver shows no GPU".to_owned())),
        Err(error) => checks.push(no_device(error.to_string())),
        Ok(count) => {
            let gpus = Gpus::look();
            for ordinal in 0..count {
                checks.extend(device_checks(driver, DeviceOrdinal(ordinal), &gpus));
            }
            let devices = (0..count).map(DeviceOrdinal);
            checks.push(multicast(devices.filter(|device| can_multicast(driver, *device)).count()));
        }
    }
    checks
}

fn no_device(finding: String) -> Check {
    Check::fail("GPUs", finding, "look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES")
}

fn version(version: DriverResult<DriverVersion>) -> Check {
    match version {
        Ok(version) if version >= VERSION_MIN => {
            Check::ok("driver", format!("speaks CUDA {version}"))
        }
        Ok(version) => Check::fail(
            "driver",
            format!("speaks CUDA {version}"),
            format!("update it to one that speaks {VERSION_MIN} or newer"),
        ),
        Err(error) => Check::fail("driver", error.to_string(), "look at `nvidia-smi`"),
    }
}

fn device_checks<D: Driver>(driver: &D, device: DeviceOrdinal, gpus: &Gpus) -> Vec<Check> {
    let has = |attribute| match driver.device_attribute(device, attribute) {
        Ok(value) => Ok(value != 0),
        Err(error) => Err(error.to_string()),
    };
    let subject = device.to_string();
    let name = match driver.device_uuid(device) {
        Ok(uuid) => Check::ok(&subject, format!("is {}", named(&gpus.find(&uuid.to_string())))),
        Err(error) => Check::warn(&subject, error.to_string(), "look at `nvidia-smi`"),
    };
    let mut checks = vec![
        name,
        needed(
            &subject,
            "virtual memory management",
            has(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        ),
        needed(
            &subject,
            "memory shared by file descriptor",
            has(DeviceAttribute::HANDLE_TYPE_POSIX_FD_SUPPORTED),
        ),
    ];
    // An attribute that the driver does not know is one that it does not have.
    let finding = if has(DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED) == Ok(true) {
        "has fabric handles; under Sublet they are hidden from applications, which use other paths"
    } else {
        "has no fabric handles; nothing to hide from applications"
    };
    checks.push(Check::ok(&subject, finding));
    checks
}

fn can_multicast<D: Driver>(driver: &D, device: DeviceOrdinal) -> bool {
    driver.device_attribute(device, DeviceAttribute::MULTICAST_SUPPORTED).is_ok_and(|it| it != 0)
}

/// Checks the cost of hiding multicast, if the switches support it. It queries the driver as NCCL does. The existence of switches
/// (`/proc/driver/nvidia-nvswitch`) is not enough, because those of A100 servers cannot multicast.
fn multicast(gpus: usize) -> Check {
    let subject = "NVLS";
    if gpus < 2 {
        return Check::ok(subject, "no GPUs that could multicast to each other; nothing to hide");
    }
    Check::warn(
        subject,
        format!(
            "{gpus} GPUs are behind NVSwitches that multicast, which Sublet hides: NCCL's large all-reduces lose about a fifth of their \
             bandwidth on eight GPUs, by others' figures"
        ),
        "to see what it costs you, run a job without Sublet, with NCCL_NVLS_ENABLE=0 and without (status.md in the folder of `sublet docs`)",
    )
}

/// Returns all that is known of a GPU: here people learn which GPU has which name.
fn named(gpu: &Gpu) -> String {
    let parts = [Some(gpu.in_words()), gpu.name.clone(), Some(gpu.uuid.clone())];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn needed(subject: &str, what: &str, has: Result<bool, String>) -> Check {
    let next_step = "this GPU cannot be shared; hide it with CUDA_VISIBLE_DEVICES";
    match has {
        Ok(true) => Check::ok(subject, format!("has {what}")),
        Ok(false) => Check::fail(subject, format!("has no {what}"), next_step),
        Err(error) => Check::fail(subject, format!("{what}: {error}"), next_step),
    }
}

#[cfg(test)]
mod tests {
    use vmm_pool::driver::{DriverCode, DriverError, DriverOp};

    use super::super::Level;
    use super::*;

    #[test]
    fn an_old_driver_and_a_broken_one_fail() {
        assert_eq!(version(Ok(DriverVersion(13_000))).level, Level::Ok);
        let old = version(Ok(DriverVersion(11_080)));
        assert_eq!(old.level, Level::Fail);
        assert_eq!(old.finding, "speaks CUDA 11.8");
        let broken =
            version(Err(DriverError { op: DriverOp::DriverGetVersion, code: DriverCode::UNKNOWN }));
        assert_eq!(broken.level, Level::Fail);
    }

    #[test]
    fn what_hiding_multicast_costs_is_said_where_several_gpus_have_it() {
        for gpus in [0, 1] {
            assert_eq!(multicast(gpus).level, Level::Ok);
        }
        let check = multicast(8);
        assert_eq!(check.level, Level::Warn);
        assert!(check.finding.starts_with("8 GPUs are behind NVSwitches"), "{check:?}");
        assert!(check.next_step.unwrap().contains("NCCL_NVLS_ENABLE=0"));
    }

    #[test]
    fn a_missing_ability_fails_with_a_next_step() {
        assert_eq!(needed("GPU 0", "x", Ok(true)).level, Level::Ok);
        let check = needed("GPU 0", "x", Ok(false));
        assert_eq!(check.level, Level::Fail);
        assert!(check.next_step.is_some());
    }
}
