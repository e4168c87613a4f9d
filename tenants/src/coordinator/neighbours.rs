//! On which GPUs other processes have memory.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::{Coordinator, CoordinatorError, Options};
use crate::identity::MemberId;
use crate::run_dir::RunDir;

/// For one tenant to answer; all together have twice as long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The GPUs, by UUID, on which processes in `run_dir` other than `own` have memory of theirs, there or away. None where one
/// of them does not say. Blocks for two seconds at most, and the time of one tenant's answer.
pub fn held_elsewhere(run_dir: &RunDir, own: MemberId) -> Option<BTreeSet<String>> {
    let deadline = Instant::now() + 2 * ANSWER_TIMEOUT;
    let options = Options { contact_timeout: ANSWER_TIMEOUT, ..Options::default() };
    let mut held = BTreeSet::new();
    for name in run_dir.live_tenants().ok()? {
        if Instant::now() > deadline {
            return None;
        }
        let stats = match Coordinator::new(run_dir.clone(), name, options.clone()).stats() {
            Ok(stats) if stats.failures.is_empty() => stats,
            Err(CoordinatorError::NoProcess { .. }) => continue,
            Ok(_) | Err(_) => return None,
        };
        let others = stats.members.iter().filter(|member| member.member.id != own);
        let devices = others.flat_map(|member| &member.pool.devices);
        let with_memory =
            devices.filter(|device| device.own_bytes() > 0 || !device.pinned.is_empty());
        held.extend(with_memory.map(|device| device.uuid.clone()));
    }
    Some(held)
}
