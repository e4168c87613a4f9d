//! The NUMA node of a device.

use std::fs;
use std::path::Path;

use vmm_pool::driver::PciAddress;

/// Returns the NUMA node of the device at `address`, read from `sys` (`/sys`). None if the machine has only one node, or does not
/// report it.
pub fn node_of(sys: &Path, address: PciAddress) -> Option<u32> {
    let nodes = fs::read_to_string(sys.join("devices/system/node/online")).ok()?;
    // A single node is listed as one number; several are listed as "0-1" or "0,2".
    if nodes.trim().parse::<u32>().is_ok() {
        return None;
    }
    let path = sys.join("bus/pci/devices").join(address.to_string()).join("numa_node");
    // -1 means that the node is not known; it does not parse.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_read_where_there_are_several_and_it_is_known() {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let address = PciAddress { domain: 0, bus: 0x9b, device: 0 };
        let look = || node_of(sys.path(), address);
        assert_eq!(look(), None, "no such files");
        put("bus/pci/devices/0000:9b:00.0/numa_node", "1\n");
        assert_eq!(look(), None);
        put("devices/system/node/online", "0\n");
        assert_eq!(look(), None, "one node");
        for online in ["0-1\n", "0,2\n"] {
            put("devices/system/node/online", online);
            assert_eq!(look(), Some(1));
        }
        for text in ["-1\n", "", "one\n"] {
            put("bus/pci/devices/0000:9b:00.0/numa_node", text);
            assert_eq!(look(), None, "{text:?}");
        }
        let elsewhere = PciAddress { domain: 0x1_0000, bus: 1, device: 0 };
        put("bus/pci/devices/10000:01:00.0/numa_node", "0\n");
        assert_eq!(node_of(sys.path(), elsewhere), Some(0));
    }
}
