//! `sublet doctor`: checks whether this machine can run Sublet, and what prevents it.

mod gpu;
mod host;
mod sharing;

use std::process::ExitCode;

use serde::Serialize;

use crate::args::ShowArgs;
use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output::{self, Output};
use crate::units;

/// All findings, for programs.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Findings<'a> {
    /// Can this machine run Sublet?
    able: bool,
    checks: &'a [Check],
}

pub(crate) fn doctor(
    how: ShowArgs,
    environment: &Environment,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let mut checks = gpu::checks();
    checks.extend(sharing::checks(environment));
    checks.extend(host::checks(environment));
    let able = checks.iter().all(|check| check.level != Level::Fail);
    if how.json {
        output.json(&Findings { able, checks: &checks })?;
    } else {
        render(&checks, how.verbose, output);
    }
    Ok(if able { ExitCode::SUCCESS } else { ExitCode::from(EXIT_UNCHANGED) })
}

/// Prints the problems or all findings, and a summary.
fn render(checks: &[Check], all: bool, output: &mut Output) {
    let rows = checks.iter().filter(|check| all || check.level != Level::Ok).map(|check| {
        let level = match check.level {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        let text = match &check.next_step {
            Some(next_step) => format!("{}: {next_step}", check.finding),
            None => check.finding.clone(),
        };
        [level.to_owned(), check.subject.clone(), text]
    });
    // The lines are not cut to the width of a terminal, because the next step is at their end.
    output.lines(output::table_without_header(rows).lines().map(|line| line.trim_end().to_owned()));
    let count = |level| checks.iter().filter(|check| check.level == level).count();
    let details = if all { "" } else { "; sublet doctor -v lists all checks" };
    let rest = format!(
        "{} ok, {}{details}",
        units::counted(count(Level::Ok), "check is", "checks are"),
        units::counted(count(Level::Warn), "warning", "warnings"),
    );
    let failed = checks.iter().filter(|check| check.level == Level::Fail);
    let failed: Vec<_> = failed.map(|check| check.subject.as_str()).collect();
    output.line(if failed.is_empty() {
        format!("this machine is able: {rest}")
    } else {
        format!("not able, because of {}: {rest}", failed.join(", "))
    });
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) enum Level {
    Ok,
    /// Works, but not as well as it could, or not for everything.
    Warn,
    /// Does not work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(super) struct Check {
    pub(super) level: Level,
    pub(super) subject: String,
    /// The finding, in words.
    pub(super) finding: String,
    /// The action that is proposed about it.
    pub(super) next_step: Option<String>,
}

impl Check {
    pub(super) fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), finding: finding.into(), next_step: None }
    }

    pub(super) fn warn(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warn, next_step: Some(next_step.into()), ..Self::ok(subject, finding) }
    }

    pub(super) fn fail(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Fail, ..Self::warn(subject, finding, next_step) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_one_line_each_with_the_next_step_last_and_a_verdict_ends_them() {
        let said = |checks: &[Check], all| {
            let mut output = Output::default();
            render(checks, all, &mut output);
            output.into_lines()
        };
        let checks =
            [Check::ok("driver", "CUDA 13.0"), Check::fail("library", "not found", "build it")];
        let rest = "1 check is ok, 0 warnings";
        let verdict = format!("not able, because of library: {rest}");
        let fail = "FAIL  library  not found: build it";
        assert_eq!(said(&checks, true), ["ok    driver   CUDA 13.0", fail, &verdict]);
        let short = format!("{verdict}; sublet doctor -v lists all checks");
        assert_eq!(said(&checks, false), [fail, &short]);
        let fine = format!("this machine is able: {rest}; sublet doctor -v lists all checks");
        assert_eq!(said(&checks[..1], false), [fine]);
    }
}
