//! A process that begins to count, over a simulated driver.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sublet_budgets::Counts;
use sublet_member::Counting as _;
use sublet_protocol::wire::Reply;
use sublet_stage::memory::UNIT;
use sublet_stage::{Place, Process};
use vmm_pool::driver::sim::SimOptions;
use vmm_pool::driver::{DeviceOrdinal, PciAddress};

/// The process whose devices are asked about, and its count.
static COUNTS: OnceLock<(Process, Arc<Counts>)> = OnceLock::new();

/// The number of a device, once the count can be asked. A thread that holds its lock meanwhile never gets there.
fn number_behind_the_lock(device: DeviceOrdinal, _: Option<PciAddress>) -> Option<u32> {
    let until = Instant::now() + Duration::from_secs(30);
    while COUNTS.get().is_some_and(|(process, counts)| !counts.is_due(&**process)) {
        assert!(Instant::now() < until, "the lock is held while the devices are asked");
        std::thread::yield_now();
    }
    u32::try_from(device.0).ok()
}

#[test]
fn the_devices_are_asked_with_no_lock_held() {
    let place = Place::new(&[8 * UNIT]).unwrap();
    let counts = Counts::of(Some("0=1GiB".parse().unwrap()), number_behind_the_lock, |_| 0);
    let counting = Arc::clone(&counts);
    let join = place.join_with("train", SimOptions::default(), |it| it.counting = Some(counting));
    let process = join.unwrap();
    assert!(process.pool().budget().counts());
    assert!(COUNTS.set((Arc::clone(&process), Arc::clone(&counts))).is_ok());
    std::fs::remove_file(place.run_dir().path().join("train/budget")).unwrap();
    assert_eq!(counts.run(&*process), Reply::Counts);
    assert!(place.run_dir().path().join("train/budget").exists(), "made again, with the devices");
}
