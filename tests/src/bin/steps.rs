//! A coordinator that stops at every event, so that a test can kill somebody at a chosen instant.
//!
//! `sublet-steps RUN_DIR TENANT pause|resume [soon|early]`, `sublet-steps RUN_DIR FROM swap TO [OUT_TAG IN_TAG]`
//!
//! It prints `started STEP`, `member PID STEP`, `done STEP` or `back`, a phase by its name in the code, and goes on with the next line of its
//! input, or without one when the input has ended. With `soon`, phases have five seconds; with `early`, a pause releases while it saves. Its last line is `ok LOSSES` or `error MESSAGE`.

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use sublet_tests::{Boundary, MIB, Outcome, Trouble};
use tenants::coordinator::{Coordinator, Event, Options, Outcome as Done, Step, Trouble as Told};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::{Scope, TagNames};
use tenants::swap::swap;

fn main() -> ExitCode {
    let outcome = run();
    let last = match &outcome {
        Ok(line) => line.clone(),
        Err(trouble) => format!("error {trouble}"),
    };
    say(&last.replace('\n', " "));
    if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run() -> Outcome<String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [run_dir, tenant, action, rest @ ..] = arguments.as_slice() else {
        return Err(Trouble::new("a run directory, a tenant and an action are needed"));
    };
    let swaps = action == "swap";
    let has = |word: &str| !swaps && rest.iter().any(|said| said == word);
    let timeout = Duration::from_secs(if has("soon") { 5 } else { 120 });
    let run_dir = RunDir::open(Some(run_dir.into()), None)?;
    let options = Options {
        timeout: Some(timeout),
        finish_timeout: timeout,
        releases_early: has("early"),
        room: Some(tenants::keep::room),
        ..Options::default()
    };
    let scope = |tag: Option<&String>| tag.map_or(Scope::Whole, |tag| of_tag(tag));
    let of = |name: &str, scope| -> Outcome<Coordinator> {
        let options = Options { scope, ..options.clone() };
        Ok(Coordinator::new(run_dir.clone(), TenantName::new(name)?, options))
    };
    let mut coordinator = of(tenant, scope(rest.get(1)))?;
    if let (true, [to, tags @ ..]) = (swaps, rest) {
        let mut to = of(to, scope(tags.get(1)))?;
        // Of a few allocations.
        let window = Some(8 * MIB);
        let done = swap(&mut coordinator, &mut to, window, &mut |event| stop_at(&event))?;
        return Ok(format!("{}; {}", said(Ok(done.paused))?, said(Ok(done.resumed))?));
    }
    let done = match action.as_str() {
        "pause" => coordinator.pause(&mut |event| stop_at(&event)),
        "resume" => coordinator.resume(&mut |event| stop_at(&event)),
        other => return Err(Trouble::new(format!("what is {other}?"))),
    };
    said(done)
}

fn of_tag(tag: &str) -> Scope {
    let tags = TagNames::Named([tag.to_owned()].into());
    Scope::Tags { tags, owner: None }
}

fn said(done: Result<Done, Told>) -> Outcome<String> {
    match done? {
        Done::Completed(report) => {
            let told = report.losses.iter().map(ToString::to_string).chain(report.notes);
            Ok(format!("ok {}", told.collect::<Vec<_>>().join("; ")))
        }
        Done::AlreadyPaused { .. } | Done::AlreadyActive => Ok("ok already".to_owned()),
    }
}

/// Says what happens and waits for the word to go on.
fn stop_at(event: &Event<'_>) {
    let line = match event {
        Event::StepStarted { step: Step::Phase(phase), .. } => {
            Boundary::Started(*phase).to_string()
        }
        Event::StepDone { step: Step::Phase(phase), .. } => Boundary::Done(*phase).to_string(),
        Event::StepStarted { step, .. } => format!("started {step}"),
        Event::MemberDone { who, step } => format!("member {} {step}", who.pid.unwrap_or(0)),
        Event::StepDone { step, .. } => format!("done {step}"),
        Event::RollingBack { .. } => "back".to_owned(),
        Event::GoingOn
        | Event::WaitingForCut { .. }
        | Event::WaitingForDevices { .. }
        | Event::StaleRemoved { .. }
        | Event::Recovering { .. } => return,
    };
    say(&line);
    let mut word = String::new();
    // The end of the input is a word to go on, too.
    let _read = std::io::stdin().lock().read_line(&mut word);
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A test that is gone reads nothing any more.
    let _said = writeln!(out, "{line}").and_then(|()| out.flush());
}
