//! `sublet pause`, `resume` and `swap`.

pub(crate) mod document;
pub(crate) mod plan;
mod shown;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sublet_turns::SwitchOptions;
use tenants::checkpoints::Checkpointer;
use tenants::coordinator::{
    Coordinator, DeviceShortage, Event, Interrupt, LentMemory, LostImports, Meanwhile,
    MemberFailure, Options, Outcome, Trouble,
};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::Scope;
use tenants::swap::{self, Swap};

use crate::args::{PauseArgs, ResumeArgs, ShowArgs, SwapArgs};
use crate::checkpoints::CudaCheckpoints;
use crate::failure::{EXIT_PARTIAL, EXIT_USAGE, Failure, exit_code_of};
use crate::gpus::Gpus;
use crate::output::{self, Output};
use crate::outsiders::{self, Outside};
use crate::progress::Progress;
use crate::signals;
use crate::units;
use crate::{early, ps, switch};

pub(crate) use document::Document;
pub(crate) use shown::{details, line, remark};

use document::{Changes, SwapDocument};

const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

pub(crate) fn pause(
    args: &PauseArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let Some(tenant) = &args.tenant else {
        return if args.all { pause_all(args, run_dir, output) } else { Err(say_which(run_dir)?) };
    };
    let tenant = &early::meant(tenant, run_dir)?;
    if args.dry_run {
        return plan::plan(tenant, &args.tags.scope(), run_dir, args.show, output);
    }
    let interrupt = signals::watch()?;
    let started = Instant::now();
    let mut result = pause_one(args, tenant, run_dir, &interrupt);
    while let Err(Trouble::NoSuchTenant { .. } | Trouble::NoProcess { .. }) = result
        && started.elapsed() < args.wait.unwrap_or_default()
        && !interrupt.is_raised()
    {
        interrupt.wait(RETRY_MIN);
        result = pause_one(args, tenant, run_dir, &interrupt);
    }
    let done = Paused::of(tenant, result, run_dir);
    if args.show.json {
        output.json(&done.document())?;
        return Ok(done.code());
    }
    done.show(&args.tags.scope(), args.show, output)
}

/// A pause of one tenant.
struct Paused {
    tenant: TenantName,
    result: Half,
    /// Processes of its job that run outside Sublet, if it is paused: their memory stays.
    strayed: Vec<Outside>,
    /// The GPUs directly after the pause.
    gpus: Gpus,
}

impl Paused {
    fn of(tenant: &TenantName, result: Half, run_dir: &RunDir) -> Self {
        let gpus = if result.is_ok() { Gpus::look() } else { Gpus::default() };
        let strayed = outsiders::strayed_from(run_dir, tenant, &gpus);
        Self { tenant: tenant.clone(), result, strayed, gpus }
    }

    fn document(&self) -> Document<'_> {
        Document::new(&self.tenant, &self.result).with_strayed(&self.strayed)
    }

    fn code(&self) -> ExitCode {
        if self.strayed.is_empty() {
            code_of_half(&self.result)
        } else {
            ExitCode::from(EXIT_PARTIAL)
        }
    }

    fn show(self, scope: &Scope, how: ShowArgs, output: &mut Output) -> Result<ExitCode, Failure> {
        let code = self.code();
        show(&self.tenant, scope, self.result, how, || self.gpus, output)?;
        output.lines(self.strayed.iter().filter_map(Outside::strayed));
        Ok(code)
    }
}

/// Returns the error of a pause that names no tenant, with the names that exist.
fn say_which(run_dir: &RunDir) -> Result<Failure, Failure> {
    let names: Vec<_> = run_dir.live_tenants()?.iter().map(ToString::to_string).collect();
    let which = if names.is_empty() {
        ps::NOBODY.to_owned()
    } else {
        format!(
            "say which tenant to pause: {}; or all of them: `sublet pause --all`",
            names.join(", ")
        )
    };
    Ok(Failure::new(which, EXIT_USAGE))
}

