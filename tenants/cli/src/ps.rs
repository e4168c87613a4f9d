//! `sublet ps`: tenants, their processes, and their bytes on each GPU.

mod details;
mod remarks;
mod waiting;

use std::collections::BTreeMap;
use std::process::ExitCode;

use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::NCCL_TAG;
use tenants::wire::{Idleness, MemberInfo, MemberState, MemberStats, TagBytes};
use vmm_pool::Contents;

use crate::args::StatsArgs;
use crate::failure::Failure;
use crate::gpus::{self, Gpu};
use crate::output::{self, Output};
use crate::outsiders::Outside;
use crate::view::{TenantView, View};
use crate::{all_users, early, outsiders, units};
use details::render;
use remarks::{remarks_of_members, tenant_remarks};

pub(crate) const NOBODY: &str =
    "no tenant is running; start one with: sublet run --tenant NAME -- COMMAND ARGUMENTS";

/// The entry in the column of tenants for a process of no tenant.
const OUTSIDE: &str = "(outside Sublet)";

/// The most GPUs for which the free memory is shown separately.
const GPUS_APART_MAX: usize = 4;

pub(crate) fn ps(
    args: &StatsArgs,
    all_users: bool,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let mut view = View::gather(run_dir, args.tenant.as_ref())?;
    if all_users {
        all_users::add(&mut view, run_dir)?;
    }
    if args.show.json {
        output.json(&view)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut early = if all_users { BTreeMap::new() } else { early::find(run_dir) };
    early.retain(|name, _| {
        args.tenant.as_ref().is_none_or(|wanted| wanted == name)
            && view.tenants.iter().all(|tenant| tenant.stats.tenant != name.as_str())
    });
    let is_empty = view.tenants.is_empty() && early.is_empty();
    output.lines((is_empty && view.refused.is_empty()).then(|| NOBODY.to_owned()));
    if args.show.verbose && !is_empty {
        render(&view, &early, output);
    } else {
        overview(&view, &early, output);
    }
    Ok(ExitCode::SUCCESS)
}

/// Processes of one tenant that are in the same state.
#[derive(Default)]
struct Group<'a> {
    pids: Vec<u32>,
    gpus: BTreeMap<&'a str, &'a Gpu>,
    on_gpu_bytes: u64,
    off_gpu_bytes: u64,
    /// The bytes that its paused processes have on GPUs, if known of at least one.
    left_bytes: Option<u64>,
    command: &'a str,
    idleness: Option<Idleness>,
}

impl<'a> Group<'a> {
    fn add(&mut self, pid: u32, command: &'a str) {
        if self.pids.is_empty() {
            self.command = command;
        }
        self.pids.push(pid);
    }

    fn hold(&mut self, view: &'a View, uuid: &'a str, on_gpu_bytes: u64, off_gpu_bytes: u64) {
        self.gpus.extend(view.gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| (uuid, gpu)));
        self.on_gpu_bytes += on_gpu_bytes;
        self.off_gpu_bytes += off_gpu_bytes;
    }

    fn row(&self, tenant: &str, family: Option<&str>, state: &str) -> Vec<String> {
        let dash = || "-".to_owned();
        let more = match self.pids.len() {
            0 | 1 => String::new(),
            count => format!(" +{}", count - 1),
        };
        let idle = self.idleness.as_ref().and_then(idle_label).or(self.left_bytes.map(left_label));
        let gpus = gpus::labels(self.gpus.values().copied());
        vec![
            tenant.to_owned(),
            family.map_or_else(dash, str::to_owned),
            [Some(state.to_owned()), idle].into_iter().flatten().collect::<Vec<_>>().join(", "),
            if gpus.is_empty() { dash() } else { gpus },
            units::bytes_or_dash(self.on_gpu_bytes),
            units::bytes_or_dash(self.off_gpu_bytes),
            self.pids.first().map_or_else(dash, |pid| format!("{pid}{more}")),
            units::command(self.command),
        ]
    }
}

