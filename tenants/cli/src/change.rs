//! `sublet pause`, `resume` and `swap`.

mod document;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenants::coordinator::{
    self, Checkpointer, Coordinator, CoordinatorError, Depth, DeviceShortage, Event, Interrupt,
    LostImports, Options, Outcome, Report, Swap, SwapError,
};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::Scope;
use tenants::switching::{self, SwitchOptions};
use tenants::wire::Action;

use crate::args::{PauseArgs, ResumeArgs, SwapArgs};
use crate::checkpoints::CudaCheckpoints;
use crate::failure::{EXIT_PARTIAL, EXIT_USAGE, Failure, exit_code_of};
use crate::gpus::Gpus;
use crate::output::{self, Output};
use crate::outsiders;
use crate::progress::Progress;
use crate::signals;
use crate::units;
use crate::{files, switch, trace};

pub(crate) use document::Document;
use document::Halves;

const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

pub(crate) fn pause(
    args: &PauseArgs,
    run_dir: RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    check(args.trace.as_deref())?;
    let scope = args.tags.scope();
    if scope == Scope::Whole {
        switching::stays_away(&run_dir, &args.tenant);
    }
    let options = Options {
        scope: scope.clone(),
        depth: depth(args.deep),
        ..options(args.timeout, &signals::watch()?)
    };
    let mut coordinator = Coordinator::new(run_dir, args.tenant.clone(), options);
    let result = {
        let mut progress = Progress::start();
        coordinator.pause(&mut |event| progress.note(&event))
    };
    let traced = write_trace(
        args.trace.as_deref(),
        result.as_ref().map_or(&[][..], std::slice::from_ref),
        None,
    );
    Ok(traced.unwrap_or(show(&args.tenant, &scope, result, args.json.json, Gpus::look, output)?))
}

pub(crate) fn resume(
    args: &ResumeArgs,
    run_dir: RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    check(args.trace.as_deref())?;
    let interrupt = signals::watch()?;
    let lost_imports = if args.without_lost { LostImports::LeaveOut } else { LostImports::Refuse };
    let scope = args.tags.scope();
    if args.queue {
        return resume_in_turn(args, &run_dir, lost_imports, interrupt, output);
    }
    let options =
        Options { lost_imports, scope: scope.clone(), ..options(args.timeout, &interrupt) };
    let mut coordinator = Coordinator::new(run_dir, args.tenant.clone(), options);
    let result = {
        let mut progress = Progress::start();
        let result = coordinator.resume(&mut |event| progress.note(&event));
        let wait = args.wait.at_most();
        resume_when_it_fits(&mut coordinator, result, wait, &interrupt, &mut progress)
    };
    let traced = write_trace(
        args.trace.as_deref(),
        result.as_ref().map_or(&[][..], std::slice::from_ref),
        None,
    );
    Ok(traced.unwrap_or(show(&args.tenant, &scope, result, args.json.json, Gpus::look, output)?))
}

/// Resumes a tenant in its place among those that wait for the GPUs.
fn resume_in_turn(
    args: &ResumeArgs,
    run_dir: &RunDir,
    lost_imports: LostImports,
    interrupt: Interrupt,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let options = SwitchOptions {
        wait: args.wait.at_most(),
        timeout: args.timeout,
        interrupt: Some(interrupt),
        lost_imports,
        checkpointer: Some(checkpointer()),
        is_dry: false,
    };
    let result = {
        let mut progress = Progress::start();
        let note = &mut |event: Event<'_>| progress.note(&event);
        switching::resume_in_turn(run_dir, &args.tenant, &options, note)
    };
    let changes = result.as_ref().map_or(&[][..], |switched| &switched.changes);
    let done: Vec<_> = changes.iter().map(|(_, outcome)| outcome.clone()).collect();
    let traced = write_trace(args.trace.as_deref(), &done, None);
    if args.json.json {
        output.json(&Document::queued(&args.tenant, &result))?;
        let code = result.map_or_else(
            |error| ExitCode::from(switch::code_of(&error)),
            |switched| switch::code_of_done(&switched),
        );
        return Ok(traced.unwrap_or(code));
    }
    let switched =
        result.map_err(|error| Failure::of(&error, switch::code_of(&error)).because(&error))?;
    let is_active = |(_, outcome): &(_, Outcome)| matches!(outcome, Outcome::AlreadyActive);
    if switched.changes.iter().all(is_active) && switched.unrecorded.is_none() {
        output.line(format!("tenant '{}' is active already", args.tenant));
    } else {
        switch::render(false, &switched, output);
    }
    Ok(traced.unwrap_or(switch::code_of_done(&switched)))
}

