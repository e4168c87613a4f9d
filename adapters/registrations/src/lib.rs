//! Device memory that libraries register with devices outside the driver's view: network cards (libibverbs, libmlx5),
//! the CPU's window by GDRCopy, storage (`cuFile`).
//!
//! Such a device keeps the pages that it was given, whatever the driver maps at their addresses later: a pause must leave
//! them where they are.
//!
//! * [`registrations`]: registers and deregisters, as their libraries' calls do.
//! * [`device_files`]: which such devices a process has open, for those whose registrations nobody sees.

pub mod device_files;
pub mod registrations;

pub use device_files::DeviceFile;
pub use registrations::{Key, Registrations};
