//! The processes that hold a GPU's memory, as NVIDIA's management library tells. The library sees also processes that
//! do not run under Sublet or do not answer. It is there wherever `nvidia-smi` is.

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::Serialize;
use tenants::transport;

use crate::{gpus, units};

/// Only the largest are of use to a person.
const PROCESSES_MAX: usize = 4;
/// Longest start of a command line that is shown, in characters.
const COMMAND_CHARS_MAX: usize = 60;

/// A process with memory on a GPU.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Occupant {
    /// As the management library knows it; inside a container it may be another namespace's.
    pid: u32,
    /// Start of its command line; empty when it cannot be read.
    command: String,
    bytes: Option<u64>,
}

/// The processes with the most memory on the GPU of this machine-wide name, largest first. None where the
/// library is missing, does not know, or does not answer in time.
pub(crate) fn largest_on(uuid: &str) -> Vec<Occupant> {
    let uuid = uuid.to_owned();
    gpus::in_time(move || occupants(&uuid)).flatten().unwrap_or_default()
}

/// The processes that hold the most of each of these GPUs, where the library tells.
pub(crate) fn in_words<'a>(uuids: impl Iterator<Item = &'a str>) -> impl Iterator<Item = String> {
    uuids.filter_map(|uuid| {
        let named: Vec<_> = largest_on(uuid).iter().map(ToString::to_string).collect();
        (!named.is_empty()).then(|| format!("most of {uuid} is held by {}", named.join(", ")))
    })
}

fn occupants(uuid: &str) -> Option<Vec<Occupant>> {
    let nvml = Nvml::init().ok()?;
    let device = nvml.device_by_uuid(uuid).ok()?;
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

pub(crate) fn command_of(pid: u32) -> String {
    units::command(&transport::command_of(pid)).chars().take(COMMAND_CHARS_MAX).collect()
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
