//! `bench --draw`: the picture of the README from a recorded race, by the same program that draws it where the race is run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::bench::{self, RESULTS};
use crate::workspace::Workspace;
use crate::{Outcome, process};

const WRITER: &str = "benchmarks/jobs/race_picture.py";
const PICTURE: &str = "docs/race.svg";

/// Draws `record`, or the latest race that is recorded.
pub(crate) fn draw(workspace: &Workspace, record: Option<&Path>) -> Outcome {
    let record = match record {
        Some(record) => record.to_owned(),
        None => latest(workspace)?,
    };
    let mut writer = workspace.command("python3");
    process::run(writer.arg(WRITER).arg(&record).arg(PICTURE))?;
    println!("{PICTURE} is drawn from {}", record.display());
    Ok(())
}

fn latest(workspace: &Workspace) -> Outcome<PathBuf> {
    let mut races = Vec::new();
    for path in bench::paths(workspace)? {
        let file: Value = serde_json::from_str(&fs::read_to_string(workspace.root.join(&path))?)?;
        if let Some(date) = race_date(&file) {
            races.push((date, path));
        }
    }
    let latest = races.into_iter().max().map(|(_, path)| path);
    latest.ok_or_else(|| {
        format!("no race is recorded in {RESULTS}; name a file: --draw RECORD").into()
    })
}

/// When the race of a file began, as its record says; `None` where it holds no race.
fn race_date(file: &Value) -> Option<String> {
    let race = bench::records(file).iter().find(|record| record["figures"].is_array())?;
    race["date"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn race_is_told_from_other_records_by_its_figures() {
        let race = json!({"name": "race", "date": "2026-01-02", "figures": []});
        let other = json!({"name": "nccl", "date": "2026-01-03"});
        assert_eq!(race_date(&json!([other, race])), Some("2026-01-02".to_owned()));
        assert_eq!(race_date(&race), Some("2026-01-02".to_owned()));
        assert_eq!(race_date(&json!([other])), None);
        assert_eq!(race_date(&json!([])), None);
    }
}
