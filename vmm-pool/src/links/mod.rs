//! Copies between one device and the host that lanes make: through the device's own link, where its copy engine or a
//! kernel of ours makes them, whichever is faster just then ([`pace`]), and through that of a neighbour, which pieces
//! pass on their way.
//!
//! ```text
//!   direct lane    device -------------------- host
//!   relay          device -- staging on the neighbour -- host
//! ```
//!
//! Both take from one queue ([`Haul`]), each on a thread of its own that lives as long as the step. Which neighbour that is,
//! and whether there is any, is the caller's to know.

mod haul;
mod lanes;
mod pace;
mod relay;

pub(crate) use haul::{Haul, Parcels, Way};
pub(crate) use lanes::{Hauled, carry};
pub(crate) use relay::Refusal;

use crate::driver::{DeviceOrdinal, PciAddress};

/// Parcels that are on the way through a neighbour at once.
const RELAYED_AT_ONCE: usize = 4;

/// How copies of one device take two links.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    /// Less than this, in bytes, is copied through one link: to make a context takes as long as copying some gigabytes.
    pub least_bytes: u64,
    /// What is copied at once, in bytes; the neighbour holds four times as much meanwhile.
    pub parcel_bytes: u64,
    /// Is the context on the neighbour kept for the next time? It takes some 500 MiB there. It is given back at the end of
    /// each step otherwise, and made anew.
    pub keeps_context: bool,
    /// Do two devices share a part of the way to the host?
    pub shares_link: fn(PciAddress, PciAddress) -> bool,
}

impl Default for Links {
    fn default() -> Self {
        Self {
            least_bytes: 4 << 30,
            parcel_bytes: 16 << 20,
            keeps_context: false,
            shares_link: |_, _| false,
        }
    }
}

/// When a kernel of ours copies to a device, in place of its copy engine.
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

/// Who copies between one device and the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    pub(crate) device: DeviceOrdinal,
    pub(crate) parcel_bytes: u64,
    /// May a kernel copy to the device, where that is faster?
    pub(crate) by_kernel: bool,
    pub(crate) neighbour: Option<Route>,
}

/// What copies of `device` pass through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) device: DeviceOrdinal,
    pub(crate) neighbour: DeviceOrdinal,
    pub(crate) parcel_bytes: u64,
    /// Does the context on the neighbour stay?
    pub(crate) keeps_context: bool,
}
