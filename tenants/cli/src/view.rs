//! What is there to be seen: all tenants with their processes and bytes, who changes them, and the GPUs. Every command that
//! shows something draws from here.

use serde::Serialize;
use tenants::coordinator::{Coordinator, CoordinatorError, Options, TenantStats};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

use crate::failure::Failure;
use crate::gpus::{Gpu, Gpus};

/// All that is shown, as it was at one moment.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    /// Of the machine, and those that tenants name besides.
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) tenants: Vec<TenantView>,
}

/// One tenant.
#[derive(Debug, Serialize)]
pub(crate) struct TenantView {
    #[serde(flatten)]
    pub(crate) stats: TenantStats,
    /// Processes that pause, resume or save it now, as far as the kernel tells.
    pub(crate) changed_by: Vec<u32>,
}

impl View {
    /// All tenants that have a live process, or the one that is named. What dead processes left behind is removed.
    pub(crate) fn gather(run_dir: &RunDir, tenant: Option<&TenantName>) -> Result<Self, Failure> {
        Self::gather_with(run_dir, tenant, &Gpus::look())
    }

    /// As [`View::gather`], with GPUs that were looked for before.
    pub(crate) fn gather_with(
        run_dir: &RunDir,
        tenant: Option<&TenantName>,
        gpus: &Gpus,
    ) -> Result<Self, Failure> {
        let mut tenants = Vec::new();
        match tenant {
            Some(name) => tenants.push(one(run_dir, name)?),
            None => {
                for name in run_dir.tenants()? {
                    match one(run_dir, &name) {
                        Ok(tenant) => tenants.push(tenant),
                        Err(
                            CoordinatorError::NoSuchTenant { .. }
                            | CoordinatorError::NoProcess { .. },
                        ) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Ok(Self::of(tenants, gpus))
    }

    pub(crate) fn of(tenants: Vec<TenantView>, gpus: &Gpus) -> Self {
        let members = tenants.iter().flat_map(|tenant| &tenant.stats.members);
        let devices = members.flat_map(|member| &member.pool.devices);
        let gpus = gpus.with(devices.map(|device| device.uuid.as_str()));
        Self { gpus, tenants }
    }

    /// What a narrow column says of the GPU of this name.
    pub(crate) fn gpu_label(&self, uuid: &str) -> String {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid).map_or_else(|| uuid.to_owned(), Gpu::label)
    }
}

fn one(run_dir: &RunDir, name: &TenantName) -> Result<TenantView, CoordinatorError> {
    let stats = Coordinator::new(run_dir.clone(), name.clone(), Options::default()).stats()?;
    let dir = run_dir.existing_tenant(name).ok().flatten();
    let changed_by = dir.map(|dir| dir.lock_holders()).unwrap_or_default();
    Ok(TenantView { stats, changed_by })
}