fn pause_one(
    args: &PauseArgs,
    tenant: &TenantName,
    run_dir: &RunDir,
    interrupt: &Interrupt,
) -> Half {
    let scope = args.tags.scope();
    let is_whole = scope == Scope::Whole;
    let meanwhile = if args.keep_running { Meanwhile::RunOn } else { Meanwhile::AsAgreed };
    let is_deep = args.deep;
    let lent = if args.leave_lent { LentMemory::Leave } else { LentMemory::WaitFor };
    let options = Options { scope, is_deep, meanwhile, lent, ..options(args.timeout, interrupt) };
    let mut coordinator = Coordinator::new(run_dir.clone(), tenant.clone(), options);
    let mut progress = Progress::start(args.show, run_dir);
    let mut pause = || coordinator.pause(&mut |event| progress.note(&event));
    if is_whole { sublet_turns::by_name(run_dir, tenant, pause) } else { pause() }
}

/// Pauses all tenants, one after the other, so that each has the whole link. A refusal of one does not stop the others.
fn pause_all(args: &PauseArgs, run_dir: &RunDir, output: &mut Output) -> Result<ExitCode, Failure> {
    let interrupt = signals::watch()?;
    let mut done = Vec::new();
    for tenant in run_dir.live_tenants()? {
        if !interrupt.is_raised() {
            done.push(Paused::of(&tenant, pause_one(args, &tenant, run_dir, &interrupt), run_dir));
        }
    }
    let is_changed = done.iter().any(|paused| matches!(paused.result, Ok(Outcome::Completed(_))));
    if args.show.json {
        output.json(&Changes { changes: done.iter().map(Paused::document).collect() })?;
    } else if done.is_empty() {
        output.line(ps::NOBODY);
    }
    let mut code = ExitCode::SUCCESS;
    for paused in done {
        let of_one = paused.code();
        if of_one != ExitCode::SUCCESS {
            code = if is_changed { ExitCode::from(EXIT_PARTIAL) } else { of_one };
        }
        let tenant = paused.tenant.clone();
        let shown = if args.show.json {
            paused.result.map(drop).map_err(Failure::from)
        } else {
            paused.show(&Scope::Whole, args.show, output).map(drop)
        };
        if let Err(failure) = shown {
            let words = ["sublet", "pause", tenant.as_str()].map(str::to_owned);
            output::complain(&failure.told_after(&words));
        }
    }
    Ok(code)
}

pub(crate) fn resume(
    mut args: ResumeArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    args.tenant = early::meant(&args.tenant, run_dir)?;
    let interrupt = signals::watch()?;
    let lost_imports = if args.without_lost { LostImports::LeaveOut } else { LostImports::Refuse };
    let scope = args.scope();
    if args.queue {
        return resume_in_turn(&args, run_dir, lost_imports, interrupt, output);
    }
    let options =
        Options { lost_imports, scope: scope.clone(), ..options(args.timeout, &interrupt) };
    let mut coordinator = Coordinator::new(run_dir.clone(), args.tenant.clone(), options);
    let result = {
        let mut progress = Progress::start(args.show, run_dir);
        let result = coordinator.resume(&mut |event| progress.note(&event));
        let wait = args.wait.at_most();
        coordinator.look_first();
        wait_until_it_fits(&args.tenant, result, wait, &interrupt, &mut progress, |progress| {
            coordinator.resume(&mut |event| progress.note(&event))
        })
    };
    show(&args.tenant, &scope, result, args.show, Gpus::look, output)
}

/// Resumes a tenant in its place in the queue for the GPUs.
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
        asks: None,
        lost_imports,
        checkpointer: Some(checkpointer()),
        is_dry: false,
    };
    let result = {
        let mut progress = Progress::start(args.show, run_dir);
        let note = &mut |event: Event<'_>| progress.note(&event);
        sublet_turns::resume_in_turn(run_dir, &args.tenant, &options, note)
    };
    if args.show.json {
        output.json(&Document::queued(&args.tenant, &result))?;
        return Ok(result.map_or_else(
            |error| ExitCode::from(exit_code_of(&error)),
            |switched| switch::code_of_done(&switched),
        ));
    }
    let switched = result.map_err(|error| failure_of(&error))?;
    let is_active = |(_, outcome): &(_, Outcome)| matches!(outcome, Outcome::AlreadyActive);
    if switched.changes.iter().all(is_active) && switched.unrecorded.is_none() {
        output.line(format!("tenant '{}' is active already", args.tenant));
    } else {
        switch::render(false, args.show, &switched, output);
    }
    Ok(switch::code_of_done(&switched))
}

