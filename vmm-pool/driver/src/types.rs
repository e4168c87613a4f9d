//! The plain values that cross the driver boundary.
//!
//! Structures that the driver reads or writes have its exact layout (`#[repr(C)]`, checked below against the bindings of
//! `cudarc`). They hold integers where C has enums. A driver newer than our bindings may use any value. An unknown discriminant
//! in a Rust enum would be undefined behaviour.

use std::fmt;
use std::mem::{offset_of, size_of};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The state of a process, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// The process may call the driver.
    Running,
    /// The process's calls wait.
    Locked,
    /// The process's calls wait, and it has nothing on a device.
    Checkpointed,
    /// The driver cannot restore the process.
    Failed,
    /// A state that this version does not know, such as a transition.
    Other(u32),
}

impl ProcessState {
    /// Converts the number in the driver's header (CUDA 12.8).
    pub fn of(number: u32) -> Self {
        match number {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            other => Self::Other(other),
        }
    }

    /// Converts to that number, see [`ProcessState::of`].
    pub fn number(self) -> u32 {
        match self {
            Self::Running => 0,
            Self::Locked => 1,
            Self::Checkpointed => 2,
            Self::Failed => 3,
            Self::Other(other) => other,
        }
    }
}

/// A GPU, by the ordinal that this process knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceOrdinal(pub i32);

impl fmt::Display for DeviceOrdinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.0)
    }
}

/// The name of a GPU, as the driver gives it. All processes of the machine share it.
///
/// Written as NVIDIA's tools write it: `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A device virtual address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceAddress(pub u64);

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of device virtual addresses, `[start, start + size_bytes)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VaRange {
    /// First address.
    pub start: DeviceAddress,
    /// Length in bytes.
    pub size_bytes: u64,
}

impl VaRange {
    /// A range from its first address and its length in bytes.
    pub fn new(start: DeviceAddress, size_bytes: u64) -> Self {
        Self { start, size_bytes }
    }

    /// One past the last address; saturates at the top of the address space.
    pub fn end(self) -> DeviceAddress {
        DeviceAddress(self.start.0.saturating_add(self.size_bytes))
    }

    /// Does `self` hold the whole of `inner`? An empty `inner` is held when its start is inside.
    pub fn contains(self, inner: VaRange) -> bool {
        self.start <= inner.start && inner.end() <= self.end()
    }

    /// Returns the part of the range between these offsets.
    #[must_use]
    pub fn part(self, part: &Range<u64>) -> Self {
        Self::new(DeviceAddress(self.start.0 + part.start), part.end - part.start)
    }

    /// Does `self` hold the byte at `address`?
    pub fn contains_address(self, address: DeviceAddress) -> bool {
        self.start <= address && address < self.end()
    }
}

/// The driver's own value for a physical allocation (`CUmemGenericAllocationHandle`).
///
/// Applications never see it: they hold virtual handles, which survive a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RawHandle(pub u64);

impl RawHandle {
    /// A mark that no handle of driver 580 has, like that of [`crate::VirtualHandle`].
    const HOST_FILE_MARK: u64 = 0x5b1d;

    /// Makes the handle for file `number` of [`super::Driver::create_host_file`].
    pub(super) fn of_host_file(number: u64) -> Self {
        debug_assert!(number >> 48 == 0, "more than 2^48 files");
        Self(Self::HOST_FILE_MARK << 48 | number & ((1 << 48) - 1))
    }

    /// Is it memory of [`super::Driver::create_host_file`], in this process or the one that it was imported from?
    pub fn is_of_host_file(self) -> bool {
        self.0 >> 48 == Self::HOST_FILE_MARK
    }
}

/// A stream made by us through [`super::Driver::stream_create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub u64);

/// An event made by us through [`super::Driver::event_create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

/// A context that the application made for itself (`CUcontext`), in addition to a device's primary one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RawContext(pub u64);

/// The kind of place that memory is in or is reached from (`CUmemLocationType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(transparent)]
pub struct LocationKind(pub i32);

