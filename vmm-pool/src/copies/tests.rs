use super::*;
use crate::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use crate::driver::{AccessDesc, AllocationProp, DeviceAddress};

#[test]
fn streams_that_are_dropped_under_zeros_leave_their_device_unsettled() {
    let gpu = DeviceOrdinal(0);
    let node = SimNode::private(&[GRANULARITY_BYTES]).unwrap();
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let prop = AllocationProp::pinned_on(gpu);
    let memory = driver.create_memory(GRANULARITY_BYTES, &prop).unwrap();
    let start = driver.reserve(GRANULARITY_BYTES, 0, DeviceAddress(0)).unwrap();
    let range = VaRange::new(start, GRANULARITY_BYTES);
    driver.map_memory(range, memory).unwrap();
    driver.grant(range, &[AccessDesc::read_write(gpu)]).unwrap();
    let deferred = Deferred::new(Arc::clone(&driver));
    let mut streams = CopyStreams::open(&deferred, gpu).unwrap();
    streams.take().unwrap();
    // SAFETY: the device may write all of it, which stays mapped until all is settled.
    unsafe { streams.start_zeros(range) }.unwrap();
    drop(streams);
    assert!(!deferred.is_settled(), "nobody has waited for the zeros");
    deferred.settle().unwrap();
    assert!(deferred.is_settled());
    driver.unmap_memory(range).unwrap();
    driver.device_failure(gpu).unwrap();
}