/// Tries again what `result` says was short of GPU memory, for at most `wait`, and says what it waits for. Between two
/// tries the tenants stand as `result` says, and ending this process leaves them so. `error_of` is the part of an error
/// that waiting may help with.
fn wait_until_it_fits<T, E>(
    tenant: &TenantName,
    mut result: Result<T, E>,
    error_of: impl Fn(&E) -> Option<&CoordinatorError>,
    wait: Duration,
    interrupt: &Interrupt,
    progress: &mut Progress,
    mut again: impl FnMut(&mut Progress) -> Result<T, E>,
) -> Result<T, E> {
    let started = Instant::now();
    let mut back_off = RETRY_MIN;
    let mut told = String::new();
    let mut gpus = None;
    loop {
        let retryable = result.as_ref().err().and_then(&error_of);
        let waiting_for = retryable
            .filter(|error| error.is_retryable())
            .and_then(|error| waiting_for(error, gpus.get_or_insert_with(Gpus::look)));
        let left = wait.saturating_sub(started.elapsed());
        let goes_on = !left.is_zero() && !interrupt.is_raised();
        let Some(waiting_for) = waiting_for.filter(|_| goes_on) else {
            return result;
        };
        if told != waiting_for {
            progress.tell(&format!("tenant '{tenant}' {waiting_for}"));
            told.clone_from(&waiting_for);
        }
        progress.say(waiting_for);
        // The driver gives no event when device memory becomes free.
        interrupt.wait(back_off.min(left));
        back_off = (back_off * 2).min(RETRY_MAX);
        result = again(progress);
    }
}

/// Tries a resume again, as [`wait_until_it_fits`] says.
fn resume_when_it_fits(
    coordinator: &mut Coordinator,
    result: Result<Outcome, CoordinatorError>,
    wait: Duration,
    interrupt: &Interrupt,
    progress: &mut Progress,
) -> Result<Outcome, CoordinatorError> {
    coordinator.look_first();
    let tenant = coordinator.tenant().clone();
    wait_until_it_fits(
        &tenant,
        result,
        |error| Some(error),
        wait,
        interrupt,
        progress,
        |progress| coordinator.resume(&mut |event| progress.note(&event)),
    )
}

/// What a resume waits for; `None` when it is not GPU memory.
fn waiting_for(error: &CoordinatorError, gpus: &Gpus) -> Option<String> {
    let missing_bytes = error.missing_device_bytes()?;
    let devices: Vec<_> =
        error.shortages().iter().map(|shortage| shortage_line(shortage, gpus)).collect();
    if devices.is_empty() {
        // How much its contexts need the driver does not say.
        let much = (missing_bytes > 0).then(|| format!("{} of ", units::bytes(missing_bytes)));
        return Some(format!("waits for {}GPU memory", much.unwrap_or_default()));
    }
    Some(format!("waits for {}", devices.join("; ")))
}

fn shortage_line(shortage: &DeviceShortage, gpus: &Gpus) -> String {
    let mut holders: Vec<_> = shortage
        .holders
        .iter()
        .map(|holder| format!("tenant '{}' holds {}", holder.tenant, units::bytes(holder.bytes)))
        .collect();
    if shortage.outside_bytes > 0 || holders.is_empty() {
        holders.push(format!("{} are outside Sublet", units::bytes(shortage.outside_bytes)));
    }
    let missing = units::bytes(shortage.missing_bytes());
    format!("{missing} on {}: {}", gpus.find(&shortage.uuid).in_words(), holders.join(", "))
}