impl LocationKind {
    /// Memory of a GPU; the id is its ordinal.
    pub const DEVICE: Self = Self(1);
    /// Host memory; the id is ignored.
    pub const HOST: Self = Self(2);
    /// Host memory of one NUMA node; the id is the node.
    pub const HOST_NUMA: Self = Self(3);
    /// Host memory of the NUMA node nearest the calling thread.
    pub const HOST_NUMA_CURRENT: Self = Self(4);
    /// Memory of a GPU that no program sees by its address; the id has no meaning.
    pub const INVISIBLE: Self = Self(5);
    /// A part of a GPU's memory (CUDA 13.4 and later); the id is two bytes, the GPU's ordinal and the part.
    pub const LOCALITY_DOMAIN: Self = Self(6);

    /// Does `cuda.h` of CUDA 13.5 declare this kind? For other kinds the owner of the memory is unknown.
    pub fn is_known(self) -> bool {
        (0..=Self::LOCALITY_DOMAIN.0).contains(&self.0)
    }
}

/// A place that memory is in or is reached from (`CUmemLocation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(C)]
pub struct Location {
    /// The kind of the place.
    pub kind: LocationKind,
    /// The number of the place among those of its kind.
    pub id: i32,
}

impl Location {
    /// The memory of `device`.
    pub fn device(device: DeviceOrdinal) -> Self {
        Self { kind: LocationKind::DEVICE, id: device.0 }
    }

    /// The GPU, when this place is a GPU or a part of one.
    pub fn as_device(self) -> Option<DeviceOrdinal> {
        match self.kind {
            LocationKind::DEVICE => Some(DeviceOrdinal(self.id)),
            LocationKind::LOCALITY_DOMAIN => {
                Some(DeviceOrdinal(i32::from(self.id.to_le_bytes()[0])))
            }
            _ => None,
        }
    }
}

/// Rarely used flags of an allocation (`CUmemAllocationProp::allocFlags`), kept verbatim.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[repr(C)]
pub struct AllocationFlags {
    /// Requested compression (`CUmemAllocationCompType`).
    pub compression: u8,
    /// Non-zero: a network card may read and write the memory.
    pub gpu_direct_rdma_capable: u8,
    /// Use bits (`CU_MEM_CREATE_USAGE_*`).
    pub usage: u16,
    /// Kept as given.
    pub reserved: [u8; 4],
}

/// All properties that the driver was given for an allocation (`CUmemAllocationProp`).
///
/// They are kept whole, and given back unchanged when the memory is created again after a pause. A later use, such as
/// registration with a network card, may depend on any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct AllocationProp {
    /// `CUmemAllocationType`; 1 is pinned.
    pub kind: i32,
    /// Bits of `CUmemAllocationHandleType` that may be exported.
    pub requested_handle_types: i32,
    /// The place that the memory is in.
    pub location: Location,
    /// Windows only; null on Linux.
    pub win32_handle_metadata: u64,
    /// The remaining flags.
    pub flags: AllocationFlags,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const ALLOCATION_KIND_PINNED: i32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const HANDLE_TYPE_POSIX_FD: i32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const HANDLE_TYPE_FABRIC: i32 = 8;

impl AllocationProp {
    /// Pinned memory of `device`, exportable as a file descriptor.
    pub fn pinned_on(device: DeviceOrdinal) -> Self {
        Self {
            kind: ALLOCATION_KIND_PINNED,
            requested_handle_types: HANDLE_TYPE_POSIX_FD,
            location: Location::device(device),
            win32_handle_metadata: 0,
            flags: AllocationFlags::default(),
        }
    }
}

/// Access rights of one place to a mapping (`CUmemAccessDesc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct AccessDesc {
    /// The place that gets access.
    pub location: Location,
    /// `CUmemAccess_flags`: 0 none, 1 read, 3 read and write.
    pub flags: i32,
}

impl AccessDesc {
    /// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
    pub const READ_WRITE: i32 = 3;

    /// Read and write from `device`.
    pub fn read_write(device: DeviceOrdinal) -> Self {
        Self { location: Location::device(device), flags: Self::READ_WRITE }
    }
}

