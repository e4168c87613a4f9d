//! `bench`: lists the recorded figures and checks their files. `benchmarks/README.md` has the schema.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Outcome;
use crate::workspace::Workspace;

pub(crate) const RESULTS: &str = "benchmarks/results";
/// A recorded run is text that people read and git keeps.
pub(crate) const RESULT_BYTES_MAX: usize = 200 * 1024;
const TEXTS: [&str; 4] = ["name", "date", "commit", "driver"];
const OBJECTS: [&str; 4] = ["versions", "parameters", "samples", "baseline"];

/// Lists every recorded run; with `check`, fails when a file breaks the schema.
pub(crate) fn run(workspace: &Workspace, check: bool) -> Outcome {
    let paths = paths(workspace)?;
    if paths.is_empty() {
        println!("no run is recorded under {RESULTS}");
        return Ok(());
    }
    let mut broken = 0_usize;
    for path in &paths {
        let text = fs::read_to_string(workspace.root.join(path))?;
        let faults = match serde_json::from_str::<Value>(&text) {
            Ok(file) if check => faults(&file, text.len()),
            Ok(file) => {
                print!("{}", listing(path, &file));
                Vec::new()
            }
            Err(error) => vec![error.to_string()],
        };
        broken += faults.len();
        for fault in faults {
            println!("{}:1: {fault}; record the run again", path.display());
        }
    }
    if broken > 0 {
        return Err(format!("{broken} faults in recorded runs").into());
    }
    if check {
        println!("bench: {} files, nothing found", paths.len());
    }
    Ok(())
}

/// The files of recorded runs, relative to the root.
pub(crate) fn paths(workspace: &Workspace) -> Outcome<Vec<PathBuf>> {
    let mut paths = workspace.files()?;
    paths.retain(|path| {
        let json = path.extension().is_some_and(|extension| extension == "json");
        json && path.starts_with(RESULTS)
    });
    Ok(paths)
}