pub(crate) fn swap(
    args: &SwapArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    if args.from == args.to {
        let message = coordinator::swap_with_itself(&args.from);
        return Err(Failure::new(message, EXIT_USAGE));
    }
    check(args.trace.as_deref())?;
    let interrupt = signals::watch()?;
    let coordinator = |tenant: &TenantName, scope: Scope, depth| {
        let options = Options { scope, depth, ..options(args.timeout, &interrupt) };
        Coordinator::new(run_dir.clone(), tenant.clone(), options)
    };
    let mut from = coordinator(&args.from, args.tags.out_scope(), depth(args.deep));
    let mut to = coordinator(&args.to, args.tags.in_scope(), Depth::Memory);
    let wait = args.wait.at_most();
    let result = {
        let mut progress = Progress::start();
        let mut swap = |progress: &mut Progress, to: &mut Coordinator| {
            coordinator::swap(&mut from, to, &mut |event| progress.note(&event))
        };
        let result = swap(&mut progress, &mut to);
        // The first runs while the second does not fit, and each try looks before it stops anybody.
        wait_until_it_fits(
            &args.to,
            result,
            SwapError::in_the_way,
            wait,
            &interrupt,
            &mut progress,
            |progress| swap(progress, &mut to),
        )
    };
    let halves = result.as_ref().map(|swap| [swap.paused.clone(), swap.resumed.clone()]);
    let wall_us = result.as_ref().ok().map(|swap| swap.wall_us);
    let halves = halves.as_ref().map_or(&[][..], |halves| halves);
    let traced = write_trace(args.trace.as_deref(), halves, wall_us);
    Ok(traced.unwrap_or(show_swap(args, result, output)?))
}

/// Can the timeline be written that was asked for? Asked before anything is changed.
fn check(trace: Option<&Path>) -> Result<(), Failure> {
    trace.map_or(Ok(()), files::check)
}

/// Writes the timeline of what was done, where one was asked for. Says so, and gives the exit code, when it could not be written after all.
fn write_trace(trace: Option<&Path>, done: &[Outcome], wall_us: Option<u64>) -> Option<ExitCode> {
    let failure = trace::write_outcomes(trace?, done, wall_us).err()?;
    output::complain(&format!("{failure}; what was asked for has been done"));
    Some(ExitCode::from(EXIT_PARTIAL))
}

/// Prints what became of both.
fn show_swap(
    args: &SwapArgs,
    result: Result<Swap, SwapError>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let json = args.json.json;
    let out = |result| Half { tenant: &args.from, scope: args.tags.out_scope(), result };
    let back = |result| Half { tenant: &args.to, scope: args.tags.in_scope(), result };
    let partial = |said: &str| {
        output::complain(said);
        ExitCode::from(EXIT_PARTIAL)
    };
    match result {
        Ok(swap) => {
            let line = rates(&swap);
            let halves = vec![out(Ok(swap.paused)), back(Ok(swap.resumed))];
            let code = show_halves(halves, json, output)?;
            if let (Some(line), false) = (line, json) {
                output.line(format!("\n{line}"));
            }
            Ok(code)
        }
        Err(SwapError::NoTarget(error)) => show_halves(vec![back(Err(error))], json, output),
        Err(SwapError::Pause(error)) => show_halves(vec![out(Err(error))], json, output),
        Err(SwapError::WentBack { tenant, left, losses, source }) => {
            let code = show_halves(vec![back(Err(*source))], json, output)?;
            output::complain(&format!(
                "{} was paused for it, and is active again",
                left.subject(&tenant)
            ));
            for loss in &losses {
                output::complain(&format!("lost: {loss}"));
            }
            Ok(if losses.is_empty() { code } else { ExitCode::from(EXIT_PARTIAL) })
        }
        Err(SwapError::NotBack { tenant, left, losses, resume, source }) => {
            let halves = vec![out(Err(*resume)), back(Err(*source))];
            show_halves(halves, json, output)?;
            for loss in &losses {
                output::complain(&format!("lost: {loss}"));
            }
            Ok(partial(&format!(
                "{}: `{}` tries again",
                left.is_away(&tenant),
                left.resume_command(&tenant)
            )))
        }
    }
}

