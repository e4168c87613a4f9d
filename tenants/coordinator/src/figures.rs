//! Figures of GPUs in reports and errors: budgets, and missing memory.

use std::fmt;

use serde::{Deserialize, Serialize};
use sublet_protocol::size::Size;
use vmm_pool::driver::DeviceUuid;

/// One GPU of a tenant whose memory is counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GpuBudget {
    /// Its identity, as `nvidia-smi -L` prints it.
    #[serde(rename = "uuid")]
    pub gpu: String,
    /// Its number on this machine, where that is known.
    pub index: Option<u32>,
    /// The bytes that the tenant may hold; none without a bound.
    pub budget_bytes: Option<u64>,
    /// The bytes that all processes of the tenant hold.
    pub held_bytes: u64,
    /// All of its memory, in bytes; 0 where that is not known.
    pub total_bytes: u64,
    /// The GPU's identity in the driver's form.
    #[serde(skip)]
    pub uuid: DeviceUuid,
}

impl GpuBudget {
    /// Returns the bytes that are held beyond the budget.
    pub fn over_bytes(&self) -> u64 {
        self.budget_bytes.map_or(0, |budget| self.held_bytes.saturating_sub(budget))
    }
}

/// A device that cannot hold the memory that a tenant had there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceShortage {
    /// The machine-wide name, such as `GPU-5f00be66-6abd-452b-8111-0cecf4164a2a`.
    pub uuid: String,
    /// Bytes that all processes of the tenant need there.
    pub needed_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// All bytes of the device.
    pub total_bytes: u64,
    /// Tenants with memory there, largest first; this one too, where a pause left some in place.
    pub holders: Vec<Holder>,
    /// The bytes that are neither free nor any tenant's: contexts, and processes that do not run under Sublet.
    pub outside_bytes: u64,
    /// Processes of this tenant with memory of the device, by their ids.
    pub own_processes: Vec<ProcessBytes>,
}

/// The memory of one process on a device, on it or off it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessBytes {
    /// Its id.
    pub pid: u32,
    /// Its bytes.
    pub bytes: u64,
}

/// Returns the advice for a tenant that is larger than a GPU: it lists the processes, of which some must end.
pub fn end_some(processes: &[ProcessBytes]) -> String {
    let each = processes.iter().map(|one| format!("process {} has {}", one.pid, Size(one.bytes)));
    let each = each.collect::<Vec<_>>().join(", ");
    let colon = if each.is_empty() { "" } else { ": " };
    format!("end some of its processes (`sublet ps -v`){colon}{each}")
}

/// A tenant that has memory on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Holder {
    /// Its name.
    pub tenant: String,
    /// Does it run? A paused tenant can hold memory that a pause leaves in place.
    pub active: bool,
    /// The bytes that the tenant has there.
    pub bytes: u64,
    /// Of these, what a pause of it gives back.
    pub gives_bytes: u64,
}

impl DeviceShortage {
    /// Returns the bytes that must become free in addition.
    pub fn missing_bytes(&self) -> u64 {
        self.needed_bytes.saturating_sub(self.free_bytes)
    }

    /// Would the tenant fit if all other tenants released their memory?
    pub fn others_could_give_it(&self) -> bool {
        let gives = self.holders.iter().map(|holder| holder.gives_bytes);
        gives.fold(0, u64::saturating_add) >= self.missing_bytes()
    }
}

impl fmt::Display for DeviceShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uuid, needed_bytes, free_bytes, total_bytes, outside_bytes, .. } = self;
        let [free, needed, missing, outside] =
            [*free_bytes, *needed_bytes, self.missing_bytes(), *outside_bytes].map(Size);
        if needed_bytes > total_bytes {
            let total = Size(*total_bytes);
            return write!(
                f,
                "{uuid} has {total} in all and the tenant needs {needed}: {}",
                end_some(&self.own_processes)
            );
        }
        write!(f, "{uuid} has {free} free and {needed} are needed, {missing} more: ")?;
        let holders = self.holders.iter().map(|Holder { tenant, active, bytes, .. }| {
            let state = if *active { "active" } else { "paused" };
            format!("tenant '{tenant}' holds {} ({state})", Size(*bytes))
        });
        let mut holders: Vec<_> = holders.collect();
        if *outside_bytes > 0 || holders.is_empty() {
            holders.push(format!("{outside} are outside Sublet"));
        }
        f.write_str(&holders.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_of_a_tenant_that_is_larger_than_a_gpu_is_named_with_its_bytes() {
        let processes = [(7, 2_u64 << 30), (8, 4 << 30)];
        let short = DeviceShortage {
            uuid: "GPU-0".to_owned(),
            needed_bytes: 6 << 30,
            free_bytes: 4 << 30,
            total_bytes: 5 << 30,
            holders: Vec::new(),
            outside_bytes: 0,
            own_processes: processes.map(|(pid, bytes)| ProcessBytes { pid, bytes }).into(),
        };
        assert_eq!(
            short.to_string(),
            "GPU-0 has 5 GiB in all and the tenant needs 6 GiB: end some of its processes (`sublet ps -v`): process 7 has \
             2 GiB, process 8 has 4 GiB"
        );
    }
}
