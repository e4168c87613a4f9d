//! Remarks about tenants and their processes for people, below the table.

use tenants::coordinator::TenantStats;
use tenants::wire::{HostProgress, HostStage, Lent, MemberInfo, MemberState, MemberStats};
use vmm_pool::PoolReport;

use crate::view::View;
use crate::{budget, units};

/// Returns remarks about a tenant's budgets, the waits of its processes, and the processes that did not answer.
pub(super) fn tenant_remarks(tenant: &TenantStats) -> Vec<String> {
    let mut remarks: Vec<_> = budget::remarks(tenant).collect();
    remarks.extend(nccl_remark(tenant));
    let failures = tenant.failures.iter();
    remarks.extend(failures.map(|failure| format!("{}: no answer from {failure}", tenant.tenant)));
    remarks
}

/// Returns remarks about memory that stays on a GPU, and the notes of members, each with the process id. `by_gpu`: memory that
/// stays is listed for each GPU.
pub(super) fn remarks_of_members(
    view: &View,
    tenant: &TenantStats,
    by_gpu: bool,
) -> Vec<(u32, String)> {
    let mut remarks = Vec::new();
    for member in &tenant.members {
        let mut say = |text: String| remarks.push((member.member.pid, text));
        for device in &member.pool.devices {
            let place = view.gpu_label(&device.uuid);
            for pinned in &device.pinned {
                let stays = format!(
                    "{} in {} stay during a pause: {}",
                    units::bytes(pinned.bytes),
                    units::counted(
                        pinned.count.try_into().unwrap_or(usize::MAX),
                        "allocation",
                        "allocations"
                    ),
                    pinned.reason
                );
                say(if by_gpu { format!("GPU {place}: {stays}") } else { stays });
            }
        }
        member.lent.iter().map(lent_remark).for_each(&mut say);
        deep_remark(&member.member, &tenant.tenant).into_iter().for_each(&mut say);
        stayed_remark(member).into_iter().for_each(&mut say);
        host_remark(&member.host).into_iter().for_each(&mut say);
        spilled_remark(&member.pool).into_iter().for_each(&mut say);
        member.notes.iter().cloned().for_each(&mut say);
    }
    remarks
}

/// Returns a remark if only NCCL's memory is paused: the job may look as if it hung.
fn nccl_remark(tenant: &TenantStats) -> Option<String> {
    let waiting = tenant.members.iter().filter(|member| member.member.nccl_waits).count();
    let (name, all) = (&tenant.tenant, tenant.members.len());
    (waiting > 0).then(|| {
        format!(
            "{name}: calls into NCCL wait in {waiting} of {all} processes until: sublet resume {name} --library nccl"
        )
    })
}

/// Returns a remark about memory that another tenant has open: a pause waits for it.
fn lent_remark(lent: &Lent) -> String {
    let pid = lent.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
    format!(
        "{} in {} allocations are open in process {pid} of tenant {}: a pause waits until they are closed",
        units::bytes(lent.bytes),
        lent.handles + lent.tickets,
        lent.tenant
    )
}

/// Returns a remark if the contexts of the process are removed too.
fn deep_remark(member: &MemberInfo, tenant: &str) -> Option<String> {
    (member.state == MemberState::Deep).then(|| {
        format!("deep pause: neither its memory nor its contexts are on a GPU; `sublet resume {tenant}` restores both")
    })
}

/// Returns a remark about memory that a pause has left on the GPU.
fn stayed_remark(member: &MemberStats) -> Option<String> {
    let classes = member.pool.devices.iter().flat_map(|device| &device.classes);
    let overdue_bytes: u64 =
        classes.map(|class| class.resident_bytes.saturating_sub(class.pinned_bytes)).sum();
    (member.member.state == MemberState::Paused && overdue_bytes > 0).then(|| {
        format!(
            "a pause could not free {} of device memory: resume the tenant, and pause it again",
            units::bytes(overdue_bytes)
        )
    })
}

/// Returns a remark about host memory that is allocated ahead of a pause, or could not be.
fn host_remark(host: &HostProgress) -> Option<String> {
    let (held, wanted) = (units::bytes(host.held_bytes), units::bytes(host.wanted_bytes));
    match &host.stage {
        HostStage::Rests if host.brought_in_bytes == 0 => None,
        HostStage::Rests => Some(format!("{held} of {wanted} of host memory is ready for a pause")),
        HostStage::Grows => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause, and more comes in"
        )),
        HostStage::Waits => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause; the rest follows after the current pause or resume"
        )),
        HostStage::Stopped(failure) => Some(format!(
            "{held} of {wanted} of host memory is ready for a pause, and no more comes in: {failure}"
        )),
    }
}

/// Returns a remark about saved contents that went to a file for another tenant's pause.
fn spilled_remark(pool: &PoolReport) -> Option<String> {
    (pool.spilled_bytes > 0).then(|| {
        format!(
            "{} of saved contents are in a file, to make room in host memory: a resume reads them from there",
            units::bytes(pool.spilled_bytes)
        )
    })
}