/// Bytes each way and the time that both took together; none where one half came after the other.
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

/// One half of a swap.
struct Half<'a> {
    tenant: &'a TenantName,
    scope: Scope,
    result: Result<Outcome, CoordinatorError>,
}

/// Prints both halves of a swap, or the one that ended it.
fn show_halves(
    halves: Vec<Half<'_>>,
    json: bool,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    if json {
        let halves = halves.iter().map(|half| Document::new(half.tenant, &half.result)).collect();
        output.json(&Halves { halves })?;
    }
    let mut code = ExitCode::SUCCESS;
    for Half { tenant, scope, result } in halves {
        if let Err(error) = &result {
            code = ExitCode::from(exit_code_of(error));
        }
        let shown = if json {
            result.map(|outcome| code_of([&outcome])).map_err(Failure::from)
        } else {
            show(tenant, &scope, result, false, Gpus::look, output)
        };
        match shown {
            Ok(half) if half != ExitCode::SUCCESS => code = half,
            Ok(_) => {}
            Err(failure) => output::complain(&failure.to_string()),
        }
    }
    Ok(code)
}

fn depth(is_deep: bool) -> Depth {
    if is_deep { Depth::Contexts } else { Depth::Memory }
}

/// How the driver is called about processes of a tenant. Nothing is loaded yet.
pub(crate) fn checkpointer() -> Arc<dyn Checkpointer> {
    Arc::new(CudaCheckpoints::default())
}

fn options(timeout: Option<Duration>, interrupt: &Interrupt) -> Options {
    Options {
        timeout,
        interrupt: Some(interrupt.clone()),
        checkpointer: Some(checkpointer()),
        ..Options::default()
    }
}

/// The error of a change for a person, with the processes that hold GPUs which are too full.
fn failure_of(error: &CoordinatorError) -> Failure {
    let mut parts = vec![chain(error)];
    let gpus = if error.shortages().is_empty() { Gpus::default() } else { Gpus::look() };
    for device in error.shortages() {
        let gpu = gpus.find(&device.uuid);
        let named: Vec<_> =
            outsiders::largest_on(&device.uuid).iter().map(ToString::to_string).collect();
        if !named.is_empty() {
            parts.push(format!("most of {} is held by {}", gpu.in_words(), named.join(", ")));
        } else if gpu.index.is_some() {
            parts.push(format!("it is {}", gpu.in_words()));
        }
    }
    Failure::of_change(parts.join("; "), error)
}

/// Prints how it went; the exit code says it once more. GPUs are looked for by `look` afterwards, when nothing is held up by
/// it.
fn show(
    tenant: &TenantName,
    scope: &Scope,
    result: Result<Outcome, CoordinatorError>,
    json: bool,
    look: fn() -> Gpus,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    if json {
        output.json(&Document::new(tenant, &result))?;
        return Ok(match &result {
            Ok(outcome) => code_of([outcome]),
            Err(error) => ExitCode::from(exit_code_of(error)),
        });
    }
    let outcome = result.map_err(|error| failure_of(&error))?;
    match &outcome {
        Outcome::Completed(report) => render(scope, report, look, output),
        Outcome::AlreadyPaused { .. } if *scope != Scope::Whole => {
            let subject = scope.subject(tenant);
            output.line(format!("{subject} is paused already: it has no memory on a GPU"));
        }
        Outcome::AlreadyActive if *scope != Scope::Whole => {
            output.line(format!("{} is not paused", scope.subject(tenant)));
        }
        Outcome::AlreadyPaused { stayed_bytes: stayed_bytes @ 1.. } => output.line(format!(
            "tenant '{tenant}' is paused already, and {} of its device memory should have gone and have not: resume it and \
             pause it again (`sublet ps` names the processes)",
            units::bytes(*stayed_bytes)
        )),
        Outcome::AlreadyPaused { .. } => {
            output.line(format!("tenant '{tenant}' is paused already"));
        }
        Outcome::AlreadyActive => output.line(format!("tenant '{tenant}' is active already")),
    }
    Ok(code_of([&outcome]))
}