/// Prints a row for each tenant, or for each group of its processes in the same state, and remarks.
fn overview(view: &View, early: &BTreeMap<TenantName, u32>, output: &mut Output) {
    let mut rows = Vec::new();
    for tenant in &view.tenants {
        let TenantView { stats, silent, .. } = tenant;
        let mut groups: BTreeMap<(Option<&str>, String), Group<'_>> = BTreeMap::new();
        for member in &stats.members {
            let info = &member.member;
            let key = (info.family.as_deref(), state_with_tags(info));
            let group = groups.entry(key).or_default();
            group.add(info.pid, &info.command);
            if let Some(left) = tenant.left_by(info.pid) {
                *group.left_bytes.get_or_insert(0) += left.bytes();
            }
            // A tenant is idle if all its processes are. Its idle time is the shortest of theirs.
            let other = group.idleness.unwrap_or(member.idleness);
            group.idleness = Some(Idleness {
                quiet_us: member.idleness.quiet_us.min(other.quiet_us),
                is_drained: member.idleness.is_drained && other.is_drained,
                ..other
            })
            .filter(|_| info.state == MemberState::Active);
            for device in &member.pool.devices {
                let on_gpu_bytes = device.resident_bytes();
                let off_gpu_bytes = device.own_bytes().saturating_sub(on_gpu_bytes);
                group.hold(view, &device.uuid, on_gpu_bytes, off_gpu_bytes);
            }
        }
        for silent in silent {
            let group = groups.entry((None, silent.standing.label().to_owned())).or_default();
            group.add(silent.pid, &silent.command);
            for held in &silent.gpus {
                group.hold(view, &held.uuid, held.bytes, 0);
            }
        }
        for ((family, state), group) in &groups {
            rows.push(group.row(&stats.tenant, *family, state));
        }
    }
    for (tenant, pid) in early {
        let command = outsiders::command_of(*pid);
        let group = Group { pids: vec![*pid], command: &command, ..Group::default() };
        rows.push(group.row(tenant.as_str(), None, "no memory yet"));
    }
    for outside in view.outside.iter().flatten() {
        let mut group = Group::default();
        group.add(outside.pid, &outside.command);
        for held in &outside.gpus {
            group.hold(view, &held.uuid, held.bytes, 0);
        }
        rows.push(group.row(OUTSIDE, None, "-"));
    }
    let mut header =
        vec!["TENANT", "FAMILY", "STATE", "GPU", "ON GPU", "OFF GPU", "PID", "COMMAND"];
    let mut numbers = [4, 5, 6];
    if rows.iter().all(|row| row[1] == "-") {
        // Most tenants are in no family.
        header.remove(1);
        numbers = numbers.map(|column| column - 1);
        for row in &mut rows {
            row.remove(1);
        }
    }
    user_column(&mut header, &mut numbers, &mut rows);
    if !rows.is_empty() {
        let mut table = output::table(&header, &numbers);
        table.add_rows(rows);
        output.table(&table);
    }
    output.lines(ending(view));
    output.lines(view.tenants.iter().flat_map(|tenant| {
        let name = &tenant.stats.tenant;
        let mut remarks = tenant_remarks(&tenant.stats);
        remarks.extend(waits_of(tenant));
        let said = remarks_of_members(view, &tenant.stats, false).into_iter();
        let folded = units::folded(said.map(|(pid, text)| (pid.to_string(), text)));
        remarks.extend(folded.into_iter().map(|(who, text)| format!("{name} {who}: {text}")));
        remarks
    }));
}

/// Puts the users of [`all_users`] into a separate first column.
fn user_column(header: &mut Vec<&str>, numbers: &mut [usize], rows: &mut [Vec<String>]) {
    if rows.iter().all(|row| !row[0].contains('/')) {
        return;
    }
    header.insert(0, "USER");
    for column in numbers {
        *column += 1;
    }
    for row in rows {
        let (user, tenant) = row[0].split_once('/').unwrap_or(("-", &row[0]));
        let (user, tenant) = (user.to_owned(), tenant.to_owned());
        row[0] = tenant;
        row.insert(0, user);
    }
}

/// Returns sentences about the processes that change the tenant, and those that are waited for.
fn waits_of(tenant: &TenantView) -> impl Iterator<Item = String> {
    let said = waiting::sentences(tenant, outsiders::command_of).into_iter();
    said.map(|text| format!("{}: {text}", tenant.stats.tenant))
}

/// Returns lines about the free memory, and about processes that no pause reaches.
fn ending(view: &View) -> impl Iterator<Item = String> {
    let strayed = view.outside.iter().flatten().filter_map(Outside::strayed);
    free_line(view).into_iter().chain(unchecked(view)).chain(strayed)
}

