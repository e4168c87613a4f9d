//! `sublet doctor`: is this machine able, and what is in the way?

mod gpu;
mod host;
mod sharing;

use std::process::ExitCode;

use serde::Serialize;

use crate::environment::Environment;
use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output::{self, Output};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    /// Works, but not as well as it could, or not for everything.
    Warn,
    /// Does not work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    level: Level,
    subject: String,
    /// What was found.
    finding: String,
    /// What to do about it.
    next_step: Option<String>,
}

/// All findings, for programs.
#[derive(Serialize)]
struct Findings<'a> {
    checks: &'a [Check],
}

impl Check {
    fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), finding: finding.into(), next_step: None }
    }

    fn warn(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warn, next_step: Some(next_step.into()), ..Self::ok(subject, finding) }
    }

    fn fail(
        subject: impl Into<String>,
        finding: impl Into<String>,
        next_step: impl Into<String>,
    ) -> Self {
        Self { level: Level::Fail, ..Self::warn(subject, finding, next_step) }
    }
}

pub(crate) fn doctor(
    json: bool,
    environment: &Environment,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let mut checks = gpu::checks();
    checks.extend(sharing::checks(environment));
    checks.extend(host::checks(environment));
    if json {
        output.json(&Findings { checks: &checks })?;
    } else {
        render(&checks, output);
    }
    let failed = checks.iter().any(|check| check.level == Level::Fail);
    Ok(if failed { ExitCode::from(EXIT_UNCHANGED) } else { ExitCode::SUCCESS })
}

fn render(checks: &[Check], output: &mut Output) {
    let rows = checks.iter().map(|check| {
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
    output.table(&output::table_without_header(rows));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_one_line_each_with_the_next_step_last() {
        let mut output = Output::new();
        let checks =
            [Check::ok("driver", "CUDA 13.0"), Check::fail("library", "not found", "build it")];
        render(&checks, &mut output);
        let lines: Vec<_> = output.text().lines().collect();
        assert_eq!(lines, ["ok    driver   CUDA 13.0", "FAIL  library  not found: build it"]);
    }
}
