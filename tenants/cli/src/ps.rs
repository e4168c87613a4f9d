//! `sublet ps`: tenants, their processes, and their bytes on each GPU.

use std::collections::BTreeMap;
use std::process::ExitCode;

use tenants::coordinator::TenantStats;
use tenants::run_dir::RunDir;
use tenants::scope::NCCL_TAG;
use tenants::wire::{
    HostProgress, HostStage, Idleness, Lent, MemberInfo, MemberState, MemberStats, TagBytes,
};
use vmm_pool::{Contents, PoolReport};

use crate::failure::Failure;
use crate::output::{self, Output};
use crate::silent::Silent;
use crate::view::{TenantView, View};
use crate::{budget, early, outsiders, units};

const COMMAND_CHARS_MAX: usize = 40;

pub(crate) fn ps(run_dir: &RunDir, json: bool, output: &mut Output) -> Result<ExitCode, Failure> {
    let view = View::gather(run_dir, None)?;
    if json {
        output.json(&view)?;
    } else {
        let mut early = early::find(run_dir);
        early.retain(|name, _| view.tenants.iter().all(|tenant| tenant.stats.tenant != *name));
        render(&view, &early, output);
    }
    Ok(ExitCode::SUCCESS)
}

/// `early` has no GPU memory yet.
fn render(view: &View, early: &BTreeMap<String, u32>, output: &mut Output) {
    if view.tenants.is_empty() && early.is_empty() {
        output.line(
            "no tenant is running; start one with: sublet run --tenant NAME -- COMMAND ARGUMENTS",
        );
        return;
    }
    // Most tenants are in none.
    let mut members = view.tenants.iter().flat_map(|tenant| &tenant.stats.members);
    let has_family = members.any(|member| member.member.family.is_some());
    let mut header = vec![
        "TENANT", "PID", "STATE", "GPU", "LIBRARY", "TAG", "CONTENTS", "ON GPU", "AWAY",
        "IMPORTED", "COMMAND",
    ];
    let mut numbers = [1, 7, 8, 9];
    if has_family {
        header.insert(1, "FAMILY");
        numbers = numbers.map(|column| column + 1);
    }
    let mut table = output::table(&header, &numbers);
    for TenantView { stats, silent, .. } in &view.tenants {
        let members = stats.members.iter().map(|member| {
            (member.member.family.as_deref(), member_rows(view, &stats.tenant, member))
        });
        let silent = silent.iter().map(|silent| (None, silent_rows(view, &stats.tenant, silent)));
        for (family, rows) in members.chain(silent) {
            for mut row in rows {
                if has_family {
                    row.insert(1, family.unwrap_or("-").to_owned());
                }
                table.add_row(row);
            }
        }
    }
    for (tenant, pid) in early {
        let mut row = vec![tenant.clone(), pid.to_string(), "no memory yet".to_owned()];
        row.extend(std::iter::repeat_n("-".to_owned(), 7));
        row.push(units::shortened(&outsiders::command_of(*pid), COMMAND_CHARS_MAX));
        if has_family {
            row.insert(1, "-".to_owned());
        }
        table.add_row(row);
    }
    output.table(&table);
    let remarks: Vec<_> =
        view.tenants.iter().flat_map(|tenant| remarks(view, &tenant.stats)).collect();
    if !remarks.is_empty() {
        output.line("");
    }
    for remark in remarks {
        output.line(remark);
    }
}

