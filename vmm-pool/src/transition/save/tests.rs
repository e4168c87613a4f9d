use proptest::prelude::*;

use super::*;
use crate::driver::DeviceAddress;
use crate::scaling::assert_not_quadratic;
use crate::store::Store;

const GROUP_BYTES: u64 = 256 << 20;

fn item(index: usize, device: i32, size_bytes: u64) -> Item {
    Item {
        row: VirtualHandle::new(index, 1),
        saved: Saved::whole(Store::Host, 0, size_bytes),
        transfer: Transfer {
            device: DeviceOrdinal(device),
            range: VaRange::new(DeviceAddress(0), size_bytes),
            extents: Vec::new(),
        },
        copied_bytes: size_bytes,
        view: false,
    }
}

fn size_bytes(items: &[Item]) -> u64 {
    items.iter().map(|item| item.transfer.range.size_bytes).sum()
}

proptest! {
    #[test]
    fn groups_hold_neighbours_of_a_device_until_they_are_large_enough(
        sizes in prop::collection::vec((0..3, 1u64..GROUP_BYTES), 0..60),
    ) {
        let items = |(key, &(device, size_bytes))| item(key, device, size_bytes);
        let groups = in_groups(sizes.iter().enumerate().map(items).collect(), GROUP_BYTES);
        for device in (0..3).map(DeviceOrdinal) {
            let own: Vec<_> = groups.iter().filter(|group| group.device == device).collect();
            let keys = own.iter().flat_map(|group| &group.items).map(|item| item.row.index());
            let all = (0..sizes.len()).filter(|&key| sizes[key].0 == device.0);
            prop_assert!(keys.eq(all), "all, in order");
            for (index, group) in own.iter().enumerate() {
                let (_, before) = group.items.split_last().unwrap();
                prop_assert!(size_bytes(before) < GROUP_BYTES, "large enough before the last");
                let is_last = index + 1 == own.len();
                prop_assert!(is_last || size_bytes(&group.items) >= GROUP_BYTES);
            }
        }
    }

    #[test]
    fn devices_take_turns_as_long_as_they_have_groups(counts in prop::array::uniform3(0usize..5)) {
        let items = (0..3).zip(counts).flat_map(|(device, count)| {
            (0..count).map(move |key| item(key, device, GROUP_BYTES))
        });
        let groups = in_groups(items.collect(), GROUP_BYTES);
        let order: Vec<_> = groups.iter().map(|group| (group.items[0].row.index(), group.device)).collect();
        prop_assert!(order.is_sorted(), "{order:?}");
        prop_assert_eq!(order.len(), counts.iter().sum::<usize>());
    }
}

#[test]
fn many_small_items_take_no_longer_each_than_few() {
    assert_not_quadratic(|count| {
        let mut prepared: Vec<Vec<Item>> =
            (0..5).map(|_| (0..count).map(|key| item(key, 0, 4096)).collect()).collect();
        move || {
            in_groups(prepared.pop().unwrap_or_default(), GROUP_BYTES);
        }
    });
}
