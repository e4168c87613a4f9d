//! `sublet ps`: tenants, their processes, and their bytes on each GPU.

use std::process::ExitCode;

use tenants::coordinator::{Coordinator, CoordinatorError, Options, TenantStats};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::wire::{HostProgress, HostStage, MemberState, MemberStats};
use vmm_pool::Contents;

use crate::failure::Failure;
use crate::output::{self, Output};
use crate::{budget, units};

const COMMAND_CHARS_MAX: usize = 40;

pub(crate) fn ps(run_dir: &RunDir, json: bool, output: &mut Output) -> Result<ExitCode, Failure> {
    let tenants = all(run_dir)?;
    if json {
        output.json(&tenants)?;
    } else {
        render(&tenants, output);
    }
    Ok(ExitCode::SUCCESS)
}

/// Statistics of all tenants that have a live process. What dead ones left behind is removed.
pub(crate) fn all(run_dir: &RunDir) -> Result<Vec<TenantStats>, Failure> {
    let mut tenants = Vec::new();
    for name in run_dir.tenants()? {
        match one(run_dir, &name) {
            Ok(stats) => tenants.push(stats),
            Err(CoordinatorError::NoSuchTenant { .. } | CoordinatorError::NoProcess { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(tenants)
}

/// Statistics of one tenant.
pub(crate) fn one(run_dir: &RunDir, name: &TenantName) -> Result<TenantStats, CoordinatorError> {
    Coordinator::new(run_dir.clone(), name.clone(), Options::default()).stats()
}

fn render(tenants: &[TenantStats], output: &mut Output) {
    if tenants.is_empty() {
        output.line(
            "no tenant is running; start one with: sublet run --tenant NAME -- COMMAND ARGUMENTS",
        );
        return;
    }
    let header = [
        "TENANT", "PID", "STATE", "GPU", "LIBRARY", "TAG", "CONTENTS", "ON GPU", "AWAY",
        "IMPORTED", "COMMAND",
    ];
    let mut table = output::table(&header, &[1, 7, 8, 9]);
    for tenant in tenants {
        for member in &tenant.members {
            for row in member_rows(&tenant.tenant, member) {
                table.add_row(row);
            }
        }
    }
    output.table(&table);
    let remarks: Vec<_> = tenants.iter().flat_map(remarks).collect();
    if !remarks.is_empty() {
        output.line("");
    }
    for remark in remarks {
        output.line(remark);
    }
}

/// One row for each class of memory; a process without any has one row.
fn member_rows(tenant: &str, member: &MemberStats) -> Vec<Vec<String>> {
    let lead = [
        tenant.to_owned(),
        member.member.pid.to_string(),
        state_label(member.member.state).to_owned(),
    ];
    let command = units::shortened(&member.member.command, COMMAND_CHARS_MAX);
    let dash = || "-".to_owned();
    let mut rows = Vec::new();
    for device in &member.pool.devices {
        for class in &device.classes {
            let away = class.own_bytes.saturating_sub(class.resident_bytes);
            let tag = if class.tag.is_empty() { dash() } else { class.tag.clone() };
            let mut row = lead.to_vec();
            row.extend([
                device.device.0.to_string(),
                class.library.clone(),
                tag,
                contents_label(class.contents).to_owned(),
                units::bytes_or_dash(class.resident_bytes),
                units::bytes_or_dash(away),
                units::bytes_or_dash(class.imported_bytes),
                command.clone(),
            ]);
            rows.push(row);
        }
    }
    if rows.is_empty() {
        let mut row = lead.to_vec();
        row.extend(std::iter::repeat_with(dash).take(7));
        row.push(command);
        rows.push(row);
    }
    rows
}

/// What a tenant holds of its budgets, what stays on a GPU and why, what members say, and who did not answer.
fn remarks(tenant: &TenantStats) -> Vec<String> {
    let name = &tenant.tenant;
    let mut remarks: Vec<_> = budget::remarks(tenant).collect();
    for member in &tenant.members {
        let pid = member.member.pid;
        for device in &member.pool.devices {
            for pinned in &device.pinned {
                remarks.push(format!(
                    "{name} {pid} {}: {} in {} allocations stay during a pause: {}",
                    device.device,
                    units::bytes(pinned.bytes),
                    pinned.count,
                    pinned.reason
                ));
            }
        }
        remarks.extend(host_remark(&member.host).map(|text| format!("{name} {pid}: {text}")));
        for note in &member.notes {
            remarks.push(format!("{name} {pid}: {note}"));
        }
    }
    for failure in &tenant.failures {
        remarks.push(format!("{name}: no answer from {failure}"));
    }
    remarks
}

/// Host memory that comes in ahead of a pause, or did not.
fn host_remark(host: &HostProgress) -> Option<String> {
    let (held, wanted) = (units::bytes(host.held_bytes), units::bytes(host.wanted_bytes));
    match &host.stage {
        HostStage::Rests if host.brought_in_bytes == 0 => None,
        HostStage::Rests => Some(format!("{held} of {wanted} of host memory is ready for a pause")),
        HostStage::Grows => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause, and more comes in"
        )),
        HostStage::Waits => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause; the rest waits for the one under way"
        )),
        HostStage::Stopped(failure) => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause, and no more comes in: {failure}"
        )),
    }
}

