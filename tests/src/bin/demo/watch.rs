//! Looks at the node while the script plays: who holds how much of which GPU, and how far each job is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sublet_tests::{MIB, Outcome, Stage};
use tenants::coordinator::{Coordinator, Options, TenantStats};
use tenants::identity::TenantName;

use crate::screen::Screen;

/// The tenants, in the order in which they are shown.
pub(crate) const TENANTS: [&str; 2] = ["train", "infer"];

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What one GPU holds, in MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// By tenant, as in [`TENANTS`].
    pub(crate) tenants_mib: [u64; TENANTS.len()],
    /// As the driver says.
    pub(crate) free_mib: u64,
}

/// Shows what there is until `over`.
pub(crate) fn watch(stage: &Stage, screen: &Screen, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        // A look between two states of a process may fail; the next one will not.
        if let Ok(gpus) = look(stage, screen.gpu_count()) {
            screen.show(&gpus);
        }
        screen.tick();
        wait();
    }
}

#[expect(clippy::disallowed_methods, reason = "a picture that is drawn ten times a second")]
fn wait() {
    std::thread::sleep(LOOK_EVERY);
}

fn look(stage: &Stage, gpu_count: usize) -> Outcome<Vec<Gpu>> {
    let mut gpus = vec![Gpu::default(); gpu_count];
    for (gpu, device) in gpus.iter_mut().zip(0..) {
        gpu.free_mib = stage.memory(device)?.free_bytes / MIB;
    }
    for (index, tenant) in TENANTS.iter().enumerate() {
        for member in stats(stage, tenant)?.members {
            for device in member.pool.devices {
                let gpu = usize::try_from(device.device.0).ok().and_then(|at| gpus.get_mut(at));
                if let Some(gpu) = gpu {
                    gpu.tenants_mib[index] += device.resident_bytes() / MIB;
                }
            }
        }
    }
    Ok(gpus)
}

/// What the processes of `tenant` hold; nothing when there are none yet.
fn stats(stage: &Stage, tenant: &str) -> Outcome<TenantStats> {
    let coordinator =
        Coordinator::new(stage.run_dir().clone(), TenantName::new(tenant)?, Options::default());
    Ok(coordinator.stats().unwrap_or_else(|_| TenantStats {
        tenant: tenant.to_owned(),
        members: Vec::new(),
        budgets: Vec::new(),
        failures: Vec::new(),
    }))
}
