//! The state that commands show: tenants with their processes and bytes, the processes that change them, and the GPUs. Every
//! command that shows state uses this module.

use serde::{Deserialize, Serialize};
use tenants::budget::with_budgets;
use tenants::code::Code;
use tenants::coordinator::{Coordinator, Holdings, Options, TenantStats, Trouble};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::wire::{MemberInfo, MemberState, MemberStats};

use crate::failure::Failure;
use crate::gpus::{Gpu, GpuBytes, Gpus};
use crate::output::complain;
use crate::outsiders::{self, Outside};
use crate::silent::Silent;

/// All that is shown, as it was at one moment.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct View {
    /// Of the machine, and those that tenants name besides.
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) tenants: Vec<TenantView>,
    /// Tenants that cannot be looked at. The others are shown.
    pub(crate) refused: Vec<Refused>,
    /// Processes with GPU memory that are of no tenant, the largest first; empty where one tenant is looked at. None where nobody can tell them from
    /// those of tenants.
    pub(crate) outside: Option<Vec<Outside>>,
}

/// A tenant that cannot be looked at, and why.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "RefusedTenant"))]
pub(crate) struct Refused {
    pub(crate) tenant: String,
    /// Why, in one word.
    pub(crate) code: Code,
    /// Why, in words.
    pub(crate) error: String,
}

/// One tenant.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct TenantView {
    #[serde(flatten)]
    pub(crate) stats: TenantStats,
    /// Processes that pause, resume or save it now, as far as the kernel tells.
    pub(crate) changed_by: Vec<u32>,
    /// Processes that live and did not answer.
    pub(crate) silent: Vec<Silent>,
    /// The memory that its paused processes have on GPUs.
    pub(crate) left: Vec<Left>,
}

/// The memory of a paused process on GPUs: its contexts, and what a pause leaves in place, as NVIDIA's management
/// library tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LeftOnGpus"))]
pub(crate) struct Left {
    pub(crate) pid: u32,
    /// GPUs on which it has none are left out.
    pub(crate) gpus: Vec<GpuBytes>,
}

impl Left {
    pub(crate) fn bytes(&self) -> u64 {
        self.gpus.iter().map(|held| held.bytes).sum()
    }
}

impl TenantView {
    /// Returns the memory of this process on GPUs, if it is paused and that is known.
    pub(crate) fn left_by(&self, pid: u32) -> Option<&Left> {
        self.left.iter().find(|left| left.pid == pid)
    }
}

fn left_of(stats: &TenantStats, gpus: &Gpus) -> Vec<Left> {
    let left = |member: &MemberStats| {
        let MemberInfo { pid, state, .. } = member.member;
        let gpus = gpus.held_by(pid)?;
        match state {
            MemberState::Deep => Some(Left { pid, gpus }),
            // A paused process has contexts. If none are found, the library knows the process by another id.
            MemberState::Paused => (!gpus.is_empty()).then_some(Left { pid, gpus }),
            MemberState::Active
            | MemberState::Offloading
            | MemberState::Restoring
            | MemberState::Faulted => None,
        }
    };
    stats.members.iter().filter_map(left).collect()
}

impl View {
    /// Gathers all tenants with a live process, or the named one. Removes files of dead processes.
    pub(crate) fn gather(run_dir: &RunDir, tenant: Option<&TenantName>) -> Result<Self, Failure> {
        let gpus = Gpus::look();
        let mut view = Self::gather_with(run_dir, tenant, &gpus)?;
        for silent in view.tenants.iter_mut().flat_map(|tenant| &mut tenant.silent) {
            silent.gpus = gpus.held_by(silent.pid).unwrap_or_default();
        }
        Ok(view)
    }

    /// As [`View::gather`], with known GPUs, and without the GPUs of processes that do not answer.
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
        let found = Holdings::of_all(&all.iter().collect::<Vec<_>>());
        let mut tenants = Vec::new();
        let mut refused = Vec::new();
        for (name, (coordinator, found)) in names.iter().zip(all.iter().zip(found)) {
            match found.stats.and_then(|stats| with_budgets(coordinator, stats)) {
                Ok(stats) => {
                    let dir = run_dir.existing_tenant(name).ok().flatten();
                    let changed_by = dir.map(|dir| dir.lock_holders()).unwrap_or_default();
                    let silent = Silent::of(&stats);
                    let left = left_of(&stats, gpus);
                    tenants.push(TenantView { stats, changed_by, silent, left });
                }
                // The first look reports this, because nothing else does.
                Err(error @ Trouble::NoProcess { dead: 1.., .. }) if tenant.is_none() => {
                    complain(&error.to_string());
                }
                Err(Trouble::NoSuchTenant { .. } | Trouble::NoProcess { .. })
                    if tenant.is_none() => {}
                // A tenant that cannot be read is reported, and the others are shown.
                Err(error) if tenant.is_none() => {
                    let code = Code::from(&error);
                    let failure = Failure::from(error);
                    complain(&format!("tenant '{name}': {}", failure.told()));
                    let (tenant, error) = (name.to_string(), failure.to_string());
                    refused.push(Refused { tenant, code, error });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let members = tenants.iter().flat_map(|found| {
            let silent = found.silent.iter().map(|silent| silent.pid);
            found.stats.members.iter().map(|member| member.member.pid).chain(silent)
        });
        let outside = || outsiders::outside(run_dir, &members.collect(), gpus);
        let outside = if tenant.is_none() { outside() } else { Some(Vec::new()) };
        Ok(Self { refused, outside, ..Self::of(tenants, gpus) })
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
        Self { gpus, tenants, refused: Vec::new(), outside: None }
    }

    /// Returns the label of the GPU of this name for a narrow column.
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

    /// No tenant and no known GPU.
    pub(crate) fn empty() -> View {
        View::of(Vec::new(), &Gpus::default())
    }

    #[test]
    fn what_paused_processes_have_left_is_told_where_it_is_known() {
        let states = [MemberState::Active, MemberState::Paused, MemberState::Deep];
        let mut members: Vec<_> =
            (1..).zip(states).map(|(pid, state)| member(pid, state)).collect();
        members.push(member(4, MemberState::Paused));
        let held = |bytes| vec![GpuBytes { uuid: UUID.to_owned(), bytes }];
        let known = (1..=3).map(|pid| (pid, held(u64::from(pid) << 20))).collect();
        let tenant = "train".to_owned();
        let stats = TenantStats { tenant, members, budgets: Vec::new(), failures: Vec::new() };
        let left = left_of(&stats, &Gpus::with_held(vec![h200()], known));
        let left: Vec<_> = left.iter().map(|left| (left.pid, left.bytes())).collect();
        // The last has contexts, and is known by another id there.
        assert_eq!(left, [(2, 2 << 20), (3, 3 << 20)]);
        assert_eq!(left_of(&stats, &Gpus::of(vec![h200()])), []);
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
            left: Vec::new(),
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
