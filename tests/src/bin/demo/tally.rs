//! What was done and how long it took.

use std::collections::BTreeMap;

use serde_json::Value;
use sublet_tests::{MIB, Outcome, Trouble};
use tenants::wire::Phase;

use crate::watch::TENANTS;

/// Times by phase; the whole is under no phase.
type Times = BTreeMap<Option<Phase>, Vec<u64>>;

/// Everything that the verdict says.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) rounds: u64,
    pub(crate) processes: usize,
    pub(crate) verified_bytes: u64,
    /// Steps of each job, as in [`TENANTS`].
    pub(crate) steps: [u64; TENANTS.len()],
    /// By action and tenant.
    times: BTreeMap<(&'static str, String), Times>,
}

impl Tally {
    /// Notes one report of the command; returns how long it took.
    ///
    /// # Errors
    /// When the report is not one of something done, or says that something was lost.
    pub(crate) fn note(
        &mut self,
        action: &'static str,
        tenant: &str,
        document: &Value,
    ) -> Outcome<u64> {
        let report = &document["report"];
        let lost = report["losses"].as_array().is_none_or(|losses| !losses.is_empty());
        let wall_us = report["wall_us"].as_u64().filter(|_| !lost);
        let wall_us =
            wall_us.ok_or_else(|| Trouble::new(format!("{action} {tenant}: {document}")))?;
        let times = self.times.entry((action, tenant.to_owned())).or_default();
        times.entry(None).or_default().push(wall_us);
        for phase in report["phases"].as_array().into_iter().flatten() {
            let name: Phase = serde_json::from_value(phase["phase"].clone())?;
            let wall_us = phase["wall_us"].as_u64().unwrap_or(0);
            times.entry(Some(name)).or_default().push(wall_us);
        }
        Ok(wall_us)
    }

    fn count(&self, action: &str) -> usize {
        let of_action = self.times.iter().filter(|((name, _), _)| *name == action);
        of_action.filter_map(|(_, times)| times.get(&None)).map(Vec::len).sum()
    }

    /// The last lines.
    pub(crate) fn verdict(&self) -> Vec<String> {
        let mut lines = vec![format!("{:<22}{:>12}{:>12}", "MEDIAN TIME", TENANTS[0], TENANTS[1])];
        for action in ["pause", "resume"] {
            lines.extend(self.table(action));
        }
        let [train, infer] = self.steps;
        lines.push(String::new());
        lines.push(format!(
            "OK: {} pauses and {} resumes of {} processes in {} rounds; train did {train} steps, infer {infer}.",
            self.count("pause"),
            self.count("resume"),
            self.processes,
            self.rounds,
        ));
        lines.push(format!(
            "    {} MiB compared byte for byte, no difference. No byte is left on any GPU.",
            self.verified_bytes / MIB
        ));
        lines
    }

    fn table(&self, action: &'static str) -> Vec<String> {
        let times_of = |tenant: &str| self.times.get(&(action, tenant.to_owned()));
        let mut phases: Vec<Option<Phase>> = TENANTS
            .iter()
            .filter_map(|tenant| times_of(tenant))
            .flat_map(BTreeMap::keys)
            .copied()
            .collect();
        phases.sort_unstable();
        phases.dedup();
        let row = |phase: &Option<Phase>| {
            let name = match phase {
                Some(phase) => format!("  {}", phase.label()),
                None => action.to_owned(),
            };
            let cell = |tenant: &str| {
                let times = times_of(tenant).and_then(|times| times.get(phase));
                times.map_or_else(|| "-".to_owned(), |times| millis(median(times)))
            };
            format!("{name:<22}{:>12}{:>12}", cell(TENANTS[0]), cell(TENANTS[1]))
        };
        phases.iter().map(row).collect()
    }
}

/// The middle one of `times`, or 0 of none.
fn median(times: &[u64]) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0)
}

/// A time in milliseconds, for people.
pub(crate) fn millis(micros: u64) -> String {
    let (whole, tenths) = (micros / 1000, micros % 1000 / 100);
    if whole < 10 { format!("{whole}.{tenths} ms") } else { format!("{whole} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_become_medians_by_phase_and_tenant() {
        let mut tally = Tally::default();
        for wall_us in [30_000, 10_000, 2_500] {
            let phase = serde_json::json!({ "phase": "Drain", "wall_us": wall_us / 10 });
            let report = serde_json::json!({ "wall_us": wall_us, "phases": [phase], "losses": [] });
            let document = serde_json::json!({ "report": report });
            tally.note("pause", "train", &document).unwrap();
        }
        let lines = tally.verdict();
        assert_eq!(lines[1], "pause                        10 ms           -");
        assert_eq!(lines[2], "  drain                     1.0 ms           -");
        assert!(lines[4].starts_with("OK: 3 pauses and 0 resumes"));
    }

    #[test]
    fn a_report_with_losses_is_trouble() {
        let report = serde_json::json!({ "wall_us": 1, "phases": [], "losses": ["process 1"] });
        let document = serde_json::json!({ "report": report });
        assert!(Tally::default().note("pause", "train", &document).is_err());
    }
}
