//! What the `sublet` command prints for programs (`--json`), and its exit code, which must say the same.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;

use serde::Deserialize;
use sublet_tests::{Outcome, Trouble};
use tenants::code::Code;

use super::{Refusal, Verdict};

/// Exit codes, as `docs/json.md` has them.
const DONE: i32 = 0;
const UNCHANGED: i32 = 1;
const PARTIAL: i32 = 3;
const CALLED_OFF: i32 = 130;

/// The document of a pause or resume, or of half a swap; the fields that matter here.
#[derive(Debug, Deserialize)]
struct Change {
    outcome: String,
    report: Option<Report>,
    error: Option<String>,
    failures: Vec<MemberFailure>,
    missing_device_bytes: Option<u64>,
    shortages: Vec<Shortage>,
    unchanged: bool,
}

#[derive(Debug, Deserialize)]
struct Report {
    stages: Vec<serde::de::IgnoredAny>,
    notes: Vec<String>,
    losses: Vec<serde::de::IgnoredAny>,
    stayed_bytes: u64,
    not_deep: Vec<serde::de::IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct MemberFailure {
    failure: Failure,
}

#[derive(Debug, Deserialize)]
struct Failure {
    code: Code,
}

#[derive(Debug, Deserialize)]
struct Shortage {
    needed_bytes: u64,
    free_bytes: u64,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Document {
    // First: any object could be a swap of which nothing was done.
    Change(Box<Change>),
    Swap { paused: Option<Box<Change>>, resumed: Option<Box<Change>> },
}

impl Change {
    fn has_failed(&self) -> bool {
        self.outcome == "failed"
    }

    fn losses(&self) -> usize {
        self.report.as_ref().map_or(0, |report| report.losses.len())
    }

    fn has_stayed(&self) -> bool {
        let is_left = |report: &Report| report.stayed_bytes > 0 || !report.not_deep.is_empty();
        self.report.as_ref().is_some_and(is_left)
    }

    fn refusal(self, both_are_paused: bool) -> Refusal {
        let shortages = self.shortages.iter();
        Refusal {
            text: self.error.unwrap_or_default(),
            left_unchanged: self.unchanged,
            both_are_paused,
            codes: self.failures.iter().map(|failed| failed.failure.code).collect(),
            missing_device_bytes: self.missing_device_bytes,
            shortages: shortages
                .map(|shortage| shortage.needed_bytes.saturating_sub(shortage.free_bytes))
                .collect(),
        }
    }
}

/// What came of the command. An error where it printed no document, or one that its exit code does not go with.
pub(super) fn read(output: &Output) -> Outcome<Verdict> {
    let said = || {
        let [out, err] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        format!("{}: {out}{err}", output.status)
    };
    if output.status.signal().is_some() && output.stdout.is_empty() {
        // Before it handles signals it has asked nobody for anything.
        let refusal = Refusal { text: said(), left_unchanged: true, ..Refusal::default() };
        return Ok(Verdict::Refused(refusal));
    }
    let document: Document = serde_json::from_slice(&output.stdout)
        .map_err(|error| Trouble::new(format!("not a document: {error}; {}", said())))?;
    let (mut halves, is_swap) = match document {
        Document::Change(change) => (vec![change], false),
        Document::Swap { paused, resumed } => {
            (paused.into_iter().chain(resumed).collect::<Vec<_>>(), true)
        }
    };
    let losses: usize = halves.iter().map(|half| half.losses()).sum();
    let is_partial = losses > 0 || halves.iter().any(|half| half.has_stayed());
    let count = halves.len();
    let last = halves.pop().ok_or_else(|| Trouble::new(format!("nothing was done; {}", said())))?;
    let (is_done, is_unchanged) = (!last.has_failed(), last.unchanged);
    let overlapped =
        last.report.as_ref().is_some_and(|report| is_swap && !report.stages.is_empty());
    // Of a swap, both halves are told of where the second was tried.
    let both_are_paused = is_swap && count == 2 && !is_done;
    let fits = match output.status.code() {
        // What stays of the first tenant is no fault of a swap in which the second came.
        Some(DONE) => is_done && (!is_partial || (is_swap && losses == 0)),
        Some(UNCHANGED | CALLED_OFF) => !is_done && is_unchanged && !both_are_paused,
        // Processes may have been lost by a swap that went back.
        Some(PARTIAL) => is_partial || !is_unchanged || both_are_paused || (is_swap && !is_done),
        Some(_) | None => false,
    };
    if !fits {
        return Err(Trouble::new(format!("code and document differ; {}", said())));
    }
    Ok(if is_done {
        let notes = last.report.map(|report| report.notes).unwrap_or_default();
        Verdict::Done { losses, overlapped, notes }
    } else {
        Verdict::Refused(last.refusal(both_are_paused))
    })
}