/// The exit code of what was carried through: is any of it not wholly as asked?
pub(crate) fn code_of<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> ExitCode {
    partial_where(outcomes.into_iter().any(Outcome::is_partial))
}

/// That of a tenant that was to have its GPUs: what of others' memory stayed did not keep it from them.
pub(crate) fn code_of_switch<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> ExitCode {
    partial_where(outcomes.into_iter().any(Outcome::has_losses))
}

fn partial_where(is_partial: bool) -> ExitCode {
    if is_partial { ExitCode::from(EXIT_PARTIAL) } else { ExitCode::SUCCESS }
}

/// What was done, and what that means for the job where it runs on without some of its memory.
fn headline(scope: &Scope, report: &Report) -> String {
    let (verb, took) = (done(report.action), units::micros(report.wall_us));
    let members = report.phases.first().map_or(0, |phase| phase.members.len());
    let word = if members == 1 { "process" } else { "processes" };
    let (tenant, tags) = match (TenantName::new(&report.tenant), scope) {
        (Ok(tenant), Scope::Tags { tags, .. }) => (tenant, tags),
        (_, Scope::Whole) | (Err(_), Scope::Tags { .. }) => {
            return format!("{verb} tenant '{}' in {took} ({members} {word})", report.tenant);
        }
    };
    let moved = report.devices.iter().map(|device| device.bytes).fold(0, u64::saturating_add);
    let (subject, moved) = (scope.subject(&tenant), units::bytes(moved));
    if report.action == Action::Resume {
        return format!("{verb} {subject} in {took} ({members} {word}): {moved} taken");
    }
    let way_on = match tags.names_nccl() {
        (true, 0) => "; NCCL calls wait until",
        (true, _) => " without that memory, and NCCL calls wait, until",
        (false, _) => " without that memory until",
    };
    let resume = scope.resume_command(&tenant);
    format!(
        "{verb} {subject} in {took} ({members} {word}): {moved} freed, the job keeps running{way_on}: {resume}"
    )
}

fn render(scope: &Scope, report: &Report, look: fn() -> Gpus, output: &mut Output) {
    let moved = match report.action {
        Action::Pause => "FREED",
        Action::Resume => "TAKEN",
    };
    output.line(headline(scope, report));
    output.line("");
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
        output.line("");
        output.line(units::kept(kept));
    }
    if !report.devices.is_empty() {
        output.line("");
        let gpus = look();
        let header = ["GPU", "NAME", "UUID", moved, "FREE NOW", "OF"];
        let mut devices = output::table(&header, &[3, 4, 5]);
        for device in &report.devices {
            let gpu = gpus.find(&device.uuid);
            devices.add_row([
                gpu.index.map_or_else(|| "-".to_owned(), |index| index.to_string()),
                gpu.name.unwrap_or_else(|| "-".to_owned()),
                gpu.uuid,
                units::bytes(device.bytes),
                units::bytes(device.free_bytes),
                units::bytes(device.total_bytes),
            ]);
        }
        output.table(&devices);
    }
    if !report.remarks().is_empty() {
        output.line("");
    }
    remark(report, output);
}

/// What a person should know of it, and what was lost.
pub(crate) fn remark(report: &Report, output: &mut Output) {
    for note in &report.notes {
        output.line(format!("note: {note}"));
    }
    for shallow in report.shallow() {
        output.line(shallow);
    }
    for loss in &report.losses {
        output.line(format!("lost: {loss}"));
    }
}

/// In words, what was done to the tenant.
pub(crate) fn done(action: Action) -> &'static str {
    match action {
        Action::Pause => "paused",
        Action::Resume => "resumed",
    }
}

#[cfg(test)]
mod tests;