/// Returns a line if processes outside may exist that are not shown.
fn unchecked(view: &View) -> Option<String> {
    let is_asked = view.gpus.iter().any(|gpu| gpu.used_bytes.is_some());
    (is_asked && view.outside.is_none()).then(|| {
        "memory outside Sublet: not checked, because NVIDIA's library knows processes by other ids than this pid namespace"
            .to_owned()
    })
}

/// Returns a line about the free memory, if the management library reports it.
fn free_line(view: &View) -> Option<String> {
    let known = view.gpus.iter().filter_map(|gpu| {
        let total_bytes = gpu.total_bytes?;
        Some((gpu, total_bytes.saturating_sub(gpu.used_bytes?), units::bytes(total_bytes)))
    });
    let known: Vec<_> = known.collect();
    let bytes = || known.iter().map(|(_, free_bytes, _)| *free_bytes);
    let (least, most) = (bytes().min()?, bytes().max()?);
    Some(if known.len() <= GPUS_APART_MAX {
        let each = known.iter().map(|(gpu, free_bytes, total)| {
            format!("{} of {total} on GPU {}", units::bytes(*free_bytes), gpu.label())
        });
        format!("free: {}", each.collect::<Vec<_>>().join(", "))
    } else {
        let all = gpus::labels(known.iter().map(|(gpu, ..)| *gpu));
        let total = &known[0].2;
        let of = if known.iter().all(|(.., one)| one == total) {
            format!(" of {total}")
        } else {
            String::new()
        };
        match (units::bytes(least), units::bytes(most)) {
            (least, most) if least == most => format!("free: {least}{of} on each of GPU {all}"),
            (least, most) => format!("free: {least} to {most}{of} on GPU {all}"),
        }
    })
}

/// Returns the state of a process, with the tags of memory that it lacks while it runs, or while it is stopped with its other
/// memory in place.
fn state_with_tags(member: &MemberInfo) -> String {
    let state = state_label(member.state);
    let is_by_tag = member.state == MemberState::Active || member.stands_without.is_some();
    let tags = if is_by_tag { tags_away(member) } else { Vec::new() };
    if tags.is_empty() { state.to_owned() } else { format!("{state} ({} away)", tags.join(", ")) }
}

/// Returns the time for which a process has done nothing, if that is long: as `idle` if its devices were seen to have no work
/// left, else as `quiet`.
fn idle_label(idleness: &Idleness) -> Option<String> {
    const SHOWN_FROM_US: u64 = 1_000_000;
    let Idleness { quiet_us, is_drained, .. } = idleness;
    let word = if *is_drained { "idle" } else { "quiet" };
    (*quiet_us >= SHOWN_FROM_US).then(|| format!("{word} {} s", quiet_us / 1_000_000))
}

/// Returns a text about the bytes that a paused process has left on GPUs.
pub(crate) fn left_label(bytes: u64) -> String {
    if bytes == 0 { "nothing left".to_owned() } else { format!("{} left", units::bytes(bytes)) }
}

fn standing_label(member: &MemberStats) -> String {
    let idle = idle_label(&member.idleness).filter(|_| member.member.state == MemberState::Active);
    let state = state_with_tags(&member.member);
    idle.map_or_else(|| state.clone(), |idle| format!("{state}, {idle}"))
}

