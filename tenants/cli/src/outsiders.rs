//! Which processes hold a GPU's memory, as NVIDIA's management library tells. It sees processes that do not
//! run under Sublet, and is there wherever `nvidia-smi` is.

use std::fs;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::Serialize;

use crate::units;

/// Only the largest are of use to a person.
const PROCESSES_MAX: usize = 4;
/// Longest start of a command line that is shown, in characters.
const COMMAND_CHARS_MAX: usize = 60;

/// A process with memory on a GPU.
#[derive(Debug, Serialize)]
pub(crate) struct Occupant {
    /// As the management library knows it; inside a container it may be another namespace's.
    pid: u32,
    /// Start of its command line; empty when it cannot be read.
    command: String,
    bytes: Option<u64>,
}

/// The processes with the most memory on the GPU of this name (in hexadecimal), largest first. None where the
/// library is missing or does not know.
pub(crate) fn largest_on(uuid: &str) -> Vec<Occupant> {
    occupants(uuid).unwrap_or_default()
}

fn occupants(uuid: &str) -> Option<Vec<Occupant>> {
    let nvml = Nvml::init().ok()?;
    let device = nvml.device_by_uuid(dashed(uuid)?).ok()?;
    let running = device.running_compute_processes().ok()?;
    let mut found: Vec<_> = running
        .into_iter()
        .map(|process| Occupant {
            pid: process.pid,
            command: command_of(process.pid),
            bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
        })
        .collect();
    found.sort_by_key(|occupant| std::cmp::Reverse(occupant.bytes));
    found.truncate(PROCESSES_MAX);
    Some(found)
}

/// The management library's form of a GPU's name: `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
fn dashed(uuid: &str) -> Option<String> {
    let part = |from: usize, to: usize| uuid.get(from..to);
    let parts = [part(0, 8)?, part(8, 12)?, part(12, 16)?, part(16, 20)?, part(20, 32)?];
    Some(format!("GPU-{}", parts.join("-")))
}

fn command_of(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    words.join(" ").trim().chars().filter(|c| !c.is_control()).take(COMMAND_CHARS_MAX).collect()
}

impl std::fmt::Display for Occupant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.pid)?;
        if !self.command.is_empty() {
            write!(f, " ({})", self.command)?;
        }
        self.bytes.map_or(Ok(()), |bytes| write!(f, " {}", units::bytes(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gpus_are_written_as_the_library_wants_them() {
        let name = dashed("5f00be666abd452b81110cecf4164a2a");
        assert_eq!(name.as_deref(), Some("GPU-5f00be66-6abd-452b-8111-0cecf4164a2a"));
        assert_eq!(dashed("5f00"), None);
    }

    #[test]
    fn an_occupant_is_named_by_what_is_known_of_it() {
        let own = Occupant { pid: 7, command: String::new(), bytes: None };
        assert_eq!(own.to_string(), "process 7");
        let other = Occupant { pid: 8, command: "python hold.py".to_owned(), bytes: Some(1 << 30) };
        assert!(other.to_string().starts_with("process 8 (python hold.py) "), "{other}");
    }

    #[test]
    fn a_machine_without_the_library_names_nobody() {
        assert!(largest_on("not a name").is_empty());
    }
}
