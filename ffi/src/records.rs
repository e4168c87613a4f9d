//! The structures by which callers describe copies and waits, and the memory that they name.
//!
//! Callers leave old values in fields that the kind of memory does not use. So an address counts only if the kind uses it.

#![expect(unsafe_code, reason = "reads what callers give to the driver")]

use vmm_pool::driver::{DeviceAddress, VaRange};

use sublet_interpose::Pointer;

/// A structure, or one of a list.
#[derive(Debug)]
pub(crate) struct Record {
    bytes: usize,
    places: &'static [PointerField],
}

/// The place of an address in a structure.
#[derive(Debug)]
struct PointerField {
    offset: usize,
    kind: Option<Kind>,
    extent: Extent,
}

/// The place of four bytes with a kind, and a bit mask of the kinds for which the address counts.
#[derive(Debug)]
struct Kind {
    offset: usize,
    values: u32,
}

/// The memory that a call names from an address on.
#[derive(Debug)]
enum Extent {
    Bytes(u64),
    /// The number of bytes is at this offset.
    Said(usize),
    Rows(Rows),
}

/// Places in a structure that describe the rows that it names. A length or height of 0 means that of the copy.
#[derive(Debug)]
struct Rows {
    /// The distance of the first byte from the address: in bytes, rows and layers.
    first: &'static [usize],
    /// The bytes of a row and the rows of a layer, including the gaps.
    strides: &'static [usize],
    /// The extent of the copy: bytes of a row, rows, layers.
    copied: &'static [usize],
}

/// `CU_MEMORYTYPE_DEVICE` and `CU_MEMORYTYPE_UNIFIED`.
const DEVICE_MEMORY: u32 = 1 << 2 | 1 << 4;
/// Waits for values and writes of them, of `CUstreamBatchMemOpType`: neither flushes nor barriers.
const VALUES: u32 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5;
/// `CU_STREAM_MEM_OP_ATOMIC_REDUCTION`, whose address has another offset.
const REDUCTION: u32 = 1 << 8;
/// `CU_FABRIC_COPY_OPERAND_TYPE_POINTER`.
const POINTER: u32 = 1 << 1;
/// The smallest size of a value in memory. Its address is a multiple of its size, so it is in one mapping.
const VALUE: Extent = Extent::Bytes(4);

const fn always(offset: usize, extent: Extent) -> PointerField {
    PointerField { offset, kind: None, extent }
}

const fn if_kind(offset: usize, kind_offset: usize, values: u32, extent: Extent) -> PointerField {
    PointerField { offset, kind: Some(Kind { offset: kind_offset, values }), extent }
}

const fn rows(
    first: &'static [usize],
    strides: &'static [usize],
    copied: &'static [usize],
) -> Extent {
    Extent::Rows(Rows { first, strides, copied })
}

/// `CUDA_MEMCPY2D`.
pub(crate) const COPY_2D: Record = Record {
    bytes: 128,
    places: &[
        if_kind(32, 16, DEVICE_MEMORY, rows(&[0, 8], &[48], &[112, 120])),
        if_kind(88, 72, DEVICE_MEMORY, rows(&[56, 64], &[104], &[112, 120])),
    ],
};
/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
pub(crate) const COPY_3D: Record = Record {
    bytes: 200,
    places: &[
        if_kind(48, 32, DEVICE_MEMORY, rows(&[0, 8, 16], &[72, 80], &[176, 184, 192])),
        if_kind(136, 120, DEVICE_MEMORY, rows(&[88, 96, 104], &[160, 168], &[176, 184, 192])),
    ],
};
/// `CUDA_MEMCPY3D_BATCH_OP`: an array's handle is no device address.
pub(crate) const OPERATION_3D: Record = Record {
    bytes: 112,
    places: &[
        always(8, rows(&[], &[16, 24], &[80, 88, 96])),
        always(48, rows(&[], &[56, 64], &[80, 88, 96])),
    ],
};
/// `CUDA_FABRIC_COPY_BATCH_OP`.
pub(crate) const FABRIC_COPY: Record = Record {
    bytes: 64,
    places: &[if_kind(8, 0, POINTER, Extent::Said(48)), if_kind(32, 24, POINTER, Extent::Said(48))],
};
/// `CUmemDecompressParams`: the places for the size, the source and the target.
pub(crate) const DECOMPRESSION: Record = Record {
    bytes: 64,
    places: &[always(16, VALUE), always(24, Extent::Said(0)), always(32, Extent::Said(8))],
};
/// `CUstreamBatchMemOpParams`.
pub(crate) const MEMORY_OPERATION: Record =
    Record { bytes: 48, places: &[if_kind(8, 0, VALUES, VALUE), if_kind(16, 0, REDUCTION, VALUE)] };

impl Rows {
    /// Returns the range from the first byte to the last. `word` reads the structure.
    fn range(&self, address: u64, word: impl Fn(usize) -> u64) -> VaRange {
        let of = |list: &[usize], at: usize, absent| list.get(at).map_or(absent, |at| word(*at));
        let [width, height, depth] = [0, 1, 2].map(|at| of(self.copied, at, 1));
        let [x, y, z] = [0, 1, 2].map(|at| of(self.first, at, 0));
        let stride =
            |at, copied| Some(of(self.strides, at, 0)).filter(|said| *said > 0).unwrap_or(copied);
        let (row, layer) = (stride(0, width), stride(1, height));
        let rows = |y: u64, z: u64| layer.saturating_mul(z).saturating_add(y).saturating_mul(row);
        let start = address.saturating_add(rows(y, z)).saturating_add(x);
        let bytes = match (height.checked_sub(1), depth.checked_sub(1)) {
            (Some(y), Some(z)) if width > 0 => rows(y, z).saturating_add(width),
            _ => 0,
        };
        VaRange::new(DeviceAddress(start), bytes)
    }
}

impl Record {
    /// Calls `work` with each range that `count` structures name.
    ///
    /// # Safety
    /// `start` is null, or the address of `count` structures.
    pub(crate) unsafe fn each_range(
        &self,
        start: Pointer,
        count: usize,
        mut work: impl FnMut(VaRange),
    ) {
        if start.is_null() {
            return;
        }
        for structure in (0..count).map(|at| start.wrapping_byte_add(at * self.bytes)) {
            let word = |offset| {
                let place = structure.wrapping_byte_add(offset).cast::<u64>();
                // SAFETY: inside of a structure.
                unsafe { place.read_unaligned() }
            };
            for PointerField { offset, kind, extent } in self.places {
                let counts = kind.as_ref().is_none_or(|kind| {
                    let value = word(kind.offset) & u64::from(u32::MAX);
                    value < u64::from(u32::BITS) && kind.values >> value & 1 == 1
                });
                if counts {
                    let address = word(*offset);
                    let bytes = |bytes| VaRange::new(DeviceAddress(address), bytes);
                    work(match extent {
                        Extent::Bytes(size) => bytes(*size),
                        Extent::Said(at) => bytes(word(*at)),
                        Extent::Rows(rows) => rows.range(address, word),
                    });
                }
            }
        }
    }
}