pub(crate) fn state_label(state: MemberState) -> &'static str {
    match state {
        MemberState::Active => "active",
        MemberState::Offloading => "offloading",
        MemberState::Paused => "paused",
        MemberState::Restoring => "restoring",
        MemberState::Faulted => "FAULTED",
    }
}

fn contents_label(contents: Contents) -> &'static str {
    match contents {
        Contents::Keep => "keep",
        Contents::Discard => "discard",
        Contents::File => "file",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tenants::identity::MemberId;
    use tenants::wire::MemberInfo;
    use vmm_pool::driver::DeviceOrdinal;
    use vmm_pool::{ClassBytes, DeviceReport, PinnedBytes, PoolReport};

    use super::*;

    pub(crate) fn member(pid: u32, state: MemberState) -> MemberStats {
        MemberStats {
            member: MemberInfo {
                id: MemberId(u64::from(pid)),
                pid,
                command: "python train.py".to_owned(),
                version: "0.1.0".to_owned(),
                state,
                held: false,
                asked: None,
                tags: Vec::new(),
            },
            pool: PoolReport::default(),
            pauses: 0,
            resumes: 0,
            last_pause: Vec::new(),
            last_resume: Vec::new(),
            host: HostProgress::default(),
            communicators: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn class(library: &str, tag: &str, own: u64, resident: u64, imported: u64) -> ClassBytes {
        ClassBytes {
            library: library.to_owned(),
            tag: tag.to_owned(),
            own_bytes: own,
            resident_bytes: resident,
            imported_bytes: imported,
            ..ClassBytes::default()
        }
    }

    #[test]
    fn nothing_running_is_said_kindly() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        run_dir.tenant(&TenantName::new("gone").unwrap()).unwrap();
        let mut output = Output::new();
        assert_eq!(ps(&run_dir, false, &mut output).unwrap(), ExitCode::SUCCESS);
        assert!(output.text().starts_with("no tenant is running; start one with"));
        assert_eq!(output.text().lines().count(), 1);
        assert!(run_dir.tenants().unwrap().is_empty(), "leftovers stayed");
        let mut output = Output::new();
        ps(&run_dir, true, &mut output).unwrap();
        assert_eq!(output.text(), "[]\n");
    }

    #[test]
    fn bytes_are_listed_by_gpu_library_and_tag_with_what_stays_and_why() {
        let mut first = member(10, MemberState::Active);
        first.pool.devices = vec![DeviceReport {
            device: DeviceOrdinal(0),
            uuid: "a1b2".to_owned(),
            classes: vec![
                class("torch", "kv_cache", 8 << 30, 8 << 30, 0),
                class("nccl", "", 512 << 20, 510 << 20, 64 << 20),
            ],
            pinned: vec![PinnedBytes {
                reason: "registered with a network card".to_owned(),
                bytes: 4 << 20,
                count: 2,
            }],
        }];
        first.pool.devices[0].classes[0].contents = Contents::Discard;
        first.host = HostProgress {
            held_bytes: 1 << 30,
            wanted_bytes: 3 << 30,
            brought_in_bytes: 1 << 30,
            stage: HostStage::Grows,
            ..HostProgress::default()
        };
        let tenants = [TenantStats {
            tenant: "train".to_owned(),
            members: vec![first, member(11, MemberState::Paused)],
            budgets: Vec::new(),
            failures: Vec::new(),
        }];
        let mut output = Output::new();
        render(&tenants, &mut output);
        let expected = "\
TENANT  PID  STATE   GPU  LIBRARY  TAG       CONTENTS   ON GPU   AWAY  IMPORTED  COMMAND
train    10  active  0    torch    kv_cache  discard     8 GiB      -         -  python train.py
train    10  active  0    nccl     -         keep      510 MiB  2 MiB    64 MiB  python train.py
train    11  paused  -    -        -         -               -      -         -  python train.py

train 10 GPU 0: 4 MiB in 2 allocations stay during a pause: registered with a network card
train 10: 1 GiB of 3 GiB of host memory is ready for a pause, and more comes in
";
        assert_eq!(output.text(), expected);
    }
}
