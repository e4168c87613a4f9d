//! The outcome of a pause, resume or swap, for people: one line, and details with `-v`.

use tenants::coordinator::{Outcome, Report, staying};
use tenants::identity::TenantName;
use tenants::scope::Scope;
use tenants::swap::Swap;
use tenants::wire::{Action, Phase};

use crate::args::ShowArgs;
use crate::gpus::Gpus;
use crate::output::{self, Output};
use crate::units;

/// Prints the outcome for the memory that `scope` names.
pub(super) fn outcome(
    tenant: &TenantName,
    scope: &Scope,
    outcome: &Outcome,
    how: ShowArgs,
    look: impl FnOnce() -> Gpus,
    output: &mut Output,
) {
    let subject = scope.subject(tenant);
    match outcome {
        Outcome::Completed(report) => {
            let gpus = look();
            output.line(line(tenant, scope, report, &gpus));
            if how.verbose {
                details(report, &gpus, output);
            }
            remark(report, output);
        }
        Outcome::AlreadyPaused { .. } if *scope != Scope::Whole => {
            output.line(format!("{subject} is paused already: it has no memory on a GPU"));
        }
        Outcome::AlreadyActive if *scope != Scope::Whole => {
            output.line(format!("{subject} is not paused"));
        }
        Outcome::AlreadyPaused { stays } => {
            output.line(format!("{subject} is paused already"));
            staying(stays).for_each(|stay| output.line(stay));
        }
        Outcome::AlreadyActive => output.line(format!("{subject} is active already")),
    }
}

/// Returns the line that says what was done, how much was moved, and how to undo it.
pub(crate) fn line(tenant: &TenantName, scope: &Scope, report: &Report, gpus: &Gpus) -> String {
    let (subject, took) = (scope.subject(tenant), units::micros(report.wall_us));
    let (done, moved) = (done(report.action), moved(report, gpus));
    if report.action == Action::Resume {
        return format!("{done} {subject} in {took}: {moved}");
    }
    let resume = scope.resume_command(tenant);
    let Scope::Tags { tags, .. } = scope else {
        return format!("{done} {subject} in {took}: {moved}. Bring it back: {resume}");
    };
    if report.stands_still {
        return format!(
            "{done} {subject} in {took}: {moved}, the job stands still until: {resume}"
        );
    }
    let way_on = match tags.names_nccl() {
        (true, 0) => "; NCCL calls wait until",
        (true, _) => " without that memory, and NCCL calls wait, until",
        (false, _) => " without that memory until",
    };
    format!("{done} {subject} in {took}: {moved}, the job keeps running{way_on}: {resume}")
}

/// Returns a text such as "3 GiB freed on GPU 0-3, 1 GiB copied". Zero or unchanged memory need not be copied.
fn moved(report: &Report, gpus: &Gpus) -> String {
    let (bytes, done) = match report.action {
        Action::Pause => (report.freed_bytes, "freed"),
        Action::Resume => (report.taken_bytes, "taken"),
    };
    let is_deep = report.phases.iter().any(|phase| phase.phase == Phase::Freeze);
    if bytes == 0 && is_deep && report.not_deep.is_empty() {
        return "its contexts are off the GPUs too".to_owned();
    }
    let devices = report.devices.iter().filter(|device| device.bytes > 0);
    let place = gpus.several(devices.map(|device| device.uuid.as_str()));
    let place = if place.is_empty() { place } else { format!(" on {place}") };
    let copied = report.kept().filter(|kept| kept.total_bytes() > 0);
    let copied = copied.map(|kept| format!(", {} copied", units::bytes(kept.copied_bytes)));
    format!("{} {done}{place}{}", units::bytes(bytes), copied.unwrap_or_default())
}