/// Returns the tags of memory that a running process lacks. NCCL's tag may be paused even without memory.
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
        Contents::DiscardByTag => "discard-by-tag",
        Contents::File => "file",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tenants::coordinator::TenantStats;
    use tenants::identity::MemberId;
    use tenants::wire::{HostProgress, HostStage, MemberInfo, PauseTimes};
    use vmm_pool::driver::DeviceOrdinal;
    use vmm_pool::{ClassBytes, CopiedBytes, DeviceReport, PinnedBytes, PoolReport};

    use super::*;
    use crate::gpus::tests::{UUID, h200};
    use crate::gpus::{GpuBytes, Gpus};
    use crate::silent::{Silent, Standing};
    use crate::view::Left;

    pub(crate) fn member(pid: u32, state: MemberState) -> MemberStats {
        MemberStats {
            member: MemberInfo {
                id: MemberId(u64::from(pid)),
                pid,
                family: None,
                class: tenants::class::Class::default(),
                weight: tenants::class::Weight::default(),
                queues: false,
                goes_deep: false,
                command: "python train.py".to_owned(),
                version: "0.1.0".to_owned(),
                state,
                stands_without: None,
                stays: Vec::new(),
                held: false,
                in_round: false,
                nccl_waits: false,
                asked: None,
                tags: Vec::new(),
            },
            pool: PoolReport::default(),
            copied: CopiedBytes::default(),
            pauses: 0,
            resumes: 0,
            last_pause: Vec::new(),
            last_resume: Vec::new(),
            pause_times: PauseTimes::default(),
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
    fn users_have_a_column_where_tenants_are_named_by_them() {
        let rows = |names: &[&str]| -> Vec<_> {
            names.iter().map(|name| vec![(*name).to_owned(), "7".to_owned()]).collect()
        };
        let (mut header, mut numbers) = (vec!["TENANT", "PID"], [1]);
        let mut plain = rows(&["train", OUTSIDE]);
        user_column(&mut header, &mut numbers, &mut plain);
        assert_eq!((header.len(), numbers, plain), (2, [1], rows(&["train", OUTSIDE])));
        let mut named = rows(&["alice/train", OUTSIDE]);
        user_column(&mut header, &mut numbers, &mut named);
        assert_eq!((header, numbers), (vec!["USER", "TENANT", "PID"], [2]));
        assert_eq!(named, [["alice", "train", "7"], ["-", OUTSIDE, "7"]]);
    }

    #[test]
    fn nothing_running_is_said_kindly() {
        let base = tempfile::tempdir().unwrap();
        let run_dir = RunDir::open(Some(base.path().join("run")), None).unwrap();
        run_dir.tenant(&TenantName::new("gone").unwrap()).unwrap();
        let show = |json| crate::args::ShowArgs { json, verbose: false };
        let args = |json| StatsArgs { tenant: None, show: show(json) };
        let mut output = Output::default();
        assert_eq!(ps(&args(false), false, &run_dir, &mut output).unwrap(), ExitCode::SUCCESS);
        assert!(output.text().starts_with("no tenant is running; start one with"));
        assert_eq!(output.text().lines().count(), 1);
        assert!(run_dir.tenants().unwrap().is_empty(), "leftovers stayed");
        let mut output = Output::default();
        ps(&args(true), false, &run_dir, &mut output).unwrap();
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
            runs_without: false,
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
        let held = vec![GpuBytes { uuid: UUID.to_owned(), bytes: 4 << 30 }];
        let silent = vec![silent(12, held), silent(13, Vec::new())];
        let gpus = vec![GpuBytes { uuid: UUID.to_owned(), bytes: 689 << 20 }];
        let left = vec![Left { pid: 11, gpus }];
        let tenants = vec![TenantView { stats, changed_by: Vec::new(), silent, left }];
        let mut view = View::of(tenants, &Gpus::of(vec![h200()]));
        view.outside = Some(Vec::new());
        let mut output = Output::default();
        render(&view, &BTreeMap::new(), &mut output);
        let expected = "\
TENANT  PID  STATE                         GPU  LIBRARY  TAG       CONTENTS   ON GPU  OFF GPU  IMPORTED  COMMAND
train    10  active (kv, nccl away)        3    torch    kv_cache  discard     8 GiB        -         -  python train.py
train    10  active (kv, nccl away)        3    nccl     -         keep      510 MiB    2 MiB    64 MiB  python train.py
train    11  paused, 689 MiB left          -    -        -         -               -        -         -  python train.py
train    12  no answer: stopped (SIGSTOP)  3    -        -         -           4 GiB        -         -  python train.py
train    13  no answer: stopped (SIGSTOP)  -    -        -         -               -        -         -  python train.py
free: 120 GiB of 140 GiB on GPU 3
train: calls into NCCL wait in 1 of 2 processes until: sublet resume train --library nccl
train 10: GPU 3: 4 MiB in 2 allocations stay during a pause: registered with a network card
train 10: 1 GiB of 3 GiB of host memory is ready for a pause, and more comes in
train 10: 3 GiB of saved contents are in a file, to make room in host memory: a resume reads them from there
";
        assert_eq!(output.text(), expected);
        let mut output = Output::default();
        overview(&view, &BTreeMap::new(), &mut output);
        let expected = "\
TENANT  STATE                         GPU   ON GPU  OFF GPU    PID  COMMAND
train   active (kv, nccl away)        3    8.5 GiB    2 MiB     10  python train.py
train   no answer: stopped (SIGSTOP)  3      4 GiB        -  12 +1  python train.py
train   paused, 689 MiB left          -          -        -     11  python train.py
free: 120 GiB of 140 GiB on GPU 3
train: calls into NCCL wait in 1 of 2 processes until: sublet resume train --library nccl
train 10: 4 MiB in 2 allocations stay during a pause: registered with a network card
train 10: 1 GiB of 3 GiB of host memory is ready for a pause, and more comes in
train 10: 3 GiB of saved contents are in a file, to make room in host memory: a resume reads them from there
";
        assert_eq!(output.text(), expected);
    }

    #[test]
    fn processes_outside_have_rows_and_those_of_a_job_are_said() {
        let outside = |pid, strayed_from: Option<&str>, gibibytes: u64| Outside {
            pid,
            command: "python hold.py".to_owned(),
            strayed_from: strayed_from.map(str::to_owned),
            gpus: vec![GpuBytes { uuid: UUID.to_owned(), bytes: gibibytes << 30 }],
        };
        let mut view = View::of(Vec::new(), &Gpus::of(vec![h200()]));
        let mut output = Output::default();
        overview(&view, &BTreeMap::new(), &mut output);
        assert!(output.text().contains("memory outside Sublet: not checked"), "{}", output.text());
        view.outside = Some(vec![outside(9, None, 12), outside(8, Some("train"), 8)]);
        let strayed = "train: process 8 (python hold.py), started by this job, runs outside Sublet: no pause moves its 8 GiB";
        let mut output = Output::default();
        overview(&view, &BTreeMap::new(), &mut output);
        let expected = format!(
            "\
TENANT            STATE  GPU  ON GPU  OFF GPU  PID  COMMAND
(outside Sublet)  -      3    12 GiB        -    9  python hold.py
(outside Sublet)  -      3     8 GiB        -    8  python hold.py
free: 120 GiB of 140 GiB on GPU 3
{strayed}
"
        );
        assert_eq!(output.text(), expected);
        let mut output = Output::default();
        render(&view, &BTreeMap::new(), &mut output);
        let shown = output.text();
        assert!(shown.contains("(outside Sublet)    9  -      3    -"), "{shown}");
        assert!(shown.ends_with(&format!("{strayed}\n")), "{shown}");
    }

    #[test]
    fn a_job_of_eight_ranks_is_one_row_and_says_what_is_alike_once() {
        let uuid = |rank: u32| format!("GPU-{rank:08}");
        let ranks = (0..8).map(|rank| {
            let mut member = member(4711 + rank, MemberState::Active);
            member.member.command = "/opt/rl/bin/python train.py".to_owned();
            member.notes = vec!["a second NCCL is in use".to_owned()];
            member.pool.devices = vec![DeviceReport {
                device: DeviceOrdinal(0),
                uuid: uuid(rank),
                classes: vec![class("torch", "", 8 << 30, 8 << 30, 0)],
                pinned: Vec::new(),
            }];
            member
        });
        let stats = TenantStats {
            tenant: "train".to_owned(),
            members: ranks.collect(),
            budgets: Vec::new(),
            failures: Vec::new(),
        };
        let (changed_by, silent, left) = (Vec::new(), Vec::new(), Vec::new());
        let tenants = vec![TenantView { stats, changed_by, silent, left }];
        let gpu = |index| Gpu { index: Some(index), uuid: uuid(index), ..h200() };
        let mut output = Output::default();
        let mut view = View::of(tenants, &Gpus::of((0..8).map(gpu).collect()));
        view.outside = Some(Vec::new());
        overview(&view, &BTreeMap::new(), &mut output);
        let expected = "\
TENANT  STATE   GPU  ON GPU  OFF GPU      PID  COMMAND
train   active  0-7  64 GiB        -  4711 +7  python train.py
free: 120 GiB of 140 GiB on each of GPU 0-7
train 8 processes: a second NCCL is in use
";
        assert_eq!(output.text(), expected);
    }
}