/// The names of the files with a record whose run missed a check of its own.
pub(crate) fn failed(workspace: &Workspace) -> Outcome<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for path in paths(workspace)? {
        // One that cannot be read is `--check`'s to find.
        let text = fs::read_to_string(workspace.root.join(&path))?;
        let file = serde_json::from_str::<Value>(&text).unwrap_or_default();
        if records(&file).iter().any(|record| record["status"] == "failed") {
            names.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    Ok(names)
}

/// The records of a file: a list of them, or one alone.
pub(crate) fn records(file: &Value) -> &[Value] {
    file.as_array().map_or(std::slice::from_ref(file), Vec::as_slice)
}

/// What breaks the schema in one file.
fn faults(file: &Value, size_bytes: usize) -> Vec<String> {
    let mut faults = Vec::new();
    if size_bytes > RESULT_BYTES_MAX {
        faults.push(format!("{size_bytes} bytes, more than {RESULT_BYTES_MAX}"));
    }
    if records(file).is_empty() {
        faults.push("holds no record".to_owned());
    }
    for record in records(file) {
        let name = record["name"].as_str().unwrap_or("a record without a name");
        let of = record_faults(record);
        faults.extend(of.into_iter().map(|fault| format!("{name}: {fault}")));
    }
    faults
}

fn record_faults(record: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for name in TEXTS {
        if !is_text(&record[name]) {
            faults.push(format!("`{name}` is not a text"));
        }
    }
    if !is_text(&record["gpu"]) && !is_text(&record["gpu"]["name"]) {
        faults.push("`gpu` names no GPU".to_owned());
    }
    for name in OBJECTS {
        if !record[name].is_object() {
            faults.push(format!("`{name}` is not an object"));
        }
    }
    let mut samples = Vec::new();
    collect("", &record["samples"], &mut samples);
    // A job that only says yes or no has verdicts in place of figures.
    let has_verdicts = record["checks"].as_array().is_some_and(|checks| !checks.is_empty());
    if samples.is_empty() && !has_verdicts {
        faults.push("`samples` holds no numbers".to_owned());
    }
    if record["status"] == "running" {
        faults.push("the run did not end".to_owned());
    }
    faults
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

/// The records of a file for the reader: a head line each, then its figures and those of its baseline.
fn listing(path: &Path, file: &Value) -> String {
    let mut lines = Vec::new();
    for record in records(file) {
        let field = |name: &str| record[name].as_str().unwrap_or("?").to_owned();
        let gpu = record["gpu"].as_str().or(record["gpu"]["name"].as_str());
        let count = record["gpu"]["count"].as_u64();
        let gpus = count.map_or_else(String::new, |count| format!("{count} x "));
        let head = [
            field("date"),
            format!("{gpus}{}", gpu.unwrap_or("?")),
            format!("commit {}", field("commit")),
            record["status"].as_str().unwrap_or("no status").to_owned(),
        ];
        let name = field("name");
        lines.push(format!("{name} ({}): {}", head.join(", "), path.display()));
        for (title, field) in [("", "summary"), ("baseline ", "baseline")] {
            let mut figures = Vec::new();
            collect("", &record[field], &mut figures);
            for (name, figure) in figures {
                lines.push(format!("  {title}{name}: {}", short(figure)));
            }
        }
    }
    // Each line ends, the last one too.
    lines.push(String::new());
    lines.join("\n")
}

/// Every figure in `value` by its dotted name. Of a summary of samples that is the median alone; of a
/// list, its first number, which is enough to know that there is one.
fn collect(name: &str, value: &Value, figures: &mut Vec<(String, f64)>) {
    match value {
        Value::Number(number) => {
            figures.extend(number.as_f64().map(|number| (name.to_owned(), number)));
        }
        Value::Array(values) => {
            if let Some(first) = values.first() {
                collect(name, first, figures);
            }
        }
        Value::Object(fields) => {
            if let Some(median) = fields.get("median") {
                collect(name, median, figures);
                return;
            }
            let dot = if name.is_empty() { "" } else { "." };
            for (field, value) in fields {
                collect(&format!("{name}{dot}{field}"), value, figures);
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// A number with as many digits as a reader needs.
fn short(number: f64) -> String {
    if number.abs() >= 1000.0 || number.fract() == 0.0 {
        format!("{number:.0}")
    } else {
        format!("{number:.3}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn recorded() -> Value {
        json!({
            "name": "nccl", "date": "2026-01-02", "commit": "abc1234", "status": "passed",
            "gpu": {"name": "H200", "count": 2}, "driver": "580",
            "versions": {"nccl": "2.28.9"}, "parameters": {"ranks": 2},
            "samples": {"pause_s": [0.3, 0.1, 0.2]},
            "summary": {"pause_s": {"median": 0.2, "p99": 0.3, "count": 3}, "ratio": 12},
            "baseline": {"total_s": {"median": 3.5, "p99": 4.0}},
        })
    }

    #[test]
    fn whole_record_has_no_faults_alone_and_in_a_list() {
        assert_eq!(faults(&recorded(), 100), [""; 0]);
        assert_eq!(faults(&json!([recorded(), recorded()]), 100), [""; 0]);
    }

    #[test]
    fn missing_fields_are_named() {
        let mut record = recorded();
        record["gpu"] = json!({"name": null});
        record["versions"] = json!([]);
        record["samples"] = json!({"pause_s": []});
        record["status"] = json!("running");
        assert_eq!(
            faults(&json!([record]), RESULT_BYTES_MAX + 1),
            [
                "204801 bytes, more than 204800",
                "nccl: `gpu` names no GPU",
                "nccl: `versions` is not an object",
                "nccl: `samples` holds no numbers",
                "nccl: the run did not end",
            ]
        );
        assert_eq!(faults(&json!([]), 2), ["holds no record"]);
        assert_eq!(faults(&json!("text"), 6).len(), TEXTS.len() + OBJECTS.len() + 2);
    }

    #[test]
    fn listing_gives_medians_and_the_baseline() {
        assert_eq!(
            listing(Path::new("r.json"), &json!([recorded()])),
            "nccl (2026-01-02, 2 x H200, commit abc1234, passed): r.json\n  \
             pause_s: 0.200\n  \
             ratio: 12\n  \
             baseline total_s: 3.500\n"
        );
    }
}
