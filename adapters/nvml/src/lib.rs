//! The answers of NVIDIA's management library (NVML) about a GPU, for a tenant that has a budget there. They show as
//! much memory as the tenant may hold, and the tenant's own processes. Libraries size their caches by asking. Without a
//! budget nothing is changed.
//!
//! * [`Bound`]: what the tenant may hold of a GPU, and holds.
//! * [`memory`]: the answers about memory, within that.
//! * [`processes`]: the answers about processes, those of the tenant alone.
//!
//! Nothing here calls NVML, and nothing is kept between two answers.

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
    /// `NVML_ERROR_INSUFFICIENT_SIZE`: the caller's buffer is too short, and it is told how long it must be.
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    /// `NVML_ERROR_FUNCTION_NOT_FOUND`.
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
}

/// A GPU, as NVML knows it. NVML is asked by processes that never use CUDA, such as launchers. So a process need not have joined its tenant to
/// be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its identity.
    pub uuid: DeviceUuid,
    /// Its number on this machine.
    pub index: Option<u32>,
}

impl Gpu {
    /// The GPU, or instance of one, with the identity that NVML writes as `text`. None where that is not in the form of today's
    /// drivers (from 470 on).
    pub fn named(text: &str, index: Option<u32>) -> Option<Self> {
        Some(Self { uuid: budget::uuid(text)?, index })
    }
}

/// The bytes that a tenant may hold of a GPU, and the bytes that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The most.
    pub budget_bytes: u64,
    /// The bytes that all processes of the tenant hold.
    pub held_bytes: u64,
    /// The bytes that other tenants would give up for it.
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
    /// The process's part in its tenant, where it has joined.
    pub member: Option<&'a Member<D>>,
    /// The directory that tenants live in.
    pub run_dir: &'a RunDir,
    /// The tenant that it is of, or would join.
    pub tenant: &'a TenantName,
    /// The budgets that it would bring along if it were the first.
    pub settings: Option<&'a Budgets>,
}

impl<D: Driver> Asker<'_, D> {
    /// Returns the tenant's bound on `gpu`; `None` without a budget there. The figures by which the process itself
    /// counts come first: the driver's answers are by them too. Then come those by which processes of the tenant count.
    /// Last come those by which the first of them will count.
    ///
    /// Waits for other processes for moments; asks no process, and of the driver no more than its devices' identities.
    pub fn bound(&self, gpu: Gpu) -> Option<Bound> {
        if let Some(figure) = self.member.and_then(|it| budget::figure_of(it.pool(), gpu.uuid)) {
            return Bound::of(figure);
        }
        let coordinator =
            Coordinator::new(self.run_dir.clone(), self.tenant.clone(), Options::default());
        // A tenant that has no directory, or one that cannot be read, is one that nobody counts in.
        if let Some(report) = budget::budgets(&coordinator).ok().flatten() {
            return Bound::of(report.figure(gpu.uuid, gpu.index));
        }
        let budget_bytes = self.settings?.of(gpu.uuid, gpu.index)?;
        Some(Bound { budget_bytes, ..Bound::NONE })
    }
}
