//! Copies to one device that a lane makes: by the copy engine of the device or by a kernel of ours, whichever is faster just
//! then ([`pace`]). It takes them from a queue ([`Haul`]), on a thread of its own that lives as long as the step.

mod haul;
mod lane;
mod pace;

pub(crate) use haul::{Haul, Parcels};
pub(crate) use lane::carry;

/// When a kernel of ours copies to a device, instead of its copy engine.
#[derive(Clone, Copy, Debug)]
pub struct KernelCopies {
    /// Less than this, in bytes, is for the engine: it takes some of it to find out what is faster.
    pub least_bytes: u64,
    /// What is copied at once, in bytes.
    pub parcel_bytes: u64,
}

impl Default for KernelCopies {
    fn default() -> Self {
        Self { least_bytes: 512 << 20, parcel_bytes: 32 << 20 }
    }
}
