//! Queries of a swap before anything moves: the needs of the second tenant, the bytes of the first, and whether the second needs
//! memory of the first.

use std::collections::BTreeMap;

use sublet_coordinator::{MemberFailure, OnFailure, Session, Step, needs};
use sublet_protocol::wire::{FailureKind, Needed, Stats, Wanted};
use sublet_protocol::{identity::TenantName, scope::Scope};
use vmm_pool::ClassBytes;

/// Returns the device memory that a resume of each member of a session needs, in the order of the members.
pub(super) fn needs_of_each(leg: &mut Session<'_>) -> Result<Vec<Needed>, Vec<MemberFailure>> {
    let Session { cast, round, members, .. } = leg;
    let mut all = needs(cast, round.scope(), members).of_all()?;
    all.sort_by_key(|(index, _)| members.iter().position(|member| member == index));
    Ok(all.into_iter().map(|(_, needed)| needed).collect())
}

/// Returns the device memory that a pause of a session would free now, by device, as far as its members answer.
pub(super) fn resident_bytes(leg: &mut Session<'_>) -> BTreeMap<String, u64> {
    let Session { cast, round, members, .. } = leg;
    let result = cast.step(&Stats, members, cast.options.contact_timeout, OnFailure::WaitForAll);
    let leaves = |class: &&ClassBytes| match round.scope() {
        Scope::Whole => true,
        Scope::Tags { tags, .. } => tags.to_pause().has(&class.tag),
    };
    let mut bytes = BTreeMap::new();
    for device in result.done.iter().flat_map(|(_, stats)| &stats.pool.devices) {
        let classes = device.classes.iter().filter(leaves);
        let leaving = classes.map(|class| class.resident_bytes.saturating_sub(class.pinned_bytes));
        *bytes.entry(device.uuid.clone()).or_insert(0_u64) += leaving.sum::<u64>();
    }
    bytes
}

/// Returns one failure for each member of a paused session that has memory of tenant `lender` open.
pub(super) fn wanted_of(
    leg: &mut Session<'_>,
    lender: &TenantName,
) -> Result<Vec<MemberFailure>, Vec<MemberFailure>> {
    let mut failures = Vec::new();
    for (index, lending) in leg.lendings()? {
        let of_lender = |wanted: &&Wanted| wanted.tenant == lender.as_str();
        let (mut count, mut bytes) = (0_u64, 0_u64);
        for wanted in lending.wanted.iter().filter(of_lender) {
            count += wanted.count;
            bytes = bytes.saturating_add(wanted.bytes);
        }
        if count > 0 {
            let message = format!(
                "{bytes} bytes in {count} allocations that it has open are tenant '{lender}'s, which is to be paused: \
                 resume this tenant while '{lender}' runs, and have it let them go first (cudaIpcCloseMemHandle; in PyTorch, drop \
                 the tensors and call torch.cuda.ipc_collect(); for VMM imports, cuMemUnmap and cuMemRelease)"
            );
            let (who, kind) = (leg.cast.peers.who(index), FailureKind::LenderAway);
            failures.push(MemberFailure::new(who, Step::Lending, kind, message));
        }
    }
    Ok(failures)
}