/// Unit of size and alignment of allocations and mappings, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granularity {
    /// The size, always a power of two.
    pub size_bytes: u64,
}

impl Granularity {
    /// `size_bytes` rounded up to a whole number of units; `None` when that overflows.
    pub fn round_up(self, size_bytes: u64) -> Option<u64> {
        size_bytes.checked_next_multiple_of(self.size_bytes)
    }
}

/// The memory of a device at one moment, in bytes (`cuMemGetInfo`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// Bytes that an allocation could still get.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
}

/// The contexts whose copies are faster by pinned host memory.
///
/// Pinning for the current context alone is faster when several processes pin simultaneously: 79 GB/s together against 46 on 4
/// H200 with driver 580, and 35 against 32 for one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedFor {
    /// The context that is current when it is pinned.
    CurrentContext,
    /// Every context of the process.
    AllContexts,
}

/// The driver's version number, such as 13000 for CUDA 13.0 (`cuDriverGetVersion`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DriverVersion(pub i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, (self.0 % 1000) / 10)
    }
}

/// A device attribute, by the driver's number (`CUdevice_attribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttribute(pub i32);

impl DeviceAttribute {
    /// The bus number of the device's PCI address.
    pub const PCI_BUS_ID: Self = Self(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID as i32);
    /// The device number of the device's PCI address.
    pub const PCI_DEVICE_ID: Self = Self(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID as i32);
    /// The domain number of the device's PCI address.
    pub const PCI_DOMAIN_ID: Self = Self(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID as i32);
    /// Can the device do virtual memory management?
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED as i32);
    /// Can allocations be exported as file descriptors?
    pub const HANDLE_TYPE_POSIX_FD_SUPPORTED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as i32);
    /// Can allocations be made usable by network cards?
    pub const GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as i32);
    /// Can allocations be exported as fabric handles?
    pub const HANDLE_TYPE_FABRIC_SUPPORTED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED as i32);
    /// Does the device take part in multicast objects?
    pub const MULTICAST_SUPPORTED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED as i32);
    /// Does the device reach registered host memory at the host's addresses?
    pub const HOST_ADDRESSES_FOR_REGISTERED: Self =
        Self(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM as i32);
}

/// The PCI address of a device, as the system names it: the address of its first function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    /// The domain: one of several PCI roots.
    pub domain: u32,
    /// The bus in the domain.
    pub bus: u32,
    /// The device on the bus.
    pub device: u32,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

// Layouts must be the driver's own. `cudarc` generates its bindings from NVIDIA's header.
const _: () = {
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(offset_of!(AllocationProp, location) == offset_of!(sys::CUmemAllocationProp, location));
    assert!(offset_of!(AllocationProp, flags) == offset_of!(sys::CUmemAllocationProp, allocFlags));
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_named_as_nvidia_tools_name_it() {
        let bytes = u128::to_be_bytes(0x5f00_be66_6abd_452b_8111_0cec_f416_4a2a);
        assert_eq!(DeviceUuid(bytes).to_string(), "GPU-5f00be66-6abd-452b-8111-0cecf4164a2a");
        let zero = DeviceUuid([0; 16]);
        assert_eq!(zero.to_string(), "GPU-00000000-0000-0000-0000-000000000000");
    }

    /// CUDA 13.4 has a kind for a part of a GPU's memory, whose id is two bytes.
    #[test]
    fn a_part_of_a_gpus_memory_is_that_gpus() {
        let place = |kind, id| Location { kind: LocationKind(kind), id }.as_device();
        assert_eq!(place(1, 3), Some(DeviceOrdinal(3)));
        assert_eq!(place(6, 0x0103), Some(DeviceOrdinal(3)));
        assert_eq!([2, 3, 4, 5, 7].map(|kind| place(kind, 0x0103)), [None; 5]);
        assert!([1, 6].iter().all(|&kind| LocationKind(kind).is_known()));
        assert!(![-1, 7].iter().any(|&kind| LocationKind(kind).is_known()));
    }
}
