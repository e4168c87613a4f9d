//! The numbers of the GPUs of this machine.

use std::fs;
use std::path::Path;

use vmm_pool::driver::PciAddress;

/// The directory in which the driver lists the GPUs of this machine, or of this container.
pub const NODE_GPUS: &str = "/proc/driver/nvidia/gpus";

/// Returns the directories in `list` ([`NODE_GPUS`]), one for each GPU, named by PCI address. They are in the order of
/// `nvidia-smi`'s numbers, which is that of the addresses. Empty if the driver lists none.
pub fn places(list: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(list) else {
        return Vec::new();
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    // Domains may have more digits than four.
    names.sort_by_key(|name| (name.len(), name.to_ascii_lowercase()));
    names
}

/// Returns the number of the GPU at `address`. `None` if the driver does not list it.
pub fn index_of(list: &Path, address: PciAddress) -> Option<u32> {
    let wanted = address.to_string();
    let place = places(list).iter().position(|name| name.eq_ignore_ascii_case(&wanted))?;
    u32::try_from(place).ok()
}

/// Returns the number, by `CUDA_VISIBLE_DEVICES` (`visible`), of the device that a process knows as `ordinal`. For machines that
/// do not list their GPUs. `None` if `visible` has identities.
pub fn index_behind(visible: Option<&str>, ordinal: u32) -> Option<u32> {
    let Some(visible) = visible else {
        return Some(ordinal);
    };
    visible.split(',').nth(usize::try_from(ordinal).ok()?)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_addresses() {
        let list = tempfile::tempdir().unwrap();
        for name in ["0000:9B:00.0", "0000:1b:00.0", "10000:01:00.0"] {
            fs::create_dir(list.path().join(name)).unwrap();
        }
        let at = |domain, bus| PciAddress { domain, bus, device: 0 };
        let look = |address| index_of(list.path(), address);
        assert_eq!(look(at(0, 0x1b)), Some(0));
        assert_eq!(look(at(0, 0x9b)), Some(1));
        assert_eq!(look(at(0x1_0000, 1)), Some(2));
        assert_eq!(look(at(0, 1)), None);
        assert_eq!(index_of(Path::new("/nowhere"), at(0, 1)), None);
        assert_eq!(places(list.path())[1], "0000:9B:00.0");
    }

    #[test]
    fn without_a_list_the_visible_devices_say_it() {
        assert_eq!(index_behind(None, 2), Some(2));
        assert_eq!(index_behind(Some("4, 5"), 1), Some(5));
        assert_eq!(index_behind(Some("4"), 1), None);
        assert_eq!(index_behind(Some("GPU-6ac1"), 0), None);
        assert_eq!(index_behind(Some(""), 0), None);
    }
}
