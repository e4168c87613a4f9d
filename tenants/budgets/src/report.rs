//! A tenant's budget and held memory on each GPU. Queries, and changes of the budget, work while its processes run, without the
//! lock of pauses and resumes.

use serde::{Serialize, Serializer};
use sublet_coordinator::{
    Coordinator, Everybody, GpuBudget, MemberFailure, Next, Step, TenantStats, Trouble,
};
use sublet_protocol::identity::TenantName;
use sublet_protocol::wire::Count;
use vmm_pool::budget::Figure;
use vmm_pool::driver::DeviceUuid;

use super::Budgets;
use super::file::BudgetFile;
use super::shared::Gpu;

/// A tenant's budgets after a change, or as they are.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BudgetReport {
    /// The tenant.
    pub tenant: String,
    /// As they were given: also of GPUs that no process of the tenant has.
    #[serde(serialize_with = "as_text")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub budgets: Budgets,
    /// The GPUs that its processes see.
    pub gpus: Vec<GpuBudget>,
    /// Processes that do not count, and why: what they hold is in no figure.
    pub failures: Vec<MemberFailure>,
}

fn as_text<S: Serializer>(budgets: &Budgets, serializer: S) -> Result<S::Ok, S::Error> {
    if *budgets == Budgets::default() {
        return serializer.serialize_none();
    }
    serializer.collect_str(budgets)
}

impl BudgetReport {
    /// Returns the report of a tenant in which no process counts.
    pub fn none(tenant: &TenantName) -> Self {
        let (budgets, gpus) = (Budgets::default(), Vec::new());
        Self { tenant: tenant.to_string(), budgets, gpus, failures: Vec::new() }
    }

    /// Returns the tenant's budget and held bytes for a GPU, also for a GPU that none of its processes has.
    pub fn figure(&self, uuid: DeviceUuid, index: Option<u32>) -> Figure {
        let known = self.gpus.iter().find(|gpu| gpu.uuid == uuid);
        known.map_or_else(
            || Figure { budget_bytes: self.budgets.of(uuid, index), held_bytes: 0 },
            |gpu| Figure { budget_bytes: gpu.budget_bytes, held_bytes: gpu.held_bytes },
        )
    }
}

fn figure_in(gpu: &Gpu) -> GpuBudget {
    GpuBudget {
        gpu: gpu.uuid.to_string(),
        index: gpu.index,
        budget_bytes: gpu.figure.budget_bytes,
        held_bytes: gpu.figure.held_bytes,
        total_bytes: gpu.total_bytes,
        uuid: gpu.uuid,
    }
}

fn of_file(file: &BudgetFile) -> Vec<GpuBudget> {
    file.forget_dead(None);
    let mut gpus: Vec<_> = file.shared().gpus().iter().map(figure_in).collect();
    gpus.sort_by_key(|gpu| (gpu.index.unwrap_or(u32::MAX), gpu.gpu.clone()));
    gpus
}

/// Adds the budgets of GPUs to the figures of a tenant; none if no process counts.
///
/// # Errors
/// [`Trouble::RunDir`].
pub fn with_budgets(tenant: &Coordinator, mut stats: TenantStats) -> Result<TenantStats, Trouble> {
    // A tenant that ends meanwhile has no budgets.
    let file = tenant.dir().map_or(Ok(None), |dir| BudgetFile::existing(&dir))?;
    stats.budgets = file.map_or_else(Vec::new, |file| of_file(&file));
    Ok(stats)
}

/// Returns the present budgets of a tenant; `None` if none of its processes counts. Contacts no process.
///
/// # Errors
/// [`Trouble::NoSuchTenant`], [`Trouble::RunDir`].
pub fn budgets(tenant: &Coordinator) -> Result<Option<BudgetReport>, Trouble> {
    let Some(file) = BudgetFile::existing(&tenant.dir()?)? else {
        return Ok(None);
    };
    report(tenant, &file, Vec::new()).map(Some)
}

/// Changes the budgets of a tenant for all its processes. Processes that did not count begin to. No memory is freed: above the
/// budget, new allocations fail until the held memory fits.
///
/// # Errors
/// [`Trouble::NoSuchTenant`], [`Trouble::NoProcess`], [`Trouble::RunDir`]. Processes that
/// do not answer are listed in the report; they are no error.
pub fn change(tenant: &Coordinator, changes: &Budgets) -> Result<BudgetReport, Trouble> {
    let dir = tenant.dir()?;
    // A tenant without a process gets no file.
    drop(tenant.connect_to(&dir, Step::Stats)?);
    let file = BudgetFile::edit(&dir)?;
    // Once the file is there, a process that joins finds it.
    let Everybody { mut peers, mut failures } = tenant.connect_to(&dir, Step::Stats)?;
    let members = peers.all();
    peers.converse(&members, tenant.inquiry(Count), |_, _, said| {
        failures.extend(said.err());
        Next::Done
    });
    file.change(changes)?;
    report(tenant, &file, failures)
}

fn report(
    tenant: &Coordinator,
    file: &BudgetFile,
    failures: Vec<MemberFailure>,
) -> Result<BudgetReport, Trouble> {
    let (tenant, budgets, gpus) = (tenant.tenant().to_string(), file.budgets()?, of_file(file));
    Ok(BudgetReport { tenant, budgets, gpus, failures })
}
