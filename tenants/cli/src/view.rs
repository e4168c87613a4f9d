//! What is there to be seen: all tenants with their processes and bytes, who changes them, and the GPUs. Every command that
//! shows something draws from here.

use serde::Serialize;
use tenants::coordinator::{Coordinator, CoordinatorError, Holdings, Options, TenantStats};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

use crate::failure::Failure;
use crate::gpus::{Gpu, Gpus};
use crate::outsiders;
use crate::silent::Silent;

/// All that is shown, as it was at one moment.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct View {
    /// Of the machine, and those that tenants name besides.
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) tenants: Vec<TenantView>,
}

/// One tenant.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct TenantView {
    #[serde(flatten)]
    pub(crate) stats: TenantStats,
    /// Processes that pause, resume or save it now, as far as the kernel tells.
    pub(crate) changed_by: Vec<u32>,
    /// Processes that live and did not answer.
    pub(crate) silent: Vec<Silent>,
}

impl View {
    /// All tenants that have a live process, or the one that is named. What dead processes left behind is removed.
    pub(crate) fn gather(run_dir: &RunDir, tenant: Option<&TenantName>) -> Result<Self, Failure> {
        let mut view = Self::gather_with(run_dir, tenant, &Gpus::look())?;
        view.look_up_silent();
        Ok(view)
    }

    /// What those that did not answer have on GPUs. Where nobody is silent, nobody is asked.
    fn look_up_silent(&mut self) {
        let silent = || self.tenants.iter().flat_map(|tenant| &tenant.silent);
        let pids: Vec<_> = silent().map(|silent| silent.pid).collect();
        if pids.is_empty() {
            return;
        }
        let mut held = outsiders::held_by(pids);
        for silent in self.tenants.iter_mut().flat_map(|tenant| &mut tenant.silent) {
            silent.gpus = held.remove(&silent.pid).unwrap_or_default();
        }
    }

    /// As [`View::gather`], with GPUs that were looked for before, and without those of processes that do not answer.
    pub(crate) fn gather_with(
        run_dir: &RunDir,
        tenant: Option<&TenantName>,
        gpus: &Gpus,
    ) -> Result<Self, Failure> {
        let names = match tenant {
            Some(name) => vec![name.clone()],
            None => run_dir.tenants()?,
        };
        let of =
            |name: &TenantName| Coordinator::new(run_dir.clone(), name.clone(), Options::default());
        let all: Vec<_> = names.iter().map(of).collect();
        let all = Holdings::of_all(&all.iter().collect::<Vec<_>>());
        let mut tenants = Vec::new();
        for (name, found) in names.iter().zip(all) {
            match found.stats {
                Ok(stats) => {
                    let dir = run_dir.existing_tenant(name).ok().flatten();
                    let changed_by = dir.map(|dir| dir.lock_holders()).unwrap_or_default();
                    let silent = Silent::of(&stats);
                    tenants.push(TenantView { stats, changed_by, silent });
                }
                Err(CoordinatorError::NoSuchTenant { .. } | CoordinatorError::NoProcess { .. })
                    if tenant.is_none() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self::of(tenants, gpus))
    }

    pub(crate) fn of(tenants: Vec<TenantView>, gpus: &Gpus) -> Self {
        let members = tenants.iter().flat_map(|tenant| &tenant.stats.members);
        let devices = members.flat_map(|member| &member.pool.devices);
        let budgets = || tenants.iter().flat_map(|tenant| &tenant.stats.budgets);
        let named = devices.map(|device| device.uuid.as_str());
        let mut gpus = gpus.with(named.chain(budgets().map(|budget| budget.gpu.as_str())));
        // Each GPU has one label, and a tenant that counts may know the index.
        for gpu in gpus.iter_mut().filter(|gpu| gpu.index.is_none()) {
            gpu.index =
                budgets().find(|budget| budget.gpu == gpu.uuid).and_then(|budget| budget.index);
        }
        Self { gpus, tenants }
    }

    /// What a narrow column says of the GPU of this name.
    pub(crate) fn gpu_label(&self, uuid: &str) -> String {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid).map_or_else(|| uuid.to_owned(), Gpu::label)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tenants::wire::{Asked, MemberState, MemberStats, Phase, PhaseReport};
    use vmm_pool::driver::DeviceOrdinal;
    use vmm_pool::{ClassBytes, Contents, DeviceReport};

    use super::*;
    use crate::gpus::tests::{UUID, h200};
    use crate::ps::tests::member;

    fn on_gpu(mut member: MemberStats, classes: Vec<ClassBytes>) -> MemberStats {
        let (device, uuid) = (DeviceOrdinal(0), UUID.to_owned());
        member.pool.devices = vec![DeviceReport { device, uuid, classes, pinned: Vec::new() }];
        member
    }

    fn class(library: &str, tag: &str, own_bytes: u64, resident_bytes: u64) -> ClassBytes {
        let (library, tag) = (library.to_owned(), tag.to_owned());
        ClassBytes { library, tag, own_bytes, resident_bytes, ..ClassBytes::default() }
    }

    /// No tenant, and no GPU that anybody knows.
    pub(crate) fn empty() -> View {
        View::of(Vec::new(), &Gpus::default())
    }

    /// One GPU; a tenant that is being paused, of which one process saves and the other has still to come to the cut; and one
    /// that is paused.
    pub(crate) fn busy() -> View {
        let mut active = on_gpu(
            member(10, MemberState::Active),
            vec![class("torch", "", 8 << 30, 8 << 30), class("nccl", "nccl", 512 << 20, 512 << 20)],
        );
        active.pool.devices[0].classes[0].imported_bytes = 64 << 20;
        active.pool.host_arena_bytes = 3 << 30;
        let mut saving =
            on_gpu(member(11, MemberState::Offloading), vec![class("torch", "", 8 << 30, 8 << 30)]);
        saving.member.held = true;
        saving.member.asked = Some(Asked { round: 1, phase: Phase::Prepare });
        let mut paused =
            on_gpu(member(12, MemberState::Paused), vec![class("torch", "kv", 8 << 30, 0)]);
        paused.pool.devices[0].classes[0].contents = Contents::Discard;
        paused.pauses = 7;
        paused.pause_times.counts[3] = 6;
        paused.pause_times.counts[4] = 1;
        paused.resumes = 6;
        let phase = |phase, elapsed_us| {
            let steps = vec![("copy".to_owned(), elapsed_us / 2)];
            (phase, PhaseReport { elapsed_us, steps, ..PhaseReport::default() })
        };
        paused.last_pause = vec![phase(Phase::Prepare, 250_000), phase(Phase::Release, 50_000)];
        paused.last_resume = vec![phase(Phase::Restore, 400_000)];
        let tenant = |name: &str, members, changed_by| TenantView {
            stats: TenantStats {
                tenant: name.to_owned(),
                members,
                budgets: Vec::new(),
                failures: Vec::new(),
            },
            changed_by,
            silent: Vec::new(),
        };
        View::of(
            vec![
                tenant("infer", vec![paused], Vec::new()),
                tenant("train", vec![active, saving], vec![9_999_999]),
            ],
            &Gpus::of(vec![h200()]),
        )
    }
}
