//! The memory of a GPU that a tenant can get, because other tenants share the GPU in turns.
//!
//! Programs query the free memory when they start. They size their caches by the answer, or end. For a program that waits for its
//! turn, memory of other tenants in turns counts as free.

use std::time::{Duration, Instant};

use tenants::coordinator::{Coordinator, Holdings, Options};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

use crate::gather::{queues, standing_of};
use crate::signals;

/// The longest time for an answer of a process.
const ANSWER: Duration = Duration::from_millis(500);
/// The time within which the free memory and the memory of others must agree.
const STEADY_WITHIN: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Returns the bytes of the GPU `uuid` that `tenant` would gain if all other tenants in turns were paused. `look_free` reads the
/// free memory there, once or several times. Its last call is of the same moment as the answer, in which no tenant is being
/// paused or resumed. Blocks briefly, for a second or two at most. After that, the answer is the smaller of the last two.
pub fn others_give(
    run_dir: &RunDir,
    tenant: &TenantName,
    uuid: &str,
    mut look_free: impl FnMut(),
) -> u64 {
    let deadline = Instant::now() + STEADY_WITHIN;
    let mut before = given_up(run_dir, tenant, uuid);
    loop {
        look_free();
        let after = given_up(run_dir, tenant, uuid);
        if before == after
            && let Some(bytes) = after
        {
            return bytes;
        }
        if Instant::now() >= deadline {
            return before.unwrap_or(0).min(after.unwrap_or(0));
        }
        signals::wait(&mut [], LOOK_AGAIN);
        before = after;
    }
}

/// Returns the same for this moment; none while one of them is being paused or resumed.
fn given_up(run_dir: &RunDir, tenant: &TenantName, uuid: &str) -> Option<u64> {
    let names = run_dir.tenants().unwrap_or_default().into_iter().filter(|name| name != tenant);
    let options = Options { timeout: Some(ANSWER), contact_timeout: ANSWER, ..Options::default() };
    let asked: Vec<_> =
        names.map(|name| Coordinator::new(run_dir.clone(), name, options.clone())).collect();
    let mut all_bytes = 0_u64;
    for Holdings { stats, .. } in Holdings::of_all(&asked.iter().collect::<Vec<_>>()) {
        let Some(stats) = stats.ok().filter(queues) else { continue };
        if stats.members.iter().any(|member| !member.member.state.rests()) {
            return None;
        }
        let held = standing_of(&stats).held.remove(uuid).unwrap_or_default();
        all_bytes = all_bytes.saturating_add(held.given_bytes());
    }
    Some(all_bytes)
}
