//! Device memory that libraries register with devices outside the driver's view: network cards (libibverbs, libmlx5),
//! the CPU's window by GDRCopy, storage (`cuFile`).
//!
//! Such a device keeps the pages that it was given, whatever the driver maps at their addresses later. So a pause must leave
//! those pages in place.
//!
//! * [`registrations`]: registers and deregisters, as the calls of the libraries do.
//! * [`device_files`]: the device files that a process has open, for devices whose registrations nobody sees.

pub mod device_files;
pub mod registrations;

pub use device_files::DeviceFile;
pub use registrations::{Key, Registrations};
