//! The processes that hold a GPU's memory, from NVIDIA's management library. The library also sees processes that do not run
//! under Sublet or do not answer. It exists wherever `nvidia-smi` does.

use std::collections::BTreeSet;

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::{Deserialize, Serialize};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::transport;

use crate::early::{self, Parentage};
use crate::gpus::{self, GpuBytes, Gpus};
use crate::units;

/// The most processes that are shown. Only the largest are of use to a person.
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

/// Returns the processes with the most memory on the GPU with this machine-wide name, largest first. Empty if the library is
/// missing, does not know, or does not answer in time.
pub(crate) fn largest_on(uuid: &str) -> Vec<Occupant> {
    let uuid = uuid.to_owned();
    gpus::in_time(move || occupants(&uuid)).flatten().unwrap_or_default()
}

/// Describes the processes that hold the most memory of each of these GPUs, if the library reports them.
pub(crate) fn in_words<'a>(uuids: impl Iterator<Item = &'a str>) -> impl Iterator<Item = String> {
    uuids.filter_map(|uuid| {
        let named: Vec<_> = largest_on(uuid).iter().map(ToString::to_string).collect();
        (!named.is_empty()).then(|| format!("most of {uuid} is held by {}", named.join(", ")))
    })
}

/// A process with GPU memory that is of no tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Outside {
    pub(crate) pid: u32,
    pub(crate) command: String,
    /// The tenant whose job started it, without Sublet: no pause moves its memory.
    pub(crate) strayed_from: Option<String>,
    pub(crate) gpus: Vec<GpuBytes>,
}

impl Outside {
    pub(crate) fn bytes(&self) -> u64 {
        self.gpus.iter().map(|held| held.bytes).sum()
    }

    /// Returns a remark that a pause of its tenant does not reach it, if a tenant's job started it.
    pub(crate) fn strayed(&self) -> Option<String> {
        let tenant = self.strayed_from.as_ref()?;
        let (pid, command, size) = (self.pid, &self.command, units::bytes(self.bytes()));
        Some(format!(
            "{tenant}: process {pid} ({command}), started by this job, runs outside Sublet: no pause moves its {size}"
        ))
    }
}

/// Returns the processes with memory on `gpus` that are of no tenant, the largest first. `members` are the processes of all
/// tenants. None if the management library does not report processes, or uses other process ids than this process sees.
pub(crate) fn outside(
    run_dir: &RunDir,
    members: &BTreeSet<u32>,
    gpus: &Gpus,
) -> Option<Vec<Outside>> {
    let held = gpus.held()?;
    if !gpus::knows_all_pids() && !held.keys().any(|pid| members.contains(pid)) {
        return None;
    }
    let others = held.iter().filter(|(pid, _)| !members.contains(pid));
    let mut found: Vec<_> = others
        .filter_map(|(pid, held)| {
            let strayed_from = match early::parentage(run_dir, *pid) {
                Parentage::Early => return None,
                Parentage::Strayed(tenant) => Some(tenant.to_string()),
                Parentage::Foreign => None,
            };
            Some(Outside { pid: *pid, command: command_of(*pid), strayed_from, gpus: held.clone() })
        })
        .collect();
    found.sort_by_key(|outside| std::cmp::Reverse(outside.bytes()));
    Some(found)
}

/// Returns the processes that the job of `tenant` started without Sublet. Empty if the management library does not report
/// processes.
pub(crate) fn strayed_from(run_dir: &RunDir, tenant: &TenantName, gpus: &Gpus) -> Vec<Outside> {
    let dir = run_dir.existing_tenant(tenant).ok().flatten();
    let members = dir.map(|dir| dir.pids()).unwrap_or_default().into_iter().collect();
    let mut found = outside(run_dir, &members, gpus).unwrap_or_default();
    found.retain(|outside| outside.strayed_from.as_deref() == Some(tenant.as_str()));
    found
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
