//! A tenant's budget and held memory on each GPU. Both are asked, and the budget is changed, while its processes run.
//!
//! It takes no part in pauses and resumes, and holds no lock of theirs.

use serde::{Serialize, Serializer};
use vmm_pool::budget::{Figure, Gpu};
use vmm_pool::driver::DeviceUuid;

use super::cast::Everybody;
use super::conversation::Next;
use super::coordinator::Coordinator;
use super::figures::GpuBudget;
use super::report::{MemberFailure, Step};
use super::trouble::Trouble;
use sublet_protocol::budget::Budgets;
use sublet_protocol::identity::TenantName;
use sublet_protocol::run_dir::{BudgetFile, RunDirError, TenantDir};
use sublet_protocol::wire::Count;

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
    /// Of a tenant that nobody counts in.
    pub fn none(tenant: &TenantName) -> Self {
        let (budgets, gpus) = (Budgets::default(), Vec::new());
        Self { tenant: tenant.to_string(), budgets, gpus, failures: Vec::new() }
    }

    /// Returns what the tenant may hold of a GPU, and what it holds; also of a GPU that no process of it has.
    pub fn figure(&self, uuid: DeviceUuid, index: Option<u32>) -> Figure {
        let known = self.gpus.iter().find(|gpu| gpu.uuid == uuid);
        known.map_or_else(
            || Figure { budget_bytes: self.budgets.of(uuid, index), held_bytes: 0 },
            |gpu| Figure { budget_bytes: gpu.budget_bytes, held_bytes: gpu.held_bytes },
        )
    }
}

impl GpuBudget {
    fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.uuid.to_string(),
            index: gpu.index,
            budget_bytes: gpu.figure.budget_bytes,
            held_bytes: gpu.figure.held_bytes,
            total_bytes: gpu.total_bytes,
            uuid: gpu.uuid,
        }
    }

    /// Returns the bytes that are held beyond the budget.
    pub fn over_bytes(&self) -> u64 {
        self.budget_bytes.map_or(0, |budget| self.held_bytes.saturating_sub(budget))
    }

    /// Returns the bytes that `budgets` would let a tenant hold on this GPU; none without a bound.
    pub fn under(&self, budgets: &Budgets) -> Option<u64> {
        budgets.of(self.uuid, self.index)
    }
}

/// The GPUs of a tenant whose memory is counted; none where nobody counts.
///
/// # Errors
/// [`RunDirError::Io`].
pub(super) fn of_dir(dir: &TenantDir) -> Result<Vec<GpuBudget>, RunDirError> {
    Ok(BudgetFile::existing(dir)?.map_or_else(Vec::new, |file| of_file(&file)))
}

fn of_file(file: &BudgetFile) -> Vec<GpuBudget> {
    file.forget_dead(None);
    let mut gpus: Vec<_> = file.shared().gpus().iter().map(GpuBudget::new).collect();
    gpus.sort_by_key(|gpu| (gpu.index.unwrap_or(u32::MAX), gpu.gpu.clone()));
    gpus
}

impl Coordinator {
    /// The tenant's budgets as they are; `None` where no process of it counts. Asks no process.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::RunDir`].
    pub fn budgets(&self) -> Result<Option<BudgetReport>, Trouble> {
        let Some(file) = BudgetFile::existing(&self.dir()?)? else {
            return Ok(None);
        };
        self.budget_report(&file, Vec::new()).map(Some)
    }

    /// Changes the tenant's budgets for all its processes. Those that did not count what they hold begin to. Nothing is
    /// taken from anybody: where more is held than may be, new allocations fail until it fits.
    ///
    /// # Errors
    /// [`Trouble::NoSuchTenant`], [`Trouble::NoProcess`], [`Trouble::RunDir`]. Processes that
    /// do not answer are listed, and no error.
    pub fn change_budgets(&self, changes: &Budgets) -> Result<BudgetReport, Trouble> {
        let dir = self.dir()?;
        // A tenant without a process gets no file.
        drop(self.connect_to(&dir, Step::Stats)?);
        let file = BudgetFile::edit(&dir)?;
        // Once the file is there, a process that joins finds it.
        let Everybody { mut peers, mut failures } = self.connect_to(&dir, Step::Stats)?;
        let members = peers.all();
        peers.converse(&members, self.inquiry(Count), |_, _, said| {
            failures.extend(said.err());
            Next::Done
        });
        file.change(changes)?;
        self.budget_report(&file, failures)
    }

    fn budget_report(
        &self,
        file: &BudgetFile,
        failures: Vec<MemberFailure>,
    ) -> Result<BudgetReport, Trouble> {
        let (tenant, budgets, gpus) = (self.tenant.to_string(), file.budgets()?, of_file(file));
        Ok(BudgetReport { tenant, budgets, gpus, failures })
    }
}
