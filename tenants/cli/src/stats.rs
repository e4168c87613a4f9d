//! `sublet stats`: the memory of each process, and the results of its last pause and resume.

use std::process::ExitCode;

use tenants::run_dir::RunDir;
use tenants::wire::{MemberStats, Phase, PhaseReport};
use vmm_pool::SlabTotals;

use crate::args::StatsArgs;
use crate::failure::Failure;
use crate::output::{self, Output};
use crate::silent::Silent;
use crate::view::{TenantView, View};
use crate::{budget, ps, units};

pub(crate) fn stats(
    args: &StatsArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let view = View::gather(run_dir, args.tenant.as_ref())?;
    if args.show.json {
        output.json(&view)?;
    } else if view.tenants.is_empty() {
        output.lines(view.refused.is_empty().then(|| "no tenant is running".to_owned()));
    } else {
        for tenant in &view.tenants {
            render(&view, tenant, args.show.verbose, output);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn render(view: &View, shown: &TenantView, verbose: bool, output: &mut Output) {
    let TenantView { stats: tenant, silent, .. } = shown;
    for text in budget::remarks(tenant) {
        output.line(text);
    }
    for member in &tenant.members {
        render_member(&tenant.tenant, member, verbose, output);
        if let Some(left) = shown.left_by(member.member.pid) {
            let each = left.gpus.iter().map(|held| {
                format!("{} of GPU {}", units::bytes(held.bytes), view.gpu_label(&held.uuid))
            });
            let each = each.collect::<Vec<_>>().join(", ");
            let what = if each.is_empty() { "nothing" } else { &each };
            output.line(format!("  left on GPUs: {what}, as NVIDIA's management library tells"));
        }
    }
    for silent in silent {
        let Silent { pid, command, standing, gpus } = silent;
        output.line(format!("{} process {pid} ({}): {command}", tenant.tenant, standing.label()));
        for held in gpus {
            let (bytes, gpu) = (units::bytes(held.bytes), view.gpu_label(&held.uuid));
            output.line(format!("  {bytes} of GPU {gpu}, as NVIDIA's management library tells"));
        }
    }
    for failure in &tenant.failures {
        output.line(format!("{}: no answer from {failure}", tenant.tenant));
    }
}

fn render_member(tenant: &str, stats: &MemberStats, verbose: bool, output: &mut Output) {
    let info = &stats.member;
    output.line(format!(
        "{tenant} process {} ({}), libsublet {}: {}",
        info.pid,
        ps::state_label(info.state),
        info.version,
        units::command(&info.command)
    ));
    let devices = &stats.pool.devices;
    let own: u64 = devices.iter().map(vmm_pool::DeviceReport::own_bytes).sum();
    let resident: u64 = devices.iter().map(vmm_pool::DeviceReport::resident_bytes).sum();
    let more = [
        ("on disk", stats.pool.file_bytes),
        ("host memory of the driver's own", stats.pool.host_numa_bytes),
    ];
    let more = more.iter().filter(|(_, bytes)| *bytes > 0);
    let more = more.map(|(what, bytes)| format!("; {what} {}", units::bytes(*bytes)));
    let more = more.collect::<Vec<_>>().concat();
    output.line(format!(
        "  {} of device memory, {} of it on GPUs now; host memory for contents: {} of {} for a pause{more}",
        units::bytes(own),
        units::bytes(resident),
        units::bytes(stats.pool.host_arena_bytes),
        units::bytes(stats.host.wanted_bytes)
    ));
    let count = |count: u64, one, more| {
        units::counted(usize::try_from(count).unwrap_or(usize::MAX), one, more)
    };
    let took = |phases: &[(Phase, PhaseReport)]| {
        let all_us = phases.iter().map(|(_, report)| report.elapsed_us).sum();
        let said = (!phases.is_empty()).then(|| format!(", the last in {}", units::micros(all_us)));
        said.unwrap_or_default()
    };
    output.line(format!(
        "  {}{}; {}{}",
        count(stats.pauses, "pause", "pauses"),
        took(&stats.last_pause),
        count(stats.resumes, "resume", "resumes"),
        took(&stats.last_resume),
    ));
    if !stats.communicators.is_empty() {
        let ranks = stats.communicators.iter();
        let texts: Vec<_> = ranks
            .map(|rank| format!("{} (rank {} of {})", rank.communicator, rank.rank, rank.ranks))
            .collect();
        output.line(format!("  communicators: {}", texts.join(", ")));
    }
    if verbose {
        render_slabs(&stats.pool.slabs, output);
        render_phases("last pause", &stats.last_pause, output);
        render_phases("last resume", &stats.last_resume, output);
    }
    for note in &stats.notes {
        output.line(format!("  note: {note}"));
    }
}

fn render_slabs(slabs: &SlabTotals, output: &mut Output) {
    if slabs.slabs + slabs.imported_slabs == 0 {
        return;
    }
    output.line(format!(
        "  slabs: {} with {} allocations, {}: {} live, {} freed and kept, {} not given out; {} imported, with {} \
         allocations",
        slabs.slabs,
        slabs.cells,
        units::bytes(slabs.slab_bytes),
        units::bytes(slabs.live_bytes),
        units::bytes(slabs.dead_bytes),
        units::bytes(slabs.tail_bytes),
        slabs.imported_slabs,
        slabs.imported_cells
    ));
}

fn render_phases(title: &str, phases: &[(Phase, PhaseReport)], output: &mut Output) {
    if phases.is_empty() {
        return;
    }
    output.line(format!("  {title}:"));
    let mut table = output::table(&["", "PHASE", "TIME", "BYTES", "CALLS", "STEPS"], &[2, 3, 4]);
    for (phase, report) in phases {
        let steps: Vec<_> = report
            .steps
            .iter()
            .map(|(name, elapsed_us)| format!("{name} {}", units::micros(*elapsed_us)))
            .collect();
        table.add_row([
            "  ".to_owned(),
            phase.label().to_owned(),
            units::micros(report.elapsed_us),
            units::bytes_or_dash(report.bytes),
            report.driver_calls.to_string(),
            steps.join(", "),
        ]);
    }
    output.table(&table);
    for kept in phases.iter().filter_map(|(_, report)| report.kept) {
        output.line(format!("    {}", units::kept(kept)));
    }
}

#[cfg(test)]
mod tests {
    use tenants::wire::MemberState;

    use super::*;

    #[test]
    fn the_last_pause_is_shown_phase_by_phase() {
        let mut member = ps::tests::member(10, MemberState::Paused);
        member.pauses = 1;
        member.pool.host_arena_bytes = 3 << 30;
        member.host.wanted_bytes = 4 << 30;
        member.pool.file_bytes = 2 << 30;
        member.pool.slabs = SlabTotals {
            slabs: 2,
            slab_bytes: 32 << 20,
            live_bytes: 20 << 20,
            dead_bytes: 2 << 20,
            tail_bytes: 10 << 20,
            cells: 10,
            imported_slabs: 3,
            imported_cells: 30,
        };
        member.last_pause = vec![(
            Phase::Prepare,
            PhaseReport {
                elapsed_us: 250_000,
                driver_calls: 42,
                bytes: 3 << 30,
                kept: Some(vmm_pool::KeptBytes {
                    zero_bytes: 5 << 30,
                    unchanged_bytes: 0,
                    copied_bytes: 3 << 30,
                }),
                steps: vec![("copy".to_owned(), 240_000), ("unmap".to_owned(), 900)],
                ..PhaseReport::default()
            },
        )];
        let mut output = Output::default();
        render_member("train", &member, true, &mut output);
        let expected = "\
train process 10 (paused), libsublet 0.1.0: python train.py
  0 B of device memory, 0 B of it on GPUs now; host memory for contents: 3 GiB of 4 GiB for a pause; on disk 2 GiB
  1 pause, the last in 250 ms; 0 resumes
  slabs: 2 with 10 allocations, 32 MiB: 20 MiB live, 2 MiB freed and kept, 10 MiB not given out; 3 imported, with 30 allocations
  last pause:
    PHASE      TIME  BYTES  CALLS  STEPS
    prepare  250 ms  3 GiB     42  copy 240 ms, unmap 900 us
    8 GiB kept: 5 GiB zero, 0 B unchanged, 3 GiB copied
";
        assert_eq!(output.text(), expected);
    }
}
