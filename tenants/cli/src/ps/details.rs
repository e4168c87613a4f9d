//! The table of `sublet ps -v`: each process with its memory.

use std::collections::BTreeMap;

use tenants::identity::TenantName;
use tenants::wire::MemberStats;

use super::remarks::{remarks_of_members, tenant_remarks};
use super::{OUTSIDE, contents_label, ending, left_label, standing_label, user_column, waits_of};
use crate::gpus::GpuBytes;
use crate::output::{self, Output};
use crate::view::{TenantView, View};
use crate::{outsiders, units};

/// Prints every process with its memory by GPU, library and tag. Processes of `early` have no GPU memory yet.
pub(super) fn render(view: &View, early: &BTreeMap<TenantName, u32>, output: &mut Output) {
    // Most tenants are in no family.
    let mut members = view.tenants.iter().flat_map(|tenant| &tenant.stats.members);
    let has_family = members.any(|member| member.member.family.is_some());
    let mut header = vec![
        "TENANT", "PID", "STATE", "GPU", "LIBRARY", "TAG", "CONTENTS", "ON GPU", "OFF GPU",
        "IMPORTED", "COMMAND",
    ];
    let mut numbers = [1, 7, 8, 9];
    if has_family {
        header.insert(1, "FAMILY");
        numbers = numbers.map(|column| column + 1);
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut add = |family: Option<&str>, more: Vec<Vec<String>>| {
        for mut row in more {
            if has_family {
                row.insert(1, family.unwrap_or("-").to_owned());
            }
            rows.push(row);
        }
    };
    for tenant in &view.tenants {
        let TenantView { stats, silent, .. } = tenant;
        for member in &stats.members {
            let family = member.member.family.as_deref();
            add(family, member_rows(view, tenant, member));
        }
        for silent in silent {
            let stands = [&*stats.tenant, silent.standing.label()];
            let who = (silent.pid, silent.command.as_str());
            add(None, rows_of_silence(view, stands, who, &silent.gpus));
        }
    }
    for (tenant, pid) in early {
        let mut row = vec![tenant.to_string(), pid.to_string(), "no memory yet".to_owned()];
        row.extend(std::iter::repeat_n("-".to_owned(), 7));
        row.push(units::command(&outsiders::command_of(*pid)));
        add(None, vec![row]);
    }
    for outside in view.outside.iter().flatten() {
        let who = (outside.pid, outside.command.as_str());
        add(None, rows_of_silence(view, [OUTSIDE, "-"], who, &outside.gpus));
    }
    user_column(&mut header, &mut numbers, &mut rows);
    let mut table = output::table(&header, &numbers);
    table.add_rows(rows);
    output.table(&table);
    output.lines(ending(view));
    for tenant in &view.tenants {
        let name = &tenant.stats.tenant;
        output.lines(tenant_remarks(&tenant.stats));
        output.lines(waits_of(tenant));
        let each = remarks_of_members(view, &tenant.stats, true);
        output.lines(each.into_iter().map(|(pid, text)| format!("{name} {pid}: {text}")));
    }
}

/// Returns one row for each class of memory; a process without memory has one row.
fn member_rows(view: &View, tenant: &TenantView, member: &MemberStats) -> Vec<Vec<String>> {
    let pid = member.member.pid;
    let left = tenant.left_by(pid).map(|left| left_label(left.bytes()));
    let standing = [Some(standing_label(member)), left].into_iter().flatten();
    let standing = standing.collect::<Vec<_>>().join(", ");
    let lead = [tenant.stats.tenant.clone(), pid.to_string(), standing];
    let command = units::command(&member.member.command);
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

/// Returns the rows of a process that does not answer: one for each GPU on which it is known to have memory, or else one.
fn rows_of_silence(
    view: &View,
    [tenant, state]: [&str; 2],
    (pid, command): (u32, &str),
    gpus: &[GpuBytes],
) -> Vec<Vec<String>> {
    let row = |gpu: String, bytes: String| {
        let dash = || "-".to_owned();
        let (tenant, pid, state) = (tenant.to_owned(), pid.to_string(), state.to_owned());
        let command = units::command(command);
        vec![tenant, pid, state, gpu, dash(), dash(), dash(), bytes, dash(), dash(), command]
    };
    let held = |held: &GpuBytes| row(view.gpu_label(&held.uuid), units::bytes(held.bytes));
    let mut rows: Vec<_> = gpus.iter().map(held).collect();
    if rows.is_empty() {
        rows.push(row("-".to_owned(), "-".to_owned()));
    }
    rows
}
