//! How fast does a device take fingerprints, by the size of pieces? On the real driver.
//!
//! ```text
//! cargo run --release -p vmm-pool --example fingerprint_rate -- [GIB]
//! ```
//!
//! It is bound by the device's memory: 8 GiB take 2.3 ms at 3.77 TB/s. The first launch of all has the kernel compiled.

#![expect(clippy::print_stdout, reason = "a program whose output is its report")]
#![expect(unsafe_code, reason = "has a device read memory of its own")]

use std::error::Error;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vmm_pool::driver::{
    AccessDesc, AllocationProp, CudaDriver, DeviceAddress, DeviceOrdinal, Driver, PieceSlot,
    PinnedFor, VaRange,
};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const ROUNDS: usize = 10;
const KIB: [u64; 8] = [16, 32, 64, 128, 256, 512, 1024, 2048];

fn main() -> Result<(), Box<dyn Error>> {
    let gib: u64 = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    let driver = CudaDriver::load()?;
    driver.make_current(DEVICE)?;
    let size_bytes = gib << 30;
    let start = driver.address_reserve(size_bytes, 0, DeviceAddress(0))?;
    let range = VaRange::new(start, size_bytes);
    driver.map(range, driver.create(size_bytes, &AllocationProp::pinned_on(DEVICE))?)?;
    driver.set_access(range, &[AccessDesc::read_write(DEVICE)])?;
    let stream = driver.stream_create()?;
    let slots_max = usize::try_from(size_bytes / (KIB[0] << 10))?;
    let mut slots = vec![PieceSlot::default(); slots_max];
    let pinned = NonNull::from(slots.as_mut_slice());
    let length = slots_max * size_of::<PieceSlot>();
    // SAFETY: the vector lives to the end of the program.
    unsafe { driver.host_register(pinned.cast(), length, PinnedFor::CurrentContext) }?;
    for kib in KIB {
        let piece_bytes = kib << 10;
        let count = usize::try_from(size_bytes / piece_bytes)?;
        let mut least = Duration::MAX;
        for round in 0..=ROUNDS {
            for (index, slot) in (0_u64..).zip(&mut slots[..count]) {
                let at = DeviceAddress(start.0 + index * piece_bytes);
                *slot = PieceSlot::asking(VaRange::new(at, piece_bytes));
            }
            let began = Instant::now();
            // SAFETY: the slots are pinned and the pieces mapped, both to the end of the program.
            unsafe { driver.fingerprint(DEVICE, NonNull::from(&mut slots[..count]), stream) }?;
            driver.stream_synchronize(stream)?;
            let took = began.elapsed();
            if round == 0 {
                println!("{kib:5} KiB: first {took:?}");
            } else {
                least = least.min(took);
            }
        }
        let rate = u128::from(size_bytes) / least.as_nanos().max(1);
        println!("{kib:5} KiB: {count} pieces in {least:?}, {rate} GB/s");
    }
    Ok(())
}
