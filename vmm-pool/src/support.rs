//! Checks whether a driver has the features that a pool needs.

use crate::driver::{DeviceAttribute, DeviceOrdinal, Driver, DriverError, DriverVersion};

/// The oldest driver that a pool works with.
pub const VERSION_MIN: DriverVersion = DriverVersion(12_000);

/// The reason why a pool cannot use a driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// The driver is too old for Sublet. The message has both versions. Update the driver.
    #[error("the driver speaks CUDA {found}, older than {VERSION_MIN}: update it")]
    TooOld {
        /// Its version.
        found: DriverVersion,
    },
    /// This GPU cannot place memory at chosen addresses, so a resume could not keep them. Hide it with
    /// `CUDA_VISIBLE_DEVICES`.
    #[error("{device} has no virtual memory management: hide it with CUDA_VISIBLE_DEVICES")]
    NoVirtualMemory {
        /// The device that lacks it.
        device: DeviceOrdinal,
    },
    /// The driver refused a question about its features. Its code follows. `sublet doctor` checks the driver.
    #[error("the driver cannot be asked what it offers: {0}")]
    Driver(#[from] DriverError),
}

/// Checks the driver and every device that this process sees.
///
/// # Errors
/// [`Unsupported`], for the first thing that is missing.
///
/// # Driver calls
/// `cuDriverGetVersion`, `cuDeviceGetCount`, `cuDeviceGetAttribute` for each device.
pub fn check(driver: &impl Driver) -> Result<(), Unsupported> {
    let found = driver.version()?;
    if found < VERSION_MIN {
        return Err(Unsupported::TooOld { found });
    }
    for device in (0..driver.device_count()?).map(DeviceOrdinal) {
        let attribute = DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if driver.device_attribute(device, attribute)? == 0 {
            return Err(Unsupported::NoVirtualMemory { device });
        }
    }
    Ok(())
}
