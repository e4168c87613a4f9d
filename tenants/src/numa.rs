//! Where a device is: on which NUMA node, and behind which part of the bus.

use std::fs;
use std::path::Path;

use vmm_pool::driver::PciAddress;

/// The NUMA node of the device at `address`, as `sys` (`/sys`) has it. None where the machine has one node only, or does
/// not say.
pub fn node_of(sys: &Path, address: PciAddress) -> Option<u32> {
    let nodes = fs::read_to_string(sys.join("devices/system/node/online")).ok()?;
    // One number, where there is one: others are listed as in "0-1" and "0,2".
    if nodes.trim().parse::<u32>().is_ok() {
        return None;
    }
    let path = sys.join("bus/pci/devices").join(address.to_string()).join("numa_node");
    // -1 says that nobody knows.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Are both devices behind one bridge of the bus, such as a switch, as `sys` (`/sys`) has it? Then their links to the host are
/// one. False where it does not say.
pub fn share_bridge(sys: &Path, one: PciAddress, other: PciAddress) -> bool {
    let bridges = |address: PciAddress| {
        let path = fs::canonicalize(sys.join("bus/pci/devices").join(address.to_string())).ok()?;
        let above = path.parent()?.iter().map(|name| name.to_string_lossy().into_owned());
        Some(above.filter(|name| is_pci_address(name)).collect::<Vec<_>>())
    };
    match (bridges(one), bridges(other)) {
        (Some(one), Some(other)) => one.iter().any(|bridge| other.contains(bridge)),
        (None, _) | (_, None) => false,
    }
}

/// Is it written as `0000:9b:00.0`?
fn is_pci_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let is_number = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 4 && parts.iter().all(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_behind_one_switch_share_it_and_those_behind_ports_of_their_own_do_not() {
        let sys = tempfile::tempdir().unwrap();
        let links = sys.path().join("bus/pci/devices");
        fs::create_dir_all(&links).unwrap();
        let root = sys.path().join("devices/pci0000:00");
        for path in [
            "0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
            "0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0",
            "0000:00:02.0/0000:05:00.0",
            "0000:00:06.0",
            "0000:00:07.0",
        ] {
            let path = root.join(path);
            fs::create_dir_all(&path).unwrap();
            std::os::unix::fs::symlink(&path, links.join(path.file_name().unwrap())).unwrap();
        }
        let at = |bus, device| PciAddress { domain: 0, bus, device };
        let share = |one, other| share_bridge(sys.path(), one, other);
        assert!(share(at(3, 0), at(4, 0)), "a switch");
        assert!(!share(at(3, 0), at(5, 0)), "ports of the root");
        assert!(!share(at(0, 6), at(0, 7)), "on the root itself");
        assert!(!share(at(3, 0), at(9, 0)), "one that is not there");
    }

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
