//! Cases about pieces of memory, and the work of devices on them: fingerprints, fills, and copies by a kernel.

#![expect(
    unsafe_code,
    reason = "calls the unsafe methods of the driver trait, on memory that only the case knows"
)]

use std::ptr::NonNull;

use super::{Bench, Case, DEVICE, Limits, assert_same, case_list, pattern, refused};
use sublet_driver::{
    DeviceAddress, Driver, DriverCode, Fingerprint, PieceSlot, PinnedFor, VaRange,
};

case_list![
    fingerprints_are_those_of_the_host,
    fingerprints_of_many_pieces_come_back_each_in_its_slot,
    fingerprints_need_pinned_host_memory,
    a_fill_makes_zeros_of_its_range_and_of_nothing_else,
];

/// Pinned host memory of the case's own, with room for `SLOTS`.
const SLOTS: usize = 4096;

struct Pinned<'a, D: Driver> {
    driver: &'a D,
    slots: Vec<PieceSlot>,
    start: NonNull<u8>,
}

impl<'a, D: Driver> Pinned<'a, D> {
    fn new(driver: &'a D) -> Self {
        let mut slots = vec![PieceSlot::default(); SLOTS];
        let start = NonNull::from(slots.as_mut_slice()).cast();
        let length = SLOTS * size_of::<PieceSlot>();
        // SAFETY: unregistered before the vector goes.
        unsafe { driver.host_register(start, length, PinnedFor::CurrentContext) }.expect("pinned");
        Self { driver, slots, start }
    }

    /// Returns the fingerprints of `pieces`.
    fn prints(&mut self, bench: &Bench<'_, D>, pieces: &[VaRange]) -> Vec<Fingerprint> {
        for (slot, piece) in self.slots.iter_mut().zip(pieces) {
            *slot = PieceSlot::asking(*piece);
        }
        let asked = &mut self.slots[..pieces.len()];
        // SAFETY: pinned, the pieces are mapped, and both stay so beyond the wait.
        unsafe { self.driver.fingerprint(DEVICE, NonNull::from(asked), bench.stream) }
            .expect("fingerprints");
        self.driver.stream_synchronize(bench.stream).expect("wait");
        self.slots[..pieces.len()].iter().map(|slot| slot.print()).collect()
    }
}

impl<D: Driver> Drop for Pinned<'_, D> {
    fn drop(&mut self) {
        // SAFETY: the case has waited for its kernels.
        let ended = unsafe { self.driver.host_unregister(self.start) };
        assert!(ended.is_ok() || std::thread::panicking(), "not unpinned: {ended:?}");
    }
}

fn part(range: VaRange, offset_bytes: u64, size_bytes: u64) -> VaRange {
    VaRange::new(DeviceAddress(range.start.0 + offset_bytes), size_bytes)
}

fn fingerprints_are_those_of_the_host<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let mut bytes = pattern(3, bench.granule_bytes);
    // Zeros with one bit at the end, and zeros alone.
    bytes[1 << 20..(1 << 20) + (256 << 10)].fill(0);
    bytes[(1 << 20) + (128 << 10) - 1] = 0x80;
    bench.write(mapped.range, &bytes);
    let mut pinned = Pinned::new(driver);
    let zeros = (1 << 20) + (128 << 10);
    let asked = [
        (0, 65_536),
        (65_536, 65_536),
        (16, 65_536),
        (0, 16),
        (32, 4080),
        (48, 16_400),
        (0, 1 << 20),
        (1 << 20, 128 << 10),
        (zeros, 128 << 10),
        (zeros, 16),
        (0, bench.granule_bytes),
    ];
    let pieces = asked.map(|(offset, size)| part(mapped.range, offset, size));
    for ((offset, size), print) in asked.into_iter().zip(pinned.prints(&bench, &pieces)) {
        let at = usize::try_from(offset).expect("small");
        let held = &bytes[at..at + usize::try_from(size).expect("small")];
        assert_eq!(print, Fingerprint::of(held), "{size} bytes at {offset}");
        assert_eq!(print.is_zero(), offset == zeros, "{size} bytes at {offset}");
    }
    drop(pinned);
    bench.tear_down(mapped);
}

fn fingerprints_of_many_pieces_come_back_each_in_its_slot<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let bytes = pattern(4, bench.granule_bytes);
    bench.write(mapped.range, &bytes);
    let mut pinned = Pinned::new(driver);
    let size = bench.granule_bytes / SLOTS as u64;
    let pieces: Vec<_> = (0..SLOTS as u64).map(|i| part(mapped.range, i * size, size)).collect();
    let prints = pinned.prints(&bench, &pieces);
    let held = bytes.chunks(usize::try_from(size).expect("small")).map(Fingerprint::of);
    assert!(held.eq(prints), "another than the host has");
    drop(pinned);
    bench.tear_down(mapped);
}

fn fingerprints_need_pinned_host_memory<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(bench.granule_bytes);
    let mut slots = [PieceSlot::asking(part(mapped.range, 0, 65_536)); 2];
    let slots = NonNull::from(slots.as_mut_slice());
    // SAFETY: the piece is mapped; what is not pinned is not touched.
    let asked = unsafe { driver.fingerprint(DEVICE, slots, bench.stream) };
    refused(asked, &[DriverCode::INVALID_VALUE], "slots that are not pinned");
    bench.tear_down(mapped);
}

fn a_fill_makes_zeros_of_its_range_and_of_nothing_else<D: Driver>(driver: &D, _: Limits) {
    let bench = Bench::new(driver);
    let mapped = bench.mapped(2 * bench.granule_bytes);
    let mut bytes = pattern(5, mapped.range.size_bytes);
    bench.write(mapped.range, &bytes);
    for (offset, size) in [(65_536, 65_536), (1 << 20, 2 << 20), (12_345, 678)] {
        // SAFETY: mapped, and the case's own until the wait.
        unsafe { driver.fill_with_zeros(part(mapped.range, offset, size), bench.stream) }
            .expect("filled");
        let at = usize::try_from(offset).expect("small");
        bytes[at..at + usize::try_from(size).expect("small")].fill(0);
    }
    driver.stream_synchronize(bench.stream).expect("wait");
    assert_same(&bench.read(mapped.range), &bytes, "around the zeros");
    bench.tear_down(mapped);
}
