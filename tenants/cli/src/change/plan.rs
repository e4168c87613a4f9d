//! `sublet pause --dry-run`: what a pause would free, and what it would need. Nothing moves.

use std::collections::BTreeMap;
use std::process::ExitCode;

use serde::Serialize;
use tenants::coordinator::staying;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::Scope;
use vmm_pool::{Contents, PinnedBytes};

use crate::args::ShowArgs;
use crate::failure::Failure;
use crate::gpus::Gpus;
use crate::output::Output;
use crate::units;
use crate::view::View;

/// The plan of a pause: what it would do.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Plan {
    tenant: String,
    /// Always `would_pause`.
    outcome: &'static str,
    /// Device memory that it would give back.
    freed_bytes: u64,
    /// Host memory that contents take at most: what is zero or unused takes none.
    host_bytes_max: u64,
    /// Of that, what the processes hold already.
    host_held_bytes: u64,
    /// Disk that contents of regions with the policy `file` take at most.
    file_bytes_max: u64,
    /// Device memory that would stay.
    stays_bytes: u64,
    /// Of these, how much for which cause. Of a pause by tag the causes are not told.
    stays: Vec<PinnedBytes>,
    devices: Vec<PlanDevice>,
}

/// One GPU of it.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct PlanDevice {
    uuid: String,
    freed_bytes: u64,
}

pub(super) fn plan(
    tenant: &TenantName,
    scope: &Scope,
    run_dir: &RunDir,
    how: ShowArgs,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let gpus = Gpus::look();
    let view = View::gather_with(run_dir, Some(tenant), &gpus)?;
    let plan = Plan::of(tenant, scope, &view);
    if how.json {
        output.json(&plan)?;
    } else {
        output.lines(plan.in_words(scope, tenant, &gpus));
    }
    Ok(ExitCode::SUCCESS)
}

impl Plan {
    fn of(tenant: &TenantName, scope: &Scope, view: &View) -> Self {
        let mut plan =
            Self { tenant: tenant.to_string(), outcome: "would_pause", ..Self::default() };
        let mut devices: BTreeMap<&str, u64> = BTreeMap::new();
        for member in view.tenants.iter().flat_map(|tenant| &tenant.stats.members) {
            plan.host_held_bytes += member.pool.host_arena_bytes;
            if *scope == Scope::Whole {
                PinnedBytes::merge(&mut plan.stays, &member.member.stays);
            }
            for device in &member.pool.devices {
                for class in device.classes.iter().filter(|class| scope.names_tag(&class.tag)) {
                    let moves = class.resident_bytes.saturating_sub(class.pinned_bytes);
                    *devices.entry(&device.uuid).or_default() += moves;
                    plan.freed_bytes += moves;
                    plan.stays_bytes += class.pinned_bytes;
                    match class.contents {
                        Contents::Keep => plan.host_bytes_max += moves,
                        Contents::File => plan.file_bytes_max += moves,
                        Contents::DiscardByTag if *scope == Scope::Whole => {
                            plan.host_bytes_max += moves;
                        }
                        Contents::Discard | Contents::DiscardByTag => {}
                    }
                }
            }
        }
        if *scope == Scope::Whole {
            plan.stays_bytes = PinnedBytes::total_bytes(&plan.stays);
        }
        let of_device = |(uuid, freed_bytes): (&str, u64)| {
            (freed_bytes > 0).then(|| PlanDevice { uuid: uuid.to_owned(), freed_bytes })
        };
        plan.devices = devices.into_iter().filter_map(of_device).collect();
        plan
    }

    fn in_words(&self, scope: &Scope, tenant: &TenantName, gpus: &Gpus) -> Vec<String> {
        let subject = scope.subject(tenant);
        let place = gpus.several(self.devices.iter().map(|device| device.uuid.as_str()));
        let mut parts = Vec::new();
        if self.freed_bytes == 0 {
            parts.push(format!("a pause of {subject} would free nothing"));
        } else {
            parts.push(format!(
                "a pause of {subject} would free {} on {place}",
                units::bytes(self.freed_bytes)
            ));
            parts.push(format!(
                "it needs at most {} of host memory, {} of which it holds already",
                units::bytes(self.host_bytes_max),
                units::bytes(self.host_held_bytes)
            ));
        }
        if self.file_bytes_max > 0 {
            parts.push(format!("{} go to files at most", units::bytes(self.file_bytes_max)));
        }
        if self.stays_bytes > 0 {
            parts.push(format!("{} would stay", units::bytes(self.stays_bytes)));
        }
        let mut lines = vec![format!("{}. Nothing was changed", parts.join("; "))];
        lines.extend(staying(&self.stays));
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tenants::scope::TagNames;

    use super::*;
    use crate::gpus::tests::h200;
    use crate::view::tests::busy;

    #[test]
    fn a_plan_is_of_what_is_on_gpus_and_named() {
        let mut view = busy();
        view.tenants.retain(|tenant| tenant.stats.tenant == "train");
        view.tenants[0].stats.members[1].pool.devices[0].classes[0].pinned_bytes = 1 << 30;
        let reason = "registered with a network card".to_owned();
        view.tenants[0].stats.members[1].member.stays =
            vec![PinnedBytes { reason, bytes: 1 << 30, count: 2 }];
        let (gpus, tenant) = (Gpus::of(vec![h200()]), TenantName::new("train").unwrap());
        let said = |scope: &Scope| {
            Plan::of(&tenant, scope, &view).in_words(scope, &tenant, &gpus).join("\n")
        };
        assert_eq!(
            said(&Scope::Whole),
            "a pause of tenant 'train' would free 15.5 GiB on GPU 3; it needs at most 15.5 GiB of host memory, 3 GiB of \
             which it holds already; 1 GiB would stay. Nothing was changed\n1 GiB of device memory stay: registered with a network card"
        );
        let tags = |name: &str| {
            let names = BTreeSet::from([name.to_owned()]);
            Scope::Tags { tags: TagNames::Named(names), owner: None }
        };
        assert!(said(&tags("nccl")).contains("would free 512 MiB on GPU 3"));
        let nothing =
            "a pause of tag 'kv' of tenant 'train' would free nothing. Nothing was changed";
        assert_eq!(said(&tags("kv")), nothing);
    }
}
