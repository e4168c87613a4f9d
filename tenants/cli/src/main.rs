//! The `sublet` command: runs programs as tenants, and pauses, resumes and shows them.
//!
//! Exit codes: 0 done; 1 refused or failed, nothing changed; 2 wrong usage; 3 changed, but not wholly as
//! asked (a process was lost on the way, only the first half of a swap was done, or not every process has
//! written what it had saved, or brought in what its next pause takes); 130 called off by Ctrl-C or SIGTERM, nothing changed. `sublet run` and
//! `sublet simulate` exit as the command that they run.

mod advice;
mod all_users;
mod args;
mod budget;
mod bug_report;
mod change;
mod checkpoints;
mod doctor;
mod early;
mod environment;
mod explain;
mod failure;
mod files;
mod gpus;
mod hints;
mod larger;
mod launch;
mod manual;
mod metrics;
mod output;
mod outsiders;
mod prepare;
mod progress;
mod ps;
mod run;
mod save;
#[cfg(all(test, feature = "schema"))]
mod schema_tests;
mod signals;
mod silent;
mod simulate;
mod stats;
mod switch;
mod trace;
mod units;
mod view;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use clap_complete::CompleteEnv;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tenants::run_dir::RunDir;

use args::{Cli, Command};
use environment::Environment;
use failure::{EXIT_PARTIAL, Failure};
use output::Output;

fn main() -> ExitCode {
    CompleteEnv::with_factory(Cli::command).complete();
    let words = args::plain(std::env::args_os());
    let wants_json = args::wants_json(&words);
    let cli = Cli::try_parse_from(words).unwrap_or_else(|error| {
        hints::with_hint(error, &advice::typed()).exit();
    });
    let environment = Environment::read();
    let mut output = Output::new();
    let changes = cli.command.changes();
    let done = dispatch(cli.command, &environment, &mut output);
    let said = done.and_then(|code| {
        let is_done = [ExitCode::SUCCESS, ExitCode::from(EXIT_PARTIAL)].contains(&code);
        output.finish_after(changes && is_done).map(|()| code)
    });
    match said {
        Ok(code) => code,
        Err(failure) => {
            output::complain(&failure.told());
            let early = failure.nobody().zip(open_run_dir(&environment).ok());
            if let Some(remark) = early.and_then(|(tenant, dir)| early::remark(&dir, tenant)) {
                output::complain(&remark);
            }
            if wants_json {
                let mut document = Output::new();
                // If standard output cannot be written, the line above and the exit code report the failure.
                document.json(&failure.document()).and_then(|()| document.finish()).ok();
            }
            failure.exit_code()
        }
    }
}

/// Raises the soft limit of open files to the hard one: each process of a tenant takes two descriptors of this command.
/// If it cannot be raised, the command reports missing descriptors only when it lacks them.
fn raise_descriptor_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        let _stays = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

fn open_run_dir(environment: &Environment) -> Result<RunDir, Failure> {
    let (explicit, xdg) = environment.run_dir_sources();
    Ok(RunDir::open(explicit, xdg)?)
}

fn dispatch(
    command: Command,
    environment: &Environment,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    // A program that is run keeps its own limit.
    if !matches!(command, Command::Run(_) | Command::Simulate(_)) {
        raise_descriptor_limit();
    }
    let open_run_dir = || open_run_dir(environment);
    match command {
        Command::Run(args) => run::run(&args, environment, &open_run_dir()?),
        Command::Simulate(args) => simulate::simulate(&args, environment),
        Command::Budget(args) => budget::budget(&args, open_run_dir()?, output),
        Command::Ps(args) => ps::ps(&args.of, args.all_users, &open_run_dir()?, output),
        Command::Pause(args) => change::pause(&args, &open_run_dir()?, output),
        Command::Resume(args) => change::resume(args, &open_run_dir()?, output),
        Command::Swap(args) => change::swap(&args, &open_run_dir()?, output),
        Command::Switch(args) => switch::switch(&args, &open_run_dir()?, output),
        Command::Turns(args) => switch::turns(args, &open_run_dir()?, output),
        Command::Prepare(args) => prepare::prepare(&args, &open_run_dir()?, output),
        Command::Save(args) => save::save(&args, &open_run_dir()?, output),
        Command::Stats(args) => stats::stats(&args, &open_run_dir()?, output),
        Command::Checkpoints => checkpoints::serve(),
        Command::Metrics(args) => metrics::metrics(&args, &open_run_dir()?, output),
        Command::Trace(args) => trace::trace(&args, &open_run_dir()?, output),
        Command::Plan(args) => larger::plan(&args, output),
        Command::Explain(args) => Ok(explain::explain(&args, output)),
        Command::Docs => explain::docs(output),
        Command::Completions(args) => manual::completions(&args, output),
        Command::Man(args) => manual::man(&args, output),
        Command::BugReport => Ok(bug_report::bug_report(environment, open_run_dir(), output)),
        Command::Doctor(args) => doctor::doctor(args, environment, output),
    }
}