/// One row for each class of memory; a process without any has one row.
fn member_rows(view: &View, tenant: &str, member: &MemberStats) -> Vec<Vec<String>> {
    let lead = [tenant.to_owned(), member.member.pid.to_string(), standing_label(member)];
    let command = units::shortened(&member.member.command, COMMAND_CHARS_MAX);
    let dash = || "-".to_owned();
    let mut rows = Vec::new();
    for device in &member.pool.devices {
        for class in &device.classes {
            let away = class.own_bytes.saturating_sub(class.resident_bytes);
            let tag = if class.tag.is_empty() { dash() } else { class.tag.clone() };
            let mut row = lead.to_vec();
            row.extend([
                view.gpu_label(&device.uuid),
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

/// One row for each GPU on which it is known to have memory, or one.
fn silent_rows(view: &View, tenant: &str, silent: &Silent) -> Vec<Vec<String>> {
    let row = |gpu: String, bytes: String| {
        let dash = || "-".to_owned();
        let state = silent.standing.label().to_owned();
        let command = units::shortened(&silent.command, COMMAND_CHARS_MAX);
        let (tenant, pid) = (tenant.to_owned(), silent.pid.to_string());
        vec![tenant, pid, state, gpu, dash(), dash(), dash(), bytes, dash(), dash(), command]
    };
    let mut rows: Vec<_> = silent
        .gpus
        .iter()
        .map(|held| row(view.gpu_label(&held.uuid), units::bytes(held.bytes)))
        .collect();
    if rows.is_empty() {
        rows.push(row("-".to_owned(), "-".to_owned()));
    }
    rows
}

/// What a tenant holds of its budgets, what stays on a GPU and why, what members say, and who did not answer.
fn remarks(view: &View, tenant: &TenantStats) -> Vec<String> {
    let name = &tenant.tenant;
    let mut remarks: Vec<_> = budget::remarks(tenant).collect();
    remarks.extend(nccl_remark(tenant));
    for member in &tenant.members {
        let pid = member.member.pid;
        for device in &member.pool.devices {
            for pinned in &device.pinned {
                remarks.push(format!(
                    "{name} {pid} GPU {}: {} in {} allocations stay during a pause: {}",
                    view.gpu_label(&device.uuid),
                    units::bytes(pinned.bytes),
                    pinned.count,
                    pinned.reason
                ));
            }
        }
        remarks
            .extend(member.lent.iter().map(|lent| format!("{name} {pid}: {}", lent_remark(lent))));
        remarks
            .extend(deep_remark(&member.member, name).map(|text| format!("{name} {pid}: {text}")));
        remarks.extend(stayed_remark(&member.member).map(|text| format!("{name} {pid}: {text}")));
        remarks.extend(host_remark(&member.host).map(|text| format!("{name} {pid}: {text}")));
        remarks.extend(spilled_remark(&member.pool).map(|text| format!("{name} {pid}: {text}")));
        for note in &member.notes {
            remarks.push(format!("{name} {pid}: {note}"));
        }
    }
    for failure in &tenant.failures {
        remarks.push(format!("{name}: no answer from {failure}"));
    }
    remarks
}

/// NCCL is paused by itself: what may look like a job that hangs.
fn nccl_remark(tenant: &TenantStats) -> Option<String> {
    let waiting = tenant.members.iter().filter(|member| member.member.nccl_waits).count();
    let (name, all) = (&tenant.tenant, tenant.members.len());
    (waiting > 0).then(|| {
        format!(
            "{name}: calls into NCCL wait in {waiting} of {all} processes until: sublet resume {name} --library nccl"
        )
    })
}

/// Memory that another tenant has open: a pause waits for it.
fn lent_remark(lent: &Lent) -> String {
    let pid = lent.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
    format!(
        "{} in {} allocations are open in process {pid} of tenant {}: a pause waits until they are closed",
        units::bytes(lent.bytes),
        lent.handles + lent.tickets,
        lent.tenant
    )
}

/// Its contexts are away too.
fn deep_remark(member: &MemberInfo, tenant: &str) -> Option<String> {
    (member.state == MemberState::Deep).then(|| {
        format!("deep pause: nothing of it is on a GPU, its contexts neither; `sublet resume {tenant}` brings it back")
    })
}

/// Memory that a pause has left behind.
fn stayed_remark(member: &MemberInfo) -> Option<String> {
    (member.stayed_bytes > 0).then(|| {
        format!(
            "{} of device memory should have gone with the pause and have not: a resume and another pause try again",
            units::bytes(member.stayed_bytes)
        )
    })
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

/// Saved contents that have made room for another tenant's.
fn spilled_remark(pool: &PoolReport) -> Option<String> {
    (pool.spilled_bytes > 0).then(|| {
        format!(
            "{} of saved contents are in a file, to make room in host memory: a resume reads them from there",
            units::bytes(pool.spilled_bytes)
        )
    })
}

/// Where a process stands, which tags it runs without, and for how long it has done nothing where that is long: `idle` when its devices were
/// seen to have nothing left to do, else `quiet`.
fn standing_label(member: &MemberStats) -> String {
    const SHOWN_FROM_US: u64 = 1_000_000;
    let state = state_label(member.member.state);
    if member.member.state != MemberState::Active {
        return state.to_owned();
    }
    let away = match tags_away(&member.member).join(", ") {
        tags if tags.is_empty() => String::new(),
        tags => format!(" ({tags} away)"),
    };
    let Idleness { quiet_us, is_drained, .. } = member.idleness;
    if quiet_us < SHOWN_FROM_US {
        return format!("{state}{away}");
    }
    let word = if is_drained { "idle" } else { "quiet" };
    format!("{state}{away}, {word} {} s", quiet_us / 1_000_000)
}

/// The tags of memory that a process which runs is without. NCCL's is away also if it had no memory.
fn tags_away(member: &MemberInfo) -> Vec<&str> {
    let is_away = |row: &&TagBytes| row.away_bytes + row.imported_away_bytes > 0;
    let tags = member.tags.iter().filter(is_away).map(|row| row.tag.as_str());
    let nccl = member.nccl_waits.then_some(NCCL_TAG);
    let mut away: Vec<_> = tags.chain(nccl).collect();
    away.sort_unstable();
    away.dedup();
    away
}

pub(crate) fn state_label(state: MemberState) -> &'static str {
    match state {
        MemberState::Active => "active",
        MemberState::Offloading => "offloading",
        MemberState::Paused => "paused",
        MemberState::Deep => "deep",
        MemberState::Restoring => "restoring",
        MemberState::Faulted => "FAULTED",
    }
}

pub(crate) fn contents_label(contents: Contents) -> &'static str {
    match contents {
        Contents::Keep => "keep",
        Contents::Discard => "discard",
        Contents::File => "file",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tenants::identity::{MemberId, TenantName};
    use tenants::wire::MemberInfo;
    use vmm_pool::driver::DeviceOrdinal;
    use vmm_pool::{ClassBytes, DeviceReport, PinnedBytes};

    use super::*;
    use crate::gpus::Gpus;
    use crate::gpus::tests::{UUID, h200};
    use crate::outsiders::Held;
    use crate::silent::Standing;

    pub(crate) fn member(pid: u32, state: MemberState) -> MemberStats {
        MemberStats {
            member: MemberInfo {
                id: MemberId(u64::from(pid)),
                pid,
                family: None,
                class: tenants::turns::Class::default(),
                weight: tenants::turns::Weight::default(),
                queues: false,
                command: "python train.py".to_owned(),
                version: "0.1.0".to_owned(),
                state,
                stayed_bytes: 0,
                held: false,
                nccl_waits: false,
                asked: None,
                tags: Vec::new(),
            },
            pool: PoolReport::default(),
            pauses: 0,
            resumes: 0,
            last_pause: Vec::new(),
            last_resume: Vec::new(),
            host: HostProgress::default(),
            idleness: Idleness::default(),
            lent: Vec::new(),
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
        let document: serde_json::Value = serde_json::from_str(output.text()).unwrap();
        assert_eq!(document["version"], 1);
        assert_eq!(document["tenants"], serde_json::json!([]));
    }

    #[test]
    fn bytes_are_listed_by_gpu_library_and_tag_with_what_stays_and_why() {
        let mut first = member(10, MemberState::Active);
        first.pool.devices = vec![DeviceReport {
            device: DeviceOrdinal(0),
            uuid: UUID.to_owned(),
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
        first.member.nccl_waits = true;
        let row = |tag: &str, resident_bytes, away_bytes| TagBytes {
            tag: tag.to_owned(),
            resident_bytes,
            away_bytes,
            imported_away_bytes: 0,
        };
        first.member.tags = vec![row("kv", 0, 1 << 20), row("weights", 1 << 20, 0)];
        first.pool.spilled_bytes = 3 << 30;
        first.host = HostProgress {
            held_bytes: 1 << 30,
            wanted_bytes: 3 << 30,
            brought_in_bytes: 1 << 30,
            stage: HostStage::Grows,
            ..HostProgress::default()
        };
        let stats = TenantStats {
            tenant: "train".to_owned(),
            members: vec![first, member(11, MemberState::Paused)],
            budgets: Vec::new(),
            failures: Vec::new(),
        };
        let silent = |pid, gpus| Silent {
            pid,
            command: "python train.py".to_owned(),
            standing: Standing::Stopped,
            gpus,
        };
        let held = vec![Held { uuid: UUID.to_owned(), bytes: 4 << 30 }];
        let silent = vec![silent(12, held), silent(13, Vec::new())];
        let tenants = vec![TenantView { stats, changed_by: Vec::new(), silent }];
        let mut output = Output::new();
        render(&View::of(tenants, &Gpus::of(vec![h200()])), &BTreeMap::new(), &mut output);
        let expected = "\
TENANT  PID  STATE                         GPU  LIBRARY  TAG       CONTENTS   ON GPU   AWAY  IMPORTED  COMMAND
train    10  active (kv, nccl away)        3    torch    kv_cache  discard     8 GiB      -         -  python train.py
train    10  active (kv, nccl away)        3    nccl     -         keep      510 MiB  2 MiB    64 MiB  python train.py
train    11  paused                        -    -        -         -               -      -         -  python train.py
train    12  no answer: stopped (SIGSTOP)  3    -        -         -           4 GiB      -         -  python train.py
train    13  no answer: stopped (SIGSTOP)  -    -        -         -               -      -         -  python train.py

train: calls into NCCL wait in 1 of 2 processes until: sublet resume train --library nccl
train 10 GPU 3: 4 MiB in 2 allocations stay during a pause: registered with a network card
train 10: 1 GiB of 3 GiB of host memory is ready for a pause, and more comes in
train 10: 3 GiB of saved contents are in a file, to make room in host memory: a resume reads them from there
";
        assert_eq!(output.text(), expected);
    }
}