/// Repeats an action whose `result` says that GPU memory was short, for at most `wait`, and shows the reason for the wait.
/// Between two tries the tenants are in the state that `result` says, also if this process ends.
fn wait_until_it_fits<T>(
    tenant: &TenantName,
    mut result: Result<T, Trouble>,
    wait: Duration,
    interrupt: &Interrupt,
    progress: &mut Progress,
    mut again: impl FnMut(&mut Progress) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    let started = Instant::now();
    let mut back_off = RETRY_MIN;
    let mut told = String::new();
    let mut gpus = None;
    loop {
        let retryable = result.as_ref().err().filter(|error| error.is_retryable());
        let waiting_for =
            retryable.and_then(|error| waiting_for(error, gpus.get_or_insert_with(Gpus::look)));
        let left = wait.saturating_sub(started.elapsed());
        let goes_on = !left.is_zero() && !interrupt.is_raised();
        let Some(waiting_for) = waiting_for.filter(|_| goes_on) else {
            if left.is_zero() && !wait.is_zero() {
                progress.tell(&format!("gave up after {} s", wait.as_secs_f64()));
            }
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

/// Returns a text about the GPU memory that a resume waits for; `None` if it waits for something else.
fn waiting_for(error: &Trouble, gpus: &Gpus) -> Option<String> {
    let missing_bytes = error.missing_device_bytes()?;
    let devices: Vec<_> =
        error.shortages().iter().map(|shortage| shortage_line(shortage, gpus)).collect();
    if devices.is_empty() {
        // The driver does not report how much its contexts need.
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
        let message = swap::swap_with_itself(&args.from);
        return Err(Failure::new(message, EXIT_USAGE));
    }
    let interrupt = signals::watch()?;
    let coordinator = |tenant: &TenantName, scope: Scope, is_deep| {
        let meanwhile = Meanwhile::AsAgreed;
        let options = Options { scope, is_deep, meanwhile, ..options(args.timeout, &interrupt) };
        Coordinator::new(run_dir.clone(), tenant.clone(), options)
    };
    let mut from = coordinator(&args.from, args.tags.out_scope(), args.deep);
    let mut to = coordinator(&args.to, args.tags.in_scope(), false);
    let wait = args.wait.at_most();
    let result = {
        let mut progress = Progress::start(args.show, run_dir);
        let mut swap = |progress: &mut Progress, to: &mut Coordinator| {
            swap::swap(&mut from, to, None, &mut |event| progress.note(&event))
        };
        let result = swap(&mut progress, &mut to);
        // The first tenant runs while the second does not fit. Each try checks that before it stops any process.
        wait_until_it_fits(&args.to, result, wait, &interrupt, &mut progress, |progress| {
            swap(progress, &mut to)
        })
    };
    show_swap(args, result, output)
}

type Half = Result<Outcome, Trouble>;

/// Prints the result for each tenant whose processes were contacted.
fn show_swap(
    args: &SwapArgs,
    result: Result<Swap, Trouble>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let json = args.show.json;
    let lines = match &result {
        Ok(swap) if !json => shown::swap(swap, args.show, Gpus::look),
        Ok(_) | Err(_) => None,
    };
    let wall_us = result.as_ref().ok().map(|swap| swap.wall_us);
    // The states of both, if they have changed.
    let mut told = Vec::new();
    let lost = |losses: Vec<MemberFailure>| {
        losses.iter().map(|loss| format!("lost: {loss}")).collect::<Vec<_>>()
    };
    let (out, back): (Option<Half>, Option<Half>) = match result {
        Ok(swap) => (Some(Ok(swap.paused)), Some(Ok(swap.resumed))),
        Err(Trouble::WentBack { tenant, left, losses, source }) => {
            let subject = left.subject(&tenant);
            told.push(format!("{subject} was paused for it, and is active again"));
            told.extend(lost(losses));
            (None, Some(Err(*source)))
        }
        Err(Trouble::NotBack { tenant, left, losses, resume, source }) => {
            told.extend(lost(losses));
            let (state, resumes) = (left.is_away(&tenant), left.resume_command(&tenant));
            told.push(format!("{state}: `{resumes}` tries again"));
            (Some(Err(*resume)), Some(Err(*source)))
        }
        Err(error) if error.is_about(&args.to) => (None, Some(Err(error))),
        Err(error) => (Some(Err(error)), None),
    };
    // A part of the first has changed, unless all of it is resumed.
    let is_partial = told.len() > usize::from(out.is_none());
    if json {
        let [out, back] = [(&args.from, &out), (&args.to, &back)]
            .map(|(tenant, half)| half.as_ref().map(|half| Document::new(tenant, half)));
        output.json(&SwapDocument::new(out, back, wall_us))?;
    }
    let mut code = ExitCode::SUCCESS;
    let halves = [
        (&args.from, args.tags.out_scope(), out.map(|half| (code_of_leaver(&half), half))),
        (&args.to, args.tags.in_scope(), back.map(|half| (code_of_half(&half), half))),
    ];
    for (tenant, scope, half) in halves {
        let Some((of_half, half)) = half else { continue };
        if of_half != ExitCode::SUCCESS {
            code = of_half;
        }
        let shown = if json || lines.is_some() {
            half.map(drop).map_err(Failure::from)
        } else {
            show(tenant, &scope, half, args.show, Gpus::look, output).map(drop)
        };
        if let Err(failure) = shown {
            output::complain(&failure.told());
        }
    }
    for line in told {
        output::complain(&line);
    }
    for line in lines.iter().flatten() {
        output.line(line);
    }
    Ok(if is_partial { ExitCode::from(EXIT_PARTIAL) } else { code })
}

/// Returns the interface to the driver's calls about processes of a tenant. Nothing is loaded yet.
pub(crate) fn checkpointer() -> Arc<dyn Checkpointer> {
    Arc::new(CudaCheckpoints::default())
}

fn options(timeout: Option<Duration>, interrupt: &Interrupt) -> Options {
    Options {
        timeout,
        interrupt: Some(interrupt.clone()),
        contexts: Some(sublet_deep::contexts(checkpointer())),
        room: Some(tenants::keep::room),
        ..Options::default()
    }
}

/// Returns the error of a change for a person, with the processes that hold memory of the GPUs that are too full.
pub(crate) fn failure_of(error: &Trouble) -> Failure {
    let short = error.shortages().iter().filter(|device| device.outside_bytes > 0);
    let lacking = if let Trouble::Never { gpus, .. } = error { gpus.as_slice() } else { &[] };
    let gpus = short.map(|short| &short.uuid).chain(lacking).map(String::as_str);
    let parts: Vec<_> = [chain(error)].into_iter().chain(outsiders::in_words(gpus)).collect();
    Failure::of_change(parts.join("; "), error)
}

/// Prints the result, and returns its exit code. Calls `look` for the GPUs only afterwards, when it delays nothing.
fn show(
    tenant: &TenantName,
    scope: &Scope,
    result: Half,
    how: ShowArgs,
    look: impl FnOnce() -> Gpus,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let code = code_of_half(&result);
    if how.json {
        output.json(&Document::new(tenant, &result))?;
        return Ok(code);
    }
    let outcome = result.map_err(|error| failure_of(&error))?;
    shown::outcome(tenant, scope, &outcome, how, look, output);
    Ok(code)
}

fn code_of_half(half: &Half) -> ExitCode {
    match half {
        Ok(outcome) => code_of([outcome]),
        Err(error) => ExitCode::from(exit_code_of(error)),
    }
}

/// Returns the exit code of completed changes. It tells whether any of them was only partial.
pub(crate) fn code_of<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> ExitCode {
    partial_where(outcomes.into_iter().any(Outcome::is_partial))
}

/// Returns the exit code of the pausing half of a swap. The other half is done by then, whatever memory stays.
fn code_of_leaver(half: &Half) -> ExitCode {
    match half {
        Ok(outcome) => partial_where(outcome.is_partial_for_room()),
        Err(error) => ExitCode::from(exit_code_of(error)),
    }
}

/// Returns the exit code of a switch. Memory of others that stayed did not prevent it.
pub(crate) fn code_of_switch<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> ExitCode {
    partial_where(outcomes.into_iter().any(Outcome::has_losses))
}

fn partial_where(is_partial: bool) -> ExitCode {
    if is_partial { ExitCode::from(EXIT_PARTIAL) } else { ExitCode::SUCCESS }
}

#[cfg(test)]
mod tests;
