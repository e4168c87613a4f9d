//! `sublet switch`, which gives a tenant its GPUs, and `sublet turns`, which shows the tenants that have them or wait.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use sublet_turns::{Claimant, SwitchOptions, Switched};
use tenants::code::Code;
use tenants::coordinator::{Outcome, Trouble};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::scope::Scope;

use crate::args::{ShowArgs, SwitchArgs};
use crate::change::{self, Document};
use crate::failure::{EXIT_PARTIAL, Failure, exit_code_of};
use crate::gpus::Gpus;
use crate::output::{self, Output};
use crate::progress::Progress;
use crate::{signals, units};

/// The number of decisions that `sublet turns` shows with `-v`.
const SHOWN_MAX: usize = 20;
const SHOWN_SHORT_MAX: usize = 5;

/// The account of what a switch did or would do, for programs.
#[derive(Default, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Account<'a> {
    tenant: &'a str,
    outcome: &'static str,
    /// The tenants that were paused, or would be.
    paused: Vec<&'a str>,
    reasons: &'a [String],
    changes: Vec<Document<'a>>,
    /// It is done and not written down, and why not.
    unrecorded: Option<&'a str>,
    error: Option<String>,
    code: Option<Code>,
    retryable: bool,
    unchanged: bool,
}

pub(crate) fn switch(
    args: &SwitchArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let options = SwitchOptions {
        wait: args.wait.at_most(),
        timeout: args.timeout,
        interrupt: Some(signals::watch()?),
        is_dry: args.dry_run,
        checkpointer: Some(change::checkpointer()),
        ..SwitchOptions::default()
    };
    let result = {
        let mut progress = Progress::start(args.show, run_dir);
        sublet_turns::switch(run_dir, &args.tenant, &options, &mut |event| progress.note(&event))
    };
    if args.show.json {
        return documented(args, &result, output);
    }
    let switched = result.map_err(|error| change::failure_of(&error))?;
    render(args.dry_run, args.show, &switched, output);
    Ok(code_of_done(&switched))
}

fn documented(
    args: &SwitchArgs,
    result: &Result<Switched, Trouble>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let tenant = args.tenant.as_str();
    let changes = result.iter().flat_map(|switched| &switched.changes);
    let changes: Vec<_> = changes.map(|(tenant, outcome)| (tenant, Ok(outcome.clone()))).collect();
    let (account, code) = match result {
        Ok(switched) => {
            let account = Account {
                tenant,
                outcome: match (switched.had_them, args.dry_run) {
                    (true, _) => "already_active",
                    (false, true) => "would_switch",
                    (false, false) => "completed",
                },
                paused: switched.victims.iter().map(TenantName::as_str).collect(),
                reasons: &switched.reasons,
                changes: changes.iter().map(|(name, result)| Document::new(name, result)).collect(),
                unrecorded: switched.unrecorded.as_deref(),
                unchanged: switched.had_them || args.dry_run,
                ..Account::default()
            };
            (account, code_of_done(switched))
        }
        Err(error) => {
            let account = Account {
                tenant,
                outcome: "failed",
                error: Some(chain(error)),
                code: Some(error.into()),
                retryable: error.is_retryable(),
                unchanged: error.left_unchanged(),
                ..Account::default()
            };
            (account, ExitCode::from(exit_code_of(error)))
        }
    };
    output.json(&account)?;
    Ok(code)
}

/// The exit code of a switch that was done.
pub(crate) fn code_of_done(switched: &Switched) -> ExitCode {
    if switched.unrecorded.is_some() {
        return ExitCode::from(EXIT_PARTIAL);
    }
    change::code_of_switch(switched.changes.iter().map(|(_, outcome)| outcome))
}

pub(crate) fn render(is_dry: bool, how: ShowArgs, switched: &Switched, output: &mut Output) {
    let gpus = Gpus::look();
    for reason in switched.reasons.iter().map(|reason| gpus.named_in(reason)) {
        output.line(if is_dry { format!("would do: {reason}") } else { reason });
    }
    for (tenant, outcome) in &switched.changes {
        let Outcome::Completed(report) = outcome else { continue };
        output.line(change::line(tenant, &Scope::Whole, report, &gpus));
        if how.verbose {
            change::details(report, &gpus, output);
        }
        change::remark(report, output);
    }
    if let Some(why) = &switched.unrecorded {
        output.line(format!("this is done, but not recorded for later switches: {why}"));
    }
}

/// Describes the state of a claim.
fn standing_of(claim: &Claimant) -> String {
    let for_what = match claim.wish {
        "memory" => format!(" for {}", units::bytes(claim.wanted_bytes)),
        "back" => " to be back".to_owned(),
        _ => String::new(),
    };
    if claim.is_in_turn { "in its turn".to_owned() } else { format!("waiting{for_what}") }
}

pub(crate) fn turns(
    how: ShowArgs,
    run_dir: &RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let view = sublet_turns::look(run_dir, SHOWN_MAX)?;
    if how.json {
        output.json(&view)?;
        return Ok(ExitCode::SUCCESS);
    }
    if view.claims.is_empty() {
        output.line("nobody is in a turn, and nobody waits for one");
    } else {
        let mut table = output::table(&["TENANT", "CLASS", "PID", "IS", "FOR"], &[2, 4]);
        for claim in &view.claims {
            table.add_row([
                claim.tenant.clone(),
                claim.class.to_string(),
                claim.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string()),
                standing_of(claim),
                units::micros(claim.since_us),
            ]);
        }
        output.table(&table);
    }
    for claim in view.claims.iter().filter(|claim| claim.idle_us.is_some()) {
        let idle = units::micros(claim.idle_us.unwrap_or(0));
        output.line(format!("{} is idle for {idle}", claim.tenant));
    }
    let gpus = if view.decisions.is_empty() { Gpus::default() } else { Gpus::look() };
    let shown = if how.verbose { SHOWN_MAX } else { SHOWN_SHORT_MAX };
    for decision in view.decisions.iter().skip(view.decisions.len().saturating_sub(shown)) {
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(decision.at_unix_us);
        let at = if how.verbose {
            humantime::format_rfc3339_millis(at).to_string()
        } else {
            let ago = at.elapsed().unwrap_or_default();
            format!("{} ago", humantime::format_duration(Duration::from_secs(ago.as_secs())))
        };
        output.line(format!("{at}  {}", gpus.named_in(&decision.text)));
    }
    Ok(ExitCode::SUCCESS)
}