/// Returns the lines of a swap if both halves were done, else none.
pub(super) fn swap(swap: &Swap, how: ShowArgs, look: fn() -> Gpus) -> Option<Vec<String>> {
    let (Outcome::Completed(paused), Outcome::Completed(resumed)) = (&swap.paused, &swap.resumed)
    else {
        return None;
    };
    let gpus = look();
    let half = |report: &Report| {
        format!("'{}' {} ({})", report.tenant, done(report.action), moved(report, &gpus))
    };
    let took = units::micros(swap.wall_us);
    let mut output = Output::default();
    output.line(format!("swapped in {took}: {}, {}", half(paused), half(resumed)));
    if paused.stands_still {
        let tenant = &paused.tenant;
        output.line(format!("'{tenant}' stands still until: sublet resume {tenant}"));
    }
    for report in [paused, resumed] {
        if how.verbose {
            details(report, &gpus, &mut output);
        }
        remark(report, &mut output);
    }
    if let Some(rates) = rates(swap).filter(|_| how.verbose) {
        output.line("");
        output.line(rates);
    }
    Some(output.into_lines())
}

/// Returns the bytes in each direction and the time of both together; none if one half followed the other.
fn rates(swap: &Swap) -> Option<String> {
    let (Outcome::Completed(paused), Outcome::Completed(resumed)) = (&swap.paused, &swap.resumed)
    else {
        return None;
    };
    let window_bytes = paused.window_bytes?;
    let copied = |report: &Report| {
        let members = report.phases.iter().flat_map(|phase| &phase.members);
        members.filter_map(|member| Some(member.report.stage.as_ref()?.copied_bytes)).sum()
    };
    Some(format!(
        "swapped in {}: {} went out in {} stages and {} came in in {}, with a window of {}",
        units::micros(swap.wall_us),
        units::bytes_or_dash(copied(paused)),
        paused.stages.len(),
        units::bytes_or_dash(copied(resumed)),
        resumed.stages.len(),
        units::bytes(window_bytes),
    ))
}

/// Prints the times of the phases, and the bytes of the GPUs.
pub(crate) fn details(report: &Report, gpus: &Gpus, output: &mut Output) {
    let (title, moved) = match report.action {
        Action::Pause => ("pause of", "FREED"),
        Action::Resume => ("resume of", "TAKEN"),
    };
    output.line("");
    output.line(format!("{title} '{}'", report.tenant));
    let mut phases = output::table(&["PHASE", "SLOWEST", "WALL", "BYTES"], &[1, 2, 3]);
    if let Some(cut) = &report.cut {
        let wall = units::micros(cut.wall_us);
        phases.add_row(["cut".to_owned(), "-".to_owned(), wall, "-".to_owned()]);
    }
    for phase in &report.phases {
        phases.add_row([
            phase.phase.label().to_owned(),
            units::micros(phase.slowest_us()),
            units::micros(phase.wall_us),
            units::bytes_or_dash(phase.bytes()),
        ]);
    }
    output.table(&phases);
    if let Some(kept) = report.kept().filter(|kept| kept.total_bytes() > 0) {
        output.line(units::kept(kept));
    }
    if report.devices.is_empty() {
        return;
    }
    let header = ["GPU", "NAME", "UUID", moved, "FREE", "TOTAL"];
    let mut devices = output::table(&header, &[3, 4, 5]);
    for device in &report.devices {
        let gpu = gpus.find(&device.uuid);
        devices.add_row([
            gpu.label(),
            gpu.name.unwrap_or_else(|| "-".to_owned()),
            gpu.uuid,
            units::bytes(device.bytes),
            units::bytes(device.free_bytes),
            units::bytes(device.total_bytes),
        ]);
    }
    output.table(&devices);
}

/// Prints what a person should know of the pause or resume.
pub(crate) fn remark(report: &Report, output: &mut Output) {
    staying(&report.stays).for_each(|stay| output.line(stay));
    // Each begins with its process.
    let notes = report.notes.iter().map(|note| note.split_once(": ").unwrap_or(("", note)));
    let notes = notes.map(|(who, text)| (who.to_owned(), Gpus::numbered(text)));
    for (who, text) in units::folded(notes) {
        let who = if who.is_empty() { who } else { format!("{who}: ") };
        output.line(format!("note: {who}{text}"));
    }
    for shallow in report.shallow() {
        output.line(shallow);
    }
    for loss in &report.losses {
        output.line(format!("lost: {loss}"));
    }
}

/// Returns the verb for the change.
fn done(action: Action) -> &'static str {
    match action {
        Action::Pause => "paused",
        Action::Resume => "resumed",
    }
}
