//! The answers of NVIDIA's management library (NVML) about a GPU, for a tenant with a budget there. They show as much memory as
//! the tenant may hold, and only the tenant's own processes. Libraries size their caches by such queries. Without a budget no
//! answer changes.
//!
//! * [`Bound`]: the bytes that the tenant may hold of a GPU, and those that it holds.
//! * [`memory`]: the answers about memory, within that bound.
//! * [`processes`]: the answers about processes, with those of the tenant alone.
//!
//! This crate does not call NVML, and keeps nothing between two answers.

pub mod memory;
pub mod processes;

use tenants::budget::{self, Budgets};
use tenants::coordinator::{Coordinator, Options};
use tenants::identity::TenantName;
use tenants::member::Member;
use tenants::run_dir::RunDir;
use vmm_pool::budget::Figure;
use vmm_pool::driver::{DeviceUuid, Driver};

pub use memory::{Memory, MemoryV2};
pub use processes::{Process, ProcessEntry, ProcessV1};

/// A code of NVML's, as its functions return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlCode(pub i32);

impl NvmlCode {
    /// `NVML_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `NVML_ERROR_INSUFFICIENT_SIZE`: the caller's buffer is too short. The call returns the length that it needs.
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    /// `NVML_ERROR_FUNCTION_NOT_FOUND`.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
}

/// A GPU, as NVML knows it. Processes that never use CUDA, such as launchers, query NVML too. So a process gets answers even if
/// it has not joined its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The GPU's identity.
    pub uuid: DeviceUuid,
    /// The GPU's number on this machine.
    pub index: Option<u32>,
}

impl Gpu {
    /// Returns the GPU, or instance of one, with the identity that NVML writes as `text`. `None` if `text` is not in the form
    /// of today's drivers (from 470 on).
    pub fn named(text: &str, index: Option<u32>) -> Option<Self> {
        Some(Self { uuid: budget::uuid(text)?, index })
    }
}

/// The bytes that a tenant may hold of a GPU, and the bytes that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The most bytes that the tenant may hold.
    pub budget_bytes: u64,
    /// The bytes that all processes of the tenant hold.
    pub held_bytes: u64,
    /// The bytes that other tenants would give up for this one.
    pub others_bytes: u64,
}

impl Bound {
    /// The bound of a tenant without a budget.
    pub const NONE: Self = Self { budget_bytes: u64::MAX, held_bytes: 0, others_bytes: 0 };

    fn of(Figure { budget_bytes, held_bytes }: Figure) -> Option<Self> {
        budget_bytes.map(|budget_bytes| Self { budget_bytes, held_bytes, ..Self::NONE })
    }
}

/// The process that asks about a GPU.
#[derive(Debug)]
pub struct Asker<'a, D: Driver> {
    /// The process's part in its tenant, if it has joined.
    pub member: Option<&'a Member<D>>,
    /// The directory of all tenants.
    pub run_dir: &'a RunDir,
    /// The tenant of the process, or the one that it would join.
    pub tenant: &'a TenantName,
    /// The budgets that the process would set if it were the tenant's first.
    pub settings: Option<&'a Budgets>,
}

impl<D: Driver> Asker<'_, D> {
    /// Returns the tenant's bound on `gpu`; `None` without a budget there. The first choice is the figures by which the process
    /// itself counts: the driver's answers are by them too. The second choice is the figures by which processes of the tenant
    /// count. The last choice is those by which the tenant's first process will count.
    ///
    /// Waits for other processes only for moments. It sends no message to a process, and queries the driver only for its
    /// devices' identities.
    pub fn bound(&self, gpu: Gpu) -> Option<Bound> {
        if let Some(figure) = self.member.and_then(|it| budget::figure_of(it.pool(), gpu.uuid)) {
            return Bound::of(figure);
        }
        let coordinator =
            Coordinator::new(self.run_dir.clone(), self.tenant.clone(), Options::default());
        // A tenant whose directory is absent or unreadable is one in which nobody counts.
        if let Some(report) = budget::budgets(&coordinator).ok().flatten() {
            return Bound::of(report.figure(gpu.uuid, gpu.index));
        }
        let budget_bytes = self.settings?.of(gpu.uuid, gpu.index)?;
        Some(Bound { budget_bytes, ..Bound::NONE })
    }
}
