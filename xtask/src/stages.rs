//! A run in stages: each is timed, all are run, and the failed ones are named at the end.

use std::time::{Duration, Instant};

use crate::Outcome;

/// Runs stages and remembers how they ended.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    lines: Vec<String>,
    failed: Vec<&'static str>,
    summaries: Vec<String>,
}

impl Stages {
    /// Runs one stage, prints how it ended and how long it took, and returns whether it succeeded.
    ///
    /// A stage may add the summary lines of its runner to the list it is given; they are printed last.
    pub(crate) fn run(
        &mut self,
        name: &'static str,
        stage: impl FnOnce(&mut Vec<String>) -> Outcome,
    ) -> bool {
        println!("== {name}");
        let begin = Instant::now();
        let mut summary = Vec::new();
        let result = stage(&mut summary);
        let elapsed = seconds(begin.elapsed());
        if !summary.is_empty() {
            self.summaries.push(format!("{name}:"));
            self.summaries.extend(summary);
        }
        let (line, succeeded) = match result {
            Ok(()) => (format!("== {name}: ok in {elapsed}"), true),
            Err(error) => {
                self.failed.push(name);
                (format!("== {name}: FAILED in {elapsed}: {error}"), false)
            }
        };
        println!("{line}");
        self.lines.push(line);
        succeeded
    }

    /// Notes a stage that cannot run because an earlier one failed: that counts as failed too.
    pub(crate) fn blocked(&mut self, name: &'static str, by: &str) {
        self.run(name, |_| Err(format!("not run, since {by} failed").into()));
    }

    /// Notes work that this run leaves out on purpose.
    pub(crate) fn not_run(&mut self, what: &str) {
        self.summaries.push(format!("not run here: {what}"));
    }

    /// Prints the stages again, the runners' summary lines and what was not run; fails if a stage did.
    pub(crate) fn finish(self) -> Outcome {
        println!("\n== all stages");
        for line in &self.lines {
            println!("{}", line.trim_start_matches("== "));
        }
        println!("\n== what the runners say");
        for line in &self.summaries {
            println!("{line}");
        }
        if self.failed.is_empty() {
            Ok(())
        } else {
            Err(format!("failed: {}", self.failed.join(", ")).into())
        }
    }
}

fn seconds(elapsed: Duration) -> String {
    format!("{:.1} s", elapsed.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_stage_fails_the_run_but_later_ones_still_run() {
        let mut stages = Stages::default();
        assert!(!stages.run("one", |_| Err("broken".into())));
        assert!(stages.run("two", |_| Ok(())));
        stages.blocked("three", "one");
        let error = stages.finish().unwrap_err().to_string();
        assert_eq!(error, "failed: one, three");
    }
}
